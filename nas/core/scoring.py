"""From measurements and quality to what is searched on: objective values, coordinates, budget verdicts.

A device figure is compared with the published reference layout's own figure on the same device, runtime and workload,
so that a space means something on any machine. Coordinates are minimised: log ratios for times and memory, minus the
value for quality. Nothing here is normalised over the study's own trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.space import Budget, Objective, SearchSpace
from nas.core.stats import t_critical

Verdict = Literal["feasible", "infeasible", "borderline", "unknown"]


class Place(NamedTuple):
    """Where a figure was taken. `workload` is '' for figures of the artifact alone."""

    device: str
    runtime: str
    workload: str


Figures = Mapping[Place, Mapping[str, Figure]]


class QualityValue(NamedTuple):
    """A quality, its standard deviation over seeds, and the id of the proxy that was trained."""

    value: float
    sd: float
    proxy: str


class BudgetCheck(BaseModel):
    """One budget at one place."""

    model_config = ConfigDict(frozen=True)

    budget: str
    place: Place
    value: float | None
    low: float | None
    high: float | None
    limit: float
    unit: str
    log_excess: float | None
    """log(value / limit), turned so that above 0 is broken."""
    log_sd: float = 0.0
    """Standard deviation of `log_excess`; 0 where it is not known."""
    verdict: Verdict
    decided_by_median: bool = False

    @property
    def name(self) -> str:
        """Such as 'ttft@chat on laptop/llama.cpp': one figure, one name."""
        return f"{self.budget} on {self.place.device}/{self.place.runtime}"

    def __str__(self) -> str:
        shown = "unknown" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"{self.name}: {shown}, limit {self.limit:.4g} {self.unit}"


class Axis(BaseModel):
    """One objective of one trial."""

    model_config = ConfigDict(frozen=True)

    value: float
    """In the metric's unit; over several places, the ratio to the published reference."""
    coordinate: float
    """Minimised."""
    sd: float
    """Standard deviation of the coordinate: measurement interval, or spread over seeds."""
    source: str | None = None
    """What the value rests on, where others can rest on the same: axes of one source share their error."""


def places(space: SearchSpace, item: Budget | Objective) -> list[Place]:
    """The places a budget or objective speaks of."""
    devices = [item.device] if item.device else list(space.devices)
    runtimes = [item.runtime] if item.runtime else [runtime.name for runtime in space.runtimes]
    return [Place(device, runtime, item.workload or "") for device in devices for runtime in runtimes]


def check_budgets(
    space: SearchSpace, figures: Figures, published: Figures, *, final: bool = False
) -> list[BudgetCheck]:
    """The verdict on every budget whose figure has been taken.

    Args:
        space: whose budgets.
        figures: of the candidate.
        published: of the published reference, for relative limits.
        final: the last word: where the interval holds the limit, the median decides.
    """
    checks = []
    for budget in space.budgets:
        for place in places(space, budget):
            figure = figures.get(place, {}).get(budget.metric)
            limit = _limit(budget, published.get(place, {}).get(budget.metric))
            if figure is not None and limit is not None:
                checks.append(_check(budget, place, figure, limit, final))
    return checks


def axis(
    space: SearchSpace, objective: Objective, figures: Figures, published: Figures, quality: QualityValue
) -> Axis | None:
    """The objective's value and coordinate; None while a figure that it needs is missing.

    Args:
        space: for devices and runtimes.
        objective: which axis.
        figures: of the candidate.
        published: of the published reference.
        quality: of the candidate's proxy.
    """
    metric = METRICS[objective.metric]
    if metric.source == "proxy":
        return Axis(value=quality.value, coordinate=-quality.value, sd=quality.sd, source=quality.proxy)
    ratios, sds, values = [], [], []
    for place in places(space, objective):
        figure = figures.get(place, {}).get(objective.metric)
        base = published.get(place, {}).get(objective.metric)
        if figure is None or base is None or figure.value is None or base.value is None:
            return None
        ratio = figure.value / base.value
        ratios.append(ratio if metric.direction == "min" else 1 / ratio)
        values.append(figure.value)
        sds.append(log_sd(figure))
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    if objective.aggregate == "worst":
        coordinate, sd = math.log(ratios[worst]), sds[worst]
    else:
        coordinate = math.fsum(map(math.log, ratios)) / len(ratios)
        sd = math.sqrt(math.fsum(s * s for s in sds)) / len(sds)
    return Axis(value=values[0] if len(values) == 1 else math.exp(coordinate), coordinate=coordinate, sd=sd)


def reference_point(
    space: SearchSpace, published: Figures, attention: Figures, attention_quality: tuple[float, float]
) -> list[float]:
    """The corner that hypervolume is measured from, in coordinates; fixed once, when the references are done.

    A device axis takes its budget (for latency, the sum of its parts' budgets); without one, the worse reference plus
    10 %. Quality takes the attention-only reference minus three standard deviations over seeds.
    """
    corner = []
    for objective in space.objectives:
        if METRICS[objective.metric].source == "proxy":
            corner.append(-(attention_quality[0] - 3 * attention_quality[1]))
            continue
        bounds = [_bound(space, objective, place, published, attention) for place in places(space, objective)]
        corner.append(max(bounds) if objective.aggregate == "worst" else math.fsum(bounds) / len(bounds))
    return corner


