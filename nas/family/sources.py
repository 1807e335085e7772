"""Where a family comes from: a study's front or given layouts, and the terms that its candidates are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nas.core.errors import InvalidInput, Unsupported
from nas.core.family import Decision
from nas.core.layout import Layout
from nas.core.space import RuntimeSpace, SearchSpace
from nas.family.pattern import Pattern, Winner, find_pattern
from nas.family.terms import CORNER_QUALITY, CORNER_RATIO, Terms, narrowed
from nas.runtimes import RUNTIMES
from nas.service.benches import known_runtime
from nas.service.record import CALIBRATED
from nas.service.report import study_report
from nas.service.stored_space import stored_space
from nas.store import events, studies
from nas.store.store import Store


@dataclass(frozen=True)
class Origin:
    """What a family is built from.

    Args:
        pattern: of the winners.
        terms: what candidates are compared by.
        searched: ids of the devices that the study measured on.
    """

    pattern: Pattern
    terms: Terms
    searched: tuple[str, ...] = ()


def study_origin(
    store: Store, study: str, layouts: Sequence[Layout], devices: tuple[str, ...], runtime: str | None
) -> Origin:
    """The front of a study, weighted by hypervolume contribution, or other layouts under the study's terms.

    Args:
        store: the database.
        study: its name.
        layouts: given ones; none: the front's.
        devices: other ones than the study's.
        runtime: another one than the study's.

    Raises:
        UnknownName: no such study or runtime.
        InvalidInput: the study has no front.
    """
    report = study_report(store, study)
    row = studies.get(store, study)
    space = stored_space(row)
    winners = [Winner(layout) for layout in layouts] or _front(report)
    pattern = find_pattern(winners)
    proxies = {
        each["proxy_id"]: (each["quality"]["value"], each["quality"]["sd"])
        for each in (*report["references"], *reversed(report["ranking"]))
        if each["quality"]
    }
    own = narrowed(space, devices, _runtimes(space, pattern.parent.layout, runtime))
    corner = report["reference_point"]
    terms = Terms(own, tuple(corner[each.name] for each in own.objectives) if corner else None, 1.0, proxies)
    known = terms.trained(pattern.parent.layout)
    if known is None:  # figures of trained proxies beside an assumed one would decide by who was trained
        terms = replace(terms, proxies={})
    decided = [_terms_decision(own, f"study {study}"), _corner_decision(own, corner)]
    if space.budgets:
        decided.append(_budget_decision(space))
    searched = {event.payload["id"] for event in events.notes(store, row.id, CALIBRATED)}
    quality = known[1] if known else 1.0
    return Origin(pattern, replace(terms, quality=quality, decisions=tuple(decided)), tuple(sorted(searched)))


def given_origin(
    space: SearchSpace, layouts: Sequence[Layout], devices: tuple[str, ...], runtime: str | None
) -> Origin:
    """Given layouts, which count alike, under the terms of a space."""
    pattern = find_pattern([Winner(layout) for layout in layouts])
    own = narrowed(space, devices, _runtimes(space, pattern.parent.layout, runtime))
    decided = (_terms_decision(own, f"space {space.name}"), _corner_decision(own, None))
    return Origin(pattern, Terms(own, None, 1.0, {}, decided))


def _front(report: dict[str, Any]) -> list[Winner]:
    """The study's winners.

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
        f"study {report['study']} has no front to build a family from ({counted} trials). Let it go on with "
        f"'nas launch --resume', or give layouts with --layout",
        where="--study",
    )


def _runtimes(space: SearchSpace, parent: Layout, name: str | None) -> tuple[RuntimeSpace, ...]:
    """The space's runtimes, or the one asked for; the patched build where the parent needs it.

    Raises:
        UnknownName: no such runtime.
        Unsupported: one does not carry the parent.
    """
    specs = [spec for spec in space.runtimes if name in (None, spec.name)]
    if not specs:
        assert name is not None, "a space has runtimes"
        specs = [RuntimeSpace(name=name, quantisation=RUNTIMES[name].quantisations[0])]
    found = []
    for spec in specs:
        support = known_runtime(spec).supports(parent)
        if not support:
            raise Unsupported(
                f"{spec.name} does not carry the pattern: {'; '.join(support.reasons)}", where="--runtime"
            )
        found.append(spec.model_copy(update={"build": "any"}) if support.verdict == "patched" else spec)
    return tuple(found)


def _terms_decision(space: SearchSpace, whose: str) -> Decision:
    objectives = ", ".join(
        each.name if each.workload is None else f"{each.name} ({each.metric} at {each.workload})"
        for each in space.objectives
    )
    runtimes = ", ".join(f"{each.name} {each.quantisation}" for each in space.runtimes)
    return Decision(
        what="objectives",
        value=f"{objectives}; on {', '.join(space.devices)} with {runtimes}",
        reason=f"those of {whose}; figures are ratios to the size's nearest candidate",
    )


def _corner_decision(space: SearchSpace, corner: dict[str, float] | None) -> Decision:
    if corner is None:
        return Decision(
            what="corner",
            value=f"{CORNER_RATIO} times the nearest candidate's figures, {CORNER_QUALITY} times its quality",
            reason="no study froze a reference point",
        )
    told = [
        f"{each.name} {-corner[each.name]:.3g}"
        if each.metric == "quality"
        else f"{each.name} {math.exp(corner[each.name]):.2f}x the nearest candidate's"
        for each in space.objectives
    ]
    return Decision(
        what="corner", value=", ".join(told), reason="the study's reference point, with another layout as 1x"
    )


def _budget_decision(space: SearchSpace) -> Decision:
    names = ", ".join(dict.fromkeys(each.name for each in space.budgets))
    return Decision(
        what="budgets",
        value="none but the weights",
        reason=f"the study's ({names}) are for its own size; what they allow is in the corner, as ratios",
    )
