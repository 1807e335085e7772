"""Exchange of results with Pipette, Liquid AI's farm of phones and laptops: Parquet tables, a row a metric of a run.

Columns, metrics and units are those of its warehouse: `parquet_schema` of src/warehouse.rs and docs/benchmarks.md of
github.com/Liquid4All/pipette-mgmt (9a660a0). A run that was scored again has several copies: the latest counts.

What is written is what a study measured, a row a metric: times are estimates of an undisturbed device, as everywhere
here, which `benchmark_flags` says. `model_descriptor` holds the layout, so that it is read back exactly.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from nas.core.canonical import canonical_json, content_hash
from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.stats import Z95
from nas.core.workload import Workload
from nas.infra.store import devices
from nas.infra.store.store import Store
from nas.search.analysis.record import StudyRecord
from nas.search.proposers.hardware import TRUSTED, Costs, HardwareModel, Measured

FormFactor = Literal["phone", "tablet", "laptop", "desktop", "server", "embedded"]
FORM_FACTORS: tuple[FormFactor, ...] = get_args(FormFactor)

_REQUIRED = {
    "string": (
        "result_id benchmark_id benchmark_type metric client_id device_name device_form_factor device_os_name"
        " device_os_version device_chip_model unit"
    ),
    "int64": "device_ram_bytes",
    "float32": "value",
    "timestamp": "submitted_at scored_at",
}
_OPTIONAL = {
    "string": (
        "device_os_build device_os_security_patch device_gpu_model device_npu_model device_power_state"
        " device_android_cpuset device_android_cpu_affinity_list model_name model_quant model_flags runtime_name"
        " runtime_version runtime_flags runtime_cpu_variant parameter_eval_id score_runtime_version eval_metadata"
        " model_descriptor runtime_descriptor model_descriptor_sha256 runtime_descriptor_sha256 benchmark_flags"
        " benchmark_flags_sha256 client_version model_flags_sha256 runtime_flags_sha256"
    ),
    "int64": "device_gpu_vram_bytes device_npu_vram_bytes",
    "int32": (
        "device_battery_level model_params_total_millions model_params_active_millions parameter_prefill_tokens"
        " parameter_decode_tokens parameter_image_width parameter_image_height parameter_text_tokens"
        " parameter_num_images observation_vl_throughput_prefill_tokens observation_vl_throughput_image_tokens"
    ),
    "float32": "value_stddev",
    "bool": "device_power_save_mode device_android_cpu_affinity_excludes_top_tier",
}
"""Type -> columns. Those of temperatures are left out: all of them may be absent, and a study keeps none per run."""

_READ = (
    *("result_id", "metric", "device_name", "device_chip_model", "value", "scored_at", "model_name"),
    *("model_descriptor", "runtime_name", "runtime_flags", "parameter_prefill_tokens", "parameter_decode_tokens"),
)
"""Columns that `read_results` needs."""
_MS = {"ttft": None, "end_to_end_latency": None, "prefill_throughput": "tokens", "decode_throughput": "tokens"}
"""Metrics of time -> what a rate counts; None: milliseconds."""
_BYTES = ("max_host_usage",)
_MOST_ROWS = 1_000_000
_LAYOUT = "hilnas_layout"
"""Type of a model's descriptor that holds a layout."""
_MOST_TOKENS = 1 << 20


class Place(NamedTuple):
    """What figures have in common that compare: device, runtime with its flags, metric and number of tokens."""

    device: str
    chip: str
    runtime: str
    flags: str
    metric: str
    prefill: int
    decode: int


@dataclass(frozen=True)
class Ranking:
    """Forecasts of layouts at a place, from models that others measured there.

    Args:
        place: where.
        models: that were measured there and are known as layouts.
        unit: of the forecasts.
        error: mean error of known models, each left out in turn.
        forecasts: of each layout, with its 95 % interval; empty where too few models are known.
    """

    place: Place
    models: int
    unit: str
    error: float | None
    forecasts: list[tuple[float, float, float]]


