"""The agent's key towards phones: RSA 2048, as adb has it."""

from __future__ import annotations

import base64
import os
import socket
import struct
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa, utils

_WORDS = 2048 // 32


class AdbKey:
    """Proves to a phone who this agent is.

    Args:
        private: RSA, 2048 bits.
    """

    def __init__(self, private: rsa.RSAPrivateKey) -> None:
        self._private = private

    @classmethod
    def load(cls, path: Path) -> AdbKey:
        """The key in `path`, made (mode 0600) where there is none."""
        if not path.exists():
            _write_new(path)
        private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        assert isinstance(private, rsa.RSAPrivateKey), path
        return cls(private)

    def sign(self, token: bytes) -> bytes:
        """The answer to a phone's challenge of 20 bytes, which stands where a SHA-1 digest would."""
        return self._private.sign(token, padding.PKCS1v15(), utils.Prehashed(hashes.SHA1()))

    def public(self) -> str:
        """One line for the phone's list of keys: the modulus as Android's libcrypto_utils keeps it."""
        numbers = self._private.public_key().public_numbers()
        modulus, word = numbers.n, 1 << 32
        encoded = struct.pack("<II", _WORDS, word - pow(modulus, -1, word))
        encoded += modulus.to_bytes(4 * _WORDS, "little")
        encoded += pow(2, 2 * 32 * _WORDS, modulus).to_bytes(4 * _WORDS, "little")
        encoded += struct.pack("<I", numbers.e)
        return f"{base64.b64encode(encoded).decode()} hilnas@{socket.gethostname()}"


def _write_new(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = rsa.generate_private_key(public_exponent=65537, key_size=32 * _WORDS)
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.touch(mode=0o600)
    temporary.write_bytes(text)
    temporary.replace(path)
