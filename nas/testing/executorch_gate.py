"""Runs the equivalence gate of ExecuTorch on an artifact with a planted fault."""

from __future__ import annotations

from pathlib import Path

from nas.core.layout import Layout
from nas.measure.runtimes.base import GateReport
from nas.measure.runtimes.executorch.gate import Oracle, run_gate
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.runner import local_machine
from nas.testing.planted_faults import RIGHT, Fault, checkpoint

QUANTISATION = "8da4w"


def gate(folder: Path, right: Layout, build: Build, fault: Fault = RIGHT) -> GateReport:
    """Exports `right` with a fault, and runs the gate against `right` without it.

    Raises:
        CandidateFailed: the runner died on the artifact.
    """
    exported, model = fault.exported(right), folder / "model"
    EXECUTORCH.export(exported, QUANTISATION, checkpoint(exported, folder / "wrong", fault.weights), model)
    trained = checkpoint(right, folder / "right")
    if not fault.earlier:
        return EXECUTORCH.gate(right, QUANTISATION, trained, model, build.runner)
    machine = local_machine(build.executable, build.runner.target)
    return run_gate(right, model, machine, Oracle(right, trained), earlier=fault.earlier)
