"""The plug-in's own tests, run with it installed by tests/unit/test_plugin_blocks.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hilnas_plugin.modules import SquaredReLU, reference_decay, reference_sqrelu
from hypothesis import given, settings

from nas.cli.space import sampler
from nas.core.block import BLOCKS
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.dashboard.filters import hue
from nas.dashboard.layout_svg import layout_strip
from nas.measure.reference import export_key
from nas.nn.model import Model
from nas.pretrain.grow import grow
from nas.proxy.job import TaskRun, TrainJob, weights_file
from nas.proxy.train import train
from nas.release.files import write_files
from nas.release.options import FileOptions
from nas.runtimes import RUNTIMES
from nas.runtimes.base import RandomWeights
from nas.scaling.candidates import scaled_mixer
from nas.search_spaces.loader import load_space, space_text
from nas.testing.block_contract import FeedForwardContract, MixerContract
from nas.testing.layout_strategy import layouts
from nas.views.layout import layout_view

LAYOUT = Layout.parse("d64 v300 ffn=sqrelu:96 [Y A2/1 Y+swiglu:64]")


class TestSquaredReLU(FeedForwardContract):
    kind = "sqrelu"
    examples = ("sqrelu:32", "sqrelu:96")
    reference = staticmethod(reference_sqrelu)


class TestDecayingSum(MixerContract):
    kind = "decay"
    examples = ("Y",)
    reference = staticmethod(reference_decay)


def test_a_space_of_these_kinds_is_read_and_sampled(tmp_path: Path) -> None:
    text = space_text("lfm2-demo").replace("  conv:\n    kernel: [3, 4]\n", "  decay: {}\n").replace("moe:", "sqrelu:")
    text = text.replace("    experts: 8\n    top_k: 2\n    width: [192, 256, 320]\n", "    width: [1024, 1536]\n")
    text = text.replace("  conv: {min: 1} # stock llama.cpp needs one of each; see lfm2.yaml\n", "  decay: {min: 1}\n")
    text = text.replace("{name: llama.cpp, quantisation: q4_0}", "{name: executorch, quantisation: 8da4w}")
    text = text.replace("C3", "Y").replace("  leading_dense: 1\n", "")
    path = tmp_path / "space.yaml"
    path.write_text(text)
    space = load_space(path)
    draw = sampler(space)
    rng = np.random.default_rng(0)
    kinds = {block.kind for _ in range(8) for layer in draw.draw(rng).layers for block in layer.blocks}
    assert {"decay", "sqrelu"} <= kinds


@settings(max_examples=30, deadline=None)
@given(layouts(max_depth=3))
def test_layouts_of_all_kinds_round_trip(layout: Layout) -> None:
    assert Layout.parse(layout.format()) == layout


def test_their_version_is_in_the_keys_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[str]:
        job = TrainJob(
            layout=LAYOUT.to_json(), run=TaskRun(task="selcopy"), steps=3, batch=2, lr=3e-3, warmup=1,
            weight_decay=0.1, clip=1.0, ema=0.9, seed=0,
        )  # fmt: skip
        return [job.key, export_key(LAYOUT, RUNTIMES["executorch"], "8da4w", "random:0")]

    assert LAYOUT.plugin_versions == {"decay": "1.0", "sqrelu": "1.0"}  # of the distribution
    before = keys()
    monkeypatch.setattr(type(BLOCKS["sqrelu"]), "version", "2")
    assert LAYOUT.plugin_versions == {"decay": "1.0", "sqrelu": "2"}
    assert not set(before) & set(keys())


def test_a_proxy_is_trained(tmp_path: Path) -> None:
    job = TrainJob(
        layout=LAYOUT.to_json(), run=TaskRun(task="selcopy"), steps=3, batch=2, lr=3e-3, warmup=1, weight_decay=0.1,
        clip=1.0, ema=0.9, seed=0,
    )  # fmt: skip
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=print, checkpoint_s=0.0)
    assert weights_file(tmp_path, result.key).exists()


@torch.no_grad()
def test_a_larger_model_grows_from_a_smaller_one() -> None:
    small, large = LAYOUT, Layout.parse("d128 v300 untied ffn=sqrelu:200 [Y A4/1 Y Y+swiglu:128]")
    model = Model(small, 3).eval()
    larger, growth = grow(small, model.state_dict(), large, seed=1)
    tokens = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(0))
    assert growth.added == 1
    assert [change for change in growth.changes if "decay" not in change and "Y" not in change] == []
    assert larger(tokens).isfinite().all()


def test_a_kind_scales_in_a_family_as_in_proxies() -> None:
    (mixer,) = LAYOUT.layers[0].mixers
    assert scaled_mixer(mixer, 64, 128, "heads") == mixer


def test_executorch_carries_it_and_llama_cpp_says_why_not() -> None:
    assert RUNTIMES["executorch"].supports(LAYOUT).verdict == "stock"
    assert set(RUNTIMES["llama.cpp"].supports(LAYOUT).reasons) == {
        f"{kind} blocks: neither the stock build nor the patched one has them" for kind in ("decay", "sqrelu")
    }


def test_the_released_folder_holds_its_code(tmp_path: Path) -> None:
    files = write_files(tmp_path / "m", LAYOUT, RandomWeights(3), FileOptions(gguf=()), print)
    names = {Path(file.path).name for file in files.files}
    assert {"sqrelu_hilnas.py", "decay_hilnas.py", "modeling_hilnas.py", "model.safetensors"} <= names
    text = (tmp_path / "m" / "transformers" / "modeling_hilnas.py").read_text()
    assert '_FEED_FORWARDS["sqrelu"] = _sqrelu\n' in text and '_MIXERS["decay"] = _decay\n' in text
    assert files.loads["llama.cpp"].startswith("none: ")


def test_a_kind_without_code_for_a_release_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SquaredReLU, "release_code", "")
    with pytest.raises(Unsupported, match=r"sqrelu blocks cannot be released.*`release_code`"):
        write_files(tmp_path / "m", LAYOUT, RandomWeights(3), FileOptions(gguf=()), print)


def test_pages_draw_it_in_its_colour() -> None:
    drawn = str(layout_strip(layout_view(LAYOUT, 64).layers, "strip"))
    assert hue("sqrelu") == BLOCKS["sqrelu"].hue == 8
    assert "hue-8" in drawn and f"hue-{hue('decay')}" in drawn and 11 <= hue("decay") <= 14
