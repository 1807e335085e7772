"""One study on llama.cpp and ExecuTorch: real exports, runners and gates; only the models are tiny."""

from __future__ import annotations

from typing import Any

import pytest
from study_lab import SPACE as TINY
from study_lab import Lab

from nas.core import paths
from nas.search.analysis.agreement import FEWEST

# Takes minutes. By default each runtime is tested in studies of its own, and unit tests cover what needs two.
pytestmark = pytest.mark.exhaustive

TRIALS = 1
RUNTIMES = ("llama.cpp", "executorch")
CHAT = {"workload": "chat"}
SPACE: dict[str, Any] = {
    # The proxies are as wide as the models, so that both need the same few programs.
    "model": {"d_model": 64, "depth": {"min": 2, "max": 4}, "vocab": 256},
    "mixers": {"conv": {"kernel": 3}, "gqa": {"heads": 2, "kv_heads": {"choices": [1, 2], "scope": "layer"}}},
    "ffn": {"swiglu": {"width": [160, 192]}},
    "limits": {"conv": {"min": 1}, "gqa": {"min": 1}},
    "runtimes": [{"name": "llama.cpp", "quantisation": "q4_0"}, {"name": "executorch", "quantisation": "8da4w"}],
    "budgets": [
        {"metric": "peak_rss", "max": "3x", **CHAT},
        {"metric": "decode_p50", "max": "100x", **CHAT, "runtime": "executorch"},
    ],
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", **CHAT, "aggregate": "geomean"},
        {"name": "memory", "metric": "peak_rss", **CHAT},
    ],
    "references": {
        "published": "d64 v256 ffn=swiglu:160 [C3 A2/1 C3]",
        "attention": "d64 v256 ffn=swiglu:160 [A2/1*3]",
    },
}


class RealLab(Lab):
    """Uses the cache of the person who runs the tests: builds, and programs that ExecuTorch lowered before."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "NAS_CACHE": str(paths.cache())}


@pytest.fixture(scope="module")
def report(short_reference_runs: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lab = RealLab(tmp_path_factory.mktemp("two"))
    quality = {"proxy_d_model": 64, "rungs": [{"name": "only", "lm_steps": 20, "seeds": [0, 1]}]}
    lab.space(
        "two",
        **SPACE,
        quality=TINY["quality"] | quality,
        protocol=TINY["protocol"] | {"deadline_s": 60},
    )
    options = ("--trials", str(TRIALS), "--workers", "1")
    report: dict[str, Any] = lab.json_here(*lab.launch("two", *options, space="two"))
    return report


def test_every_trial_is_measured_and_proved_right_on_both(report: dict[str, Any]) -> None:
    assert report["state"] == "complete"
    assert report["trials"]["complete"] == TRIALS, report["trials"]
    assert report["stage_seconds"]["gate"] > 0
    for row in [*report["ranking"], *report["references"]]:
        by_runtime = {measurement["place"]["runtime"]: measurement for measurement in row["measurements"]}
        assert by_runtime.keys() == set(RUNTIMES)
        assert len({measurement["artifact"] for measurement in by_runtime.values()}) == 2
        for runtime, measurement in by_runtime.items():
            assert measurement["runtime"] == runtime
            assert measurement["calibration_ms"] > 0
            assert measurement["figures"]["latency"]["value"] > 0 and measurement["figures"]["peak_rss"]["value"] > 0
            referenced = {bool(rep["reference"]) for rep in measurement["repetitions"]}
            assert referenced == {True}, "each has the reference of its runtime"
    assert len({measurement["calibration_ms"] for measurement in report["references"][0]["measurements"]}) == 2


def test_axes_are_ratios_over_both_and_budgets_are_of_one(report: dict[str, Any]) -> None:
    published = next(row for row in report["references"] if row["name"] == "published")
    assert published["objectives"]["latency"] == pytest.approx(1)
    assert {axis["name"]: axis["unit"] for axis in report["objectives"]}["latency"] == "x"
    assert [(budget["metric"], budget["runtime"]) for budget in report["budgets"]] == [
        ("peak_rss", "llama.cpp"), ("peak_rss", "executorch"), ("decode_p50", "executorch"),
    ]  # fmt: skip


def test_the_runtimes_agreement_is_told(report: dict[str, Any]) -> None:
    """Its coefficients, which need more layouts, are in tests/unit/test_analysis_agreement.py."""
    by_metric = {row["metric"]: row for row in report["agreement"]}
    assert by_metric.keys() == {"latency", "ttft", "decode_p50", "peak_rss"}
    for row in by_metric.values():
        assert row["runtimes"] == list(RUNTIMES)
        assert row["correlation"]["layouts"] == TRIALS + 2
        assert row["correlation"]["reason"] == f"{TRIALS + 2} layouts; a rank correlation needs {FEWEST}"
