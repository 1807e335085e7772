"""Profiles: where the time of one request goes, by layer and by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nas.core.errors import CandidateFailed
from nas.core.layout import MAX_DEPTH, Layout

Part = Literal["embedding", "mixer", "ffn", "head"]
Place = tuple[int | None, Part]
Json = dict[str, Any]

Operator = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:]{1,40}$")]

_IN_LAYERS = ("mixer", "ffn")
_MAX_ENTRIES = 1 << 15
_Nanoseconds = Annotated[int, Field(ge=0, lt=10**15)]
"""Less than eleven days."""


class NodeTime(NamedTuple):
    """The time of all nodes of one operator in one part of the model.

    Args:
        layer: 0-based; None: embedding and head, which are in none.
        part: of the layer or of the model.
        operator: the runtime's own name of it.
        nodes: how many were computed.
        ns: nanoseconds of all of them.
    """

    layer: Annotated[int, Field(ge=0, lt=MAX_DEPTH)] | None
    part: Part
    operator: Operator
    nodes: Annotated[int, Field(ge=1, lt=1 << 40)]
    ns: _Nanoseconds


class PhaseProfile(BaseModel):
    """The nodes of the prompt, or of all decoded tokens, each operator of a part once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    whole_ns: _Nanoseconds = Field(description="when nodes are not timed, in the same process")
    profiled_ns: _Nanoseconds = Field(description="while each node was timed")
    nodes: Annotated[list[NodeTime], Field(max_length=_MAX_ENTRIES)]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if len({node[:3] for node in self.nodes}) < len(self.nodes):
            raise ValueError("an operator of a part has two times")
        if any((node.layer is None) == (node.part in _IN_LAYERS) for node in self.nodes):
            raise ValueError("a mixer or feed-forward is in no layer, or something else is in one")
        if self.sum_ns > self.profiled_ns:
            raise ValueError("the nodes take longer than the request")
        return self

    @property
    def sum_ns(self) -> int:
        """Nanoseconds of all nodes."""
        return sum(node.ns for node in self.nodes)


class Profile(BaseModel):
    """A profiler's report of one request, which it runs several times; each time is the least of these runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: int = Field(ge=1, le=1 << 22, description="tokens")
    gen: int = Field(ge=1, le=1 << 22, description="decoded tokens")
    prefill: PhaseProfile
    decode: PhaseProfile
    finite: bool

    @property
    def phases(self) -> dict[str, tuple[PhaseProfile, int]]:
        """Phase -> its nodes, and the number of passes through the model that its figures are shown for."""
        return {"prefill": (self.prefill, 1), "decode": (self.decode, self.gen)}

    def moved(self, places: Sequence[Place]) -> Profile:
        """Returns the profile of a program that counted steps in place of layers, the place of each step given.

        Raises:
            CandidateFailed: the profile has more steps.
        """
        phases = {
            name: phase.model_copy(update={"nodes": _moved(phase, places)}) for name, (phase, _) in self.phases.items()
        }
        return self.model_copy(update=phases)


def _moved(phase: PhaseProfile, places: Sequence[Place]) -> list[NodeTime]:
    sums: dict[tuple[int | None, Part, str], tuple[int, int]] = {}
    for node in phase.nodes:
        place: Place = (None, node.part)
        if node.layer is not None:
            if node.layer >= len(places):
                raise CandidateFailed(
                    "garbage_output", f"the profile has step {node.layer} of a model of {len(places)}"
                )
            place = places[node.layer]
        nodes, ns = sums.get((*place, node.operator), (0, 0))
        sums[*place, node.operator] = nodes + node.nodes, ns + node.ns
    return [NodeTime(*key, *both) for key, both in sums.items()]


_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Times(BaseModel):
    """Milliseconds of the whole prompt and of one decoded token, and their shares of the sum of all nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_ms: _Amount
    prefill_share: _Amount
    decode_ms: _Amount
    decode_share: _Amount


