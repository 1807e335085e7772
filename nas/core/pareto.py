"""Dominance. Everything is minimised: rows are points, columns are coordinates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nas.core.scoring import Axis


def dominates(points: ArrayLike, others: ArrayLike) -> NDArray[np.bool_]:
    """Returns [P, O] whether point p is nowhere worse than other o and somewhere better; equal points do not dominate.

    Args:
        points: [P, M].
        others: [O, M].
    """
    a, b = np.asarray(points, dtype=float), np.asarray(others, dtype=float)
    no_worse, better = np.ones((len(a), len(b)), dtype=np.bool_), np.zeros((len(a), len(b)), dtype=np.bool_)
    for axis, other in zip(a.T, b.T, strict=True):  # a few axes of many points: several times faster than at once
        no_worse &= axis[:, None] <= other
        better |= axis[:, None] < other
    return no_worse & better


def front_mask(points: ArrayLike) -> NDArray[np.bool_]:
    """Returns [..., P] whether no other of [..., P, M] points dominates it; of equal points all stay."""
    values = np.asarray(points, dtype=float)
    if values.ndim < 2:  # an empty list
        return np.zeros(0, dtype=np.bool_)
    no_worse = np.ones((*values.shape[:-1], values.shape[-2]), dtype=np.bool_)
    for axis in np.moveaxis(values, -1, 0):
        no_worse &= axis[..., :, None] <= axis[..., None, :]
    return np.asarray(~np.any(no_worse & ~np.swapaxes(no_worse, -1, -2), axis=-2), dtype=np.bool_)


def ranks(points: ArrayLike) -> NDArray[np.int64]:
    """Returns [P] the non-dominated rank: 0 on the front, 1 on that of the rest, ... (Deb et al. 2002, NSGA-II)."""
    values = np.asarray(points, dtype=float)
    rank = np.full(len(values), -1, dtype=np.int64)
    beaten = dominates(values, values) if len(values) else np.zeros((0, 0), dtype=np.bool_)
    better = beaten.sum(axis=0)
    level = 0
    while (front := (rank < 0) & (better == 0)).any():
        rank[front] = level
        better = better - beaten[front].sum(axis=0)
        level += 1
    return rank


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Returns the volume between the front of `points` and `reference`.

    Args:
        points: [P, M], any number of them, dominated ones too.
        reference: [M], the worst corner.
    """
    import moocore  # type: ignore[import-untyped]

    corner = np.asarray(reference, dtype=float)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(corner))
    inside = values[(values < corner).all(axis=1)]
    return float(moocore.hypervolume(inside, ref=corner)) if len(inside) else 0.0


def contributions(points: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """Returns [P] the hypervolume lost without that point alone; 0 for dominated points and duplicates."""
    import moocore

    corner = np.asarray(reference, dtype=float)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(corner))
    inside = (values < corner).all(axis=1)
    volumes = np.zeros(len(values))
    if inside.any():
        volumes[inside] = moocore.hv_contributions(values[inside], ref=corner, ignore_dominated=False)
    return volumes


DRAWS = 1000
MOST_NEAR = 256
"""Trials for which noise is drawn, unless more are on the front itself: the cost of a draw grows with their square."""
_FEWEST_DRAWS = 50
_SURELY = 3.0
"""Standard deviations."""
_COMPARED = 1 << 16
"""Pairs of points that are compared at once, few enough for a processor's cache."""
_SEED = 0

Floats = NDArray[np.float64]
TrialAxes = Mapping[int, Sequence[Axis]]
"""Trial number -> its objectives."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A complete trial in the order of a study's trials.

    Args:
        trial: number.
        rank: 0 for the front, 1 for the front without that, ...; None for one behind it that was not ranked.
        hv_contribution: hypervolume that only this trial adds within its rank.
        p_front: share of draws from the trials' noise in which it is on the front; None if too many are on it to draw,
            or if the noise of one near it is not known.
        ties: trials that no axis separates from it.
    """

    trial: int
    rank: int | None
    hv_contribution: float
    p_front: float | None
    ties: tuple[int, ...]

    @property
    def on(self) -> bool:
        """Whether it is on the front."""
        return self.rank == 0


