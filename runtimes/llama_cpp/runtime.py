"""llama.cpp as a runtime: GGUF files, measured by our C runner."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.plan import InputFile, Plan, RawRun, Runner
from nas.core.profile import Profile
from nas.core.progress import Log
from nas.core.tower import ImageTower
from nas.core.workload import Workload
from nas.measure.runtimes import zig
from nas.measure.runtimes.base import (
    Artifact,
    Checkpoint,
    Finding,
    GateReport,
    RandomWeights,
    Release,
    ReleaseRequest,
    Support,
    Vocabulary,
    Weights,
    finding_of,
    projector_path,
)
from nas.measure.runtimes.build_cache import BuildRequest, without_tools
from nas.measure.runtimes.built_runtime import BuiltRuntime
from nas.measure.runtimes.llama_cpp import source, support
from nas.measure.runtimes.llama_cpp.kinds import KINDS
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.variants import (
    NAME,
    TOOLS,
    TOOLS_SOURCE,
    VARIANTS,
    VULKAN,
    VULKAN_LIBRARY,
    LlamaCppSpec,
    variant_of,
)
from nas.measure.runtimes.runner import plan_run, read_profile
from nas.measure.runtimes.toolchain import (
    find_build_tools,
    find_compiler,
    host_features,
    host_target,
    shader_compiler,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_FOLDER = Path(__file__).parent
_SOUND_RATE = 16_000
_REPORT = _FOLDER.parent / "report.h"


class LlamaCpp(BuiltRuntime[LlamaCppSpec]):
    """The runtime `llama.cpp`; implements `nas.measure.runtimes.base.Runtime`."""

    name = NAME
    quantisations = support.QUANTISATIONS
    spec_type = LlamaCppSpec
    variants = VARIANTS
    targets = ("aarch64-linux", "x86_64-linux")
    static_targets = targets
    runner_sources = (_FOLDER / "runner.c", _REPORT, _FOLDER / "media.h", _FOLDER / "media.cpp")
    profiler_sources = (_FOLDER / "profiler.c", *runner_sources)
    options = (
        *("--model", "--reference", "--prompt", "--gen", "--context", "--batch", "--ubatch", "--threads"),
        *("--kv", "--flash", "--mmap", "--repack", "--seed", "--vectors", "--gpu"),
    )
    image_options = (
        *("--mmproj", "--images", "--image-height", "--image-width", "--image-tokens", "--image-least"),
        *("--sounds", "--sound-samples"),
        "--reference-prompt",
    )
    disk_bytes = 600 << 20

    @property
    def writer_version(self) -> str:
        """Version of the GGUF writer, and of each block kind's tensors."""
        from nas.measure.runtimes.llama_cpp.writer import WRITER_VERSION

        versions = [f":{name}={KINDS[name].version}" for name in KINDS if KINDS[name].version]
        return WRITER_VERSION + "".join(sorted(versions))

    def supports(self, layout: Layout) -> Support:
        """Returns "patched" for layouts that no stock architecture holds."""
        return support.supports(layout)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes a GGUF file; trained weights need a build for its quantiser, random ones need none."""
        from nas.measure.runtimes.llama_cpp.writer import write_gguf

        arch = support.architecture(layout)
        written = write_gguf(layout, quantisation, weights, destination, recipe=recipe)
        artifact = self.artifact(written, layout, quantisation, weights, arch, patched=arch == support.PATCHED)
        if (tower := layout.tower) is None:
            return artifact
        if not isinstance(weights, RandomWeights):
            raise Unsupported("a trained tower has a file of its own: `nas family gguf` writes it")
        from nas.measure.runtimes.llama_cpp.projector import write_random_projector

        half, path = quantisation != "f32", projector_path(destination)
        beside = write_random_projector(tower, layout.d_model, weights.seed, path, half=half, recipe=recipe)
        projector = InputFile(**dict(beside.file), recipe=beside.recipe)
        frames = {"image_tokens": tower.tokens, "image_least": tower.least} if isinstance(tower, ImageTower) else {}
        return artifact.model_copy(update={"projector": projector, **frames})

    def export_trained(
        self,
        layout: Layout,
        quantisation: str,
        weights: Checkpoint,
        destination: Path,
        name: str,
        vocabulary: Vocabulary | None,
        context: int,
    ) -> Artifact:
        """Writes a GGUF file of trained weights that other programs can use.

        Args:
            layout: of the model.
            quantisation: also those that llama.cpp's quantiser makes of a float16 file.
            weights: of the model.
            destination: of the file.
            name: of the model.
            vocabulary: for text; None: the file knows token ids only.
            context: tokens that the model is meant for.
        """
        from nas.measure.runtimes.llama_cpp.binding import FILE_TYPES
        from nas.measure.runtimes.llama_cpp.release import write_file
        from nas.measure.runtimes.llama_cpp.writer import Released

        if quantisation not in FILE_TYPES:
            self.require_quantisation(quantisation)
        arch = support.architecture(layout)
        released = None if vocabulary is None else Released(name, None, vocabulary, context)
        written = write_file(layout, quantisation, weights, destination, released)
        return self.artifact(written, layout, quantisation, weights, arch, patched=arch == support.PATCHED)

    def require_quantisation(self, quantisation: str) -> None:
        """Raises `UnknownName` for what `export` does not write; parts may have one of their own: `q8_0+ffn:q4_0`."""
        support.stored_types(quantisation)

    def needs_patched(self, model: Path) -> bool:
        """Returns whether the architecture of a GGUF file is ours; raises InvalidInput where it is one of several."""
        from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile

        file = GgufFile.read(model)
        if (shards := len(file.files)) > 1:
            raise InvalidInput(f"is one of {shards} shards: merge them with llama-gguf-split --merge", where=str(model))
        return file.header.arch == support.PATCHED

    def bits_per_byte(self, model: Path, texts: Sequence[str], threads: int) -> float:
        """Returns bits per byte of `texts`, by llama.cpp on this machine."""
        from nas.measure.runtimes.llama_cpp.binding import bits_per_byte

        return bits_per_byte(self.find_build(patched=self.needs_patched(model)), model, texts, threads)

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
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
            **({"gpu": 1} if VULKAN_LIBRARY in runner.files else {}),
        }
        if workload.encodes:
            options["vectors"] = 1
        if workload.media and artifact.projector is not None and f"--{workload.media}" not in runner.options:
            command = self.build_command(runner.target, runner.patched, images=True)
            raise Unsupported(f"this runner reads no {workload.media}: run `{command}`")
        if workload.sounds and artifact.projector is not None:
            options |= {"sounds": workload.sounds, "sound-samples": round(workload.seconds * _SOUND_RATE)}
        if workload.images and artifact.projector is not None:
            sizes = {"height": workload.image_height, "width": workload.image_width, "tokens": artifact.image_tokens}
            sizes["least"] = min(artifact.image_least, artifact.image_tokens)
            options |= {"images": workload.images, **{f"image-{name}": size for name, size in sizes.items()}}
        return plan_run(artifact, runner, workload, deadline_s, options, reference)

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """Returns the profile that `profiler.c` printed; GGUF names the layers."""
        return read_profile(raw)

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """Compares logits: in this process, or of a static build by its runner; loads torch."""
        from nas.measure.runtimes.llama_cpp.gate import first_passed, rounds_choices, run_gate, run_runner_gate
        from nas.measure.runtimes.llama_cpp.oracle import Oracle
        from nas.measure.runtimes.runner import local_machine

        build = self.load(runner.build)
        oracle = Oracle(layout, quantisation, checkpoint, half_sums=build.spec.half_sums)
        if build.spec.static or build.spec.gpu:
            settled = rounds_choices(layout, quantisation)
            machine = local_machine(build.executable, build.runner.target)
            options = ("--gpu", "1") if build.spec.gpu else ()
            return first_passed(
                lambda seed: run_runner_gate(
                    layout, model, machine, oracle.exact, oracle.rounded, settled=settled, seed=seed, options=options
                )
            )
        return first_passed(lambda seed: run_gate(layout, model, build, oracle.exact, oracle.rounded, seed=seed))

    def rounded(self, layout: Layout, quantisation: str, checkpoint: Checkpoint) -> nn.Module:
        """Returns the model with the weights that the file has; loads torch."""
        from nas.measure.runtimes.llama_cpp.oracle import Oracle

        return Oracle(layout, quantisation, checkpoint).model

    def rounded_block(
        self, layout: Layout, block: Block, quantisation: str, weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the block with the values that the file has; loads torch."""
        from nas.measure.runtimes.llama_cpp.oracle import rounded_block

        return rounded_block(layout, block, quantisation, weights)

    def spec(self, request: BuildRequest) -> LlamaCppSpec:
        """Returns the inputs of a build; those for another machine are always static."""
        from nas.measure.runtimes.llama_cpp.compile import RUNNER_FLAGS, library_flags

        is_host = request.target == host_target()
        static = request.static or not is_host
        if static and request.tools:
            raise InvalidInput(f"{', '.join(TOOLS)} are built for {host_target()} only, with shared libraries")
        variant = self.variant_for(request.target, host_features() if is_host else None, request.variant)
        if request.images and VULKAN in variant.needs:
            raise InvalidInput("images and sounds are encoded on the processor alone: leave the variant out")
        if static and VULKAN in variant.needs:
            raise InvalidInput(f"{variant.name} loads the driver of the GPU: it is built with shared libraries only")
        compilers = [zig.COMPILER if static else find_compiler().version]
        if VULKAN in variant.needs:
            compilers.append(shader_compiler())
        return LlamaCppSpec(
            version=source.COMMIT,
            variant=variant.name,
            target=variant.target,
            flags=library_flags(variant, static=static, images=request.images),
            compiler="; ".join(compilers),
            runner=self.source_hash(self.runner_sources),
            sdist=source.SHA256,
            patches=patch_hashes() if request.patched else (),
            runner_flags=RUNNER_FLAGS[static],
            tools=_tools_hash() if request.tools else "",
            static=static,
        )

    def is_current(self, spec: LlamaCppSpec) -> bool:
        """Returns whether source, patches, flags and tools are today's, and of static builds the compiler."""
        from nas.measure.runtimes.llama_cpp.compile import RUNNER_FLAGS, library_flags

        flags = library_flags(variant_of(spec), static=spec.static, images=spec.images)
        inputs = (spec.sdist, spec.flags, spec.runner_flags) == (source.SHA256, flags, RUNNER_FLAGS[spec.static])
        if spec.static and spec.compiler != zig.COMPILER:
            return False
        return inputs and spec.patches in ((), patch_hashes()) and spec.tools in ("", _tools_hash())

    def compile(self, spec: LlamaCppSpec, work: Path, product: Path, log: Log) -> None:
        """Compiles llama.cpp; libraries of a build that differs only in our programs are copied."""
        from nas.measure.runtimes.llama_cpp.compile import compile_shared, compile_static, unpacked_source

        tree = unpacked_source(spec, work, log)
        if spec.static:
            compile_static(spec, tree, self.program(spec), work, product, log)
        else:
            programs = {"runner": spec.runner, "runner_flags": spec.runner_flags}
            copies = (build.folder for build in self.cached_builds() if build.spec.model_copy(update=programs) == spec)
            plain = self.folder / without_tools(spec).build_id if spec.tools else None
            compile_shared(spec, tree, self.program(spec), work, product, next(copies, plain), log)
        shutil.copy2(tree / "LICENSE", product / "LICENSE.llama.cpp")

    def smoke_models(self, spec: LlamaCppSpec, folder: Path, log: Log) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yields a model of stock blocks and, for a patched build, one of ours."""
        from nas.measure.runtimes.llama_cpp.compile import tiny_models

        return tiny_models(spec, folder)

    def doctor(self) -> Iterator[Finding]:
        """Checks for a compiler and a build for this machine, which a search needs."""

        def tools() -> str:
            find_build_tools()
            return find_compiler().version

        yield finding_of("compiler", tools)
        yield finding_of(NAME, lambda: f"build {self.find_build().runner.build[:12]}")

    def release(self, request: ReleaseRequest) -> Release:
        """Returns GGUF files with the tokenizer in each."""
        from nas.measure.runtimes.llama_cpp.release import release

        return release(self.writer_version, request)


def _tools_hash() -> str:
    return hashlib.sha256(TOOLS_SOURCE.read_bytes()).hexdigest()


LLAMA_CPP = LlamaCpp()
