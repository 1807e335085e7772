"""`nas study show --json`: a study as one JSON object, computed from the database alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import dominates
from nas.core.scoring import Axis, check_budgets, places, ratio_of_limit
from nas.core.space import SearchSpace
from nas.core.trial import TrialState
from nas.proxy.ladder import proxy_of
from nas.service.agreement import agreements
from nas.service.course import course
from nas.service.ranking import Ranked, front_hypervolume, rank_trials
from nas.service.record import Record, StudyRecord, read_study
from nas.store import results
from nas.store.store import Store

Json = dict[str, Any]

_COUNTED = ("complete", "infeasible", "stopped", "failed", "cancelled")


def study_report(store: Store, name: str) -> Json:
    """The report of a study.

    Raises:
        UnknownName: no such study.
    """
    record = read_study(store, name)
    axes = _complete_axes(record)
    point = record.reference_point
    ranked = rank_trials(axes, point) if point is not None else []
    rows = [_row(record, record.records[place.trial], place) for place in ranked]
    return {
        "study": record.study.name,
        "space": {"name": record.space.name, "hash": record.study.space_hash},
        "state": record.study.state.value,
        "trials": _counts(record),
        "hypervolume": front_hypervolume(axes, point) if point is not None else None,
        **course(record, axes),
        "reference_point": _named(record, point),
        "objectives": [_objective(record, index) for index in range(len(record.space.objectives))],
        "budgets": _budgets(record),
        "front": [row for row in rows if row["rank"] == 0],
        "ranking": rows,
        "references": [
            {"name": reference, **_row(record, each, None)} for reference, each in record.references.items()
        ],
        "noisy_references": [name for name, each in record.references.items() if each.noisy],
        "noisy": [_row(record, each, None) for each in record.records.values() if _left_out(each)],
        "told": [_told(record.space, each) for each in record.records.values() if each.told is not None],
        "warm_start": record.warm_start,
        "agreement": [each.model_dump(mode="json") for each in agreements(record)],
        "elapsed_s": record.elapsed_s,
        "stage_seconds": _stage_seconds(store, record),
        "seed": record.study.seed,
        "version": record.study.version,
    }


def _complete_axes(record: StudyRecord) -> dict[int, list[Axis]]:
    found: dict[int, list[Axis]] = {}
    if record.published is None:
        return found
    for number, each in record.records.items():
        axes = each.axes(record.space, record.published)
        whole = [axis for axis in axes if axis is not None]
        if each.trial.status.state is TrialState.COMPLETE and each.trial.origin != "reference" and not each.noisy:
            assert len(whole) == len(axes), f"trial {number} is complete but lacks an objective"
            found[number] = whole
    return found


def _left_out(each: Record) -> bool:
    return each.noisy and each.trial.status.state is TrialState.COMPLETE and each.trial.origin != "reference"


def _row(record: StudyRecord, each: Record, place: Ranked | None) -> Json:
    names = [objective.name for objective in record.space.objectives]
    axes = each.axes(record.space, record.published)
    return {
        "trial": each.trial.number,
        "layout_id": each.layout.id,
        "layout": each.layout.format(),
        "objectives": {name: axis.value if axis else None for name, axis in zip(names, axes, strict=True)},
        "coordinates": {name: axis.coordinate if axis else None for name, axis in zip(names, axes, strict=True)},
        "sd": {name: axis.sd if axis else None for name, axis in zip(names, axes, strict=True)},
        "rank": place.rank if place else None,
        "hv_contribution": place.hv_contribution if place else None,
        "p_front": place.p_front if place else None,
        "ties": list(place.ties) if place else [],
        "proxy_id": proxy_of(each.layout, record.space.quality).id,
        "dominated_by": _dominated_by(record, axes),
        "noisy": each.noisy,
        "params": _params(each.layout),
        "measurements": [_measurement(each, where) for where in each.measurements],
        "quality": each.quality.model_dump(mode="json") if each.quality else None,
        "budgets": [
            check.model_dump(mode="json")
            for check in check_budgets(record.space, each.figures, record.published or {}, final=True)
        ],
        "origin": each.trial.origin,
        "operator": each.trial.operator,
        "parents": list(each.trial.parents),
    }


def _told(space: SearchSpace, each: Record) -> Json:
    """What the proposer learned of a trial, whatever became of it, and what that cost."""
    assert each.told is not None, "asked for what was told"
    return {
        **each.told.to_json(),
        "trial": each.trial.number,
        "layout": each.layout.format(),
        "origin": each.trial.origin,
        "operator": each.trial.operator,
        "proxy_id": proxy_of(each.layout, space.quality).id,
        "noisy": each.noisy,
        "after_s": each.told_after_s,
        "stage_seconds": each.seconds,
    }


def _dominated_by(record: StudyRecord, axes: list[Axis | None]) -> list[str]:
    """The references that are nowhere worse and somewhere better."""
    own = [axis.coordinate for axis in axes if axis is not None]
    beaten = []
    for name, reference in record.references.items():
        theirs = [axis.coordinate for axis in reference.axes(record.space, record.published) if axis is not None]
        if len(own) == len(theirs) == len(axes) and dominates([theirs], [own])[0, 0]:
            beaten.append(name)
    return beaten


def _params(layout: Layout) -> Json:
    params = layout.params
    return {"total": params.total, "active": params.active, "non_embedding": params.non_embedding}


def _measurement(each: Record, where: Any) -> Json:
    measurement = each.measurements[where]
    return {"place": where._asdict(), **measurement.model_dump(mode="json")}


def _counts(record: StudyRecord) -> Json:
    states = Counter(
        each.trial.status.state.value for each in record.records.values() if each.trial.origin != "reference"
    )
    counts = {state: states.get(state, 0) for state in _COUNTED}
    proposed = sum(states.values())
    return {"proposed": proposed, **counts, "running": proposed - sum(counts.values())}


def _objective(record: StudyRecord, index: int) -> Json:
    objective = record.space.objectives[index]
    metric = METRICS[objective.metric]
    several = len(places(record.space, objective)) > 1 and metric.source != "proxy"
    return {
        "name": objective.name,
        "metric": objective.metric,
        "aggregate": objective.aggregate if several else None,
        "device": objective.device,
        "runtime": objective.runtime,
        "workload": objective.workload,
        "direction": "min" if several else metric.direction,
        "unit": "x" if several else metric.unit,
        "transform": metric.transform,
    }


def _budgets(record: StudyRecord) -> list[Json]:
    rows = []
    for budget in record.space.budgets:
        for where in places(record.space, budget):
            figure = (record.published or {}).get(where, {}).get(budget.metric)
            value, relative = budget.limit
            if relative:
                value = value * figure.value if figure and figure.value else float("nan")
            rows.append(
                {
                    "name": budget.name,
                    "metric": budget.metric,
                    **where._asdict(),
                    "limit": None if value != value else value,
                    "unit": METRICS[budget.metric].unit,
                    "ratio": ratio_of_limit(budget, record.published or {}, where),
                    "written": budget.max if budget.max is not None else budget.min,
                }
            )
    return rows


def _named(record: StudyRecord, point: list[float] | None) -> Mapping[str, float] | None:
    if point is None:
        return None
    return dict(zip([objective.name for objective in record.space.objectives], point, strict=True))


def _stage_seconds(store: Store, record: StudyRecord) -> Json:
    spent = results.stage_seconds(store, record.study.id)
    stages = {stage: spent.get(stage, 0.0) for stage in ("export", "measure", "train", "gate")}
    return {**stages, "propose": record.propose_seconds}
