"""The contract of a runtime's equivalence gate, as tests: subclass `GateContract`, give the fixture, and run pytest.

    class TestGate(GateContract):
        layout = Layout.parse("d256 v512 ffn=swiglu:512 [A8/4*2]")
        faults = tuple(fault for fault in FAULTS if "convolution" not in fault.name)

        @pytest.fixture
        def runtime(self) -> Runtime:
            return MyRuntime()

Each fault is one test.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import ClassVar

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import GateReport, Runtime
from nas.testing.planted_faults import FAULTS, RIGHT, Fault, checkpoint


class GateContract:
    """Right graphs pass and wrong ones fail, at every quantisation.

    The subclass gives the fixture `runtime`. Expect seconds per test: models are exported, run and computed in PyTorch.

    Attributes:
        target: the ABI of this machine, for which the runtime must have a runner.
        layout: one that the runtime carries, with the blocks that `faults` need.
        faults: to plant. Those that the runtime cannot export may be left out; `earlier` is a runner's fault, which
            the runtime's own tests plant.
        faults_at: quantisations at which they are planted; none: all of the runtime.
    """

    target: ClassVar[str] = f"{platform.machine()}-{platform.system().lower()}"
    layout: ClassVar[Layout] = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A8/4 C3 A8/4]")
    faults: ClassVar[tuple[Fault, ...]] = tuple(fault for fault in FAULTS if not fault.earlier)
    faults_at: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per fault."""
        if "fault" in metafunc.fixturenames:
            metafunc.parametrize("fault", metafunc.cls.faults, ids=lambda fault: fault.name)

    def gate(self, runtime: Runtime, quantisation: str, folder: Path, fault: Fault = RIGHT) -> GateReport:
        """Exports the layout with a fault, and runs the gate against the layout without it."""
        exported, model = fault.exported(self.layout), folder / "model"
        wrong = checkpoint(exported, folder / "wrong", fault.weights)
        artifact = runtime.export(exported, quantisation, wrong, model)
        runner = runtime.runner(self.target, patched=artifact.patched)
        return runtime.gate(self.layout, quantisation, checkpoint(self.layout, folder / "right"), model, runner)

    def test_right_graph_passes(self, runtime: Runtime, tmp_path: Path) -> None:
        for quantisation in runtime.quantisations:
            report = self.gate(runtime, quantisation, tmp_path)
            report.require()
            assert 0 <= report.error <= report.limit
            assert len(report.errors) > 32, "a prompt and 32 decoded tokens"

    def test_planted_fault_fails(self, runtime: Runtime, fault: Fault, tmp_path: Path) -> None:
        for quantisation in self.faults_at or runtime.quantisations:
            with pytest.raises(CandidateFailed) as failure:
                self.gate(runtime, quantisation, tmp_path, fault).require()
            assert failure.value.reason == "gate"

    def test_report_repeats(self, runtime: Runtime, tmp_path: Path) -> None:
        quantisation = runtime.quantisations[0]
        assert self.gate(runtime, quantisation, tmp_path) == self.gate(runtime, quantisation, tmp_path)

    def test_broken_file_is_the_candidates_failure(self, runtime: Runtime, tmp_path: Path) -> None:
        (tmp_path / "model").write_bytes(b"no model")
        weights = checkpoint(self.layout, tmp_path / "right")
        with pytest.raises(CandidateFailed):
            runtime.gate(
                self.layout, runtime.quantisations[0], weights, tmp_path / "model", runtime.runner(self.target)
            )

    def test_missing_build_is_no_candidates_fault(self, runtime: Runtime, tmp_path: Path) -> None:
        quantisation = runtime.quantisations[0]
        weights = checkpoint(self.layout, tmp_path / "right")
        runtime.export(self.layout, quantisation, weights, tmp_path / "model")
        runner = runtime.runner(self.target).model_copy(update={"build": hashlib.sha256(b"gone").hexdigest()})
        with pytest.raises(InfrastructureFailed):
            runtime.gate(self.layout, quantisation, weights, tmp_path / "model", runner)
