"""The patched build: every kind of layer, alone and mixed, computes what PyTorch does; stock files as before.

By default every kind alone, a layout of every kind, and one fault of every kind at q4_0, and one layout at float32
(`test_long_text_outgrows_the_window`). All quantisations are by default in test_llama_cpp_gate.py; a quantised cache in
test_llama_cpp_runner.py.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exhaustive import first_by_default, mostly_exhaustive

from nas.core.errors import CandidateFailed, Unsupported
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.binding import decoded_tokens, evaluate
from nas.measure.runtimes.llama_cpp.gate import compare
from nas.measure.runtimes.llama_cpp.oracle import Oracle
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED
from nas.measure.runtimes.llama_cpp.tensors import tensors
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import (
    EVERY_KIND,
    PLANTED_LATENT,
    PLANTED_LFM3,
    PLANTED_MLSTM,
    PLANTED_SHARES,
    PLANTS,
    Fault,
    State,
    checkpoint,
)
from nas.testing.run_plan import run_plan
from tests.support.short_training import STOCK as BYTE_LEVEL
from tests.support.short_training import learned_checkpoint

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("fast_binding")]  # the first test compiles

ALONE = {
    "convolutions": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "attention": "d256 v512 ffn=swiglu:512 [A8/4 A4/1 A6/2:32]",
    "no positions": "d256 v512 ffn=swiglu:512 [C3 A8/4(rope_theta=0) A8/4]",
    "windows": "d256 v512 ffn=swiglu:512 [W4/2@32*3]",
    "sinks": "d256 v512 ffn=swiglu:512 [W4/2@32(sink=1)*3]",
    "Mamba-2": "d256 v512 ffn=swiglu:512 [M16*3]",
    "Mamba-2 of several sizes": "d128 v512 ffn=swiglu:256 [M16 M64(groups=2) M32(conv=3,expand=1,heads=4)]",
    "Gated DeltaNet": "d256 v512 ffn=swiglu:512 [D8/4*2 D4]",
    "Gated DeltaNet of several sizes": "d128 v512 ffn=swiglu:256 [D4 D2:32(conv=3) D6/2:20]",
    "gated linear attention": "d256 v512 ffn=swiglu:512 [G8*2 G2]",
    "gated linear attention of several sizes": "d128 v512 ffn=swiglu:256 [G4 G2:32(rank=32) G3:20]",
    "mLSTM": "d256 v512 ffn=swiglu:512 [X4*2 X1]",
    "mLSTM of several sizes": "d128 v512 ffn=swiglu:256 [X4 X2:32(key_dim=48) X3:20(key_dim=6)]",
    "feed-forwards": "d256 v512 ffn=swiglu:512 [C3 A4/2+swiglu:768 C3+swiglu:352]",
    "experts": "d256 v512 ffn=moe:8x2:64 [A4/2*2 A4/2+moe:8x4:96]",
    "shared experts": "d256 v512 ffn=moe:8x2:64(shared=1) [C3+swiglu:512 A4/2 C3+moe:8x4:96(shared=3)]",
    "experts by softmax": "d256 v512 ffn=moe:8x2:64(softmax=1) [C3+swiglu:512 A4/2 C3 A4/2(qk_norm=0)]",
    "squared ReLU": "d256 v512 ffn=relu2:512 [C3 A4/2+swiglu:768 C3+relu2:352]",
    "latent attention": PLANTED_LATENT.format(),
    "latents of several sizes": "d256 v512 ffn=swiglu:512 [L8/96:32(rope_dim=32) L4/32:96(nope_dim=32,query=64)]",
    "latent attention, windows, Mamba-2": "d256 v512 ffn=swiglu:512 [L4/64 W4/2@32 M16 A4/2 L4/64(query=64)]",
    "Canon": "d256 v512 ffn=swiglu:512 [A8/4(canon=4) W4/2@32(canon=3,sink=1) A8/4]",
    "shared caches": "d256 v512 ffn=swiglu:512 [A8/4 W8/4@32 A8/4(kv=0) C3 A8/4(qk_norm=0) A8/4(qk_norm=0,kv=4)]",
    "shared weights": "d256 v512 ffn=moe:8x2:64 [M16+swiglu:512 A8/4 D4 ^0 ^1 A8/4(kv=1) ^5 ^2]",
    "parallel mixers": "d256 v512 ffn=swiglu:512 [C3&A8/4 M16&W4/2@32(sink=1) D4&A8/4 L4/64&G4]",
    "xLSTM's hybrid": "d256 v512 ffn=swiglu:512 [X4&W8/4@32(sink=1)*2 X4&A8/4]",
    "layers of one half": "d256 v512 ffn=swiglu:512 [- A8/4+none C3+none M16+none A8/4]",
    "no mixer at all": "d256 v512 ffn=swiglu:512 [-*2]",
    "LFM3": PLANTED_LFM3.format(),
    "gates, and a cache that gated attention shares": (
        "d256 v512 ffn=swiglu:512 [A8/4(gate=1) D8/4(norm_eps=0.01)&A8/4(gate=1,gate_wide=1)"
        " A8/4(gate=1,kv=0,qk_norm=0,qkv_bias=1)]"
    ),
    "norms behind": "d256 v512 norms=behind ffn=swiglu:512 [C3 A8/4 M16+none -]",
    "both norms, GELU, bounds": (
        "d256 v512 norms=both softcap=4 ffn=geglu:512"
        " [C3+swiglu:352 W4/2@8(rope_dim=16,rope_factor=4,softcap=3) A8/4(qk_norm_wide=1,softcap=3)]"
    ),
    "long positions": "d256 v512 ffn=swiglu:512 [C3 A4/2(rope_long=64) W4/2@8(rope_dim=32,rope_long=64)]",
    "experts of Qwen2-MoE": PLANTED_SHARES.format(),
}
MIXED = {
    "conv, GQA": "d256 v512 ffn=swiglu:512 [C3 A4/2 C5 A8/2]",
    "conv, GQA, Mamba-2": "d256 v512 ffn=swiglu:512 [C3 A4/2 M16 C4 M16]",
    "conv, Mamba-2, MoE": "d256 v512 ffn=moe:8x2:64 [C3 M16+swiglu:512 C3 M32]",
    "conv, GDN, GLA, SWA": "d256 v512 ffn=swiglu:512 [C3 D8 G8 W4/2@32 D4/2:32]",
    "mLSTM, SWA, GQA, Mamba-2": "d256 v512 ffn=swiglu:512 [X4 W4/2@32(sink=1) X8 A4/2 M16]",
    "SWA, conv": "d256 v512 ffn=swiglu:512 [C3 W4/2@32(sink=1) C5 W8/2@32]",
    "every kind": EVERY_KIND.format(),
}
EVERY = ALONE | MIXED
BY_DEFAULT = [name for name in (*ALONE, "every kind") if f"{name} of several sizes" not in EVERY]
STOCK = (
    "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/1]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]",
    "d256 v512 ffn=swiglu:512 [C3 W4/2@32 C3 W4/2@32]",
    "d256 v512 ffn=swiglu:512 [A4/2*3]",
    "d256 v512 ffn=swiglu:512 [A4/2(qk_norm=0)*3]",
)
LONG = "d128 v512 ffn=swiglu:256 [C3 W4/2@32(sink=1) M16 A4/2]"


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "q8_0", "f16", "f32"], "q4_0"))
@pytest.mark.parametrize("name", mostly_exhaustive(EVERY, *BY_DEFAULT))
def test_right_graphs_pass(patched_build: Build, tmp_path: Path, name: str, quantisation: str) -> None:
    layout = Layout.parse(EVERY[name])
    assert LLAMA_CPP.supports(layout).verdict == "patched"
    report = gate(tmp_path, quantisation, layout, patched_build)
    assert report.passed, (report.error, report.limit, report.note)


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "f32"], "q4_0"))
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (layout, fault)
        for layout, faults in PLANTS
        if LLAMA_CPP.supports(layout).verdict == "patched"
        for fault in first_by_default(faults)
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else value.format(),
)
def test_planted_faults_fail(
    patched_build: Build, tmp_path: Path, layout: Layout, fault: Fault, quantisation: str
) -> None:
    with pytest.raises(CandidateFailed) as failure:
        gate(tmp_path, quantisation, layout, patched_build, fault).require()
    assert failure.value.reason == "gate"


@pytest.mark.parametrize("text", STOCK)
def test_stock_files_give_the_same_logits(llama_build: Build, patched_build: Build, tmp_path: Path, text: str) -> None:
    LLAMA_CPP.export(Layout.parse(text), "q4_0", RandomWeights(), tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, 512, 90).tolist()
    stock, patched = (
        evaluate(b, tmp_path / "m.gguf", ids, (70, 18, 1, 1), tmp_path) for b in (llama_build, patched_build)
    )
    np.testing.assert_array_equal(stock.logits, patched.logits)


@pytest.mark.parametrize("arch", BYTE_LEVEL)
def test_stock_files_write_the_same_text(llama_build: Build, patched_build: Build, tmp_path: Path, arch: str) -> None:
    layout, text = Layout.parse(BYTE_LEVEL[arch]), (Path(__file__).parents[2] / "LICENSE").read_bytes()
    trained = learned_checkpoint(layout, text, tmp_path / "weights")
    assert LLAMA_CPP.export(layout, "q4_0", trained, tmp_path / "m.gguf").arch == arch
    stock, patched = (decoded_tokens(b, tmp_path / "m.gguf", list(text[:40]), 64) for b in (llama_build, patched_build))
    assert stock == patched and len(set(stock)) > 2, "one letter over and over would say little"


@pytest.mark.parametrize("bias", [40.0, -40.0])
def test_mlstm_with_gates_at_their_caps(patched_build: Build, tmp_path: Path, bias: float) -> None:
    """The graph divides by softplus of the negative forget gate, which is 3e-7 at the cap."""

    def saturate(state: State) -> None:
        for name, weight in state.items():
            if name.endswith("gate_bias"):
                weight.fill_(bias)

    trained, model = checkpoint(PLANTED_MLSTM, tmp_path / "weights", saturate), tmp_path / "m.gguf"
    LLAMA_CPP.export(PLANTED_MLSTM, "f32", trained, model)
    assert LLAMA_CPP.gate(PLANTED_MLSTM, "f32", trained, model, patched_build.runner).passed


def test_stale_convolutions_fail(patched_build: Build, tmp_path: Path) -> None:
    """An earlier text left in memory, without attention that would see it too."""
    right = Layout.parse(ALONE["convolutions"])
    assert not gate(tmp_path, "q4_0", right, patched_build, Fault("stale", earlier=40)).passed


@pytest.mark.parametrize("quantisation", mostly_exhaustive(["q4_0", "f32"], "f32"))
def test_long_text_outgrows_the_window(patched_build: Build, tmp_path: Path, quantisation: str) -> None:
    """The window's cache holds 256 cells: after 600 tokens each of them has been written more than once."""
    layout, model = Layout.parse(LONG), tmp_path / "m.gguf"
    trained = checkpoint(layout, tmp_path / "right")
    LLAMA_CPP.export(layout, quantisation, trained, model)
    chunks = (71, 24) * 6 + (1,) * 32
    ids = np.random.default_rng(0).integers(0, layout.vocab, sum(chunks))
    oracle = Oracle(layout, quantisation, trained)  # type: ignore[arg-type]
    measured = evaluate(patched_build, model, ids.tolist(), chunks, tmp_path).logits
    assert compare(measured, oracle.exact(ids).logits, oracle.rounded(ids).logits).passed


