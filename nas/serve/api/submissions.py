"""Studies submitted to the coordinator: each runs as its own `nas launch` process, which survives the coordinator.

A process holds its study's lock file while it runs. A restarted coordinator watches studies with a held lock and
restarts the others with `--resume`. Results are in the database, as with any launch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.logs import bound_log, end_of, without_secrets
from nas.core.space import SearchSpace
from nas.infra.store import studies
from nas.infra.store.rows import Study, StudyState
from nas.infra.store.store import Store
from nas.infra.web.errors import Conflict
from nas.measure.devices.attachments import own_attachments
from nas.measure.farm.farm import LOCAL, find_name, known_devices, this_machine
from nas.search.spaces import parse_space
from nas.search.spaces.yaml_text import KeyPath
from nas.search.study.check import installed
from nas.search.study.estimate import Estimate, estimate
from nas.search.study.proposals import require_studies

log = logging.getLogger(__name__)
PROGRAM = "nas.cli"
"""Module that is run as `nas launch`."""
FILE = "space.yaml"
"""Name of a submitted text in messages."""
_TAIL_BYTES = 2000
_BEGIN = b"==== nas launch ====\n"
"""Line of a log before what a process prints."""
_POLL_S = 1.0
_LONG_RUN_S = 600.0
"""Run time that resets the count of tries."""
_MAX_TRIES = 6
_BACKOFF_S = 10.0
"""Before the second try; each further one waits twice as long."""
_LONGEST_BACKOFF_S = 600.0
_REFUSED = frozenset({1, 2, 3})
"""Exit codes of `nas launch` that a retry would not change."""
_NOT_INHERITED = ("NAS_SERVER", "NAS_TOKEN")
"""Environment variables with which a process would submit its study instead of running it."""
_NO_LIBRARY = (
    "a submitted study cannot name files of the coordinator, such as the scores of a library; start it with"
    " `nas launch` on the machine that holds them"
)
_NO_FILES = "a submitted study trains on the corpus 'default' or 'installed': it cannot name files of the coordinator"
Order = Literal["run", "pause", "stop"]


class SubmissionState(StrEnum):
    """queued: waits for a slot or for its next try. running: a process runs it. ended: nothing more is due."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Submission(BaseModel):
    """A submitted study and its state.

    Args:
        study: its name.
        space: name of its space.
        space_sha256: of the YAML text.
        trials: how many layouts to try; None: as the space says.
        warm_start: earlier studies to learn from first.
        submitted_by: name of the API token.
        submitted: seconds since the epoch.
        state: queued, running or ended.
        stop: a user requested a stop.
        tries: processes in a row that ended soon without finishing it.
        not_before: when the next one may start, in seconds since the epoch.
        started: when the last one did.
        exit_code: of the last process; negative: the signal that killed it; None if unknown.
        message: why it ended, or is retried.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    study: str
    space: str
    space_sha256: str
    trials: int | None = None
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
    def has_ended(self) -> bool:
        """Whether nothing more is due."""
        return self.state is SubmissionState.ENDED

    def same_request(self, other: Submission) -> bool:
        """Returns whether both request the same study, space and options."""
        wants = ("study", "space_sha256", "trials", "warm_start")
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

    @property
    def record(self) -> Path:
        """The file of the submission."""
        return self.path / "submission.json"

    def read(self) -> Submission | None:
        """Reads the submission; None if nothing was submitted under this name.

        Raises:
            InfrastructureFailed: the file is damaged, or this user cannot read it.
        """
        path = self.record
        try:
            return Submission.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise InfrastructureFailed(f"{path} is damaged or of another hilnas: {error.errors()[0]['msg']}") from error

    def write(self, submission: Submission) -> None:
        """Replaces the submission."""
        write_durably(self.record, submission.model_dump_json(indent=1).encode())

    def create(self, submission: Submission, space: str) -> None:
        """Stores a new submission; its record is written last, and makes it valid."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self.space, space.encode())
        self.write(submission)

    def forget(self) -> None:
        """Removes the submission of a study that was deleted, unless a process runs it: over another database."""
        if self.record.is_file() and (lock := self.lock()) is not None:
            lock.close()
            self.record.unlink(missing_ok=True)

    def lock(self) -> IO[bytes] | None:
        """Takes the study's lock, held until the file and all copies of it are closed; None if a process has it."""
        file = (self.path / "launch.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    @property
    def log(self) -> Path:
        """What the processes printed."""
        return self.path / "launch.log"

    def open_log(self) -> IO[bytes]:
        """Opens the log for a new process to append to, after a line that separates it from earlier ones."""
        file = self.log.open("ab", buffering=0)
        file.write(_BEGIN)
        return file

    def log_tail(self) -> str:
        """Returns the end of what the last process printed, without secrets; empty if there is none."""
        try:
            _, _, text = end_of(self.log, _TAIL_BYTES).rpartition(_BEGIN)
        except FileNotFoundError:
            return ""
        return without_secrets(text.decode(errors="replace").strip())


class StudyProcess(Protocol):
    """Starts the process of a study; see `LaunchProcess`."""

    def start(
        self, folder: SubmissionFolder, submission: Submission, lock: IO[bytes], *, resume: bool
    ) -> subprocess.Popen[bytes]: ...


class LaunchProcess:
    """Starts the processes of studies.

    Args:
        store: the database that they use.
        home: their `$NAS_HOME`.
    """

    def __init__(self, store: Store, home: Path) -> None:
        # Not as an argument: the URL may contain a password, and all users can read arguments.
        environment = {"NAS_HOME": str(home), "NAS_DB": store.engine.url.render_as_string(hide_password=False)}
        self._environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_INHERITED
        } | environment

    def start(
        self, folder: SubmissionFolder, submission: Submission, lock: IO[bytes], *, resume: bool
    ) -> subprocess.Popen[bytes]:
        """Starts a process that holds `lock` until it ends, also if this one ends first."""
        argv = [sys.executable, "-m", PROGRAM, "launch", "--space", str(folder.space), "--study", submission.study]
        argv += ["--yes"]
        argv += ["--trials", str(submission.trials)] if submission.trials is not None else []
        argv += ["--resume"] * resume
        argv += [part for name in submission.warm_start for part in ("--warm-start", name)]
        with folder.open_log() as out:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                env=self._environment,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )


