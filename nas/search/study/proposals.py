"""Drives the proposer of a study: asks it in a thread while measurements run, and logs all observations.

A study can learn from earlier ones (`warm_start`): their observations are translated into its own coordinates and
budgets, which are matched by what they measure, not by their names.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nas.core.canonical import canonical_json, content_hash
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.progress import Log
from nas.core.scoring import PROXY, MeasurementKey, check_name, measurement_keys
from nas.core.space import Objective, SearchSpace
from nas.core.trial import Event, EventKind
from nas.infra.store import studies
from nas.infra.store.rows import Json, Trial
from nas.infra.store.store import Store
from nas.measure.devices.host_lock import HostLock
from nas.search.proposers import Features, Observation, Proposal, Sampler, SearchState, make_proposer
from nas.search.study.events import (
    AnchorsChosen,
    Calibrated,
    CorpusUsed,
    Observed,
    ReferencePointFixed,
    Spent,
    WarmStarted,
    all_events,
    calibrated_devices,
    notes,
    stored_space,
)
from nas.search.study.ledger import Ledger

_FINAL = ("complete", "infeasible", "stopped")
"""Statuses of observations that an earlier study teaches."""
_ANCHOR_POOL = 96
"""Random layouts that anchors are chosen from."""
_ANCHOR_SEED = 0
"""Of these layouts: the same in all studies of a space."""


def anchor_layouts(space: SearchSpace, supported: Callable[[Layout], bool], count: int) -> list[Layout]:
    """Returns `count` layouts that are spread over the space and far from its references; the same in all studies."""
    sampler, rng = Sampler(space, supported), np.random.default_rng(_ANCHOR_SEED)
    references = list(space.references.layouts().values())
    drawn = {layout.id: layout for layout in (sampler.draw(rng) for _ in range(_ANCHOR_POOL))}
    pool = [layout for layout in drawn.values() if layout not in references]
    return Features(space).spread_over(pool, references, count)


class ProposalDriver:
    """Asks and tells one proposer, and logs both, so that a resumed study continues with the same proposer.

    Args:
        space: the study's.
        supported: whether its runtimes carry a layout.
        lock: folder of the host lock: a surrogate's fit is compute like any other.
    """

    def __init__(self, space: SearchSpace, supported: Callable[[Layout], bool], lock: Path) -> None:
        self._space, self._supported = space, supported
        self._proposer = make_proposer(Sampler(space, supported))
        self._lock = HostLock(lock)
        self._asking = self._has_point = False
        self._deferred: list[Callable[[], None]] = []
        self._hashes: dict[int, set[str]] = {}
        self._final: set[int] = set()
        self.expected_gain: float | None = None
        """In hypervolume, of the last proposal; None if no model chose it, or the proposer does not report one."""

    def resume(self, trials: list[Trial], events: list[Event]) -> list[str]:
        """Restores the proposer from the log; observations hold for every version of an engine.

        Returns:
            A line for each other engine, or version of this one, that made proposals of the log.
        """
        for event in events:
            if event.trial is not None and (note := Observed.read(event.payload)):
                self._is_new(event.trial, note.observation)
        state = search_state(self._space, trials, events)
        self._has_point = state.reference_point is not None
        self._proposer.restore(state.to_json())
        now = str(self._proposer.state().get("engine", ""))
        others = sorted({proposal.engine for proposal in state.proposals} - {now})
        return [
            f"earlier proposals are of {engine or 'an engine without a name'}; {now} continues from all results, and "
            "the log cannot be replayed"
            for engine in others
        ]

    async def next(self, ledger: Ledger) -> Trial | None:
        """Proposes a trial; None if the proposer has no more layouts. Waits for the host lock."""
        self._asking = True
        try:
            start = time.perf_counter()
            proposals = await asyncio.to_thread(self._ask)
            if not proposals:
                return None
            ledger.note(None, Spent("propose", time.perf_counter() - start))
            return _record(ledger, proposals[0])
        finally:
            self._asking = False
            while self._deferred:
                self._deferred.pop(0)()

    def anchors(self, ledger: Ledger) -> list[Layout]:
        """Returns the anchors of the study beside its references: those of the log, or new ones, which are logged."""
        if logged := notes(ledger.events(), AnchorsChosen):
            return [*logged[-1].layouts]
        settings = self._space.quality.anchors
        assert settings is not None
        chosen = anchor_layouts(self._space, self._supported, settings.layouts)
        ledger.note(None, AnchorsChosen(chosen))
        return chosen

    def tell(self, ledger: Ledger, trial: int, observation: Observation) -> None:
        """Passes an observation to the proposer and logs it; deferred while the proposer is being asked."""

        def tell() -> None:
            if self._is_new(trial, observation):
                ledger.note(trial, Observed(observation))
                self._proposer.tell(observation)

        self._now_or_later(tell)

    def fix_reference_point(self, ledger: Ledger, point: Mapping[str, float]) -> None:
        """Passes the reference point to the proposer, once, and logs it."""

        def fix() -> None:
            if not self._has_point:
                self._has_point = True
                ledger.note(None, ReferencePointFixed(point))
                self._proposer.fix_reference_point(point)

        self._now_or_later(fix)

    def _is_new(self, trial: int, observation: Observation) -> bool:
        """Returns whether the proposer has not seen this of a trial since that was withdrawn, if it was.

        Noise is estimated: another estimate alone is not new. Nor is what a resumed study sees again on the way to an
        end that the proposer has seen: references may be measured in another order, and have other coordinates there.
        """
        name = content_hash(replace(observation, noise={}).to_json())
        hashes = self._hashes.setdefault(trial, set())
        if name in hashes or (observation.status == "running" and trial in self._final):
            return False
        if observation.status == "withdrawn":
            hashes.clear()
            self._final.discard(trial)
        elif observation.status != "running":
            self._final.add(trial)
        hashes.add(name)
        return True

    def _now_or_later(self, action: Callable[[], None]) -> None:
        if self._asking:
            self._deferred.append(action)
        else:
            action()

    def _ask(self) -> list[Proposal]:
        with self._lock.shared():
            proposals = self._proposer.ask(1)
            self.expected_gain = getattr(self._proposer, "expected_gain", None)
            return proposals


def search_state(space: SearchSpace, trials: Iterable[Trial], events: Iterable[Event]) -> SearchState:
    """Returns the state of a study's proposer, its proposals and observations, from the study's log."""
    state = SearchState(tuple(objective.name for objective in space.objectives), space.search.seed)
    state.proposals = [Proposal.from_json(trial.record) for trial in trials if trial.record is not None]
    for event in events:
        if note := Observed.read(event.payload):
            state.tell(note.observation)
        elif fixed := ReferencePointFixed.read(event.payload):
            state.fix_reference_point(fixed.point)
        elif warm := WarmStarted.read(event.payload):
            for observation in warm.observations:
                state.tell_earlier(observation)
    return state


@dataclass(frozen=True)
class BoundSpace:
    """A space, and what its names mean.

    Args:
        space: of a study.
        devices: name in the space -> id of the device.
        builds: (name of a device, runtime) -> build of the runner.
        training: identifies the corpus and the versions of the training; None: not known.
    """

    space: SearchSpace
    devices: Mapping[str, str]
    builds: Mapping[tuple[str, str], str] = field(default_factory=dict)
    training: str | None = None

    @staticmethod
    def of(space: SearchSpace, log: Sequence[Event]) -> BoundSpace:
        """Returns the space with the devices, builds and corpus of a study's log."""
        calibrated = [event.payload for event in log if event.payload.get("what") == Calibrated.what]
        builds = {(note["device"], note["runtime"]): note["build"] for note in calibrated if "build" in note}
        used = notes(log, CorpusUsed)
        training = canonical_json(used[-1].to_json()) if used else None
        return BoundSpace(space, {device.name: device.id for device in calibrated_devices(log)}, builds, training)

    def objectives(self) -> dict[str, str]:
        """Returns the meaning of each coordinate -> its name."""
        return {self._coordinate(objective): objective.name for objective in self.space.objectives}

    def budgets(self) -> dict[str, tuple[str, float]]:
        """Returns the meaning of each excess -> its name, and its limit as the excess has it: greater is looser.

        Of several budgets on one figure the strictest counts.
        """
        limits = list[tuple[str, str, float]]()
        for budget in self.space.budgets:
            limit, relative = budget.limit
            if METRICS[budget.metric].source == "proxy":
                quality = [self._proxied(budget.metric), self.space.references.published]
                limits.append((canonical_json(quality), check_name(budget.name, PROXY), -limit))
                continue
            base = self.space.references.published if relative else None
            room = math.log(limit) if METRICS[budget.metric].direction == "min" else -math.log(limit)
            for key in measurement_keys(self.space, budget):
                meaning = [budget.metric, self._where(key), base]
                limits.append((canonical_json(meaning), check_name(budget.name, key), room))
        return {meaning: (name, room) for meaning, name, room in sorted(limits, key=lambda limit: -limit[2])}

    def _proxied(self, metric: str) -> str:
        rounding = self.space.quality.rounding
        after = [] if rounding is None else [rounding.model_dump(mode="json")]
        return canonical_json([metric, self.space.quality.model_dump(mode="json"), self.training, *after])

    def _coordinate(self, objective: Objective) -> str:
        if METRICS[objective.metric].source == "proxy":
            return self._proxied(objective.metric)
        meanings = sorted(self._where(key) for key in measurement_keys(self.space, objective))
        return canonical_json([objective.metric, meanings, objective.aggregate if len(meanings) > 1 else ""])

    def _where(self, key: MeasurementKey) -> list[str]:
        runtime = self.space.labelled[key.runtime]
        workload = canonical_json(self.space.workloads[key.workload].key()) if key.workload else ""
        build = self.builds.get((key.device, key.runtime), "")
        stored_as = "|".join(runtime.choices or (runtime.quantisation,))
        return [self.devices.get(key.device, ""), runtime.name, build, stored_as, workload]


