"""Hardware models across targets: few measurements of a new target, and all of known ones.

The model is that of the product (`nas.search.proposers.hardware`). On a new target it starts from the model of a known
target: of each known one by turns, the one with the least leave-one-out error on the new target's few measurements is
taken (`nearest`), or the mean of all forecasts (`mean`). Beside it: the few measurements alone, and the known model
times one factor (`factor`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.targets.table import Array, Table
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.search.analysis.agreement import rank_correlation
from nas.search.proposers.hardware import MIN_POINTS, Costs, HardwareModel, Measured
from nas.train.compare.lfm2_report import COLUMNS, HX370, REPORT, S25
from nas.train.compare.published import REFERENCES

COUNTS = (3, 5, 8, 12, 20)
"""Measurements of the new target."""
WAYS = ("nearest", "mean", "factor", "alone")
_SPLITS = 3
_HARDWARE = Path(__file__).parents[1] / "hardware"
_RECORDED_FIGURES = {"ttft": "ttft_ms", "decode_p50": "decode_p50_ms", "peak_rss": "peak_rss_mb"}
_REPORT_NOISE = 0.02
"""Assumed deviation of a figure of the report, which gives none."""


@dataclass(frozen=True)
class Errors:
    """Errors of forecasts: mean of |forecast / measured - 1|, and Spearman's correlation with what was measured."""

    mape: float
    spearman: float

    def __str__(self) -> str:
        spearman = "-" if math.isnan(self.spearman) else f"{self.spearman:.2f}"
        return f"{self.mape:.1%}, {spearman}"


def errors_of(forecast: Array, logs: Array) -> Errors:
    """Returns the errors of logarithmic forecasts [N]."""
    correlation = rank_correlation(forecast, logs, kendall=False).spearman
    off = float(np.abs(np.expm1(forecast - logs)).mean())
    return Errors(off, correlation.value if correlation else math.nan)


def mean_errors(errors: Sequence[Errors]) -> Errors:
    """Returns the means of some errors."""
    return Errors(
        float(np.mean([error.mape for error in errors])), float(np.mean([error.spearman for error in errors]))
    )


def forecasts(
    costs: Costs, models: Mapping[str, HardwareModel], few: Measured
) -> dict[str, Callable[[Sequence[Layout]], Array]]:
    """Returns the forecast of each of `WAYS` from few measurements of a new target.

    Args:
        costs: of the workload.
        models: of known targets.
        few: at least `MIN_POINTS` measurements of the new one.
    """
    moved = [model.moved(few) for model in models.values()]

    def doubt(model: HardwareModel) -> float:
        if len(few.layouts) > MIN_POINTS:
            return float(np.square(model.left_out().mean - few.logs).mean())
        assert model.base is not None, "it was moved"
        return float((few.logs - model.base.predict(few.layouts).mean).var())

    nearest = min(moved, key=doubt)
    base = nearest.base
    assert base is not None, "it was moved"
    factor = float(np.median(few.logs - base.predict(few.layouts).mean))
    alone = HardwareModel(costs, few)
    return {
        "nearest": lambda layouts: nearest.predict(layouts).mean,
        "mean": lambda layouts: np.mean([model.predict(layouts).mean for model in moved], axis=0),
        "factor": lambda layouts: base.predict(layouts).mean + factor,
        "alone": lambda layouts: alone.predict(layouts).mean,
    }


def leave_one_target_out(
    layouts: Sequence[Layout], logs: Array, spread: Array, names: Sequence[str], costs: Costs, same: Mapping[str, str]
) -> dict[str, dict[int, dict[str, Errors]]]:
    """Returns target -> measurements of it -> way -> mean errors on the layouts that were not measured there.

    Args:
        layouts: of the table.
        logs: [L, T] logarithms of a figure.
        spread: [T] their standard deviations.
        names: of the targets.
        costs: of the workload.
        same: target -> another with the same build and threads, from which nothing may be learned.
    """
    everything = [
        HardwareModel(costs, Measured(layouts, logs[:, place], np.full(len(layouts), spread[place])))
        for place in range(len(names))
    ]
    result: dict[str, dict[int, dict[str, Errors]]] = {}
    for place, name in enumerate(names):
        models = {
            other: model
            for other, model in zip(names, everything, strict=True)
            if other != name and same.get(other) != name and same.get(name) != other
        }
        for count in COUNTS:
            if count > len(layouts) - 5:
                continue
            errors: dict[str, list[Errors]] = {}
            for split in range(_SPLITS):
                drawn = np.random.default_rng(split).permutation(len(layouts))
                sample, rest = drawn[:count], drawn[count:]
                few = Measured([layouts[row] for row in sample], logs[sample, place], np.full(count, spread[place]))
                tests = [layouts[row] for row in rest]
                for way, forecast in forecasts(costs, models, few).items():
                    errors.setdefault(way, []).append(errors_of(forecast(tests), logs[rest, place]))
            result.setdefault(name, {})[count] = {way: mean_errors(rows) for way, rows in errors.items()}
    return result


