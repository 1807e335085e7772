"""Plots with axes: pure functions from figures to a JSON description that `assets/plots.js` draws with uPlot.

The description is in an attribute of the plot's element, so that no inline script is needed; its label is the text
alternative.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Literal

from markupsafe import Markup

from nas.core.family import MemberTraining
from nas.core.logs import visible
from nas.core.scoring import BudgetCheck, MeasurementKey
from nas.core.units import show_figure, show_number
from nas.infra.store.calibrations import FASTER_LIMIT, SLOWER_LIMIT
from nas.serve.api.devices import ReferenceRunView
from nas.serve.views.candidate import CandidateView, ComparisonView, MeasurementView
from nas.serve.views.effects import EffectsView, SliceView
from nas.serve.views.family import ComparisonView as FamilyComparison

MOST_BINS = 60
MOST_BUCKETS = 500
"""Of tokens over a whole trace; the minimum and maximum of each are drawn."""
MOST_STEPS = 400
"""Of a cumulative distribution."""

_PER_TOKEN = ("decode_p50", "decode_p95", "decode_mean")
_SPEEDS = ("decode_tps", "prefill_tps")
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_IN_HOURS_S = 3 * _DAY_S
"""Longest time on an axis of hours; longer ones are in days."""
_HUES = (0, 1, 3, 5, 2, 8)
"""Colours of series; a seventh has the first one's."""
_MAIN = 1
"""Colour of what a plot is about."""
_OTHER = 0
"""Colour of what it is compared with."""
_PALE = 4
"""Colour of what does not count."""

