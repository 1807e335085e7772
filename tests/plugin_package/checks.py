"""The plug-in's own tests, run with it installed by tests/unit/test_plugin_blocks.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from hilnas_plugin.modules import S4D, constant_scan, reference_reglu, reference_s4d
from hypothesis import given, settings

from nas.cli.space import sampler
from nas.core.block import BLOCKS, Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.measure.protocol.reference import export_key
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.patches import patch_files, patch_hashes
from nas.model.nn.base import BlockModule
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.model.nn.primitives import draw_weights
from nas.search.proxy.job import TaskRun, TrainJob, weights_file
from nas.search.proxy.train import train
from nas.search.spaces.loader import load_space, space_text
from nas.serve.dashboard.filters import hue
from nas.serve.dashboard.layout_svg import layout_strip
from nas.serve.views.layout import layout_view
from nas.testing.block_contract import FeedForwardContract, MixerContract
from nas.testing.layout_strategy import layouts
from nas.train.pretrain.grow import grow
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions
from nas.train.scaling.candidates import scaled_mixer

LAYOUT = Layout.parse("d64 v300 ffn=reglu:96 [Z4 A2/1 Z4+swiglu:64]")


class TestReGLU(FeedForwardContract):
    kind = "reglu"
    examples = ("reglu:96",)
    reference = staticmethod(reference_reglu)


class TestS4D(MixerContract):
    kind = "s4d"
    examples = ("Z1", "Z4")
    reference = staticmethod(reference_s4d)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 150])
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(length: int) -> None:
    module = S4D(Block.of("s4d", state=3), 8).double()
    draw_weights(module, 0, depth=4)
    x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(1)).double()
    expected = reference_s4d(module.block, module.state_dict(), x[0])
    assert torch.allclose(module(x)[0][0], expected, rtol=0, atol=1e-12)
    parts = [part for part in x.split([length // 2, length - length // 2], 1) if part.shape[1]]
    state, cut = module.init_state(1, x.dtype, x.device), []
    for part in parts:
        y, state = module(part, state)
        cut.append(y)
    assert torch.allclose(torch.cat(cut, 1)[0], expected, rtol=0, atol=1e-12)


def test_its_kernel_is_the_papers() -> None:
    """Its convolution by the kernel C exp(step A l) A^-1 (exp(step A) - 1) over the whole sequence, by FFT."""
    rng = torch.Generator().manual_seed(0)
    c, u, rate = torch.randn(6, 4, generator=rng), torch.randn(1, 200, 6, generator=rng), -torch.arange(1.0, 5)
    written = (0.05 * rate).expm1() / rate
    kernel = ((c * written)[..., None] * (0.05 * rate[:, None] * torch.arange(200)).exp()).sum(1)
    expected = torch.fft.irfft(torch.fft.rfft(u[0].T, 400) * torch.fft.rfft(kernel, 400), 400)[:, :200].T
    y, _ = constant_scan(u, (0.05 * rate).expand(6, 4), c * written, torch.zeros(1, 6, 4))
    assert torch.allclose(y[0], expected, atol=1e-5)


def test_a_space_of_these_kinds_is_read_and_sampled(tmp_path: Path) -> None:
    text = (
        space_text("lfm2-demo")
        .replace("  conv:\n    kernel: [3, 4]\n", "  s4d: {state: [4, 8]}\n")
        .replace("moe:", "reglu:")
    )
    text = text.replace("    experts: 8\n    top_k: 2\n    width: [192, 256, 320]\n", "    width: [1024, 1536]\n")
    text = text.replace("  conv: {min: 1} # stock llama.cpp needs one of each; see lfm2.yaml\n", "  s4d: {min: 1}\n")
    text = text.replace("{name: llama.cpp, quantisation: q4_0}", "{name: executorch, quantisation: 8da4w}")
    text = text.replace("C3", "Z4").replace("  leading_dense: 1\n", "")
    path = tmp_path / "space.yaml"
    path.write_text(text)
    space = load_space(path)
    draw = sampler(space)
    rng = np.random.default_rng(0)
    kinds = {block.kind for _ in range(8) for layer in draw.draw(rng).layers for block in layer.blocks}
    assert {"s4d", "reglu"} <= kinds


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

    assert LAYOUT.plugin_versions == {"s4d": "1.0", "reglu": "1.0"}  # of the distribution
    before = keys()
    monkeypatch.setattr(type(BLOCKS["reglu"]), "version", "2")
    assert LAYOUT.plugin_versions == {"s4d": "1.0", "reglu": "2"}
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
    small, large = LAYOUT, Layout.parse("d128 v300 untied ffn=reglu:200 [Z4 A4/1 Z4 Z4+swiglu:128]")
    model = Model(small, 3).eval()
    larger, growth = grow(small, model.state_dict(), large, seed=1)
    tokens = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(0))
    assert growth.added == 1
    assert growth.changes == ()
    assert torch.allclose(larger(tokens), model(tokens), atol=1e-5)


@torch.no_grad()
def test_what_cannot_grow_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    more_states = Layout.parse("d64 v300 ffn=reglu:96 [Z8 A2/1 Z4+swiglu:64]")
    state = Model(LAYOUT, 3).state_dict()
    assert "the number of states differs" in "".join(grow(LAYOUT, state, more_states, seed=1)[1].changes)
    monkeypatch.setattr(MODULES["reglu"], "grow", BlockModule.grow)
    wider = Layout.parse("d64 v300 ffn=reglu:128 [Z4 A2/1 Z4+swiglu:64]")
    assert "its module has no `grow` for reglu blocks" in "".join(grow(LAYOUT, state, wider, seed=1)[1].changes)


def test_a_kind_scales_in_a_family_as_in_proxies() -> None:
    (mixer,) = LAYOUT.layers[0].mixers
    assert scaled_mixer(mixer, 64, 128, "heads") == mixer


def test_both_runtimes_carry_it_and_llama_cpp_says_why_not_the_feed_forward() -> None:
    assert RUNTIMES["executorch"].supports(LAYOUT).verdict == "stock"
    support = RUNTIMES["llama.cpp"].supports(Layout.parse("d64 v300 ffn=swiglu:96 [Z4 A2/1 Z4]"))
    assert support.verdict == "patched" and "S4D layers are in no stock architecture" in support.reasons
    refused = RUNTIMES["llama.cpp"].supports(LAYOUT)
    assert refused.verdict == "no"
    assert refused.reasons == ("reglu blocks: neither the stock build nor the patched one has them",)


def test_its_patch_is_part_of_the_build_and_its_tensors_of_the_file(tmp_path: Path) -> None:
    assert patch_files()[-1].name == "s4d.patch" and len(set(patch_hashes())) == len(patch_files())
    RUNTIMES["llama.cpp"].export(
        Layout.parse("d64 v300 ffn=swiglu:96 [Z4 A2/1]"), "q4_0", RandomWeights(3), tmp_path / "m"
    )
    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in GGUFReader(tmp_path / "m").tensors}
    assert shapes["blk.0.ssm_a"] == shapes["blk.0.ssm_x.weight"] == (64, 4)
    assert shapes["blk.0.ssm_dt.bias"] == shapes["blk.0.ssm_d"] == (64,)


def test_the_released_folder_holds_its_code(tmp_path: Path) -> None:
    files = write_files(tmp_path / "m", LAYOUT, RandomWeights(3), FileOptions(gguf=()), print)
    names = {Path(file.path).name for file in files.files}
    assert {"hilnas_plugin_modules.py", "nn_ssd.py", "modeling_hilnas.py", "model.safetensors"} <= names
    text = (tmp_path / "m" / "transformers" / "nn_kinds.py").read_text()
    assert "from .hilnas_plugin_modules import ReGLU as _reglu\n" in text and '    "s4d": _s4d,\n' in text
    assert files.loads["llama.cpp"].startswith("none: ")


def test_a_module_that_needs_more_than_a_release_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES["reglu"], "release_code", "hilnas_plugin.llama_cpp:S4D")
    with pytest.raises(Unsupported, match=r"cannot contain hilnas_plugin.llama_cpp: it imports nas\.measure"):
        write_files(tmp_path / "m", LAYOUT, RandomWeights(3), FileOptions(gguf=()), print)


def test_pages_draw_it_in_its_colour() -> None:
    drawn = str(layout_strip(layout_view(LAYOUT, 64).layers, "strip"))
    assert hue("reglu") == BLOCKS["reglu"].hue == 8
    assert "hue-8" in drawn and f"hue-{hue('s4d')}" in drawn and 20 <= hue("s4d") <= 23
