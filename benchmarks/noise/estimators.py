"""Recorded runs, and estimators of device times from them.

An estimator turns the runs of one layout in one unit, and the reference runs beside them, into the logarithm of a
figure. The level of the reference is a constant of the machine that cancels in every comparison, so none subtracts it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.noise.record import REFERENCE
from nas.core.measurement import ClockName
from nas.core.stats import FASTEST
from nas.measure.protocol.estimator import SLICE, Phase, token_time

Array = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
METRICS: tuple[Phase, ...] = ("ttft", "decode")
CLOCKS: tuple[ClockName, ...] = ("wall", "cpu")
Series = tuple[str, str]
"""Clock and quantity: ttft, decode (median of the tokens), decode_q10 (their 10 % quantile), total, tokens.

A value for each run; of tokens a row with each token's time.
"""


@dataclass(frozen=True)
class Runs:
    """Runs of one layout in one unit; a row for each repetition.

    Args:
        times: logarithms of ms.
        before: of the reference run before each.
        after: of the reference run after each; of the last ones the one before.
        at: number of the reference run before each.
        seconds: of device time of a repetition, and of a reference run.
    """

    times: Mapping[Series, Array]
    before: Mapping[Series, Array]
    after: Mapping[Series, Array]
    at: NDArray[np.int64]
    seconds: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Unit:
    """Some rounds of one condition.

    Args:
        machine: folder of the recording.
        runtime: name.
        threads: of each run.
        condition: see `benchmarks.noise.record`.
        block: units of one condition are numbered; a block is minutes from the next.
        layouts: number -> runs.
        reference: all reference runs in order.
    """

    machine: str
    runtime: str
    threads: int
    condition: str
    block: int
    layouts: Mapping[int, Runs]
    reference: Mapping[Series, Array]

    @cached_property
    def bed(self) -> tuple[str, str, int]:
        """What calm figures are compared on."""
        return self.machine, self.runtime, self.threads


def read_units(folders: Sequence[Path]) -> list[Unit]:
    """Returns the recorded units of folders."""
    return [_unit(path) for folder in folders for path in sorted(folder.glob("*.jsonl.gz"))]


def _unit(path: Path) -> Unit:
    condition, runtime, threads, block = path.name.removesuffix(".jsonl.gz").rsplit("-", 3)
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    references: list[Any] = []
    runs: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for row in rows:
        if row["layout"] == REFERENCE:
            references.append(row)
        else:
            runs[row["layout"]].append((len(references) - 1, row))
    reference = _series(references)
    reference_s = float(np.mean([row["seconds"] for row in references]))
    layouts = {}
    for number, layout_rows in runs.items():
        at = np.array([place for place, _ in layout_rows])
        after = np.minimum(at + 1, len(references) - 1)
        layouts[number] = Runs(
            _series([row for _, row in layout_rows]),
            {name: values[at] for name, values in reference.items()},
            {name: values[after] for name, values in reference.items()},
            at,
            (float(np.mean([row["seconds"] for _, row in layout_rows])), reference_s),
        )
    return Unit(path.parent.name, runtime, int(threads), condition, int(block), layouts, reference)


SLICES = (4, 8, SLICE)


def _series(rows: Rows) -> dict[Series, Array]:
    series: dict[Series, Array] = {}
    for clock, first, tokens in (("wall", "ttft_us", "decode_us"), ("cpu", "ttft_cpu_us", "decode_cpu_us")):
        ttft = np.array([row[first] for row in rows]) / 1e3
        tokens_ms = [np.array(row[tokens]) / 1e3 for row in rows]
        series[clock, "ttft"] = np.log(ttft)
        series[clock, "decode"] = np.log([np.median(one) for one in tokens_ms])
        series[clock, "decode_q10"] = np.log([np.quantile(one, 0.1) for one in tokens_ms])
        for size in SLICES:
            series[clock, f"slices of {size}"] = np.log([token_time(one.tolist(), size) for one in tokens_ms])
        series[clock, "tokens"] = np.log(np.array(tokens_ms))
        series[clock, "total"] = np.log(ttft + [float(np.sum(one)) for one in tokens_ms])
    return series


def floor(logs: Array, of: int = FASTEST) -> Array:
    """Returns the logarithm of the mean of the lowest of `of` times, over the first axis: `nas.core.stats.floor`."""
    lowest = np.sort(logs, axis=0)[: math.ceil(len(logs) / of)]
    log_mean: Array = np.log(np.exp(lowest).mean(axis=0))
    return log_mean


Statistic = Callable[[Array], Array]
"""Of logarithms of times, over the first axis."""

STATISTICS: Mapping[str, Statistic] = {
    "median": lambda logs: np.asarray(np.median(logs, axis=0)),
    "q25": lambda logs: np.asarray(np.quantile(logs, 0.25, axis=0)),
    "min": lambda logs: np.asarray(logs.min(axis=0)),
    "third": lambda logs: floor(logs, 3),
    "floor": floor,
}


@dataclass(frozen=True)
class Estimate:
    """One figure and what its interval is made of, all logarithms.

    Args:
        value: of the figure.
        slow: of the reference's time.
        noise: the spread of repetitions / the square root of their number.
        count: of repetitions.
    """

    value: float
    slow: float
    noise: float
    count: int


@dataclass(frozen=True)
class Estimator:
    """One way to compute a figure.

    Args:
        clock: wall: time that passed; cpu: processor time.
        statistic: over repetitions.
        correction: for the speed of the machine, see `CORRECTIONS`.
        tokens: decode: the median of a run's tokens; decode_q10: their 10 % quantile; slices of N: the median over
            slices of N tokens of the fastest of each; tokens: the statistic is taken of each token by itself over runs,
            then the median over tokens.
    """

    clock: ClockName
    statistic: str
    correction: str = "none"
    tokens: str = "decode"

    @property
    def name(self) -> str:
        """As in tables."""
        suffixes = {"decode": "", "decode_q10": ", fast tokens", "tokens": ", by token"}
        fast = suffixes.get(self.tokens, f", {self.tokens}")
        return f"{self.clock} {self.statistic}{fast}" + (f", {self.correction}" if self.correction != "none" else "")

    @property
    def settings(self) -> tuple[float, ...]:
        """Values of the fitted constant to choose from."""
        return CORRECTIONS[self.correction]

    def series(self, metric: str) -> Series:
        """Returns what is read for `metric`."""
        return self.clock, self.tokens if metric == "decode" else metric

    def estimate(self, unit: Unit, layout: int, repetitions: int, metric: str, setting: float) -> Estimate:
        """Estimates one figure from the first repetitions."""
        series, statistic = self.series(metric), self._over_runs
        level = _level(unit, layout, repetitions, series, self.statistic)
        if self.correction in ("none", "ratio", "half", "shrunken"):
            return Estimate(level.value - setting * level.slow, level.slow, level.noise, level.count)
        runs = unit.layouts[layout]
        times, before, after = (logs[series][:repetitions] for logs in (runs.times, runs.before, runs.after))
        slow = level.slow
        if self.correction == "each":
            value = statistic(times - runs.before[self.clock, "total"][:repetitions])
        elif self.correction == "each of both":
            value = statistic(times - (before + after) / 2)
        elif self.correction == "two-way":
            value = _two_way(unit, series, len(times), self.statistic)[layout]
        elif self.correction == "smoothed":
            value = statistic(times - _smoothed(unit.reference[series], setting)[runs.at[:repetitions]])
        else:
            slow = statistic(np.concatenate([before, after]))
            value = level.value - slow
        return Estimate(value, slow, level.noise, level.count)

    def _over_runs(self, logs: Array) -> float:
        return _over_runs(logs, self.statistic)


@cache
def _level(unit: Unit, layout: int, repetitions: int, series: Series, statistic: str) -> Estimate:
    """Returns the uncorrected figure."""
    runs = unit.layouts[layout]
    times, before = runs.times[series][:repetitions], runs.before[series][:repetitions]
    medians = times if times.ndim == 1 else np.median(times, axis=1)
    noise = spread(medians) / math.sqrt(len(times))
    return Estimate(_over_runs(times, statistic), _over_runs(before, statistic), noise, len(times))


def _over_runs(logs: Array, statistic: str) -> float:
    return float(np.median(STATISTICS[statistic](logs)))


CORRECTIONS: Mapping[str, tuple[float, ...]] = {
    "none": (0.0,),
    "each": (1.0,),
    "each of both": (1.0,),
    "ratio": (1.0,),
    "half": (0.5,),
    "ratio to both": (1.0,),
    "shrunken": tuple(step / 10 for step in range(13)),
    "smoothed": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "two-way": (0.0,),
}
"""Correction -> values of its constant; where there are several, the best on other blocks is taken.

