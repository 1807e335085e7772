"""What earlier studies teach a new one: their final observations, under the new study's names.

A coordinate is taken where it means the same in both: same metric, workload, devices, runtimes and quantisation, and
for quality the same proxies. An excess over a budget is taken for the new limit. References may differ between studies,
which shifts a coordinate by a constant; surrogates give earlier studies an offset of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nas.core.canonical import canonical_json
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.scoring import Place, places
from nas.core.space import Objective, SearchSpace
from nas.core.trial import Event
from nas.search import Observation, Sampler
from nas.service.asking import TOLD, WARM
from nas.service.ledger import Ledger, all_events
from nas.service.record import CALIBRATED
from nas.service.stored_space import stored_space
from nas.store import studies
from nas.store.store import Store

Json = dict[str, Any]
_FINAL = ("complete", "infeasible", "stopped")


@dataclass(frozen=True)
class Named:
    """A space with what its names of devices stand for.

    Args:
        space: of a study.
        devices: name in the space -> id of the device.
    """

    space: SearchSpace
    devices: Mapping[str, str]

    def objectives(self) -> dict[str, str]:
        """Meaning of a coordinate -> its name."""
        return {self._coordinate(objective): objective.name for objective in self.space.objectives}

    def budgets(self) -> dict[str, tuple[str, float]]:
        """Meaning of an excess -> its name, and log(limit) turned so that a greater one leaves more room."""
        found = {}
        for budget in self.space.budgets:
            limit, relative = budget.limit
            base = self.space.references.published if relative else None
            room = math.log(limit) if METRICS[budget.metric].direction == "min" else -math.log(limit)
            for place in places(self.space, budget):
                name = f"{budget.name} on {place.device}/{place.runtime}"
                found[canonical_json([budget.metric, self._where(place), base])] = (name, room)
        return found

    def _coordinate(self, objective: Objective) -> str:
        if METRICS[objective.metric].source == "proxy":
            return canonical_json([objective.metric, self.space.quality.model_dump(mode="json")])
        found = sorted(self._where(place) for place in places(self.space, objective))
        return canonical_json([objective.metric, found, objective.aggregate if len(found) > 1 else ""])

    def _where(self, place: Place) -> list[str]:
        (quantisation,) = {each.quantisation for each in self.space.runtimes if each.name == place.runtime}
        workload = canonical_json(self.space.workloads[place.workload].key()) if place.workload else ""
        return [self.devices.get(place.device, ""), place.runtime, quantisation, workload]


@dataclass(frozen=True)
class Shared:
    """What two studies have in common: names of the earlier one -> names of the new one.

    Args:
        objectives: coordinates.
        budgets: excesses, with what the new limit adds to them.
    """

    objectives: Mapping[str, str]
    budgets: Mapping[str, tuple[str, float]]

    @staticmethod
    def between(old: Named, new: Named) -> Shared:
        """By meaning."""
        objectives, limits = new.objectives(), new.budgets()
        return Shared(
            {name: objectives[what] for what, name in old.objectives().items() if what in objectives},
            {
                name: (limits[what][0], room - limits[what][1])
                for what, (name, room) in old.budgets().items()
                if what in limits
            },
        )

    def translate(self, seen: Observation) -> Observation:
        """An observation of the earlier study as the new one would tell it, as far as it can."""
        objectives = {new: seen.objectives[old] for old, new in self.objectives.items() if old in seen.objectives}
        excess = {
            new: seen.constraints[old] + shift for old, (new, shift) in self.budgets.items() if old in seen.constraints
        }
        names = {**self.objectives, **{old: new for old, (new, _) in self.budgets.items()}}
        noise = {new: seen.noise[old] for old, new in names.items() if old in seen.noise}
        status = seen.status
        if max(excess.values(), default=0.0) > 0:
            status = "infeasible"
        elif status == "infeasible":
            status = "stopped"  # it would have gone on here
        return Observation(seen.layout, status, objectives, excess, seen.rung, noise)


def require_studies(store: Store, names: Iterable[str], study: str) -> None:
    """Refuses names that `study` cannot learn from.

    Raises:
        UnknownName: no such study.
        InvalidInput: it is the study itself.
    """
    for name in names:
        if name == study:
            raise InvalidInput(f"study {study!r} cannot learn from itself", where="--warm-start")
        studies.get(store, name)


def warm_start(
    ledger: Ledger, space: SearchSpace, supported: Callable[[Layout], bool], names: Sequence[str],
    log: Callable[[str], None],
) -> None:  # fmt: skip
    """Keeps in the study's log what it learns from earlier ones, in one event, so that a resumed study learns the same.

    Args:
        ledger: of the new study, which knows its devices.
        space: its space.
        supported: whether its runtimes carry a layout.
        names: of the earlier studies; of a layout that several know, the last one counts.
        log: told what was taken.

    Raises:
        UnknownName: no such study.
    """
    events = ledger.events()
    if not names or any(event.payload.get("what") == WARM for event in events):
        return
    new, sampler = Named(space, _devices(events)), Sampler(space, supported)
    taken: dict[str, Observation] = {}
    told = []
    for name in names:
        found, row = _learn(ledger.store, name, new, sampler)
        taken |= {seen.layout.id: seen for seen in found}
        told.append(row)
        log(warm_line(row))
    ledger.note(None, WARM, studies=told, observations=[seen.to_json() for _, seen in sorted(taken.items())])


def warm_line(row: Mapping[str, Any]) -> str:
    """What was taken from one study, as a sentence."""
    shared = ", ".join([*row["objectives"], *row["budgets"]]) or "nothing"
    left = "".join(f"; {count} {why}" for why, count in row["left_out"].items())
    missing = f"; not comparable: {', '.join(row['not_comparable'])}" if row["not_comparable"] else ""
    return f"warm start from {row['study']}: {row['layouts']} layouts with {shared}{left}{missing}"


def _learn(store: Store, name: str, new: Named, sampler: Sampler) -> tuple[list[Observation], Json]:
    study = studies.get(store, name)
    events = all_events(store, study.id)
    old = Named(stored_space(study), _devices(events))
    shared = Shared.between(old, new)
    found, left_out = [], Counter[str]()
    for seen in _last_told(events):
        known = shared.translate(seen)
        if seen.status not in _FINAL:
            left_out["without a result of their own"] += 1
        elif not sampler.admits(seen.layout):
            left_out["outside this space"] += 1
        elif not known.objectives and not known.constraints:
            left_out["with nothing comparable"] += 1
        else:
            found.append(known)
    names = {*old.objectives().values(), *(each for each, _ in old.budgets().values())}
    return found, {
        "study": study.name,
        "layouts": len(found),
        "objectives": sorted(shared.objectives.values()),
        "budgets": sorted(new_name for new_name, _ in shared.budgets.values()),
        "not_comparable": sorted(names - shared.objectives.keys() - shared.budgets.keys()),
        "left_out": dict(sorted(left_out.items())),
    }


def _devices(events: Iterable[Event]) -> dict[str, str]:
    return {each.payload["device"]: each.payload["id"] for each in events if each.payload.get("what") == CALIBRATED}


def _last_told(events: Iterable[Event]) -> list[Observation]:
    told = [event.payload["observation"] for event in events if event.payload.get("what") == TOLD]
    return list({seen.layout.id: seen for seen in map(Observation.from_json, told)}.values())
