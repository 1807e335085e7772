"""Evaluates a study's hardware models against its measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from nas.core.errors import InvalidInput
from nas.core.metrics import METRICS
from nas.core.scoring import MeasurementKey
from nas.core.stats import Z95
from nas.infra.store.store import Store
from nas.search.analysis.agreement import RankCorrelation, rank_correlation
from nas.search.analysis.record import Record, StudyRecord, read_study
from nas.search.proposers.hardware import MIN_POINTS, TRUSTED, Costs, Estimate, HardwareModel, Measured, better

FIGURES = ("ttft", "decode_p50", "decode_p95", "peak_rss")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Forecast(_Frozen):
    """One candidate's figure; where it was measured, the forecast is of a model fitted without it."""

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
    """Layouts."""
    start: str | None = None
    """Where it started from, such as 'laptop/llama.cpp' or 'laptop/llama.cpp of study first'; None: from nothing."""
    mape: float | None = None
    """Mean of |forecast / measured - 1|; of two models the smaller one."""
    worst: float | None = None
    """The greatest of these."""
    inside: float | None = None
    """Share of measured figures inside their forecast's 95 % interval, which was widened until 95 % of them were."""
    correlation: RankCorrelation | None = None
    reason: str | None = None
    """Why there is no model."""
    candidates: tuple[Forecast, ...] = ()


class HardwareReport(_Frozen):
    """All models of a study."""

    study: str
    models: tuple[ModelError, ...]


Key = tuple[MeasurementKey, str]
"""Where, and which figure."""


class _Base(NamedTuple):
    name: str
    model: HardwareModel


def hardware_report(store: Store, name: str, start: str | None = None) -> HardwareReport:
    """Evaluates the models of a study; `start` names an earlier one, on any device, whose models they start from.

    Raises:
        InvalidInput: it would start from itself, and would have seen what it forecasts.
    """
    if start == name:
        raise InvalidInput(f"study {name!r} cannot start from itself")
    models = study_models(read_study(store, name), read_study(store, start) if start else None)
    return HardwareReport(study=name, models=tuple(models))


def study_models(record: StudyRecord, start: StudyRecord | None = None) -> list[ModelError]:
    """Evaluates the models of a study; `start`: of an earlier one, whose models they start from."""
    earlier = _models(start, f" of study {start.study.name}") if start else {}
    models = _models(record, "")
    errors = []
    for key in _keys(record):
        for metric in FIGURES:
            measured = _measured(record, key, metric)
            base = _start(earlier, key, metric) or _start(models, key, metric, other=True)
            alone = models[key, metric].model if (key, metric) in models else None
            errors.append(_error(record, key, metric, measured, alone, base))
    return errors


def _models(record: StudyRecord, suffix: str) -> dict[Key, _Base]:
    """Returns models without a start, where enough layouts were measured."""
    models = {}
    for key in _keys(record):
        for metric in FIGURES:
            measured = _measured(record, key, metric)
            if len(measured.layouts) >= TRUSTED:
                model = HardwareModel(_costs(record, key, metric), measured)
                models[key, metric] = _Base(f"{key.device}/{key.runtime}{suffix}", model)
    return models


def _start(models: Mapping[Key, _Base], key: MeasurementKey, metric: str, *, other: bool = False) -> _Base | None:
    """Returns the model of the same figure on the same runtime, under the same workload name; `other`: not at `key`."""
    for (where, figure), base in models.items():
        if figure == metric and where[1:] == key[1:] and not (other and where == key):
            return base
    return None


def _error(
    record: StudyRecord,
    key: MeasurementKey,
    metric: str,
    measured: Measured,
    alone: HardwareModel | None,
    start: _Base | None,
) -> ModelError:
    count, least = len(measured.layouts), MIN_POINTS + 1 if start else TRUSTED
    named = {**key._asdict(), "metric": metric, "unit": METRICS[metric].unit, "measurements": count}
    moved = start.model.moved(measured) if start and count >= least else None
    model = better(alone, moved) if alone and moved else alone or moved
    if model is None:
        return ModelError(**named, reason=f"{count} layouts measured; a model needs {least}")
    unseen, fitted = model.checked(), model.measured  # of many measurements, some
    off = np.abs(np.expm1(unseen.mean - fitted.logs))
    inside = np.abs(unseen.mean - fitted.logs) <= Z95 * np.hypot(unseen.sd, fitted.noise)
    return ModelError(
        **named,
        start=start.name if start and model is moved else None,
        mape=float(off.mean()),
        worst=float(off.max()),
        inside=float(inside.mean()),
        correlation=rank_correlation(unseen.mean.tolist(), fitted.logs.tolist()),
        candidates=_candidates(record, model, unseen, measured),
    )


def _candidates(
    record: StudyRecord, model: HardwareModel, unseen: Estimate, measured: Measured
) -> tuple[Forecast, ...]:
    rows = {layout.id: row for row, layout in enumerate(model.measured.layouts)}
    logs = {layout.id: float(log) for layout, log in zip(measured.layouts, measured.logs, strict=True)}
    forecasts = []
    for number, trial in sorted(record.records.items()):
        row = rows.get(trial.layout.id)
        estimate = model.predict([trial.layout]) if row is None else unseen
        mean, sd = float(estimate.mean[row or 0]), float(estimate.sd[row or 0])
        forecasts.append(
            Forecast(
                trial=number,
                layout_id=trial.layout.id,
                measured=math.exp(logs[trial.layout.id]) if trial.layout.id in logs else None,
                predicted=math.exp(mean),
                low=math.exp(mean - Z95 * sd),
                high=math.exp(mean + Z95 * sd),
            )
        )
    return tuple(forecasts)


def _keys(record: StudyRecord) -> list[MeasurementKey]:
    return sorted({key for trial in record.records.values() for key in trial.measurements})


def _measured(record: StudyRecord, key: MeasurementKey, metric: str) -> Measured:
    figures = [(trial, _figure(trial, key, metric)) for _, trial in sorted(record.records.items())]
    values = [(trial.layout, value, sd) for trial, (value, sd) in figures if value]
    return Measured(
        [layout for layout, _, _ in values],
        np.log([value for _, value, _ in values]),
        np.array([sd for _, _, sd in values], dtype=np.float64),
    )


def _figure(trial: Record, key: MeasurementKey, metric: str) -> tuple[float | None, float]:
    """Returns the value, None where it is not known, and the deviation of its logarithm, 0 where that is not."""
    measurement = trial.measurements.get(key)
    if measurement is None or metric not in measurement.figures:
        return None, 0.0
    figure = measurement.figures[metric]
    return figure.value, figure.log_sd or 0.0


def _costs(record: StudyRecord, key: MeasurementKey, metric: str) -> Costs:
    kinds = {block.kind for trial in record.records.values() for layer in trial.layout.layers for block in layer.blocks}
    space = record.space
    vectors, towers = len(space.model.vectors.choices) > 1, len(space.model.tower.choices) > 1
    workload, unit = space.workloads[key.workload], METRICS[metric].unit
    return Costs(workload, sorted(kinds), unit, space.quantisations, vectors, towers)
