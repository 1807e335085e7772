"""ExecuTorch as a runtime: artifacts of lowered blocks, measured by our C++ runner."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nas.core.errors import UnknownName, Unsupported
from nas.core.family import MemberFile
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
    ReleasePart,
    ReleaseRequest,
    Support,
    Weights,
    finding_of,
)
from nas.measure.runtimes.checkpoint_file import StateDict
from nas.measure.runtimes.executorch.chain import ARCH, Quantisation, build_chain, require, supports
from nas.measure.runtimes.executorch.kinds import KINDS
from nas.measure.runtimes.executorch.templates import PACKAGES, templates_folder, trim_templates
from nas.measure.runtimes.executorch.variants import BUILDS, NAME, Build, find_build
from nas.measure.runtimes.runner import plan_run, read_profile, read_timed_sample
from nas.measure.runtimes.writing import Written


@dataclass(frozen=True)
class ExecuTorch:
    """The runtime `executorch`; implements `nas.measure.runtimes.base.Runtime`."""

    name: str = NAME
    quantisations: tuple[str, ...] = get_args(Quantisation)

    @property
    def writer_version(self) -> str:
        """See `Runtime.writer_version`; other tools may lower the same program to other bytes."""
        from nas.measure.runtimes.executorch.templates import tool_versions
        from nas.measure.runtimes.executorch.writer import WRITER_VERSION

        versions = sorted(f"{name}={KINDS[name].version}" for name in KINDS if KINDS[name].version)
        return ":".join((WRITER_VERSION, *tool_versions().values(), *versions))

    def supports(self, layout: Layout) -> Support:
        """See `nas.measure.runtimes.executorch.chain`."""
        return supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes an artifact; loads torch only where a block's shape is new."""
        from nas.measure.runtimes.executorch.writer import write_artifact

        _check(quantisation)
        require(layout)
        written = write_artifact(layout, weights, destination, recipe=recipe)
        return self._artifact(written, layout, quantisation, weights, ARCH)

    def export_whole(
        self, layout: Layout, quantisation: str, weights: Weights, context: int, destination: Path
    ) -> Artifact:
        """See `WholeExporter.export_whole`; our runner takes the file too."""
        from nas.measure.runtimes.executorch.templates import tool_versions

        _check(quantisation)
        tool_versions()  # says what is not installed
        from nas.measure.runtimes.executorch.whole import write_whole_graph

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
        """Returns a run as one fresh process of the runner."""
        if workload.kv_type != "f16":
            raise Unsupported(f"ExecuTorch has no {workload.kv_type} cache; its runner keeps f16")
        if not workload.flash_attn or not workload.repack:
            raise Unsupported("ExecuTorch always fuses attention and repacks weights: leave flash_attn and repack on")
        options: dict[str, object] = {
            "batch": min(workload.n_batch, workload.n_ubatch),
            "threads": workload.threads,
            "kv": workload.kv_type,
            "mmap": int(workload.mmap),
        }
        return plan_run(artifact, runner, workload, deadline_s, options)

    def parse(self, raw: RawRun) -> Sample:
        """See `nas.measure.runtimes.runner`."""
        return read_timed_sample(raw)

    def profiler(self, runner: Runner, log: Callable[[str], None]) -> Runner:
        """See `Profiler`; runs `profiler.cpp`."""
        from nas.measure.runtimes.executorch.compile import build_profiler

        return build_profiler(runner, log).runner

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """See `Profiler`; the profiler reports steps of a chain, whose layers follow from the layout."""
        if layout is None:
            raise Unsupported(
                "ExecuTorch profiles layouts, not files: a file does not say which layer a step belongs to"
            )
        steps = build_chain(layout).steps
        return read_profile(raw).moved([(step.layer, step.part) for step in steps])

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """See `nas.measure.runtimes.executorch.gate`; loads torch."""
        from nas.measure.runtimes.executorch.gate import Oracle, run_gate
        from nas.measure.runtimes.runner import here

        _check(quantisation)
        build = BUILDS.load(BUILDS.folder / runner.build)
        return run_gate(layout, model, here(build.executable, build.runner.target), Oracle(layout, checkpoint))

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """Returns the runner of the best available build that such a processor can run; no artifact needs a patch."""
        return find_build(target, features, libc=libc).runner

    def runner_folder(self, runner: Runner) -> Path:
        """See `Runtime.runner_folder`."""
        return BUILDS.load(BUILDS.folder / runner.build).folder

    def reference_model(self) -> Layout:
        """Returns a small lfm2 of 30M weights, the same as llama.cpp's."""
        return Layout.parse(REFERENCE_LAYOUT)

    def reference_workload(self) -> Workload:
        """Returns a workload of about a second on a server core."""
        return Workload(prompt=512, gen=256)

    def builds(self) -> Sequence[Build]:
        """Returns the runners, all with ExecuTorch's own libraries."""
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
        """See `nas.measure.runtimes.executorch.compile`."""
        from nas.measure.runtimes.executorch.compile import build

        return build(target, log=log, patched=patched, variant=variant, tools=tools, static=static)

    def doctor(self) -> Iterator[Finding]:
        """Checks packages, runner and lowered programs; none is a failure, because a search can do without them."""
        wanted, found = _pinned_versions(), _installed_versions()
        if missing := [name for name in PACKAGES if name not in found]:
            fix = "pip install '.[executorch]' in the checkout; spaces that measure with llama.cpp alone do without"
            yield Finding(NAME, "warning", f"not installed: {', '.join(missing)}", fix)
            return
        other = [f"{name} {found[name]} instead of {wish}" for name, wish in wanted.items() if found[name] != wish]
        if other:
            # Lowering leans on private parts of just these versions.
            yield Finding(
                NAME, "warning", ", ".join(other), "pip install '.[executorch]' in the checkout, which pins them"
            )
        else:
            yield Finding(NAME, "ok", ", ".join(f"{name} {found[name]}" for name in PACKAGES))
        yield _runner_finding(found[NAME])
        kept = [path.stat().st_size for path in templates_folder().glob("[0-9a-f]*")]
        yield Finding("et-programs", "ok", f"{len(kept)} lowered for ExecuTorch, {sum(kept) / 1e6:.1f} MB")

    def trim(self, limit_bytes: int) -> int:
        """Removes lowered programs; a removed one is lowered again when it is needed."""
        return trim_templates(limit_bytes)

    def release(self, request: ReleaseRequest) -> Release:
        """Returns one .pte of the whole model, where ExecuTorch's own attention can compute it."""
        if not (support := supports(request.layout)):
            return Release(f"none: {'; '.join(support.reasons)}")
        loads = f"standard .pte for texts of {request.context:,} tokens"
        return Release(loads, tuple(self._released(request, name) for name in request.quantisations))

    def _released(self, request: ReleaseRequest, quantisation: str) -> ReleasePart:
        name = f"{NAME}/{request.name}-{quantisation}.pte"

        def write(_: StateDict) -> Iterator[MemberFile]:
            path = request.folder / name
            path.parent.mkdir(exist_ok=True)
            with request.checkpoint() as checkpoint:
                made = self.export_whole(request.layout, quantisation, checkpoint, request.context, path)
            yield MemberFile(path=name, kind="pte", quantisation=quantisation, sha256=made.sha256, size=made.size)

        return ReleasePart(".pte", [self.writer_version, request.context, name], write, optional=True)


def _pinned_versions() -> dict[str, str]:
    """Returns, by package, the version that our own metadata pins."""
    pins = [line.partition(";")[0].strip().partition("==") for line in importlib.metadata.requires("hilnas") or ()]
    return {name: version for name, _, version in pins if name in PACKAGES and version}


def _installed_versions() -> dict[str, str]:
    """Returns, by package, the installed version without what marks a build of it such as "+cpu"."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _runner_finding(version: str) -> Finding:
    make = f"run `nas runtime build {NAME}`"
    found: list[Build] = []

    def look() -> str:
        found.append(build := find_build())
        return f"build {build.runner.build[:12]} ({build.variant})"

    finding = finding_of("et-runner", look, status="warning", fix=make)
    if found and (built := found[0].details.executorch) != version:
        problem = f"build {found[0].runner.build[:12]} is of ExecuTorch {built}, {version} is installed"
        return Finding("et-runner", "warning", problem, make)
    return finding


def _check(quantisation: str) -> None:
    if quantisation not in get_args(Quantisation):
        raise UnknownName("quantisation of ExecuTorch", quantisation, get_args(Quantisation))


EXECUTORCH = ExecuTorch()