Points = Sequence[tuple[float, float | None]]
Numbers = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis; `covers` are values that it always shows."""

    label: str
    log: bool = False
    covers: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a plot.

    Args:
        name: in the legend.
        points: (x, y), x ascending; None interrupts the line.
        draw: the kind of mark.
        hue: number of its colour.
        hollow: dots are not filled.
        right: on the right axis.
        low: lower ends of error bars.
        high: upper ends.
        texts: labels of the points.
    """

    name: str
    points: Points
    draw: Literal["line", "steps", "bars", "dots"] = "line"
    hue: int = 0
    hollow: bool = False
    right: bool = False
    low: Numbers = ()
    high: Numbers = ()
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """A dashed line at a budget or limit; not drawn beyond the axis."""

    axis: Literal["x", "y"]
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot; templates write it with `{{ plot }}`.

    Args:
        label: text alternative.
        series: if empty, only the label is written; without axes nothing.
        x: None: a small line without axes and legend.
        y: the left axis.
        right: label of the right axis.
        limits: dashed lines.
    """

    label: str
    series: Sequence[Series]
    x: Axis | None = None
    y: Axis = field(default_factory=lambda: Axis(""))
    right: str = ""
    limits: Sequence[Limit] = ()

    def __html__(self) -> Markup:
        if not self.series and self.x is None:
            return Markup("")
        if not self.series:
            return Markup('<p class="missing">{}</p>').format(visible(self.label))
        classes = "chart" if self.x else "chart sparkline"
        without = Markup("<noscript>This plot needs JavaScript.</noscript>") if self.x else ""
        content = json.dumps(_plain(self), allow_nan=False, separators=(",", ":"))
        drawn = Markup('<div class="{}" role="img" aria-label="{}" data-plot="{}">{}</div>')
        return drawn.format(classes, visible(self.label), content, without)


def sparkline(points: Sequence[tuple[float, float]], label: str) -> Plot:
    """Returns a small line without axes; `points`: (x, y), x ascending."""
    if not points:
        return Plot(f"{label}: nothing yet", [])
    return Plot(f"{label}: {show_number(points[0][1])} to {show_number(points[-1][1])}", [Series(label, points)])


def histogram(samples: Sequence[float], label: str, unit: str, limits: Sequence[Limit] = ()) -> Plot:
    """Returns the counts of samples in bins; those far above all others are counted in the axis' name instead.

    Bins follow Freedman and Diaconis (1981): twice the interquartile range over the cube root of the count.
    """
    if not samples:
        return Plot(f"{label}: no samples", [], Axis(unit))
    edge = _edge(samples)
    low, high, counts = _binned([sample for sample in samples if sample <= edge])
    step = (high - low) / len(counts)
    bars = Series("samples", [(low + step * (bin + 0.5), count) for bin, count in enumerate(counts)], draw="bars")
    x, y = Axis(unit + _beyond(samples, edge, unit), covers=(low, high)), Axis("samples", covers=(0,))
    summary = f"{label}: {len(samples)} samples, median {show_number(median(samples))} {unit}"
    return Plot(summary, [bars], x, y, "", limits)


def cumulative(samples: Mapping[str, Sequence[float]], label: str, unit: str, limits: Sequence[Limit] = ()) -> Plot:
    """Returns the empirical distribution functions of several series; those far above all others are in the axis' name.

    samples: name -> samples.
    """
    edge = max((min(_edge(values), max(values)) for values in samples.values() if values), default=0.0)
    beyond = _beyond([value for values in samples.values() for value in values], edge, unit)
    series = [
        Series(
            f"{name}, median {show_number(median(values))}",
            [point for point in _steps(values) if point[0] <= edge],
            draw="steps",
            hue=_hue(number),
        )
        for number, (name, values) in enumerate(samples.items())
        if values
    ]
    missing = "".join(f"; {name}: no samples" for name, values in samples.items() if not values)
    names = f"{label}: {'; '.join(line.name for line in series)}{missing}"
    return Plot(names, series, Axis(unit + beyond), Axis("share of samples", covers=(0, 1)), limits=limits)


def training_curves(runs: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], label: str) -> Plot:
    """Returns the loss over the steps of every run; `runs`: (group, which shares a colour, name, (step, loss))."""
    drawn = [(group, name, points) for group, name, points in runs if points]
    groups = list(dict.fromkeys(group for group, _, _ in drawn))
    series = [Series(f"{group}, {name}", points, hue=_hue(groups.index(group))) for group, name, points in drawn]
    label = label if drawn else f"{label}: no training yet"
    return Plot(label, series, Axis("step", covers=(0,)), Axis("loss, nats"))


def token_trace(view: CandidateView, measurement: MeasurementView) -> Plot:
    """Returns every token's time, repetition after repetition as they were measured, and the device's temperature.

    Times far above all others are drawn at the upper edge, and named by the axis.
    """
    repetitions = [repetition for repetition in measurement.repetitions if repetition.token_ms]
    every = [ms for repetition in repetitions for ms in repetition.token_ms]
    edge = _edge(every)
    starts = [0, *accumulate(len(repetition.token_ms) for repetition in repetitions)]
    per_bucket = max(1, starts[-1] // MOST_BUCKETS)
    lines: dict[str, list[tuple[float, float | None]]] = {}
    temperature: list[tuple[float, float | None]] = []
    for (start, end), repetition in zip(pairwise(starts), repetitions, strict=True):
        name = "counted" if repetition.valid else f"refused: {repetition.reason}"
        token_ms = [min(edge, ms) for ms in repetition.token_ms]
        lines.setdefault(name, []).extend([*_thinned(token_ms, start, per_bucket), (end - 0.5, None)])
        if repetition.temperature_c is not None:
            temperature += [(start, repetition.temperature_c), (end - 1, repetition.temperature_c), (end - 0.5, None)]
    series = [Series(name, points, hue=0 if name == "counted" else _PALE) for name, points in lines.items()]
    if temperature:
        series.append(Series("temperature", temperature, hue=_MAIN, right=True))
    label = f"{measurement.name}: {f'{starts[-1]} tokens, {len(repetitions)} repetitions' if series else 'no samples'}"
    limits = token_limits("y", view.budgets, measurement.key)
    y = Axis("ms per token" + _beyond(every, edge, "ms"), covers=(0,))
    return Plot(label, series, Axis("token"), y, "°C" if temperature else "", limits)


def no_temperature(measurement: MeasurementView) -> str | None:
    """Returns why the trace has no temperature; None if it has one."""
    if any(repetition.temperature_c is not None for repetition in measurement.repetitions):
        return None
    return next(
        (repetition.temperature_unread for repetition in measurement.repetitions if repetition.temperature_unread),
        "not read",
    )


def token_histogram(view: CandidateView, measurement: MeasurementView) -> Plot:
    """Returns the distribution of the tokens that count."""
    limits = token_limits("x", view.budgets, measurement.key)
    return histogram(counted_ms(measurement), measurement.name, "ms per token", limits)


def token_distributions(view: ComparisonView) -> list[tuple[str, Plot]]:
    """Returns for each measurement key its name and the distributions of the candidates' tokens."""
    by_key = [{measurement.key: measurement for measurement in candidate.measurements} for candidate in view.candidates]
    names = {
        measurement.key: measurement.name for candidate in view.candidates for measurement in candidate.measurements
    }
    drawn = []
    for key, name in sorted(names.items()):
        samples = {
            candidate.name: counted_ms(measurements[key]) if key in measurements else []
            for candidate, measurements in zip(view.candidates, by_key, strict=True)
        }
        limits = token_limits("x", view.candidates[0].budgets, key)
        drawn.append((name, cumulative(samples, name, "ms per token", limits)))
    return drawn


