"""What the best layout of one target loses on another, and the best compromise.

A loss is time / time of the target's own best - 1. Intervals are bootstraps over the noise of measurements: deviations
from a layout's mean over rounds, drawn from all layouts of the target, are added to the means of the chosen ones. The
choice itself is not drawn again. A target's best is the fastest of all as measured, so losses are too large, by what
`Choice.flattery` says; the loss of a compromise is the least as measured, so it may be too small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.targets.table import Array, Times
from nas.core.layout import Layout

DRAWS = 2000
_FITS = 300
_SURE = 0.975
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class Choice:
    """Layouts that are chosen among some of a study.

    Args:
        best: [T] of each target, the fastest.
        losses: [T][T] loss of the best of the first target on the second.
        compromise: `worst` and `geomean` -> the layout whose worst, or mean, loss is least.
        compromise_losses: of these on each target.
        published: losses of the study's first layout on each target; empty where it was not measured.
        flattery: [T] share by which each target's best seems faster than it is, as noise chose it, too: in draws, where
            the measured means are the truth. These differ more than true ones, so it is rather too small.
    """

    best: list[int]
    losses: list[list[Interval]]
    compromise: dict[str, int]
    compromise_losses: dict[str, list[Interval]]
    published: list[Interval]
    flattery: list[float]


def choose(times: Times, allowed: Sequence[int]) -> Choice:
    """Returns what is chosen among `allowed` layouts, which are counted as in `times`."""
    means, drawn = times.means, times.draws(DRAWS)
    best = [min(allowed, key=lambda layout: means[layout, target]) for target in range(means.shape[1])]
    targets = range(len(best))

    def loss(layout: int, target: int) -> Interval:
        away = drawn[:, layout, target] - drawn[:, best[target], target]
        low, high = np.expm1(np.quantile(away, [0.025, 0.975]))
        return Interval(float(np.expm1(means[layout, target] - means[best[target], target])), float(low), float(high))

    away = means - np.array([means[best[target], target] for target in targets])
    compromise = {
        "worst": min(allowed, key=lambda layout: away[layout].max()),
        "geomean": min(allowed, key=lambda layout: away[layout].mean()),
    }
    chosen = np.array(allowed)[drawn[:, allowed].argmin(axis=1)]  # [DRAWS, T] layouts
    gains = means[chosen, targets] - np.take_along_axis(drawn, chosen[:, None], axis=1)[:, 0]
    return Choice(
        best=best,
        losses=[[loss(best[origin], target) for target in targets] for origin in targets],
        compromise=compromise,
        compromise_losses={name: [loss(layout, target) for target in targets] for name, layout in compromise.items()},
        published=[loss(times.places.index(0), target) for target in targets] if 0 in times.places else [],
        flattery=np.expm1(gains.mean(axis=0)).tolist(),
    )


def correlations(times: Times) -> Array:
    """Returns [T, T] Spearman correlations of the targets' orders of all layouts."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]  # takes a second to load

    matrix: Array = np.atleast_2d(spearmanr(times.means).statistic)
    return matrix


KINDS = ("conv", "gqa", "swa", "mamba2", "mlstm", "gdn")


@dataclass(frozen=True)
class KindCosts:
    """What a layer of each kind of mixer costs on each target, as a share of the mean layout's time there.

    All layouts have as many weights: a layer takes the place of dense feed-forward weights, and costs so much more.

    Args:
        costs: [K, T] of `KINDS`.
        low: [K, T] lower ends of 95 % intervals.
        high: [K, T] upper ends.
        dearer: [K, K, T] share of draws in which the first kind costs more than the second.
        off: [T] mean error of the sums.
    """

    costs: Array
    low: Array
    high: Array
    dearer: Array
    off: Array

    def flips(self) -> list[tuple[int, int, int, int]]:
        """Returns pairs of kinds of which the first costs more on one target and less on another, both for sure."""
        surely, never = self.dearer >= _SURE, self.dearer <= 1 - _SURE
        return [
            (a, b, int(np.argmax(self.dearer[a, b])), int(np.argmin(self.dearer[a, b])))
            for a, b in itertools.combinations(range(len(KINDS)), 2)
            if surely[a, b].any() and never[a, b].any()
        ]

    def flips_by_chance(self) -> float:
        """Returns how many pairs `flips` has in the mean where all kinds cost the same, and targets are independent."""
        targets, error = len(self.costs.T), 1 - _SURE
        return math.comb(len(KINDS), 2) * (1 - 2 * (1 - error) ** targets + (1 - 2 * error) ** targets)


def kind_costs(times: Times) -> KindCosts:
    """Fits each target's times as sums over layers, by least squares on relative errors.

    Parts: a constant; layers of each mixer; and millions of weights of feed-forwards with experts. Layouts are drawn
    again for the intervals, each with its noise and with what a sum misses of it, as nothing else tells the errors of
    sums. Draws lie as much nearer to the fit as residuals do, sqrt((L - P) / L) of P parts, and are moved away again.
    """
    layouts, means = times.layouts, times.means
    parts = np.array([_parts(layout) for layout in layouts])
    picks = np.random.default_rng(_SEED).integers(len(layouts), size=(_FITS, len(layouts)))
    mixers, targets = slice(1, 1 + len(KINDS)), range(means.shape[1])
    mean = np.exp(means.mean(axis=0))
    fits = np.array([_fit(parts, means[:, target]) for target in targets])
    again = np.array([[_fit(parts[pick], means[pick, target]) for target in targets] for pick in picks])
    again = (fits + (again - fits) * math.sqrt(len(layouts) / (len(layouts) - parts.shape[1])))[..., mixers]
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    return KindCosts(
        costs=(fits[:, mixers] / mean[:, None]).T,
        low=(low / mean[:, None]).T,
        high=(high / mean[:, None]).T,
        dearer=(again[:, :, :, None] > again[:, :, None, :]).mean(axis=0).transpose(1, 2, 0),
        off=np.abs(np.expm1(np.log(parts @ fits.T) - means)).mean(axis=0),
    )


def _parts(layout: Layout) -> list[float]:
    counts, experts = dict.fromkeys(KINDS, 0.0), 0.0
    for layer in layout.layers:
        for block in layer.blocks:
            if block.kind in counts:
                counts[block.kind] += 1
            elif block.kind == "moe":
                experts += block.spec.count(block, layout.d_model).total / 1e6
    return [1.0, *counts.values(), experts]


def _fit(parts: Array, logs: Array) -> Array:
    scaled = parts / np.exp(logs)[:, None]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(len(logs)), rcond=None)[0], np.float64)


def repeated(times: Times, first: int, second: int) -> tuple[float, float]:
    """Returns the noise of a mean over rounds by two equal targets, and what it should be by noise between rounds.

    The former is the deviation of the difference of their means / sqrt 2.
    """
    away = times.means[:, first] - times.means[:, second]
    expected = float(np.sqrt((times.deviations[:, [first, second]] ** 2).mean()))
    return float(away.std(ddof=1) / np.sqrt(2)), expected
