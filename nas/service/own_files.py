"""The coordinator's own files: damaged ones are noticed, said, and made anew where their inputs are known.

When an agent could not get a file, or got other bytes than its name says, the files that its job needs are read here
and compared with their names. An export is made anew: the same inputs write the same bytes. Where that cannot be, it is
said, and somebody may put the file back; a job that fails for it again and again is ended with that reason, and its
study can be resumed, which exports anew.
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from nas.core.errors import InfrastructureFailed, NasError
from nas.core.protocol import OWN_FILE
from nas.devices.content import file_sha256
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact
from nas.service import work
from nas.store import artifacts, events, jobs, results, trials
from nas.store.rows import JobRow
from nas.store.store import Store

log = logging.getLogger(__name__)

_TRIES = 3
"""After so many a job is ended whose file is damaged still."""

_STOP_S = 5.0
_SEED = "random:"
"""What `RandomWeights.describe` begins with."""


class OwnFiles:
    """Looks at files in a thread, while the context is open.

    Args:
        store: where jobs, artifacts and results are.
        find_file: content hash -> path on this machine.
        ring: called when a job was given up.
        lock: folder of this machine's host lock: exports let measurements go first.
    """

    def __init__(
        self, store: Store, find_file: Callable[[str], Path | None], ring: Callable[[], None], lock: Path
    ) -> None:
        self._store, self._find_file, self._ring, self._lock = store, find_file, ring, lock
        self._suspected: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="own files", daemon=True)

    def suspect(self, job: str) -> None:
        """An agent could not get the files of this job; they are looked at soon."""
        self._suspected.put(job)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._suspected.put(None)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (job := self._suspected.get()) is not None:
            try:
                self.look(job)
            except (NasError, OSError) as error:
                log.warning("the files of job %s cannot be looked at: %s", job, error)

    def look(self, id: str) -> None:
        """Makes the damaged files of a job anew; where that cannot be, the job ends in time, and its message says why.

        Raises:
            InfrastructureFailed: the database or the disk cannot be used.
        """
        job = jobs.get(self._store, id)
        if job is None or job.state not in jobs.LIVE:
            return
        for sha256 in sorted(jobs.files(job.payload)):
            if (fault := self._fault(sha256)) is not None:
                self._mend(job, sha256, fault)

    def _fault(self, sha256: str) -> str | None:
        path = self._find_file(sha256)
        if path is None:
            return f"file {sha256[:12]} is not here any more"
        try:
            return None if file_sha256(path) == sha256 else f"{path} is damaged: its content is not {sha256[:12]}"
        except OSError as error:
            return f"{path}: {error.strerror}"

    def _mend(self, job: JobRow, sha256: str, fault: str) -> None:
        try:
            self._make(sha256)
        except InfrastructureFailed as error:
            message = f"{OWN_FILE}{fault}; {error}"
            if job.attempts >= _TRIES:
                jobs.give_up(self._store, job.id, message)
                self._ring()
        else:
            message = f"{OWN_FILE}{fault}; it was made anew"
        log.error("%s", message)
        if job.study is not None:
            events.append(self._store, job.study, {"what": "damaged file", "message": message})

    def _make(self, sha256: str) -> None:
        made = results.find_export(self._store, sha256)
        if made is None:
            raise InfrastructureFailed("it is no export, so it cannot be made anew here: build the runtime again")
        artifact = Artifact.model_validate(made.payload["value"])
        layout = self._layout(artifact)
        if layout is None or not artifact.weights.startswith(_SEED):
            raise InfrastructureFailed("it cannot be made anew here; resume the study, which exports it again")
        folder = self._store.artifacts.parent / "work"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            destination = Path(scratch) / "export"
            spec = {"layout": layout, "runtime": artifact.runtime, "quantisation": artifact.quantisation}
            spec |= {"weights": {"seed": int(artifact.weights.removeprefix(_SEED))}}
            outcome = work.export(spec | {"destination": str(destination), "lock": str(self._lock)})
            if "value" not in outcome or file_sha256(destination) != sha256:
                why = outcome.get("infrastructure") or outcome.get("failed") or "this version writes other bytes"
                raise InfrastructureFailed(f"it could not be made anew: {why}")
            artifacts.put_file(self._store, destination)

    def _layout(self, artifact: Artifact) -> dict[str, Any] | None:
        reference = RUNTIMES[artifact.runtime].reference_model()
        if reference.id == artifact.layout_id:
            return reference.to_json()
        return trials.find_layout(self._store, artifact.layout_id)