def read_results(path: Path, published: Mapping[str, Layout]) -> dict[Place, dict[Layout, float]]:
    """Reads a table of Pipette: place -> layout -> median over runs, in ms (a rate: ms per token) or MB.

    Rows of other models and other metrics are left out.

    Args:
        path: a Parquet file.
        published: name of a published model -> its layout.

    Raises:
        InvalidInput: it is no such table.
    """
    runs: dict[tuple[Place, Layout], dict[str, tuple[Any, float]]] = {}
    names = {_bare(name): layout for name, layout in published.items()}
    for row in _rows(path):
        metric, value = row["metric"], row["value"]
        layout = _layout_of(row, names)
        if layout is None or metric not in (*_MS, *_BYTES) or not isinstance(value, float):
            continue
        prefill, decode = row["parameter_prefill_tokens"] or 0, row["parameter_decode_tokens"] or 0
        if not (0 < value < math.inf and 0 < prefill <= _MOST_TOKENS and 0 <= decode <= _MOST_TOKENS):
            continue
        device, chip, runtime, flags = (
            str(row[name] or "") for name in ("device_name", "device_chip_model", "runtime_name", "runtime_flags")
        )
        place = Place(device, chip, runtime, flags, metric, prefill, decode)
        figure = 1e3 / value if _MS.get(metric) else value / 1e6 if metric in _BYTES else value
        copies = runs.setdefault((place, layout), {})
        before = copies.get(row["result_id"])
        at = (row["scored_at"] is not None, row["scored_at"])  # a run that was not scored is the earliest
        if before is None or at > before[0]:
            copies[row["result_id"]] = at, figure
    results: dict[Place, dict[Layout, float]] = {}
    for (place, layout), copies in runs.items():
        results.setdefault(place, {})[layout] = statistics.median(figure for _, figure in copies.values())
    return results


def rank(results: Mapping[Place, Mapping[Layout, float]], layouts: Sequence[Layout]) -> list[Ranking]:
    """Forecasts `layouts` at each place where enough known models were measured."""
    rankings = []
    for place, measured in sorted(results.items()):
        unit = "MB" if place.metric in _BYTES else "ms/token" if _MS[place.metric] else "ms"
        if len(measured) < TRUSTED:
            rankings.append(Ranking(place, len(measured), unit, None, []))
            continue
        models = [*measured]
        kinds = sorted({block.kind for layout in models for layer in layout.layers for block in layer.blocks})
        costs = Costs(Workload(prompt=max(16, place.prefill), gen=max(1, place.decode)), kinds, unit.split("/")[0])
        logs = np.log([measured[layout] for layout in models])
        model = HardwareModel(costs, Measured(models, logs, np.zeros(len(models))))
        error = float(np.abs(np.expm1(model.left_out().mean - model.measured.logs)).mean())  # of many, some
        estimate = model.predict(layouts)
        low, high = estimate.mean - Z95 * estimate.sd, estimate.mean + Z95 * estimate.sd
        rows = np.exp(np.stack([estimate.mean, low, high], axis=1))
        rankings.append(Ranking(place, len(models), unit, error, [(a, b, c) for a, b, c in rows.tolist()]))
    return rankings


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_pyarrow()[1]
    try:
        with parquet.ParquetFile(path) as file:
            columns = set(file.schema_arrow.names)
            if missing := [name for name in _READ if name not in columns]:
                raise InvalidInput(f"no table of Pipette: columns {', '.join(missing)} are missing", where=str(path))
            if file.metadata.num_rows > _MOST_ROWS:
                raise InvalidInput(f"more than {_MOST_ROWS:,} rows", where=str(path))
            for batch in file.iter_batches(columns=list(_READ)):
                yield from batch.to_pylist()
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"cannot be read as Parquet: {error}", where=str(path)) from error


def _layout_of(row: Mapping[str, Any], names: Mapping[str, Layout]) -> Layout | None:
    """Returns the layout in a row's descriptor, or that of the published model that it names; None: not known."""
    try:
        descriptor = json.loads(row["model_descriptor"] or "null")
    except (TypeError, ValueError, RecursionError):
        descriptor = None
    if isinstance(descriptor, dict) and descriptor.get("type") == _LAYOUT:
        try:
            return Layout.parse(str(descriptor.get("layout")))
        except InvalidInput:
            return None
    return names.get(_bare(str(row["model_name"] or "")))


def _bare(name: str) -> str:
    """Returns a model's name without organisation, file and ending, in lower case: as Pipette's catalogue has it."""
    return name.split(":")[0].rsplit("/", 1)[-1].removesuffix("-GGUF").casefold()


