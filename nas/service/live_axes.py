"""What the panels of a study's page can be drawn over: its objectives, figures at single places, and the structure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import BaseModel, Field

from nas.core.metrics import METRICS
from nas.core.scoring import Figures, Place, limit_at, places, ratio_of_limit
from nas.core.space import Budget, Objective, SearchSpace

PARAMS_TOTAL, PARAMS_ACTIVE, KV_BYTES = STRUCTURE = ("params_total", "params_active", "kv_bytes")
"""Keys of the axes that a layout alone gives."""

_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._@-]")


class AxisView(BaseModel):
    """What an axis is of."""

    name: str
    key: str = Field(description="stable, and safe in a URL: letters, digits, '.', '_', '@' and '-'")
    label: str = Field(description="short")
    metric: str
    unit: str = Field(description="'x' for a ratio to the published reference, over several devices or runtimes")
    direction: str
    transform: str
    reference: float | None = Field(None, description="the reference point's coordinate; null until it is fixed")
    objective: bool
    place: str | None = Field(None, description="'device/runtime' of figures that were taken at one place")
    workload: str | None = None
    budget: float | None = Field(None, description="the limit, in the axis' unit; null where there is none")


class PlaceFigure(NamedTuple):
    """A figure as it was taken at one place."""

    metric: str
    place: Place


def place_name(place: Place) -> str:
    """The device and runtime of a place, such as 'laptop/llama.cpp'."""
    return f"{place.device}/{place.runtime}"


def place_figures(space: SearchSpace) -> list[PlaceFigure]:
    """The figures at every place that objectives and budgets name, but those that are an objective as they are."""
    items: tuple[Budget | Objective, ...] = (*space.objectives, *space.budgets)
    measured = [item for item in items if METRICS[item.metric].source != "proxy"]
    named = dict.fromkeys((item.metric, item.workload or "") for item in measured)
    own = {PlaceFigure(each.metric, place) for each in space.objectives if (place := only_place(space, each))}
    everywhere = [(device, runtime.name) for device in space.devices for runtime in space.runtimes]
    found = [PlaceFigure(metric, Place(*where, workload)) for where in everywhere for metric, workload in named]
    return [each for each in dict.fromkeys(found) if each not in own]


def only_place(space: SearchSpace, objective: Objective) -> Place | None:
    """Where an objective's figure is taken; None for quality, and for ratios over several places."""
    found = [] if METRICS[objective.metric].source == "proxy" else places(space, objective)
    return found[0] if len(found) == 1 else None


def axis_views(space: SearchSpace, published: Figures | None, corner: Sequence[float] | None) -> list[AxisView]:
    """All axes: the objectives in the space's order, then `place_figures`, then `STRUCTURE`.

    Args:
        space: the study's.
        published: the published reference's figures; None until they are taken, and budgets relative to them unknown.
        corner: the reference point; None until it is fixed.
    """
    known = published or {}
    found = [
        _objective(space, each, known, corner[i] if corner else None) for i, each in enumerate(space.objectives)
    ]  # fmt: skip
    found += [_figure(space, each, known) for each in place_figures(space)]
    return [*_with_own_keys(found), *_structure(space)]


def cache_context(space: SearchSpace) -> int:
    """Tokens of context that key-value caches are told for: the largest window of the measured workloads."""
    return max(space.workloads[name].window for name in space.measured)


def _objective(space: SearchSpace, objective: Objective, published: Figures, reference: float | None) -> AxisView:
    metric, place = METRICS[objective.metric], only_place(space, objective)
    ratio = place is None and metric.source != "proxy"
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
        place=place_name(place) if place else None,
        workload=objective.workload,
        budget=limit_at(space, objective.metric, place, published) if place else _ratio(space, objective, published),
    )


def _ratio(space: SearchSpace, objective: Objective, published: Figures) -> float | None:
    """The limit of the worst ratio: only where budgets allow the same at all places does one line tell it."""
    if METRICS[objective.metric].source == "proxy" or objective.aggregate != "worst":
        return None
    limits = set()
    for place in places(space, objective):
        held = [
            ratio
            for budget in space.budgets
            if budget.metric == objective.metric and place in places(space, budget)
            if (ratio := ratio_of_limit(budget, published, place)) is not None
        ]
        at_place = min((1 / each if METRICS[objective.metric].direction == "max" else each for each in held), default=0)
        limits.add(round(at_place, 9))
    return limits.pop() or None if len(limits) == 1 else None


def _figure(space: SearchSpace, each: PlaceFigure, published: Figures) -> AxisView:
    metric, place = METRICS[each.metric], each.place
    what = f"{each.metric} {place.workload}".rstrip()
    at = f"{each.metric}.{place.workload}".rstrip(".")
    return AxisView(
        name=f"{what} on {place_name(place)}",
        key=_NOT_IN_KEYS.sub("-", f"{at}@{place.device}.{place.runtime}"),
        label=f"{what}, {place_name(place)}",
        metric=each.metric,
        unit=metric.unit,
        direction=metric.direction,
        transform=metric.transform,
        objective=False,
        place=place_name(place),
        workload=place.workload or None,
        budget=limit_at(space, each.metric, place, published),
    )


def _with_own_keys(views: Sequence[AxisView]) -> Iterator[AxisView]:
    """Devices may be called so that their keys would be the same: the second gets a number behind."""
    seen: dict[str, int] = {}
    for view in views:
        count = seen[view.key] = seen.get(view.key, 0) + 1
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
