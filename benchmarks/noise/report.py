"""Compares estimators of device times on recorded runs: error against the calm figure, and coverage of intervals.

    python -m benchmarks.noise.report [--folder DIR ...] [--repetitions 10] [--json] [--page docs/measured/noise.md]

A figure is one estimate from the runs of a layout in one unit (`benchmarks.noise.record`). Its error is the logarithm
of figure / the mean calm figure of that layout, from as many repetitions; of a calm figure, from *other* blocks.
Constants that an estimator fits, and those of its interval, are fitted on other blocks than the one that is scored;
where a condition was recorded in one block only, on other layouts.

Per condition and in per cent: `rms` of the errors, `bias` their mean, `spread` their standard deviation within a layout
(within a condition and runtime, over blocks), `held` how many of the stated 95 % intervals hold the calm figure.
Columns `s` are device seconds of a figure, reference runs included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.noise.estimators import BASELINE, METRICS, Array, Estimate, Estimator, Unit, estimators, read_units
from benchmarks.noise.record import FOLDER, THREADS
from benchmarks.page import fill
from nas.core.measurement import ClockName
from nas.core.stats import Z95, t_critical
from nas.measure.protocol.estimator import NOISE, SLICE, NoiseModel, Phase

FOLDERS = (FOLDER, FOLDER / "three_layouts")
CONDITIONS = ("calm", "loop", "loops", "loops4", "bursts", "copy", "calm2")
CALM = "calm"
_CLOCKS: Mapping[int, ClockName] = {1: "cpu", 2: "wall"}
PROTOCOL = {
    (threads, metric): Estimator(
        clock,
        "floor",
        {1.0: "ratio", 0.5: "half"}[NOISE[clock][metric].exponent],
        f"slices of {SLICE}" if metric == "decode" else "decode",
    )
    for (threads, clock), metric in itertools.product(_CLOCKS.items(), METRICS)
}
"""Number of threads and metric -> the protocol's estimator."""

_ALPHA = 0.05
_BASES = (0.004, 0.006, 0.008, 0.01, 0.012, 0.015, 0.018, 0.022, 0.027, 0.033, 0.04, 0.05)
"""At most 5 %: by how much more threads err beside other work, the reference with as many threads tells."""
_SPREADS = (0.5, 1.0, 1.5, 2.0, 3.0)
_CORRECTIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0)
_FOLDS = 3


@dataclass(frozen=True)
class Scored:
    """One figure against the calm one, in logarithms.

    Args:
        unit: where it was measured.
        layout: which.
        fold: figures of other folds fit its constants.
        error: of the figure.
        slow: how much slower than calm the reference ran.
        noise: see `Estimate`.
        count: of repetitions.
        seconds: of device time.
        sd: stated standard deviation; None: none.
    """

    unit: Unit
    layout: int
    fold: int
    error: float
    slow: float
    noise: float
    count: int
    seconds: float
    sd: float | None = None

    @property
    def held(self) -> bool | None:
        """Whether the stated interval holds the calm figure."""
        return None if self.sd is None else abs(self.error) <= Z95 * self.sd


