"""The ledger of a study: what its orchestrator reads from and writes to the store, fenced by the study's lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed, StudyBusy, StudyChanged
from nas.core.layout import Layout
from nas.core.trial import TRANSITIONS, Event, EventKind, TrialState, TrialStatus
from nas.infra.store import artifacts, events, leases, outcomes, results, studies, trials
from nas.infra.store.rows import Json, NewTrial, Origin, Stage, Study, StudyLease, StudyState, Trial
from nas.infra.store.store import Store
from nas.search.study.events import Note, all_events

_RENEW_S = 8.0

_ORDER = [
    TrialState.PROPOSED,
    TrialState.EXPORTED,
    TrialState.MEASURING,
    TrialState.BORDERLINE,
    TrialState.GATED_IN,
    TrialState.TRAINING,
    TrialState.CONFIRMING,
]


class Ledger:
    """Reads and writes the trials, events, results, attempts and artifacts of one study.

    Args:
        store: open database.
        study: its row.
        lease: fences every write; `keep` renews it.
        on_event: called with trial, name and payload of every event that is written, for live displays.
    """

    def __init__(
        self, store: Store, study: Study, lease: StudyLease, on_event: Callable[[int | None, str, Json], None]
    ) -> None:
        self.store = store
        self.study = study
        self._lease = lease
        self._on_event = on_event
        self.folder = content_hash([str(store.engine.url), study.id])[:12]
        """Name of the study's own folder, unique among all studies of all databases on this machine."""
        self._noted: set[str] = set()
        self._lost: StudyBusy | None = None

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Renews the lease while the context is open, and releases it at the end.

        A thread renews it, because exports and surrogate fits may block this one for longer than a lease lasts.
        """
        done = threading.Event()
        keeper = threading.Thread(target=self._renew_until, args=(done,), name="study lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            leases.release(self.store, self._lease)

    def _renew_until(self, done: threading.Event) -> None:
        while not done.wait(_RENEW_S):
            try:
                leases.renew(self.store, self._lease)
            except StudyBusy as error:
                self._lost = error
                return
            except InfrastructureFailed as error:
                # The lease is lost only once another process acquires it, which needs the database, too.
                self._on_event(None, "lease not renewed", {"message": str(error)})

    def require_lease(self) -> None:
        """Raises `StudyBusy` once another process has taken the study."""
        if self._lost is not None:
            raise self._lost

    def set_state(self, state: StudyState, reason: str | None = None) -> None:
        """Sets the state of the study, and why it failed."""
        studies.set_state(self.store, self.study.id, state, lease=self._lease, reason=reason)

    def desired_state(self) -> str:
        """Returns the state that users want: run, pause or stop."""
        return studies.get(self.store, self.study.id).desired_state

    def propose(
        self,
        layout: Layout,
        origin: Origin,
        *,
        parents: tuple[int, ...] = (),
        operator: str | None = None,
        record: Json | None = None,
    ) -> Trial:
        """Adds a trial, numbered without gaps; returns the existing one if the study has that layout."""
        proposal = NewTrial(layout.to_json(), layout.id, origin, parents, operator, record)
        (trial,) = trials.propose(self.store, self.study.id, [proposal], lease=self._lease)
        self._on_event(trial.number, "proposed", {"layout": layout.format(), "origin": origin})
        return trial

    def trials(self) -> list[Trial]:
        """Returns all trials in the order of their numbers."""
        return trials.all(self.store, self.study.id)

    def mark(self, trial: int, kind: EventKind, **payload: Any) -> TrialStatus:
        """Advances a trial's state; a transition that an earlier process logged changes nothing."""
        status = trials.get(self.store, self.study.id, trial).status
        if _has_made(kind, payload.get("rung"), status):
            return status
        status = trials.add_event(self.store, self.study.id, trial, kind, payload, lease=self._lease)
        self._on_event(trial, kind.value, payload)
        return status

    def note(self, trial: int | None, note: Note) -> None:
        """Logs a note, which changes no state; `trial` None: a note of the study as a whole."""
        payload = note.to_json()
        if trial is None:
            events.append(self.store, self.study.id, payload, lease=self._lease)
        else:
            trials.add_event(self.store, self.study.id, trial, EventKind.PROGRESS, payload, lease=self._lease)
        self._on_event(trial, note.what, {name: value for name, value in payload.items() if name != "what"})

    def note_once(self, trial: int, note: Note) -> None:
        """Logs a note, unless the log holds an equal one of this trial."""
        name = content_hash({"trial": trial, **note.to_json()})
        if name not in self._noted:
            self.note(trial, note)
            self._noted.add(name)  # only now: a write that failed is tried again with its trial

    def freeze(self, scales: Json, point: Mapping[str, float]) -> None:
        """Stores the study's constants and its reference point; they never change again."""
        studies.set_scales(self.store, self.study.id, scales, lease=self._lease)
        studies.freeze_reference(self.store, self.study.id, dict(point), lease=self._lease)

    def retry(self, trial: Trial) -> Trial:
        """Resets a trial that failed for a retryable reason; others stay as they are."""
        if trial.status.retryable:
            trials.add_event(self.store, self.study.id, trial.number, EventKind.RETRIED, {}, lease=self._lease)
        return trials.get(self.store, self.study.id, trial.number)

    def events(self) -> list[Event]:
        """Reads the whole log, oldest first."""
        return all_events(self.store, self.study.id)

    def recall(self) -> list[Event]:
        """Reads the whole log, so that `note_once` knows its notes."""
        log = self.events()
        for event in log:
            if event.trial is not None and "what" in event.payload:
                self._noted.add(content_hash({"trial": event.trial, **event.payload}))
        return log

    def result(self, key: str, trial: int) -> Json | None:
        """Returns a stage's stored outcome, of any study, and records its use by `trial`; None if there is none.

        Raises:
            StudyChanged: the study was imported with this outcome, but not to be trusted.
        """
        row = results.get(self.store, key)
        if row is None:
            if results.get(self.store, results.imported_key(self.study.id, key)) is not None:
                raise StudyChanged(
                    f"{self.study.name} was imported without --trust, so its results may be read but not built upon:"
                    " to resume it, import an archive that you trust with --trust"
                )
            return None
        results.use(self.store, key, (self.study.id, trial))
        return row.payload

    def put(self, key: str, stage: Stage, outcome: Mapping[str, Any], trial: int) -> Json:
        """Stores a stage's outcome and returns what is stored: the first writer wins."""
        seconds = float(outcome.get("seconds", 0.0))
        row = results.put(self.store, key, stage, dict(outcome), seconds=seconds, trial=(self.study.id, trial))
        self._on_event(trial, f"{stage} done", {})
        return row.payload

    def tries(self, key: str) -> int:
        """Returns how often a stage failed without a result so far, in any study."""
        return sum(attempt.job is None for attempt in outcomes.attempts_of_key(self.store, key))

    def attempt(self, key: str, stage: Stage, trial: int, message: str) -> None:
        """Stores a failed try, which leaves no result."""
        outcomes.record_attempt(
            self.store, "infrastructure", message, result_key=key, stage=stage, study=self.study.id, trial=trial
        )
        self._on_event(trial, f"{stage} failed", {"message": message})

    def keep_artifact(self, path: Path, sha256: str) -> None:
        """Moves a written file into the store."""
        stored = artifacts.put_file(self.store, path)
        assert stored.sha256 == sha256, f"{path} changed after it was written"
        path.unlink(missing_ok=True)

    def pin(self, sha256: str) -> None:
        """Pins an artifact until the study is complete."""
        artifacts.pin(self.store, sha256, artifacts.study_owner(self.study.id))

    def pin_only(self, sha256s: Iterable[str]) -> None:
        """Pins these artifacts for as long as the study exists, and unpins its others."""
        artifacts.pin_only(self.store, artifacts.study_owner(self.study.id), sha256s)

    def has_artifact(self, sha256: str) -> bool:
        """Returns whether the file is there and undamaged; a damaged one is removed, so that it is exported again."""
        return artifacts.intact(self.store, sha256)

    def artifact_path(self, sha256: str) -> Path:
        """Returns the path of an artifact; raises `InfrastructureFailed` if the store does not have it."""
        return artifacts.path(self.store, sha256)


def _has_made(kind: EventKind, rung: int | None, status: TrialStatus) -> bool:
    """Returns whether the trial already made the transition `kind`."""
    state = TrialState(kind.value)
    if state not in _ORDER or status.state not in _ORDER:
        return status.terminal and state not in TRANSITIONS[status.state]
    reached, transition = _ORDER.index(status.state), _ORDER.index(state)
    if reached == transition and state is TrialState.TRAINING:
        return (rung or 0) <= (status.rung or 0)
    return transition <= reached
