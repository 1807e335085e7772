"""Random weights of artifacts: how they are drawn, and the recipes that say it."""

from __future__ import annotations

import numpy as np
import pytest

from nas.core.layout import Layout
from nas.measure.runtimes.executorch.chain import build_chain
from nas.measure.runtimes.executorch.contents import RandomContents, ValuePool, constant_sizes
from nas.measure.runtimes.executorch.writer import ALIGN
from nas.measure.runtimes.recipe import Fill, Recipe

TEXTS = ("d64 v100 ffn=swiglu:96 [C3 A2/1 M16]", "d64 v70 ffn=moe:4x2:32 [W2/1@8(sink=1)]")


def drawn(contents: RandomContents, fill: Fill) -> bytes:
    return b"".join(Recipe(3, b"", contents.pools, (fill,), ALIGN).content())[: fill.size]


@pytest.mark.parametrize("text", TEXTS)
def test_random_contents_have_the_size_asked_for_and_are_finite(text: str) -> None:
    contents = RandomContents()
    for method in build_chain(Layout.parse(text)).methods:
        for constant in method.program.constants:
            fills = contents.constant(method, constant)
            assert tuple(fill.size for fill in fills) == constant_sizes(constant, method.program.format)
            if constant.role != "int4":
                assert np.isfinite(np.frombuffer(drawn(contents, fills[0]), "<f4")).all()


def test_embedding_has_the_usual_deviation() -> None:
    contents = RandomContents()
    rows, scales = (drawn(contents, fill) for fill in contents.embedding(100, 64))
    table = np.frombuffer(rows, np.int8).reshape(100, 64) * np.frombuffer(scales, "<f4")[:, None]
    assert table.std() == pytest.approx(0.02, rel=0.05)


def test_experts_differ() -> None:
    contents = RandomContents()
    experts = [one for one in build_chain(Layout.parse(TEXTS[1])).methods if one.expert is not None]
    gates = [drawn(contents, contents.constant(one, one.program.constants[0])[0]) for one in experts]
    assert len(set(gates)) == 4


def test_words_are_repeated_and_parts_are_padded() -> None:
    content = b"".join(Recipe(5, b"", (), (Fill(6, "word", word=0x04030201), Fill(4, "zeros")), ALIGN).content())
    assert content[:6] == bytes([1, 2, 3, 4, 1, 2]) and len(content) == 2 * ALIGN and not any(content[6:])


def test_a_recipe_is_text_behind_its_header() -> None:
    recipe = Recipe(5, b"h\n", (ValuePool("f32", 24, 9),), (Fill(8, "tile", 0, 4), Fill(4, "word", word=7)), ALIGN)
    assert recipe.to_bytes() == b"hilnas-recipe 1 5 2 1 2\nh\n\nf32 24 9\n8 tile 0 4\n4 word 7\n"
