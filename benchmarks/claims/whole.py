"""Whole studies by the real orchestrator: what they say is compared with a device and trainings of known truth."""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims.headlines import of
from benchmarks.claims.rows import Row, mean, share
from nas.core.comparison import CONFIDENCE
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.infra.store.store import Store
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.record import read_study
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.job import TrainJob, TrainResult
from nas.testing import fake_runner
from nas.testing.fake_runtime import FakeRuntime
from nas.testing.inline_study import Bed, trained

TRIALS = 12
_DEVICE, _SEED = 0.015, 0.04
"""Standard deviations: of all runs of one measurement, of one training."""
_CHAT = {"workload": "chat"}
_SPACE: Mapping[str, Any] = {
    "name": "whole",
    "model": {"d_model": 128, "depth": {"min": 2, "max": 4}, "vocab": 256},
    "mixers": {"conv": {"kernel": [3, 4]}, "gqa": {"heads": 2, "kv_heads": {"choices": [1, 2], "scope": "layer"}}},
    "ffn": {"swiglu": {"width": [256, 320, 384, 448, 512]}},
    "limits": {"gqa": {"min": 1}},
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": 64, "gen": 16}},
    "objectives": [{"name": "quality", "metric": "quality"}, {"name": "latency", "metric": "latency", **_CHAT}],
    "references": {
        "published": "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]",
        "attention": "d128 v256 ffn=swiglu:352 [A2/1*3]",
    },
    "quality": {
        "proxy_d_model": 32,
        "rungs": [{"name": "only", "lm_steps": 24, "seeds": [0, 1]}],
        "anchors": {"layouts": 3, "seeds": [0, 1, 2]},
        "rescore": {"seeds": [100, 101, 102, 103]},
    },
    "protocol": {"screen_repetitions": 2, "confirm_repetitions": 4},
    "search": {"proposer": "random", "seeds": 3, "pool": 16},
}


def whole_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields what whole studies claim: of layouts that all equal the reference, and of ones that truly differ."""
    claims, off, covered = [], [], []
    for _ in range(max(4, studies // 40)):
        claims.append(of(_study(rng, alike=True)[0]).better > 0)
        statement, true = _study(rng, alike=False)
        changes = [row for row in of(statement).gains if row.objective == "latency" and row.change is not None]
        assert changes and of(statement).second, "the front was measured again"
        off += [row.change - true for row in changes if row.change is not None]
        covered += [row.low <= true <= row.high for row in changes if row.low is not None and row.high is not None]
    where = f"whole studies by the orchestrator, {TRIALS} candidates"
    yield share(
        "headline: a layout is better", f"{where}, all equal to the reference", 1 - CONFIDENCE, claims, "at most"
    )
    yield mean("headline: stated gain - true gain", where, 0.0, off, slack=0.01)
    yield share("headline: all stated intervals hold", f"{where}, latency alone", CONFIDENCE, covered, "at least")


def _study(rng: np.random.Generator, *, alike: bool) -> tuple[Headline | None, float]:
    """Runs a study; returns its headline, and the true change in latency of the layout that it names.

    `alike`: every layout has the figures and the quality of the published reference.
    """
    number = int(rng.integers(1 << 20))
    shifts = {seed: 0.03 * rng.standard_normal() for seed in (0, 1, 2, 100, 101, 102, 103)}
    # Trials run side by side, in an order that differs from run to run: each has noise of its own.
    runs: dict[int | None, np.random.Generator] = {}

    def slowness(trial: int | None) -> float:
        noise = runs.setdefault(trial, np.random.default_rng([number, 0 if trial is None else 1 + trial]))
        return math.exp(_DEVICE * noise.standard_normal())

    published = Layout.parse(_SPACE["references"]["published"])

    def train(job: TrainJob, spec: Mapping[str, Any]) -> TrainResult:
        result = trained(job, spec)
        level = 1.0 if alike else result.scores["lm/text"] / 2 - 0.01 * job.seed / 2
        layout = int(Layout.from_json(job.layout).id[:8], 16)
        luck = np.random.default_rng([number, layout, job.seed]).standard_normal()
        score = 2 * (level + shifts[job.seed] + _SEED * luck)
        return result.model_copy(update={"scores": {"lm/text": float(score)}})

    with tempfile.TemporaryDirectory(prefix="hilnas-claims-") as folder:
        path = Path(folder)
        runtime = _Alike(path / "fake") if alike else FakeRuntime(path / "fake")
        store = Store.open(f"sqlite:///{path / 'nas.db'}", artifacts=path / "artifacts")
        try:
            space = SearchSpace.model_validate({**_SPACE, "search": {**_SPACE["search"], "seed": number}})
            bed = Bed(store, path, space, runtime)
            bed.jobs.slowness = slowness
            bed.compute.train = train
            bed.run(TRIALS)
            snapshot = StudySnapshot(read_study(store, "study"))
            statement = headline(snapshot)
            assert statement is not None and statement.named is not None, "a complete study has a front"
            named = snapshot.records[statement.named].layout
            times = [_latency(runtime, layout) for layout in (named, published)]
            return statement, times[0] / times[1] - 1
        finally:
            store.close()


class _Alike(FakeRuntime):
    """Gives every layout the figures of one."""

    def _figures(self, layout: Layout, quantisation: str) -> dict[str, float]:
        return super()._figures(Layout.parse(_SPACE["references"]["published"]), quantisation)


def _latency(runtime: FakeRuntime, layout: Layout) -> float:
    """Returns the true latency: first token, then 16 tokens of the time that the protocol counts."""
    request = Namespace(prompt=64, gen=16, context=80, images=0, sounds=0)
    report = fake_runner.report(runtime._figures(layout, runtime.quantisations[0]), request)
    decode = report["decode_ns"]
    assert isinstance(decode, list) and isinstance(report["ttft_ms"], float)
    return float(report["ttft_ms"] + 16 * min(decode) / 1e6)
