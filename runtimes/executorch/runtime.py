"""ExecuTorch as a runtime: artifacts of lowered blocks, measured by our C++ runner."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.plan import Plan, RawRun, Runner
from nas.core.profile import Profile
from nas.core.progress import Log
from nas.core.quantisation import file_word
from nas.core.workload import Workload
from nas.measure.runtimes.base import (
    Artifact,
    Checkpoint,
    Finding,
    GateReport,
    Release,
    ReleasePart,
    ReleaseRequest,
    StateDict,
    Support,
    Weights,
    finding_of,
)
from nas.measure.runtimes.build_cache import BuildRequest
from nas.measure.runtimes.built_runtime import BuiltRuntime
from nas.measure.runtimes.executorch.chain import ARCH, QUANTISATIONS, build_chain, require, stored_types, supports
from nas.measure.runtimes.executorch.kinds import KINDS
from nas.measure.runtimes.executorch.templates import PACKAGES, templates_folder, trim_templates
from nas.measure.runtimes.executorch.variants import NAME, VARIANTS, ExecuTorchSpec
from nas.measure.runtimes.runner import plan_run, read_profile
from nas.measure.runtimes.toolchain import host_features, host_target
from nas.measure.runtimes.writing import Written

if TYPE_CHECKING:
    from torch import Tensor, nn

_FOLDER = Path(__file__).parent


class ExecuTorch(BuiltRuntime[ExecuTorchSpec]):
    """The runtime `executorch`; implements `nas.measure.runtimes.base.Runtime`."""

    name = NAME
    quantisations = QUANTISATIONS
    spec_type = ExecuTorchSpec
    variants = VARIANTS
    targets = ("aarch64-linux",)
    runner_sources = (
        *(_FOLDER / name for name in ("runner.cpp", "attention.h", "recipe.h", "recurrence.h")),
        _FOLDER.parent / "report.h",
    )
    profiler_sources = (_FOLDER / "profiler.cpp", *runner_sources)
    options = (
        *("--model", "--reference", "--prompt", "--gen", "--context", "--batch", "--threads"),
        *("--kv", "--mmap", "--seed"),
    )
    dispatches = True  # XNNPACK
    disk_bytes = 100 << 20

    @property
    def writer_version(self) -> str:
        """Versions of the writer, of each block kind, and of the tools: others may lower a program to other bytes."""
        from nas.measure.runtimes.executorch.templates import tool_versions
        from nas.measure.runtimes.executorch.writer import WRITER_VERSION

        versions = sorted(f"{name}={KINDS[name].version}" for name in KINDS if KINDS[name].version)
        return ":".join((WRITER_VERSION, *tool_versions().values(), *versions))

    def require_quantisation(self, quantisation: str) -> None:
        """Raises `UnknownName` for what `export` does not write; parts may have one of their own."""
        stored_types(quantisation)

    def supports(self, layout: Layout) -> Support:
        """Returns "stock" where every block can be lowered."""
        return supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes an artifact; loads torch only where a block's shape is new."""
        from nas.measure.runtimes.executorch.writer import write_artifact

        self.require_quantisation(quantisation)
        require(layout)
        written = write_artifact(layout, weights, destination, quantisation, recipe=recipe)
        return self.artifact(written, layout, quantisation, weights, ARCH)

    def export_whole(
        self, layout: Layout, quantisation: str, weights: Weights, context: int, destination: Path
    ) -> Artifact:
        """Writes one .pte of the whole model; our runner takes the file too."""
        from nas.measure.runtimes.executorch.templates import tool_versions

        self.require_quantisation(quantisation)
        tool_versions()  # raises where one is not installed
        from nas.measure.runtimes.executorch.whole import write_whole_graph

        written = Written(write_whole_graph(layout, weights, context, destination, quantisation))
        return self.artifact(written, layout, quantisation, weights, "whole graph")

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
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
        return plan_run(artifact, runner, workload, deadline_s, options, reference)

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """Returns the profile that `profiler.cpp` printed: its steps of a chain become layers of the layout."""
        if layout is None:
            raise Unsupported(
                "ExecuTorch profiles layouts, not files: a file does not say which layer a step belongs to"
            )
        steps = build_chain(layout).steps
        return read_profile(raw).moved([(step.layer, step.part) for step in steps])

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """Compares the logits of the runner with PyTorch's; loads torch."""
        from nas.measure.runtimes.executorch.gate import Oracle, run_gate
        from nas.measure.runtimes.runner import local_machine

        self.require_quantisation(quantisation)
        build = self.load(runner.build)
        machine = local_machine(build.executable, build.runner.target)
        return run_gate(layout, model, machine, Oracle(layout, checkpoint, quantisation))

    def rounded(self, layout: Layout, quantisation: str, checkpoint: Checkpoint) -> nn.Module:
        """Returns the model with the weights that the file has; loads torch."""
        from nas.measure.runtimes.executorch.gate import Oracle

        return Oracle(layout, checkpoint, quantisation).model

    def rounded_block(
        self, layout: Layout, block: Block, quantisation: str, weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the block with the values that the file has; loads torch."""
        from nas.measure.runtimes.executorch.gate import rounded_block

        return rounded_block(layout, block, quantisation, weights)

    def spec(self, request: BuildRequest) -> ExecuTorchSpec:
        """Returns the inputs of a build: there is one for each instruction set."""
        from nas.measure.runtimes.executorch.compile import build_spec

        if request.patched or request.tools or request.static:
            raise InvalidInput("ExecuTorch has one build: its own shared libraries and our runner")
        features = host_features() if request.target == host_target() else None
        variant = self.variant_for(request.target, features, request.variant)
        return build_spec(variant, self.source_hash(self.runner_sources))

    def is_current(self, spec: ExecuTorchSpec) -> bool:
        """Returns whether a build for this machine is of the installed version, if any; for another, of the wheel's."""
        from nas.measure.runtimes.executorch.compile import VERSION

        installed = _installed_versions().get(NAME) if spec.target == host_target() else VERSION
        return installed is None or spec.version.partition("+")[0] == installed

    def compile(self, spec: ExecuTorchSpec, work: Path, product: Path, log: Log) -> None:
        """Compiles the runner beside ExecuTorch's libraries."""
        from nas.measure.runtimes.executorch.compile import compile_runner

        mcpu = self.variant_for(spec.target, None, spec.variant).mcpu
        compile_runner(spec, mcpu, self.program(spec), work, product, log)

    def smoke_models(self, spec: ExecuTorchSpec, folder: Path, log: Log) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yields a model of a convolution and an attention block."""
        from nas.measure.runtimes.executorch.compile import tiny_models

        return tiny_models(folder, log)

    def doctor(self) -> Iterator[Finding]:
        """Checks packages, runner and lowered programs; none is a failure, because a search can do without them."""
        pinned, installed = _pinned_versions(), _installed_versions()
        if missing := [name for name in PACKAGES if name not in installed]:
            fix = "pip install '.[executorch]' in a checkout; spaces that measure with llama.cpp alone do without"
            yield Finding(NAME, "warning", f"not installed: {', '.join(missing)}", fix)
            return
        other = [
            f"{name} {installed[name]} instead of {version}"
            for name, version in pinned.items()
            if installed[name] != version
        ]
        if other:
            # Lowering leans on private parts of just these versions.
            yield Finding(
                NAME, "warning", ", ".join(other), "pip install '.[executorch]' in a checkout, which pins them"
            )
        else:
            yield Finding(NAME, "ok", ", ".join(f"{name} {installed[name]}" for name in PACKAGES))

        def runner() -> str:
            build = self.find_build()
            return f"build {build.runner.build[:12]} ({build.variant})"

        yield finding_of("et-runner", runner, status="warning", fix=f"run `nas runtime build {NAME}`")
        sizes = [path.stat().st_size for path in templates_folder().glob("[0-9a-f]*")]
        yield Finding("et-programs", "ok", f"{len(sizes)} lowered for ExecuTorch, {sum(sizes) / 1e6:.1f} MB")

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
        name = f"{NAME}/{request.name}-{file_word(quantisation)}.pte"

        def write(_: StateDict) -> Iterator[MemberFile]:
            path = request.folder / name
            path.parent.mkdir(exist_ok=True)
            with request.checkpoint() as checkpoint:
                artifact = self.export_whole(request.layout, quantisation, checkpoint, request.context, path)
            yield MemberFile(
                path=name, kind="pte", quantisation=quantisation, sha256=artifact.sha256, size=artifact.size
            )

        parts = [quantisation] if "+" in quantisation else []
        return ReleasePart(".pte", [self.writer_version, request.context, name, *parts], write, optional=True)


def _pinned_versions() -> dict[str, str]:
    """Returns, by package, the version that our own metadata pins."""
    pins = [line.partition(";")[0].strip().partition("==") for line in importlib.metadata.requires("hilnas") or ()]
    return {name: version for name, _, version in pins if name in PACKAGES and version}


def _installed_versions() -> dict[str, str]:
    """Returns, by package, the installed version without what marks a build of it such as "+cpu"."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


EXECUTORCH = ExecuTorch()
