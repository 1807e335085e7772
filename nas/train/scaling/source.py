"""Finds the origin of a family: the winners' common pattern, and the criteria for comparing candidates.

Winners are a study's front or given layouts. Criteria are the study's objectives, or a space's. Coordinates are those
of a study (`nas.core.scoring`) with one change: ratios are to the size's nearest candidate instead of a published
reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput, Unsupported
from nas.core.family import BuildDecision
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.metrics import METRICS
from nas.core.quantisation import Quantisation
from nas.core.scoring import Axis, MeasurementKey, QualityValue, axis, with_file_size
from nas.core.space import Objective, RuntimeSpace, SearchSpace
from nas.infra.store import events, studies
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import known_runtime
from nas.measure.runtimes import RUNTIMES
from nas.search.analysis.report import study_report
from nas.search.proxy.ladder import proxy_of
from nas.search.study.events import Calibrated, stored_space

DEPTHS = 8
"""Number of equal parts of a stack for which shares of mixers are counted."""
EXPONENT = 0.076
"""Loss falls with the weights outside the embedding as N^-0.076 (Kaplan et al. 2020, equation 1.1)."""
REFERENCE_RATIO = 1.2
"""Default reference point: multiple of the nearest candidate's figures."""
REFERENCE_QUALITY = 0.9
"""Default reference point: multiple of the nearest candidate's quality."""
BYTES_PER_WEIGHT = 0.5625
"""Of Q4_0: 18 bytes for 32 weights."""
PER_TOKEN = "bytes_per_token"
"""Objective instead of latency if nothing is measured."""
HELD = "bytes_held"
"""Objective instead of memory if nothing is measured."""

Measurements = Mapping[MeasurementKey, Measurement]


@dataclass(frozen=True, slots=True)
class Winner:
    """A layout from which a family may be built.

    Args:
        layout: as searched or given.
        weight: in the common pattern.
        trial: its number in the study, if it is from one.
        objectives: its values there.
    """

    layout: Layout
    weight: float = 1.0
    trial: int | None = None
    objectives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Pattern:
    """Common pattern of the winners, and the layout from which a family is scaled.

    Args:
        parent: the winner that is nearest to the common pattern.
        distance: share of its mixers and feed-forwards that differ from the common pattern.
        shares: kind of mixer -> [DEPTHS] its share of the layers there, mean over the winners by weight.
        winners: all of them.
    """

    parent: Winner
    distance: float
    shares: dict[str, NDArray[np.float64]]
    winners: tuple[Winner, ...]


@dataclass(frozen=True)
class Criteria:
    """Criteria for comparing candidates.

    Args:
        space: objectives, devices, runtimes, workloads and limits; without budgets.
        reference_point: of hypervolume, objective by objective, as coordinates; None: no study froze one.
        quality: of the parent's proxy in the study; 1 if there is none.
        proxies: id of a proxy that the study trained -> its quality and standard deviation.
        decisions: for the record of the family.
    """

    space: SearchSpace
    reference_point: tuple[float, ...] | None
    quality: float
    proxies: Mapping[str, tuple[float, float]]
    decisions: tuple[BuildDecision, ...] = ()

    @property
    def context(self) -> int:
        """The longest window that is measured, in tokens."""
        return max(self.space.workloads[name].window for name in self.space.measured)

    def limits(self) -> dict[str, float]:
        """Returns objective -> coordinate of the reference point."""
        ratio, quality = math.log(REFERENCE_RATIO), -REFERENCE_QUALITY * self.quality
        objectives = self.space.objectives
        defaults = [quality if _is_of_proxy(objective) else ratio for objective in objectives]
        point = self.reference_point or defaults
        return {objective.name: limit for objective, limit in zip(objectives, point, strict=True)}

    def axes(self, layout: Layout, measurements: Measurements, anchor: Layout, base: Measurements) -> dict[str, Axis]:
        """Returns the coordinates of a measured candidate, without objectives that could not be read.

        Args:
            layout: the candidate.
            measurements: of the candidate.
            anchor: the candidate that ratios are to.
            base: measurements of the anchor.
        """
        figures, of_anchor = (
            with_file_size({key: measurement.figures for key, measurement in results.items()})
            for results in (measurements, base)
        )
        quality = self.quality_of(layout, anchor)
        axes = {
            objective.name: axis(self.space, objective, figures, of_anchor, quality)
            for objective in self.space.objectives
        }
        return {name: coordinate for name, coordinate in axes.items() if coordinate is not None}

    def computed_axes(self, layout: Layout, anchor: Layout) -> dict[str, Axis]:
        """Returns quality, and the bytes that a device reads per token and holds, for builds without measurements."""
        quality = self.quality_of(layout, anchor)
        axes = {"quality": Axis(value=quality.value, coordinate=-quality.value, sd=quality.sd)}
        bytes_of_anchor = _bytes(anchor, self.context)
        for name, value in _bytes(layout, self.context).items():
            axes[name] = Axis(value=value, coordinate=math.log(value / bytes_of_anchor[name]), sd=0.0)
        return axes

    def computed_limits(self) -> dict[str, float]:
        """Returns the reference point of `computed_axes`."""
        ratio = math.log(REFERENCE_RATIO)
        return {"quality": -REFERENCE_QUALITY * self.quality, PER_TOKEN: ratio, HELD: ratio}

    def trained(self, layout: Layout) -> tuple[str, float, float] | None:
        """Returns proxy, quality and standard deviation if the study trained this layout's proxy."""
        try:
            proxy = proxy_of(layout, self.space.quality).id
        except InvalidInput:  # narrower than the proxies
            return None
        quality = self.proxies.get(proxy)
        return (proxy, *quality) if quality else None

    def quality_of(self, layout: Layout, anchor: Layout) -> QualityValue:
        """Returns the proxy's quality, or the parent's, scaled by the number of weights relative to the anchor's."""
        proxy, value, sd = self.trained(layout) or ("", self.quality, 0.0)
        return QualityValue(value * (effective_weights(layout) / effective_weights(anchor)) ** EXPONENT, sd, proxy)


