"""What a study's hardware models foretell of its candidates, fitted now and then and shared by all who look."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from pydantic import BaseModel, ConfigDict

from nas.core.clock import Clock, SystemClock
from nas.service.hardware_report import ModelError, hardware_report
from nas.store import events, studies, trials
from nas.store.store import Store

MOST_TRIALS = 500
"""Of a study whose models are fitted for a page: beyond, fitting and checking takes too long to wait for."""
_STUDIES = 4
_FRESH_S = 60.0


class ForecastView(BaseModel):
    """One figure of one candidate, as a model that has not seen it foretells it."""

    model_config = ConfigDict(frozen=True)

    device: str
    runtime: str
    workload: str
    metric: str
    unit: str
    measured: float | None
    predicted: float | None
    low: float | None
    """Lower end of the forecast's 95 % interval."""
    high: float | None
    mape: float | None
    """Of the model, over all candidates that were measured."""
    measurements: int
    reason: str | None
    """Why there is no forecast."""


class ForecastsView(BaseModel):
    """All forecasts of one candidate."""

    model_config = ConfigDict(frozen=True)

    forecasts: tuple[ForecastView, ...]
    reason: str | None = None
    """Why there are none."""


@dataclass(frozen=True)
class _Fitted:
    models: tuple[ModelError, ...]
    last_event: int
    at: float


class Forecasts:
    """Keeps the models of the studies looked at last.

    Args:
        store: where the studies are.
        clock: tells how old a fit is; a study that goes on is fitted anew once a minute at most.
    """

    def __init__(self, store: Store, clock: Clock | None = None) -> None:
        self._store, self._clock = store, clock or SystemClock()
        self._fitted: OrderedDict[int, _Fitted] = OrderedDict()
        self._lock = Lock()

    def of_trial(self, name: str, number: int) -> ForecastsView:
        """Every model's forecast of one trial. One fit at a time: it takes seconds.

        Raises:
            UnknownName: no such study.
        """
        study = studies.get(self._store, name)
        count = sum(trials.counts(self._store, study.id).values())
        if count > MOST_TRIALS:
            return ForecastsView(
                forecasts=(),
                reason=f"of {count} trials, models are not fitted for a page: 'nas study hardware {name}' fits them",
            )
        with self._lock:
            fitted = self._fresh(study.id)
            if fitted is None:
                last = events.last_id(self._store, study.id)
                models = hardware_report(self._store, name).models
                fitted = self._fitted[study.id] = _Fitted(models, last, self._clock.monotonic())
            self._fitted.move_to_end(study.id)
            while len(self._fitted) > _STUDIES:
                self._fitted.popitem(last=False)
        return ForecastsView(forecasts=tuple(_view(model, number) for model in fitted.models))

    def _fresh(self, study: int) -> _Fitted | None:
        known = self._fitted.get(study)
        if known is None or self._clock.monotonic() - known.at < _FRESH_S:
            return known
        return known if events.last_id(self._store, study) == known.last_event else None


def _view(model: ModelError, trial: int) -> ForecastView:
    told = next((each for each in model.candidates if each.trial == trial), None)
    return ForecastView(
        device=model.device,
        runtime=model.runtime,
        workload=model.workload,
        metric=model.metric,
        unit=model.unit,
        measured=told.measured if told else None,
        predicted=told.predicted if told else None,
        low=told.low if told else None,
        high=told.high if told else None,
        mape=model.mape,
        measurements=model.measurements,
        reason=model.reason if told is None else None,
    )