def counted_ms(measurement: MeasurementView) -> list[float]:
    """Returns milliseconds per token of the repetitions that count, as experienced."""
    return [ms for repetition in measurement.repetitions if repetition.valid for ms in repetition.token_ms]


def token_limits(axis: Literal["x", "y"], budgets: Sequence[BudgetCheck], key: MeasurementKey) -> list[Limit]:
    """Returns the budgets on the time of a token at a measurement key."""
    return [
        Limit(axis, f"{check.name}: {show_number(check.limit)} {check.unit}", check.limit)
        for check in budgets
        if check.key == key and check.budget.split("@")[0] in _PER_TOKEN
    ]


def proxy_training(view: CandidateView) -> Plot:
    """Returns the training curves of a candidate's proxy."""
    runs = [
        (training.name, "seed not known" if training.seed is None else f"seed {training.seed}", training.curve)
        for training in view.trainings
    ]
    return training_curves(runs, f"training of {view.name}")


def member_training(size: str, training: MemberTraining) -> Plot:
    """Returns the training curve of a member of a family."""
    return training_curves([("training loss", size, training.curve)], f"training of {size}")


def drift(runs: Sequence[ReferenceRunView], label: str, now: float) -> Plot:
    """Returns the reference runs of a device, oldest first: their deviation from the calibration, and the temperature.

    Args:
        runs: oldest first.
        label: device and runtime.
        now: seconds since the epoch.
    """
    if not runs:
        return Plot(f"{label}: no reference runs yet", [], Axis("hours"))
    hours = now - runs[0].at <= _IN_HOURS_S
    unit_s = _HOUR_S if hours else _DAY_S
    # Runs of one job have the same time; a tiny offset keeps a point for each.
    ago = [min(0.0, (run.at - now) / unit_s) + 1e-6 * number for number, run in enumerate(runs)]
    dots = [(run.calm, (at, 100 * (run.ratio - 1))) for at, run in zip(ago, runs, strict=True)]
    series = [
        Series(name, points, draw="dots", hue=0 if calm else _PALE)
        for name, calm in (("calm", True), ("disturbed", False))
        if (points := [point for was_calm, point in dots if was_calm == calm])
    ]
    warm = [(at, run.temperature_c) for at, run in zip(ago, runs, strict=True) if run.temperature_c is not None]
    if warm:
        series.append(Series("temperature", warm, hue=_MAIN, right=True))
    limits = [Limit("y", f"limit: {100 * share:+g} %", 100 * share) for share in (SLOWER_LIMIT, -FASTER_LIMIT)]
    return Plot(
        f"{label}: {len(runs)} reference runs, the latest {100 * (runs[-1].ratio - 1):+z.2f} %",
        series,
        Axis(f"{'hours' if hours else 'days'}, 0 is now", covers=(0.0,)),
        Axis("% off the calibration", covers=[limit.value for limit in limits]),
        "°C" if warm else "",
        limits,
    )


def slice_plots(slice_view: SliceView, view: EffectsView) -> list[Plot]:
    """Returns a plot of each objective along a slice, on a scale that all slices share."""
    drawn = []
    for index, (name, unit) in enumerate(zip(view.objectives, view.slice_units, strict=True)):
        label = f"{name} [{unit}]" if unit else name
        row = slice_view.predicted[index]
        of_all = [interval for other in view.slices for interval in other.predicted[index]]
        texts = [
            f"{show_number(at)}: {show_figure(interval.value, interval.low, interval.high)}"
            for at, interval in zip(slice_view.values, row, strict=True)
        ]
        line = Series(
            label,
            list(zip(slice_view.values, [interval.value for interval in row], strict=True)),
            low=[interval.low for interval in row],
            high=[interval.high for interval in row],
            hue=_OTHER,
        )
        ends = min(interval.low for interval in of_all), max(interval.high for interval in of_all)
        summary = f"{label} by {slice_view.knob}: {', '.join(texts)}"
        drawn.append(Plot(summary, [line], Axis(slice_view.knob), Axis(label, covers=ends)))
    return drawn


