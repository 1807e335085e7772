"""Merging of runs of models with towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vision_lab import FRAMES, write_model

from nas.core.errors import InvalidInput
from nas.train.posttrain.merging import MergeSettings
from nas.train.towers.merging import RECORD, merge_runs
from nas.train.towers.release import TowerFolder, write_multimodal_model
from nas.train.towers.vision import VISION


def runs(folder: Path, count: int = 2) -> list[Path]:
    """Folders of one model whose weights were scaled by 1, 2, ..."""
    folders = []
    for number in range(1, count + 1):
        whole = write_model(folder / f"run{number}")
        with torch.no_grad():
            for tensor in whole.model.parameters():
                tensor.mul_(number)
        write_multimodal_model(folder / f"run{number}", whole)
        folders.append(folder / f"run{number}")
    return folders


def test_the_mean_of_runs_is_a_model(tmp_path: Path) -> None:
    first, second = runs(tmp_path)
    record = merge_runs([first, second], None, MergeSettings(weights=(1.0, 3.0)), tmp_path / "merged")
    merged, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", first))
    assert merged.keys() == start.keys() and any("vision_tower" in name for name in merged)
    for name, tensor in start.items():
        torch.testing.assert_close(merged[name], 1.75 * tensor)
    assert json.loads((tmp_path / "merged" / RECORD).read_text())["weights"] == record.weights
    opened = TowerFolder.read(tmp_path / "merged", VISION).open()
    assert opened.processor == TowerFolder.read(first, VISION).processor
    merge_runs([first, second], first, MergeSettings(method="ties", density=0.5), tmp_path / "ties")


def test_runs_with_different_codecs_are_not_merged(tmp_path: Path) -> None:
    first, second = runs(tmp_path)
    for number, folder in enumerate((first, second)):
        (folder / "codec").mkdir()
        (folder / "codec" / "config.json").write_text("{}")
        (folder / "codec" / "model.safetensors").write_bytes(bytes([number]))
    with pytest.raises(InvalidInput, match="codec is another"):
        merge_runs([first, second], None, MergeSettings(), tmp_path / "merged")
    (second / "codec" / "model.safetensors").write_bytes(bytes([0]))
    merge_runs([first, second], None, MergeSettings(), tmp_path / "merged")
    assert (tmp_path / "merged" / "codec" / "model.safetensors").read_bytes() == bytes([0])


def test_what_does_not_go_together_is_named(tmp_path: Path) -> None:
    first, second = runs(tmp_path)
    other = tmp_path / "other"
    write_model(other, frames=FRAMES.model_copy(update={"max_tiles": 3}))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    (other / VISION.record).write_text("{}")
    for folders, base, settings, output, words in (
        ([first], None, MergeSettings(), "m", "two folders"),
        ([first, tmp_path], None, MergeSettings(), "m", "no model of images"),
        ([tmp_path, first], None, MergeSettings(), "m", "no model with a tower"),
        ([first, other], None, MergeSettings(), "m", "config.json is another"),
        ([first, second], None, MergeSettings(), "run1", "one of the folders"),
        ([first, second], None, MergeSettings(), "other", "other: holds a trained model"),
        ([first, second], None, MergeSettings(method="ties"), "m", "trained from"),
        ([first, second], None, MergeSettings(weights=(1.0,)), "m", "1 weights for 2"),
    ):
        with pytest.raises(InvalidInput, match=words):
            merge_runs(folders, base, settings, tmp_path / output)
