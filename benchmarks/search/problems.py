"""The family of problems: each seed gives a space with a random simulated device and quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from benchmarks.search import spaces
from benchmarks.search.device import SimulatedDevice
from benchmarks.search.quality import Circuit, Traits
from nas.core.layout import Layout
from nas.search.proposers import Observation, Sampler

BUDGETS = ("ttft", "decode", "memory")
_CROWD = 400


@dataclass(frozen=True)
class Kind:
    """One kind of difficulty.

    Args:
        doc: its difficulty for a search.
        parts: of the space.
        traits: of the quality.
        axes: objectives, the first is the quality.
        feasible: share of random layouts that keeps every budget.
        device_noise: standard deviation of the logarithm of device figures.
        quality_noise: standard deviation of quality, as a share of its spread over random layouts.
    """

    doc: str
    parts: Mapping[str, Any] = field(default_factory=lambda: spaces.HYBRID)
    traits: Traits = field(default_factory=Traits)
    axes: tuple[str, ...] = ("quality", "decode", "memory")
    feasible: float = 0.2
    device_noise: float = 0.01
    quality_noise: float = 0.1


FAMILY: Mapping[str, Kind] = {
    "hybrid": Kind("a bit of everything"),
    "conflict": Kind("neighbours disturb each other", traits=Traits(conflict=0.4)),
    "rugged": Kind("every triple of neighbours has its own effect", traits=Traits(rugged=0.012)),
    "placement": Kind("each mixer has a height of its own", traits=Traits(placement=0.15, appetite=0.9)),
    "deceptive": Kind("the usual spaced hybrid is a trap", traits=Traits(trap=0.08)),
    "conditional": Kind("four mixers, two feed-forwards a layer, knobs of their own", parts=spaces.MANY),
    "attention": Kind("one mixer at one depth: only arguments vary", parts=spaces.ATTENTION),
    "periodic": Kind("stacks that repeat after two to four layers", parts=spaces.PERIODIC),
    "tight": Kind("one random layout in twenty keeps the budgets", feasible=0.05),
    "noisy": Kind("3 % on devices, a third of the spread on quality", device_noise=0.03, quality_noise=0.33),
    "two": Kind("two objectives", axes=("quality", "decode")),
    "four": Kind("four objectives", axes=("quality", "decode", "memory", "ttft")),
    "five": Kind("five objectives", axes=("quality", "decode", "memory", "ttft", "size")),
}


class Problem:
    """One instance.

    Args:
        name: in `FAMILY`.
        seed: of everything that differs between instances.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed, self.kind = name, seed, FAMILY[name]
        self.axes = self.kind.axes
        self.space = spaces.synthetic_space(name, self.kind.parts, self.axes)
        rng = np.random.default_rng([71, seed, *name.encode()])
        kinds = [block.kind for block in self.space.mixers + self.space.ffn]
        self._device = SimulatedDevice(kinds, rng)
        self._circuit = Circuit(self.kind.traits, rng)

    def truth(self, layout: Layout) -> dict[str, float]:
        """Returns noise-free coordinates, minimised: the loss, and logarithms of device figures."""
        figures = self._device.figures(layout)
        return {"quality": self._circuit.loss(layout)} | {name: math.log(value) for name, value in figures.items()}

    def observe(self, layout: Layout, gated: bool = True) -> Observation:
        """Returns figures with reproducible noise; if `gated`, layouts over a budget have no quality."""
        rng = np.random.default_rng([73, self.seed, int(layout.id[:12], 16)])
        truth = self.truth(layout)
        spread = {name: self.kind.device_noise for name in truth} | {"quality": self._quality_sd}
        figures = {name: value + spread[name] * float(rng.standard_normal()) for name, value in truth.items()}
        figures["size"] = truth["size"]  # nobody measures a file's size with error
        constraints = self._excess(figures)
        broken = max(constraints.values()) > 0
        objectives = {name: figures[name] for name in self.axes if not (name == "quality" and broken and gated)}
        if broken and gated:
            return Observation(layout, "infeasible", objectives, constraints)
        return Observation(layout, "complete", objectives, constraints, rung=len(self.space.quality.rungs) - 1)

    def point(self, layout: Layout) -> list[float] | None:
        """Returns noise-free coordinates in the order of `axes`; None for a layout that truly breaks a budget."""
        truth = self.truth(layout)
        return None if max(self._excess(truth).values()) > 0 else [truth[name] for name in self.axes]

    @cached_property
    def reference_point(self) -> dict[str, float]:
        """The budgets; on other axes the 75 % quantile of random layouts within the budgets."""
        inside = [figures for figures in self._crowd if max(self._excess(figures).values()) <= 0]
        corner = {name: float(np.quantile([figures[name] for figures in inside], 0.75)) for name in self.axes}
        return corner | {name: self.limits[name] for name in self.axes if name in BUDGETS}

    def _excess(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {name: figures[name] - self.limits[name] for name in BUDGETS}

    @property
    def _crowd(self) -> Sequence[Mapping[str, float]]:
        return _crowd_of(self.name, self.seed)

    @cached_property
    def _quality_sd(self) -> float:
        return self.kind.quality_noise * float(np.std([figures["quality"] for figures in self._crowd]))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Limits at one quantile of each figure, such that the wanted share of random layouts keeps all of them."""
        table = np.array([[figures[name] for name in BUDGETS] for figures in self._crowd])
        order = np.sort(table, axis=0)
        places = [np.searchsorted(order[:, column], table[:, column]) for column in range(len(BUDGETS))]
        level = int(np.sort(np.max(places, axis=0))[round(self.kind.feasible * (_CROWD - 1))])
        return {name: float(order[level, index]) for index, name in enumerate(BUDGETS)}


@cache
def _crowd_of(name: str, seed: int) -> Sequence[Mapping[str, float]]:
    """Returns the noise-free figures of random layouts; the runs of an instance in one process share them."""
    problem = Problem(name, seed)
    sampler, rng = Sampler(problem.space), np.random.default_rng([79, seed])
    return [problem.truth(sampler.draw(rng)) for _ in range(_CROWD)]
