"""The fake runtime keeps the contract of the runtimes that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights
from nas.testing.fake_runtime import FakeRuntime, Fault
from nas.testing.run_plan import run_plan
from nas.testing.runtime_contract import RuntimeContract

SMALL = Layout.parse("d256 v1024 ffn=swiglu:512 [C3 A4/2 C3 A4/2]")


class TestFakeRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, tmp_path_factory: pytest.TempPathFactory) -> FakeRuntime:
        return FakeRuntime(tmp_path_factory.mktemp("runner"), refused=frozenset({"moe"}))

    @pytest.fixture
    def layout(self) -> Layout:
        return SMALL

    @pytest.fixture
    def refused(self) -> Layout:
        return Layout.parse("d256 v1024 ffn=moe:4x2:64 [C3 A4/2]")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "crash"),
        ("hang", "timeout"),
        ("garbage", "garbage_output"),
        ("flood", "garbage_output"),
        ("out_of_memory", "out_of_memory"),
        ("not_finite", "not_finite"),
    ],
)
def test_faults_are_told_apart(tmp_path: Path, fault: Fault, reason: str) -> None:
    runtime = FakeRuntime(tmp_path, faults={SMALL.id: fault})
    artifact = runtime.export(SMALL, "q4_0", RandomWeights(), tmp_path / "model")
    deadline_s = 0.5 if fault == "hang" else 60
    plan = runtime.plan(artifact, runtime.runner("x86_64-linux"), Workload(prompt=16, gen=4), deadline_s=deadline_s)
    with pytest.raises(CandidateFailed) as failure:
        runtime.parse(run_plan(plan, runtime.runner_folder(plan.runner), {"model": tmp_path / "model"}))
    assert failure.value.reason == reason


def test_wider_layouts_are_slower(tmp_path: Path) -> None:
    runtime = FakeRuntime(tmp_path)

    def latency(text: str) -> float:
        path = tmp_path / "model"
        artifact = runtime.export(Layout.parse(text), "q4_0", RandomWeights(), path)
        plan = runtime.plan(artifact, runtime.runner("x86_64-linux"), Workload(prompt=64, gen=8), deadline_s=10)
        sample = runtime.parse(run_plan(plan, runtime.runner_folder(plan.runner), {"model": path}))
        return sample.ttft_ms + sum(sample.decode_ns) / 1e6

    assert latency("d256 v1024 ffn=swiglu:512 [C3 A4/2]") < latency("d512 v1024 ffn=swiglu:1024 [C3 A8/4]")
