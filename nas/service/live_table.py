"""A study's trials as a table in memory: a row for each trial, at the place of its number."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.scoring import Place, QualityValue, axis
from nas.core.space import SearchSpace
from nas.core.trial import TERMINAL, TrialState
from nas.core.workload import Workload
from nas.service.live_axes import PlaceFigure
from nas.service.record import Figures
from nas.store import columns
from nas.store.columns import MeasuredRow, QualityRow, TrialRow
from nas.store.store import Store

STATES = tuple(state.value for state in TrialState)
"""What the codes of the column `state` mean."""
ORIGINS = ("reference", "seed", "proposal")
"""What the codes of the column `origin` mean."""
UNKNOWN, BROKEN, KEPT = -1, 0, 1
"""What the codes of `LiveTable.feasible` say of a trial's budgets."""
NO_RUNG = -1
ID_DIGITS = 12

_PASSED = ("gated_in", "training", "confirming", "complete", "stopped")
_FEASIBLE = np.array([KEPT if s in _PASSED else BROKEN if s == "infeasible" else UNKNOWN for s in STATES], np.int8)
_GOING_ON = np.array([state not in TERMINAL for state in STATES])
_STATE_CODE = {state: code for code, state in enumerate(STATES)}
_ORIGIN_CODE = {origin: code for code, origin in enumerate(ORIGINS)}

_NOT_KNOWN = (math.nan,) * 3

_Where = tuple[str, str, str]
"""A device's id, a runtime, and the JSON of a workload."""

_TRIALS_PER_READ = 1000
"""Bounds what is in memory of a study's figures at once."""


class Constants(NamedTuple):
    """What a trial's figures are judged by.

    Args:
        space: the study's.
        devices: (a device's id, what the space calls it).
        published: the published reference's figures; None until they are taken.
        further: figures to be kept beside the objectives.
    """

    space: SearchSpace
    devices: Collection[tuple[str, str]]
    published: Figures | None
    further: Sequence[PlaceFigure]


class LiveTable:
    """The rows of one study: about 40 + 24 A + 8 F bytes each.

    `rows` has the columns `state` and `origin` (codes), `rung`, `noisy`, `layout_id` (the digits that people see),
    `changed` (id of the event by which the row is what it is), `axes` [A, 3]: value, coordinate, and the coordinate's
    standard deviation of each objective, and `further` [F]: the values of the figures beside them; NaN where it is not
    known.

    Args:
        axes: A, the number of objectives.
        further: F, the number of figures beside them.
    """

    def __init__(self, axes: int, further: int) -> None:
        kinds = [
            ("state", "u1"), ("origin", "u1"), ("rung", "i2"), ("noisy", "?"), ("layout_id", f"S{ID_DIGITS}"),
            ("changed", "i8"), ("axes", "f8", (axes, 3)), ("further", "f8", (further,)),
        ]  # fmt: skip
        self._rows = np.zeros(0, dtype=kinds)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def rows(self) -> NDArray[np.void]:
        """[N] all rows, as a view."""
        return self._rows[: self._size]

    def feasible(self) -> NDArray[np.int8]:
        """[N] whether the device gate found that the budgets are kept."""
        return np.asarray(_FEASIBLE[self.rows["state"]])

    def states(self) -> dict[str, int]:
        """State -> trials in it, references not counted; states without trials are left out."""
        own = self.rows["state"][self.rows["origin"] != _ORIGIN_CODE["reference"]]
        counts = np.bincount(own, minlength=len(STATES)).tolist()
        return {state: count for state, count in zip(STATES, counts, strict=True) if count}

    def going_on(self, most: int) -> list[int]:
        """The first trials that have not ended, by number."""
        found: list[int] = np.flatnonzero(_GOING_ON[self.rows["state"]])[:most].tolist()
        return found

    def points(self, trials: Sequence[int]) -> tuple[list[int], NDArray[np.float64]]:
        """Those of the trials that count for the front once they are complete, and their coordinates [P, A]."""
        rows = self.rows[list(trials)]
        coordinates = rows["axes"][:, :, 1]
        counts = (rows["origin"] != _ORIGIN_CODE["reference"]) & ~rows["noisy"] & np.isfinite(coordinates).all(axis=1)
        return [trial for trial, yes in zip(trials, counts.tolist(), strict=True) if yes], coordinates[counts]

    def read(self, store: Store, study: int, trials: Sequence[int], constants: Constants) -> Iterator[MeasuredRow]:
        """Takes over what the database says of the trials, a bounded number of them at a time.

        Returns:
            What they had measured themselves; the table is only read as far as this has been gone through.
        """
        for start in range(0, len(trials), _TRIALS_PER_READ):
            some = trials[start : start + _TRIALS_PER_READ]
            self._take(columns.states(store, study, some))
            for number, event in columns.last_events(store, study, some).items():
                self._rows[number]["changed"] = event
            measured = columns.measured(store, study, some)
            self._judge(measured, columns.qualities(store, study, some), constants)
            yield from (row for row in measured if row.first)

    def _take(self, found: Sequence[TrialRow]) -> None:
        self._make_room(found[-1].number + 1 if found else 0)
        at = [row.number for row in found]
        self._rows["state"][at] = [_STATE_CODE[row.state] for row in found]
        self._rows["origin"][at] = [_ORIGIN_CODE[row.origin] for row in found]
        self._rows["rung"][at] = [NO_RUNG if row.rung is None else row.rung for row in found]
        self._rows["layout_id"][at] = [row.layout_id[:ID_DIGITS] for row in found]

    def _judge(
        self, measured: Iterable[MeasuredRow], qualities: Iterable[QualityRow], constants: Constants
    ) -> None:  # fmt: skip
        rows_of: dict[int, list[MeasuredRow]] = {}
        for row in measured:
            rows_of.setdefault(row.trial, []).append(row)
        quality_of = {row.trial: row for row in qualities}
        places: dict[_Where, list[Place]] = {}
        known = [*(rows_of.keys() | quality_of.keys())]
        if not known:
            return
        kept = [by_place(rows_of.get(number, ()), constants, places) for number in known]
        axes = [_axes(each, quality_of.get(number), constants) for number, each in zip(known, kept, strict=True)]
        # Whole columns: row by row, writing would take as long as reckoning.
        self._rows["noisy"][known] = [any(row.noisy for row in each.values()) for each in kept]
        self._rows["further"][known] = [_further(each, constants) for each in kept]
        self._rows["axes"][known] = np.reshape(axes, (len(known), -1, 3))

    def _make_room(self, size: int) -> None:
        if size > len(self._rows):
            larger = np.zeros(max(size, 2 * self._size), dtype=self._rows.dtype)
            larger["axes"] = larger["further"] = math.nan
            larger[: self._size] = self.rows
            self._rows = larger
        self._size = max(size, self._size)


