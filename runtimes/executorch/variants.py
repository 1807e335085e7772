"""Instruction sets and inputs of builds of the ExecuTorch runner."""

from __future__ import annotations

from nas.measure.runtimes import build_cache
from nas.measure.runtimes.build_cache import BuildSpec, Variant

NAME = "executorch"
LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_backend_xnnpack.so",
    "libexecutorch_threadpool.so",
)
"""Libraries that a runner loads from its own folder; none of them needs torch."""

VARIANTS = (
    Variant("avx2", "x86_64-linux", frozenset({"avx2", "fma", "f16c", "bmi2"}), "x86-64-v3"),
    Variant("sse42", "x86_64-linux", frozenset({"sse4_2"}), "x86-64-v2"),
    Variant(
        "armv8.2", "aarch64-linux", frozenset({"asimd", "fphp", "asimdhp"}), "armv8.2-a+fp16", "generic+v8_2a+fullfp16"
    ),
    Variant("armv8", "aarch64-linux", frozenset({"asimd"}), "armv8-a", "generic"),
)
"""Instruction sets of our own kernels, best first; XNNPACK chooses its kernels when it runs."""


class ExecuTorchSpec(BuildSpec):
    """All inputs of a build of the ExecuTorch runner.

    Args:
        library_hashes: SHA-256 of each of `LIBRARIES`, or of the wheel that they come in.
    """

    libraries = LIBRARIES

    library_hashes: tuple[str, ...]


Build = build_cache.CachedBuild[ExecuTorchSpec]
