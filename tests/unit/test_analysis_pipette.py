"""Exchange with Pipette: its tables are read as it means them, and what is written is one of its tables."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from cli_runner import nas
from pyarrow import parquet
from study_support import bed_of, tiny_space

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.infra.store import agents, devices, studies
from nas.infra.store.rows import StudyState
from nas.search.analysis.pipette import Place, rank, read_results, results_bytes
from nas.search.analysis.record import read_study
from nas.testing.inline_study import DEVICE
from nas.train.compare.lfm2_report import REPORT, S25
from nas.train.compare.published import REFERENCES

PUBLISHED = {name: model.layout for name, model in REFERENCES.items() if model.layout is not None}
DAY = datetime(2026, 8, 1, tzinfo=UTC)
PHONE: dict[str, Any] = {
    "device_name": "Galaxy S25", "device_chip_model": "Snapdragon 8 Elite", "runtime_name": "llama.cpp",
    "runtime_flags": '{"threads":4}', "parameter_decode_tokens": None, "model_descriptor": None, "scored_at": DAY,
}  # fmt: skip


def row(name: str, value: float, metric: str = "prefill_throughput", **more: Any) -> dict[str, Any]:
    identity = {"result_id": f"{name}-{metric}", "model_name": name, "metric": metric, "value": np.float32(value)}
    return {**PHONE, **identity, "parameter_prefill_tokens": 1024, **more}


def table(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "part-0001.parquet"
    content = pyarrow.Table.from_pylist(rows)
    parquet.write_table(
        content.set_column(content.schema.get_field_index("value"), "value", content["value"].cast("float32")), path
    )
    return path


def test_a_phone_of_others_ranks_layouts(tmp_path: Path) -> None:
    rows = [row(f"org/{name}-GGUF:{name}-Q4_0.gguf", speeds[0]) for name, speeds in REPORT[S25].items()]
    results = read_results(table(tmp_path, rows), PUBLISHED)
    ((place, measured),) = results.items()
    assert place == Place(
        "Galaxy S25", "Snapdragon 8 Elite", "llama.cpp", '{"threads":4}', "prefill_throughput", 1024, 0
    )
    assert len(measured) == 20
    assert measured[PUBLISHED["LFM2-350M"]] == pytest.approx(1e3 / 1067, rel=1e-5)
    new = [
        Layout.parse(LFM2["LFM2-350M"].replace("16/8", "16/4")),
        Layout.parse(LFM2["LFM2-1.2B"].replace("32/8", "32/4")),
    ]
    (ranking,) = rank(results, new)
    assert ranking.unit == "ms/token" and ranking.error is not None and ranking.error < 0.4
    (small, low, high), (large, _, _) = ranking.forecasts
    assert low < small < high < large


def test_a_run_that_was_scored_again_counts_once(tmp_path: Path) -> None:
    later = DAY.replace(day=2)
    rows = [
        row("LFM2-350M", 50.0, scored_at=None),
        row("LFM2-350M", 100.0),
        row("LFM2-350M", 200.0, scored_at=later),
        row("LFM2-350M", 800.0, scored_at=None),
        row("LFM2-350M", 400.0, result_id="another"),
    ]
    (measured,) = read_results(table(tmp_path, rows), PUBLISHED).values()
    assert measured == {PUBLISHED["LFM2-350M"]: pytest.approx((5.0 + 2.5) / 2)}


@pytest.mark.parametrize(
    "more",
    [
        {"model_name": "Qwen9"}, {"metric": "accuracy"}, {"value": np.float32(0)}, {"value": np.float32("nan")},
        {"value": np.float32(-1)}, {"parameter_prefill_tokens": None}, {"parameter_prefill_tokens": 1 << 30},
        {"model_descriptor": '{"type":"hilnas_layout","layout":"d0 ["}'}, {"model_name": None, "model_descriptor": "["},
    ],
)  # fmt: skip
def test_rows_that_say_nothing_here_are_left_out(more: dict[str, Any], tmp_path: Path) -> None:
    assert read_results(table(tmp_path, [{**row("LFM2-350M", 100.0), **more}]), PUBLISHED) == {}


def test_few_models_make_no_forecast(tmp_path: Path) -> None:
    results = read_results(table(tmp_path, [row(name, 100.0) for name in list(PUBLISHED)[:5]]), PUBLISHED)
    (ranking,) = rank(results, [PUBLISHED["LFM2-350M"]])
    assert (ranking.models, ranking.error, ranking.forecasts) == (5, None, [])


def test_without_a_front_there_is_nothing_to_forecast(tmp_path: Path) -> None:
    store = bed_of(tmp_path).store
    studies.create(store, "study", tiny_space().model_dump(mode="json"), seed=0, version="0")
    store.close()
    path = table(tmp_path, [row(name, 100.0) for name in PUBLISHED])
    url = f"sqlite:///{tmp_path / 'nas.db'}"
    done = nas("study", "hardware", "study", "--results", str(path), "--db", url)
    assert done.code == 3 and "--results: study 'study' has no front yet" in done.err


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 nothing of the kind PAR1")
    with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
        read_results(path, PUBLISHED)
    parquet.write_table(pyarrow.table({"value": [1.0]}), path)
    with pytest.raises(InvalidInput, match="no table of Pipette: columns result_id"):
        read_results(path, PUBLISHED)


def test_a_study_is_written_and_read_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'nas.db'}"
    bed = bed_of(tmp_path)
    store = bed.store
    assert bed.run(trials=8) is StudyState.COMPLETE
    agents.register_local(store, "agent")
    devices.register(store, "agent", [DEVICE], boot_id="boot")
    record = read_study(store, "study")
    path = tmp_path / "ours.parquet"
    path.write_bytes(results_bytes(store, record, "server", "0.1"))
    written = parquet.read_table(path)
    required = [field.name for field in written.schema if not field.nullable]
    assert {"result_id", "benchmark_id", "value", "unit", "submitted_at"} < set(required)
    assert written["value"].type == pyarrow.float32()
    by_metric = {place.metric: measured for place, measured in read_results(path, {}).items()}
    assert by_metric.keys() == {
        "ttft",
        "prefill_throughput",
        "decode_throughput",
        "end_to_end_latency",
        "max_host_usage",
    }
    trial = next(trial for trial in record.records.values() if trial.measurements)
    (measurement,) = trial.measurements.values()
    figures = measurement.figures
    assert by_metric["ttft"][trial.layout.architecture] == pytest.approx(figures["ttft"].value, rel=1e-5)
    assert by_metric["max_host_usage"][trial.layout.architecture] == pytest.approx(figures["peak_rss"].value, rel=1e-5)
    store.close()
    answer = nas("study", "export", "study", "-f", "pipette", "-o", str(tmp_path / "x.parquet"), "--db", url)
    assert answer.code == 3 and "required with --format pipette: phone, tablet, laptop" in answer.err
