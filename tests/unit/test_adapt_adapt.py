"""Search inside a trained model: library, selection, healing; the same child after kills."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import types
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
import torch
from adapt_lab import FEW, LAYOUT, QUICK, RECALLING, SETTINGS, adaptation, alone, sources, work_of, write_lab
from cli_runner import nas
from pretrain_lab import write_tokenizer
from tokenizer_lab import FORMS, write_model_tokenizer

from benchmarks.adapt import ArithmeticBench
from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.replacement import (
    RECALL_GROUP,
    TEXT_GROUP,
    Alternative,
    Slot,
    assembled,
    block_name,
    lender_of,
    parsed,
    slots_of,
    with_blocks,
)
from nas.infra.store.store import Store
from nas.measure.devices.host_lock import HostLock
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingState, Worker, fit
from nas.model.nn.mixes import mix_of
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.model.text.documents import read_sources
from nas.train.adapt import adapt
from nas.train.adapt import hours as hours_module
from nas.train.adapt import library as library_module
from nas.train.adapt.adapt import CHILD, REPORT, Adaptation, relative_change, write_child
from nas.train.adapt.alternatives import default_alternatives, started
from nas.train.adapt.device import DeviceBench, Measured
from nas.train.adapt.healing import Healing, batches_of, heal, train_child
from nas.train.adapt.hours import RESERVE, LibraryTimes, PartTimes, time_library
from nas.train.adapt.library import (
    Library,
    LibrarySettings,
    Score,
    Stream,
    TrainedTeacher,
    neighbouring_pairs,
    standard_error,
    trim,
)
from nas.train.adapt.prepare import prepare
from nas.train.adapt.request import AdaptRequest, AdaptSettings
from nas.train.adapt.selection import select
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.release.files import write_files
from nas.train.release.model_tokenizer import read_model_tokenizer
from nas.train.release.options import FileOptions


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab(tmp_path_factory.mktemp("adapt"))


@pytest.fixture
def text(lab: Path) -> list[Tokens]:
    return sources(lab)


@pytest.fixture
def teacher(lab: Path) -> TrainedTeacher:
    return TrainedTeacher.load(lab / "teacher.safetensors", torch.device("cpu"))


@pytest.fixture
def library(teacher: TrainedTeacher, text: list[Tokens], tmp_path: Path) -> Library:
    return Library(tmp_path / "library", teacher, text, SETTINGS.library, alone())


def test_attention_has_nine_alternatives_and_a_feed_forward_four() -> None:
    alternatives = {slot: default_alternatives(LAYOUT, slot, 8) for slot in slots_of(LAYOUT)}
    names = [block.format() if block else "-" for block in alternatives[Slot(0, "mixer")]]
    assert names == [
        "A4/2", "A4/1", "W4/4@8", "W4/4@8(sink=1)", "L4/32(nope_dim=8)", "C3", "M16(expand=1,groups=4,heads=4)",
        "X4(key_dim=16)", "-",
    ]  # fmt: skip
    assert [block.format() if block else "-" for block in alternatives[Slot(0, "ffn")]] == [
        "swiglu:96", "swiglu:64", "swiglu:32", "-",
    ]  # fmt: skip
    assert alternatives[Slot(2, "mixer")] == (None,)


def test_scaled_rope_is_kept_or_has_no_alternative() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16(rope_factor=8,rope_tokens=8192)*2]")
    blocks = default_alternatives(layout, Slot(1, "mixer"), 8)
    attention = [block for block in blocks if block and block.kind in ("gqa", "swa", "mla")]
    assert {block.kind for block in attention} == {"gqa", "swa"}
    assert {block.get("rope_factor") for block in attention} == {8.0}


@pytest.mark.parametrize(
    "mixer", ["A4/4:16(qk_norm=0,qkv_bias=1)", "A4/4:16(qk_norm_wide=1)", "A4/4:16(softcap=5)", "A4/4:16(gate=1)"]
)
@torch.no_grad()
def test_every_alternative_of_attention_starts(mixer: str) -> None:
    layout = Layout.parse(f"d64 v320 ffn=geglu:128 [{mixer}*2]")
    model, inputs = Model(layout, seed=1), torch.randn(2, 24, 64)
    for block in default_alternatives(layout, Slot(1, "mixer"), 8):
        if block is not None and "kv" not in dict(block.args):
            started(block, model.layers["1"].mixers[0], inputs, 0, 2)
    narrower = [block for block in default_alternatives(layout, Slot(1, "ffn"), 8) if block is not None]
    assert [block.int("width") for block in narrower] == [96, 64, 32]
    assert started(narrower[0], model.layers["1"].ffn, inputs, 0, 2)(inputs).isfinite().all()


def test_rope_on_a_part_of_a_head_is_kept_or_has_no_alternative() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16(rope_dim=8)*2]")
    blocks = default_alternatives(layout, Slot(1, "mixer"), 8)
    attention = [block for block in blocks if block and block.kind in ("gqa", "swa", "mla")]
    assert {(block.kind, block.get("rope_dim")) for block in attention} == {("gqa", 8), ("swa", 8)}


def test_attention_may_read_keys_and_values_of_an_equal_block_below() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16 C3 A4/4:16 A4/2:16 A4/4:16 W4/4@8:16 A4/4:16]")
    mixers = {slot.depth: default_alternatives(layout, slot, 8) for slot in slots_of(layout) if slot.part == "mixer"}
    readers = {depth: [block.format() for block in blocks if lender_of(block)] for depth, blocks in mixers.items()}
    assert readers == {0: [], 1: [], 2: ["A4/4(kv=0)"], 3: [], 4: [], 5: [], 6: ["A4/4(kv=4)"]}


def test_a_reader_is_trained_and_scored_with_keys_and_values_of_the_block_below(library: Library) -> None:
    slot, reader = Slot(1, "mixer"), Block.parse("A4/4:16(kv=0)", "mixer").canonical(64)
    library.train({slot: (reader,)})
    assert not {name for name in library.weights(slot, reader) if name[0] in "kv"}
    record = library.record(slot, reader)
    assert record.error < record.error_start
    score = library.scores({slot: (reader,)})[slot, reader]
    assert library.divergence(library.mix({slot: reader})) == pytest.approx(score.text, rel=1e-5)
    narrow, other = Block.parse("swiglu:64", "ffn"), Slot(0, "ffn")
    library.train({other: (narrow,)})
    pair = ((other, narrow), (slot, reader))
    both = library.divergence(library.mix(dict(pair)))
    alone_ = library.scores({other: (narrow,)})[other, narrow]
    assert library.pair_terms([pair])[pair].text == pytest.approx(both - score.text - alone_.text, abs=1e-6)


def test_readers_get_keys_and_values_of_the_trained_model_whatever_is_replaced_below() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16 W4/4@8:16 A4/4:16]")
    teacher = TrainedTeacher(Model(layout, seed=1).eval(), Path("teacher"), "")
    other = Model(Layout.parse("d64 v320 ffn=swiglu:128 [A4/2:16 C3]"), seed=2).layers["0"].mixers[0]
    with torch.no_grad():
        stream = teacher.before(torch.arange(12)[None], 1)
        after = teacher.replaced(stream, 1, "mixer", other)
    assert stream.cache is not None and after.cache is stream.cache


def test_the_block_that_a_reader_needs_stays() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [C3 A4/4:16*2]")
    reader = Block.parse("A4/4:16(kv=1)", "mixer")
    shorter, depths = with_blocks(layout, {Slot(0, "mixer"): None, Slot(0, "ffn"): None, Slot(2, "mixer"): reader})
    assert (shorter.format(), depths) == ("d64 v320 ffn=swiglu:128 [A4/4 A4/4(kv=0)]", [1, 2])
    with pytest.raises(InvalidInput, match="layer 2 reads keys and values of layer 1, whose mixer is replaced"):
        with_blocks(layout, {Slot(1, "mixer"): Block.parse("A4/4:16(qk_norm=1)", "mixer"), Slot(2, "mixer"): reader})
    alternatives = {Slot(depth, "mixer"): default_alternatives(layout, Slot(depth, "mixer"), 8) for depth in (1, 2)}
    every = neighbouring_pairs(alternatives, 1000, 0)
    assert len(every) == 9 * 9 and not [pair for pair in every if lender_of(pair[1][1])]


def test_readers_are_selected_with_the_block_that_they_read(lab: Path, tmp_path: Path, home: Path) -> None:
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=QUICK)
    problem = one.choices.problem()
    (reader,) = (option for option in problem.options[Slot(1, "mixer")] if "kv=" in option.name)
    lender = block_name(Slot(0, "mixer").block(LAYOUT))
    assert reader.needs == (Slot(0, "mixer"), (lender,))
    choice = {Slot(1, "mixer"): Block.parse(reader.name, "mixer")}
    less = work_of(LAYOUT)["decode_p50"] - work_of(with_blocks(LAYOUT, choice)[0])["decode_p50"]
    assert reader.costs["decode_p50"] == pytest.approx(-less)
    places = dict(problem.options) | {Slot(1, "mixer"): [reader]}
    chosen = select(places, problem.base, {})
    assert chosen is not None and chosen[Slot(0, "mixer")].name == lender
    assert one._child(problem, chosen) is not None


def test_start_values_come_from_the_trained_block() -> None:
    teacher = Model(LAYOUT, seed=1)
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    attention, ffn = teacher.layers["0"].mixers[0], teacher.layers["0"].ffn
    with torch.no_grad():
        wide = started(Block.parse("W4/4@12", "mixer"), attention, x, 0, 3)
        torch.testing.assert_close(wide(x)[0], attention(x)[0])
        pooled = started(Block.parse("A4/2", "mixer"), attention, x, 0, 3)
        keys = attention.k.weight.view(2, 2, 16, 64).mean(1).flatten(0, 1)
        torch.testing.assert_close(pooled.k.weight, keys)
        ffn.down.weight[:, :64] = 0  # units that add nothing
        half = started(Block.parse("swiglu:64", "ffn"), ffn, x, 0, 3)
        torch.testing.assert_close(half(x), ffn(x))
        scan = started(Block.parse("M16(expand=1,groups=4,heads=4)", "mixer"), attention, x, 0, 3)
        torch.testing.assert_close(scan.in_proj.weight[64:128], attention.v.weight)
        torch.testing.assert_close(parallel(scan.out.weight, attention.o.weight), torch.tensor(1.0))


def test_alternatives_keep_what_positions_mean_and_windows_get_no_latents() -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16(rope_theta=10000) A4/4:16(rope_theta=0) W4/4@32:16 C3]")
    mixers = {slot.depth: default_alternatives(layout, slot, 8) for slot in slots_of(layout) if slot.part == "mixer"}
    latent = [[block for block in mixers[depth] if block and block.kind == "mla"] for depth in range(3)]
    assert [[block.resolve(64).get("rope_theta") for block in blocks] for blocks in latent] == [[10000.0], [0.0], []]
    wide = default_alternatives(layout, Slot(2, "mixer"), 64)
    assert not [block for block in wide if block and block.kind == "swa" and block.int("window") > 32]


def test_a_mixture_has_fewer_experts_or_sends_tokens_to_fewer() -> None:
    layout = Layout.parse("d64 v320 ffn=moe:8x4:32 [A4/4:16 C3]")
    names = [block.format() if block else "-" for block in default_alternatives(layout, Slot(0, "ffn"), 8)]
    assert names == ["moe:4x4:32", "moe:8x2:32", "moe:4x2:32", "-"]
    two = Layout.parse("d64 v320 ffn=moe:2x2:32 [A4/4:16 C3]")
    names = [block.format() if block else "-" for block in default_alternatives(two, Slot(0, "ffn"), 8)]
    assert names == ["moe:2x1:32", "-"]


def test_experts_that_most_tokens_use_are_kept() -> None:
    mixture = (
        Model(Layout.parse("d64 v320 ffn=moe:8x2:32(shared=1,shared_gate=1) [A4/4:16 C3]"), seed=1).layers["0"].ffn
    )
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mixture.bias.weight[[1, 2, 4, 7]] -= 2.0  # no token goes there
        half = started(Block.parse("moe:4x2:32(shared=1,shared_gate=1)", "ffn"), mixture, x, 0, 3)
        torch.testing.assert_close(half(x), mixture(x))
        assert torch.equal(half.router.weight, mixture.router.weight[[0, 3, 5, 6]])
        one = started(Block.parse("moe:8x1:32(shared=1,shared_gate=1)", "ffn"), mixture, x, 0, 3)
        assert torch.equal(one.gate.weight, mixture.gate.weight)


def test_sinks_start_with_what_tokens_before_the_window_weigh() -> None:
    """So tokens in the window keep their weights, which a softmax over the window alone would raise."""
    attention = Model(LAYOUT, seed=1).layers["0"].mixers[0]
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = attention(x)[0][:, 8:]
        plain, sinks = (
            (started(Block.parse(text, "mixer"), attention, x, 0, 3)(x)[0][:, 8:] - y).square().mean()
            for text in ("W4/4@8", "W4/4@8(sink=1)")
        )
        assert sinks < 0.7 * plain
        whole = started(Block.parse("W4/4@64(sink=1)", "mixer"), attention, x, 0, 3)
        assert torch.equal(whole.sinks.weight, torch.zeros(4)), "no token before the window"


def parallel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the cosine of the angle between two matrices."""
    return torch.cosine_similarity(a.flatten(), b.flatten(), 0)


