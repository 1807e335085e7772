"""The profiler on real files: every layer has its times, and they add up to no more than the request took."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nas.core.layout import Layout
from nas.core.profile import Profile, summary
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.testing.run_plan import run_plan

# The patched build runs all of them, so that one profiler is compiled.
STOCK = (
    "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/2]",  # lfm2
    "d256 v512 untied ffn=swiglu:512 [A4/2*3]",  # qwen3
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2]",  # lfm2moe
)
EVERY_KIND = (
    "d256 v512 ffn=moe:8x2:64 "
    "[M16 A4/2 C3+swiglu:512 W4/2@32(sink=1)+moe:8x4:96 C5+relu2:512 A8/8(canon=3) D8/4+relu2:512 G8 L4/64]"
)


def profile(build: Build, layout: Layout, folder: Path, workload: Workload) -> Profile:
    artifact = LLAMA_CPP.export(layout, "q4_0", RandomWeights(), folder / "m.gguf")
    runner = LLAMA_CPP.profiler(build.runner, print)
    plan = LLAMA_CPP.plan(artifact, runner, workload, deadline_s=300)
    raw = run_plan(plan, LLAMA_CPP.runner_folder(runner), {"model": folder / "m.gguf"})
    return LLAMA_CPP.read_profile(raw, layout)


def require_whole(result: Profile, layout: Layout) -> None:
    for phase, _ in result.phases.values():
        assert {(node.layer, node.part) for node in phase.nodes} == {
            (None, "embedding"), (None, "head"),
            *((layer, part) for layer in range(layout.depth) for part in ("mixer", "ffn")),
        }  # fmt: skip
        assert 0 < phase.sum_ns <= phase.profiled_ns and phase.whole_ns > 0
    tables = summary(result, layout)
    for rows in (tables["parts"], tables["operators"]):
        for share in ("prefill_share", "decode_share"):
            assert sum(row[share] for row in rows) == pytest.approx(1.0)


@pytest.mark.parametrize("text", STOCK)
def test_every_layer_of_a_stock_architecture_is_timed(patched_build: Build, tmp_path: Path, text: str) -> None:
    layout = Layout.parse(text)
    result = profile(patched_build, layout, tmp_path, Workload(prompt=64, gen=8))
    assert (result.prompt, result.gen) == (64, 8)
    require_whole(result, layout)


def test_every_kind_of_block_is_timed_where_it_runs(patched_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(EVERY_KIND)
    result = profile(patched_build, layout, tmp_path, Workload(prompt=64, gen=8, threads=2))
    require_whole(result, layout)
    places: dict[str, set[tuple[int | None, str]]] = {}
    for node in result.decode.nodes:
        places.setdefault(node.operator, set()).add((node.layer, node.part))
    assert places["SSM_SCAN"] == {(0, "mixer")}
    assert places["FLASH_ATTN_EXT"] == {(layer, "mixer") for layer in (1, 3, 5, 8)}
    assert places["MUL_MAT_ID"] == {(layer, "ffn") for layer in (0, 1, 3, 5, 7, 8)}
    assert places["GET_ROWS"] >= {(None, "embedding")}


def test_the_number_of_weight_products_is_that_of_the_blocks(patched_build: Build, tmp_path: Path) -> None:
    """Three of a SwiGLU and four of attention, for each token: what follows the name of a layer belongs to it."""
    layout = Layout.parse("d256 v512 ffn=swiglu:512 [A4/2*2 C3]")
    result = profile(patched_build, layout, tmp_path, Workload(prompt=64, gen=8))
    products = {(node.layer, node.part): node.nodes for node in result.decode.nodes if node.operator == "MUL_MAT"}
    ffn = {(layer, "ffn"): 3 * 8 for layer in range(3)}
    assert products == ffn | {(0, "mixer"): 4 * 8, (1, "mixer"): 4 * 8, (2, "mixer"): 2 * 8, (None, "head"): 8}


def test_the_profiler_is_no_build_that_measures(patched_build: Build) -> None:
    profiler = LLAMA_CPP.profiler(patched_build.runner, print)
    assert LLAMA_CPP.load(profiler.build).variant == patched_build.variant
    assert profiler.build not in {build.runner.build for build in LLAMA_CPP.builds()}
    lines: list[str] = []
    assert LLAMA_CPP.profiler(patched_build.runner, lines.append) == profiler and not lines, "it was in the cache"


def test_a_profile_of_a_gpu_is_never_of_the_processor(patched_build: Build, tmp_path: Path) -> None:
    LLAMA_CPP.export(Layout.parse(STOCK[0]), "q4_0", RandomWeights(), tmp_path / "m.gguf")
    profiler = LLAMA_CPP.load(LLAMA_CPP.profiler(patched_build.runner, print).build).executable
    argv = [str(profiler), "--model", str(tmp_path / "m.gguf"), "--prompt", "32", "--gen", "4", "--gpu", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 64 and "no GPU answers" in json.loads(done.stdout)["error"]["message"]
