"""What the tests of the service share: a tiny space, and a study whose compute and devices are this process."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store_support import open_store

from nas.core.clock import SystemClock
from nas.core.layout import Layout
from nas.core.measurement import Figure, ReferenceTimes, Sample
from nas.core.plan import Round, RoundResult
from nas.core.space import SearchSpace
from nas.core.stats import Z95
from nas.infra.store import studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.protocol import estimator
from nas.model.text.corpus import CorpusRef
from nas.search.analysis.archive import export_study
from nas.search.analysis.record import MeasurementSummary, read_study
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.job import LmRun, TrainJob
from nas.testing.fake_runtime import FakeRuntime
from nas.testing.inline_study import DEVICE as DEVICE
from nas.testing.inline_study import Bed as Bed
from nas.testing.inline_study import InlineJobs as InlineJobs
from nas.testing.inline_study import calibrated as calibrated
from nas.testing.inline_study import raw as raw

CHAT = {"workload": "chat"}
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"d_model": 128, "depth": {"min": 2, "max": 4}, "vocab": 256},
    "mixers": {"conv": {"kernel": [3, 4]}, "gqa": {"heads": 2, "kv_heads": {"choices": [1, 2], "scope": "layer"}}},
    "ffn": {"swiglu": {"width": [256, 320, 384, 448, 512]}},
    "limits": {"gqa": {"min": 1}},
    "devices": ["local"],
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": 64, "gen": 16}},
    "budgets": [{"metric": "peak_rss", "max": "2x", **CHAT}, {"metric": "decode_p50", "max": "1.6x", **CHAT}],
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", **CHAT},
        {"name": "memory", "metric": "peak_rss", **CHAT},
    ],
    "references": {
        "published": "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]",
        "attention": "d128 v256 ffn=swiglu:352 [A2/1*3]",
    },
    "quality": {
        "proxy_d_model": 32,
        "rungs": [
            {"name": "first", "lm_steps": 6, "keep": 0.5},
            {"name": "second", "lm_steps": 12, "keep": 0.5},
            {"name": "third", "lm_steps": 24, "seeds": [0, 1]},
        ],
    },
    "protocol": {
        "screen_repetitions": 2,
        "confirm_repetitions": 3,
        "remeasure": {"rounds": 2, "repetitions": 2, "members": 2},
    },
    "search": {"proposer": "evolution", "seeds": 3, "pool": 16},
}


def tiny_space(**changes: Any) -> SearchSpace:
    """The tiny space with other values of its first-level keys."""
    return SearchSpace.model_validate(TINY | changes)


def sample(ttft_ms: float = 10.0, token_ms: float = 1.0, tokens: int = 16, **more: Any) -> Sample:
    """A runner's report."""
    values: dict[str, Any] = {"load_ms": 5.0, "ttft_ms": ttft_ms, "peak_rss_mb": 50.0}
    return Sample(decode_ns=[round(token_ms * 1e6)] * tokens, **values | more)


def reference_times(report: Sample | None = None) -> ReferenceTimes:
    """The times of a reference model whose runs report `report`."""
    return estimator.reference_times([report or sample()], 1)


def figure(value: float | None, spread: float = 0.0, unit: str = "ms", n: int = 3) -> Figure:
    """A figure whose 95 % interval is `spread` to either side, as a share."""
    if value is None:
        return Figure(value=None, unit=unit, reason="not read")
    sd = math.log1p(spread) / Z95
    return Figure(value=value, low=value / (1 + spread), high=value * (1 + spread), log_sd=sd, n=n, unit=unit)


def summary(figures: Mapping[str, Figure]) -> MeasurementSummary:
    """A measurement as records hold it."""
    return MeasurementSummary("0" * 64, json.dumps({name: figure.model_dump() for name, figure in figures.items()}))


def snapshot(store: Store) -> StudySnapshot:
    """A study as it is now."""
    return StudySnapshot(read_study(store, "study"))


def bed_of(folder: Path, space: SearchSpace | None = None, **options: Any) -> Bed:
    """A study in `folder`, of the tiny space if none is given; `options` are those of the fake runtime."""
    runtime = FakeRuntime(folder / "fake", **options)
    return Bed(open_store(folder, SystemClock()), folder, space or tiny_space(), runtime)


@dataclass
class ScriptedJobs:
    """Answers each round with the next of `script`, or raises it; records the calls."""

    script: list[RoundResult | Exception]
    calls: list[tuple[str, int, Round]] = field(default_factory=list)

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        self.calls.append((key, number, round_))
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def archived_lines(folder: Path) -> list[dict[str, Any]]:
    """Runs a study of five trials in `folder`, and returns the lines of its archive."""
    bed = bed_of(folder)
    assert bed.run(trials=5) is StudyState.COMPLETE
    with (folder / "study.jsonl.gz").open("wb") as file:
        export_study(bed.store, studies.get(bed.store, "study").id, file)
    bed.store.close()
    return [json.loads(line) for line in gzip.decompress((folder / "study.jsonl.gz").read_bytes()).splitlines()]


def lm_job(steps: int = 3) -> TrainJob:
    """A training of the language model."""
    run = LmRun(corpus=CorpusRef(source="default", hash="0" * 64))
    layout = Layout.parse("d32 v256 ffn=swiglu:64 [C3 A2/1]").to_json()
    return TrainJob(
        layout=layout, run=run, steps=steps, batch=1, lr=0.1, warmup=0, weight_decay=0, clip=1, ema=0, seed=0
    )  # fmt: skip