def rank_trials(
    axes: TrialAxes,
    reference_point: Sequence[float],
    chances: Mapping[int, float | None] | None = None,
) -> list[Ranked]:
    """Ranks complete trials by non-dominated rank, then by hypervolume contribution, then by number.

    Args:
        axes: of the trials.
        reference_point: in coordinates.
        chances: what `front_chances` has found before.
    """
    trials = sorted(axes)
    if not trials:
        return []
    points, sd = arrays(axes, trials)
    rank = ranks(points)
    parts = np.zeros(len(trials))
    for level in range(int(rank.max()) + 1):
        members = rank == level
        parts[members] = contributions(points[members], reference_point)
    if chances is None:
        chances = front_chances({trial: axes[trial] for trial in near_front(axes)})
    order = sorted(range(len(trials)), key=lambda i: (rank[i], -parts[i], trials[i]))
    return [
        Ranked(
            trial=trials[i],
            rank=int(rank[i]),
            hv_contribution=float(parts[i]),
            p_front=chances.get(trials[i], 0.0),
            ties=tuple(trials[j] for j in tied(points, sd, i)),
        )
        for i in order
    ]


def front_hypervolume(axes: TrialAxes, reference_point: Sequence[float]) -> float:
    """Returns the hypervolume of the complete trials; 0.0 without any."""
    return hypervolume(arrays(axes, sorted(axes))[0], reference_point) if axes else 0.0


def arrays(axes: TrialAxes, trials: Sequence[int]) -> tuple[Floats, Floats]:
    """Returns the coordinates [P, M] and standard deviations [P, M] of some trials; NaN: noise that is not known."""
    values = np.array([[(axis.coordinate, axis.sd) for axis in axes[trial]] for trial in trials], dtype=np.float64)
    values = values.reshape(len(trials), -1, 2)
    return values[:, :, 0], values[:, :, 1]


def tied(points: Floats, sd: Floats, i: int) -> list[int]:
    """Returns which of `points` [P, M] are closer than 2 `sd` [P, M] to point `i` on every axis, as indices.

    No difference separates values of unknown noise.
    """
    alike = ~(np.abs(points - points[i]) > 2 * np.hypot(sd, sd[i])).any(axis=1)
    alike[i] = False
    return [int(j) for j in np.flatnonzero(alike)]


def near_front(axes: TrialAxes, most: int = MOST_NEAR, front: Collection[int] | None = None) -> list[int]:
    """Returns the trials on the front and those that noise may bring there, in the order of `axes`.

    A trial that is surely worse than one on the front, on every axis, is left out: where noise puts it before a third
    trial, the one on the front is before that all the more.

    Args:
        axes: of the trials; all of them are returned if they are no more than `most`.
        most: trials, unless more are on the front: of others, those that are the fewest standard deviations worse, on
            their best axis, than the trial of the front that is furthest ahead of them.
        front: the trials on the front, if they are known.
    """
    trials = [*axes]
    if len(trials) <= most:
        return trials
    points, sd = arrays(axes, trials)
    on = front_mask(points) if front is None else np.isin(trials, [*front])
    near, margins = np.flatnonzero(~on), np.full(int((~on).sum()), -np.inf)
    for i in np.flatnonzero(on):
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = (points[near] - points[i]) / np.hypot(sd[near], sd[i])
        # Without noise equal values are 0 apart, all others infinitely far; of unknown noise all are 0 apart.
        margins = np.maximum(margins, np.nan_to_num(apart, nan=0.0).min(axis=1))
        possible = margins < _SURELY
        near, margins = near[possible], margins[possible]
    room = max(0, most - int(on.sum()))
    rows = np.concatenate([np.flatnonzero(on), near[np.argsort(margins, kind="stable")[:room]]])
    return [trials[i] for i in np.sort(rows)]


