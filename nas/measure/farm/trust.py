"""Which runners agents may execute: the manifest of admitted runners, and the Ed25519 key that signs it.

The key is created on first use, stored in the coordinator's home and pinned by its agents.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.canonical import canonical_json, sha256_of
from nas.core.clock import Clock
from nas.core.durable import locked, read_private, write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.plan import Runner
from nas.core.trust import RunnerManifest, SignedManifest, signed_bytes

KEY_FILE = "signing.key"
MANIFEST_FILE = "runner-manifest.json"


class SigningKey:
    """Signs runner manifests."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> SigningKey:
        """Generates a new key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """The public key, which agents pin: 64 hex digits."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, manifest: RunnerManifest) -> SignedManifest:
        """Returns the manifest's text with its signature."""
        text = manifest.to_text()
        return SignedManifest(text=text, key=self.public, signature=self._private.sign(signed_bytes(text)).hex())

    def to_pem(self) -> bytes:
        """Returns the key as PKCS #8, not encrypted."""
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class Admitted(BaseModel):
    """A runner and the folder of its files on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Runner
    folder: Path

    def fault(self) -> str | None:
        """Returns what is wrong with the files; None if they are intact."""
        for name, file in self.runner.files.items():
            path = self.folder / name
            try:
                if sha256_of(path) != file.sha256:
                    return f"{path} is not what the build's record says"
            except OSError as error:
                return f"{path}: {error.strerror}"
        return None


class _Issue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    serial: int
    admitted: tuple[Admitted, ...]
    signed: SignedManifest


class Admissions:
    """The admitted runners of one home, shared by all launches over its database, which share one agent.

    Args:
        home: has the manifest.
        key: signs it.
        clock: dates it.
    """

    def __init__(self, home: Path, key: SigningKey, clock: Clock) -> None:
        self._path = home / MANIFEST_FILE
        self._key, self._clock = key, clock

    def admit(self, runner: Runner, folder: Path) -> None:
        """Admits `runner`, and drops other records of that build, and runners whose files are missing or changed.

        Issues a manifest if that changes it.

        Raises:
            InfrastructureFailed: a file in `folder` is not what the record says, so it is not signed; or the manifest
                cannot be read.
        """
        entry = Admitted(runner=runner, folder=folder)
        if fault := entry.fault():
            raise InfrastructureFailed(f"{runner.runtime} build {runner.build[:12]}: {fault}; build it again")
        with locked(self._path.with_suffix(".lock")):
            last = self._read()
            before = last.admitted if last else ()
            others = [entry for entry in before if _name(entry.runner) != _name(runner) and not entry.fault()]
            admitted = tuple(sorted([entry, *others], key=_record))
            if last is None or last.admitted != admitted or last.signed.key != self._key.public:
                issue = self._issue(admitted, last.serial if last else 0)
                write_durably(self._path, issue.model_dump_json().encode())

    def signed(self) -> SignedManifest | None:
        """Returns the manifest for agents; None before the first runner was admitted."""
        last = self._read()
        return last.signed if last else None

    def find_file(self, sha256: str) -> Path | None:
        """Returns the path of a file of an admitted runner; None if there is none of that hash."""
        last = self._read()
        for entry in last.admitted if last else ():
            for name, file in entry.runner.files.items():
                if file.sha256 == sha256:
                    return entry.folder / name
        return None

    def _issue(self, admitted: tuple[Admitted, ...], last_serial: int) -> _Issue:
        now = self._clock.now()
        # At least the time: a home that lost its manifest, or restored an old one, stays above what agents saw.
        serial = max(int(now), last_serial + 1)
        runners = tuple(entry.runner for entry in admitted)
        manifest = RunnerManifest(serial=serial, issued_at=now, runners=runners)
        return _Issue(serial=serial, admitted=admitted, signed=self._key.sign(manifest))

    def _read(self) -> _Issue | None:
        try:
            return _Issue.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{self._path}: {error.strerror}") from error
        except ValidationError as error:
            raise InfrastructureFailed(
                f"{self._path} is damaged or of another version of hilnas: remove it, the next launch writes a new one"
            ) from error


def open_key(home: Path) -> SigningKey:
    """Returns the key of this home; creates it if there is none. Safe for several processes at once.

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
    """Returns the key of this home, if there is one; raises `InfrastructureFailed` unless it is private."""
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
            f"{path} holds no Ed25519 key: restore it, or remove it for a new one, which agents must pin again"
        )
    return private


def _name(runner: Runner) -> tuple[str, str, str]:
    return runner.runtime, runner.build, runner.target


def _record(entry: Admitted) -> str:
    return canonical_json(entry.runner.model_dump(mode="json"))
