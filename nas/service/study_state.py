"""What the address of a study's page says of its panels: axes, scales, place and brushed ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.service.live_axes import KV_BYTES, PARAMS_TOTAL, AxisView

PANELS = (1, 2, 3)


class PanelView(BaseModel):
    """One panel: the keys of its axes."""

    number: int
    x: str
    y: str


class RangeView(BaseModel):
    """A brushed range of an axis, in its unit."""

    key: str
    low: float
    high: float


class PageState(BaseModel):
    """What the page was asked to show; what its address leaves open is as a new visitor has it."""

    panels: list[PanelView]
    log: list[str] = Field(description="axes with a logarithmic scale")
    infeasible: bool = Field(description="whether trials that break a budget are shown")
    place: str | None = Field(description="where figures of one place are shown from; null: as the axis says")
    pick: list[RangeView]

    def shown(self, key: str, axes: Sequence[AxisView]) -> AxisView:
        """The axis of that key, at the chosen place where it has one there."""
        chosen = next(axis for axis in axes if axis.key == key)
        if chosen.place is None or self.place is None:
            return chosen
        same = (axis for axis in axes if (axis.metric, axis.workload) == (chosen.metric, chosen.workload))
        return next((axis for axis in same if axis.place == self.place), chosen)


def page_state(axes: Sequence[AxisView], query: Mapping[str, str]) -> PageState:
    """The page's state; fields of the query that it does not know are left alone.

    Raises:
        InvalidInput: a field says what none can.
        UnknownName: no such axis, or no such place.
    """
    panels = []
    for number, (x, y) in zip(PANELS, _usual_panels(axes), strict=True):
        chosen = [_axis(query.get(f"{side}{number}") or usual, axes) for side, usual in (("x", x), ("y", y))]
        panels.append(PanelView(number=number, x=chosen[0], y=chosen[1]))
    return PageState(
        panels=panels,
        log=[_axis(key, axes) for key in _parts(query, "log")],
        infeasible=_flag(query, "infeasible"),
        place=_place(query.get("place") or None, axes),
        pick=[_range(part, axes) for part in _parts(query, "pick")],
    )


def place_names(axes: Sequence[AxisView]) -> list[str]:
    """The places that axes have."""
    return list(dict.fromkeys(axis.place for axis in axes if axis.place is not None))


def _usual_panels(axes: Sequence[AxisView]) -> list[tuple[str, str]]:
    """Pairs of objectives, and where they are two only, each over the size: what is to be large stands upright."""
    objectives = [axis for axis in axes if axis.objective]
    pairs = list(itertools.combinations(objectives, 2))
    sizes = [next(axis for axis in axes if axis.key == key) for key in (PARAMS_TOTAL, KV_BYTES)]
    pairs += [(size, objectives[0]) for size in sizes]
    upright = [(b, a) if a.direction == "max" else (a, b) for a, b in pairs]
    return [(x.key, y.key) for x, y in upright[: len(PANELS)]]


def _axis(key: str, axes: Sequence[AxisView]) -> str:
    known = [axis.key for axis in axes]
    if key not in known:
        raise UnknownName("axis", key[:128], known)
    return key


def _place(place: str | None, axes: Sequence[AxisView]) -> str | None:
    known = place_names(axes)
    if place is not None and place not in known:
        raise UnknownName("place", place[:128], known)
    return place


def _parts(query: Mapping[str, str], name: str) -> list[str]:
    return [part for part in query.get(name, "").split(",") if part]


def _flag(query: Mapping[str, str], name: str) -> bool:
    told = query.get(name, "0")
    if told not in ("0", "1"):
        raise InvalidInput(f"{name} is 0 or 1", where=name)
    return told == "1"


def _range(text: str, axes: Sequence[AxisView]) -> RangeView:
    key, _, bounds = text.partition(":")
    axis = _axis(key, axes)
    try:
        low, high = map(float, bounds.split(":"))
    except ValueError:
        low = high = math.nan
    if not low <= high or math.isinf(low) or math.isinf(high):
        raise InvalidInput(f"a brushed range is KEY:LOW:HIGH, not {text[:128]!r}", where="pick")
    return RangeView(key=axis, low=low, high=high)
