"""Which layouts ExecuTorch carries, what their chains are, and what a workload may ask for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.plan import PlanFile, Runner
from nas.core.workload import Workload
from nas.measure.runtimes.base import Artifact
from nas.measure.runtimes.build_cache import write_manifest
from nas.measure.runtimes.executorch.chain import build_chain, require
from nas.measure.runtimes.executorch.compile import VERSION
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import LIBRARIES, ExecuTorchSpec

LFM2 = "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"


@pytest.mark.parametrize(
    "text",
    [
        LFM2,
        "d64 v100 ffn=swiglu:64 [C3*4]",
        "d128 v512 ffn=swiglu:352 [A8/4 C3&W4/2@8 A8/4(kv=0)+none C3+none ^1 -]",
        "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 M32 W4/2@32(sink=1) A4/2]",
        "d256 v512 ffn=moe:8x2:64(shared=2) [A8/4(canon=4)+relu2:512 W8/4@64(canon=4)]",
        "d256 v512 ffn=relu2:512 [C3 L4/64 L4/64(query=96)]",
    ],
)
def test_every_mix_is_carried(text: str) -> None:
    support = EXECUTORCH.supports(Layout.parse(text))
    assert support.verdict == "stock" and support.arch == "blocks"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("F", "cfc blocks: .* token by token"),
        ("R", "rtf blocks: .* companion form"),
        ("Y", "longconv blocks: .* caches"),
    ],
)
def test_kinds_without_a_program_are_refused_with_what_is_missing(text: str, missing: str) -> None:
    with pytest.raises(Unsupported, match=missing):
        require(Layout.parse(f"d64 v100 ffn=swiglu:64 [C3 {text}]"))


def test_groups_must_fit() -> None:
    support = EXECUTORCH.supports(Layout.parse("d160 v512 ffn=swiglu:40 [A4/2:20]"))
    assert not support
    assert [reason.split(" ")[0] for reason in support.reasons] == ["mixers.0.o.weight", "ffn.down.weight"]
    assert all("groups of 32" in reason for reason in support.reasons)


def test_programs_stand_once() -> None:
    chain = build_chain(Layout.parse(LFM2))
    assert [program.kind for program in chain.programs] == ["conv", "swiglu", "attention", "head"]
    assert len(chain.methods) == 33 and len(chain.steps) == 32 and len(chain.caches) == 6


def test_windows_sinks_and_rope_need_no_program_of_their_own() -> None:
    chain = build_chain(Layout.parse("d64 v64 ffn=swiglu:64 [A2/1 W2/1@8 W2/1@9(sink=1) A2/1(rope_theta=10)]"))
    assert [program.kind for program in chain.programs] == ["attention", "swiglu", "head"]
    assert [cache.window for cache in chain.caches] == [0, 8, 9, 0]


def test_positions_and_bounds_need_no_program_of_their_own() -> None:
    mixers = ("A2/1", "A2/1(rope_dim=16)", "W2/1@8(rope_factor=8)", "A2/1(rope_factor=8,rope_tokens=64,softcap=5)")
    chain = build_chain(Layout.parse(f"d64 v64 softcap=30 ffn=swiglu:64 [{' '.join(mixers)}]"))
    assert [program.kind for program in chain.programs] == ["attention", "swiglu", "head"]
    about = [step.attend.about for step in chain.steps if step.attend]
    assert [one.turned for one in about] == [0, 16, 0, 0] and [one.softcap for one in about] == [0, 0, 0, 5]
    assert about[2].divisors == (8.0,) * 16 and len(set(about[3].divisors)) > 1


def test_norms_are_part_of_programs() -> None:
    text = "d64 v64 norms={} ffn=geglu:64 [C3 A2/1(gate=1)]"
    names = {
        norms: [
            {one.source for one in program.constants if "_norm.weight" in one.source and "mixers" not in one.source}
            for program in build_chain(Layout.parse(text.format(norms))).programs
        ]
        for norms in ("behind", "both")
    }
    mixer, ffn, last = {"mixer_out_norm.weight"}, {"ffn_out_norm.weight"}, set[str]()
    assert names["behind"] == [mixer, ffn, mixer, last]
    mixer, ffn = mixer | {"mixer_norm.weight"}, ffn | {"ffn_norm.weight"}
    assert names["both"] == [mixer, ffn, mixer, last]


def test_shared_layers_run_the_same_methods() -> None:
    chain = build_chain(Layout.parse("d64 v64 ffn=swiglu:64 [C3 A2/1 ^0 ^1]"))
    assert [step.method for step in chain.steps] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [step.attend.cache for step in chain.steps if step.attend] == [0, 1], "each use has a cache of its own"


def test_experts_follow_their_router() -> None:
    chain = build_chain(Layout.parse("d64 v64 ffn=moe:3x2:32 [C3]"))
    assert [method.program.kind for method in chain.methods] == ["conv", "router", "expert", "expert", "expert", "head"]
    assert [method.expert for method in chain.methods] == [None, None, 0, 1, 2, None]


def artifact() -> Artifact:
    return Artifact(
        sha256="0" * 64,
        size=1,
        runtime="executorch",
        quantisation="8da4w",
        layout_id="x",
        arch="blocks",
        weights="random:0",
    )


def runner() -> Runner:
    files = {name: PlanFile(sha256="1" * 64, size=1) for name in ("runner", *LIBRARIES)}
    return Runner(runtime="executorch", build="b", target="x86_64-linux", files=files, main="runner")


def test_plan_hands_the_workload_on() -> None:
    plan = EXECUTORCH.plan(artifact(), runner(), Workload(prompt=100, gen=7, n_ubatch=64, threads=2), deadline_s=9)
    args = dict(zip(plan.args[::2], plan.args[1::2], strict=True))
    assert args["--batch"] == "64" and args["--context"] == "256" and args["--threads"] == "2"
    assert args["--model"] == "{model}" and plan.threads == 2


@pytest.mark.parametrize("change", [{"kv_type": "q8_0"}, {"flash_attn": False}, {"repack": False}])
def test_what_it_lacks_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        EXECUTORCH.plan(artifact(), runner(), Workload.model_validate(change), deadline_s=9)


def test_variants() -> None:
    assert EXECUTORCH.variant_for("x86_64-linux", {"avx2", "fma", "f16c", "bmi2", "sse4_2"}).name == "avx2"
    assert EXECUTORCH.variant_for("x86_64-linux", {"sse4_2"}).name == "sse42"
    with pytest.raises(Unsupported):
        EXECUTORCH.variant_for("x86_64-linux", set())


def test_missing_build_names_its_command() -> None:
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build executorch --target pdp11-unix"):
        EXECUTORCH.find_build("pdp11-unix", ())


def test_another_machines_runner_needs_no_compiler_of_this_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All it asks this machine for is pip."""
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(sys.modules["importlib.util"], "find_spec", lambda name: None)
    with pytest.raises(InfrastructureFailed, match=f"no pip to fetch executorch {VERSION} with"):
        EXECUTORCH.build("aarch64-linux", log=print)