each: every run is divided by the whole time of the reference run before it, "of both": by the mean
of the one before and the one after. ratio: the statistic is divided by that of the reference runs before ("to both":
and after; half: by its square root). shrunken: by a fitted power of it. smoothed: every run is divided by the
reference's state at that moment, a two-sided exponential mean over that many reference runs, which is the steady
smoother of a random walk seen through noise. two-way: layout + moment, fitted in turns by `statistic` to all layouts
of the unit and the reference; a figure is relative to the reference's.
"""

BASELINE = Estimator("wall", "median", "each")


def estimators(metric: str) -> list[Estimator]:
    """Returns all estimators of a metric that are compared, the baseline first."""
    compared = [BASELINE]
    for clock, statistic in itertools.product(CLOCKS, STATISTICS):
        compared += [Estimator(clock, statistic, correction) for correction in ("none", "half", "ratio")]
    for clock in CLOCKS:
        more = ("each of both", "ratio to both", "shrunken", "smoothed", "two-way")
        compared += [Estimator(clock, "floor", correction) for correction in more]
        if metric == "decode":
            reads = ("decode_q10", "tokens", *(f"slices of {size}" for size in SLICES))
            for correction, tokens in itertools.product(("half", "ratio", "shrunken"), reads):
                compared.append(Estimator(clock, "floor", correction, tokens))
    return compared


def _smoothed(logs: Array, reach: float) -> Array:
    places = np.arange(len(logs))
    weights = np.exp(-np.abs(places[:, None] - places[None, :]) / reach)
    smoothed: Array = weights @ logs / weights.sum(axis=1)
    return smoothed


_TURNS = 10


@cache
def _two_way(unit: Unit, series: Series, rounds: int, statistic: str) -> Mapping[int, float]:
    """Returns layout -> its level above the reference's in a model of levels and moments, fitted in turns."""
    numbers = sorted(unit.layouts)
    per_round = len(unit.reference[series]) // max(len(runs.at) for runs in unit.layouts.values())
    reference = unit.reference[series][: per_round * rounds].reshape(rounds, per_round).min(axis=1)
    table = np.array([*(unit.layouts[number].times[series][:rounds] for number in numbers), reference])
    moments = np.zeros(rounds)
    for _ in range(_TURNS):
        levels = STATISTICS[statistic]((table - moments).T)
        moments = STATISTICS[statistic](table - levels[:, None])
    return dict(zip(numbers, (levels[:-1] - levels[-1]).tolist(), strict=True))


def spread(logs: Array) -> float:
    """Returns how far the median lies above the floor, as `nas.measure.protocol.estimator.spread`."""
    return float(np.median(logs) - floor(logs))