class PartTimes(Times):
    """Of a part of the model; `block` is its code in the layout."""

    layer: int | None
    part: Part
    block: str | None


class OperatorTimes(Times):
    """Of all nodes of an operator."""

    operator: Operator


class PhaseTimes(BaseModel):
    """Milliseconds of the request when nodes are not timed, when they are, and of the sum of all nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    whole_ms: _Amount
    profiled_ms: _Amount
    sum_ms: _Amount


class ProfileSummary(BaseModel):
    """What `summary` returns, with the cores that other processes used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: PhaseTimes
    decode: PhaseTimes
    parts: tuple[PartTimes, ...]
    operators: tuple[OperatorTimes, ...]
    foreign_cpu: _Amount | None

    def is_of(self, layout: Layout) -> bool:
        """Returns whether the parts are those of a layout."""
        return [(part.layer, part.part) for part in self.parts] == [*_parts(layout)]


def summary(profile: Profile, layout: Layout | None) -> Json:
    """Returns the times of the model's parts and of operators as JSON; see `ProfileSummary`.

    Without a layout the parts are those that the profile names.

    Raises:
        CandidateFailed: the profile names a part that the layout does not have.
    """
    measured = {(node.layer, node.part) for phase, _ in profile.phases.values() for node in phase.nodes}
    parts = _parts(layout) if layout else dict.fromkeys(sorted(measured, key=_place))
    if foreign := measured - parts.keys():
        layer, part = min(foreign, key=_place)
        where = "" if layer is None else f" of layer {layer}"
        raise CandidateFailed("garbage_output", f"the profile has times of the {part}{where}, which the model lacks")
    operators = _times(profile, lambda node: node.operator)
    times = _times(profile, lambda node: (node.layer, node.part))
    nothing = {f"{phase}_{what}": 0.0 for phase in profile.phases for what in ("ms", "share")}
    return {
        **{
            name: {
                "whole_ms": phase.whole_ns / passes / 1e6,
                "profiled_ms": phase.profiled_ns / passes / 1e6,
                "sum_ms": phase.sum_ns / passes / 1e6,
            }
            for name, (phase, passes) in profile.phases.items()
        },
        "parts": [
            {"layer": place[0], "part": place[1], "block": block, **nothing, **times.get(place, {})}
            for place, block in parts.items()
        ],
        "operators": [
            {"operator": name, **nothing, **figures}
            for name, figures in sorted(operators.items(), key=lambda item: -item[1].get("decode_ms", 0.0))
        ],
    }


def _parts(layout: Layout) -> dict[Place, str | None]:
    """Returns the parts of a layout in order -> their code, such as C3 or swiglu:4608."""
    parts: dict[Place, str | None] = {(None, "embedding"): None}
    for index in range(layout.depth):
        layer = layout.layer_at(index)
        if layer.mixers:
            parts[index, "mixer"] = "&".join(block.format() for block in layer.mixers)
        if layer.ffn:
            parts[index, "ffn"] = layer.ffn.format()
    return {**parts, (None, "head"): None}


def _place(place: Place) -> tuple[int, str]:
    """Sorts parts as a token passes through them."""
    layer, part = place
    return (layer if layer is not None else MAX_DEPTH if part == "head" else -1), "" if part == "mixer" else part


def _times(profile: Profile, key: Callable[[NodeTime], Hashable]) -> dict[Hashable, dict[str, float]]:
    """Returns key -> milliseconds and share in each phase in which it has nodes."""
    times: dict[Hashable, dict[str, float]] = {}
    for name, (phase, passes) in profile.phases.items():
        sums: Counter[Hashable] = Counter()
        for node in phase.nodes:
            sums[key(node)] += node.ns
        for place, ns in sums.items():
            figures = {f"{name}_ms": ns / passes / 1e6, f"{name}_share": ns / (phase.sum_ns or 1)}
            times.setdefault(place, {}).update(figures)
    return times
