"""Bidirectional late-interaction models: tokens see those behind them, and padding changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from retrieval_lab import LAYOUT, retriever, write_model

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.model.nn.conv import GatedShortConv
from nas.model.nn.primitives import draw_weights
from nas.train.retrieval.release import open_retriever
from nas.train.retrieval.retriever import Retriever


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_token_sees_what_is_behind_it(bidirectional: bool) -> None:
    model, _ = retriever(bidirectional=bidirectional)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    text = torch.ones_like(tokens, dtype=torch.bool)
    changed = tokens.clone()
    changed[0, -1] = 9
    first, second = model(tokens, text)[0, 0], model(changed, text)[0, 0]
    assert torch.equal(first, second) is not bidirectional


def test_padding_changes_no_vector() -> None:
    model, _ = retriever(bidirectional=True)
    tokens = torch.tensor([[1, 2, 3, 7, 7, 7], [4, 5, 6, 7, 8, 9]])
    text = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    together = model(tokens, text)
    for row, length in ((0, 3), (1, 6)):
        alone = model(tokens[row : row + 1, :length], text[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row, :length], alone, atol=1e-6, rtol=0)


def test_a_convolution_has_its_token_in_the_middle() -> None:
    block = GatedShortConv(Block.of("conv", kernel=3), 32)
    draw_weights(block, 0, 1)
    block.both_ways = True
    h = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    gate_in, gate_out, value = block.in_proj(h).chunk(3, -1)
    taps = block.conv.weight[:, None, :]
    mixed = F.conv1d((gate_in * value).mT, taps, padding=1, groups=32).mT
    torch.testing.assert_close(block(h)[0], block.out(gate_out * mixed), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [("C4 A4/2", "4 taps"), ("C3 M8(expand=1,heads=4)", "mamba2"), ("W4/2@8", "swa"), ("A4/2(canon=3)", "canon")],
)
def test_what_reads_one_way_is_refused(layers: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        Retriever(Layout.parse(f"d64 v320 ffn=swiglu:96 [{layers}]"), 16, bidirectional=True)


def test_a_folder_says_whether_it_is_bidirectional(tmp_path: Path) -> None:
    for bidirectional in (False, True):
        folder = tmp_path / str(bidirectional)
        written, _ = write_model(folder, LAYOUT, bidirectional=bidirectional)
        model, _ = open_retriever(folder)
        assert model.bidirectional is bidirectional
        tokens, text = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.bool)
        torch.testing.assert_close(model(tokens, text), written(tokens, text))
