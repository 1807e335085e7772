"""What one orchestrator writes of its study: results, events, attempts, artifacts, all under its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.trial import Event, EventKind, TrialState, TrialStatus
from nas.store import artifacts, attempts, events, leases, results, studies, trials
from nas.store.rows import Json, Origin, Proposal, Stage, Study, StudyLease, StudyState, Trial
from nas.store.store import Store

_ORDER = [
    TrialState.PROPOSED, TrialState.EXPORTED, TrialState.MEASURING, TrialState.BORDERLINE, TrialState.GATED_IN,
    TrialState.TRAINING, TrialState.CONFIRMING,
]  # fmt: skip


class Ledger:
    """The store, seen from one orchestrator of one study.

    Args:
        store: open database.
        study: its row.
        lease: fences every write; renewed through `renew`.
        on_event: told of every event written, for live displays.
    """

    def __init__(
        self, store: Store, study: Study, lease: StudyLease, on_event: Callable[[int | None, str, Json], None]
    ) -> None:
        self.store = store
        self.study = study
        self._lease = lease
        self._on_event = on_event
        self._lock = threading.Lock()
        self._noted: set[str] = set()

    def renew(self) -> None:
        """Keeps the study ours.

        Raises:
            StudyBusy: it is not any more.
        """
        with self._lock:
            self._lease = leases.renew(self.store, self._lease)

    def release(self) -> None:
        """Lets the next orchestrator in."""
        leases.release(self.store, self._lease)

    def set_state(self, state: StudyState) -> None:
        """What the study does now."""
        studies.set_state(self.store, self.study.id, state, lease=self._lease)

    def desired_state(self) -> str:
        """What it was last told to do."""
        return studies.get(self.store, self.study.id).desired_state

    def propose(
        self, layout: Layout, origin: Origin, *, parents: tuple[int, ...] = (), operator: str | None = None,
        record: Json | None = None,
    ) -> Trial:  # fmt: skip
        """A new trial, numbered without gaps; the present one where the study has that layout."""
        proposal = Proposal(layout.to_json(), layout.id, origin, parents, operator, record)
        (trial,) = trials.propose(self.store, self.study.id, [proposal], lease=self._lease)
        self._on_event(trial.number, "proposed", {"layout": layout.format(), "origin": origin})
        return trial

    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers."""
        return trials.all(self.store, self.study.id)

    def mark(self, trial: int, kind: EventKind, **payload: Any) -> TrialStatus:
        """Moves a trial on; a step that it has made before (this is a resumed run) changes nothing."""
        status = trials.get(self.store, self.study.id, trial).status
        if _behind(kind, payload.get("rung"), status):
            return status
        status = trials.add_event(self.store, self.study.id, trial, kind, payload, lease=self._lease)
        self._on_event(trial, kind.value, payload)
        return status

    def note(self, trial: int | None, what: str, **payload: Any) -> None:
        """Keeps something that changes no state."""
        body = {"what": what, **payload}
        if trial is None:
            events.append(self.store, self.study.id, body, lease=self._lease)
        else:
            trials.add_event(self.store, self.study.id, trial, EventKind.PROGRESS, body, lease=self._lease)
        self._on_event(trial, what, payload)

    def note_once(self, trial: int, what: str, **payload: Any) -> bool:
        """`note`, unless the very same was noted of this trial before; whether it was new."""
        name = content_hash({"trial": trial, "what": what, **payload})
        if name in self._noted:
            return False
        self._noted.add(name)
        self.note(trial, what, **payload)
        return True

    def spent(self, stage: str, seconds: float) -> None:
        """Adds to the time spent on a stage that leaves no result of its own."""
        self.note(None, "spent", stage=stage, seconds=seconds)

    def freeze(self, scales: Json, point: Mapping[str, float]) -> None:
        """Fixes the study's constants and its reference point for good."""
        studies.set_scales(self.store, self.study.id, scales, lease=self._lease)
        studies.freeze_reference(self.store, self.study.id, dict(point), lease=self._lease)

    def retry(self, trial: Trial) -> Trial:
        """Puts a trial that failed for a retryable reason back to its start; others stay as they are."""
        if trial.status.retryable:
            trials.add_event(self.store, self.study.id, trial.number, EventKind.RETRIED, {}, lease=self._lease)
        return trials.get(self.store, self.study.id, trial.number)

    def events(self) -> list[Event]:
        """The whole log, oldest first."""
        return all_events(self.store, self.study.id)

    def recall(self) -> list[Event]:
        """The whole log; from now on `note_once` knows what it holds."""
        log = self.events()
        for event in log:
            if event.trial is not None and "what" in event.payload:
                self._noted.add(content_hash({"trial": event.trial, **event.payload}))
        return log

    def result(self, key: str, trial: int) -> Json | None:
        """A stage's outcome, if it was reached by anybody; its use by `trial` is kept."""
        row = results.get(self.store, key)
        if row is None:
            return None
        results.use(self.store, key, (self.study.id, trial))
        return row.payload

    def put(self, key: str, stage: Stage, outcome: Mapping[str, Any], trial: int) -> Json:
        """Stores a stage's outcome; the first writer wins, and everybody gets what is stored."""
        row = results.put(
            self.store,
            key,
            stage,
            dict(outcome),
            seconds=float(outcome.get("seconds", 0.0)),
            trial=(self.study.id, trial),
        )
        self._on_event(trial, f"{stage} done", {})
        return row.payload

    def attempt(self, key: str, stage: Stage, trial: int, message: str) -> None:
        """Keeps a failed try, which holds no key."""
        attempts.record(
            self.store, "infrastructure", message, result_key=key, stage=stage, study=self.study.id, trial=trial
        )
        self._on_event(trial, f"{stage} failed", {"message": message})

    def keep_artifact(self, path: Path, sha256: str) -> None:
        """Moves a written file into the store."""
        stored = artifacts.put_file(self.store, path)
        assert stored.sha256 == sha256, f"{path} changed after it was written"
        artifacts.pin(self.store, sha256, f"study:{self.study.id}")
        path.unlink(missing_ok=True)

    def has_artifact(self, sha256: str) -> bool:
        """Whether the file is still there."""
        try:
            self.artifact_path(sha256)
        except InfrastructureFailed:
            return False
        return True

    def artifact_path(self, sha256: str) -> Path:
        """Where the file is.

        Raises:
            InfrastructureFailed: it is not there any more.
        """
        return artifacts.path(self.store, sha256)


def all_events(store: Store, study: int) -> list[Event]:
    """The whole log of a study, oldest first."""
    log: list[Event] = []
    while page := events.since(store, study, log[-1].id if log else 0):
        log += page
    return log


def _behind(kind: EventKind, rung: int | None, status: TrialStatus) -> bool:
    """Whether the status is already at or past the step that `kind` means."""
    state = TrialState(kind.value)
    if state not in _ORDER or status.state not in _ORDER:
        return status.terminal
    here, there = _ORDER.index(status.state), _ORDER.index(state)
    if here == there and state is TrialState.TRAINING:
        return (rung or 0) <= (status.rung or 0)
    return there <= here
