"""GGUF files of models that read images: llama.cpp's converter writes the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from upstream_converter import convert, unpack_converter
from vision_lab import FRAMES, SHAPE, write_model

from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.train.towers.gguf import write_gguf_model

PATCH = {"patch_size": 16}
"""Of every published model; the converter knows no other."""
OF_FOLDERS = {"general.name", "general.size_label", "general.basename", "general.quantization_version"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_files_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 16, "tile_size": 512})
    write_model(tmp_path / "model", shape=SHAPE.model_copy(update=PATCH), frames=frames)
    ours, theirs = (tmp_path / f"{name}.gguf" for name in ("ours", "theirs"))
    write_gguf_model(tmp_path / "model", kind, ours, tmp_path / "mmproj-ours.gguf", "seeing")
    _as_published(tmp_path / "model")
    converter = unpack_converter(tmp_path / "converter")
    convert(converter, tmp_path / "model", theirs, kind, pre="qwen2")
    convert(converter, tmp_path / "model", tmp_path / "mmproj-theirs.gguf", kind, mmproj=True)
    for name in ("{}.gguf", "mmproj-{}.gguf"):
        mine, other = (GgufFile.read(tmp_path / name.format(one)) for one in ("ours", "theirs"))
        assert mine.tensors.keys() == other.tensors.keys()
        for tensor, stored in other.tensors.items():
            assert (stored.kind, stored.shape) == (mine.tensors[tensor].kind, mine.tensors[tensor].shape), tensor
            np.testing.assert_array_equal(mine.values(tensor), other.values(tensor), err_msg=tensor)
        if name.startswith("mmproj"):
            assert mine.fields.keys() ^ other.fields.keys() <= OF_FOLDERS
            for key in mine.fields.keys() & other.fields.keys() - OF_FOLDERS:
                assert mine.fields[key] == other.fields[key], key


def _as_published(folder: Path) -> None:
    """Renames the encoder's tensors to the names of published models, which the converter knows."""
    weights = folder / "model.safetensors"
    prefix = "model.vision_tower."
    tensors = {name.replace(prefix, f"{prefix}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Lfm2VlForConditionalGeneration"]
