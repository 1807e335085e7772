"""Studies submitted to the coordinator: each runs as a process of its own, `nas launch`, and survives the coordinator.

A process holds its study's lock file for as long as it lives. So a coordinator that was killed finds, when it comes
back, which studies still run, and watches those; the others it starts again with `--resume`. What a study has found is
in the database, as with any launch.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import threading
from pathlib import Path
from typing import IO, Literal, Protocol, Self

from nas.core.errors import InfrastructureFailed, NasError, UnknownName
from nas.service.api_errors import Conflict
from nas.service.submission import Submission, SubmissionFolder, SubmissionState
from nas.service.submission_check import check_earlier, check_space
from nas.store import studies
from nas.store.rows import Study, StudyState
from nas.store.store import Store

log = logging.getLogger(__name__)

Order = Literal["run", "pause", "stop"]

_LOOK_S = 1.0
_LONG_RUN_S = 600.0
"""A process that lived so long was no false start."""

_MAX_TRIES = 6
_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 600.0
_REFUSED = frozenset({1, 2, 3})
"""Exit codes of `nas launch` that another try would give again."""


class StudyProcess(Protocol):
    """Starts what runs a study; see `nas.service.submission_process.LaunchProcess`."""

    def start(
        self, folder: SubmissionFolder, submission: Submission, lock: IO[bytes], *, resume: bool
    ) -> subprocess.Popen[bytes]: ...


class SubmittedStudies:
    """Starts, watches and restarts the processes, in a thread, while the context is open.

    Leaving the context leaves them running.

    Args:
        store: the database that they use.
        home: `$NAS_HOME`, where the studies' folders are.
        process: starts one.
        at_once: how many run side by side; a paused one counts.
    """

    def __init__(self, store: Store, home: Path, process: StudyProcess, *, at_once: int = 2) -> None:
        self._store, self._home, self._process, self._at_once = store, home, process, at_once
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._unreadable: set[Path] = set()
        self._changing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="submitted studies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def submit(
        self, study: str, space: str, *, trials: int | None = None, accept_noise: bool = False,
        warm_start: tuple[str, ...] = (), by: str,
    ) -> Submission:  # fmt: skip
        """Takes a study; submitting the same again gives the one that is there.

        Args:
            study: its name.
            space: YAML text.
            trials: how many layouts to try; None: as the space says.
            accept_noise: keep noisy measurements, marked.
            warm_start: earlier studies to learn from first.
            by: who submits.

        Raises:
            InvalidInput: the space cannot be searched here, a line for each problem as `space.yaml:line: message`; or
                there is no such earlier study.
            Conflict: another study has the name.
        """
        studies.check_name(study)
        check_earlier(self._store, warm_start, study)
        new = Submission(
            study=study,
            space=check_space(self._store, space).name,
            space_sha256=hashlib.sha256(space.encode()).hexdigest(),
            trials=trials,
            accept_noise=accept_noise,
            warm_start=warm_start,
            submitted_by=by,
            submitted=self._store.now(),
        )
        with self._changing:
            known, row = self.find(study), self.row(study)
            taken = row is not None or (known is not None and not known.ended)
            if known is not None and taken and known.asks_for_the_same_as(new):
                return known
            if taken:
                raise Conflict(f"another study is named {study!r}; choose another name")
            self._folder(study).create(new, space)
        _tell("study submitted", study, by=by)
        return new

    def find(self, study: str) -> Submission | None:
        """How a submitted study stands; None where none was submitted under this name."""
        studies.check_name(study)
        return self._folder(study).read()

    def row(self, study: str) -> Study | None:
        """The study in the database; None before its process has made it."""
        try:
            return studies.get(self._store, study)
        except UnknownName:
            return None

    def not_begun(self) -> list[Submission]:
        """What was submitted and is not in the database, by name."""
        return [each for each in self._all() if self.row(each.study) is None]

    def tell(self, study: str, order: Order) -> None:
        """Tells a study to run, pause or stop, wherever it was launched.

        Raises:
            UnknownName: there is no such study.
            Conflict: it has not begun, or has ended, so there is nothing to be told.
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

    def look(self) -> None:
        """Notices what ended, and starts what is due."""
        with self._changing:
            running = [each for each in self._all() if not each.ended and self._still_runs(each)]
            free = self._at_once - len(running)
            due = [each for each in self._all() if each.state is SubmissionState.QUEUED]
            for submission in sorted(due, key=lambda each: each.submitted):
                if free > 0 and submission.not_before <= self._store.now() and self._start(submission):
                    free -= 1

    def _keep_looking(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except (NasError, OSError) as error:
                log.warning("cannot look after submitted studies: %s", error)
            self._stop.wait(_LOOK_S)

    def _all(self) -> list[Submission]:
        found = []
        for path in sorted((self._home / "studies").glob("*/submission.json")):
            try:
                submission = SubmissionFolder(path.parent).read()
            except InfrastructureFailed as error:
                if path not in self._unreadable:
                    log.error("%s", error)
                self._unreadable.add(path)
            else:
                found += [submission] if submission is not None else []
        return found

    def _folder(self, study: str) -> SubmissionFolder:
        return SubmissionFolder(self._home / "studies" / study)

    def _run_again(self, study: str, submission: Submission | None, row: Study | None) -> None:
        if row is not None and row.state is StudyState.COMPLETE:
            raise Conflict(f"study {study!r} is complete")
        if row is not None and row.state in (StudyState.RUNNING, StudyState.PAUSED, StudyState.NEW):
            studies.set_desired_state(self._store, row.id, "run")
        elif submission is None:
            raise Conflict(f"study {study!r} was not submitted; go on where it was launched: nas launch --resume")
        if submission is not None:
            fresh = {"stop": False, "tries": 0, "not_before": 0.0}
            again = {"state": SubmissionState.QUEUED, "message": None} if submission.ended else {}
            self._folder(study).write(submission.model_copy(update=fresh | again))

    def _note_stop(self, submission: Submission) -> None:
        change: dict[str, object] = {"stop": True}
        if submission.state is SubmissionState.QUEUED:
            change |= {"state": SubmissionState.ENDED, "message": "stopped while it waited"}
        self._folder(submission.study).write(submission.model_copy(update=change))

    def _still_runs(self, submission: Submission) -> bool:
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
        self._attend(folder, submission)
        return True

    def _attend(self, folder: SubmissionFolder, submission: Submission) -> None:
        """What a running study needs: a bounded log, and to be told again what it could not hear at its start."""
        folder.bound_log()
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
        _tell("study resumed" if resume else "study started", submission.study, pid=process.pid)
        return True

    def _note_end(self, folder: SubmissionFolder, submission: Submission, code: int | None) -> None:
        """A process is gone; `code` is None where an earlier coordinator had started it."""
        row = self.row(submission.study)
        now = self._store.now()
        tries = 1 if now - (submission.started or 0.0) >= _LONG_RUN_S else submission.tries + 1
        change: dict[str, object] = {"state": SubmissionState.ENDED, "exit_code": code, "tries": tries}
        wanted = "stop" if submission.stop else row.desired_state if row is not None else "run"
        failed = row is not None and row.state is StudyState.FAILED
        if row is not None and row.state is StudyState.COMPLETE:
            change["message"] = None
        elif wanted != "run":
            change["message"] = "stopped" if wanted == "stop" else "its process ended while it was paused"
        elif code in _REFUSED or tries > _MAX_TRIES or (code is None and failed):
            change["message"] = folder.last_words() or f"ended with exit code {code}"
        else:
            change["state"] = SubmissionState.QUEUED
            change["not_before"] = now + min(_BACKOFF_S * 2 ** (tries - 1), _LONGEST_BACKOFF_S)
            change["message"] = f"ended with exit code {code}; it is tried again. {folder.last_words()}".strip()
        folder.write(submission.model_copy(update=change))
        _tell("study's process ended", submission.study, exit_code=code, next=change["state"])


def _tell(what: str, study: str, **fields: object) -> None:
    log.info(what, extra={"fields": {"study": study, **fields}})
