"""Comparisons of layouts with a reference, such that what is said of the best of many is true as often as it says.

Two ways lead to that. Values that were measured after a layout was named hold nothing of the luck that named it: their
intervals are ordinary ones. Values that a layout was named by are compared at a level that holds for all layouts that
could have been named, at once (Bonferroni). Coordinates are minimised, so a gain is reference - layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from nas.core.pareto import TrialAxes, arrays, contributions, front_mask
from nas.core.scoring import Axis, together
from nas.core.stats import t_critical

CONFIDENCE = 0.95
"""Least chance that all intervals of one statement hold, and that no layout is called better by mistake."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better a layout is than the reference on one objective.

    Args:
        value: in coordinates.
        sd: standard deviation of `value`; None: not known.
        dof: degrees of freedom of `sd`; None: it is known.
    """

    value: float
    sd: float | None
    dof: int | None = None

    def bounds(self, error: float) -> tuple[float, float]:
        """Returns the interval that the true gain is below with the chance `error`, and above with the same."""
        if self.sd is None:
            return -math.inf, math.inf
        wide = NormalDist().inv_cdf(1 - error) if self.dof is None else t_critical(1 - 2 * error, self.dof)
        half = wide * self.sd
        return self.value - half, self.value + half

    def better(self, error: float) -> bool:
        """Returns whether the gain is above 0, which is wrong with the chance `error` at most."""
        return self.bounds(error)[0] > 0

    def worse(self, error: float) -> bool:
        """Returns whether the gain is below 0, which is wrong with the chance `error` at most."""
        return self.bounds(error)[1] < 0


def gains(axes: Sequence[Axis], reference: Sequence[Axis], dofs: Sequence[int | None] = ()) -> list[Gain]:
    """Returns the gains of a layout by one measurement of it and of the reference.

    Args:
        axes: its objectives.
        reference: the objectives of the reference.
        dofs: degrees of freedom of the stated deviations; left out: these are known.
    """
    rows = zip(axes, reference, dofs or [None] * len(axes), strict=True)
    return [Gain(other.coordinate - axis.coordinate, together(axis.sd, other.sd), dof) for axis, other, dof in rows]


def is_better(of_layout: Sequence[Gain], error: float, worse_error: float) -> bool:
    """Returns whether a layout is better in something and, as far as the noise tells, worse in nothing.

    Args:
        of_layout: a gain for each objective.
        error: chance at most that it is called better on one objective by mistake.
        worse_error: the same of worse; greater ones call fewer layouts better.
    """
    return any(gain.better(error) for gain in of_layout) and not any(gain.worse(worse_error) for gain in of_layout)


def naming_order(axes: TrialAxes, reference: Sequence[Axis], reference_point: Sequence[float]) -> list[int]:
    """Returns the trials of the front, those that stand out first: an order, which says nothing of how sure it is.

    First come those that are better than the reference somewhere and worse nowhere by the measured values, each by
    itself; among equal ones those that add more hypervolume, then those of lower number.
    """
    trials = sorted(axes)
    if not trials:
        return []
    points, _ = arrays(axes, trials)
    front = np.flatnonzero(front_mask(points))
    added = contributions(points[front], reference_point).tolist()
    error = tail(1)
    rows = [
        (not is_better(gains(axes[trials[index]], reference), error, error), -volume, trials[index])
        for index, volume in zip(front, added, strict=True)
    ]
    return [trial for _, _, trial in sorted(rows)]


def tail(statements: int) -> float:
    """Returns the chance of each side of an interval, such that so many intervals hold together with `CONFIDENCE`."""
    return (1 - CONFIDENCE) / (2 * statements)


def better_of(members: Mapping[int, Sequence[Gain]], error: float) -> list[int]:
    """Returns which layouts are better than the reference; any is called so by mistake with the chance `error` at most.

    By Holm's procedure: with each layout that is better, fewer are left for which mistakes are possible.
    """
    open_members, winners = dict(members), set[int]()
    while open_members:
        level = error / sum(map(len, open_members.values()))
        passed = {trial for trial, row in open_members.items() if is_better(row, level, tail(len(row)))}
        if not passed:
            break
        winners |= passed
        open_members = {trial: row for trial, row in open_members.items() if trial not in passed}
    return [trial for trial in members if trial in winners]