@dataclass(frozen=True)
class SharedNames:
    """Coordinates and budgets that two studies share: names of the earlier one -> names of the new one.

    Args:
        objectives: coordinates.
        budgets: excesses, with the shift from the old limit to the new one.
    """

    objectives: Mapping[str, str]
    budgets: Mapping[str, tuple[str, float]]

    @staticmethod
    def between(old: BoundSpace, new: BoundSpace) -> SharedNames:
        """Matches two studies by meaning."""
        objectives, limits = new.objectives(), new.budgets()
        return SharedNames(
            {name: objectives[what] for what, name in old.objectives().items() if what in objectives},
            {
                name: (limits[what][0], room - limits[what][1])
                for what, (name, room) in old.budgets().items()
                if what in limits
            },
        )

    def translate(self, observation: Observation) -> Observation:
        """Translates an observation of the earlier study into names and limits of the new one, as far as possible."""
        objectives = {
            new: observation.objectives[old] for old, new in self.objectives.items() if old in observation.objectives
        }
        excess = {
            new: observation.constraints[old] + shift
            for old, (new, shift) in self.budgets.items()
            if old in observation.constraints
        }
        names = {**self.objectives, **{old: new for old, (new, _) in self.budgets.items()}}
        noise = {new: observation.noise[old] for old, new in names.items() if old in observation.noise}
        status = observation.status
        # A stopped layout's quality is that of a lower rung, which decides nothing.
        undecided = {name for name in excess if status == "stopped" and name.endswith(check_name("", PROXY))}
        if max((excess[name] for name in excess.keys() - undecided), default=0.0) > 0:
            status = "infeasible"
        elif status == "infeasible":
            status = "stopped"  # it keeps the budgets of the new study
        parts = {new: observation.parts[old] for old, new in self.objectives.items() if old in observation.parts}
        return Observation(observation.layout, status, objectives, excess, observation.rung, noise, parts)


