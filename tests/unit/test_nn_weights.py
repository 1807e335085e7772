"""Checkpoints: round trip, determinism, atomic writes, and files that do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.weights import checkpoint_layout, load_model, load_weights, save_weights

LAYOUT = Layout.parse("d32 v64 ffn=swiglu:32 [C3 A2/1 ^0 A2/1(kv=1)+moe:4x2:16]")


@pytest.mark.parametrize("layout", [LAYOUT, Layout.parse("d32 v64 untied ffn=swiglu:32 [C3]")], ids=str)
def test_round_trip(tmp_path: Path, layout: Layout) -> None:
    saved, loaded = Model(layout, seed=1), Model(layout, seed=2)
    save_weights(saved, tmp_path / "w.safetensors")
    load_weights(loaded, tmp_path / "w.safetensors")
    assert checkpoint_layout(tmp_path / "w.safetensors") == layout
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    assert ("head.weight" in load_file(tmp_path / "w.safetensors")) is not layout.tied


def test_equal_weights_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save_weights(Model(LAYOUT, seed=1), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(Model(LAYOUT, seed=1), path)
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_weights(Model(LAYOUT, seed=2), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    save_weights(Model(LAYOUT, seed=1), tmp_path / "w")
    other = Model(Layout.parse("d32 v64 ffn=swiglu:32 [C3 A2/1]"), seed=1)
    with pytest.raises(InvalidInput, match="holds weights of d32 v64 ffn=swiglu:32"):
        load_weights(other, tmp_path / "w")


def test_broken_files_are_refused_with_their_path(tmp_path: Path) -> None:
    model, path = Model(LAYOUT, seed=1), tmp_path / "w"
    before = model.state_dict()["norm.weight"].clone()
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InvalidInput, match=f"{path}: no safetensors file"):
        load_weights(model, path)
    with pytest.raises(InvalidInput, match=f"{tmp_path}: is a folder"):
        load_weights(model, tmp_path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(InvalidInput, match="names no layout"):
        load_weights(model, path)
    tensors = dict(model.state_dict())
    for broken, message in (
        ({k: v for k, v in tensors.items() if k != "norm.weight"}, "lacks norm.weight"),
        (tensors | {"extra": torch.ones(1)}, "unknown tensor extra"),
        (tensors | {"norm.weight": torch.zeros(31)}, r"norm.weight has shape \[31\], not \[32\]"),
    ):
        save_file(broken, path, metadata={"layout": LAYOUT.format()})
        with pytest.raises(InvalidInput, match=message):
            load_weights(model, path)
    assert torch.equal(model.state_dict()["norm.weight"], before)


def test_a_small_file_takes_no_memory_for_the_large_layout_that_it_names(tmp_path: Path) -> None:
    large = "d65536 v16777216 ffn=swiglu:1048576 [A64/64*1024]"
    save_file({"x": torch.ones(1)}, tmp_path / "w", metadata={"layout": large})
    with pytest.raises(InvalidInput, match="holds fewer weights than d65536"):
        load_model(tmp_path / "w")