@dataclass(frozen=True)
class Origin:
    """Origin of a family.

    Args:
        pattern: of the winners.
        criteria: for comparing candidates.
        searched: ids of the devices that the study measured on.
    """

    pattern: Pattern
    criteria: Criteria
    searched: tuple[str, ...] = ()


def study_origin(
    store: Store, study: str, layouts: Sequence[Layout], devices: tuple[str, ...], runtime: str | None
) -> Origin:
    """Returns the front of a study, weighted by hypervolume contribution, or given layouts, with the study's criteria.

    Args:
        store: the database.
        study: its name.
        layouts: given ones; none: the front's.
        devices: instead of the study's.
        runtime: instead of the study's.

    Raises:
        UnknownName: no such study or runtime.
        InvalidInput: the study has no front, or is not of generation; or a layout has a tower or token vectors.
    """
    report = study_report(store, study)
    row = studies.get(store, study)
    space = stored_space(row)
    if space.task == "detokenization":
        what = (
            "is of detokenization: train its winner with `nas family codec` and the winner's string without v and"
            " `vectors=` as `line` of `shape`"
        )
        raise InvalidInput(what, where=f"study {study}")
    if space.task != "generation":
        part, command, setting = {
            "retrieval": ("vectors", "retrieval", "that `width`"),
            "vision": ("tower", "vision", "that `tower`"),
            "audio": ("tower", "audio", "that `tower`"),
        }[space.task]
        what = (
            f"is of {space.task}: build its winner with --layout LAYOUT, without `{part}=`, train it with"
            f" `nas family train`, then with `nas family {command}` and {setting}"
        )
        raise InvalidInput(what, where=f"study {study}")
    pattern = find_pattern(_layout_winners(layouts) or _front(report))
    narrow = narrowed(space, devices, _runtimes(space, pattern.parent.layout, runtime))
    if (rounding := space.quality.rounding) and (name := pattern.parent.layout.quantisation):
        # Layouts of a family name no quantisation: theirs is the parent's.
        alone = rounding.model_copy(update={"quantisations": (name,)})
        narrow = narrow.model_copy(update={"quality": narrow.quality.after(alone)})
    point = report["reference_point"]
    proxies = {
        row["proxy_id"]: (row["quality"]["value"], row["quality"]["sd"])
        for row in (*report["references"], *reversed(report["ranking"]))
        if row["quality"]
    }
    decisions = [_objectives_decision(narrow, f"study {study}"), _reference_decision(narrow, point)]
    if space.budgets:
        decisions.append(_budget_decision(space))
    reference_point = tuple(point[objective.name] for objective in narrow.objectives) if point else None
    criteria = Criteria(narrow, reference_point, 1.0, proxies, tuple(decisions))
    # With an assumed quality for the parent, trained candidates would win or lose by the assumption.
    trained = criteria.trained(pattern.parent.layout)
    criteria = replace(criteria, quality=trained[1]) if trained else replace(criteria, proxies={})
    searched = {event.payload["id"] for event in events.notes(store, row.id, Calibrated.what)}
    return Origin(pattern, criteria, tuple(sorted(searched)))


