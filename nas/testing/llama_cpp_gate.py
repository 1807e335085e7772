"""Runs the equivalence gate of llama.cpp on a file with a planted fault."""

from __future__ import annotations

from pathlib import Path

from nas.core.layout import Layout
from nas.measure.runtimes.base import GateReport
from nas.measure.runtimes.llama_cpp.gate import rounds_choices, run_gate, run_runner_gate
from nas.measure.runtimes.llama_cpp.oracle import Oracle
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.runner import local_machine
from nas.testing.planted_faults import RIGHT, Fault, checkpoint


def gate(folder: Path, quantisation: str, right: Layout, build: Build, fault: Fault = RIGHT) -> GateReport:
    """Exports `right` with a fault, and runs the gate against `right` without it.

    Args:
        folder: for weights and file.
        quantisation: of the file.
        right: the layout that the file should compute.
        build: of llama.cpp; one for another machine runs by emulation, through its runner.
        fault: to plant.

    Raises:
        CandidateFailed: llama.cpp died on the file.
    """
    exported, model = fault.exported(right), folder / "m.gguf"
    LLAMA_CPP.export(exported, quantisation, checkpoint(exported, folder / "wrong", fault.weights), model)
    trained = checkpoint(right, folder / "right")
    if not fault.earlier:
        return LLAMA_CPP.gate(right, quantisation, trained, model, build.runner)
    oracle = Oracle(right, quantisation, trained, half_sums=build.spec.half_sums)
    if build.spec.static or build.spec.gpu:
        return run_runner_gate(
            right,
            model,
            local_machine(build.executable, build.runner.target),
            oracle.exact,
            oracle.rounded,
            settled=rounds_choices(right, quantisation),
            earlier=fault.earlier,
            options=("--gpu", "1") if build.spec.gpu else (),
        )
    return run_gate(right, model, build, oracle.exact, oracle.rounded, earlier=fault.earlier)
