"""A submitted study on disk: `$NAS_HOME/studies/NAME/`, one folder a study.

space.yaml        what was submitted
submission.json   how it stands; replaced as a whole, so that it can be read after a kill at any moment
launch.lock       locked for as long as a process runs the study, whoever started it
launch.log        what that process says, bounded; launch.log.1 is what stood there before
result.json       the report it printed at its end
"""

from __future__ import annotations

import fcntl
import os
from enum import StrEnum
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.logs import without_secrets

LOG_BYTES = 2 << 20
"""A log longer than this is cut: its newer half is kept beside it."""

_TAIL_BYTES = 2000


class SubmissionState(StrEnum):
    """queued: waits for a place, or for its next try. running: a process runs it. ended: nothing more is due."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Submission(BaseModel):
    """A study that somebody submitted, and what became of it.

    Args:
        study: its name.
        space: name of its space.
        space_sha256: of the YAML text.
        trials: how many layouts to try; None: as the space says.
        accept_noise: keep noisy measurements, marked.
        warm_start: earlier studies to learn from first.
        submitted_by: name of the API token.
        submitted: seconds since the epoch.
        state: queued, running or ended.
        stop: somebody told it to stop.
        tries: processes in a row that ended soon without finishing it.
        not_before: when the next one may start, in seconds since the epoch.
        started: when the last one did.
        exit_code: of the last process; negative: the signal that killed it; None where nobody saw it end.
        message: why it ended, or is tried again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    study: str
    space: str
    space_sha256: str
    trials: int | None = None
    accept_noise: bool = False
    warm_start: tuple[str, ...] = ()
    submitted_by: str
    submitted: float
    state: SubmissionState = SubmissionState.QUEUED
    stop: bool = False
    tries: int = 0
    not_before: float = 0.0
    started: float | None = None
    exit_code: int | None = None
    message: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is due."""
        return self.state is SubmissionState.ENDED

    def asks_for_the_same_as(self, other: Submission) -> bool:
        """Whether both ask for one study of one space with one set of options."""
        wants = ("study", "space_sha256", "trials", "accept_noise", "warm_start")
        return all(getattr(self, name) == getattr(other, name) for name in wants)


class SubmissionFolder:
    """Reads and writes one study's folder.

    Args:
        path: the folder; its name is the study's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def space(self) -> Path:
        """The submitted YAML."""
        return self.path / "space.yaml"

    def read(self) -> Submission | None:
        """How it stands; None where nothing was submitted under this name.

        Raises:
            InfrastructureFailed: it cannot be understood.
        """
        path = self.path / "submission.json"
        try:
            return Submission.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise InfrastructureFailed(f"{path} is damaged or of another hilnas: {error.errors()[0]['msg']}") from error

    def write(self, submission: Submission) -> None:
        """Replaces what `read` gives."""
        write_durably(self.path / "submission.json", submission.model_dump_json(indent=1).encode())

    def create(self, submission: Submission, space: str) -> None:
        """Keeps a new submission; it counts from the moment that its record is written, which is last."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self.space, space.encode())
        self.write(submission)

    def lock(self) -> IO[bytes] | None:
        """The study's lock, held until the file and all copies of it are closed; None where a process has it."""
        file = (self.path / "launch.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def open_log(self) -> IO[bytes]:
        """For a process to write to, whether or not anybody reads."""
        return (self.path / "launch.log").open("ab")

    def open_result(self) -> IO[bytes]:
        """For a process's report; an earlier one is gone."""
        return (self.path / "result.json").open("wb")

    def bound_log(self) -> None:
        """Cuts a log that has grown too long. Lines that are written meanwhile may be lost."""
        log = self.path / "launch.log"
        if log.stat().st_size > LOG_BYTES:
            write_durably(self.path / "launch.log.1", _end_of(log, LOG_BYTES // 2))
            os.truncate(log, 0)

    def last_words(self) -> str:
        """The end of the log, without secrets."""
        text = _end_of(self.path / "launch.log", _TAIL_BYTES).decode(errors="replace")
        return without_secrets(text.strip())


def _end_of(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read()
