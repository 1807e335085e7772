"""Turns measurements and quality into objective values, coordinates and verdicts on budgets.

A device figure is compared with the published reference layout's own figure on the same device, runtime and workload,
so that a space means something on any machine. Coordinates are minimised: log ratios for times and memory, minus the
value for quality. Nothing here is normalised over the study's own trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.core.measurement import Figure
from nas.core.metrics import METRICS, RECALL_METRIC
from nas.core.space import Budget, Objective, SearchSpace
from nas.core.stats import Z95
from nas.core.units import show_number

Verdict = Literal["feasible", "infeasible", "borderline", "unknown"]


class MeasurementKey(NamedTuple):
    """Device, runtime (its label, see `SearchSpace.labelled`) and workload of a figure; '' of the artifact alone."""

    device: str
    runtime: str
    workload: str


PROXY = MeasurementKey("", "", "")
"""Stands for the proxy, which qualities are of."""

Figures = Mapping[MeasurementKey, Mapping[str, Figure]]

SURE = 0.95
"""Chance to keep a budget from which few repetitions are enough; at 1 - SURE they are enough to give a layout up."""

PUBLISHED = "published"
"""Name of the reference that ratios refer to, as in `References`."""
ATTENTION = "attention"
"""Name of the attention-only reference."""


class SeededQuality(Protocol):
    """What scoring needs of `nas.search.proxy.quality.Quality`."""

    @property
    def value(self) -> float: ...
    @property
    def sd(self) -> float: ...
    @property
    def recall(self) -> float | None: ...
    @property
    def recall_sd(self) -> float: ...


class QualityValue(NamedTuple):
    """A quality, its standard deviation over seeds, the id of the proxy that was trained, and the same of recall."""

    value: float
    sd: float
    proxy: str
    recall: float | None = None
    recall_sd: float = 0.0

    @staticmethod
    def of(quality: SeededQuality, proxy: str = "") -> QualityValue:
        """Returns the figures of a quality that was computed."""
        return QualityValue(quality.value, quality.sd, proxy, quality.recall, quality.recall_sd)


class BudgetCheck(BaseModel):
    """The verdict on one budget on one device and runtime."""

    model_config = ConfigDict(frozen=True, serialize_by_alias=True)

    budget: str
    key: MeasurementKey = Field(serialization_alias="place")
    value: float | None
    low: float | None
    """Lower end of the 95 % interval of `value` as far as it is compared with the limit: of `log_sd`."""
    high: float | None
    limit: float
    unit: str
    log_excess: float | None
    """log(value / limit), signed so that above 0 is broken; of quality, which may be negative, limit - value."""
    log_sd: float | None = None
    """Standard deviation of `log_excess`, the noise of a relative limit included; None: not known."""
    chance: float | None = None
    """Chance that the budget is kept; None: not known, as a value or its noise is not."""
    verdict: Verdict

    @property
    def name(self) -> str:
        """Such as 'ttft@chat on laptop/llama.cpp': one figure, one name."""
        return check_name(self.budget, self.key)

    def __str__(self) -> str:
        text = "unknown" if self.value is None else f"{show_number(self.value)} {self.unit}".rstrip()
        return f"{self.name}: {text}, limit {show_number(self.limit)} {self.unit}".rstrip()


class Axis(BaseModel):
    """One objective of one trial."""

    model_config = ConfigDict(frozen=True)

    value: float
    """In the metric's unit; over several measurement keys, the ratio to the published reference."""
    coordinate: float
    """Minimised."""
    sd: float | None
    """Standard deviation of the coordinate between trials of a study, which share the reference; None: not known."""
    value_sd: float | None = None
    """Standard deviation of `value`, of all its noise: of its logarithm, or of a quality itself; None: not known."""
    source: str | None = None
    """Id of what the value was computed from, such as a proxy: axes of one source share their error."""


def measurement_keys(space: SearchSpace, item: Budget | Objective) -> list[MeasurementKey]:
    """Returns the measurement keys that a budget or objective covers: of a quality, `PROXY`."""
    if METRICS[item.metric].source == "proxy":
        return [PROXY]
    labels = space.labels(item.runtime)
    return [
        MeasurementKey(device, label, item.workload or "")
        for device, label in space.targets
        if item.device in (None, device) and label in labels
    ]


