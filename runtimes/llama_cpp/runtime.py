"""llama.cpp as a runtime: GGUF files, measured by our C runner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from nas.core.errors import UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import Plan, RawRun, Runner
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, Checkpoint, GateReport, Support, Weights
from nas.runtimes.llama_cpp import support
from nas.runtimes.llama_cpp.builds import builds_folder, find_build, load_build
from nas.runtimes.llama_cpp.support import Quantisation
from nas.runtimes.output import read_sample

_REFERENCE = "d512 v8192 ffn=swiglu:1792 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]"
_PROMPT_SEED = 0


@dataclass(frozen=True)
class LlamaCpp:
    """The runtime `llama.cpp`; implements `nas.runtimes.base.Runtime`."""

    name: str = "llama.cpp"
    quantisations: tuple[str, ...] = get_args(Quantisation)

    @property
    def writer_version(self) -> str:
        """See `Runtime.writer_version`."""
        from nas.runtimes.llama_cpp.writer import WRITER_VERSION

        return WRITER_VERSION

    def supports(self, layout: Layout) -> Support:
        """See `nas.runtimes.llama_cpp.support`."""
        return support.supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes a GGUF file; trained weights need a build for its quantiser, random ones need none."""
        from nas.runtimes.llama_cpp.writer import write_gguf

        arch = support.architecture(layout)
        written = write_gguf(layout, _known(quantisation), weights, destination, recipe=recipe)
        return Artifact(
            sha256=written.file.sha256,
            size=written.file.size,
            runtime=self.name,
            quantisation=quantisation,
            layout_id=layout.id,
            arch=arch,
            patched=arch == support.PATCHED,
            weights=weights.describe(),
            recipe=written.recipe,
        )

    def plan(self, artifact: Artifact, runner: Runner, workload: Workload, deadline_s: float) -> Plan:
        """One fresh process of the runner."""
        if workload.kv_type != "f16" and not workload.flash_attn:
            raise Unsupported(f"llama.cpp needs flash_attn for a {workload.kv_type} cache")
        if artifact.patched and not runner.patched:
            raise Unsupported(f"artifact {artifact.sha256[:12]} needs the patched build, this runner is stock")
        options = {
            "prompt": workload.prompt,
            "gen": workload.gen,
            "context": workload.window,
            "batch": workload.n_batch,
            "ubatch": workload.n_ubatch,
            "threads": workload.threads,
            "kv": workload.kv_type,
            "flash": int(workload.flash_attn),
            "mmap": int(workload.mmap),
            "repack": int(workload.repack),
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
        """See `nas.runtimes.llama_cpp.gate`, and `runner_gate` for other machines' runners; loads torch."""
        from nas.runtimes.llama_cpp.gate import run_gate
        from nas.runtimes.llama_cpp.oracle import Oracle
        from nas.runtimes.llama_cpp.runner_gate import rounds_choices, run_runner_gate
        from nas.runtimes.runner_logits import here

        build = load_build(builds_folder() / runner.build)
        oracle = Oracle(layout, _known(quantisation), checkpoint, half_sums=build.details.half_sums)
        if build.details.static:
            settled = rounds_choices(layout, _known(quantisation))
            machine = here(build.executable, build.runner.target)
            return run_runner_gate(layout, model, machine, oracle.exact, oracle.rounded, settled=settled)
        return run_gate(layout, model, build, oracle.exact, oracle.rounded)

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """The runner of the best build at hand that such a processor can run."""
        return find_build(target, features, patched=patched, libc=libc).runner

    def runner_folder(self, runner: Runner) -> Path:
        """See `Runtime.runner_folder`."""
        return load_build(builds_folder() / runner.build).folder

    def reference_model(self) -> Layout:
        """A small lfm2 of 30M weights."""
        return Layout.parse(_REFERENCE)

    def reference_workload(self) -> Workload:
        """Half a second on a server core, two on a slow one."""
        return Workload(prompt=512, gen=256)


def _known(quantisation: str) -> Quantisation:
    if quantisation not in get_args(Quantisation):
        raise UnknownName("quantisation of llama.cpp", quantisation, get_args(Quantisation))
    return cast(Quantisation, quantisation)


LLAMA_CPP = LlamaCpp()