def require_figures(space: SearchSpace, figures: Figures, what: str) -> None:
    """Refuses a reference that lacks a figure that a budget or an objective of the space needs.

    Raises:
        InvalidInput: naming the figure and its reason.
    """
    items: tuple[Budget | Objective, ...] = (*space.budgets, *space.objectives)
    for item in items:
        if METRICS[item.metric].source == "proxy":
            continue
        for place in places(space, item):
            figure = figures.get(place, {}).get(item.metric)
            if figure is None or figure.value is None:
                reason = figure.reason if figure else "it was not measured"
                raise InvalidInput(f"{what}: no {item.metric} at {'/'.join(filter(None, place))}: {reason}")


def require_sensors(space: SearchSpace, devices: Mapping[str, Device]) -> None:
    """Refuses a space before anything is measured where a device cannot tell what a budget or an objective needs.

    Args:
        space: its budgets and objectives.
        devices: name in the space -> what it is.

    Raises:
        InvalidInput: naming the metric, the device and what it says about it.
    """
    items: tuple[Budget | Objective, ...] = (*space.budgets, *space.objectives)
    for item in items:
        needs = METRICS[item.metric].needs
        for name in [item.device] if item.device else space.devices:
            device = devices[name]
            if needs is not None and getattr(device, needs) is None:
                reason = device.unread.get(needs, "its agent is of a version that does not look for one")
                raise InvalidInput(f"{item.metric} on {name}: {device.id} has no {needs.replace('_', ' ')}: {reason}")


def ratio_of_limit(budget: Budget, published: Figures, place: Place) -> float | None:
    """A budget's limit / the published reference's figure; None where that figure is missing."""
    base = published.get(place, {}).get(budget.metric)
    limit = _limit(budget, base)
    return limit / base.value if limit is not None and base is not None and base.value else None


def limit_at(space: SearchSpace, name: str, place: Place, published: Figures) -> float | None:
    """The tightest limit that budgets set to a metric at a place; None where none does, or it is not known yet."""
    limits = []
    for budget in space.budgets:
        if budget.metric == name and place in places(space, budget):
            limit = _limit(budget, published.get(place, {}).get(name))
            if limit is not None:
                limits.append(limit)
    if not limits:
        return None
    return min(limits) if METRICS[name].direction == "min" else max(limits)


def log_sd(figure: Figure) -> float:
    """Standard deviation of the logarithm of a figure, from its interval; 0 where it has none."""
    if figure.low is None or figure.high is None or figure.low <= 0:
        return 0.0
    return math.log(figure.high / figure.low) / (2 * t_critical(0.95, max(1, figure.n - 1)))


def tie(a: Sequence[Axis], b: Sequence[Axis]) -> bool:
    """Whether two trials cannot be told apart: on every axis closer than two standard deviations."""
    return all(abs(x.coordinate - y.coordinate) <= 2 * math.hypot(x.sd, y.sd) for x, y in zip(a, b, strict=True))


def _limit(budget: Budget, base: Figure | None) -> float | None:
    value, relative = budget.limit
    if not relative:
        return value
    return value * base.value if base is not None and base.value is not None else None


def _check(budget: Budget, place: Place, figure: Figure, limit: float, final: bool) -> BudgetCheck:
    metric = METRICS[budget.metric]
    sign = 1 if metric.direction == "min" else -1
    excess = None if figure.value is None else sign * math.log(figure.value / limit)
    low, high = figure.low or figure.value, figure.high or figure.value
    verdict: Verdict = "unknown"
    by_median = False
    if excess is not None and low is not None and high is not None:
        best, worst = (low, high) if sign > 0 else (high, low)
        if sign * (worst - limit) <= 0:
            verdict = "feasible"
        elif sign * (best - limit) > 0:
            verdict = "infeasible"
        elif final:
            verdict, by_median = ("feasible" if excess <= 0 else "infeasible"), True
        else:
            verdict = "borderline"
    return BudgetCheck(
        budget=budget.name, place=place, value=figure.value, low=low, high=high, limit=limit, unit=metric.unit,
        log_excess=excess, log_sd=log_sd(figure), verdict=verdict, decided_by_median=by_median,
    )  # fmt: skip


def _bound(space: SearchSpace, objective: Objective, place: Place, published: Figures, attention: Figures) -> float:
    metric = METRICS[objective.metric]
    base = published[place][objective.metric].value
    assert base is not None, "references are checked before the reference point is fixed"
    limit = limit_at(space, objective.metric, place, published)
    if limit is None and objective.metric == "latency":
        limit = _latency_limit(space, place, published)
    if limit is None:
        other = attention.get(place, {}).get(objective.metric)
        values = [base] if other is None or other.value is None else [base, other.value]
        limit = max(values) * 1.1 if metric.direction == "min" else min(values) / 1.1
    return math.log(limit / base) if metric.direction == "min" else math.log(base / limit)


def _latency_limit(space: SearchSpace, place: Place, published: Figures) -> float | None:
    ttft = limit_at(space, "ttft", place, published)
    token = limit_at(space, "decode_p50", place, published)
    if ttft is None or token is None:
        return None
    return ttft + space.workloads[place.workload].gen * token