def main() -> None:
    """Prints the tables, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, action="append", help="default: all that is committed")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    units = read_units(options.folder or FOLDERS)
    if options.json:
        print(json.dumps([row for rows in every_table(units, options.repetitions).values() for row in rows]))
        return
    text = page(units, options.repetitions)
    if options.page:
        fill(options.page, "noise", text)
    else:
        print(text)


# Errors.


def scored(units: Sequence[Unit], estimator: Estimator, metric: str, repetitions: int, setting: float) -> list[Scored]:
    """Returns the errors of all figures of an estimator with one value of its constant."""
    estimates: dict[tuple[int, int], Estimate] = {
        (place, layout): estimator.estimate(unit, layout, repetitions, metric, setting)
        for place, unit in enumerate(units)
        for layout in unit.layouts
    }
    calm: dict[tuple[Any, ...], dict[int, Estimate]] = defaultdict(dict)
    several = defaultdict(set)
    for (place, layout), estimate in estimates.items():
        unit = units[place]
        several[unit.bed, unit.condition].add(unit.block)
        if unit.condition == CALM:
            calm[unit.bed, layout][unit.block] = estimate
    errors = []
    for (place, layout), estimate in estimates.items():
        unit = units[place]
        others = [one for block, one in calm[unit.bed, layout].items() if unit.condition != CALM or block != unit.block]
        if not others:
            continue
        runs = unit.layouts[layout]
        # Two calm figures err alike: the error is that of one.
        both = math.sqrt(1 + 1 / len(others)) if unit.condition == CALM else 1.0
        errors.append(
            Scored(
                unit,
                layout,
                (unit.block if len(several[unit.bed, unit.condition]) > 1 else layout) % _FOLDS,
                (estimate.value - fmean(one.value for one in others)) / both,
                estimate.slow - fmean(one.slow for one in others),
                estimate.noise,
                estimate.count,
                estimate.count * (runs.seconds[0] + _share(estimator) * runs.seconds[1]),
            )
        )
    return errors


def _share(estimator: Estimator) -> float:
    """Returns reference runs for each repetition."""
    return {"none": 0.0, "two-way": 1 / 3}.get(estimator.correction, 1.0)


def held_out(units: Sequence[Unit], estimator: Estimator, metric: str, repetitions: int) -> list[Scored]:
    """Returns all errors, each with the constants that are the best on other folds."""
    by_setting = {setting: scored(units, estimator, metric, repetitions, setting) for setting in estimator.settings}
    result = []
    for fold in range(_FOLDS):
        train = {setting: [error for error in errors if error.fold != fold] for setting, errors in by_setting.items()}
        best = min(train, key=lambda setting: _rms(train[setting]))
        model = fit_interval(train[best])
        for error in by_setting[best]:
            if error.fold == fold:
                sd = _t_sd(error, metric, repetitions) if estimator == BASELINE else _sd(error, model)
                result.append(replace(error, sd=sd))
    return result


def fit_interval(errors: Sequence[Scored]) -> NoiseModel:
    """Returns the constants of the interval with the least interval score (Gneiting and Raftery 2007, equation 43).

    The score is the width, plus 2 / 0.05 times the distance of each calm figure that lies outside. Each condition has
    the same weight.
    """
    error = np.abs([error.error for error in errors])
    noise, slow = np.array([error.noise for error in errors]), np.array([error.slow for error in errors])
    names = [(error.unit.bed, error.unit.condition) for error in errors]
    counts = Counter(names)
    weight = np.array([1 / counts[name] for name in names])
    best, least = NoiseModel(1.0, _BASES[-1], 0.0, 0.0), math.inf
    bases = np.array(_BASES)[:, None]
    for of_spread, of_slow in itertools.product(_SPREADS, _CORRECTIONS):
        half = Z95 * np.sqrt(bases**2 + (of_spread * noise) ** 2 + (of_slow * slow) ** 2)
        scores = (half + 2 / _ALPHA * np.maximum(0.0, error - half)) @ weight
        if (score := float(scores.min())) < least:
            best, least = NoiseModel(1.0, _BASES[int(scores.argmin())], of_spread, of_slow), score
    return best


def _sd(error: Scored, model: NoiseModel) -> float:
    return math.sqrt(
        model.base**2 + (model.spread_weight * error.noise) ** 2 + (model.correction_weight * error.slow) ** 2
    )


def _t_sd(error: Scored, metric: str, repetitions: int) -> float:
    """Returns the standard deviation that Student's interval of the repetitions amounts to."""
    runs = error.unit.layouts[error.layout]
    values: Array = (runs.times["wall", metric] - runs.before["wall", "total"])[:repetitions]
    sd = math.sqrt(math.pi / 2 / len(values)) * float(np.std(values, ddof=1))
    return sd * t_critical(0.95, len(values) - 1) / Z95