def replay(
    space: SearchSpace, supported: Callable[[Layout], bool], trials: list[Trial], events: list[Event]
) -> list[str]:
    """Replays a study's log with a fresh proposer.

    Returns:
        A line for each proposal that differs from the recorded one.

    Raises:
        InvalidInput: another engine, or another version of it, made the recorded proposals.
    """
    proposer = make_proposer(Sampler(space, supported))
    by_number = {trial.number: trial for trial in trials}
    differences = []
    for event in events:
        if event.kind is EventKind.PROPOSED and event.trial is not None:
            recorded = by_number[event.trial]
            if recorded.origin == "reference":
                continue
            proposals = proposer.ask(1)
            _check_engine(recorded, proposals)
            if [proposal.layout.id for proposal in proposals] != [recorded.layout_id]:
                text = proposals[0].layout.format() if proposals else "nothing"
                differences.append(f"trial {event.trial}: {Layout.from_json(recorded.layout)} became {text}")
        elif note := Observed.read(event.payload):
            proposer.tell(note.observation)
        elif fixed := ReferencePointFixed.read(event.payload):
            proposer.fix_reference_point(fixed.point)
        elif warm := WarmStarted.read(event.payload):
            proposer.warm_start(warm.observations)
    return differences


def require_studies(store: Store, names: Iterable[str], study: str) -> None:
    """Raises `UnknownName` or `InvalidInput` unless `study` can learn from studies of these names."""
    for name in names:
        if name == study:
            raise InvalidInput(f"study {study!r} cannot learn from itself", where="--warm-start")
        studies.get(store, name)


