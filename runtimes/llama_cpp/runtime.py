"""llama.cpp as a runtime: GGUF files, measured by our C runner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import Plan, RawRun, Runner
from nas.core.profile import Profile
from nas.core.workload import Workload
from nas.measure.runtimes.base import (
    REFERENCE_LAYOUT,
    Artifact,
    Checkpoint,
    Finding,
    GateReport,
    Release,
    ReleaseRequest,
    Support,
    Weights,
    finding_of,
)
from nas.measure.runtimes.llama_cpp import support
from nas.measure.runtimes.llama_cpp.kinds import KINDS
from nas.measure.runtimes.llama_cpp.support import Quantisation
from nas.measure.runtimes.llama_cpp.variants import BUILDS, NAME, Build, find_build
from nas.measure.runtimes.runner import plan_run, read_profile, read_timed_sample
from nas.measure.runtimes.toolchain import find_toolchain


@dataclass(frozen=True)
class LlamaCpp:
    """The runtime `llama.cpp`; implements `nas.measure.runtimes.base.Runtime`."""

    name: str = NAME
    quantisations: tuple[str, ...] = get_args(Quantisation)

    @property
    def writer_version(self) -> str:
        """See `Runtime.writer_version`."""
        from nas.measure.runtimes.llama_cpp.writer import WRITER_VERSION

        versions = [f":{name}={KINDS[name].version}" for name in KINDS if KINDS[name].version]
        return WRITER_VERSION + "".join(sorted(versions))

    def supports(self, layout: Layout) -> Support:
        """See `nas.measure.runtimes.llama_cpp.support`."""
        return support.supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes a GGUF file; trained weights need a build for its quantiser, random ones need none."""
        from nas.measure.runtimes.llama_cpp.writer import write_gguf

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

    def needs_patched(self, model: Path) -> bool:
        """See `FileInspector`: whether the file's architecture is ours."""
        from gguf import GGUFReader

        try:
            arch = GGUFReader(model).fields["general.architecture"].contents()
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise InvalidInput(f"not a GGUF file: {error}", where=str(model)) from error
        return bool(arch == support.PATCHED)

    def bits_per_byte(self, model: Path, texts: Sequence[str], threads: int) -> float:
        """See `TextScorer`."""
        from nas.measure.runtimes.llama_cpp.binding import bits_per_byte

        return bits_per_byte(find_build(patched=self.needs_patched(model)), model, texts, threads)

    def plan(self, artifact: Artifact, runner: Runner, workload: Workload, deadline_s: float) -> Plan:
        """Returns a run as one fresh process of the runner."""
        if workload.kv_type != "f16" and not workload.flash_attn:
            raise Unsupported(f"llama.cpp needs flash_attn for a {workload.kv_type} cache")
        if artifact.patched and not runner.patched:
            raise Unsupported(f"artifact {artifact.sha256[:12]} needs the patched build, this runner is stock")
        options: dict[str, object] = {
            "batch": workload.n_batch,
            "ubatch": workload.n_ubatch,
            "threads": workload.threads,
            "kv": workload.kv_type,
            "flash": int(workload.flash_attn),
            "mmap": int(workload.mmap),
            "repack": int(workload.repack),
        }
        return plan_run(artifact, runner, workload, deadline_s, options)

    def parse(self, raw: RawRun) -> Sample:
        """See `nas.measure.runtimes.runner`."""
        return read_timed_sample(raw)

    def profiler(self, runner: Runner, log: Callable[[str], None]) -> Runner:
        """See `Profiler`; runs `profiler.c`."""
        from nas.measure.runtimes.llama_cpp.compile import build_profiler

        return build_profiler(runner, log).runner

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """See `Profiler`; GGUF names the layers."""
        return read_profile(raw)

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """See `nas.measure.runtimes.llama_cpp.gate`; loads torch."""
        from nas.measure.runtimes.llama_cpp.gate import first_passed, rounds_choices, run_gate, run_runner_gate
        from nas.measure.runtimes.llama_cpp.oracle import Oracle
        from nas.measure.runtimes.runner import here

        build = BUILDS.load(BUILDS.folder / runner.build)
        oracle = Oracle(layout, _known(quantisation), checkpoint, half_sums=build.details.half_sums)
        if build.details.static:
            settled = rounds_choices(layout, _known(quantisation))
            machine = here(build.executable, build.runner.target)
            return first_passed(
                lambda seed: run_runner_gate(
                    layout, model, machine, oracle.exact, oracle.rounded, settled=settled, seed=seed
                )
            )
        return first_passed(lambda seed: run_gate(layout, model, build, oracle.exact, oracle.rounded, seed=seed))

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """Returns the runner of the best available build that such a processor can run."""
        return find_build(target, features, patched=patched, libc=libc).runner

    def runner_folder(self, runner: Runner) -> Path:
        """See `Runtime.runner_folder`."""
        return BUILDS.load(BUILDS.folder / runner.build).folder

    def reference_model(self) -> Layout:
        """Returns a small lfm2 of 30M weights."""
        return Layout.parse(REFERENCE_LAYOUT)

    def reference_workload(self) -> Workload:
        """Returns a workload of half a second on a server core, two on a slow one."""
        return Workload(prompt=512, gen=256)

    def builds(self) -> Sequence[Build]:
        """Returns stock and patched builds."""
        return BUILDS.all()

    def build(
        self,
        target: str = "host",
        *,
        log: Callable[[str], None],
        patched: bool = False,
        variant: str | None = None,
        tools: bool = False,
        static: bool = False,
    ) -> Build:
        """See `nas.measure.runtimes.llama_cpp.compile`."""
        from nas.measure.runtimes.llama_cpp.compile import build

        return build(target, log=log, patched=patched, variant=variant, tools=tools, static=static)

    def doctor(self) -> Iterator[Finding]:
        """Checks for a compiler and a build for this machine, which a search needs."""
        yield finding_of("compiler", lambda: find_toolchain().version)
        yield finding_of(NAME, lambda: f"build {find_build().runner.build[:12]}")

    def trim(self, limit_bytes: int) -> int:
        """Removes nothing: exports cache nothing."""
        return 0

    def release(self, request: ReleaseRequest) -> Release:
        """Returns GGUF files with the tokenizer in each."""
        from nas.measure.runtimes.llama_cpp.release import release

        return release(self.writer_version, request)


def _known(quantisation: str) -> Quantisation:
    if quantisation not in get_args(Quantisation):
        raise UnknownName("quantisation of llama.cpp", quantisation, get_args(Quantisation))
    return cast(Quantisation, quantisation)


LLAMA_CPP = LlamaCpp()