def _rms(errors: Sequence[Scored]) -> float:
    return math.sqrt(fmean(error.error**2 for error in errors))


# Tables.


def row(errors: Sequence[Scored]) -> dict[str, float | None]:
    """Returns rms, bias and spread in per cent, the share of intervals that hold, and seconds of a figure."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for error in errors:
        groups[error.unit.bed, error.unit.condition, error.layout].append(error.error)
    within = [float(np.var(cell, ddof=1)) for cell in groups.values() if len(cell) > 1]
    held = [error.held for error in errors if error.held is not None]
    return {
        "rms": 100 * _rms(errors),
        "bias": 100 * fmean(error.error for error in errors),
        "spread": 100 * math.sqrt(fmean(within)) if within else None,
        "held": 100 * fmean(held) if held else None,
        "half": 100 * math.expm1(Z95 * float(np.median([error.sd for error in errors if error.sd is not None]))),
        "seconds": fmean(error.seconds for error in errors),
        "figures": len(errors),
    }


def by_condition(errors: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Returns the errors of each condition."""
    return {
        name: group for name in CONDITIONS if (group := [error for error in errors if error.unit.condition == name])
    }


def every_table(units: Sequence[Unit], repetitions: int) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Returns (threads, metric) -> a row for each estimator and condition."""
    tables: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for threads, metric in itertools.product(THREADS, METRICS):
        on_threads = [unit for unit in units if unit.threads == threads]
        tables[threads, metric] = [
            {"threads": threads, "metric": metric, "estimator": estimator.name, "condition": name} | row(errors)
            for estimator in estimators(metric)
            for name, errors in by_condition(held_out(on_threads, estimator, metric, repetitions)).items()
        ]
    return tables


def relative(errors: Iterable[Scored]) -> list[Scored]:
    """Returns the errors of ratios to the first layout, measured in the same unit."""
    all_errors = list(errors)
    first = {id(error.unit): error for error in all_errors if error.layout == 0}
    ratios = []
    for error in all_errors:
        base = first.get(id(error.unit))
        if base is not None and error.layout != 0:
            sd = math.hypot(error.sd, base.sd) if error.sd is not None and base.sd is not None else None
            ratios.append(replace(error, error=error.error - base.error, seconds=error.seconds + base.seconds, sd=sd))
    return ratios


def chosen_constants(units: Sequence[Unit], repetitions: int) -> dict[ClockName, dict[Phase, NoiseModel]]:
    """Returns `estimator.NOISE` as fitted to all units; the exponent is the best of the shrunken ones."""
    models: dict[ClockName, dict[Phase, NoiseModel]] = {}
    for threads, metric in itertools.product(THREADS, METRICS):
        on_threads = [unit for unit in units if unit.threads == threads]
        shrunken = replace(PROTOCOL[threads, metric], correction="shrunken")
        by_power = {power: scored(on_threads, shrunken, metric, repetitions, power) for power in shrunken.settings}
        best = min(by_power, key=lambda power: _rms(by_power[power]))
        used = NOISE[shrunken.clock][metric].exponent
        model = fit_interval(by_power[used])
        models.setdefault(shrunken.clock, {})[metric] = replace(
            model, exponent=best, correction_weight=model.correction_weight / used
        )
    return models


# The page.


def shown_estimators(threads: int, metric: Phase) -> list[Estimator]:
    """Returns the estimators on the page: baselines, and the protocol's with its neighbours."""
    protocol = PROTOCOL[threads, metric]
    rows = [BASELINE, Estimator("wall", "median"), Estimator("wall", "floor"), Estimator("cpu", "floor")]
    for tokens in dict.fromkeys(("decode", protocol.tokens)):
        rows += [Estimator(protocol.clock, "floor", correction, tokens) for correction in ("half", "ratio")]
    return [*rows, Estimator(protocol.clock, "floor", "two-way")]


