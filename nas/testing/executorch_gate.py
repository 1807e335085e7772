"""The gate of ExecuTorch on an artifact with a planted fault."""

from __future__ import annotations

from pathlib import Path

from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.executorch.builds import Build
from nas.runtimes.executorch.gate import run_gate
from nas.runtimes.executorch.oracle import Oracle
from nas.runtimes.executorch.runtime import EXECUTORCH
from nas.runtimes.runner_logits import here
from nas.testing.planted_faults import Fault, checkpoint

QUANTISATION = "8da4w"
RIGHT = Fault("none")


def gate(folder: Path, right: Layout, build: Build, fault: Fault = RIGHT) -> GateReport:
    """Exports `right` with a fault, and holds the artifact against `right` without it.

    Args:
        folder: for weights and file.
        right: what the artifact should compute.
        build: what computes; one for another machine runs by emulation.
        fault: what is wrong.

    Raises:
        CandidateFailed: the runner died on the artifact.
    """
    exported, model = fault.exported(right), folder / "model"
    EXECUTORCH.export(exported, QUANTISATION, checkpoint(exported, folder / "wrong", fault.weights), model)
    trained = checkpoint(right, folder / "right")
    if not fault.earlier:
        return EXECUTORCH.gate(right, QUANTISATION, trained, model, build.runner)
    machine = here(build.executable, build.runner.target)
    return run_gate(right, model, machine, Oracle(right, trained), earlier=fault.earlier)
