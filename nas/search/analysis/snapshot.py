"""Studies in memory: the state of each at its newest event. Pages, JSON, files and reports are made from it."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nas.core.block import BLOCKS
from nas.core.errors import NasError
from nas.core.layout import Layout
from nas.core.pareto import Ranked, arrays, contributions, front_chances, front_noise, near_front, tied
from nas.core.scoring import Axis
from nas.core.trial import TERMINAL, TrialState
from nas.infra.store import listings as pages
from nas.infra.store import studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.search.analysis.axes import axis_views, cache_context, measured_figures
from nas.search.analysis.history import HypervolumeCurve, hypervolume_curve, interval
from nas.search.analysis.record import Record, StudyRecord, read_news, read_study, readable
from nas.search.proposers import Volume
from nas.search.proxy.ladder import proxy_of
from nas.search.study.events import Marked, marks

log = logging.getLogger(__name__)

STATES = tuple(state.value for state in TrialState)
"""Names of the codes in the column `state`."""
ORIGINS = ("reference", "seed", "proposal")
"""Names of the codes in the column `origin`."""
UNKNOWN = -1
"""Code of `StudySnapshot.feasible` for a trial whose budgets are not decided."""
INFEASIBLE = 0
"""Code for one that breaks a budget."""
FEASIBLE = 1
"""Code for one that keeps all."""
NO_RUNG = -1
TENTHS = 10
"""Parts of the depth that blocks are counted for."""
NONE = "none"
"""Stands for a layer without a mixer, or without a feed-forward."""
_DIGITS = 6
"""Significant digits of numbers: more than any figure is accurate to."""
_MOST_DECIMALS = 22
"""Greater powers of ten are not exact."""

_PASSED = ("gated_in", "training", "confirming", "complete", "stopped")
_FEASIBILITY = np.array(
    [FEASIBLE if s in _PASSED else INFEASIBLE if s == "infeasible" else UNKNOWN for s in STATES], np.int8
)
_NOT_KNOWN = (math.nan,) * 4

Floats = NDArray[np.float64]
T = TypeVar("T")


class StudySnapshot:
    """A study at its newest event. Immutable, shared by threads; derived data are cached in it.

    `table` has a row for each trial: `state` and `origin` (codes), `rung`, `changed` (id of the trial's newest
    event), `axes` [A, 4]: value, coordinate, and the standard deviations of the coordinate and of the value (`Axis`) of
    each objective, `further` [F]: values of `measured_figures`, `sizes` [3]: parameters, active parameters and bytes of
    key-value cache, `blocks` [len(BLOCK_ROLES), TENTHS]: the part of each tenth of the depth that a kind of block
    fills. NaN: not known.

    Args:
        record: of the study.
        before: an earlier snapshot of the same study; unchanged parts are taken from it.
    """

    def __init__(self, record: StudyRecord, before: StudySnapshot | None = None) -> None:
        self.record, self.space, self.reference_point = record, record.space, record.reference_point
        self.id, self.name, self.state = record.study.id, record.study.name, record.study.state
        self.revision = record.log.last
        self.further, self.context = measured_figures(self.space), cache_context(self.space)
        self.block_roles = block_roles()
        self.axes = axis_views(self.space, record.published, self.reference_point)
        self.table = _table(self, before)
        self.counted = _counted(record)
        """Trial -> objectives, of the complete trials that count for the front, in the order of completion."""
        self._lock = threading.Lock()
        self._cached: dict[object, _Lazy] = {}
        self.curve: HypervolumeCurve
        self._noise: _Noise
        self.counted_changed = self.revision
        """Id of the event that last changed the trials that count."""
        if before is not None and (before.counted, before.reference_point) == (self.counted, self.reference_point):
            if all(before.records[trial] is self.records[trial] for trial in self.counted):
                self.counted_changed = before.counted_changed
            self.curve, self._noise = before.curve, before._noise
            return
        self.curve = hypervolume_curve(record.log.completions, self.counted, self.reference_point)
        axes = (
            {trial: self.counted[trial] for trial in sorted(self.counted)} if self.reference_point is not None else {}
        )
        self._noise = _Noise(record, {trial: axes[trial] for trial in near_front(axes, front=self.curve.front)})
        if before is not None and before._noise.same(self._noise):
            self._noise = before._noise

    def cached(self, key: object, compute: Callable[[], T]) -> T:
        """Returns the result of `compute` for the key; it is called once, also with several threads."""
        with self._lock:
            entry = self._cached.setdefault(key, _Lazy())
        with entry.lock:  # one lock for each key: a page does not wait for a slow report
            if not entry.values:
                entry.values.append(compute())
            value: T = entry.values[0]
            return value

    @property
    def records(self) -> Mapping[int, Record]:
        """The trials by number."""
        return self.record.records

    @property
    def over(self) -> bool:
        """Whether no orchestrator is expected to continue the study."""
        return self.state in (StudyState.COMPLETE, StudyState.STOPPED, StudyState.FAILED)

    def feasible(self) -> NDArray[np.int8]:
        """Returns [N] whether a trial keeps its budgets, as far as they are decided."""
        return np.asarray(_FEASIBILITY[self.table["state"]])

    def proposed(self) -> NDArray[np.bool_]:
        """Returns [N] whether a trial is no reference."""
        return np.asarray(self.table["origin"] != ORIGINS.index("reference"))

    def states(self) -> dict[str, int]:
        """Returns state -> trials in it, references not counted; states without trials are left out."""
        counts = np.bincount(self.table["state"][self.proposed()], minlength=len(STATES)).tolist()
        return {state: count for state, count in zip(STATES, counts, strict=True) if count}

    def active(self, most: int) -> list[Record]:
        """Returns the first trials that have not ended, by number."""
        active = np.array([state not in TERMINAL for state in STATES])
        return [self.records[int(number)] for number in np.flatnonzero(active[self.table["state"]])[:most]]

    def values(self, key: str) -> Floats:
        """Returns [N] the values of an axis in its unit."""
        index = [axis.key for axis in self.axes].index(key)
        objectives, further = len(self.space.objectives), len(self.further)
        if index < objectives:
            return np.asarray(self.table["axes"][:, index, 0])
        if index < objectives + further:
            return np.asarray(self.table["further"][:, index - objectives])
        return np.asarray(self.table["sizes"][:, index - objectives - further])

    @property
    def chances(self) -> Mapping[int, float | None]:
        """Share of draws from the noise in which a trial is on the front; missing trials are never on it."""
        return self._noise.chances

    @property
    def front_noise(self) -> float | None:
        """Share of the front's members that are there by noise alone; None where it cannot be drawn."""
        return self._noise.of_front

    @property
    def volume(self) -> Volume | None:
        """The hypervolume with its 95 % interval; None without a front, or if too many are on it to draw noise."""
        return self._noise.volume

    @cached_property
    def marks(self) -> Mapping[int, Marked]:
        """Trial -> what people wrote about it."""
        return marks(self.record.log.notes)

    @cached_property
    def reference_names(self) -> Mapping[int, str]:
        """Trial -> name of the reference layout that it is."""
        return {record.trial.number: name for name, record in self.record.references.items()}

    @property
    def front(self) -> Sequence[Ranked]:
        """The front by contribution, best first, then the trials tied with it, which have no rank and add nothing."""
        return self.cached("front", self._front)

    @cached_property
    def front_positions(self) -> Mapping[int, tuple[int, Ranked]]:
        """Trial -> its position in `front`, from 1, and its row."""
        return {row.trial: (position, row) for position, row in enumerate(self.front, 1)}

    def _front(self) -> list[Ranked]:
        front = [*self.curve.front]
        if not front:
            return []
        assert self.reference_point is not None, "without a reference point there is no front"
        trials = sorted(self.counted)
        points, sd = arrays(self.counted, trials)
        index = {trial: i for i, trial in enumerate(trials)}
        ties = {trial: [trials[j] for j in tied(points, sd, index[trial])] for trial in front}
        behind = sorted({other for others in ties.values() for other in others} - set(front))
        ties |= {trial: [trials[j] for j in tied(points, sd, index[trial])] for trial in behind}
        added = contributions(points[[index[trial] for trial in front]], self.reference_point).tolist()
        rows = [
            Ranked(trial, 0, contribution, self.chances.get(trial, 0.0), tuple(ties[trial]))
            for trial, contribution in zip(front, added, strict=True)
        ]
        rows.sort(key=lambda row: (-row.hv_contribution, row.trial))
        return rows + [Ranked(trial, None, 0.0, self.chances.get(trial, 0.0), tuple(ties[trial])) for trial in behind]

    @property
    def device_seconds(self) -> float:
        """Device time of the study's own measurements, in seconds."""
        return float(self._spent()[1][-1])

    def device_seconds_until(self, moments: Sequence[float]) -> Floats:
        """Returns the device seconds spent by each of the moments, which are in seconds since the epoch."""
        created, spent = self._spent()
        return np.asarray(spent[np.searchsorted(created, moments, side="right")])

    def _spent(self) -> tuple[Floats, Floats]:
        """Returns the time of each measurement [M], ascending, and the cumulated device seconds [M + 1]."""

        def compute() -> tuple[Floats, Floats]:
            measured = {
                result.key: (result.created, result.seconds)
                for record in self.records.values()
                for result in record.results
                if result.first and result.device is not None and result.stage == "measure"
            }
            rows = np.array(sorted(measured.values()), dtype=np.float64).reshape(-1, 2)
            return rows[:, 0], np.concatenate([[0.0], np.cumsum(rows[:, 1])])

        return self.cached("spent", compute)


