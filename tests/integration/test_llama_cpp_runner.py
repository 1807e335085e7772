"""The real runner on real files: the contract, every workload option, and how its failures are reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import RawRun
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights, Runtime
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import host_target
from nas.testing.run_plan import run_plan
from nas.testing.runtime_contract import RuntimeContract
from tests.support.turns import assert_neither_outlives_the_other

TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]")


class TestLlamaCpp(RuntimeContract):
    target = host_target()

    @pytest.fixture
    def runtime(self, llama_build: Build) -> Runtime:
        return LLAMA_CPP

    @pytest.fixture
    def layout(self) -> Layout:
        return TINY

    @pytest.fixture
    def refused(self) -> Layout:
        return Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2&W4/2@16]")


@pytest.fixture(scope="module")
def model(llama_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    LLAMA_CPP.export(TINY, "q4_0", RandomWeights(), path)
    return path


def measure(llama_build: Build, model: Path, workload: Workload, quantisation: str = "q4_0") -> Sample:
    artifact = LLAMA_CPP.export(TINY, quantisation, RandomWeights(), model)
    plan = LLAMA_CPP.plan(artifact, llama_build.runner, workload, deadline_s=60)
    return LLAMA_CPP.parse(run_plan(plan, llama_build.folder, {"model": model}))


def run(llama_build: Build, *args: object, limit_mb: int | None = None) -> RawRun:
    """The runner by hand; `limit_mb` caps its address space."""
    argv = [str(llama_build.executable), *map(str, args)]
    if limit_mb:
        argv = ["prlimit", f"--as={limit_mb << 20}", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return RawRun(
        exit_code=done.returncode, stdout=done.stdout, stderr_tail=done.stderr[-4096:], wall_s=3600, started_at=0
    )


@pytest.mark.parametrize(
    "workload",
    [
        Workload(prompt=100, gen=7, n_batch=32, n_ubatch=16),
        Workload(prompt=100, gen=7, n_batch=6, n_ubatch=6),
        Workload(prompt=100, gen=7, flash_attn=False),
        Workload(prompt=100, gen=7, kv_type="q8_0"),
        Workload(prompt=100, gen=7, mmap=True, repack=False),
        Workload(prompt=100, gen=7, threads=2, context=4096),
    ],
)
def test_every_workload_option_runs(llama_build: Build, tmp_path: Path, workload: Workload) -> None:
    sample = measure(llama_build, tmp_path / "m.gguf", workload)
    assert len(sample.decode_ns) == 7 and sample.decode_cpu_ns is not None and len(sample.decode_cpu_ns) == 7


def test_memory_grows_with_the_window_and_is_told_by_phase(llama_build: Build, tmp_path: Path) -> None:
    small = measure(llama_build, tmp_path / "m.gguf", Workload(prompt=64, gen=4))
    large = measure(llama_build, tmp_path / "m.gguf", Workload(prompt=64, gen=4, context=65536))
    cache_mb = TINY.kv_bytes(65536 - 256) / 2**20
    assert large.peak_rss_mb - small.peak_rss_mb == pytest.approx(cache_mb, rel=0.3)
    for sample in (small, large):
        if sample.prefill_rss_mb is None:
            assert "clear_refs" in sample.info["phase_rss_reason"]
        else:
            assert sample.decode_rss_mb is not None
            assert max(sample.prefill_rss_mb, sample.decode_rss_mb) <= sample.peak_rss_mb


def test_report_tells_what_was_built(llama_build: Build, tmp_path: Path) -> None:
    info = measure(llama_build, tmp_path / "m.gguf", Workload(prompt=16, gen=1)).info
    assert info["model_params"] == TINY.params.total and info["vocab"] == TINY.vocab
    assert "AMX" not in info["system_info"]


def test_files_of_every_quantisation_run(llama_build: Build, tmp_path: Path) -> None:
    for quantisation in LLAMA_CPP.quantisations:
        assert measure(llama_build, tmp_path / "m.gguf", Workload(prompt=16, gen=1), quantisation).finite


def test_too_little_memory_for_the_window(llama_build: Build, model: Path) -> None:
    raw = run(llama_build, "--model", model, "--context", 4_000_000, limit_mb=600)
    assert raw.exit_code == 71
    with pytest.raises(CandidateFailed) as failure:
        LLAMA_CPP.parse(raw)
    assert failure.value.reason == "out_of_memory"


def test_too_little_memory_for_the_weights(llama_build: Build, tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    LLAMA_CPP.export(Layout.parse("d1024 v512 ffn=swiglu:8192 [C3*7 A16/8]"), "q4_0", RandomWeights(), path)
    with pytest.raises(CandidateFailed) as failure:
        LLAMA_CPP.parse(run(llama_build, "--model", path, "--prompt", 16, limit_mb=80))
    assert failure.value.reason == "out_of_memory"


def test_a_model_that_does_not_load_beside_a_good_reference_has_failed(llama_build: Build, model: Path) -> None:
    raw = run(llama_build, "--model", "/dev/null", "--reference", model)
    assert raw.exit_code == 65
    with pytest.raises(CandidateFailed):
        LLAMA_CPP.parse(raw)


@pytest.mark.parametrize("killed", ["reference", "candidate"])
def test_neither_process_outlives_the_other(
    llama_build: Build, model: Path, killed: Literal["reference", "candidate"]
) -> None:
    argv = [llama_build.executable, "--model", model, "--reference", model, "--prompt", "64", "--gen", "200000"]
    assert_neither_outlives_the_other([*map(str, argv)], killed)


def test_memory_is_of_the_candidate_alone(llama_build: Build, model: Path, tmp_path: Path) -> None:
    large = Layout.parse("d1024 v16384 ffn=swiglu:4096 [C3*4 A16/4]")
    LLAMA_CPP.export(large, "q4_0", RandomWeights(), tmp_path / "large")
    beside = LLAMA_CPP.parse(run(llama_build, "--model", model, "--reference", tmp_path / "large", "--gen", "4"))
    alone = LLAMA_CPP.parse(run(llama_build, "--model", model, "--gen", "4"))
    assert beside.reference and beside.peak_rss_mb and alone.peak_rss_mb and beside.reference.peak_rss_mb
    assert beside.reference.peak_rss_mb > 2 * alone.peak_rss_mb
    assert beside.peak_rss_mb == pytest.approx(alone.peak_rss_mb, rel=0.1)


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_damaged_file_is_refused(llama_build: Build, model: Path, tmp_path: Path, damage: str) -> None:
    content = {"text": b"no model", "cut": model.read_bytes()[:20_000], "empty": b""}[damage]
    (tmp_path / "bad.gguf").write_bytes(content)
    raw = run(llama_build, "--model", tmp_path / "bad.gguf")
    assert raw.exit_code == 65
    with pytest.raises(CandidateFailed) as failure:
        LLAMA_CPP.parse(raw)
    assert failure.value.reason == "export"


def test_nan_weights_are_told(llama_build: Build, tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    LLAMA_CPP.export(TINY, "q4_0", RandomWeights(), path)
    content = bytearray(path.read_bytes())
    content[-4096:] = b"\xff" * 4096  # the end of the last feed-forward, scales included
    path.write_bytes(content)
    with pytest.raises(CandidateFailed) as failure:
        LLAMA_CPP.parse(run(llama_build, "--model", path, "--prompt", 16, "--gen", 2))
    assert failure.value.reason == "not_finite"


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--model",),
        ("--model", "/dev/null/model"),
        ("--model", "/dev/null", "--promt", "1"),
        ("--model", "/dev/null", "--prompt", "1x"),
        ("--model", "/dev/null", "--threads", "0"),
        ("--model", "/dev/null", "--kv", "q5_0"),
        ("--model", "/dev/null", "--reference", "/dev/null", "--logits", "/tmp/rows"),
        ("--model", "/dev/null", "--prompt", "64", "--gen", "64", "--context", "100"),
    ],
)
def test_bad_arguments_are_no_candidates_fault(llama_build: Build, args: tuple[str, ...]) -> None:
    raw = run(llama_build, *args)
    assert raw.exit_code == 64 and json.loads(raw.stdout)["error"]["kind"] == "usage"
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.parse(raw)


def test_plan_refuses_what_llama_cpp_cannot(llama_build: Build, model: Path, tmp_path: Path) -> None:
    artifact = LLAMA_CPP.export(TINY, "q4_0", RandomWeights(), tmp_path / "m.gguf")
    with pytest.raises(Unsupported, match="flash_attn"):
        LLAMA_CPP.plan(artifact, llama_build.runner, Workload(kv_type="q8_0", flash_attn=False), 10)
    patched = artifact.model_copy(update={"patched": True})
    with pytest.raises(Unsupported, match="patched"):
        LLAMA_CPP.plan(patched, llama_build.runner, Workload(), 10)


def test_second_build_is_found(llama_build: Build) -> None:
    lines: list[str] = []
    assert LLAMA_CPP.build(log=lines.append).runner == llama_build.runner
    assert len(lines) == 1, "nothing was unpacked or compiled"


def test_libraries_are_found_beside_the_runner_only(llama_build: Build) -> None:
    listed = subprocess.run(["ldd", llama_build.executable], capture_output=True, text=True, timeout=30).stdout
    libraries = [line for line in listed.splitlines() if "llama" in line or "ggml" in line]
    assert len(libraries) == 4 and all(str(llama_build.folder) in line for line in libraries)


def test_reference_run_is_short(llama_build: Build, tmp_path: Path) -> None:
    path = tmp_path / "reference.gguf"
    artifact = LLAMA_CPP.export(LLAMA_CPP.reference_models()[0], "q4_0", RandomWeights(), path)
    plan = LLAMA_CPP.plan(artifact, llama_build.runner, LLAMA_CPP.reference_workload(), deadline_s=60)
    sample = LLAMA_CPP.parse(run_plan(plan, llama_build.folder, {"model": path}))
    assert len(sample.decode_ns) == LLAMA_CPP.reference_workload().gen
