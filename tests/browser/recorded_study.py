"""A study that really ran, from the table of `benchmarks/recorded/`, written again through the store's own calls.

The table keeps layouts, coordinates, budgets, noise and times, but neither samples nor what the published reference
took: figures are such that they give the recorded coordinates, with `BASE` for the reference.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

from store_support import StillClock, key

from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.profile import ProfileSummary
from nas.core.scoring import ATTENTION, PUBLISHED, MeasurementKey, figures_json
from nas.core.space import SearchSpace
from nas.core.trial import EventKind
from nas.infra.store import events, results, studies, trials
from nas.infra.store.rows import NewTrial, StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.search.proposers import Observation
from nas.search.spaces import load_space
from nas.search.study.events import Calibrated, Launched, Observed, Profiled, ReferencePointFixed

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "recorded" / "lfm2-study.json.gz"
BASE = {
    "latency": (1000.0, "ms"), "peak_rss": (60.0, "MB"), "ttft": (250.0, "ms"), "decode_p50": (7.5, "ms"),
    "file_size": (15.0, "MB"),
}  # fmt: skip
"""Figures of the published reference; a guess."""

PROFILED = 60
"""Number of the trial with a profile."""

_AT = "@chat on local/llama.cpp"
_LIMIT = 1.1
_WAYS = {
    "complete": (EventKind.GATED_IN, EventKind.TRAINING, EventKind.CONFIRMING, EventKind.COMPLETE),
    "stopped": (EventKind.GATED_IN, EventKind.TRAINING, EventKind.STOPPED),
    "infeasible": (EventKind.INFEASIBLE,),
}


def add_recorded_study(store: Store, clock: StillClock, device: str, name: str = "recorded") -> int:
    """The first study of the table, as complete; its id."""
    record = json.loads(gzip.decompress(TABLE.read_bytes()))["studies"][0]
    space, began = load_space(record["space"]), clock.time
    study = studies.create(store, name, space.model_dump(mode="json"), seed=record["seed"], version="0").id
    events.append(store, study, {"what": Calibrated.what, "id": device, "device": "local"})
    events.append(store, study, {"what": Launched.what, "trials": len(record["told"]) - 2, "warm_start": []})
    events.append(store, study, ReferencePointFixed(record["reference_point"]).to_json())
    figures = figures_json({MeasurementKey("local", "llama.cpp", "chat"): _figures({"objectives": {}, "noise": {}})})
    studies.set_scales(store, study, {"figures": {PUBLISHED: figures, ATTENTION: figures}})
    studies.freeze_reference(store, study, record["reference_point"])
    proposed = trials.propose(store, study, [_proposal(row) for row in record["told"]])
    numbers = {trial.layout_id: trial.number for trial in proposed}
    for row in sorted(record["told"], key=lambda row: row["after_s"]):
        clock.time = began + row["after_s"]
        _tell(store, study, numbers[Layout.parse(row["layout"]).id], row, space, device)
    events.append(store, study, _profile(Layout.parse(record["told"][PROFILED]["layout"]), device).to_json())
    studies.set_state(store, study, StudyState.COMPLETE)
    return study


def _profile(layout: Layout, device: str) -> Profiled:
    """A profile in which a block's time grows with its place."""
    places = [
        (None, "embedding", None),
        *((index, part, block.format())
          for index, layer in enumerate(layout.layers)
          for part, block in (("mixer", layer.mixer), ("ffn", layer.ffn)) if block),
        (None, "head", None),
    ]  # fmt: skip
    parts = [
        {"layer": layer, "part": part, "block": block, **_times(place, len(places))}
        for place, (layer, part, block) in enumerate(places)
    ]
    whole = {"whole_ms": 171.1, "profiled_ms": 174.0, "sum_ms": 172.9}
    operators = [{"operator": "MUL_MAT", **_times(3, 4)}, {"operator": "FLASH_ATTN_EXT", **_times(1, 4)}]
    summary = {"prefill": whole, "decode": whole, "parts": parts, "operators": operators, "foreign_cpu": 0.1}
    return Profiled(PROFILED, device, "llama.cpp", "0" * 64, 256, 64, 1, ProfileSummary.model_validate(summary))


def _times(place: int, count: int) -> dict[str, float]:
    share = 2 * place / (count * (count - 1))
    return {"prefill_ms": 172.9 * share, "prefill_share": share, "decode_ms": 1.8 / count, "decode_share": 1 / count}


def _proposal(row: dict[str, Any]) -> NewTrial:
    layout = Layout.parse(row["layout"])
    return NewTrial(layout.to_json(), layout.id, origin=row["origin"], operator=row.get("operator"))


def _tell(store: Store, study: int, trial: int, row: dict[str, Any], space: SearchSpace, device: str) -> None:
    measurement = Measurement(
        artifact=row["layout"], runtime="llama.cpp", build="0" * 64, patched=False, device=device, repetitions=[],
        workload=space.workloads["chat"], figures=_figures(row), refused_share=0.0,
        protocol=PROTOCOL_VERSION,
    )  # fmt: skip
    seconds = row["stage_seconds"]["measure"]
    payload = {"value": measurement.model_dump(mode="json"), "seconds": seconds}
    results.put(store, key(study, trial), "measure", payload, seconds=seconds, trial=(study, trial))
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, *_WAYS[row["status"]]):
        trials.add_event(store, study, trial, kind, {"rung": row["rung"]} if kind is EventKind.TRAINING else {})
        if kind is EventKind.TRAINING:
            value, sd = -row["objectives"]["quality"], row["noise"]["quality"]
            quality = {"rung": "first", "value": value, "per_group": {}, "sd": sd, "n_seeds": 1}
            note = {"what": "quality", "rung": 0, "quality": quality}
            trials.add_event(store, study, trial, EventKind.PROGRESS, note)
    figures = row["objectives"], row.get("constraints", {}), row.get("rung"), row["noise"]
    event = Observed(Observation(Layout.parse(row["layout"]), row["status"], *figures))
    trials.add_event(store, study, trial, EventKind.PROGRESS, event.to_json())


def _figures(row: dict[str, Any]) -> dict[str, Figure]:
    logs = {
        "latency": row["objectives"].get("latency", 0.0),
        "peak_rss": row["objectives"].get("memory", 0.0),
        "file_size": 0.0,
    } | {
        name: math.log(_LIMIT) + row.get("constraints", {}).get(f"{name}{_AT}", -math.log(_LIMIT))
        for name in ("ttft", "decode_p50")
    }  # fmt: skip
    noise = {"peak_rss": row["noise"].get("memory", 0.0), **row["noise"]}
    return {name: _figure(name, logs[name], noise.get(name, noise.get(f"{name}{_AT}", 0.0))) for name in BASE}


def _figure(name: str, log: float, sd: float) -> Figure:
    base, unit = BASE[name]
    value, half = base * math.exp(log), 2 * sd
    low, high = value * math.exp(-half), value * math.exp(half)
    return Figure(value=value, low=low, high=high, log_sd=sd, minimum=low, maximum=high, n=5, unit=unit)
