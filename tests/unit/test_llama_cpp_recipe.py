"""Recipes: what they say is what a file holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.measure.runtimes.base import Artifact, Checkpoint, RandomWeights
from nas.measure.runtimes.llama_cpp.random_weights import BlockPool, Type
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.recipe import Fill, Recipe, splitmix64

EVERY_KIND = "d256 v512 untied ffn=moe:8x2:64 [M16 A4/2 C3+swiglu:512 W4/2@32(sink=1) C5 A8/8(qk_norm=0)]"


def export(text: str, folder: Path, quantisation: str = "q4_0", *, recipe: bool = False) -> Artifact:
    return LLAMA_CPP.export(Layout.parse(text), quantisation, RandomWeights(1), folder / "out", recipe=recipe)


@pytest.mark.parametrize("quantisation", LLAMA_CPP.quantisations)
def test_a_recipe_names_the_file_that_would_have_been_written(tmp_path: Path, quantisation: str) -> None:
    file = export(EVERY_KIND, tmp_path, quantisation)
    recipe = export(EVERY_KIND, tmp_path, quantisation, recipe=True)
    assert (recipe.sha256, recipe.size) == (file.sha256, file.size)
    assert recipe.recipe == recipe.stored != file.stored
    assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == recipe.stored.sha256


def test_a_recipe_takes_kilobytes(tmp_path: Path) -> None:
    artifact = export(LFM2["LFM2-350M"], tmp_path, recipe=True)
    assert artifact.size > 200e6 and artifact.stored.size < 20e3


def test_trained_weights_have_no_recipe(tmp_path: Path) -> None:
    from test_llama_cpp_writer import TINY, checkpoint

    trained: Checkpoint = checkpoint(TINY, tmp_path / "weights")
    artifact = LLAMA_CPP.export(TINY, "f32", trained, tmp_path / "out", recipe=True)
    assert artifact.recipe is None and GGUFReader(tmp_path / "out").tensors


def test_splitmix64_is_the_published_one() -> None:
    """First numbers of seed 1234567, as its authors' code prints them."""
    assert splitmix64(1234567, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("storage", "dtype", "shift"), [(Type.F16, "<f2", 15), (Type.F32, "<f4", 28)])
def test_floats_are_exact_and_uniform(storage: Type, dtype: str, shift: int) -> None:
    size = 1000 * np.dtype(dtype).itemsize
    recipe = Recipe(5, b"", (BlockPool(storage, shift, 1000),), (Fill(size, "tile"),))
    values = np.frombuffer(b"".join(recipe.content())[:size], dtype).astype(np.float64)
    steps = values * 2**shift
    assert (steps == np.rint(steps)).all() and len(set(steps)) > 500
    assert values.std() == pytest.approx(0.018, rel=0.1) and abs(values.mean()) < 0.003


def test_a_tensor_goes_round_its_pool() -> None:
    pool = BlockPool(Type.F32, 28, 500)
    whole, turned = (
        b"".join(Recipe(5, b"", (pool,), (Fill(size, "tile", 0, start),)).content())
        for start, size in ((0, 2000), (400, 4000))
    )
    assert turned[:4000] == (whole[400:2000] + whole[:2000] + whole[:400])


def test_header_comes_first_and_tensors_are_padded() -> None:
    content = b"".join(Recipe(5, b"h" * 32, (), (Fill(4, "ones"), Fill(8, "decay"))).content())
    assert content[:32] == b"h" * 32 and len(content) == 96
    assert np.frombuffer(content[32:36], "<f4") == 1.0 and not any(content[36:64])
    assert np.frombuffer(content[64:72], "<f4").tolist() == [-1.0, -2.0]
