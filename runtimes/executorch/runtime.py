"""ExecuTorch as a runtime: artifacts of lowered blocks, measured by our C++ runner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nas.core.errors import UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import Plan, RawRun, Runner
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, Checkpoint, GateReport, Support, Weights
from nas.runtimes.executorch import support
from nas.runtimes.executorch.builds import NAME, builds_folder, find_build, load_build
from nas.runtimes.executorch.support import Quantisation
from nas.runtimes.output import read_sample
from nas.runtimes.writing import Written

_REFERENCE = "d512 v8192 ffn=swiglu:1792 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]"
_PROMPT_SEED = 0


@dataclass(frozen=True)
class ExecuTorch:
    """The runtime `executorch`; implements `nas.runtimes.base.Runtime`."""

    name: str = NAME
    quantisations: tuple[str, ...] = get_args(Quantisation)

    @property
    def writer_version(self) -> str:
        """See `Runtime.writer_version`; other tools may lower the same program to other bytes."""
        from nas.runtimes.executorch.templates import tool_versions
        from nas.runtimes.executorch.writer import WRITER_VERSION

        return f"{WRITER_VERSION}:{':'.join(tool_versions().values())}"

    def supports(self, layout: Layout) -> Support:
        """See `nas.runtimes.executorch.support`."""
        return support.supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes an artifact; loads torch only where a block's shape is new."""
        from nas.runtimes.executorch.writer import write_artifact

        _check(quantisation)
        support.require(layout)
        written = write_artifact(layout, weights, destination, recipe=recipe)
        return self._artifact(written, layout, quantisation, weights, support.ARCH)

    def export_whole(
        self, layout: Layout, quantisation: str, weights: Weights, context: int, destination: Path
    ) -> Artifact:
        """See `WholeExporter.export_whole` and `nas.runtimes.executorch.whole`; our runner takes the file too."""
        from nas.runtimes.executorch.templates import tool_versions

        _check(quantisation)
        tool_versions()  # says what is not installed
        from nas.runtimes.executorch.whole import write_whole_graph

        written = Written(write_whole_graph(layout, weights, context, destination))
        return self._artifact(written, layout, quantisation, weights, "whole graph")

    def _artifact(self, written: Written, layout: Layout, quantisation: str, weights: Weights, arch: str) -> Artifact:
        return Artifact(
            sha256=written.file.sha256,
            size=written.file.size,
            runtime=self.name,
            quantisation=quantisation,
            layout_id=layout.id,
            arch=arch,
            weights=weights.describe(),
            recipe=written.recipe,
        )

    def plan(self, artifact: Artifact, runner: Runner, workload: Workload, deadline_s: float) -> Plan:
        """One fresh process of the runner."""
        if workload.kv_type != "f16":
            raise Unsupported(f"ExecuTorch has no {workload.kv_type} cache; its runner keeps f16")
        if not workload.flash_attn or not workload.repack:
            raise Unsupported("ExecuTorch always fuses attention and repacks weights: leave flash_attn and repack on")
        options = {
            "prompt": workload.prompt,
            "gen": workload.gen,
            "context": workload.window,
            "batch": min(workload.n_batch, workload.n_ubatch),
            "threads": workload.threads,
            "kv": workload.kv_type,
            "mmap": int(workload.mmap),
            "seed": _PROMPT_SEED,
        }
        args = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return Plan(
            runner=runner,
            inputs={"model": artifact.file},
            args=("--model", "{model}", *args),
            threads=workload.threads,
            affinity=workload.affinity,
            deadline_s=deadline_s,
        )

    def parse(self, raw: RawRun) -> Sample:
        """See `nas.runtimes.output`."""
        return read_sample(raw)

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """See `nas.runtimes.executorch.gate`; loads torch."""
        from nas.runtimes.executorch.gate import run_gate
        from nas.runtimes.executorch.oracle import Oracle
        from nas.runtimes.runner_logits import here

        _check(quantisation)
        build = load_build(builds_folder() / runner.build)
        return run_gate(layout, model, here(build.executable, build.runner.target), Oracle(layout, checkpoint))

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """The runner of the best build at hand that such a processor can run; no artifact needs a patch."""
        return find_build(target, features, libc=libc).runner

    def runner_folder(self, runner: Runner) -> Path:
        """See `Runtime.runner_folder`."""
        return load_build(builds_folder() / runner.build).folder

    def reference_model(self) -> Layout:
        """A small lfm2 of 30M weights, the same as llama.cpp's."""
        return Layout.parse(_REFERENCE)

    def reference_workload(self) -> Workload:
        """About a second on a server core."""
        return Workload(prompt=512, gen=256)


def _check(quantisation: str) -> None:
    if quantisation not in get_args(Quantisation):
        raise UnknownName("quantisation of ExecuTorch", quantisation, get_args(Quantisation))


EXECUTORCH = ExecuTorch()