def saved_and_restored(build: Build, folder: Path, text: str) -> np.ndarray:
    """Relative L2 of the logits of each step behind a restored state, against those of the sequence that went on."""
    LLAMA_CPP.export(Layout.parse(text), "f32", RandomWeights(), folder / "m.gguf")
    script = Path(__file__).with_name("llama_cpp_state.py")
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(build.folder)}
    argv = [sys.executable, str(script), str(folder / "m.gguf"), str(folder / "out.npy")]
    subprocess.run(argv, env=environment, timeout=60, check=True)
    went_on, restored = np.load(folder / "out.npy")
    return np.linalg.norm(went_on - restored, axis=-1) / np.linalg.norm(went_on, axis=-1)


@pytest.mark.parametrize(
    "name",
    [
        "convolutions",
        "conv, GQA, Mamba-2",
        "conv, Mamba-2, MoE",
        "Gated DeltaNet of several sizes",
        "gated linear attention",
        "mLSTM of several sizes",
        "experts",
        "latents of several sizes",
        "shared weights",
    ],
)
def test_state_can_be_saved_and_restored(patched_build: Build, tmp_path: Path, name: str) -> None:
    assert (saved_and_restored(patched_build, tmp_path, EVERY[name]) == 0).all()


@pytest.mark.parametrize(
    "text", [LONG, *(EVERY[name] for name in ("every kind", "Canon", "shared caches", "parallel mixers"))]
)
def test_windows_are_restored_in_another_order(patched_build: Build, tmp_path: Path, text: str) -> None:
    """Cells behind the window are left out, the others move up; flash attention adds in float16 in their order."""
    assert saved_and_restored(patched_build, tmp_path, text).max() < 0.01