def given_origin(
    space: SearchSpace, layouts: Sequence[Layout], devices: tuple[str, ...], runtime: str | None
) -> Origin:
    """Returns given layouts, with equal weights, and the criteria of a space.

    Raises:
        InvalidInput: a layout has a tower or token vectors, or the space is not of generation.
    """
    if space.task != "generation":
        raise InvalidInput(f"{space.name} is of {space.task}, and members generate text", where="--space")
    pattern = find_pattern(_layout_winners(layouts))
    narrow = narrowed(space, devices, _runtimes(space, pattern.parent.layout, runtime))
    decisions = (_objectives_decision(narrow, f"space {space.name}"), _reference_decision(narrow, None))
    return Origin(pattern, Criteria(narrow, None, 1.0, {}, decisions))


def _layout_winners(layouts: Sequence[Layout]) -> list[Winner]:
    """Returns given layouts, with equal weights.

    Raises:
        InvalidInput: one has a tower or token vectors, which a family's members have not.
    """
    if any(layout.tower for layout in layouts):
        raise InvalidInput("leave `tower=` out: a member gets one by `nas family vision` or `audio`", where="--layout")
    if any(layout.vectors for layout in layouts):
        raise InvalidInput("leave `vectors=` out: a member gets them by `nas family retrieval`", where="--layout")
    return [Winner(layout) for layout in layouts]


def _front(report: dict[str, Any]) -> list[Winner]:
    """Returns the study's winners.

    Raises:
        InvalidInput: there are none.
    """
    if report["front"]:
        return [
            Winner(
                Layout.parse(row["layout"]),
                row["hv_contribution"],
                row["trial"],
                tuple((name, value) for name, value in row["objectives"].items() if value is not None),
            )
            for row in report["front"]
        ]
    trials = report["trials"]
    counted = ", ".join(
        f"{trials[state]} {state}" for state in ("complete", "infeasible", "stopped", "failed", "running")
    )
    raise InvalidInput(
        f"study {report['study']} has no front to build a family from ({counted} trials). Continue it with "
        f"'nas launch --resume', or give layouts with --layout",
        where="--study",
    )


def _runtimes(space: SearchSpace, parent: Layout, name: str | None) -> tuple[RuntimeSpace, ...]:
    """Returns the space's runtimes, or the one that is named; the patched build where the parent needs it.

    Where candidates chose the quantisation, it is the parent's.

    Raises:
        UnknownName: no such runtime.
        Unsupported: one does not carry the parent, or its quantisation names single layers.
    """
    specs = [spec for spec in space.runtimes if name in (None, spec.name)]
    if not specs:
        assert name is not None, "a space has runtimes"
        specs = [RuntimeSpace(name=name, quantisation=RUNTIMES[name].quantisations[0])]
    runtimes = []
    for spec in specs:
        support = known_runtime(spec).supports(parent)
        if not support:
            raise Unsupported(
                f"{spec.name} does not carry the pattern: {'; '.join(support.reasons)}", where="--runtime"
            )
        chosen = {"quantisation": spec.stored_as(parent), "choices": ()}
        if Quantisation.parse(spec.stored_as(parent)).depth:
            raise Unsupported(
                f"{spec.stored_as(parent)} is of single layers, and members have other depths: let candidates choose"
                " shares of the depth, as in ffn.1/3",
                where="--study",
            )
        build = {"build": "any"} if support.verdict == "patched" else {}
        runtimes.append(spec.model_copy(update=chosen | build))
    return tuple(runtimes)


def _objectives_decision(space: SearchSpace, whose: str) -> BuildDecision:
    objectives = ", ".join(
        objective.name
        if objective.workload is None
        else f"{objective.name} ({objective.metric} at {objective.workload})"
        for objective in space.objectives
    )
    runtimes = ", ".join(runtime.title for runtime in space.runtimes)
    return BuildDecision(
        what="objectives",
        value=f"{objectives}; on {', '.join(space.devices)} with {runtimes}",
        reason=f"those of {whose}; figures are ratios to the size's nearest candidate",
    )


def _is_of_proxy(objective: Objective) -> bool:
    """Returns whether an objective is a quality, whose coordinate is no logarithm of a ratio."""
    return METRICS[objective.metric].source == "proxy"


def _reference_decision(space: SearchSpace, point: dict[str, float] | None) -> BuildDecision:
    if point is None:
        value = f"{REFERENCE_RATIO} times the nearest candidate's figures, {REFERENCE_QUALITY} times its quality"
        return BuildDecision(what="reference point", value=value, reason="no study froze one")
    values = [
        f"{objective.name} {-point[objective.name]:.3g}"
        if _is_of_proxy(objective)
        else f"{objective.name} {math.exp(point[objective.name]):.2f}x the nearest candidate's"
        for objective in space.objectives
    ]
    reason = "the study's, with ratios to the nearest candidate instead of the published reference"
    return BuildDecision(what="reference point", value=", ".join(values), reason=reason)