class SubmittedStudies:
    """Starts, watches and restarts the processes in a thread, while the context is open; afterwards they keep running.

    Args:
        store: the database that they use.
        home: `$NAS_HOME`, where the studies' folders are.
        process: starts the process of a study.
        at_once: how many run in parallel; a paused one counts.
    """

    def __init__(self, store: Store, home: Path, process: StudyProcess, *, at_once: int = 2) -> None:
        self._store, self._home, self._process, self._at_once = store, home, process, at_once
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._unreadable: set[Path] = set()
        self._changing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="submitted studies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def submit(
        self, study: str, space: str, *, trials: int | None = None, warm_start: tuple[str, ...] = (), by: str
    ) -> Submission:
        """Accepts a study; submitting an equal one again returns the existing one.

        Args:
            study: its name.
            space: YAML text.
            trials: how many layouts to try; None: as the space says.
            warm_start: earlier studies to learn from first.
            by: name of the API token.

        Raises:
            InvalidInput: the space cannot be searched here, a line for each problem as `space.yaml:line: message`; or
                there is no such earlier study.
            Conflict: another study has the name.
        """
        studies.check_new_name(study)
        try:
            require_studies(self._store, warm_start, study)
        except UnknownName as error:
            raise InvalidInput(error.message, where="warm_start") from None
        new = Submission(
            study=study,
            space=check_space(self._store, space).name,
            space_sha256=hashlib.sha256(space.encode()).hexdigest(),
            trials=trials,
            warm_start=warm_start,
            submitted_by=by,
            submitted=self._store.now(),
        )
        with self._changing:
            earlier, row = self.find(study), self.row(study)
            in_use = row is not None or (earlier is not None and not earlier.has_ended)
            if earlier is not None and in_use and earlier.same_request(new):
                return earlier
            if in_use:
                raise Conflict(f"another study is named {study!r}; choose another name")
            self._folder(study).create(new, space)
        _log("study submitted", study, by=by)
        return new

    def find(self, study: str) -> Submission | None:
        """Returns a submitted study; None if there is none of this name.

        Raises:
            InfrastructureFailed: its record is damaged.
        """
        studies.check_name(study)
        return self._folder(study).read()

    def find_readable(self, study: str) -> Submission | None:
        """Returns the same as `find`; None also for a damaged record, so that a list shows the others."""
        try:
            return self.find(study)
        except InfrastructureFailed:  # `poll` logs it
            return None

    def submitter(self, study: str) -> str | None:
        """Returns the name of the API token that submitted a study; None if that is not known."""
        submission = self.find_readable(study)
        return None if submission is None else submission.submitted_by

    def log_tail(self, study: str) -> str | None:
        """Returns the end of what the process of a submitted study printed; None: nothing, or it was not submitted."""
        return None if self.find_readable(study) is None else self._folder(study).log_tail() or None

    def row(self, study: str) -> Study | None:
        """Returns the study in the database; None until its process has created it."""
        try:
            return studies.get(self._store, study)
        except UnknownName:
            return None

    def not_begun(self) -> list[Submission]:
        """Returns the submitted studies that are not in the database yet, by name."""
        return [submission for submission in self._all() if self.row(submission.study) is None]

    def steer(self, study: str, order: Order) -> None:
        """Requests that a study runs, pauses or stops, on whichever host it was launched.

        Raises:
            UnknownName: there is no such study.
            Conflict: it has not begun or has ended.
        """
        with self._changing:
            submission = self.find(study)
            row = self.row(study) if submission is not None else studies.get(self._store, study)
            if order == "run":
                self._run_again(study, submission, row)
                return
            if row is not None:
                studies.set_desired_state(self._store, row.id, order)
            elif order == "pause":
                raise Conflict(f"study {study!r} has not begun, so it cannot be paused; stop it, or wait")
            if submission is not None and order == "stop":
                self._note_stop(submission)

    def poll(self) -> None:
        """Records ended processes, and starts those that are due."""
        with self._changing:
            running = [
                submission for submission in self._all() if not submission.has_ended and self._is_running(submission)
            ]
            free = self._at_once - len(running)
            now = self._store.now()
            queued = [submission for submission in self._all() if submission.state is SubmissionState.QUEUED]
            for submission in sorted(queued, key=lambda waiting: waiting.submitted):
                # One that was started in the future: the clock was set back since.
                due = submission.not_before <= now or (submission.started or 0.0) > now
                if free > 0 and due and self._start(submission):
                    free -= 1

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
            except (NasError, OSError) as error:
                log.warning("cannot watch submitted studies: %s", error)
            self._stop.wait(_POLL_S)

    def _all(self) -> list[Submission]:
        submissions = []
        for path in sorted((self._home / "studies").glob("*/submission.json")):
            try:
                submission = SubmissionFolder(path.parent).read()
            except InfrastructureFailed as error:
                if path not in self._unreadable:
                    log.error("%s", error)
                self._unreadable.add(path)
            else:
                submissions += [submission] if submission is not None else []
        return submissions

    def _folder(self, study: str) -> SubmissionFolder:
        return SubmissionFolder(self._home / "studies" / study)

    def _run_again(self, study: str, submission: Submission | None, row: Study | None) -> None:
        if row is not None and row.state is StudyState.COMPLETE:
            raise Conflict(f"study {study!r} is complete")
        working = (StudyState.RUNNING, StudyState.PAUSED, StudyState.NEW)
        at_work = row is not None and studies.condition(self._store, row).state in working
        if row is not None and (at_work or submission is not None):
            studies.set_desired_state(self._store, row.id, "run")
        elif submission is None:
            raise Conflict(f"study {study!r} was not submitted; resume it where it was launched: nas launch --resume")
        if submission is not None:
            fresh = {"stop": False, "tries": 0, "not_before": 0.0}
            again = {"state": SubmissionState.QUEUED, "message": None} if submission.has_ended else {}
            self._folder(study).write(submission.model_copy(update=fresh | again))

    def _note_stop(self, submission: Submission) -> None:
        change: dict[str, object] = {"stop": True}
        if submission.state is SubmissionState.QUEUED:
            change |= {"state": SubmissionState.ENDED, "message": "stopped while it waited"}
        self._folder(submission.study).write(submission.model_copy(update=change))

    def _is_running(self, submission: Submission) -> bool:
        folder = self._folder(submission.study)
        process = self._processes.get(submission.study)
        code = process.poll() if process is not None else None
        if process is None or code is not None:
            lock = folder.lock()
            if lock is not None:
                lock.close()
                self._processes.pop(submission.study, None)
                if submission.state is SubmissionState.RUNNING:
                    self._note_end(folder, submission, code)
                return False
        self._supervise(folder, submission)
        return True

    def _supervise(self, folder: SubmissionFolder, submission: Submission) -> None:
        """Cuts a running study's log, and repeats a stop request that came before the study was in the database."""
        bound_log(folder.log)
        if submission.state is not SubmissionState.RUNNING:
            folder.write(submission.model_copy(update={"state": SubmissionState.RUNNING}))
        row = self.row(submission.study)
        if submission.stop and row is not None and row.desired_state != "stop":
            studies.set_desired_state(self._store, row.id, "stop")

    def _start(self, submission: Submission) -> bool:
        folder = self._folder(submission.study)
        lock = folder.lock()
        if lock is None:
            return False
        resume = self.row(submission.study) is not None
        started = {"state": SubmissionState.RUNNING, "started": self._store.now(), "exit_code": None, "message": None}
        with lock:
            folder.write(submission.model_copy(update=started))
            process = self._process.start(folder, submission, lock, resume=resume)
        self._processes[submission.study] = process
        _log("study resumed" if resume else "study started", submission.study, pid=process.pid)
        return True

    def _note_end(self, folder: SubmissionFolder, submission: Submission, code: int | None) -> None:
        """Records the end of a process; `code` is None if an earlier coordinator had started it."""
        row = self.row(submission.study)
        now = self._store.now()
        tries = 1 if now - (submission.started or 0.0) >= _LONG_RUN_S else submission.tries + 1
        change: dict[str, object] = {"state": SubmissionState.ENDED, "exit_code": code, "tries": tries}
        desired = "stop" if submission.stop else row.desired_state if row is not None else "run"
        failed = row is not None and row.state is StudyState.FAILED
        if row is not None and row.state is StudyState.COMPLETE:
            change["message"] = None
        elif desired != "run":
            change["message"] = "stopped" if desired == "stop" else "its process ended while it was paused"
        elif code in _REFUSED or tries > _MAX_TRIES or (code is None and failed):
            change["message"] = folder.log_tail() or f"ended with exit code {code}"
        else:
            change["state"] = SubmissionState.QUEUED
            change["not_before"] = now + min(_BACKOFF_S * 2 ** (tries - 1), _LONGEST_BACKOFF_S)
            change["message"] = f"ended with exit code {code}; it is retried. {folder.log_tail()}".strip()
        folder.write(submission.model_copy(update=change))
        _log("study's process ended", submission.study, exit_code=code, next=change["state"])


