"""The instruction set is chosen from what the processor says it has, never beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.core.errors import Unsupported
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import VARIANTS, instruction_flags
from nas.measure.runtimes.toolchain import host_features

HASWELL = "sse4_2 avx avx2 fma f16c bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512cd avx512bw avx512dq avx512vl"
SAPPHIRE_RAPIDS = f"{SKYLAKE_X} avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"


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
    ],
)
def test_best_variant(target: str, features: str, variant: str) -> None:
    assert LLAMA_CPP.variant_for(target, features.split()).name == variant


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