def page(units: Sequence[Unit], repetitions: int) -> str:
    """Returns the generated part of the page in Markdown."""
    parts = [_what(units), ""]
    for threads, metric in itertools.product(THREADS, METRICS):
        on_threads = [unit for unit in units if unit.threads == threads]
        protocol = PROTOCOL[threads, metric]
        results = {
            estimator: held_out(on_threads, estimator, metric, repetitions)
            for estimator in shown_estimators(threads, metric)
        }
        title = f"{_TITLES[metric]}, {threads} thread{'s' * (threads > 1)}"
        parts += [f"## {title}\n", _comparison(results, protocol), ""]
        parts += [f"The protocol (`{protocol.name}`):\n", _details(results[protocol]), ""]
    parts += ["## Constants\n", _constants(units, repetitions), ""]
    return "\n".join(parts)


_TITLES: Mapping[Phase, str] = {"ttft": "TTFT", "decode": "Decode p50"}


def _what(units: Sequence[Unit]) -> str:
    lines = ["| recording | runtime | threads | layouts | units of each condition |", "| --- | --- | --- | --- | --- |"]
    for bed in sorted({unit.bed for unit in units}):
        on_bed = [unit for unit in units if unit.bed == bed]
        counts = {name: sum(unit.condition == name for unit in on_bed) for name in CONDITIONS}
        conditions = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        lines.append(f"| {bed[0]} | {bed[1]} | {bed[2]} | {len(on_bed[0].layouts)} | {conditions} |")
    return "\n".join(lines)


def _comparison(results: Mapping[Estimator, Sequence[Scored]], protocol: Estimator) -> str:
    conditions = list(by_condition(results[protocol]))
    lines = [f"| estimator | {' | '.join(conditions)} | held | s |", "| --- " * (len(conditions) + 3) + "|"]
    for estimator, errors in results.items():
        total = row(errors)
        cells = [f"{cell['rms']:.1f} ({cell['bias']:+.1f})" for cell in map(row, by_condition(errors).values())]
        name = f"**{estimator.name}**" if estimator == protocol else estimator.name
        lines.append(f"| {name} | {' | '.join(cells)} | {total['held']:.0f} % | {total['seconds']:.1f} |")
    return "\n".join(lines)


def _details(errors: Sequence[Scored]) -> str:
    head = ("figures", "spread", "bias", "rms", "+- stated", "held", "rms of ratio to a layout", "held")
    lines = [f"| | {' | '.join(head)} |", "| --- " * (len(head) + 1) + "|"]
    for condition, scored_errors in by_condition(errors).items():
        cell, ratio = row(scored_errors), row(relative(scored_errors))
        spread = "" if cell["spread"] is None else f"{cell['spread']:.1f}"
        lines.append(
            f"| {condition} | {cell['figures']} | {spread} | {cell['bias']:+.1f} | {cell['rms']:.1f} "
            f"| {cell['half']:.1f} | {cell['held']:.0f} % | {ratio['rms']:.1f} | {ratio['held']:.0f} % |"
        )
    return "\n".join(lines)


def _constants(units: Sequence[Unit], repetitions: int) -> str:
    lines = [
        "Fitted to all units: the power by the least error, the interval by the least interval score (Gneiting and "
        "Raftery 2007), each condition of equal weight. `NOISE` in `nas/measure/protocol/estimator.py` has them.\n",
        "| clock | figure | best power | power used | base | spread weight | correction weight |",
        "| --- " * 7 + "|",
    ]
    for clock, models in chosen_constants(units, repetitions).items():
        for metric, model in models.items():
            used = NOISE[clock][metric].exponent
            lines.append(
                f"| {clock} | {_TITLES[metric]} | {model.exponent:g} | {used:g} | {model.base:g} "
                f"| {model.spread_weight:g} | {model.correction_weight:g} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
