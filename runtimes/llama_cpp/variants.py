"""Instruction sets and inputs of builds of llama.cpp.

Instruction sets are explicit, never "native": a build is the same wherever it is made. AMX is never used: with gcc 12
the tile configuration that ggml's kernels load is not stored in time, and the process dies on the first matrix product.

Arm's extensions are added to Armv8.2 one by one, not taken from a later version of the architecture: Snapdragon's cores
of Armv9 hide SVE from programs, and a compiler told "armv9-a" would use it.
"""

from __future__ import annotations

from pathlib import Path

from nas.core.device import GPU_FEATURES
from nas.measure.runtimes import build_cache
from nas.measure.runtimes.build_cache import BuildSpec, Variant

NAME = "llama.cpp"
LIBRARIES = ("libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so")
"""Libraries that a runner loads from its own folder; a static one loads nothing."""
IMAGES_LIBRARY = "libmtmd.so"
"""The same of a build that reads images."""
IMAGES = "-DLLAMA_BUILD_MTMD=ON"
"""Option of cmake with which a build reads images."""
VULKAN_LIBRARY = "libggml-vulkan.so"
"""The same of a build for Vulkan."""
TOOLS = ("llama-bench", "llama-completion", "llama-imatrix", "llama-quantize")
"""llama.cpp's own programs. Its `llama-cli` is a client of the server today; `llama-completion` generates text."""
TOOLS_SOURCE = Path(__file__).parent / "tools" / "CMakeLists.txt"

_AVX2_FEATURES = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"})
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_VNNI_FEATURES = _AVX512_FEATURES | {"avx512vbmi", "avx512_vnni"}
_AVX2_CPU = "x86_64+sse4_2+avx+avx2+fma+f16c+bmi2"
_AVX512_CPU = f"{_AVX2_CPU}+avx512f+avx512cd+avx512bw+avx512dq+avx512vl"
_VNNI_CPU = f"{_AVX512_CPU}+avx512vbmi+avx512vnni"
_ARM_FEATURES = frozenset({"asimddp", "fphp", "asimdhp"})
_ARM_ARCH = "armv8.2-a+dotprod+fp16"
_ARM_CPU = "generic+v8_2a+dotprod+fullfp16"

(VULKAN,) = GPU_FEATURES

VARIANTS = (
    Variant("avx2-vulkan", "x86_64-linux", _AVX2_FEATURES | {VULKAN}, common=False),
    Variant(
        "avx512-bf16", "x86_64-linux", _VNNI_FEATURES | {"avx512_bf16"}, mcpu=f"{_VNNI_CPU}+avx512bf16", common=False
    ),
    Variant("avx512-vnni", "x86_64-linux", _VNNI_FEATURES, mcpu=_VNNI_CPU, common=False),
    Variant("avx512", "x86_64-linux", _AVX512_FEATURES, mcpu=_AVX512_CPU, common=False),
    Variant("avx2", "x86_64-linux", _AVX2_FEATURES, mcpu=_AVX2_CPU),
    Variant("sse42", "x86_64-linux", frozenset({"sse4_2"}), mcpu="x86_64+sse4_2"),
    Variant(
        "armv8.2-sve2",
        "aarch64-linux",
        _ARM_FEATURES | {"i8mm", "sve", "sve2"},
        march=f"{_ARM_ARCH}+i8mm+sve2",
        mcpu=f"{_ARM_CPU}+i8mm+sve2",
        common=False,
    ),
    Variant(
        "armv8.2-i8mm",
        "aarch64-linux",
        _ARM_FEATURES | {"i8mm"},
        march=f"{_ARM_ARCH}+i8mm",
        mcpu=f"{_ARM_CPU}+i8mm",
        common=False,
    ),
    Variant("armv8.2", "aarch64-linux", _ARM_FEATURES, march=_ARM_ARCH, mcpu=_ARM_CPU),
    Variant("armv8", "aarch64-linux", frozenset({"asimd"}), march="armv8-a", mcpu="generic"),
)
"""Best first."""

_GGML_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
_GGML_VNNI = (*_GGML_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
_GGML_OPTIONS = {
    "avx512-bf16": (*_GGML_VNNI, "AVX512_BF16"),
    "avx512-vnni": _GGML_VNNI,
    "avx512": (*_GGML_AVX2, "AVX512"),
    "avx2": _GGML_AVX2,
    "avx2-vulkan": _GGML_AVX2,
    "sse42": ("SSE42",),
}
"""Variant of x86 -> ggml's cmake options that are on."""
_GGML_X86 = (
    *(*_GGML_AVX2[:3], "AVX_VNNI", *_GGML_AVX2[3:], *_GGML_VNNI[6:]),
    *("AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16"),
)
"""All of ggml's options of x86."""


def instruction_flags(variant: Variant, *, cross: bool = False) -> list[str]:
    """Returns every instruction-set option of ggml, set explicitly; zig has an option of its own for Arm's."""
    if variant.march:
        return [] if cross else [f"-DGGML_CPU_ARM_ARCH={variant.march}"]
    enabled = _GGML_OPTIONS[variant.name]
    return [f"-DGGML_{option}={'ON' if option in enabled else 'OFF'}" for option in _GGML_X86]


class LlamaCppSpec(BuildSpec):
    """All inputs of a build of llama.cpp.

    Args:
        sdist: SHA-256 of the source.
        runner_flags: of the runner's compiler and linker, apart from paths.
    """

    libraries = LIBRARIES

    sdist: str
    runner_flags: tuple[tuple[str, ...], ...]

    @property
    def gpu(self) -> bool:
        """Whether its runner computes on a GPU."""
        return any(VULKAN in variant.needs for variant in VARIANTS if variant.name == self.variant)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that a device needs."""
        libraries = (VULKAN_LIBRARY,) * self.gpu + (IMAGES_LIBRARY,) * (self.images and not self.static)
        return (*super().files, *libraries)

    @property
    def images(self) -> bool:
        return IMAGES in self.flags

    @property
    def half_sums(self) -> int:
        """In how many lanes float16 products are added in float16: by GPUs, and Arm's processors with "asimdhp"."""
        return 1 if self.gpu else 32 if "asimdhp" in variant_of(self).needs else 0


def variant_of(spec: LlamaCppSpec) -> Variant:
    """Returns the instruction set of a build."""
    return next(variant for variant in VARIANTS if (variant.name, variant.target) == (spec.variant, spec.target))


Build = build_cache.CachedBuild[LlamaCppSpec]