class _Lazy:
    """A value that is computed once, with its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[Any] = []


class _Noise:
    """Results of drawing from the noise of the trials near the front; computed on first use.

    Args:
        record: of the study.
        near: the trials, with their objectives.
    """

    def __init__(self, record: StudyRecord, near: Mapping[int, Sequence[Axis]]) -> None:
        self._reference_point, self._near = record.reference_point, near
        self._quality = record.space.quality
        self._layouts = {trial: record.records[trial].layout for trial in near}

    def same(self, other: _Noise) -> bool:
        """Returns whether both have equal inputs."""
        return (self._reference_point, self._near) == (other._reference_point, other._near)

    @cached_property
    def chances(self) -> Mapping[int, float | None]:
        return front_chances({trial: self._sourced(trial) for trial in self._near})

    @cached_property
    def of_front(self) -> float | None:
        return front_noise({trial: self._sourced(trial) for trial in self._near})

    @cached_property
    def volume(self) -> Volume | None:
        return interval(self._near, self._reference_point) if self._reference_point is not None else None

    def _sourced(self, trial: int) -> list[Axis]:
        """Returns the objectives with the proxy as the source of the quality instead of the layout."""
        proxy = proxy_of(self._layouts[trial], self._quality).id
        return [axis.model_copy(update={"source": proxy}) if axis.source else axis for axis in self._near[trial]]


def block_roles() -> list[tuple[str, str]]:
    """Returns (role, kind) of all blocks, mixers first; `NONE` is the last of each role."""
    return [
        (role, kind)
        for role in ("mixer", "ffn")
        for kind in (*BLOCKS, NONE)
        if kind == NONE or BLOCKS[kind].role == role
    ]


def _counted(record: StudyRecord) -> dict[int, Sequence[Axis]]:
    counted: dict[int, Sequence[Axis]] = {}
    for completion in record.log.completions:
        trial = record.records[completion.trial]
        axes = [axis for axis in trial.axes if axis is not None]
        complete = trial.trial.status.state is TrialState.COMPLETE
        if complete and trial.trial.origin != "reference" and len(axes) == len(trial.axes) > 0:
            counted[completion.trial] = axes
    return counted


def _table(snapshot: StudySnapshot, before: StudySnapshot | None) -> NDArray[np.void]:
    """Returns `StudySnapshot.table`; rows of unchanged records are copied from `before`."""
    objectives, further = len(snapshot.space.objectives), len(snapshot.further)
    kinds = [
        ("state", "u1"),
        ("origin", "u1"),
        ("rung", "i4"),
        ("changed", "i8"),
        ("axes", "f8", (objectives, 4)),
        ("further", "f8", (further,)),
        ("sizes", "f8", (3,)),
        ("blocks", "f8", (len(snapshot.block_roles), TENTHS)),
    ]
    records = snapshot.records
    table = np.zeros(len(records), dtype=kinds)
    earlier: Mapping[int, Record] = {}
    if before is not None and before.table.dtype == table.dtype and before.further == snapshot.further:
        table[: len(before.table)] = before.table
        earlier = before.records
    for number, record in records.items():
        old = earlier.get(number)
        if old is record:
            continue
        status = record.trial.status
        row = table[number]
        row["state"], row["origin"] = STATES.index(status.state), ORIGINS.index(record.trial.origin)
        row["rung"] = NO_RUNG if status.rung is None else status.rung
        row["changed"] = record.changed
        row["axes"] = [_NOT_KNOWN if axis is None else _numbers(axis) for axis in record.axes]
        figures = record.figures if snapshot.further else {}
        values = [figures.get(figure.key, {}).get(figure.metric) for figure in snapshot.further]
        row["further"] = [math.nan if figure is None or figure.value is None else figure.value for figure in values]
        if old is None:
            layout = record.layout
            row["sizes"] = layout.params.total, layout.params.active, layout.kv_bytes(snapshot.context)
            row["blocks"] = _blocks(layout, snapshot.block_roles)
    return table


def _numbers(axis: Axis) -> tuple[float, ...]:
    sd, value_sd = (math.nan if number is None else number for number in (axis.sd, axis.value_sd))
    return axis.value, axis.coordinate, sd, value_sd


def _blocks(layout: Layout, roles: Sequence[tuple[str, str]]) -> Floats:
    """Returns [len(roles), TENTHS] the part of each tenth of the depth that a kind of block fills.

    Mixers side by side share their layer's part.
    """
    shares, parts = np.zeros((len(roles), TENTHS)), _tenths(layout.depth)
    for index in range(layout.depth):
        layer = layout.layer_at(index)
        mixers = [block.kind for block in layer.mixers] or [NONE]
        for kind in mixers:
            shares[roles.index(("mixer", kind))] += parts[index] / len(mixers)
        shares[roles.index(("ffn", layer.ffn.kind if layer.ffn else NONE))] += parts[index]
    return shares


@lru_cache(maxsize=1024)
def _tenths(depth: int) -> Sequence[Floats]:
    """Returns for each layer the part of each tenth of the depth that it fills: of two layers, each fills five."""
    edges = np.linspace(0, TENTHS, depth + 1)
    lower = np.arange(TENTHS)
    return [np.clip(np.minimum(edges[i + 1], lower + 1) - np.maximum(edges[i], lower), 0, 1) for i in range(depth)]


def rounded(numbers: Floats) -> Floats:
    """Returns the numbers with six significant digits; NaN stays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.nan_to_num(_DIGITS - 1 - np.floor(np.log10(np.abs(numbers))), nan=0.0, posinf=0.0, neginf=0.0)
    digits = np.minimum(digits, _MOST_DECIMALS)
    # Powers of ten above 1 are exact, those below are not: only then is the result the nearest number to the decimal.
    scale, large = 10.0 ** np.abs(digits), digits < 0
    return np.asarray(np.where(large, np.round(numbers / scale) * scale, np.round(numbers * scale) / scale))


