"""What one orchestrator writes of its study: results, events, attempts, artifacts, all under its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed, StudyBusy
from nas.core.layout import Layout
from nas.core.trial import Event, EventKind, TrialState, TrialStatus
from nas.store import artifacts, attempts, events, leases, results, studies, trials
from nas.store.rows import Json, Origin, Proposal, Stage, Study, StudyLease, StudyState, Trial
from nas.store.store import Store

_RENEW_S = 8.0

_ORDER = [
    TrialState.PROPOSED, TrialState.EXPORTED, TrialState.MEASURING, TrialState.BORDERLINE, TrialState.GATED_IN,
    TrialState.TRAINING, TrialState.CONFIRMING,
]  # fmt: skip


class Ledger:
    """The store, seen from one orchestrator of one study.

    Args:
        store: open database.
        study: its row.
        lease: fences every write; `keep` renews it.
        on_event: told of every event written, for live displays.
    """

    def __init__(
        self, store: Store, study: Study, lease: StudyLease, on_event: Callable[[int | None, str, Json], None]
    ) -> None:
        self.store = store
        self.study = study
        self._lease = lease
        self._on_event = on_event
        self.place = content_hash([str(store.engine.url), study.id])[:12]
        """Names the study's own folder among those of all studies on this machine, of whatever database."""
        self._noted: set[str] = set()
        self._lost: StudyBusy | None = None

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Holds the study for as long as the context is open, and lets the next orchestrator in afterwards.

        From a thread, because exports and surrogate fits may keep this one busy for longer than a lease lasts.
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
                # Nobody else may be able to write, either; until somebody does, the study stays ours.
                self._on_event(None, "lease not renewed", {"message": str(error)})

    def require_ours(self) -> None:
        """Raises `StudyBusy` once another process has taken the study."""
        if self._lost is not None:
            raise self._lost

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

    def tries(self, key: str) -> int:
        """How often a stage was tried in vain so far, by anybody."""
        return sum(attempt.job is None for attempt in attempts.of_key(self.store, key))

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
        path.unlink(missing_ok=True)

    def pin(self, sha256: str) -> None:
        """Keeps an artifact in the store until the study is complete."""
        artifacts.pin(self.store, sha256, artifacts.study_owner(self.study.id))

    def pin_only(self, sha256s: Iterable[str]) -> None:
        """Keeps these for as long as the study is there, and lets the others go."""
        artifacts.pin_only(self.store, artifacts.study_owner(self.study.id), sha256s)

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