def check_name(budget: str, key: MeasurementKey) -> str:
    """Returns the name of a budget's check at a key, which is that of the constraint in observations."""
    return f"{budget} on {f'{key.device}/{key.runtime}' if key != PROXY else 'the proxy'}"


def check_budgets(
    space: SearchSpace, figures: Figures, published: Figures, *, final: bool = False
) -> list[BudgetCheck]:
    """Checks every budget whose figure has been measured, those on quality not among them.

    `published` has the figures that relative limits refer to. `final`: the likelier of the two decides where the chance
    to keep a budget is neither high nor low.
    """
    checks = []
    for budget in space.budgets:
        for key in measurement_keys(space, budget):
            figure = figures.get(key, {}).get(budget.metric)
            limit = limit_of(budget, published, key)
            if figure is not None and limit is not None:
                base = published.get(key, {}).get(budget.metric)
                checks.append(_check(budget, key, figure, limit, base, final))
    return checks


def check_quality(space: SearchSpace, quality: SeededQuality, *, final: bool) -> list[BudgetCheck]:
    """Checks every budget on `quality` or `quality.recall` that is known at the rung; the rule is for the top one."""
    checks = []
    for budget in space.budgets:
        value, sd = of_proxy(budget.metric, quality)
        limit = limit_of(budget, {}, PROXY)
        if METRICS[budget.metric].source != "proxy" or value is None or limit is None:
            continue
        sd = ratio_sd(value, sd)
        chance = chance_to_keep(limit - value, sd)
        checks.append(
            BudgetCheck(
                budget=budget.name,
                key=PROXY,
                value=value,
                low=value - Z95 * sd,
                high=value + Z95 * sd,
                limit=limit,
                unit=METRICS[budget.metric].unit,
                log_excess=limit - value,
                log_sd=sd,
                chance=chance,
                verdict=_verdict(limit - value, chance, final),
            )
        )
    return checks


def axis(
    space: SearchSpace, objective: Objective, figures: Figures, published: Figures, quality: QualityValue
) -> Axis | None:
    """Returns the objective's value and coordinate; None while a figure that it needs is missing."""
    metric = METRICS[objective.metric]
    if metric.source == "proxy":
        value, sd = of_proxy(metric.name, quality)
        if value is None:
            return None
        return Axis(value=value, coordinate=-value, sd=sd, value_sd=ratio_sd(value, sd), source=quality.proxy)
    ratios, values = list[float](), list[float]()
    sds, whole = list[float | None](), list[float | None]()
    keys = measurement_keys(space, objective)
    for key in keys:
        figure = figures.get(key, {}).get(objective.metric)
        base = published.get(key, {}).get(objective.metric)
        if figure is None or base is None or figure.value is None or base.value is None:
            return None
        ratio = figure.value / base.value
        ratios.append(ratio if metric.direction == "min" else 1 / ratio)
        values.append(figure.value)
        sds.append(own_log_sd(metric.name, figure))
        # A single figure is shown in its unit, several as their ratio to the reference's.
        other = figure.shared_log_sd or 0.0 if len(keys) == 1 else own_log_sd(metric.name, base)
        whole.append(together(sds[-1], other))
    if objective.aggregate == "worst":
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        coordinate, between, alone = math.log(ratios[worst]), sds[worst], whole[worst]
    else:
        coordinate = math.fsum(map(math.log, ratios)) / len(ratios)
        between, alone = _mean_sd(sds), _mean_sd(whole)
    single = values[0] if len(values) == 1 else math.exp(coordinate)
    return Axis(value=single, coordinate=coordinate, sd=between, value_sd=alone)


def reference_point(
    space: SearchSpace, published: Figures, attention: Figures, attention_quality: QualityValue
) -> list[float]:
    """Returns the reference point of hypervolume, in coordinates; fixed once, when the references are done.

    A device axis takes its budget (for latency, the sum of its parts' budgets); without one, the worse reference plus
    10 %. Quality takes its budget; without one, the attention-only reference minus three standard deviations over
    seeds.
    """
    corner = []
    for objective in space.objectives:
        if METRICS[objective.metric].source == "proxy":
            worst = axis(space, objective, {}, {}, attention_quality)
            assert worst is not None, "a scale without recall is refused where that is an objective"
            least = limit_at(space, objective.metric, PROXY, published)
            corner.append(worst.coordinate + 3 * (worst.sd or 0.0) if least is None else -least)
            continue
        bounds = [_bound(space, objective, key, published, attention) for key in measurement_keys(space, objective)]
        corner.append(max(bounds) if objective.aggregate == "worst" else math.fsum(bounds) / len(bounds))
    return corner


