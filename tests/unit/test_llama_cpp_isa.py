"""The instruction set is chosen from what the processor says it has, never beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.core.errors import Unsupported
from nas.measure.runtimes.llama_cpp.compile import library_flags
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import VARIANTS, instruction_flags
from nas.measure.runtimes.toolchain import host_features

HASWELL = "sse4_2 avx avx2 fma f16c bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512cd avx512bw avx512dq avx512vl"
SAPPHIRE_RAPIDS = f"{SKYLAKE_X} avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"


ARMV8 = "fp asimd evtstrm aes pmull sha1 sha2 crc32"
PIXEL_6 = f"{ARMV8} atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
SNAPDRAGON_8_GEN_2 = (  # of Armv9, and without its SVE
    f"{ARMV8} atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 asimdfhm dit "
    "uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint i8mm bf16 bti"
)
PIXEL_9 = (
    f"{ARMV8} atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit "
    "uscat ilrcpc flagm ssbs sb paca pacg dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm "
    "svebf16 i8mm bf16 dgh bti ecv afp wfxt"
)
"""Lines of /proc/cpuinfo that owners of these phones posted."""


@pytest.mark.parametrize(
    ("target", "features", "variant"),
    [
        ("x86_64-linux", "sse4_2 avx", "sse42"),
        ("x86_64-linux", HASWELL, "avx2"),
        ("x86_64-linux", SKYLAKE_X, "avx512"),
        ("x86_64-linux", f"{SKYLAKE_X} avx512vbmi avx512_vnni", "avx512-vnni"),
        ("x86_64-linux", SAPPHIRE_RAPIDS, "avx512-bf16"),
        ("aarch64-linux", "fp asimd fphp asimdhp asimddp", "armv8.2"),
        ("aarch64-linux", "fp asimd", "armv8"),
        ("aarch64-linux", ARMV8, "armv8"),
        ("aarch64-linux", PIXEL_6, "armv8.2"),
        ("aarch64-linux", SNAPDRAGON_8_GEN_2, "armv8.2-i8mm"),
        ("aarch64-linux", PIXEL_9, "armv8.2-sve2"),
    ],
)
def test_best_variant(target: str, features: str, variant: str) -> None:
    assert LLAMA_CPP.variant_for(target, features.split()).name == variant


def test_what_is_built_for_unknown_machines_runs_on_most() -> None:
    assert [LLAMA_CPP.variant_for(target, None).name for target in ("aarch64-linux", "x86_64-linux")] == [
        "armv8.2",
        "avx2",
    ]


def test_arm_variants_add_what_they_need_and_nothing_of_a_later_architecture() -> None:
    variants = {variant.name: variant for variant in VARIANTS if variant.target == "aarch64-linux"}
    assert list(variants) == ["armv8.2-sve2", "armv8.2-i8mm", "armv8.2", "armv8"]
    for name, added in (("armv8.2-sve2", "+i8mm+sve2"), ("armv8.2-i8mm", "+i8mm")):
        variant = variants[name]
        assert variant.march == "armv8.2-a+dotprod+fp16" + added
        assert variant.mcpu == "generic+v8_2a+dotprod+fullfp16" + added
        assert "i8mm" in variant.needs and ("sve" in variant.needs) == ("sve" in added)
        # On an Arm machine as an option of ggml, elsewhere in zig's description of the processor.
        assert f"-DGGML_CPU_ARM_ARCH={variant.march}" in library_flags(variant, static=False)
        assert not any("ARM_ARCH" in flag for flag in library_flags(variant, static=True))


def test_too_old_processor_is_told_what_it_lacks() -> None:
    with pytest.raises(Unsupported, match="lacks sse4_2"):
        LLAMA_CPP.variant_for("x86_64-linux", ["sse2"])


def test_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="aarch64-linux, x86_64-linux"):
        LLAMA_CPP.variant_for("riscv64-linux", [])


def test_amx_is_never_on() -> None:
    for variant in VARIANTS:
        assert not any("AMX" in flag and flag.endswith("=ON") for flag in instruction_flags(variant))


def test_features_are_those_of_every_core(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx avx512f\n\nprocessor : 1\nflags\t\t: fpu avx\n")
    assert host_features(cpuinfo) == {"fpu", "avx"}


def test_arm_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd05\n")
    assert host_features(cpuinfo) == {"fp", "asimd", "asimddp"}