def results_bytes(store: Store, record: StudyRecord, form_factor: FormFactor, version: str) -> bytes:
    """Returns the measurements of a study as a table of Pipette.

    Args:
        store: has the devices.
        record: of the study.
        form_factor: of its devices, which none of them reports.
        version: of hilnas.

    Raises:
        InvalidInput: pyarrow is not installed.
        UnknownName: the study was imported, and its devices are not described here.
    """
    pyarrow, parquet = import_pyarrow()
    ids = {device.name: device.id for device in record.log.devices}
    described = {name: devices.get(store, id).device for name, id in ids.items()}
    rows = [*_written(record, described, form_factor, version)]
    types = {"timestamp": pyarrow.timestamp("us", tz="UTC"), "bool": pyarrow.bool_()}
    fields = [
        pyarrow.field(name, types.get(kind) or getattr(pyarrow, kind)(), nullable=optional)
        for optional, columns in ((False, _REQUIRED), (True, _OPTIONAL))
        for kind, names in columns.items()
        for name in names.split()
    ]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(fields)), file)
    return file.getvalue()


def _written(
    record: StudyRecord, described: Mapping[str, Device], form_factor: FormFactor, version: str
) -> Iterator[dict[str, Any]]:
    now = datetime.now(UTC)
    for trial in record.records.values():
        for key, measurement in trial.measurements.items():
            device, spec = described[key.device], record.space.labelled[key.runtime]
            load = next(place for place in record.log.devices if place.name == key.device).placed(
                key.workload, record.space.workloads[key.workload]
            )
            quantisation = spec.stored_as(trial.layout)
            model = {"type": _LAYOUT, "layout": trial.layout.architecture.format(), "quantisation": quantisation}
            runtime = {"type": "hilnas_runner", "name": spec.name, "quantisation": quantisation}
            flags = {"threads": load.threads, "kv_type": load.kv_type, "flash_attention": load.flash_attn}
            harness = {"harness": "hilnas", "times": "ratio to a reference model x its calibration"}
            common = {
                "client_id": "hilnas",
                "device_name": device.model,
                "device_form_factor": form_factor,
                "device_os_name": "Android" if device.abis else "Linux",
                "device_os_version": device.os,
                "device_chip_model": device.soc or device.cpu,
                "device_ram_bytes": device.memory_mb * 1_000_000,
                "model_name": f"hilnas-{trial.layout.id[:12]}",
                "model_quant": quantisation,
                "model_params_total_millions": round(trial.layout.params.total / 1e6),
                "model_params_active_millions": round(trial.layout.params.active / 1e6),
                **_canonical("model_descriptor", model),
                "runtime_name": spec.name,
                **_canonical("runtime_descriptor", runtime),
                **_canonical("runtime_flags", flags),
                **_canonical("benchmark_flags", harness),
                "client_version": version,
                "submitted_at": now,
                "scored_at": now,
            }
            for row in _metrics(measurement.figures, load):
                yield {**common, **row, "result_id": f"hilnas-{measurement.key}"}


def _canonical(name: str, value: Mapping[str, Any]) -> dict[str, str]:
    return {name: canonical_json(value), f"{name}_sha256": content_hash(value)}


def _metrics(figures: Mapping[str, Figure], load: Workload) -> Iterator[dict[str, Any]]:
    """Yields the metrics of one measurement; deviations are of repetitions' noise, where it is known."""
    prompt, both = f"{load.prompt}", f"{load.prompt}_{load.gen}"
    table = (
        ("ttft", "prefill_throughput", prompt, "ttft", "ms", 1.0),
        ("prefill_throughput", "prefill_throughput", prompt, "prefill_tps", "tokens/sec", 1.0),
        ("decode_throughput", "decode_throughput", both, "decode_mean", "tokens/sec", None),
        ("end_to_end_latency", "end_to_end_latency", both, "latency", "ms", 1.0),
        ("max_host_usage", "max_memory_usage", prompt, "peak_rss", "bytes", 1e6),
        ("max_gpu_usage", "max_memory_usage", prompt, "gpu_memory", "bytes", 1e6),
    )
    for metric, kind, size, name, unit, factor in table:
        figure = figures.get(name)
        if figure is None or figure.value is None:
            continue
        value = 1e3 / figure.value if factor is None else figure.value * factor
        yield {
            "benchmark_id": f"{kind}_{size}",
            "benchmark_type": kind,
            "metric": metric,
            "value": value,
            "value_stddev": None if figure.log_sd is None else value * figure.log_sd,
            "unit": unit,
            "parameter_prefill_tokens": load.prompt,
            "parameter_decode_tokens": load.gen if size == both else None,
        }


def import_pyarrow() -> tuple[Any, Any]:
    """Returns `pyarrow` and `pyarrow.parquet`.

    Raises:
        InvalidInput: it is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InvalidInput("Parquet needs pyarrow, of the extra 'corpora'") from None
    return pyarrow, parquet