def warm_start(
    ledger: Ledger,
    space: SearchSpace,
    supported: Callable[[Layout], bool],
    names: Sequence[str],
    log: Log,
) -> None:
    """Logs what the study learns from earlier ones, in one event, so that a resumed study learns the same.

    Args:
        ledger: of the new study, which knows its devices.
        space: its space.
        supported: whether its runtimes can run a layout.
        names: of the earlier studies; if several observed a layout, the last one counts.
        log: called with a line for each earlier study.

    Raises:
        UnknownName: no such study.
    """
    events = ledger.events()
    if not names or notes(events, WarmStarted):
        return
    new, sampler = BoundSpace.of(space, events), Sampler(space, supported)
    by_layout: dict[str, Observation] = {}
    rows = []
    for name in names:
        observations, row = _learn(ledger.store, name, new, sampler)
        by_layout |= {observation.layout.id: observation for observation in observations}
        rows.append(row)
        log(warm_line(row))
    ledger.note(None, WarmStarted(rows, [observation for _, observation in sorted(by_layout.items())]))


def warm_line(row: Mapping[str, Any]) -> str:
    """Describes what was taken from one study."""
    shared = ", ".join([*row["objectives"], *row["budgets"]]) or "nothing"
    unused = "".join(f"; {count} {why}" for why, count in row["left_out"].items())
    missing = f"; not comparable: {', '.join(row['not_comparable'])}" if row["not_comparable"] else ""
    return f"warm start from {row['study']}: {row['layouts']} layouts with {shared}{unused}{missing}"


def _check_engine(recorded: Trial, proposals: list[Proposal]) -> None:
    engine = (recorded.record or {}).get("engine", "")
    if proposals and proposals[0].engine != engine:
        before, now = (name or "an engine without a name" for name in (engine, proposals[0].engine))
        raise InvalidInput(
            f"trial {recorded.number} was proposed by {before}; here is {now}, so the log cannot be replayed"
        )


def _record(ledger: Ledger, proposal: Proposal) -> Trial:
    numbers = {trial.layout_id: trial.number for trial in ledger.trials()}
    return ledger.propose(
        proposal.layout,
        "seed" if proposal.operator == "seed" else "proposal",
        parents=tuple(numbers[parent] for parent in proposal.parents if parent in numbers),
        operator=proposal.operator,
        record=proposal.to_json(),
    )


def _learn(store: Store, name: str, new: BoundSpace, sampler: Sampler) -> tuple[list[Observation], Json]:
    study = studies.get(store, name)
    events = all_events(store, study.id)
    old = BoundSpace.of(stored_space(study), events)
    shared = SharedNames.between(old, new)
    observations, left_out = [], Counter[str]()
    last = {note.observation.layout.id: note.observation for note in notes(events, Observed)}
    for observation in last.values():
        translated = shared.translate(observation)
        if observation.status not in _FINAL:
            left_out["without a result of their own"] += 1
        elif not sampler.admits(observation.layout):
            left_out["outside this space"] += 1
        elif not translated.objectives and not translated.constraints:
            left_out["with nothing comparable"] += 1
        else:
            observations.append(translated)
    names = {*old.objectives().values(), *(name for name, _ in old.budgets().values())}
    return observations, {
        "study": study.name,
        "layouts": len(observations),
        "objectives": sorted(shared.objectives.values()),
        "budgets": sorted(new_name for new_name, _ in shared.budgets.values()),
        "not_comparable": sorted(names - shared.objectives.keys() - shared.budgets.keys()),
        "left_out": dict(sorted(left_out.items())),
    }
