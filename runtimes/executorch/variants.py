"""Available builds of the ExecuTorch runner, and their instruction sets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.runtimes import build_cache as builds
from nas.measure.runtimes.build_cache import BuildStore, Processor, variant_named
from nas.measure.runtimes.toolchain import host_target

PROFILER_SOURCE = Path(__file__).with_name("profiler.cpp")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("runner.cpp", "attention.h", "recipe.h", "recurrence.h"))
NAME = "executorch"
LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_backend_xnnpack.so",
    "libexecutorch_threadpool.so",
)
"""Libraries that a runner loads from its own folder; none of them needs torch."""


@dataclass(frozen=True, slots=True)
class Variant(builds.Variant):
    """One instruction set to compile our attention kernel for; XNNPACK chooses its own kernels when it runs.

    Args:
        march: the compiler's `-march`, for builds on such a machine.
        mcpu: the processor in zig's words, for builds elsewhere.
    """

    march: str
    mcpu: str = ""


VARIANTS = (
    Variant("avx2", "x86_64-linux", frozenset({"avx2", "fma", "f16c", "bmi2"}), "x86-64-v3"),
    Variant("sse42", "x86_64-linux", frozenset({"sse4_2"}), "x86-64-v2"),
    Variant(
        "armv8.2", "aarch64-linux", frozenset({"asimd", "fphp", "asimdhp"}), "armv8.2-a+fp16", "generic+v8_2a+fullfp16"
    ),
    Variant("armv8", "aarch64-linux", frozenset({"asimd"}), "armv8-a", "generic"),
)
"""Best first."""


class BuildDetails(builds.BuildDetails):
    """The inputs of a build; its canonical hash is the build id.

    Args:
        executorch: version.
        libraries: hashes of what the runner loads, or of the archive that it comes in.
        runner: hash of its sources.
        flags: of the compiler.
        compiler: its version.
    """

    executorch: str
    libraries: tuple[str, ...]
    runner: str
    flags: tuple[str, ...]
    compiler: str

    @property
    def files(self) -> tuple[str, ...]:
        """The runner and what it loads."""
        return ("runner", *LIBRARIES)

    @property
    def runner_hash(self) -> str:
        """SHA-256 of all sources of the runner."""
        return self.runner


Build = builds.Build[BuildDetails]

OPTIONS = ("--model", "--prompt", "--gen", "--context", "--batch", "--threads", "--kv", "--mmap", "--seed")

BUILDS = BuildStore(NAME, "ExecuTorch runner", f"{NAME}/builds", BuildDetails, VARIANTS, SOURCES, OPTIONS)

PROFILERS = replace(BUILDS, sources=(PROFILER_SOURCE, *SOURCES))
"""Builds whose runner is the profiler, which includes runner.cpp. `BUILDS.all` ignores them: their source differs."""


def variant_for(target: str, features: Collection[str] | None, name: str | None = None) -> Variant:
    """Returns the best variant of a target, or the one called `name`.

    Args:
        target: ABI.
        features: of the processor; `None`: whichever the best variant needs.
        name: wanted; `None`: the best that fits.

    Raises:
        UnknownName: no variant has that name.
        Unsupported: none fits.
    """
    if name is not None:
        return variant_named(name, target, VARIANTS)
    for variant in VARIANTS:
        if variant.target == target and (features is None or variant.needs <= set(features)):
            return variant
    raise Unsupported(f"the ExecuTorch runner has no build for such a {target} processor")


def find_build(target: str | None = None, features: Collection[str] | None = None, *, libc: str | None = None) -> Build:
    """Returns the best available build that the machine can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's, or for another ABI those that the least
            of its variants needs.
        libc: the machine's C library, as `Device.libc`; `None`: unknown.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one, or what the device lacks.
    """
    processor = Processor.of(target, features, VARIANTS)
    fitting = [build for build in BUILDS.all() if processor.runs(build.details, VARIANTS)]
    if (found := processor.first(fitting, libc)) is not None:
        return found
    if fitting:
        raise InfrastructureFailed(
            f"the ExecuTorch runner for {processor.target} needs glibc {fitting[0].glibc} or newer, and the device has "
            f"{libc}; it loads ExecuTorch's own libraries, so there is none without that: update the device's system, "
            "or measure it with llama.cpp"
        )
    option = "" if processor.target == host_target() else f" --target {processor.target}"
    raise InfrastructureFailed(
        f"no ExecuTorch runner for {processor.described} here: run `nas runtime build {NAME}{option}`"
    )
