"""The coordinator's Ed25519 key: made on first use, kept in its home, pinned by its agents."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from nas.core.durable import locked, read_private, write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.manifest import RunnerManifest, SignedManifest, signed_bytes

KEY_FILE = "signing.key"


class SigningKey:
    """Signs runner manifests."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """What agents pin: 64 hex digits."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, manifest: RunnerManifest) -> SignedManifest:
        """The manifest's text with its signature."""
        text = manifest.to_text()
        return SignedManifest(text=text, key=self.public, signature=self._private.sign(signed_bytes(text)).hex())

    def to_pem(self) -> bytes:
        """PKCS #8, not encrypted."""
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def open_key(home: Path) -> SigningKey:
    """The key of this home; made where there is none. Safe for several processes at once.

    Raises:
        InfrastructureFailed: see `find_key`.
    """
    with locked(home / f"{KEY_FILE}.lock"):
        key = find_key(home)
        if key is None:
            key = SigningKey.generate()
            write_durably(home / KEY_FILE, key.to_pem())
        return key


def find_key(home: Path) -> SigningKey | None:
    """The key of this home, if there is one.

    Raises:
        InfrastructureFailed: it cannot be read, is no Ed25519 key, or others on this machine may read it.
    """
    path = home / KEY_FILE
    pem = read_private(path)
    return None if pem is None else SigningKey(_private_key(pem, path))


def _private_key(pem: bytes, path: Path) -> Ed25519PrivateKey:
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise InfrastructureFailed(
            f"{path} holds no Ed25519 key: restore it, or remove it for a new one, which agents must pin anew"
        )
    return private