def check_space(store: Store, text: str, draw_s: float = math.inf) -> SearchSpace:
    """Parses and checks the space in YAML `text`.

    Args:
        store: has the devices.
        text: of the space.
        draw_s: seconds after which a space of which no layout was found yet is refused.

    Raises:
        InvalidInput: it cannot be searched here; a line for each problem, as `space.yaml:line: message`.
    """
    checks = installed(known_devices(store, own_attachments().read()), draw_s)

    def further(value: Any, choices: SearchSpace | None) -> Iterator[tuple[KeyPath, str]]:
        yield from checks(value, choices)
        quality = value.get("quality") if isinstance(value, dict) else None
        if isinstance(quality, dict) and not isinstance(quality.get("corpus", ""), str):
            yield ("quality", "corpus"), _NO_FILES
        for key in ("from", "library"):
            if isinstance(quality, dict) and key in quality:
                yield ("quality", key), _NO_LIBRARY

    return parse_space(text, FILE, further)


def estimate_space(store: Store, space: SearchSpace, trials: int | None) -> Estimate:
    """Estimates how long a study of a space takes here; `trials` None: as many as the space says."""
    devices = known_devices(store, own_attachments().read())
    ids = {name: this_machine().id if name == LOCAL else find_name(name, devices) for name in space.devices}
    return estimate(store, space, trials or space.search.trials, ids, len(os.sched_getaffinity(0)))


def _log(what: str, study: str, **fields: object) -> None:
    log.info(what, extra={"fields": {"study": study, **fields}})
