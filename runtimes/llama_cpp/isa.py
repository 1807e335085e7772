"""Explicit instruction sets to build for, never "native": a build is the same wherever it is made.

AMX is left out on purpose: with gcc 12 the tile configuration that ggml's kernels load is not stored in time, and the
process dies on the first matrix product.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nas.core.errors import UnknownName, Unsupported

_X86_OPTIONS = (
    "SSE42", "AVX", "AVX2", "AVX_VNNI", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16",
    "AMX_TILE", "AMX_INT8", "AMX_BF16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set to build for.

    Args:
        name: shown to people, part of the build id.
        target: ABI.
        needs: CPU features, by the kernel's names in /proc/cpuinfo, without which a build would die of SIGILL.
        options: ggml's cmake options that are on (x86).
        march: `-march` value (ARM).
        mcpu: the processor in zig's words.
    """

    name: str
    target: str
    needs: frozenset[str]
    options: tuple[str, ...] = ()
    march: str = ""
    mcpu: str = ""

    def cmake_flags(self, *, cross: bool = False) -> list[str]:
        """Every instruction-set option of ggml, each said out loud; zig is told of Arm's by its own option."""
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


def variant_called(name: str, target: str) -> Variant:
    """The variant of that name for a target.

    Raises:
        UnknownName: there is none.
    """
    known = {variant.name: variant for variant in VARIANTS if variant.target == target}
    if name not in known:
        raise UnknownName(f"instruction set of {target}", name, known)
    return known[name]


def baseline(target: str) -> frozenset[str]:
    """The CPU features that every processor of a target has which can run a build; none for an unknown target."""
    needs = [variant.needs for variant in VARIANTS if variant.target == target]
    return min(needs, key=len, default=frozenset())


def best_variant(target: str, features: Collection[str]) -> Variant:
    """The best variant that a processor with these features can run.

    Raises:
        Unsupported: there is none.
    """
    for variant in VARIANTS:
        if variant.target == target and variant.needs <= set(features):
            return variant
    known = sorted({variant.target for variant in VARIANTS})
    if target not in known:
        raise Unsupported(f"llama.cpp is not built for {target!r}; valid: {', '.join(known)}")
    raise Unsupported(f"this {target} processor lacks {', '.join(sorted(baseline(target) - set(features)))}")
