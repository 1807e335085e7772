"""By what a size's candidates are compared: the study's objectives where there is one, and where hypervolume begins.

Coordinates are those of a study (`nas.core.scoring`) with one change: ratios are to the size's own nearest candidate,
which stands where a study has its published reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nas.core.errors import InvalidInput
from nas.core.family import Decision
from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.scoring import Axis, Place, QualityValue, axis
from nas.core.space import Objective, RuntimeSpace, SearchSpace
from nas.proxy.ladder import proxy_of

EXPONENT = 0.076
"""Loss falls with the weights outside the embedding as N^-0.076 (Kaplan et al. 2020, equation 1.1)."""
CORNER_RATIO, CORNER_QUALITY = 1.2, 0.9
"""Where hypervolume begins without a study: so many times the nearest candidate's figures, and its quality."""
BYTES_PER_WEIGHT = 0.5625
"""Of Q4_0: 18 bytes for 32 weights."""

PER_TOKEN, HELD = "bytes_per_token", "bytes_held"
"""What stands in for latency and memory where nothing is measured."""

Measurements = Mapping[Place, Measurement]


@dataclass(frozen=True)
class Terms:
    """What candidates are compared by.

    Args:
        space: objectives, devices, runtimes, workloads and limits; without budgets.
        corner: of hypervolume, objective by objective, as coordinates; None: the study froze none.
        quality: of the parent's proxy in the study; 1 where there is none.
        proxies: id of a proxy that the study trained -> its quality and standard deviation.
        decisions: what was settled here.
    """

    space: SearchSpace
    corner: tuple[float, ...] | None
    quality: float
    proxies: Mapping[str, tuple[float, float]]
    decisions: tuple[Decision, ...] = ()

    @property
    def context(self) -> int:
        """The longest window that is measured, in tokens."""
        return max(self.space.workloads[name].window for name in self.space.measured)

    def limits(self) -> dict[str, float]:
        """The corner by objective."""
        given = dict(zip([each.name for each in self.space.objectives], self.corner or (), strict=False))
        return {
            each.name: given.get(
                each.name, -CORNER_QUALITY * self.quality if each.metric == "quality" else math.log(CORNER_RATIO)
            )
            for each in self.space.objectives
        }

    def axes(self, layout: Layout, taken: Measurements, anchor: Layout, base: Measurements) -> dict[str, Axis]:
        """Coordinates of a measured candidate, without objectives that could not be read.

        Args:
            layout: the candidate.
            taken: its measurements.
            anchor: the candidate that ratios are to.
            base: its measurements.
        """
        found = {}
        for objective in self.space.objectives:
            each = axis(self.space, objective, _figures(taken), _figures(base), self.quality_of(layout, anchor))
            if each is not None:
                found[objective.name] = each
        return found

    def computed_axes(self, layout: Layout, anchor: Layout) -> dict[str, Axis]:
        """Quality, and what a device would have to read per token and to hold: where nothing is measured."""
        quality = self.quality_of(layout, anchor)
        found = {"quality": Axis(value=quality.value, coordinate=-quality.value, sd=quality.sd)}
        for name in (PER_TOKEN, HELD):
            value, base = (_bytes(each, self.context)[name] for each in (layout, anchor))
            found[name] = Axis(value=value, coordinate=math.log(value / base), sd=0.0)
        return found

    def computed_limits(self) -> dict[str, float]:
        """The corner of `computed_axes`."""
        return {
            "quality": -CORNER_QUALITY * self.quality,
            PER_TOKEN: math.log(CORNER_RATIO),
            HELD: math.log(CORNER_RATIO),
        }

    def trained(self, layout: Layout) -> tuple[str, float, float] | None:
        """Proxy, quality and standard deviation, where the study trained this layout's proxy."""
        try:
            proxy = proxy_of(layout, self.space.quality).id
        except InvalidInput:  # narrower than the proxies
            return None
        known = self.proxies.get(proxy)
        return (proxy, *known) if known else None

    def quality_of(self, layout: Layout, anchor: Layout) -> QualityValue:
        """The proxy's quality, or the parent's, times what more weights of the same pattern are worth."""
        proxy, value, sd = self.trained(layout) or ("", self.quality, 0.0)
        return QualityValue(value * (effective_weights(layout) / effective_weights(anchor)) ** EXPONENT, sd, proxy)


def effective_weights(layout: Layout) -> float:
    """Weights outside the tables; of a mixture of experts the geometric mean of all and those of one token."""
    params = layout.params
    tables = params.total - params.non_embedding
    return math.sqrt(params.non_embedding * (params.active - tables))


def narrowed(space: SearchSpace, devices: tuple[str, ...], runtimes: tuple[RuntimeSpace, ...]) -> SearchSpace:
    """The space on other devices or runtimes (none given: its own), without budgets.

    Objectives that named a device or a runtime that is left out speak of all that are there.
    """
    devices, runtimes = devices or space.devices, runtimes or space.runtimes
    names = {runtime.name for runtime in runtimes}

    def fitted(objective: Objective) -> Objective:
        own = {
            "device": objective.device if objective.device in devices else None,
            "runtime": objective.runtime if objective.runtime in names else None,
        }
        return objective.model_copy(update=own)

    return space.model_copy(
        update={
            "devices": devices,
            "runtimes": runtimes,
            "budgets": (),
            "objectives": tuple(fitted(objective) for objective in space.objectives),
        }
    )


def _figures(taken: Measurements) -> dict[Place, dict[str, Figure]]:
    """By place; what needs no workload stands under none, too."""
    found = {place: dict(each.figures) for place, each in taken.items()}
    sizes = {
        place._replace(workload=""): {"file_size": figures["file_size"]}
        for place, figures in found.items()
        if "file_size" in figures
    }
    return found | sizes


def _bytes(layout: Layout, context: int) -> dict[str, float]:
    beside = layout.kv_bytes(context) + layout.state_bytes()
    params = layout.params
    return {PER_TOKEN: params.active * BYTES_PER_WEIGHT + beside, HELD: params.total * BYTES_PER_WEIGHT + beside}