def _budget_decision(space: SearchSpace) -> BuildDecision:
    names = ", ".join(dict.fromkeys(budget.name for budget in space.budgets))
    return BuildDecision(
        what="budgets",
        value="only the number of weights",
        reason=f"the study's budgets ({names}) are for its own size; the reference point has them as ratios",
    )


def narrowed(space: SearchSpace, devices: tuple[str, ...], runtimes: tuple[RuntimeSpace, ...]) -> SearchSpace:
    """Returns the space on other devices or runtimes (none given: its own), without budgets.

    Objectives on a device or a runtime that is left out apply to all remaining ones. Runtimes stay on their devices,
    unless a device would have none.
    """
    paired = space.model_copy(update={"runtimes": runtimes or space.runtimes})
    devices = devices or tuple(filter(paired.labels_on, space.devices))
    labels = [paired.labels_on(device) for device in devices]
    if not all(labels):
        labels = [list(paired.labelled)] * len(devices)
    running = {
        label: tuple(device for device, names in zip(devices, labels, strict=True) if label in names)
        for label in paired.labelled
    }
    runtimes = tuple(
        runtime.model_copy(update={"devices": running[label]}) if runtime.devices else runtime
        for label, runtime in paired.labelled.items()
        if running[label]
    )
    names = {name for runtime in runtimes for name in (runtime.name, runtime.title)}

    def fitted(objective: Objective) -> Objective:
        return objective.model_copy(
            update={
                "device": objective.device if objective.device in devices else None,
                "runtime": objective.runtime if objective.runtime in names else None,
            }
        )

    return space.model_copy(
        update={
            "devices": devices,
            "runtimes": runtimes,
            "budgets": (),
            "objectives": tuple(fitted(objective) for objective in space.objectives),
        }
    )


def effective_weights(layout: Layout) -> float:
    """Returns the weights outside the tables; of a mixture of experts the geometric mean of all and active ones."""
    params = layout.params
    tables = params.total - params.non_embedding
    return math.sqrt(params.non_embedding * (params.active - tables))


def _bytes(layout: Layout, context: int) -> dict[str, float]:
    caches = layout.kv_bytes(context) + layout.state_bytes()
    params = layout.params
    return {PER_TOKEN: params.active * BYTES_PER_WEIGHT + caches, HELD: params.total * BYTES_PER_WEIGHT + caches}


# The common pattern.


def find_pattern(winners: Sequence[Winner]) -> Pattern:
    """Returns the common pattern of at least one winner.

    Each winner's stack is cut into `DEPTHS` equal parts; the common share of a kind in a part is the mean over winners,
    by weight (equal ones where all are 0). The parent is the winner with the least total variation distance to the
    common shares, mean of mixers and feed-forwards: unlike a mixture of all winners, it was measured and trained.
    """
    weights = np.array([winner.weight for winner in winners])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(winners), 1 / len(winners))
    mixers, ffns = (_profiles(winners, role) for role in ("mixer", "ffn"))
    common = [{kind: weights @ rows for kind, rows in profiles.items()} for profiles in (mixers, ffns)]
    distances = np.mean(
        [_distances(profiles, mean) for profiles, mean in zip((mixers, ffns), common, strict=True)], axis=0
    )
    best = min(range(len(winners)), key=lambda i: (round(float(distances[i]), 9), -weights[i], i))
    return Pattern(winners[best], float(distances[best]), common[0], tuple(winners))


def _profiles(winners: Sequence[Winner], role: str) -> dict[str, NDArray[np.float64]]:
    """Returns kind -> [W, DEPTHS] its share of each part of each winner's stack."""
    profiles: dict[str, NDArray[np.float64]] = {}
    for row, winner in enumerate(winners):
        layout = winner.layout
        for index in range(layout.depth):
            layer = layout.layer_at(index)
            blocks = layer.mixers if role == "mixer" else tuple(filter(None, (layer.ffn,)))
            for kind in [block.kind for block in blocks] or ["none"]:
                rows = profiles.setdefault(kind, np.zeros((len(winners), DEPTHS)))
                rows[row] += _overlap(index, layout.depth) / max(1, len(blocks))
    return profiles


def _overlap(index: int, depth: int) -> NDArray[np.float64]:
    """Returns [DEPTHS] the share of each part of the stack that the layer at `index` takes up."""
    edges = np.linspace(0, 1, DEPTHS + 1)
    low, high = np.maximum(edges[:-1], index / depth), np.minimum(edges[1:], (index + 1) / depth)
    overlap: NDArray[np.float64] = np.clip(high - low, 0, None) * DEPTHS
    return overlap


def _distances(profiles: dict[str, NDArray[np.float64]], common: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Returns [W] the total variation distance of each winner from the common shares, mean over depth."""
    distances: NDArray[np.float64] = sum(np.abs(rows - common[kind]).mean(axis=1) for kind, rows in profiles.items())
    return distances / 2