def by_place(
    rows: Iterable[MeasuredRow], constants: Constants, known: dict[_Where, list[Place]]
) -> dict[Place, MeasuredRow]:
    """The one with the most repetitions that count at every place, as `nas.service.record` has it.

    Args:
        rows: of one trial.
        constants: name the places.
        known: what a place was found for before; there are few, and looking costs more than the rest.
    """
    kept: dict[Place, MeasuredRow] = {}
    for row in rows:
        where = row.device, row.runtime, row.workload
        if where not in known:
            known[where] = [*_places(row, constants)]
        for place in known[where]:
            before = kept.get(place)
            if before is None or row.figures["ttft"]["n"] >= before.figures["ttft"]["n"]:
                kept[place] = row
    return kept


def figure_at(kept: Mapping[Place, MeasuredRow], wanted: PlaceFigure) -> Mapping[str, Any] | None:
    """A figure of a trial as it was stored, of what `by_place` gives; what needs no workload is of any of them."""
    row = kept.get(wanted.place)
    if row is None and not wanted.place.workload:
        row = next((row for place, row in kept.items() if place._replace(workload="") == wanted.place), None)
    return None if row is None else row.figures.get(wanted.metric)


def _places(row: MeasuredRow, constants: Constants) -> Iterator[Place]:
    key = Workload.model_validate_json(row.workload).key()
    for device in (name for id, name in constants.devices if id == row.device):
        for workload, each in constants.space.workloads.items():
            if each.key() == key:
                yield Place(device, row.runtime, workload)


def _further(kept: Mapping[Place, MeasuredRow], constants: Constants) -> list[float]:
    """[F]."""
    taken = [figure_at(kept, each) or {"value": None} for each in constants.further]
    return [math.nan if each["value"] is None else each["value"] for each in taken]


def _axes(
    kept: Mapping[Place, MeasuredRow], quality: QualityRow | None, constants: Constants
) -> list[tuple[float, float, float]]:
    """[A] value, coordinate and standard deviation of each objective."""
    space, published = constants.space, constants.published
    if published is None:
        return [_NOT_KNOWN] * len(space.objectives)
    wanted = {objective.metric for objective in space.objectives}
    figures: Figures = {}
    for place, row in kept.items():
        taken = {name: Figure.model_validate(row.figures[name]) for name in wanted & row.figures.keys()}
        figures[place] = taken
        if "file_size" in taken:  # what needs no workload stands under none, too
            figures[place._replace(workload="")] = {"file_size": taken["file_size"]}
    proxy = QualityValue(quality.value, quality.sd, "") if quality else QualityValue(0.0, 0.0, "")
    found = [
        None
        if quality is None and METRICS[objective.metric].source == "proxy"
        else axis(space, objective, figures, published, proxy)
        for objective in space.objectives
    ]
    return [_NOT_KNOWN if each is None else (each.value, each.coordinate, each.sd) for each in found]
