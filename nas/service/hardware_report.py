"""How well a study's hardware models foretell what its devices measure; computed from the database alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from nas.core.errors import InvalidInput
from nas.core.metrics import METRICS
from nas.core.scoring import Place, log_sd
from nas.search.hardware import MIN_POINTS, Estimate, HardwareModel, Measured, better
from nas.search.hardware_costs import Costs
from nas.search.screening import TRUSTED
from nas.service.agreement import RankCorrelation, rank_correlation
from nas.service.record import Record, StudyRecord, read_study
from nas.store.store import Store

FIGURES = ("ttft", "decode_p50", "decode_p95", "peak_rss")
_NORMAL_95 = 1.959964


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Foretold(_Frozen):
    """One candidate's figure; where it was measured, the forecast is of a model that has not seen it."""

    trial: int
    layout_id: str
    measured: float | None
    predicted: float
    low: float
    """Lower end of the forecast's 95 % interval."""
    high: float


class ModelError(_Frozen):
    """One figure's model, with its error where each layout in turn was left out."""

    device: str
    runtime: str
    workload: str
    metric: str
    unit: str
    measurements: int
    """Layouts; those measured under noise are not among them."""
    start: str | None = None
    """Where it started from, such as 'laptop/llama.cpp' or 'laptop/llama.cpp of study first'; None: from nothing."""
    mape: float | None = None
    """Mean of |forecast / measured - 1|."""
    worst: float | None = None
    """The greatest of these."""
    inside: float | None = None
    """Share of measured figures inside their forecast's 95 % interval."""
    correlation: RankCorrelation | None = None
    reason: str | None = None
    """Why there is no model."""
    candidates: tuple[Foretold, ...] = ()


class HardwareReport(_Frozen):
    """All models of a study."""

    study: str
    models: tuple[ModelError, ...]


Key = tuple[Place, str]
"""Where, and which figure."""


class _Base(NamedTuple):
    name: str
    model: HardwareModel


def hardware_report(store: Store, name: str, start: str | None = None) -> HardwareReport:
    """The models of a study.

    Args:
        store: the database.
        name: of the study.
        start: of an earlier study, on any device, whose models this one's start from.

    Raises:
        UnknownName: no such study.
        InvalidInput: it shall start from itself, and would have seen what it foretells.
    """
    if start == name:
        raise InvalidInput(f"study {name!r} cannot start from itself")
    models = study_models(read_study(store, name), read_study(store, start) if start else None)
    return HardwareReport(study=name, models=tuple(models))


def study_models(record: StudyRecord, start: StudyRecord | None = None) -> list[ModelError]:
    """The models of a study; `start`: of an earlier one, whose models they start from."""
    earlier = _models(start, f" of study {start.study.name}") if start else {}
    own = _models(record, "")
    found = []
    for place in _places(record):
        for metric in FIGURES:
            measured = _measured(record, place, metric)
            base = _start(earlier, place, metric) or _start(own, place, metric, other=True)
            alone = own[place, metric].model if (place, metric) in own else None
            found.append(_error(record, place, metric, measured, alone, base))
    return found


def _models(record: StudyRecord, suffix: str) -> dict[Key, _Base]:
    """Models from nothing, of what has been measured often enough."""
    found = {}
    for place in _places(record):
        for metric in FIGURES:
            measured = _measured(record, place, metric)
            if len(measured.layouts) >= TRUSTED:
                model = HardwareModel(_costs(record, place, metric), measured)
                found[place, metric] = _Base(f"{place.device}/{place.runtime}{suffix}", model)
    return found


def _start(known: Mapping[Key, _Base], place: Place, metric: str, *, other: bool = False) -> _Base | None:
    """The model of the same figure on the same runtime, under the same name of workload; `other`: not at `place`."""
    for (where, figure), base in known.items():
        if figure == metric and where[1:] == place[1:] and not (other and where == place):
            return base
    return None


def _error(
    record: StudyRecord, place: Place, metric: str, measured: Measured, alone: HardwareModel | None, start: _Base | None
) -> ModelError:
    count, least = len(measured.layouts), MIN_POINTS + 1 if start else TRUSTED
    named = {**place._asdict(), "metric": metric, "unit": METRICS[metric].unit, "measurements": count}
    moved = start.model.moved(measured) if start and count >= least else None
    model = better(alone, moved) if alone and moved else alone or moved
    if model is None:
        return ModelError(**named, reason=f"{count} layouts measured; a model needs {least}")
    unseen = model.checked()
    off = np.abs(np.expm1(unseen.mean - measured.logs))
    inside = np.abs(unseen.mean - measured.logs) <= _NORMAL_95 * np.hypot(unseen.sd, measured.noise)
    return ModelError(
        **named,
        start=start.name if start and model is moved else None,
        mape=float(off.mean()),
        worst=float(off.max()),
        inside=float(inside.mean()),
        correlation=rank_correlation(unseen.mean.tolist(), measured.logs.tolist()),
        candidates=_candidates(record, model, unseen),
    )


def _candidates(record: StudyRecord, model: HardwareModel, unseen: Estimate) -> tuple[Foretold, ...]:
    rows = {layout.id: row for row, layout in enumerate(model.measured.layouts)}
    found = []
    for number, each in sorted(record.records.items()):
        row = rows.get(each.layout.id)
        told = model.predict([each.layout]) if row is None else unseen
        mean, sd = float(told.mean[row or 0]), float(told.sd[row or 0])
        found.append(
            Foretold(
                trial=number,
                layout_id=each.layout.id,
                measured=None if row is None else math.exp(model.measured.logs[row]),
                predicted=math.exp(mean),
                low=math.exp(mean - _NORMAL_95 * sd),
                high=math.exp(mean + _NORMAL_95 * sd),
            )
        )
    return tuple(found)


def _places(record: StudyRecord) -> list[Place]:
    return sorted({place for each in record.records.values() for place in each.measurements})


def _measured(record: StudyRecord, place: Place, metric: str) -> Measured:
    taken = [(each, _figure(each, place, metric)) for _, each in sorted(record.records.items())]
    known = [(each.layout, value, sd) for each, (value, sd) in taken if value]
    return Measured(
        [layout for layout, _, _ in known],
        np.log([value for _, value, _ in known]),
        np.array([sd for _, _, sd in known], dtype=np.float64),
    )


def _figure(each: Record, place: Place, metric: str) -> tuple[float | None, float]:
    """Value and standard deviation of its logarithm; None where it is not known or noisy."""
    measurement = each.measurements.get(place)
    if measurement is None or measurement.noisy or metric not in measurement.figures:
        return None, 0.0
    return measurement.figures[metric].value, log_sd(measurement.figures[metric])


def _costs(record: StudyRecord, place: Place, metric: str) -> Costs:
    kinds = {block.kind for each in record.records.values() for layer in each.layout.layers for block in layer.blocks}
    return Costs(record.space.workloads[place.workload], sorted(kinds), METRICS[metric].unit)
