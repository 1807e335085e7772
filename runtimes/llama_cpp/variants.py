"""Available builds of llama.cpp, and their instruction sets.

Instruction sets are explicit, never "native": a build is the same wherever it is made. AMX is left out on purpose: with
gcc 12 the tile configuration that ggml's kernels load is not stored in time, and the process dies on the first matrix
product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.runtimes import build_cache as builds
from nas.measure.runtimes.build_cache import BuildStore, Processor, baseline
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.toolchain import host_target

NAME = "llama.cpp"
RUNNER_SOURCE = Path(__file__).with_name("runner.c")
PROFILER_SOURCE = Path(__file__).with_name("profiler.c")
LIBRARIES = ("libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so")
"""Libraries that a runner loads from its own folder; a static one, for other machines, loads nothing."""
TOOLS = ("llama-bench", "llama-completion", "llama-quantize")
"""llama.cpp's own programs. Its `llama-cli` has become a client of the server, `llama-completion` is what that was."""
TOOLS_SOURCE = Path(__file__).with_name("tools")
"""The folder of their CMakeLists.txt."""

_X86_OPTIONS = (
    "SSE42", "AVX", "AVX2", "AVX_VNNI", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16",
    "AMX_TILE", "AMX_INT8", "AMX_BF16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant(builds.Variant):
    """One instruction set to build for.

    Args:
        options: ggml's cmake options that are on (x86).
        march: `-march` value (ARM).
        mcpu: the processor in zig's words.
    """

    options: tuple[str, ...] = ()
    march: str = ""
    mcpu: str = ""

    def cmake_flags(self, *, cross: bool = False) -> list[str]:
        """Returns every instruction-set option of ggml, set explicitly; zig has an option of its own for Arm's."""
        if self.march:
            return [] if cross else [f"-DGGML_CPU_ARM_ARCH={self.march}"]
        return [f"-DGGML_{option}={'ON' if option in self.options else 'OFF'}" for option in _X86_OPTIONS]


_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
_NEEDS_AVX2 = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"})
_NEEDS_AVX512 = _NEEDS_AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_NEEDS_VNNI = _NEEDS_AVX512 | {"avx512vbmi", "avx512_vnni"}
_ZIG_AVX2 = "x86_64+sse4_2+avx+avx2+fma+f16c+bmi2"
_ZIG_AVX512 = f"{_ZIG_AVX2}+avx512f+avx512cd+avx512bw+avx512dq+avx512vl"
_ZIG_VNNI = f"{_ZIG_AVX512}+avx512vbmi+avx512vnni"

VARIANTS: tuple[Variant, ...] = (
    Variant(
        "avx512-bf16",
        "x86_64-linux",
        _NEEDS_VNNI | {"avx512_bf16"},
        (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
        mcpu=f"{_ZIG_VNNI}+avx512bf16",
    ),
    Variant(
        "avx512-vnni",
        "x86_64-linux",
        _NEEDS_VNNI,
        (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI"),
        mcpu=_ZIG_VNNI,
    ),
    Variant("avx512", "x86_64-linux", _NEEDS_AVX512, (*_AVX2, "AVX512"), mcpu=_ZIG_AVX512),
    Variant("avx2", "x86_64-linux", _NEEDS_AVX2, _AVX2, mcpu=_ZIG_AVX2),
    Variant("sse42", "x86_64-linux", frozenset({"sse4_2"}), ("SSE42",), mcpu="x86_64+sse4_2"),
    Variant(
        "armv8.2",
        "aarch64-linux",
        frozenset({"asimddp", "fphp", "asimdhp"}),
        march="armv8.2-a+dotprod+fp16",
        mcpu="generic+v8_2a+dotprod+fullfp16",
    ),
    Variant("armv8", "aarch64-linux", frozenset({"asimd"}), march="armv8-a", mcpu="generic"),
)
"""Best first."""


_COMPILED = ("-std=c11", "-O2", "-Wall", "-Wextra")
_SHARED = ("-lllama", "-lggml", "-lggml-cpu", "-lggml-base", "-lm", "-Wl,-rpath,$ORIGIN")
_FIRST_RUNNER_FLAGS: dict[bool, tuple[tuple[str, ...], tuple[str, ...]]] = {
    False: (_COMPILED, _SHARED),
    True: (_COMPILED, ("-static", "-s")),
}
"""The flags of builds whose details have none; they never change."""

RUNNER_FLAGS = {**_FIRST_RUNNER_FLAGS}
"""Whether a build is static -> options of the runner's compiler and linker, apart from paths."""


def recorded_runner_flags(*, static: bool) -> tuple[tuple[str, ...], ...]:
    """Returns the runner's flags as the details of a build hold them: none where they are the first ones."""
    flags = RUNNER_FLAGS[static]
    return () if flags == _FIRST_RUNNER_FLAGS[static] else flags


class BuildDetails(builds.BuildDetails):
    """The inputs of a build; its canonical hash is the build id.

    A build with tools is one without, and the tools linked to its libraries.
    """

    sdist: str
    patches: tuple[str, ...] = ()
    runner_c: str
    flags: tuple[str, ...]
    compiler: str
    tools: bool
    tools_cmake: str | None = Field(None, exclude_if=lambda value: value is None)
    static: bool = False
    runner_flags: tuple[tuple[str, ...], ...] = Field((), exclude_if=lambda flags: not flags)

    @property
    def files(self) -> tuple[str, ...]:
        """The runner and what it loads."""
        return ("runner",) if self.static else ("runner", *LIBRARIES)

    @property
    def runner_hash(self) -> str:
        """SHA-256 of runner.c; of a profiler, of profiler.c and runner.c."""
        return self.runner_c

    @property
    def preference(self) -> tuple[bool, ...]:
        """Sorts static builds and those with tools last within an instruction set."""
        return self.static, self.tools

    @property
    def is_patched(self) -> bool:
        """Whether it has our architecture."""
        return bool(self.patches)

    @property
    def needs_libc(self) -> bool:
        """Static builds bring their own."""
        return not self.static

    @property
    def half_sums(self) -> bool:
        """Whether the processors it is for add up float16 products in float16, as Arm's with "asimdhp" do."""
        return any("asimdhp" in one.needs for one in VARIANTS if (one.name, one.target) == (self.variant, self.target))


Build = builds.Build[BuildDetails]


def tools_hash() -> str:
    """Returns the SHA-256 of what the tools are built by."""
    return hashlib.sha256((TOOLS_SOURCE / "CMakeLists.txt").read_bytes()).hexdigest()


def _is_known(details: BuildDetails) -> bool:
    flags = recorded_runner_flags(static=details.static)
    tools = tools_hash() if details.tools else None
    inputs = (details.sdist, details.runner_flags, details.tools_cmake)
    return inputs == (source.SHA256, flags, tools) and details.patches in ((), patch_hashes())


OPTIONS = (
    *("--model", "--prompt", "--gen", "--context", "--batch", "--ubatch", "--threads"),
    *("--kv", "--flash", "--mmap", "--repack", "--seed"),
)

BUILDS = BuildStore(NAME, "llama.cpp build", NAME, BuildDetails, VARIANTS, (RUNNER_SOURCE,), OPTIONS, _is_known)

PROFILERS = replace(BUILDS, sources=(PROFILER_SOURCE, RUNNER_SOURCE))
"""Builds whose runner is the profiler, which includes runner.c. `BUILDS.all` ignores them: their source differs."""


def best_variant(target: str, features: Collection[str]) -> Variant:
    """Returns the best variant that a processor with these features can run.

    Raises:
        Unsupported: there is none.
    """
    for variant in VARIANTS:
        if variant.target == target and variant.needs <= set(features):
            return variant
    known = sorted({variant.target for variant in VARIANTS})
    if target not in known:
        raise Unsupported(f"llama.cpp is not built for {target!r}; valid: {', '.join(known)}")
    raise Unsupported(f"this {target} processor lacks {', '.join(sorted(baseline(VARIANTS, target) - set(features)))}")


def find_build(
    target: str | None = None,
    features: Collection[str] | None = None,
    *,
    patched: bool | None = False,
    tools: bool = False,
    libc: str | None = None,
) -> Build:
    """Returns the best available build that the machine can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's, for use here, of which static builds are
            none; or for another ABI those of its `baseline`.
        patched: whether it carries our patches; `None`: either.
        tools: whether it must have `TOOLS`.
        libc: the machine's C library, as `Device.libc`; `None`: unknown.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one.
    """
    processor = Processor.of(target, features, VARIANTS)

    def fits(build: Build) -> bool:
        about = build.details
        runs = processor.runs(about, VARIANTS) and not (processor.here and about.static)
        return runs and patched in (None, build.runner.patched) and (about.tools or not tools)

    fitting = [build for build in BUILDS.all() if fits(build)]
    if (found := processor.first(fitting, libc)) is not None:
        return found
    target, kind = processor.target, "patched llama.cpp" if patched else "llama.cpp"
    if fitting:
        static = build_command(target, bool(patched), fitting[0].variant, static=True)
        raise InfrastructureFailed(
            f"the {kind} builds here for {target} need glibc {fitting[0].glibc} or newer, and the device has "
            f"{libc}: run `{static}` for one that needs none"
        )
    command = build_command(target, bool(patched), _oldest(target) if processor.any_of_kind else None)
    raise InfrastructureFailed(f"no {kind} build for {processor.described} here: run `{command}`")


def build_command(target: str, patched: bool, variant: str | None = None, *, static: bool = False) -> str:
    """Returns the command that makes such a build here."""
    options = " --patched" * patched + ("" if target == host_target() else f" --target {target}")
    options += " --static" * (static and target == host_target()) + (f" --variant {variant}" if variant else "")
    return f"nas runtime build llama.cpp{options}"


def _oldest(target: str) -> str:
    """Returns the variant that runs on every processor of a target."""
    return next(
        variant.name for variant in VARIANTS if (variant.target, variant.needs) == (target, baseline(VARIANTS, target))
    )