class Snapshots:
    """A cache of the latest snapshots of studies. Leaving the context stops reading in advance.

    Args:
        store: where the studies are.
        most: studies in memory; the least recently used one is dropped first.
        most_trials: of all studies in memory, unless one alone has more; each takes some 40 kB.
    """

    def __init__(self, store: Store, most: int = 32, most_trials: int = 50_000) -> None:
        self._store, self._most, self._most_trials = store, most, most_trials
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _CacheEntry] = OrderedDict()
        self._stop = threading.Event()
        self._reader: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._reader is not None:
            self._reader.join()

    def get(self, name: str) -> StudySnapshot:
        """Returns the present snapshot of a study; only changes are read. Raises UnknownName and InvalidInput."""
        return self._get(studies.find_id(self._store, name))

    def warm(self) -> None:
        """Starts to read the latest studies, those that run first, in a thread, because a first read is slow."""
        self._reader = threading.Thread(target=self._warm, name="reading studies", daemon=True)
        self._reader.start()

    def _warm(self) -> None:
        rows = pages.latest_studies(self._store, limit=20)
        room = self._most_trials
        for row in sorted(rows, key=lambda row: (row.state is not StudyState.RUNNING, -row.id)):
            room -= row.trials
            if self._stop.is_set() or room < 0:
                return
            try:
                self._get(row.id)
            except NasError as error:  # a request for the study fails with the same error
                log.info("study %s cannot be read: %s", row.name, error)

    def _get(self, id: int) -> StudySnapshot:
        with self._lock:
            entry = self._entries.setdefault(id, _CacheEntry())
            self._entries.move_to_end(id)
        with entry.lock:  # a second request waits for the first instead of reading the study twice
            before = entry.snapshot
            record = read_study(self._store, id) if before is None else read_news(self._store, before.record)
            if before is None or record is not before.record:
                with readable(record.study.name):
                    entry.snapshot = StudySnapshot(record, before)
            snapshot = entry.snapshot
        assert snapshot is not None
        self._forget(id)
        return snapshot

    def _forget(self, id: int) -> None:
        """Drops studies above the limits, but never the study `id`."""
        with self._lock:
            trials = {study: entry.trials for study, entry in self._entries.items()}
            while len(trials) > 1 and (len(trials) > self._most or sum(trials.values()) > self._most_trials):
                oldest = next(study for study in trials if study != id)
                del trials[oldest], self._entries[oldest]


class _CacheEntry:
    """A snapshot, with the lock for updating it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.snapshot: StudySnapshot | None = None

    @property
    def trials(self) -> int:
        """The number of trials in the snapshot."""
        return len(self.snapshot.records) if self.snapshot else 0