@pytest.mark.parametrize("text", ["M16(expand=1,groups=4,heads=4)", "X4(key_dim=16)", "G4", "C3", "D4"])
def test_mixers_that_normalise_start_with_outputs_no_larger_than_the_trained_ones(text: str) -> None:
    attention = Model(LAYOUT, seed=1).layers["0"].mixers[0]
    x = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(0))
    sizes = []
    with torch.no_grad():
        for factor in (0.01, 1000.0):
            attention.v.weight *= factor
            y, mixer = attention(x)[0], started(Block.parse(text, "mixer"), attention, x, 0, 3)
            sizes.append(float(mixer(x)[0].norm() / y.norm()))
    assert sizes[0] == pytest.approx(1.0, rel=1e-3)
    assert sizes[1] <= 1.001


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_mamba_starts_with_normalised_queries_and_keys(kv_heads: int) -> None:
    """With gains far from 1 and an open gate, the output is nearer to attention's than that of the raw projections."""
    layout = Layout.parse(f"d64 v320 ffn=swiglu:128 [A4/{kv_heads}:16 C3]")
    attention = Model(layout, seed=1).layers["0"].mixers[0]
    x = torch.randn(8, 24, 64, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1.0
    with torch.no_grad():
        attention.q_norm.weight.fill_(4.0)
        attention.k_norm.weight.fill_(4.0)
        scan = started(Block.parse("M16(expand=1,groups=4,heads=4)", "mixer"), attention, x, 0, 2)
        scan.in_proj.weight[:64] = 4.0 * torch.eye(64)[:1]  # the gate reads the constant
        normalised = torch.cosine_similarity(scan(x)[0], attention(x)[0], -1).mean()
        scan.in_proj.weight[128:192] = attention.k.weight.view(kv_heads, 16, 64).repeat_interleave(
            4 // kv_heads, 0
        ).flatten(0, 1)  # fmt: skip
        scan.in_proj.weight[192:256] = attention.q.weight
        raw = torch.cosine_similarity(scan(x)[0], attention(x)[0], -1).mean()
    assert normalised > raw + 0.01


def test_latent_attention_starts_as_the_attention_that_it_can_represent() -> None:
    """One key-value head whose numbers without a frequency of the shared key are zero, and latents of one length."""
    attention = Model(Layout.parse("d64 v320 ffn=swiglu:128 [A4/1:16(qk_norm=0) C3]"), seed=1).layers["0"].mixers[0]
    block = Block.parse("L4/24(nope_dim=8,rope_dim=8)", "mixer")
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention.k.weight.view(2, 8, 64)[:, 1::2] = 0
        for _ in range(2):
            latent = started(block, attention, x, 0, 3)
            x = x / (x @ latent.kv_down.weight[:24].T).square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(latent(x)[0], attention(x)[0], rtol=1e-4, atol=1e-5)


def test_linear_mixers_start_with_queries_keys_and_values() -> None:
    attention = Model(Layout.parse("d64 v320 ffn=swiglu:128 [A4/2:16(qk_norm=0) C3]"), seed=1).layers["0"].mixers[0]
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    keys, values = (
        projection.weight.detach().view(2, 16, 64).repeat_interleave(2, 0).flatten(0, 1)
        for projection in (attention.k, attention.v)
    )
    for text in ("G4", "X4(key_dim=16)"):
        mixer = started(Block.parse(text, "mixer"), attention, x, 0, 3)
        torch.testing.assert_close(mixer.qkv.weight, torch.cat([attention.q.weight, keys, values]))
        torch.testing.assert_close(parallel(mixer.out.weight, attention.o.weight), torch.tensor(1.0))
    drawn = started(Block.parse("X4(key_dim=8)", "mixer"), attention, x, 0, 3)
    assert parallel(drawn.out.weight, attention.o.weight) < 0.5, "heads do not correspond"


@pytest.mark.parametrize(
    "text", ["A8/2:8", "A2/2:16", "A8/8:16", "W4/2@8:32(sink=1)", "A4/4:16(qk_norm_wide=1)", "A4/4:16(gate=1)"]
)
@torch.no_grad()
def test_attention_whose_heads_do_not_correspond_is_drawn(text: str) -> None:
    attention = Model(LAYOUT, seed=1).layers["0"].mixers[0]
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    assert started(Block.parse(text, "mixer"), attention, x, 0, 3)(x)[0].isfinite().all()


def test_settings_name_further_mixers(lab: Path, tmp_path: Path, home: Path) -> None:
    def with_mixers(*mixers: str) -> AdaptSettings:
        return QUICK.model_copy(update={"mixers": mixers})

    one = adaptation(
        lab, tmp_path / "out", tmp_path / "library", settings=with_mixers("L4/48(nope_dim=8,rope_dim=8)", "X4")
    )
    names = [block.format() for block in one.alternatives[Slot(0, "mixer")] if block]
    assert names[-2:] == ["L4/48(nope_dim=8)", "X4"]
    assert one.alternatives[Slot(2, "mixer")] == (None,), "a short convolution is not attention"
    for text, message in (("Z9", "unknown mixer"), ("A4/2:16(kv=0)", "shares the cache"), ("A5/2", "5 heads")):
        with pytest.raises(InvalidInput, match=message):
            adaptation(lab, tmp_path / "other", tmp_path / "library", settings=with_mixers(text))
    assert not (tmp_path / "other").exists()


def test_settings_name_the_kinds_of_alternatives(lab: Path, tmp_path: Path, home: Path) -> None:
    def of_kinds(*kinds: str) -> Adaptation:
        settings = QUICK.model_copy(update={"alternatives": kinds})
        return adaptation(lab, tmp_path / "out", tmp_path / "library", settings=settings)

    blocks = {block and block.kind for slot in of_kinds("swa", "-").alternatives.values() for block in slot}
    assert blocks == {"swa", None}
    for kind, error, message in (("sliding", UnknownName, "kind of block"), ("mla2", UnknownName, "mla")):
        with pytest.raises(error, match=message):
            of_kinds(kind)
    with pytest.raises(InvalidInput, match="no block of this model can become moe"):
        of_kinds("moe")


def test_assembling_with_the_trained_blocks_gives_the_trained_model() -> None:
    teacher = Model(LAYOUT, seed=1)
    weights = dict(teacher.state_dict())
    layout, state = assembled(LAYOUT, weights, {}, {})
    assert layout == LAYOUT
    assert state.keys() == weights.keys()
    removals = {Slot(1, "mixer"): None, Slot(1, "ffn"): None}
    layout, state = assembled(LAYOUT, weights, removals, {})
    assert layout.format() == "d64 v320 ffn=swiglu:128 [A4/4 C3]"
    child = Model(layout, None)
    child.load_state_dict(state)
    ids = torch.arange(10)[None]
    x = teacher.embed(ids)
    for i in ("0", "2"):
        x, _ = teacher.layers[i](x, [None])
    torch.testing.assert_close(child(ids), teacher.logits(teacher.norm(x)))


def test_shared_layers_are_refused() -> None:
    with pytest.raises(Unsupported, match="layer 1"):
        slots_of(Layout.parse("d64 v320 ffn=swiglu:96 [A4/2 ^0]"))


def test_alternatives_learn_alone_whatever_else_is_trained(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    slot, narrow, window = Slot(0, "mixer"), Block.parse("A4/2:16", "mixer"), Block.parse("W4/4@8:16", "mixer")
    settings = SETTINGS.library
    together = Library(tmp_path / "a", teacher, text, settings, alone())
    together.train({slot: (narrow, window, None), Slot(0, "ffn"): (Block.parse("swiglu:64", "ffn"),)})
    single = Library(tmp_path / "b", teacher, text, settings, alone())
    single.train({slot: (narrow,)})
    for name, tensor in single.weights(slot, narrow).items():
        assert torch.equal(tensor, together.weights(slot, narrow)[name]), name
    record = together.record(slot, narrow)
    assert record.error < record.error_start
    scores = together.scores({slot: (narrow, window, None)})
    assert min(scores[slot, narrow].text, scores[slot, window].text) >= 0
    assert max(scores[slot, narrow].text, scores[slot, window].text) < scores[slot, None].text
    assert together.divergence(together.mix({slot: None})) == pytest.approx(scores[slot, None].text, rel=1e-5)


def test_bfloat16_trains_every_alternative_nearly_as_float32_does(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    """Mixers that compute parts of their own in float32 get bfloat16 inputs there. Start and errors are float32."""
    slot = Slot(0, "mixer")
    further = tuple(Block.parse(name, "mixer").canonical(64) for name in ("D4", "G4"))
    blocks = {
        slot: default_alternatives(LAYOUT, slot, 8, further)[:-1],
        Slot(0, "ffn"): default_alternatives(LAYOUT, Slot(0, "ffn"), 8)[:-1],
    }
    full = Library(tmp_path / "full", teacher, text, QUICK.library, alone())
    half = Library(
        tmp_path / "half", teacher, text, QUICK.library.model_copy(update={"precision": "bfloat16"}), alone()
    )
    full.train(blocks)
    half.train(blocks)
    for place, alternatives in blocks.items():
        for block in alternatives:
            assert full.file(place, block).name != half.file(place, block).name
            one, other = full.record(place, block), half.record(place, block)
            assert other.error_start == one.error_start
            assert other.error == pytest.approx(one.error, rel=0.02), block.format()
            assert other.error != one.error, block.format()


def test_scores_in_bfloat16_are_those_in_float32_without_what_rounding_adds(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(0, "ffn")
    settings = QUICK.library.model_copy(update={"score_error": 0.0})
    scores = {}
    for precision in ("float32", "bfloat16"):
        library = Library(
            tmp_path / precision, teacher, text, settings.model_copy(update={"precision": precision}), alone()
        )
        scores[precision] = library.scores({slot: (None,)})[slot, None].text
    assert scores["bfloat16"] != scores["float32"]
    assert scores["bfloat16"] == pytest.approx(scores["float32"], rel=0.01)
    same = Block.parse("swiglu:128", "ffn")
    library = Library(tmp_path / "same", teacher, text, settings.model_copy(update={"precision": "bfloat16"}), alone())
    monkeypatch.setattr(library, "module", lambda place, block: teacher.block(place))
    monkeypatch.setattr(library, "key", lambda place, block: "same")
    assert library.scores({slot: (same,)})[slot, same].text == 0


def test_healing_in_bfloat16_lowers_the_divergence(library: Library, tmp_path: Path, text: list[Tokens]) -> None:
    choice = {Slot(0, "ffn"): None}
    before = library.divergence(library.mix(choice))
    divergences = []
    for precision in ("float32", "bfloat16"):
        healing = SETTINGS.healing.model_copy(update={"precision": precision})
        model = heal(lambda: library.mix(choice), library, batches_of(text, healing), healing, tmp_path / "training")
        assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
        divergences.append(library.divergence(model))
    assert divergences[1] != divergences[0]
    assert before - divergences[1] == pytest.approx(before - divergences[0], rel=0.05)


def test_streams_that_are_kept_save_passes_and_change_nothing(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a kill, which loses them."""
    layout, settings = teacher.layout, SETTINGS.library
    alternatives = {Slot(depth, "ffn"): (Block.parse("swiglu:32", "ffn"),) for depth in range(layout.depth)}
    passed: list[int] = []
    for depth in range(layout.depth):
        teacher.layer(depth).register_forward_hook(lambda *_: passed.append(1))
    hashes, passes, scores = [], [], []
    batch = 4 * Stream.numbers(layout) * settings.sequences * settings.length
    for limit in (0, 2 * batch, 1 << 30):
        monkeypatch.setattr(library_module, "STREAM_BYTES", limit)
        passed.clear()
        library = Library(tmp_path / str(limit), teacher, text, settings, alone())
        library.train(alternatives)
        hashes.append({path.name: sha256_of(path) for path in (library.folder / "blocks").iterdir()})
        passes.append(len(passed))
        passed.clear()
        scores.append((library.scores(alternatives), len(passed)))
    assert hashes[0] == hashes[1] == hashes[2]
    assert scores[0][0] == scores[1][0] == scores[2][0]
    assert scores[2][1] < scores[0][1]
    assert passes[0] - passes[1] == 2, "two batches of four, whose first layer is not passed twice"
    assert passes[0] - passes[2] == settings.steps == 4

    countdown = iter(range(6))  # passes of the first depth, and two of the second

    def hook() -> None:
        if next(countdown, None) is None:
            raise Killed

    monkeypatch.setattr(library_module, "_CHECKPOINT_S", 0.0)
    with pytest.raises(Killed):
        Library(tmp_path / "killed", teacher, text, settings, alone(hook)).train(alternatives)
    library = Library(tmp_path / "killed", teacher, text, settings, alone())
    library.train(alternatives)
    assert {path.name: sha256_of(path) for path in (library.folder / "blocks").iterdir()} == hashes[0]


def test_the_term_of_a_pair_is_what_both_replacements_lose_beyond_their_scores(
    library: Library, tmp_path: Path
) -> None:
    one, other = (Slot(0, "mixer"), None), (Slot(1, "mixer"), None)
    alternatives: dict[Slot, tuple[Block | None, ...]] = {Slot(0, "mixer"): (None,), Slot(1, "mixer"): (None,)}
    assert neighbouring_pairs(alternatives, 9, 0) == [(one, other)]
    (term,) = library.pair_terms([(one, other)]).values()
    scores = library.scores(alternatives)
    both = library.divergence(library.mix({Slot(0, "mixer"): None, Slot(1, "mixer"): None}))
    assert term.text == pytest.approx(both - scores[one].text - scores[other].text, abs=1e-5)
    assert sum(term.windows) / len(term.windows) == pytest.approx(term.text, abs=1e-6)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "library/scores").iterdir()}
    assert len(written) == 3
    assert library.pair_terms([(one, other)])[one, other] == term
    assert written == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "library/scores").iterdir()}


def test_terms_below_twice_their_standard_error_are_noise() -> None:
    assert Score({}, (0.1, 0.12, 0.08, 0.1)).is_significant
    assert not Score({}, (0.1, -0.1, 0.2, -0.1)).is_significant
    assert not Score({}, (0.1,)).is_significant, "one window tells no deviation"


def test_neighbouring_pairs_are_drawn_by_seed() -> None:
    alternatives = {slot: default_alternatives(LAYOUT, slot, 8) for slot in slots_of(LAYOUT)}
    every = neighbouring_pairs(alternatives, 1000, 0)
    mixers = [len(alternatives[Slot(depth, "mixer")]) for depth in range(3)]
    pairs = mixers[0] * (mixers[1] - 1) + mixers[1] * mixers[2]
    assert len(every) == pairs, "layer 1 may read keys and values of layer 0, but of no block in its place"
    assert {(a.depth, b.depth) for (a, _), (b, _) in every} == {(0, 1), (1, 2)}
    drawn = neighbouring_pairs(alternatives, 5, 0)
    assert len(drawn) == 5 and set(drawn) < set(every)
    assert drawn == neighbouring_pairs(alternatives, 5, 0) != neighbouring_pairs(alternatives, 5, 1)
    assert neighbouring_pairs(alternatives, 0, 0) == []


def test_recall_and_pairs_are_part_of_what_is_selected_by(lab: Path, tmp_path: Path, home: Path) -> None:
    settings = RECALLING.model_copy(update={"recall": 0.5, "pairs": 12})
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=settings)
    report = one.run()
    choice = {Slot(depth, part): parsed(name, part) for depth, part, name in report["child"]["choice"]}
    terms = one.choices.terms(one.alternatives)
    assert terms, "some pairs are more than noise"
    scores = one.library.scores({slot: (block,) for slot, block in choice.items()})
    chosen = set(choice.items())
    added = [*scores.values(), *(term for pair, term in terms.items() if chosen.issuperset(pair))]
    assert not any(block is None for block in choice.values()), "layers that are left out are scored as a whole"
    expected = sum(score.text + 0.5 * score.kl[RECALL_GROUP] for score in added)
    assert report["child"]["predicted"]["loss"] == pytest.approx(expected)
    assert report["child"]["recall_divergence"] >= 0
    assert report["held_out"]["report"]["bytes"] > 1000
    assert report["windows"] == {"scores": one.request.library.window, "healing": one.request.healing.length}


@pytest.mark.parametrize(
    ("lr", "slower", "why"), [("30", "3", "divergence"), ("1e+30", "1e+29", "the loss is not finite")]
)
def test_healing_that_harms_or_diverges_is_undone(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], lr: str, slower: str, why: str
) -> None:
    lines: list[str] = []
    library = Library(tmp_path / "library", teacher, text, SETTINGS.library, Worker(torch.device("cpu"), lines.append))
    healing = SETTINGS.healing.model_copy(update={"lr": float(lr)})
    choice = {Slot(0, "ffn"): None}
    model = heal(lambda: library.mix(choice), library, batches_of(text, healing), healing, tmp_path / "training")
    for name, tensor in library.mix(choice).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    undone = [line.partition(" is undone")[0] for line in lines if f" is undone: {why}" in line]
    assert undone == [f"healing with lr {lr}", f"healing with lr {slower}"]


@pytest.mark.parametrize(("arguments", "moved"), [("", True), ("(softmax=1)", False)])
def test_healing_gives_experts_that_are_scored_by_a_softmax_no_bias(
    tmp_path: Path, text: list[Tokens], arguments: str, moved: bool
) -> None:
    save_weights(Model(Layout.parse(f"d64 v320 ffn=moe:4x2:32{arguments} [A4/4:16 C3]"), seed=1), tmp_path / "model")
    teacher = TrainedTeacher.load(tmp_path / "model", torch.device("cpu"))
    library, healing = Library(tmp_path / "library", teacher, text, SETTINGS.library, alone()), SETTINGS.healing
    model = library.mix({})
    train_child(model, library, batches_of(text, healing), healing, tmp_path / "training")
    assert bool(model.layers["0"].ffn.bias.weight.any()) is moved


def test_a_child_with_the_blocks_of_the_model_is_not_healed(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    lines: list[str] = []
    library = Library(tmp_path / "library", teacher, text, SETTINGS.library, Worker(torch.device("cpu"), lines.append))
    healing = SETTINGS.healing
    model = heal(lambda: library.mix({}), library, batches_of(text, healing), healing, tmp_path / "training")
    assert library.divergence(model) == 0
    assert lines == ["nothing is healed: the child computes what the model does"]
    assert not (tmp_path / "training").exists()


def test_the_time_of_healing_is_that_of_its_steps(
    lab: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=QUICK)
    steps: list[int] = []

    def counted(state: TrainingState, *rest: Any, **more: Any) -> None:
        steps.append(state.steps)
        fit(state, *rest, **more)

    monkeypatch.setattr("nas.train.adapt.healing.fit", counted)
    assert one._healing_seconds(alone()) > 0
    assert steps == [1, 3]
    assert not list((tmp_path / "out/training").iterdir())


def test_healing_at_too_high_a_rate_is_done_again_at_a_tenth(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    lines: list[str] = []
    library = Library(tmp_path / "library", teacher, text, SETTINGS.library, Worker(torch.device("cpu"), lines.append))
    choice = {Slot(0, "ffn"): None}
    before = library.divergence(library.mix(choice))
    healing = SETTINGS.healing.model_copy(update={"lr": 0.1})
    model = heal(lambda: library.mix(choice), library, batches_of(text, healing), healing, tmp_path / "training")
    after = library.divergence(model)
    assert after < before
    assert [line for line in lines if line.startswith("healing with lr 0.1 is undone: divergence")]
    slower = SETTINGS.healing.model_copy(update={"lr": 0.01})
    again = heal(lambda: library.mix(choice), library, batches_of(text, slower), slower, tmp_path / "slower")
    assert library.divergence(again) == after, "from the same start"


def test_a_child_keeps_the_budget_and_kills_do_not_change_it(lab: Path, tmp_path: Path, home: Path) -> None:
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1

    report = adaptation(lab, tmp_path / "whole", tmp_path / "library", alone(counted)).run()
    child = report["child"]
    assert child["measured"]["decode_p50"] <= 0.8 * work_of(LAYOUT)["decode_p50"]
    assert child["divergence"] < child["divergence_before_healing"]
    assert child["layout"] != LAYOUT.format()
    assert len(report["front"]) >= 2

    rng, countdown = random.Random(0), 0

    def killed() -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise Killed

    kills = 0
    for _ in range(3):
        countdown = rng.randint(1, calls)
        try:
            again = adaptation(lab, tmp_path / "killed", tmp_path / "other", alone(killed)).run()
            break
        except Killed:
            kills += 1
    else:
        again = adaptation(lab, tmp_path / "killed", tmp_path / "other").run()
    assert kills > 0
    assert json.dumps(again, sort_keys=True) == json.dumps(report, sort_keys=True)
    both = [(tmp_path / name / CHILD).read_bytes() for name in ("whole", "killed")]
    assert hashlib.sha256(both[0]).digest() == hashlib.sha256(both[1]).digest()

    with pytest.raises(InvalidInput, match=r"other settings \(budgets\)"):
        adaptation(lab, tmp_path / "whole", tmp_path / "library", budget="decode_p50<=1ms")

    blocks = tmp_path / "library" / "blocks"
    for repeated, trained in ((False, 0), (True, sum(name != "-" for _, _, name in child["choice"]))):
        shutil.rmtree(blocks, ignore_errors=True)
        if repeated:
            (tmp_path / "whole" / REPORT).unlink()
        assert adaptation(lab, tmp_path / "whole", tmp_path / "library").run() == report
        assert len(list(blocks.glob("*"))) == trained, "only blocks of the chosen child are trained again"


def test_a_layer_is_left_out_where_the_runtime_refuses_one_without_a_mixer_or_feed_forward(
    lab: Path, tmp_path: Path, home: Path
) -> None:
    def with_mixer(layout: Layout) -> Mapping[str, float]:
        if not all(layer.mixers for layer in layout.layers):
            raise Unsupported("a layer has no mixer")
        return {"decode_p50": float(layout.depth)}

    def with_both(layout: Layout) -> Mapping[str, float]:
        if not all(layer.ffn for layer in layout.layers):
            raise Unsupported("a layer has no feed-forward")
        return with_mixer(layout)

    for measure in (with_mixer, with_both):
        out = tmp_path / measure.__name__
        one = adaptation(lab, out, tmp_path / "library", budget="decode_p50<=2ms", measure=measure, settings=FEW)
        report = one.run()
        child = Layout.parse(report["child"]["layout"])
        scores = one.library.scores({Slot(depth, "layer"): (None,) for depth in range(3)})
        least = min(scores, key=lambda replacement: scores[replacement].text)[0].depth
        assert child.layers == tuple(layer for depth, layer in enumerate(LAYOUT.layers) if depth != least)
        assert report["child"]["predicted"]["loss"] == pytest.approx(min(score.text for score in scores.values()))
        assert report["child"]["predicted"]["decode_p50"] == pytest.approx(2)

    windows = FEW.model_copy(update={"alternatives": ("swa",)})
    one = adaptation(
        lab, tmp_path / "windows", tmp_path / "library", budget="decode_p50<=2ms", measure=with_both, settings=windows
    )
    with pytest.raises(InvalidInput, match="no choice of blocks keeps decode_p50"):
        one.run()  # nothing may be left out


def test_a_figure_that_some_layouts_lack_ends_nothing(lab: Path, tmp_path: Path, home: Path) -> None:
    """Such as energy, of which a coarse counter tells that of long runs alone."""

    def measure(layout: Layout) -> Mapping[str, float]:
        energy = {"energy_mj_per_token": float(layout.depth)} if all(layer.ffn for layer in layout.layers) else {}
        return {**work_of(layout), **energy}

    problem = adaptation(lab, tmp_path / "out", tmp_path / "library", measure=measure, settings=FEW).choices.problem()
    mixers, ffns = (problem.options[Slot(0, part)] for part in ("mixer", "ffn"))
    (without,) = (option for option in ffns if option.empty)
    (layer,) = (option for option in mixers if option.name == "no layer")
    assert without.costs.keys() == {"decode_p50", "file_size"}
    assert layer.costs["energy_mj_per_token"] == -1.0
    limit = "energy_mj_per_token<=2mJ"
    one = adaptation(lab, tmp_path / "of energy", tmp_path / "library", budget=limit, measure=measure, settings=FEW)
    report = one.run()
    assert report["child"]["measured"]["energy_mj_per_token"] == 2
    assert all(layer.ffn for layer in Layout.parse(report["child"]["layout"]).layers)


def test_a_layer_without_which_the_score_is_not_finite_stays(
    lab: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_of, nothing = Library.scores, Score({TEXT_GROUP: math.nan}, (math.nan,))

    def scores(library: Library, alternatives: Any) -> dict[Any, Score]:
        computed = scores_of(library, alternatives)
        return {one: nothing if one[0].part == "layer" else score for one, score in computed.items()}

    monkeypatch.setattr(Library, "scores", scores)
    problem = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=FEW).choices.problem()
    options = [option for listed in problem.options.values() for option in listed]
    assert options and all(math.isfinite(option.loss) for option in options)
    assert "no layer" not in {option.name for option in options}


def test_what_the_runtime_does_not_carry_is_not_trained(lab: Path, tmp_path: Path, home: Path) -> None:
    def measure(layout: Layout) -> Mapping[str, float]:
        if any(mixer.kind in ("mlstm", "mla", "mamba2") for layer in layout.layers for mixer in layer.mixers):
            raise Unsupported("no kernel")
        return work_of(layout)

    one = adaptation(lab, tmp_path / "out", tmp_path / "library", measure=measure, settings=QUICK)
    one.run()
    trained = {slot: [block for block in blocks if block] for slot, blocks in one.alternatives.items()}
    kinds = {
        block.kind for slot, blocks in trained.items() for block in blocks if one.library.file(slot, block).is_file()
    }
    assert kinds == {"gqa", "swa", "conv", "swiglu"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"budget": ("decode_p50<=20ms", "decode_p50<=0.8x")}, "several budgets of one metric"),
        ({"budget": ("encoding<=5ms",)}, "encoding is not measured by a request of 512 tokens in and 128 out"),
        ({"gguf": ("q4",)}, "q4"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_imported(
    lab: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    request = AdaptRequest(
        model=lab / "teacher.safetensors", corpus=(lab / "text",), output=tmp_path / "out",
        **{"budget": ("file_size<=0.1MB",)} | keys,
    )  # fmt: skip
    with pytest.raises(NasError, match=message):
        prepare(request, lambda layouts: ArithmeticBench(), alone())
    assert not (tmp_path / "out").exists()


def test_a_budget_that_no_choice_keeps_is_refused(lab: Path, tmp_path: Path, home: Path) -> None:
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", budget="file_size<=0.001MB", settings=FEW)
    with pytest.raises(InvalidInput, match="no choice of blocks keeps file_size"):
        one.run()


def command(
    lab: Path, folder: Path, *more: str, budget: str = "file_size<=0.1MB", settings: AdaptSettings = SETTINGS,
    **other: Path,
) -> tuple[str, ...]:  # fmt: skip
    """The command of an adaptation in a folder, with some paths replaced."""
    paths = {"model": lab / "teacher.safetensors", "tokenizer": lab / "tokenizer.json", "corpus": lab / "text",
             "output": folder / "out"} | other  # fmt: skip
    (folder / "settings.json").write_text(settings.model_dump_json())
    return (
        "adapt", str(paths["model"]), "-b", budget, "-c", str(paths["corpus"]), "-o", str(paths["output"]),
        "--tokenizer", str(paths["tokenizer"]), "--config", str(folder / "settings.json"),
        "--library", str(folder / "library"), *more,
    )  # fmt: skip


def test_the_command_writes_files_and_a_card(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DeviceBench, "measure", arithmetic)
    limit = work_of(LAYOUT)["decode_p50"] * 0.8
    argv = command(lab, tmp_path, "--gguf", "f16", budget=f"decode_p50<={limit:.6f}ms", settings=FEW)
    shares, shared = count(), HostLock.shared
    monkeypatch.setattr(HostLock, "shared", lambda lock: (shared(lock), next(shares))[0])
    done = nas(*argv)
    assert done.code == 0, done.err
    assert next(shares) > FEW.healing.tokens // FEW.healing.length, "others measure between its passes"
    assert "bits per byte" in done.out and "decode_p50 [ms]" in done.out and " ms, model " in done.out
    card = (tmp_path / "out/files/README.md").read_text()
    assert "tokens to choose blocks and to judge healing; another" in card
    assert "adapted from" in card and "before healing" in card
    assert (tmp_path / "out/files/gguf/child-F16.gguf").is_file()
    assert (tmp_path / "out/files/transformers/config.json").is_file()
    again = nas(*argv, "--json")
    assert json.loads(again.out)["child"]["measured"]["decode_p50"] <= limit


def arithmetic(bench: DeviceBench, layout: Layout, *, fresh: bool = False) -> Measured:
    return ArithmeticBench(work_of).measure(layout, fresh=fresh)


def test_a_model_without_a_tokenizer_is_refused(lab: Path, tmp_path: Path) -> None:
    done = nas("adapt", str(lab / "teacher.safetensors"), "-b", "ttft<=1s", "-c", str(lab), "-o", str(tmp_path / "out"))
    assert done.code == 3
    assert "--tokenizer" in done.err


@pytest.mark.parametrize(
    ("text", "error"),
    [("decode_p50=20ms", "METRIC<=LIMIT"), ("prefill_tps<=3tok/s", "no cost"), ("decode_p50<=1.2x", "multiple"),
     ("decode_p50<=20MB", "in MB")],
)  # fmt: skip
def test_budgets_that_cannot_be_read(text: str, error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        Limit.parse(text)
    with pytest.raises(UnknownName):
        Limit.parse("decode_p55<=20ms")


def refused(lab: Path, tmp_path: Path, **other: Path) -> str:
    """Runs the command with some paths replaced; returns its error, a single line, after which nothing is claimed."""
    done = nas(*command(lab, tmp_path, **other))
    assert done.code in (3, 4)
    assert len(done.err.strip().splitlines()) == 1
    assert not (other.get("output", tmp_path / "out") / "request.json").exists()
    assert not list((tmp_path / "library").glob("blocks/*"))
    return done.err


@pytest.fixture
def nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: DeviceBench, layout: Layout, *, fresh: bool = False) -> Measured:
        raise AssertionError("measured")

    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DeviceBench, "measure", measure)


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_tokenizer_that_does_not_fit_is_refused(lab: Path, tmp_path: Path) -> None:
    larger = write_tokenizer(tmp_path / "larger.json", lab / "text", 330)
    assert "330 tokens, but the model's embedding 320 rows; name the" in refused(lab, tmp_path, tokenizer=larger)
    other = json.loads((lab / "tokenizer.json").read_text()) | {"pre_tokenizer": None}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert "loses text" in refused(lab, tmp_path, tokenizer=tmp_path / "other.json")
    (tmp_path / "damaged.json").write_text("{")
    assert "no tokenizer.json" in refused(lab, tmp_path, tokenizer=tmp_path / "damaged.json")


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("size", [LAYOUT.vocab, 300])
def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(size: int, lab: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words/1.txt").write_text("other words than those of the model's text " * 200)
    wrong = write_tokenizer(tmp_path / "wrong.json", tmp_path / "words", size)
    error = refused(lab, tmp_path, tokenizer=wrong)
    assert "wrong.json, the model predicts held-out text no better than the frequencies of tokens" in error


def test_a_child_keeps_the_tokenizer_of_its_model(lab: Path, tmp_path: Path, home: Path) -> None:
    """Its embedding has more rows than the tokenizer tokens, as padded ones have."""
    texts = [path.read_text() for path in sorted((lab / "text").iterdir())]
    path = write_model_tokenizer(tmp_path / "model", FORMS["qwen3"], texts, 300)
    (path.parent / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", tokenizer=path, settings=FEW)
    report = one.run()
    assert 0 < report["teacher"]["bits_per_byte"] < 20
    files = write_child(one, report)
    assert any(name.endswith("gguf/child-F16.gguf") for name in files)
    carried = tmp_path / "out/files/transformers"
    assert (carried / "tokenizer.json").read_bytes() == path.read_bytes()
    assert json.loads((carried / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert json.loads((carried / "config.json").read_text())["max_position_embeddings"] == 2048


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_pickled_checkpoint_is_refused(lab: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pt")
    assert "pickled weights are never read; save them as safetensors" in refused(
        lab, tmp_path, model=tmp_path / "model.pt"
    )


def test_trainings_are_scaled_to_hours_once(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    messages: list[str] = []
    worker = Worker(torch.device("cpu"), messages.append)

    def start(hours: float | None) -> Adaptation:
        return adaptation(lab, tmp_path / "out", tmp_path / "library", worker, hours=hours, settings=QUICK)

    with pytest.raises(InvalidInput, match="1e-09 hours are too few: scores and measurements take"):
        start(1e-9).claim()
    assert not (tmp_path / "out/request.json").exists()
    parts = LibraryTimes(0.01, 0.02, 10.0)
    monkeypatch.setattr(adapt, "time_library", lambda *_: parts)
    monkeypatch.setattr(Adaptation, "_healing_seconds", lambda self, quiet: 0.1)
    one = start(1.0)
    one.claim()
    tokens = json.loads((tmp_path / "out/request.json").read_bytes())["tokens"]
    assert tokens == {"library": one.library.settings.tokens, "healing": one.request.healing.tokens}
    seconds = 10 + 0.01 * tokens["library"] + 0.1 * tokens["healing"]
    assert 0.98 * 3600 * (1 - RESERVE) < seconds <= 3600 * (1 - RESERVE)
    assert tokens["healing"] == pytest.approx(8 * tokens["library"], rel=0.1), "in the proportion of the settings"
    assert f"each alternative is trained on {tokens['library']:,} tokens" in messages[-1]

    monkeypatch.setattr(adapt, "time_library", None)  # not timed again
    again = start(1.0)
    again.claim()
    assert again.library.settings == one.library.settings and again.request == one.request
    for other in (2.0, None):
        with pytest.raises(InvalidInput, match=r"other settings \(hours\)"):
            start(other)


def test_parts_are_timed_on_the_model(teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]) -> None:
    alternatives = {slot: default_alternatives(LAYOUT, slot, 8) for slot in slots_of(LAYOUT)}
    messages: list[str] = []
    places: set[Path] = set()

    def opened(folder: Path, settings: LibrarySettings) -> Library:
        places.add(folder.parent.parent)
        return Library(folder, teacher, text, settings, alone())

    timed = time_library(opened, SETTINGS.library, alternatives, messages.append, tmp_path)
    assert places == {tmp_path} and not list(tmp_path.iterdir())
    kinds = len(set(LAYOUT.layers))
    work = ("training", "scores")
    steps = [
        f"timed kinds of layers: {n} of {kinds}, {what} of their alternatives" for n in range(kinds) for what in work
    ]
    assert messages == [*steps, f"timed kinds of layers: {kinds} of {kinds}"]
    assert 0 < timed.token < 10 and 0 < timed.recomputed_token < 1 and 0 < timed.scores < 600
    with pytest.raises(InvalidInput, match="too few"):
        PartTimes(1.0, 0.0, 0, 1.0, 1.0, 3600.0).tokens(1.0, 1024, 1024)


def test_what_only_the_first_training_takes_is_not_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trainings = 0.0, count()

    def train(steps: int) -> None:
        nonlocal clock
        clock += steps + 10.0 * (next(trainings) == 0)

    monkeypatch.setattr(hours_module, "time", types.SimpleNamespace(monotonic=lambda: clock))
    assert hours_module._step_seconds(train) == 1.0


def test_layers_are_timed_as_steps_of_trainings_run_them(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    settings = SETTINGS.library.model_copy(update={"precision": "bfloat16"})
    passes: list[tuple[int, bool]] = []
    teacher.layer(0).register_forward_hook(
        lambda module, inputs, outputs: passes.append((inputs[0][..., 0].numel(), torch.is_autocast_enabled("cpu")))
    )
    assert hours_module._layer_seconds(Library(tmp_path, teacher, text, settings, alone())) > 0
    assert set(passes) == {(settings.sequences * settings.length, True)}


@pytest.mark.parametrize("stored_tokens", [0, 10_000, 1 << 30])
def test_tokens_whose_streams_are_not_kept_take_longer(stored_tokens: int) -> None:
    parts = PartTimes(0.01, 0.02, stored_tokens, 0.1, scores=10.0, measurements=50.0)
    library, healing = parts.tokens(1.0, 1 << 16, 1 << 14)
    seconds = 60 + 0.01 * library + 0.02 * max(0, library - stored_tokens) + 0.1 * healing
    assert 0.96 * 3600 * (1 - RESERVE) < seconds <= 3600 * (1 - RESERVE)


def test_a_folder_is_imported_once_and_after_the_checks(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    weights = Checkpoint(lab / "teacher.safetensors", sha256_of(lab / "teacher.safetensors"))
    options = FileOptions(tokenizer=lab / "tokenizer.json", gguf=(), dtype="float32")
    write_files(model, LAYOUT, weights, options, lambda line: None)
    (model / "transformers").rename(tmp_path / "teacher")
    messages: list[str] = []
    worker = Worker(torch.device("cpu"), messages.append)

    def start(**other: Any) -> Adaptation:
        return adaptation(lab, tmp_path / "out", tmp_path / "library", worker, teacher=tmp_path / "teacher", **other)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
        with pytest.raises(InfrastructureFailed, match="MB are needed"):
            start()
    assert not (tmp_path / "out/teacher.safetensors").exists() and not messages
    half_written = [tmp_path / "out" / name for name in ("teacher.safetensors.0f1e.partial", ".child.safetensors.x1")]
    for path in half_written:
        path.touch()
    start().claim()
    assert not any(path.exists() for path in half_written)
    assert len([line for line in messages if line.startswith("importing")]) == 1
    mtime = (tmp_path / "out/teacher.safetensors").stat().st_mtime_ns
    assert start().teacher.layout == LAYOUT
    assert (tmp_path / "out/teacher.safetensors").stat().st_mtime_ns == mtime

    (tmp_path / "out/teacher.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"other settings \(budgets\)"):
        start(budget="decode_p50<=1ms")
    assert not (tmp_path / "out/teacher.safetensors").exists()

    (tmp_path / "teacher/config.json").write_bytes((tmp_path / "teacher/config.json").read_bytes() + b" ")
    start()
    assert len([line for line in messages if line.startswith("importing")]) == 2, "the folder has changed"


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_gguf_file_and_what_import_made_of_it_are_adapted_with_their_tokenizer(lab: Path, tmp_path: Path) -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:96 [A4/2:32*2]")
    texts = [path.read_text() for path in sorted((lab / "text").iterdir())]
    path = write_model_tokenizer(tmp_path / "model", FORMS["qwen3"], texts, 320)
    save_weights(Model(layout, seed=1), tmp_path / "weights.safetensors")
    weights = Checkpoint(tmp_path / "weights.safetensors", sha256_of(tmp_path / "weights.safetensors"))
    tokenizer = read_model_tokenizer(path)
    options = FileOptions(name="m", tokenizer=tokenizer, gguf=("f16",))
    write_files(tmp_path / "files", layout, weights, options, lambda line: None)
    (file,) = (tmp_path / "files/gguf").glob("*.gguf")
    assert nas("import", str(file), "-o", str(tmp_path / "m.safetensors")).code == 0
    for model in (file, tmp_path / "m.safetensors"):
        request = AdaptRequest(
            **dict(SETTINGS), model=model, corpus=(lab / "text",), budget=("file_size<=0.1MB",),
            output=tmp_path / f"out{model.suffix}", library_folder=tmp_path / "library",
        )  # fmt: skip
        one = prepare(request, lambda layouts: ArithmeticBench(work_of), alone())
        assert one.teacher.layout.depth == 2
        assert one.tokenizer.tokenizer.encode(texts[0]).ids == tokenizer.tokenizer.encode(texts[0]).ids


@pytest.mark.usefixtures("nothing_is_measured")
def test_ctrl_c_says_how_to_continue(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(one: Adaptation) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Adaptation, "check_text", interrupted)
    done = nas(*command(lab, tmp_path))
    assert done.code == 130 and "interrupted; the same command continues" in done.err


@pytest.mark.usefixtures("nothing_is_measured")
def test_settings_that_are_not_there_are_refused(lab: Path, tmp_path: Path) -> None:
    done = nas(
        "adapt", str(lab / "teacher.safetensors"), "-b", "ttft<=1s", "-c", str(lab / "text"), "-o", str(tmp_path / "o"),
        "--tokenizer", str(lab / "tokenizer.json"), "--config", str(tmp_path / "none.json"),
    )  # fmt: skip
    assert done.code == 3
    assert done.err == f"nas: --config: cannot read {tmp_path / 'none.json'}: No such file or directory\n"


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_model_that_no_layout_says_is_refused(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "no layout says" in refused(lab, tmp_path, model=tmp_path / "model")


@pytest.mark.usefixtures("nothing_is_measured")
def test_too_little_text_is_refused(lab: Path, teacher: TrainedTeacher, tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("One line.\n" * 100)
    assert "200 bytes would be held out" in refused(lab, tmp_path, corpus=tmp_path / "small.txt")
    (tmp_path / "repeated.txt").write_text(" ".join(["small"] * 1000))
    text = Vocabulary(lab / "tokenizer.json", LAYOUT.vocab).encode(" small" * 200)
    wide = SETTINGS.library.model_copy(update={"score_length": 4 * len(text)})
    source = tokenise(
        read_sources([tmp_path / "repeated.txt"], 0.2)[0], Vocabulary(lab / "tokenizer.json", 320), None, 0, 1 << 16
    )
    with pytest.raises(InvalidInput, match=r"half of what is held out is .* tokens, but scores take"):
        Library(tmp_path / "library", teacher, [source], wide, alone())


@pytest.mark.usefixtures("nothing_is_measured")
def test_folders_that_cannot_be_written_are_refused(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/adapted")):
        assert f"cannot write to {output}" in refused(lab, tmp_path, output=output)


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_disk_without_room_is_refused(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    assert "but the disk has 0.0 MB free; free some with `nas gc`" in refused(lab, tmp_path)


def test_the_space_of_a_library_covers_its_files(library: Library, tmp_path: Path) -> None:
    alternatives = {slot: default_alternatives(LAYOUT, slot, 8) for slot in slots_of(LAYOUT)[:2]}
    expected = library.missing_bytes(alternatives)
    library.train(alternatives)
    size = sum(path.stat().st_size for path in (tmp_path / "library" / "blocks").iterdir())
    assert size / 2 < expected / 7 < size  # of one depth: the blocks, and checkpoints six times as large
    assert library.missing_bytes(alternatives) == 0


def test_gc_removes_blocks_that_no_adaptation_uses(
    library: Library, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path))  # where a library is by default
    Store.open().close()  # gc asks the default database what is needed
    old, new = Block.parse("swiglu:64", "ffn"), Block.parse("swiglu:32", "ffn")
    library.train({Slot(0, "ffn"): (old, new)})
    library.scores({Slot(0, "ffn"): (old, new)})
    library.train({Slot(0, "ffn"): (old,)})  # used again
    files = {path.stem: path.stat().st_size for path in (tmp_path / "library" / "blocks").iterdir()}
    first, second = library.key(Slot(0, "ffn"), new), library.key(Slot(0, "ffn"), old)
    with library.in_use():
        result = nas("gc", "--keep", "0.001MB", "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["library"] == 0
    assert trim(tmp_path / "library", files[second]) == files[first]
    assert [path.stem for path in (tmp_path / "library" / "blocks").iterdir()] == [second]
    assert json.loads(nas("gc", "--keep", "0.001MB", "--json").out)["library"] == files[second]
    assert len(list((tmp_path / "library" / "scores").iterdir())) == 2
    library.train({Slot(0, "ffn"): (old,)})
    assert (tmp_path / "library" / "blocks" / f"{second}.safetensors").stat().st_size == files[second]


def test_gc_removes_what_killed_processes_left_half_written(tmp_path: Path) -> None:
    for name in ("blocks/.1.safetensors.x", "training/.2.safetensors.y"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes(10))
    assert trim(tmp_path, 20) == 0
    assert trim(tmp_path, 0) == 20
    assert not [path for path in tmp_path.glob("*/*") if path.is_file()]


def test_blocks_and_their_errors_depend_on_no_text_of_scores(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    slot, block = Slot(0, "ffn"), Block.parse("swiglu:64", "ffn")
    results = set()
    for number, changes in enumerate(({"score_tokens": 64}, {"score_tokens": 1024}, {"score_length": 64})):
        settings = QUICK.library.model_copy(update=changes)
        library = Library(tmp_path / str(number), teacher, text, settings, alone())
        library.train({slot: (block,)})
        results.add((library.key(slot, block), library.record(slot, block).error))
    assert len(results) == 1


def test_scores_see_as_far_as_a_request_of_the_device(
    lab: Path, teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    request = AdaptRequest(
        model=lab, budget=("file_size<=1MB",), corpus=(lab,), output=tmp_path, prompt=48, gen=16, **dict(QUICK)
    )
    unnamed = request.model_copy(update={"library": request.library.model_copy(update={"score_length": None})})
    assert unnamed.completed("float32").library.score_length == 64
    assert unnamed.model_copy(update={"prompt": 9000}).completed("float32").library.score_length == 2048
    assert request.completed("float32").library == request.library.model_copy(update={"precision": "float32"})

    slot, block = Slot(0, "mixer"), Block.parse("W4/4@16", "mixer")
    losses = []
    for length in (16, 64):
        settings = QUICK.library.model_copy(update={"length": 16, "score_length": length, "score_error": 0.0})
        library = Library(tmp_path / "library", teacher, text, settings, alone())
        library.train({slot: (block,)})
        start = started(block, teacher.model.layers["0"].mixers[0], torch.zeros(1, 8, 64), 0, 2)
        mix = mix_of(teacher.model, {slot: block}, {slot: start.state_dict()})
        losses.append(library.divergence(mix))
    assert losses[0] == pytest.approx(0.0, abs=1e-6), "a window of 16 tokens holds all of 16"
    assert losses[1] > 1e-4


@pytest.mark.parametrize("factor", [1e30, math.nan])
def test_an_alternative_that_diverges_is_left_out_alone(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    slot, sound = Slot(0, "ffn"), tuple(Block.parse(name, "ffn") for name in ("swiglu:64", "swiglu:32"))
    wild = Block.parse("swiglu:96", "ffn")
    calm = Library(tmp_path / "calm", teacher, text, SETTINGS.library, alone())
    calm.train({slot: sound})

    def started_wildly(block: Block, *rest: Any) -> torch.nn.Module:
        module = started(block, *rest)
        if block == wild:
            with torch.no_grad():
                next(module.parameters()).mul_(factor)
        return module

    monkeypatch.setattr(library_module, "started", started_wildly)
    lines: list[str] = []
    worker = Worker(torch.device("cpu"), lines.append)
    for _ in range(2):
        library = Library(tmp_path / "library", teacher, text, SETTINGS.library, worker)
        assert library.train({slot: (wild, *sound, None)}) == {slot: (*sound, None)}
    assert len([line for line in lines if "swiglu:96 in place of the ffn diverged and is left out" in line]) == 1
    assert library.missing_bytes({slot: (wild, *sound)}) == 0
    for block in sound:
        assert sha256_of(library.file(slot, block)) == sha256_of(calm.file(slot, block))


def test_a_kill_while_blocks_are_stored_trains_none_of_them_again(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, blocks = Slot(0, "ffn"), tuple(Block.parse(name, "ffn") for name in ("swiglu:64", "swiglu:32"))
    whole = Library(tmp_path / "whole", teacher, text, QUICK.library, alone())
    whole.train({slot: blocks})
    lines: list[Any] = []
    library = Library(tmp_path / "library", teacher, text, QUICK.library, Worker(torch.device("cpu"), lines.append))
    store = library_module.save_tensors

    def killed(*arguments: Any) -> None:
        store(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(library_module, "save_tensors", killed)
        with pytest.raises(Killed):
            library.train({slot: blocks})
    assert [library.is_trained(slot, block) for block in blocks] == [True, False]
    library.train({slot: blocks})
    assert "training 2 blocks of depth 0 from step 1 to 1" in lines
    assert not list((tmp_path / "library" / "training").iterdir())
    for block in blocks:
        assert sha256_of(library.file(slot, block)) == sha256_of(whole.file(slot, block))


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:-1], lambda content: bytes(len(content))]
)
def test_a_damaged_block_is_trained_again(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], damage: Any
) -> None:
    lines: list[str] = []
    library = Library(tmp_path, teacher, text, QUICK.library, Worker(torch.device("cpu"), lines.append))
    slot, block = Slot(0, "ffn"), Block.parse("swiglu:64", "ffn")
    library.train({slot: (block,)})
    path = library.file(slot, block)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    library.train({slot: (block,)})
    assert path.read_bytes() == content
    assert [line for line in lines if "is damaged and removed" in line]


def test_a_healing_does_not_resume_one_of_other_start_weights(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    slot, block = Slot(0, "ffn"), Block.parse("swiglu:64", "ffn")
    packed = batches_of(text, QUICK.healing)
    weights = {}
    for name, tokens, folder in (("old", 256, "one"), ("new", 4096, "one"), ("apart", 4096, "two")):
        settings = QUICK.library.model_copy(update={"tokens": tokens})
        library = Library(tmp_path / "library", teacher, text, settings, alone())
        library.train({slot: (block,)})
        model = heal(lambda: library.mix({slot: block}), library, packed, QUICK.healing, tmp_path / folder)  # noqa: B023
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(weights["new"], weights["apart"])
    assert not torch.equal(weights["new"], weights["old"])


def test_a_score_takes_windows_until_its_error_is_small(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens]
) -> None:
    settings = SETTINGS.library.model_copy(update={"score_tokens": 32 * 32})
    everything: dict[Slot, tuple[Block | None, ...]] = {slot: (None,) for slot in slots_of(LAYOUT)}

    def scores(error: float) -> dict[Any, Score]:
        sized = settings.model_copy(update={"score_error": error})
        return Library(tmp_path / "library", teacher, text, sized, alone()).scores(everything)

    exact, few = scores(0.0), scores(1e9)
    error = 1.5 * median(standard_error(score.windows) / fmean(score.windows) for score in exact.values())
    between = scores(error)
    counts = {len(score.windows) for score in exact.values()}
    assert len(counts) == 1
    assert {len(score.windows) for score in few.values()} == {8}
    assert any(8 < len(score.windows) < max(counts) for score in between.values()), "each by its own error"
    for replacement, score in between.items():
        count = len(score.windows)
        assert score.windows == exact[replacement].windows[:count]
        assert score.text == pytest.approx(fmean(score.windows), rel=1e-6)
        assert count == max(counts) or standard_error(score.windows) < error * fmean(score.windows)


def test_a_score_that_is_not_finite_is_a_score(
    teacher: TrainedTeacher, tmp_path: Path, text: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QUICK.library.model_copy(update={"score_tokens": 32 * 32})
    library = Library(tmp_path / "library", teacher, text, settings, alone())
    slot, block = Slot(0, "ffn"), Block.parse("swiglu:64", "ffn")
    library.train({slot: (block,)})
    module_of = library.module

    def infinite(place: Slot, alternative: Alternative) -> torch.nn.Module | None:
        module = module_of(place, alternative)
        assert module is not None
        next(module.parameters()).mul_(math.inf)
        return module

    monkeypatch.setattr(library, "module", infinite)
    score = library.scores({slot: (block,)})[slot, block]
    assert math.isnan(score.text) and len(score.windows) > 8 and not score.is_significant
    assert standard_error([1.0, math.inf]) == math.inf


@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_trainings_have_the_fast_precision_of_the_machine_that_began_unless_one_is_named(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setattr("nas.train.adapt.prepare.native_precision", lambda device: native)
    first = adaptation(lab, tmp_path / "out", tmp_path / "library")
    assert first.request.library.precision == first.request.healing.precision == native
    first.claim()
    monkeypatch.setattr("nas.train.adapt.prepare.native_precision", lambda device: "float64")
    again = adaptation(lab, tmp_path / "out", tmp_path / "library")
    assert again.request == first.request, "continued on a machine with other units"
    named = SETTINGS.model_copy(update={"healing": Healing(tokens=512, precision="float32")})
    request = AdaptRequest(
        model=lab, budget=("file_size<=1MB",), corpus=(lab,), output=tmp_path, **dict(named)
    ).completed("bfloat16")
    assert (request.library.precision, request.healing.precision) == ("bfloat16", "float32")


def test_a_relative_budget_is_a_multiple_of_the_models_own_figure(lab: Path, tmp_path: Path) -> None:
    figure = work_of(LAYOUT)["decode_p50"]
    reports = []
    for name, budget in {"x": "decode_p50<=0.8x", "ms": f"decode_p50<={0.8 * figure!r}ms"}.items():
        one = adaptation(lab, tmp_path / name, tmp_path / "library", settings=FEW, budget=budget)
        reports.append(one.run())
    relative, absolute = reports
    assert relative["budgets"] == pytest.approx(absolute["budgets"])
    assert relative["child"] == absolute["child"]
    assert relative["child"]["measured"]["decode_p50"] <= 0.8 * figure
    again = adaptation(lab, tmp_path / "x", tmp_path / "library", settings=FEW, budget="decode_p50<=0.8x")
    assert again.run() == relative
    with pytest.raises(InvalidInput, match=r"other settings \(budgets\)"):
        adaptation(lab, tmp_path / "x", tmp_path / "library", settings=FEW, budget="decode_p50<=0.7x")


def test_a_plan_is_told_and_nothing_is_recorded(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DeviceBench, "measure", arithmetic)
    argv = command(lab, tmp_path, "--dry-run", budget="decode_p50<=0.8x", settings=QUICK)
    done = nas(*argv, "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    parts = {name: seconds for name, seconds in plan["seconds"].items() if name != "total"}
    assert parts.keys() == {"measurements", "library", "scores", "healing"}
    assert min(parts.values()) >= 0 and plan["seconds"]["total"] > sum(parts.values())
    assert plan["tokens"] == {"library": QUICK.library.tokens, "healing": QUICK.healing.tokens}
    layout_flops = LAYOUT.flops(QUICK.healing.length // 2)
    assert plan["flops"]["healing"] == pytest.approx(4 * layout_flops * QUICK.healing.tokens)
    assert plan["flops"].keys() == {"library", "scores", "healing"} and min(plan["flops"].values()) > 0
    assert {gpu["price"] for gpu in plan["gpus"]} == {None}
    priced = nas(*argv, "--price-per-hour", "2.5")
    assert "price at 2.5 an hour" in priced.out
    assert priced.err.index(" FLOPs for ") < priced.err.index("timing the parts"), "what is known is said first"
    assert plan["state_bytes"] == 20 * LAYOUT.params.total and plan["disk_bytes"] > 4 * LAYOUT.params.total
    assert not (tmp_path / "out/request.json").exists() and not list((tmp_path / "library").glob("blocks/*"))
    hours = nas(*argv, "--hours", "0.01")
    assert hours.code == 0, hours.err
    assert "for each alternative" in hours.out and "GB for weights, gradients and moments" in hours.out


@pytest.mark.parametrize("windows", [4, 16, 60])
def test_the_interval_of_a_change_holds_the_true_one(windows: int) -> None:
    """Simulated windows of uneven difficulty: a child that loses 3 % on average, more on some windows."""
    dice, held = np.random.default_rng(0), 0
    for _ in range(2000):
        before = dice.gamma(4.0, 200.0, windows)
        after = before * dice.normal(1.03, 0.05, windows)
        change, low, high = relative_change(before.tolist(), after.tolist())
        assert low is not None and high is not None and low < change < high
        held += low <= 0.03 <= high
    assert (0.93 if windows > 4 else 0.9) < held / 2000 < 0.965
    assert relative_change([2.0], [2.1]) == (pytest.approx(0.05), None, None)


def test_further_children_of_the_front_are_healed_later_too(lab: Path, tmp_path: Path) -> None:
    def run(front: int) -> dict[str, Any]:
        settings = FEW.model_copy(update={"points": 8})
        return adaptation(lab, tmp_path / "out", tmp_path / "library", settings=settings, front=front).run()

    alone_ = run(0)
    assert alone_["curve"] == [] and not (tmp_path / "out/curve").exists()
    curve = run(2)["curve"]
    assert len(curve) == 3
    assert curve == sorted(curve, key=lambda row: -row["bits_per_byte"])
    (chosen,) = (row for row in curve if row["layout"] == alone_["child"]["layout"])
    assert chosen["bits_per_byte_change"] == alone_["child"]["bits_per_byte_change"]
    layouts = {child["layout"] for child in alone_["front"]}
    assert {row["layout"] for row in curve} - {chosen["layout"]} <= layouts - {LAYOUT.format()}
    healed = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/curve").iterdir()}
    assert len(healed) == 3 + 2, "the chosen child's weights are there already"
    (tmp_path / "out/curve" / min(name for name in healed if name.endswith(".json"))).unlink()
    assert run(2)["curve"] == curve, "as after a kill"