def affordable_draws(most: int, trials: int) -> int:
    """Returns how many draws take no longer than `most` of `MOST_NEAR` trials; 0 if they are too few to tell by."""
    draws = min(most, most * MOST_NEAR**2 // max(1, trials) ** 2)
    return draws if draws >= _FEWEST_DRAWS else 0


def front_chances(axes: TrialAxes, draws: int = DRAWS) -> dict[int, float | None]:
    """Returns the share of draws from the noise in which each trial is on the front.

    None if they are too many, or if the noise of one of them is not known: the chances of all depend on it.

    Args:
        axes: of the trials that are drawn, in the order in which they get their noise; values with the same `source`
            get the same, for one proxy has one error, however many layouts it is trained for.
        draws: at most.
    """
    drawn = _drawn_fronts(axes, draws)
    if drawn is None:
        return dict.fromkeys(axes)
    return {trial: float(share) for trial, share in zip(axes, drawn.mean(axis=0), strict=True)}


def front_noise(axes: TrialAxes, draws: int = DRAWS) -> float | None:
    """Returns the share of a front's members that are there by noise alone; None where `front_chances` is.

    Measured values are true ones with one draw of noise. One more draw is to them what they are to the true values: so
    the share of the new front's members that are not on the measured front estimates the share of the measured front's
    members that are not on the true one. The mean of 1 - `p_front` over members would be 1.3 to 1.5 times too much.

    Args:
        axes: as in `front_chances`.
        draws: at most.
    """
    drawn = _drawn_fronts(axes, draws)
    if drawn is None:
        return None
    members = drawn.sum(axis=1)
    strangers = drawn[:, ~front_mask(arrays(axes, [*axes])[0])].sum(axis=1)
    return float((strangers / members).mean())


def _drawn_fronts(axes: TrialAxes, draws: int) -> NDArray[np.bool_] | None:
    """Returns [draws, len(axes)] which trials are on the front under each draw of noise; None if none can be drawn."""
    draws = affordable_draws(draws, len(axes))
    if not axes or not draws:
        return None
    points, sd = arrays(axes, [*axes])
    if np.isnan(sd).any():
        return None
    noise = np.random.default_rng(_SEED).standard_normal((draws, *points.shape))
    for column in range(points.shape[1]):
        first: dict[str, int] = {}
        for i, row in enumerate(axes.values()):
            if (source := row[column].source) is not None:
                noise[:, i, column] = noise[:, first.setdefault(source, i), column]
    together = max(1, _COMPARED // len(axes) ** 2)
    return np.concatenate(
        [front_mask(points + sd * noise[start : start + together]) for start in range(0, draws, together)]
    )


_CHUNK = 1024


class FrontArchive:
    """The points that no other dominates; of equal ones all stay, as in `nas.core.pareto.front_mask`.

    A point costs O(front), and one that gets onto the front a hypervolume of the front besides: the volume that is
    gained is that of the point's own box without the part which the others cover in it (Bringmann and Friedrich 2010,
    "An efficient algorithm for computing hypervolume contributions", lemma 1).

    Args:
        reference: [M], the worst corner. Points that are not better on every coordinate gain nothing.
    """

    def __init__(self, reference: ArrayLike) -> None:
        self._reference = np.asarray(reference, dtype=np.float64)
        self._points = np.empty((0, len(self._reference)))
        self._keys = np.empty(0, dtype=np.int64)
        self.hypervolume = 0.0
        """The hypervolume of the points so far."""

    @property
    def keys(self) -> NDArray[np.int64]:
        """[F] of the points on the front, in the order in which they came."""
        return self._keys

    @property
    def points(self) -> NDArray[np.float64]:
        """[F, M]."""
        return self._points

    def take(self, keys: Sequence[int] | NDArray[np.int64], points: ArrayLike) -> NDArray[np.float64]:
        """Adds points in this order and returns [P] the hypervolume that each gained.

        Args:
            keys: [P] what the points are called.
            points: [P, M], finite.
        """
        values = np.asarray(points, dtype=np.float64).reshape(-1, len(self._reference))
        assert len(keys) == len(values) and np.isfinite(values).all(), "every point has a key, and is a point"
        gains = np.zeros(len(values))
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            # What the front beats already, it will beat when the point's turn comes.
            for i in (start + np.flatnonzero(~dominates(self._points, chunk).any(axis=0))).tolist():
                gains[i] = self._take(int(keys[i]), values[i])
        return gains

    def _take(self, key: int, point: NDArray[np.float64]) -> float:
        if dominates(self._points, point[None]).any():
            return 0.0
        gain = self._gain(point)
        staying = ~dominates(point[None], self._points)[0]
        self._points = np.concatenate([self._points[staying], point[None]])
        self._keys = np.append(self._keys[staying], key)
        self.hypervolume += gain
        return gain

    def _gain(self, point: NDArray[np.float64]) -> float:
        if not (point < self._reference).all():
            return 0.0
        box = float(np.prod(self._reference - point))
        # Rounding may leave less than nothing of a box that is covered.
        return max(0.0, box - hypervolume(np.maximum(self._points, point), self._reference))