def require_figures(space: SearchSpace, figures: Figures, what: str) -> None:
    """Checks that a reference has all figures that the space's budgets and objectives need.

    Raises:
        InvalidInput: naming the figure and its reason.
    """
    items: tuple[Budget | Objective, ...] = (*space.budgets, *space.objectives)
    for item in items:
        if METRICS[item.metric].source == "proxy":
            continue
        for key in measurement_keys(space, item):
            figure = figures.get(key, {}).get(item.metric)
            if figure is None or figure.value is None:
                reason = figure.reason if figure else "it was not measured"
                raise InvalidInput(f"{what}: no {item.metric} at {'/'.join(filter(None, key))}: {reason}")


def require_sensors(space: SearchSpace, devices: Mapping[str, Device]) -> None:
    """Checks, before anything is measured, that devices can read what the space's budgets and objectives need.

    Raises:
        InvalidInput: naming the metric, the device and its reason.
    """
    items: tuple[Budget | Objective, ...] = (*space.budgets, *space.objectives)
    for item in items:
        if (needs := METRICS[item.metric].needs) is None:
            continue
        for name in dict.fromkeys(key.device for key in measurement_keys(space, item)):
            device = devices[name]
            if getattr(device, needs) is None:
                reason = device.unread.get(needs, "its agent is of a version that does not look for one")
                raise InvalidInput(f"{item.metric} on {name}: {device.id} has no {needs.replace('_', ' ')}: {reason}")


def with_file_size(figures: Figures) -> dict[MeasurementKey, Mapping[str, Figure]]:
    """Returns the figures of measurements, with the file size under no workload as well: it does not depend on one."""
    sizes = {
        key._replace(workload=""): {"file_size": by_name["file_size"]}
        for key, by_name in figures.items()
        if "file_size" in by_name
    }
    return {**figures, **sizes}


def figures_json(by_key: Figures) -> list[dict[str, Any]]:
    """Returns figures by key as JSON, in an order that does not depend on when they were taken."""
    return [
        {**key._asdict(), "figures": {name: figure.model_dump(mode="json") for name, figure in figures.items()}}
        for key, figures in sorted(by_key.items())
    ]


def figures_from_json(data: list[dict[str, Any]]) -> dict[MeasurementKey, dict[str, Figure]]:
    """Reads what `figures_json` returned."""
    return {
        MeasurementKey(row["device"], row["runtime"], row["workload"]): {
            name: Figure.model_validate(figure) for name, figure in row["figures"].items()
        }
        for row in data
    }


def ratio_of_limit(budget: Budget, published: Figures, key: MeasurementKey) -> float | None:
    """Returns a budget's limit / the published reference's figure; None if that figure is missing."""
    base = _published_value(budget, published, key)
    limit = limit_of(budget, published, key)
    return limit / base if limit is not None and base else None


def limit_of(budget: Budget, published: Figures, key: MeasurementKey) -> float | None:
    """Returns a budget's limit at a key, in the metric's unit; None if it is relative to a figure that is missing."""
    value, relative = budget.limit
    if not relative:
        return value
    base = _published_value(budget, published, key)
    return None if base is None else value * base


def limit_at(space: SearchSpace, name: str, key: MeasurementKey, published: Figures) -> float | None:
    """Returns the tightest limit that budgets set for a metric at a key; None if there is none, or none yet."""
    limits = []
    for budget in space.budgets:
        if budget.metric == name and key in measurement_keys(space, budget):
            limit = limit_of(budget, published, key)
            if limit is not None:
                limits.append(limit)
    if not limits:
        return None
    return min(limits) if METRICS[name].direction == "min" else max(limits)


def own_log_sd(name: str, figure: Figure) -> float | None:
    """Returns a figure's own noise; 0 of what is counted, not measured, such as a file's size; None: not known."""
    return 0.0 if METRICS[name].counted else figure.log_sd


