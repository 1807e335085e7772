"""The runners that agents may run: who was admitted, where its files lie, and the signed manifest of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.canonical import canonical_json
from nas.core.clock import Clock
from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.manifest import RunnerManifest, SignedManifest
from nas.core.plan import Runner
from nas.devices.content import file_sha256
from nas.service.signing import SigningKey

MANIFEST_FILE = "runner-manifest.json"


class Admitted(BaseModel):
    """A runner and the folder of its files on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Runner
    folder: Path

    def fault(self) -> str | None:
        """What is wrong with the files, if anything is."""
        for name, file in self.runner.files.items():
            path = self.folder / name
            try:
                if file_sha256(path) != file.sha256:
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
    """The admitted runners of one home, shared by every launch over its database: whichever runs the agent serves all.

    Args:
        home: holds the manifest.
        key: signs it.
        clock: dates it.
    """

    def __init__(self, home: Path, key: SigningKey, clock: Clock) -> None:
        self._path = home / MANIFEST_FILE
        self._key, self._clock = key, clock

    def admit(self, runner: Runner, folder: Path) -> None:
        """Lets agents run `runner`, and no longer those whose files are gone or were changed.

        Nothing is issued where the manifest says so already.

        Raises:
            InfrastructureFailed: a file in `folder` is not what the record says, so it is not signed; or the manifest
                cannot be read.
        """
        wanted = Admitted(runner=runner, folder=folder)
        if fault := wanted.fault():
            raise InfrastructureFailed(f"{runner.runtime} build {runner.build[:12]}: {fault}; build it anew")
        with locked(self._path.with_suffix(".lock")):
            last = self._read()
            others = [each for each in (last.admitted if last else ()) if each.runner != runner and not each.fault()]
            admitted = _in_order([wanted, *others])
            if last is None or last.admitted != admitted or last.signed.key != self._key.public:
                issue = self._issue(admitted, last.serial if last else 0)
                write_durably(self._path, issue.model_dump_json().encode())

    def signed(self) -> SignedManifest | None:
        """What agents get; None before the first runner was admitted."""
        last = self._read()
        return last.signed if last else None

    def find_file(self, sha256: str) -> Path | None:
        """Where a file of an admitted runner lies."""
        last = self._read()
        for each in last.admitted if last else ():
            for name, file in each.runner.files.items():
                if file.sha256 == sha256:
                    return each.folder / name
        return None

    def _issue(self, admitted: tuple[Admitted, ...], last_serial: int) -> _Issue:
        now = self._clock.now()
        # Never below the time: a home that lost its manifest, or got back an old one, goes on above what agents saw.
        serial = max(int(now), last_serial + 1)
        runners = tuple(each.runner for each in admitted)
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
                f"{self._path} is damaged or of another version of hilnas: remove it, the next launch writes it anew"
            ) from error


def _in_order(admitted: Iterable[Admitted]) -> tuple[Admitted, ...]:
    return tuple(sorted(admitted, key=lambda each: canonical_json(each.runner.model_dump(mode="json"))))