def test_target_without_a_wheel_is_refused() -> None:
    with pytest.raises(UnknownName, match="aarch64-linux"):
        EXECUTORCH.build("riscv64-linux", log=print)


def test_wheels_are_of_the_pinned_version() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"executorch=={VERSION}" in pyproject["project"]["optional-dependencies"]["executorch"]


def test_a_device_with_an_older_c_library_is_told_before_anything_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    folder = tmp_path / "runtimes" / "executorch" / "builds" / "b"
    folder.mkdir(parents=True)
    spec = ExecuTorchSpec(
        version=VERSION,
        library_hashes=(),
        runner=EXECUTORCH.source_hash(EXECUTORCH.runner_sources),
        variant="sse42",
        target="x86_64-linux",
        flags=(),
        compiler="c++",
    )
    for name in spec.files:
        (folder / name).write_bytes(b"\0GLIBC_2.17\0GLIBC_2.34\0")
    write_manifest(folder, "executorch", spec)
    assert EXECUTORCH.find_build("x86_64-linux", ["sse4_2"], libc="glibc 2.34").runner.build == spec.build_id
    assert EXECUTORCH.runner("x86_64-linux", ["sse4_2"]).build == spec.build_id
    for libc in ("glibc 2.31", "bionic"):
        with pytest.raises(InfrastructureFailed, match=rf"need glibc 2\.34 or newer, and the device has {libc}"):
            EXECUTORCH.runner("x86_64-linux", ["sse4_2"], libc=libc)


def test_a_build_for_another_machine_of_an_earlier_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.measure.runtimes.executorch.runtime.host_target", lambda: "x86_64-linux")
    spec = ExecuTorchSpec(
        version=VERSION,
        library_hashes=(),
        runner="r",
        variant="armv8",
        target="aarch64-linux",
        flags=(),
        compiler="zig",
    )
    assert EXECUTORCH.is_current(spec)
    assert not EXECUTORCH.is_current(spec.model_copy(update={"version": "1.4.0"}))


def test_there_is_one_build() -> None:
    with pytest.raises(InvalidInput, match="one build"):
        EXECUTORCH.build(log=print, patched=True)
    with pytest.raises(InvalidInput, match="one build"):
        EXECUTORCH.build(log=print, static=True)


def test_support_and_plans_load_no_torch() -> None:
    code = (
        "import sys; from nas.core.layout import Layout; from nas.measure.runtimes import RUNTIMES;"
        "assert RUNTIMES['executorch'].supports(Layout.parse('d64 v64 ffn=swiglu:64 [C3]'));"
        "sys.exit('torch' in sys.modules or 'executorch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_norms_behind_experts_are_refused() -> None:
    """The runner adds them to the stream one by one."""
    support = EXECUTORCH.supports(Layout.parse("d64 v64 norms=both ffn=moe:4x2:32 [A2/1]"))
    assert not support and "moe blocks with norms behind them" in support.reasons[0]