def family_speeds(view: FamilyComparison) -> list[Plot]:
    """Returns tokens per second over parameters, members among other models, for decoding and prefilling."""
    drawn = []
    for number, kind in enumerate(view.kinds):
        measured = [
            (model.model, figure) for model in view.models if (figure := model.figures[number]) and figure.value
        ]
        if kind.metric not in _SPEEDS:
            continue
        series = []
        for member in (True, False):
            pairs = sorted((pair for pair in measured if pair[0].member == member), key=lambda pair: pair[0].parameters)
            if pairs:
                ends = [figure.ci95 or (None, None) for _, figure in pairs]
                series.append(
                    Series(
                        "members" if member else "other models",
                        # A tiny offset keeps models of one size apart.
                        [(m.parameters / 1e6 * (1 + 1e-7 * i), figure.value) for i, (m, figure) in enumerate(pairs)],
                        draw="dots",
                        hue=_MAIN if member else _OTHER,
                        hollow=not member,
                        low=[low for low, _ in ends],
                        high=[high for _, high in ends],
                        texts=[model.name for model, _ in pairs],
                    )
                )
        unit = f"{kind.label}, {kind.unit}"
        label = f"{unit}, over parameters on {view.device}: {len(measured)} models"
        drawn.append(Plot(label, series, Axis("million parameters", log=True), Axis(unit, log=True)))
    return drawn


def _edge(samples: Sequence[float]) -> float:
    """Returns up to where samples are drawn; those beyond three times the 99th percentile would flatten all others."""
    ordered = sorted(samples)
    most = ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
    return math.inf if most <= 0 or ordered[-1] <= 3 * most else 1.5 * most


def _beyond(samples: Sequence[float], edge: float, unit: str) -> str:
    """Returns what a name of the axis says of the samples beyond its edge."""
    beyond = [sample for sample in samples if sample > edge]
    return f" ({len(beyond)} above, up to {show_number(max(beyond))} {unit.split()[0]})" if beyond else ""


def _binned(samples: Sequence[float]) -> tuple[float, float, list[int]]:
    low, high = min(samples), max(samples)
    if low == high:
        return low - 0.5, high + 0.5, [len(samples)]
    ordered = sorted(samples)
    spread = ordered[int(0.75 * len(ordered))] - ordered[int(0.25 * len(ordered))]
    width = 2 * spread / len(samples) ** (1 / 3)
    bins = min(MOST_BINS, math.ceil((high - low) / width)) if width else MOST_BINS
    counts = [0] * bins
    for sample in samples:
        counts[min(bins - 1, int((sample - low) / (high - low) * bins))] += 1
    return low, high, counts


def _steps(samples: Sequence[float]) -> Points:
    ordered = sorted(samples)
    count = min(len(ordered), MOST_STEPS)
    shares: dict[float, float] = {}
    for number in range(1, count + 1):
        rank = math.ceil(number * len(ordered) / count)
        shares[ordered[rank - 1]] = rank / len(ordered)
    return list(shares.items())


def _thinned(token_ms: Sequence[float], start: int, per_bucket: int) -> list[tuple[float, float | None]]:
    """Returns the minimum and the maximum of each bucket, in their order, so that no peak is lost."""
    thin: list[tuple[float, float | None]] = []
    for begin in range(0, len(token_ms), per_bucket):
        bucket = range(begin, min(begin + per_bucket, len(token_ms)))
        ends = {min(bucket, key=token_ms.__getitem__), max(bucket, key=token_ms.__getitem__)}
        thin += [(float(start + index), token_ms[index]) for index in sorted(ends)]
    return thin


def _hue(number: int) -> int:
    return _HUES[number % len(_HUES)]


def _plain(value: Any) -> Any:
    """Returns the value for JSON: visible text, numbers with nine significant digits, no empty fields."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        content = {member.name: getattr(value, member.name) for member in fields(value)}
        return {name: _plain(item) for name, item in content.items() if item or isinstance(item, float)}
    return value
