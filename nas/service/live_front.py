"""The front of a live study as its page tells it: contributions, how sure membership is, and what is tied with it.

Noise is drawn for the front and for what is near it only, and anew only when a trial that counts was completed or is
known otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.core.hypervolume import contributions
from nas.core.metrics import METRICS
from nas.core.scoring import Axis
from nas.core.space import SearchSpace
from nas.search import Volume, volume
from nas.service.live_course import LiveCourse
from nas.service.live_details import LiveDetails
from nas.service.live_table import LiveTable
from nas.service.ranking import DRAWS, front_chances

VOLUME_DRAWS = 400
MOST_NEAR = 256
"""Trials beside each other in draws from the noise, unless more are on the front itself."""

ALL_DRAWS = 128
"""Trials up to which all draws are made; their cost grows with the square."""
_FEWEST_DRAWS = 50
_SURELY = 3.0
"""Standard deviations."""

Floats = NDArray[np.float64]


class FrontRow(NamedTuple):
    """A trial on the front, or tied with one that is.

    Args:
        trial: number.
        on: whether it is on the front.
        hv_contribution: hypervolume that only this trial adds; 0 for what is tied only.
        p_front: share of draws from the noise in which it is on the front; None where too many are on it to tell.
        ties: trials that no axis tells apart from it, of those near the front.
    """

    trial: int
    on: bool
    hv_contribution: float
    p_front: float | None
    ties: tuple[int, ...]


class _Before(NamedTuple):
    """What was found last.

    Args:
        front: the trials on it.
        left: those, and all that were not surely worse than one of them.
    """

    front: NDArray[np.int64]
    left: NDArray[np.int64]


_NOTHING = _Before(np.empty(0, np.int64), np.empty(0, np.int64))


class LiveFront:
    """The rows of one study's front, kept until a trial that counts changes.

    Args:
        space: the study's.
        details: of its trials.
    """

    def __init__(self, space: SearchSpace, details: LiveDetails) -> None:
        self._quality = [METRICS[objective.metric].source == "proxy" for objective in space.objectives]
        self._details = details
        self._of = -1
        self._before = _NOTHING
        self._near: NDArray[np.int64] = np.empty(0, np.int64)
        self._numbers: Floats = np.empty(0)
        self._rows: list[FrontRow] = []
        self._volume: Volume | None = None

    def rows(self, table: LiveTable, course: LiveCourse, changed: int) -> list[FrontRow]:
        """Best first: the front by contribution, then what is tied with it.

        Args:
            table: of all trials.
            course: knows which count, and which are on the front.
            changed: the event by which they are what they are.
        """
        if changed != self._of:
            near = self._find_near(table, course)
            numbers = table.rows["axes"][near]
            # Most trials that complete come nowhere near the front: then nothing of it changes.
            if not np.array_equal(near, self._near) or not np.array_equal(numbers, self._numbers):
                self._volume, self._near, self._numbers = None, near, numbers
                self._rows = self._rank(table, course) if course.front else []
            self._of = changed
        return self._rows

    def volume(self, table: LiveTable, course: LiveCourse, changed: int) -> Volume | None:
        """The hypervolume with its interval; None without a front, and where too many trials are on it to draw."""
        self.rows(table, course, changed)
        draws = _draws(VOLUME_DRAWS, len(self._near))
        if self._volume is None and draws and course.corner is not None:
            numbers = table.rows["axes"][self._near]
            self._volume = volume(numbers[:, :, 1], numbers[:, :, 2], course.corner, draws)
        return self._volume

    def _find_near(self, table: LiveTable, course: LiveCourse) -> NDArray[np.int64]:
        """The trials on the front, and those that noise may bring there, by number.

        What was surely worse than a trial of the front still is, as long as that one is there and is known as it was:
        then only what is new is looked at beside what was left before.
        """
        front, pool, rows = np.array(course.front, np.int64), np.array(course.entered(), np.int64), table.rows
        if len(pool) <= MOST_NEAR:
            self._before = _NOTHING
            return pool
        news = np.flatnonzero(rows["changed"] > self._of)
        if self._stays(front, news):
            pool = pool[np.isin(pool, np.concatenate([self._before.left, news, front]))]
        numbers = rows["axes"][pool]
        near, margins = near_front(numbers[:, :, 1], numbers[:, :, 2], np.isin(pool, front))
        self._before = _Before(front, pool[near])
        return pool[nearest(near, margins, MOST_NEAR)]

    def _stays(self, front: NDArray[np.int64], news: NDArray[np.int64]) -> bool:
        """Whether all of the front is still there, and nothing else is known of it."""
        before = self._before.front
        return bool(len(before) and np.isin(before, front).all() and not np.isin(before, news).any())

    def _rank(self, table: LiveTable, course: LiveCourse) -> list[FrontRow]:
        trials, numbers = self._near.tolist(), table.rows["axes"][self._near]
        on = np.isin(self._near, course.front)
        points, sd = numbers[:, :, 1], numbers[:, :, 2]
        added = np.zeros(len(trials))
        assert course.corner is not None, "without a reference point there is no front"
        added[on] = contributions(points[on], course.corner)
        chances = self._chances(trials, numbers)
        tied = [np.flatnonzero(_tied(points, sd, i)).tolist() for i in range(len(trials))]
        told = set(np.flatnonzero(on).tolist()).union(*(tied[i] for i in np.flatnonzero(on).tolist()))
        rows = [
            FrontRow(
                trial=trials[i],
                on=bool(on[i]),
                hv_contribution=float(added[i]),
                p_front=None if chances is None else float(chances[i]),
                ties=tuple(trials[j] for j in tied[i] if j != i),
            )
            for i in told
        ]
        return sorted(rows, key=lambda row: (not row.on, -row.hv_contribution, row.trial))

    def _chances(self, trials: Sequence[int], numbers: Floats) -> Floats | None:
        draws = _draws(DRAWS, len(trials))
        if not draws:
            return None
        proxies = self._details.proxies(trials)
        axes = [
            [
                Axis(value=value, coordinate=coordinate, sd=sd, source=proxies[trial] if quality else None)
                for (value, coordinate, sd), quality in zip(row, self._quality, strict=True)
            ]
            for trial, row in zip(trials, numbers.tolist(), strict=True)
        ]
        return front_chances(numbers[:, :, 1], axes, draws)


def _draws(most: int, trials: int) -> int:
    """As many as take no longer than `most` of `ALL_DRAWS` trials; 0 where that is too few to tell by."""
    draws = min(most, most * ALL_DRAWS**2 // max(1, trials) ** 2)
    return draws if draws >= _FEWEST_DRAWS and trials else 0


def near_front(points: Floats, sd: Floats, front: NDArray[np.bool_]) -> tuple[NDArray[np.int64], Floats]:
    """Indices of the points on the front, and of those that noise may bring there, in order; and how far off they are.

    A point that is surely worse than one on the front, on every axis, is left out: where noise brings it before a third
    one, that one is before it all the more.

    Args:
        points: [P, M], minimised.
        sd: [P, M], their standard deviations.
        front: [P] whether they are on the front.

    Returns:
        [N], and for each by how many standard deviations it is worse, on its best axis, than the one of the front that
        is furthest ahead of it; minus infinity for the front itself.
    """
    on, near = np.flatnonzero(front), np.flatnonzero(~front)
    margins = np.full(len(near), -np.inf)
    for i in on.tolist():
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = (points[near] - points[i]) / np.hypot(sd[near], sd[i])
        # Without noise what is equal is no distance away, and everything else an infinite one.
        margins = np.maximum(margins, np.nan_to_num(apart, nan=0.0).min(axis=1))
        left = margins < _SURELY
        near, margins = near[left], margins[left]
    found = np.concatenate([on, near])
    order = np.argsort(found)
    return found[order], np.concatenate([np.full(len(on), -np.inf), margins])[order]


def nearest(found: NDArray[np.int64], margins: Floats, most: int) -> NDArray[np.int64]:
    """At most so many of what `near_front` found, unless more are on the front: the nearest, in order."""
    kept = np.argsort(margins, kind="stable")[: max(most, int(np.isneginf(margins).sum()))]
    return np.sort(found[kept])


def _tied(points: Floats, sd: Floats, i: int) -> NDArray[np.bool_]:
    """[P] what no axis tells apart from point `i`, as `nas.core.scoring.tie` has it."""
    return np.asarray((np.abs(points - points[i]) <= 2 * np.hypot(sd, sd[i])).all(axis=1))