def of_table(table: Table, figure: str, load: Workload) -> dict[str, dict[int, dict[str, Errors]]]:
    """Returns `leave_one_target_out` of a study of targets."""
    times = table.times(figure)
    same = {target.name: target.repeats for target in table.targets if target.repeats}
    names = [target.name for target in table.targets]
    costs = Costs(load, _kinds(times.layouts), "MB" if figure == "peak_rss" else "ms")
    spread = times.deviations.mean(axis=0)
    return leave_one_target_out(times.layouts, times.means, spread, names, costs, same)


def of_recorded(figure: str) -> dict[str, dict[int, dict[str, Errors]]]:
    """Returns the same of the four targets of `benchmarks/hardware`: two runtimes with one and two threads.

    Sixty random layouts of lfm2-mixed-demo, three rounds. Times are relative to the reference model's run beside them.
    """
    layouts = [Layout.parse(line) for line in (_HARDWARE / "layouts.txt").read_text().splitlines()]
    values: dict[str, dict[int, list[float]]] = {}
    with (_HARDWARE / "runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            target = f"{row['runtime']} {row['threads']}"
            beside = 1.0 if figure == "peak_rss" else float(row["reference_ms"])
            value = float(row[_RECORDED_FIGURES[figure]]) / beside
            values.setdefault(target, {}).setdefault(int(row["layout"]), []).append(math.log(value))
    names = sorted(values)
    rounds = np.array([[values[name][layout] for layout in range(len(layouts))] for name in names])  # [T, L, R]
    spread = np.sqrt(rounds.var(axis=2, ddof=1).mean(axis=1) / rounds.shape[2])
    unit = "MB" if figure == "peak_rss" else "ms"
    costs = Costs(Workload(prompt=256, gen=100, context=4096), _kinds(layouts), unit)
    return leave_one_target_out(layouts, rounds.mean(axis=2).T, spread, names, costs, {})


# ---- the LFM2 report's tables -----------------------------------------------------------------------------------


def report_layouts() -> dict[str, Layout]:
    """Returns the models of the report's Tables 2 and 3 as layouts."""
    layouts = {name: REFERENCES[name].layout for name in REPORT[S25]}
    return {name: layout for name, layout in layouts.items() if layout is not None}


@dataclass(frozen=True)
class ReportErrors:
    """Errors on the Galaxy S25 of one column of the report, each model left out in turn.

    Args:
        metric: of the column.
        prompt: its tokens.
        moved: by the number of other models that were measured on the S25: of the model that starts from the HX 370.
        factor: of the HX 370's own figure times one factor, from all other models.
        alone: of a model of the S25's other figures alone.
        worst: model with the greatest error of the moved model that saw all others, and that error.
    """

    metric: str
    prompt: int
    moved: dict[int, Errors]
    factor: Errors
    alone: Errors
    worst: tuple[str, float]


def report_errors(draws: int = 3) -> list[ReportErrors]:
    """Predicts the S25's column from the HX 370's, leaving out one model at a time.

    The left-out model's figure on the HX 370 is known; of the others, on the S25, all or some drawn ones are.
    """
    layouts = report_layouts()
    names = list(layouts)
    result = []
    for column, (metric, prompt) in enumerate(COLUMNS):
        laptop, phone = (-np.log([REPORT[device][name][column] for name in names]) for device in (HX370, S25))
        costs = Costs(Workload(prompt=prompt, gen=100), _kinds(layouts.values()), "ms")
        deviations = np.full(len(names), _REPORT_NOISE)
        base = HardwareModel(costs, Measured([layouts[name] for name in names], laptop, deviations))
        moved: dict[int, tuple[list[float], list[float]]] = {}
        factors, alone = [], []
        for out, name in enumerate(names):
            others = [place for place in range(len(names)) if place != out]
            for count in (MIN_POINTS, 5, 8, 12, len(others)):
                for draw in range(draws if count < len(others) else 1):
                    sample = np.random.default_rng([out, draw]).permutation(others)[:count]
                    few = Measured([layouts[names[row]] for row in sample], phone[sample], deviations[sample])
                    forecast = base.moved(few).predict([layouts[name]]).mean[0]
                    forecasts_, truths = moved.setdefault(count, ([], []))
                    forecasts_.append(float(forecast))
                    truths.append(float(phone[out]))
            rest = Measured([layouts[names[row]] for row in others], phone[others], deviations[others])
            alone.append(float(HardwareModel(costs, rest).predict([layouts[name]]).mean[0]))
            factors.append(float(laptop[out] + np.median((phone - laptop)[others])))
        errors = np.abs(np.expm1(np.subtract(*moved[len(names) - 1])))
        worst = int(np.argmax(errors))
        result.append(
            ReportErrors(
                metric,
                prompt,
                {count: errors_of(*map(np.array, rows)) for count, rows in moved.items()},
                errors_of(np.array(factors), phone),
                errors_of(np.array(alone), phone),
                (names[worst], float(errors[worst])),
            )
        )
    return result


def _kinds(layouts: Iterable[Layout]) -> list[str]:
    return sorted({block.kind for layout in layouts for layer in layout.layers for block in layer.blocks})
