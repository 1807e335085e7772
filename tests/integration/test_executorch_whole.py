"""Whole graphs: by ExecuTorch's own runtime what the layout means, by our runner the artifact's logits to the bit.

By default one layout with a window and Mamba-2: a whole graph takes up to a minute to export. A whole graph of
convolution, feed-forward, attention and shared keys is in test_release_stock.py. Layers that share weights, mixtures
and parallel mixers, as artifacts of blocks, are in test_executorch_gate.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from exhaustive import mostly_exhaustive

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, GateReport, RandomWeights, WholeExporter
from nas.measure.runtimes.executorch import whole
from nas.measure.runtimes.executorch.gate import EXACT_CACHE, STEPS, Logits, Oracle, judge
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.runner import Feed, local_machine, runner_logits
from nas.testing.planted_faults import checkpoint

pytestmark = pytest.mark.timeout(900)  # lowering the blocks, and all of them again as one graph

CONTEXT, FEED = 352, Feed(prompt=290, gen=STEPS, batch=71)
"""Longer than the rows of any window's cache, so that each is written round and round."""

SMALL = "d64 v128 ffn=swiglu:64 [C3 W4/2@24+none]"
EVERY_STATE = "d64 v128 ffn=swiglu:64 [C3 A2/1+none M16+none W4/2@24+none ^1 A2/1(kv=1)+none]"
SHARED = "d64 v128 ffn=swiglu:64 [A4/2(qk_norm=0)+none C3&W2/1@40+none ^1 A4/2(kv=0)+none]"
ROUTED = "d64 v128 ffn=moe:4x2:32 [C3+none A2/1]"
GATED = (
    "d64 v128 norms=both softcap=5 ffn=geglu:64"
    " [A4/2(gate=1,rope_dim=8)+none C3 W4/2@24(gate=1,gate_wide=1,qk_norm_wide=1,rope_factor=4)+none]"
)


@dataclass(frozen=True)
class Exported:
    """A layout as artifact and as whole graph, on the same trained weights."""

    layout: Layout
    weights: Checkpoint
    blocks: Path
    whole: Path


@pytest.fixture(scope="module", params=mostly_exhaustive([SMALL, EVERY_STATE, SHARED, ROUTED, GATED], SMALL))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder, layout = tmp_path_factory.mktemp("whole"), Layout.parse(request.param)
    export = Exported(layout, checkpoint(layout, folder / "weights"), folder / "blocks", folder / "whole.pte")
    EXECUTORCH.export(layout, "8da4w", export.weights, export.blocks)
    artifact = EXECUTORCH.export_whole(layout, "8da4w", export.weights, CONTEXT, export.whole)
    assert artifact.size == export.whole.stat().st_size
    return export


def test_stock_runtime_computes_what_the_layout_means(exported: Exported, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", FEED.ids(exported.layout.vocab))
    script = Path(__file__).with_name("stock_runtime.py")
    sizes = map(str, (FEED.prompt, FEED.batch))
    argv = [
        sys.executable,
        str(script),
        str(exported.whole),
        str(tmp_path / "ids.npy"),
        *sizes,
        str(tmp_path / "l.npy"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = held_against_pytorch(exported, np.load(tmp_path / "l.npy"))
    assert report.passed, (report.error, report.limit)


def test_our_runner_gives_the_logits_of_the_blocks(executorch_build: Build, exported: Exported, tmp_path: Path) -> None:
    """Mixtures within the gate: the whole graph adds up all experts. The runner bounds logits itself."""
    blocks, whole = (
        by_our_runner(executorch_build, file, exported.layout.vocab, tmp_path)
        for file in (exported.blocks, exported.whole)
    )
    if "moe" in exported.layout.format():
        assert held_against_pytorch(exported, whole).passed
    elif exported.layout.softcap:
        np.testing.assert_allclose(blocks, whole, rtol=0, atol=2e-6)
    else:
        np.testing.assert_array_equal(blocks, whole)


def by_our_runner(build: Build, model: Path, vocab: int, scratch: Path) -> Logits:
    return runner_logits(local_machine(build.executable, build.runner.target), model, vocab, FEED, scratch, EXACT_CACHE)


def held_against_pytorch(exported: Exported, logits: Logits) -> GateReport:
    oracle = Oracle(exported.layout, exported.weights)
    return judge(logits, oracle, exported.layout, FEED.ids(exported.layout.vocab))


@pytest.fixture(scope="module")
def overstated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that promises texts of 352 tokens, with caches of 64."""
    path = tmp_path_factory.mktemp("overstated") / "whole.pte"
    layout = Layout.parse("d64 v128 ffn=swiglu:64 [A2/1(rope_theta=0)]")
    with pytest.MonkeyPatch.context() as patch:
        names = whole._constant_methods
        patch.setattr(whole, "_constant_methods", lambda layout, context: names(layout, CONTEXT))
        EXECUTORCH.export_whole(layout, "8da4w", RandomWeights(), 64, path)
    return path


@pytest.mark.parametrize(
    ("prompt", "gen", "code", "message"),
    [(60, 4, 0, ""), (60, 5, 70, "execute returned"), (CONTEXT, 2, 65, f"for {CONTEXT} tokens, not {CONTEXT + 2}")],
)
def test_no_text_is_longer_than_the_caches(
    executorch_build: Build, overstated: Path, prompt: int, gen: int, code: int, message: str
) -> None:
    sizes = ["--prompt", str(prompt), "--gen", str(gen)]
    argv = [str(executorch_build.executable), "--model", str(overstated), *sizes]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[:400]
    assert message in json.loads(done.stdout).get("error", {"message": ""})["message"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d64 v128 ffn=swiglu:64 [W2/1@8(sink=1)]", "neither attention sinks"),
        ("d64 v128 ffn=swiglu:64 [A2/1(softcap=5)]", "nor bounded scores"),
        ("d64 v128 ffn=swiglu:40 [C3]", "groups of 32"),
    ],
)
def test_what_stays_out_is_told(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        EXECUTORCH.export_whole(Layout.parse(text), "8da4w", RandomWeights(), 64, tmp_path / "whole.pte")
    assert list(tmp_path.iterdir()) == []


def test_only_executorch_has_another_file_for_apps() -> None:
    assert isinstance(EXECUTORCH, WholeExporter) and not isinstance(LLAMA_CPP, WholeExporter)
