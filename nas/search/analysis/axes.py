"""The axes of a study's plots and tables: objectives, figures on one device and runtime, and sizes of the layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nas.core.metrics import METRICS
from nas.core.scoring import PROXY, Figures, MeasurementKey, limit_at, measurement_keys, ratio_of_limit
from nas.core.space import Budget, Objective, SearchSpace

PARAMS_TOTAL = "params_total"
PARAMS_ACTIVE = "params_active"
KV_BYTES = "kv_bytes"

_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._@-]")


class AxisView(BaseModel):
    """An axis."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    key: str = Field(description="stable, and safe in a URL: letters, digits, '.', '_', '@' and '-'")
    label: str = Field(description="short")
    metric: str
    unit: str = Field(description="'x' for a ratio to the published reference, over several devices or runtimes")
    direction: str
    transform: str
    reference: float | None = Field(None, description="the reference point's coordinate; null until it is fixed")
    objective: bool
    target: str | None = Field(
        None, serialization_alias="place", description="'device/runtime' of a figure that was measured on one"
    )
    workload: str | None = None
    budget: float | None = Field(None, description="the limit, in the axis' unit; null where there is none")

    @property
    def heading(self) -> str:
        """The label with the unit, such as 'latency [ms]'."""
        return f"{self.label} [{self.unit}]" if self.unit else self.label


class MeasuredFigure(NamedTuple):
    """A metric of one device, runtime and workload."""

    metric: str
    key: MeasurementKey


def target_name(key: MeasurementKey) -> str:
    """Returns the device and runtime, such as 'laptop/llama.cpp'."""
    return f"{key.device}/{key.runtime}"


def measured_figures(space: SearchSpace) -> list[MeasuredFigure]:
    """Returns the metrics of objectives and budgets on every device and runtime, except those that are an objective."""
    items: tuple[Budget | Objective, ...] = (*space.objectives, *space.budgets)
    measured = [item for item in items if METRICS[item.metric].source != "proxy"]
    named = dict.fromkeys((item.metric, item.workload or "") for item in measured)
    of_objectives = {
        MeasuredFigure(objective.metric, key) for objective in space.objectives if (key := only_key(space, objective))
    }
    figures = [
        MeasuredFigure(metric, MeasurementKey(*target, workload))
        for target in space.targets
        for metric, workload in named
    ]
    return [figure for figure in dict.fromkeys(figures) if figure not in of_objectives]


def only_key(space: SearchSpace, objective: Objective) -> MeasurementKey | None:
    """Returns the key at which an objective is measured; None for quality and for ratios over several keys."""
    keys = [] if METRICS[objective.metric].source == "proxy" else measurement_keys(space, objective)
    return keys[0] if len(keys) == 1 else None


def axis_views(
    space: SearchSpace, published: Figures | None, reference_point: Sequence[float] | None
) -> list[AxisView]:
    """Returns all axes: the objectives in the space's order, then `measured_figures`, then those of the layout alone.

    Args:
        space: the study's.
        published: the published reference's figures; None until they are known, and budgets relative to them with them.
        reference_point: the reference point; None until it is fixed.
    """
    figures = published or {}
    views = [
        _objective(space, objective, figures, reference_point[i] if reference_point else None)
        for i, objective in enumerate(space.objectives)
    ]
    views += [_figure(space, figure, figures) for figure in measured_figures(space)]
    return [*_with_own_keys([*views, *_structure(space)])]


def cache_context(space: SearchSpace) -> int:
    """Returns the context of the axis of key-value caches, in tokens: the largest window of the measured workloads."""
    return max(space.workloads[name].window for name in space.measured)


def _objective(space: SearchSpace, objective: Objective, published: Figures, reference: float | None) -> AxisView:
    metric, key = METRICS[objective.metric], only_key(space, objective)
    of_quality = metric.source == "proxy"
    ratio = key is None and not of_quality
    held_at = PROXY if of_quality else key
    return AxisView(
        name=objective.name,
        key=objective.name,
        label=objective.name,
        metric=objective.metric,
        unit="x" if ratio else metric.unit,
        direction="min" if ratio else metric.direction,
        transform=metric.transform,
        reference=reference,
        objective=True,
        target=target_name(key) if key else None,
        workload=objective.workload,
        budget=limit_at(space, objective.metric, held_at, published)
        if held_at
        else _ratio(space, objective, published),
    )


def _ratio(space: SearchSpace, objective: Objective, published: Figures) -> float | None:
    """Returns the limit of the worst ratio; None unless budgets allow the same at all keys."""
    if objective.aggregate != "worst":
        return None
    limits = set()
    for key in measurement_keys(space, objective):
        held = [
            ratio
            for budget in space.budgets
            if budget.metric == objective.metric and key in measurement_keys(space, budget)
            if (ratio := ratio_of_limit(budget, published, key)) is not None
        ]
        at_key = min(
            (1 / ratio_limit if METRICS[objective.metric].direction == "max" else ratio_limit for ratio_limit in held),
            default=0,
        )
        limits.add(round(at_key, 9))
    return limits.pop() or None if len(limits) == 1 else None


def _figure(space: SearchSpace, figure: MeasuredFigure, published: Figures) -> AxisView:
    metric, key = METRICS[figure.metric], figure.key
    what = f"{figure.metric} {key.workload}".rstrip()
    at = f"{figure.metric}.{key.workload}".rstrip(".")
    return AxisView(
        name=f"{what} on {target_name(key)}",
        key=_NOT_IN_KEYS.sub("-", f"{at}@{key.device}.{key.runtime}"),
        label=f"{what}, {target_name(key)}",
        metric=figure.metric,
        unit=metric.unit,
        direction=metric.direction,
        transform=metric.transform,
        objective=False,
        target=target_name(key),
        workload=key.workload or None,
        budget=limit_at(space, figure.metric, key, published),
    )


def _with_own_keys(views: Sequence[AxisView]) -> Iterator[AxisView]:
    """Yields the axes with unique keys: names of devices may differ only in characters that keys cannot have."""
    counts: dict[str, int] = {}
    for view in views:
        count = counts[view.key] = counts.get(view.key, 0) + 1
        yield view if count == 1 else view.model_copy(update={"key": f"{view.key}@{count}"})


def _structure(space: SearchSpace) -> Iterator[AxisView]:
    context = cache_context(space)
    total = space.model.params.total.max
    active = space.model.params.active.max
    for key, label, unit, budget in (
        (PARAMS_TOTAL, "parameters", "", total),
        (PARAMS_ACTIVE, "active parameters", "", active),
        (KV_BYTES, f"KV cache at {context} tokens", "B", None),
    ):
        yield AxisView(
            name=label,
            key=key,
            label=label,
            metric=key,
            unit=unit,
            direction="min",
            transform="log",
            objective=False,
            budget=None if budget is None or not math.isfinite(budget) else float(budget),
        )