def ratio_sd(value: float, sd: float) -> float:
    """Returns the deviation of a quality as a ratio to the published reference, which was trained on the same seeds.

    `sd` is that of one of the two without what their seeds have in common.
    """
    return sd * math.hypot(1, value)


def together(*sds: float | None) -> float | None:
    """Returns the standard deviation of a sum of independent parts; None if that of one is not known."""
    finite = [sd for sd in sds if sd is not None]
    return math.hypot(*finite) if len(finite) == len(sds) else None


def _published_value(budget: Budget, published: Figures, key: MeasurementKey) -> float | None:
    """Returns the published reference's figure of a budget; its quality is 1 by definition."""
    if METRICS[budget.metric].source == "proxy":
        return 1.0
    figure = published.get(key, {}).get(budget.metric)
    return None if figure is None else figure.value


def of_proxy(name: str, quality: SeededQuality) -> tuple[float | None, float]:
    """Returns the value of a metric of quality and its standard deviation."""
    return (quality.recall, quality.recall_sd) if name == RECALL_METRIC else (quality.value, quality.sd)


def _check(
    budget: Budget, key: MeasurementKey, figure: Figure, limit: float, base: Figure | None, final: bool
) -> BudgetCheck:
    """Checks a figure; `base` is the published reference's, which a relative limit has its noise from."""
    metric = METRICS[budget.metric]
    sign = 1 if metric.direction == "min" else -1
    excess = None if figure.value is None else sign * math.log(figure.value / limit)
    _, relative = budget.limit
    # Both figures of a relative limit have the shared noise: it does not separate them.
    other = own_log_sd(metric.name, base) if relative and base is not None else figure.shared_log_sd or 0.0
    sd = together(own_log_sd(metric.name, figure), other)
    chance = None if excess is None else chance_to_keep(excess, sd)
    low = high = None
    if figure.value is not None and sd is not None:
        low, high = (figure.value * math.exp(off * sd) for off in (-Z95, Z95))
    return BudgetCheck(
        budget=budget.name,
        key=key,
        value=figure.value,
        low=low,
        high=high,
        limit=limit,
        unit=metric.unit,
        log_excess=excess,
        log_sd=sd,
        chance=chance,
        verdict=_verdict(excess, chance, final),
    )


def chance_to_keep(log_excess: float, sd: float | None) -> float | None:
    """Returns the chance that a budget is kept: that a normal variable of this mean and deviation is 0 or less.

    None without a deviation: a figure of unknown noise is not certain.
    """
    if sd is None:
        return None
    if sd == 0:
        return float(log_excess <= 0)
    return 0.5 * math.erfc(log_excess / (sd * math.sqrt(2)))


def _verdict(excess: float | None, chance: float | None, final: bool) -> Verdict:
    """Returns what is decided; by the value alone if `final`, for it is then the likelier of the two."""
    if excess is None:
        return "unknown"
    if final:
        return "feasible" if excess <= 0 else "infeasible"
    if chance is None:
        return "borderline"
    return "feasible" if chance >= SURE else "infeasible" if chance <= 1 - SURE else "borderline"


def _mean_sd(sds: Sequence[float | None]) -> float | None:
    sum_sd = together(*sds)
    return None if sum_sd is None else sum_sd / len(sds)


def _bound(
    space: SearchSpace, objective: Objective, key: MeasurementKey, published: Figures, attention: Figures
) -> float:
    metric = METRICS[objective.metric]
    base = published[key][objective.metric].value
    assert base is not None, "references are checked before the reference point is fixed"
    limit = limit_at(space, objective.metric, key, published)
    if limit is None and objective.metric == "latency":
        limit = _latency_limit(space, key, published)
    if limit is None:
        other = attention.get(key, {}).get(objective.metric)
        values = [base] if other is None or other.value is None else [base, other.value]
        limit = max(values) * 1.1 if metric.direction == "min" else min(values) / 1.1
    return math.log(limit / base) if metric.direction == "min" else math.log(base / limit)


def _latency_limit(space: SearchSpace, key: MeasurementKey, published: Figures) -> float | None:
    ttft = limit_at(space, "ttft", key, published)
    token = limit_at(space, "decode_p50", key, published)
    if ttft is None or token is None:
        return None
    return ttft + space.workloads[key.workload].gen * token