def test_memory_of_a_window_does_not_grow_with_the_context(patched_build: Build, tmp_path: Path) -> None:
    layout, path = Layout.parse("d256 v512 ffn=swiglu:512 [W8/8@64*4]"), tmp_path / "m.gguf"
    artifact = LLAMA_CPP.export(layout, "q4_0", RandomWeights(), path)

    def peak(context: int) -> float:
        plan = LLAMA_CPP.plan(
            artifact, patched_build.runner, Workload(prompt=64, gen=2, context=context), deadline_s=60
        )
        return LLAMA_CPP.parse(run_plan(plan, patched_build.folder, {"model": path})).peak_rss_mb

    full = Layout.parse("d256 v512 ffn=swiglu:512 [A8/8*4]").kv_bytes(32768) / 1e6
    assert peak(32768) - peak(512) < full / 10


def test_stock_build_refuses_a_patched_file(llama_build: Build, patched_build: Build, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    artifact = LLAMA_CPP.export(Layout.parse(MIXED["every kind"]), "q4_0", RandomWeights(), path)
    assert artifact.patched
    with pytest.raises(Unsupported, match="patched"):
        LLAMA_CPP.plan(artifact, llama_build.runner, Workload(), 10)
    plan = LLAMA_CPP.plan(artifact, patched_build.runner, Workload(prompt=16, gen=1), deadline_s=60)
    forced = plan.model_copy(update={"runner": llama_build.runner})
    with pytest.raises(CandidateFailed, match="unknown model architecture: 'hilnas'") as failure:
        LLAMA_CPP.parse(run_plan(forced, llama_build.folder, {"model": path}))
    assert failure.value.reason == "export"


@pytest.mark.parametrize("kv_type", mostly_exhaustive(["f16", "q8_0"], "f16"))
@pytest.mark.parametrize("name", mostly_exhaustive(EVERY, *BY_DEFAULT))
def test_runner_measures(patched_build: Build, tmp_path: Path, name: str, kv_type: str) -> None:
    layout, path = Layout.parse(EVERY[name]), tmp_path / "m.gguf"
    artifact = LLAMA_CPP.export(layout, "q4_0", RandomWeights(), path)
    workload = Workload.model_validate({"prompt": 300, "gen": 3, "n_batch": 64, "n_ubatch": 32, "kv_type": kv_type})
    plan = LLAMA_CPP.plan(artifact, patched_build.runner, workload, deadline_s=60)
    sample = LLAMA_CPP.parse(run_plan(plan, patched_build.folder, {"model": path}))
    buffers = ("exp_probs_b.bias", "rope_freqs.weight", "rope_freqs_long.weight")
    extra = sum(math.prod(tensor.shape) for tensor in tensors(layout, PATCHED) if tensor.name.endswith(buffers))
    assert sample.info["model_params"] == layout.params.total + extra


def test_patched_build_is_found_again(patched_build: Build) -> None:
    runner = LLAMA_CPP.runner(patched_build.runner.target, patched=True)
    assert runner == patched_build.runner and runner.patched
    described = hashlib.sha256(patched_build.executable.read_bytes()).hexdigest()
    assert runner.files["runner"].sha256 == described
