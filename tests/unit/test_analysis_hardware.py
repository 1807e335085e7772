"""What `nas study hardware` says, on records of made-up devices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from cli_runner import nas
from hardware_devices import SPACE, draw, time_ms
from study_support import figure, summary

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.scoring import MeasurementKey
from nas.infra.store import studies
from nas.infra.store.rows import Study, Trial
from nas.infra.store.store import Store
from nas.search.analysis.hardware import FIGURES, ModelError, hardware_report, study_models
from nas.search.analysis.record import MeasurementSummary, Record, StudyRecord
from nas.search.proposers import hardware

LAYOUTS = draw(24)
LAPTOP, BOARD = (MeasurementKey(device, "llama.cpp", "chat") for device in ("laptop", "board"))


def measurement(ms: float) -> MeasurementSummary:
    return summary({name: figure(ms if name == "decode_p50" else None, 0.01) for name in FIGURES})


def study(*places: tuple[MeasurementKey, Sequence[Layout], float]) -> StudyRecord:
    """Places with the layouts measured there and how fast they are."""
    records = {number: Record(cast(Trial, None), layout) for number, layout in enumerate(LAYOUTS)}
    for place, layouts, fast in places:
        for record in records.values():
            if record.layout in layouts:
                record.measurements[place] = measurement(time_ms(record.layout, fast=fast))
    return StudyRecord(cast(Study, None), SPACE, records, None, None)


def decode(models: Sequence[ModelError], device: str) -> ModelError:
    (model,) = [model for model in models if (model.device, model.metric) == (device, "decode_p50")]
    return model


def test_errors_and_forecasts_of_every_candidate() -> None:
    model = decode(study_models(study((LAPTOP, LAYOUTS[2:20], 1.0))), "laptop")
    assert (model.measurements, model.start, model.unit) == (18, None, "ms")
    assert model.mape is not None and model.worst is not None and model.mape < 0.05
    assert model.correlation is not None and model.correlation.spearman is not None
    assert model.correlation.spearman.value > 0.9
    assert [candidate.trial for candidate in model.candidates] == list(range(24))
    assert [candidate.measured is None for candidate in model.candidates] == [True] * 2 + [False] * 18 + [True] * 4
    for candidate in model.candidates:
        assert candidate.low < candidate.predicted < candidate.high
        assert candidate.predicted == pytest.approx(time_ms(LAYOUTS[candidate.trial]), rel=0.2)
    off = [abs(candidate.predicted / candidate.measured - 1) for candidate in model.candidates if candidate.measured]
    assert model.mape == pytest.approx(math.fsum(off) / 18) and model.worst == pytest.approx(max(off))


def test_layouts_beyond_those_that_a_model_is_fitted_to_are_forecast_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_MOST_ROWS", 12)
    model = decode(study_models(study((LAPTOP, LAYOUTS[2:20], 1.0))), "laptop")
    assert model.measurements == 18 and model.mape is not None and model.mape < 0.05
    assert [candidate.measured is None for candidate in model.candidates] == [True] * 2 + [False] * 18 + [True] * 4
    for candidate in model.candidates:
        assert candidate.predicted == pytest.approx(time_ms(LAYOUTS[candidate.trial]), rel=0.2)


def test_a_second_device_starts_from_the_first() -> None:
    models = study_models(study((LAPTOP, LAYOUTS[:20], 1.0), (BOARD, LAYOUTS[:5], 0.2)))
    board = decode(models, "board")
    assert (board.measurements, board.start) == (5, "laptop/llama.cpp")
    assert board.mape is not None and board.mape < 0.1
    assert decode(models, "laptop").start is None


def test_too_few_measurements_are_said() -> None:
    models = study_models(study((LAPTOP, LAYOUTS[:3], 1.0)))
    assert {model.reason for model in models} == {
        "3 layouts measured; a model needs 8", "0 layouts measured; a model needs 8"
    }  # fmt: skip


def test_nothing_starts_from_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAS_DB", raising=False)
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    store = Store.open()
    try:
        studies.create(store, "first", SPACE.model_dump(mode="json"), seed=0, version="0")
        with pytest.raises(InvalidInput, match="itself"):
            hardware_report(store, "first", "first")
        assert hardware_report(store, "first").models == ()
    finally:
        store.close()
    assert json.loads(nas("study", "hardware", "first", "--json").out) == {"study": "first", "models": []}
    assert nas("study", "hardware", "first").out.startswith("device\truntime\tfigure\tmeasured")
    assert nas("study", "hardware", "first", "--from", "first").code == 3
