"""GGUF files of models that read images or sound: llama.cpp's converter writes the same, mtmd computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import audio_lab
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from upstream_converter import Converter
from vision_lab import FRAMES, SHAPE, write_image, write_model

from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.towers.audio import AUDIO, AudioShape
from nas.train.towers.gguf import write_gguf_model, write_projector
from nas.train.towers.release import MultimodalModel
from nas.train.towers.vision import VISION

PATCH = {"patch_size": 16, "num_hidden_layers": 3}
"""The converter knows no other patches, and no model of fewer layers than the connector has numbers."""
OF_FOLDERS = {"general.name", "general.size_label", "general.basename", "general.quantization_version"}


SIZES = {"exact": (96, 64), "larger": (300, 200)}
"""Of a narrow picture, such as 40 x 400, mtmd makes another number of tokens; docs/how-to/vision.md says so."""
SECONDS = (0.3, 1.0, 1.005, 7.3, 31.0)
"""The third of an odd number of features."""
TEXT = "What?"


def answers(build: Build, files: tuple[Path, Path], media: list[Path], tokens: tuple[int, int]) -> Mapping[str, Any]:
    """Returns what llama.cpp's users get, see `llama_cpp_media.py`."""
    output = files[0].with_suffix(".npz")
    argv = [sys.executable, Path(__file__).with_name("llama_cpp_media.py"), *files, output, *map(str, tokens), *media]
    variables = {name: str(build.folder) for name in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LD_LIBRARY_PATH")}
    subprocess.run(argv, env=os.environ | variables, check=True, timeout=300)
    with np.load(output) as results:
        return dict(results)


def check_answers(results: Mapping[str, Any], whole: MultimodalModel, media: list[Path], close: float) -> None:
    """Compares them with ours: tokens, embeddings relative to the largest number, and logits of what follows."""
    for number, path in enumerate(media):
        file = whole.processor.read(path)
        ids = whole.tokenizer.tokenizer.encode(whole.processor.text(file) + TEXT).ids
        tokens = [-1 if token == whole.model.placeholder else token for token in ids]
        assert results[f"tokens{number}"].tolist() == tokens, path.name
        inputs = whole.processor.inputs([file])
        rows = whole.model.tower(*inputs).numpy()
        assert np.abs(results[f"rows{number}"] - rows).max() < close * np.abs(rows).max(), path.name
        assert np.abs(results[f"rows{number}"] - rows).max() < 0.01 * np.ptp(rows, 0).max(), path.name
        logits = whole.model(torch.tensor([ids]), *inputs)[0, -1].numpy()
        error = np.abs(results[f"logits{number}"][: len(logits)] - logits).max()
        assert error < 5e-3 * np.abs(logits - logits.mean()).max(), (path.name, error)


@pytest.mark.exhaustive
def test_mtmd_computes_the_same_of_images(tmp_path: Path, image_build: Build) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 16, "tile_size": 512, "max_image_tokens": 32})
    whole = write_model(tmp_path / "model", shape=SHAPE.model_copy(update=PATCH), frames=frames)
    files = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    write_gguf_model(tmp_path / "model", VISION, "f32", *files, "seeing")
    images = [write_image(tmp_path / f"{name}.png", *size) for name, size in SIZES.items()]
    arrays = [path.with_suffix(".npy") for path in images]
    for path, array in zip(images, arrays, strict=True):
        np.save(array, np.asarray(Image.open(path).convert("RGB")))
    tokens = frames.min_image_tokens, frames.max_image_tokens
    # Pixels of a scaled image are rounded differently.
    check_answers(answers(image_build, files, arrays, tokens), whole, images, close=5e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_size": 512, "num_mel_bins": 128, "scale_input": False, "attention_bias": False}],
    ids=["narrow", "wide"],
)
def test_mtmd_computes_the_same_of_sound(tmp_path: Path, image_build: Build, changes: dict[str, Any]) -> None:
    whole = audio_lab.write_model(tmp_path / "model", shape=audio_lab.SHAPE.model_copy(update=changes))
    files = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    write_gguf_model(tmp_path / "model", AUDIO, "f32", *files, "hearing")
    sounds = [tmp_path / f"{seconds}.wav" for seconds in SECONDS]
    for path, seconds in zip(sounds, SECONDS, strict=True):
        sound = audio_lab.tone(440, seconds) * np.linspace(0, 1, round(seconds * 16_000), dtype=np.float32)
        audio_lab.write_sound(path, sound, subtype="FLOAT")
        np.save(path.with_suffix(".npy"), sound)
    results = answers(image_build, files, [path.with_suffix(".npy") for path in sounds], (1, 1))
    check_answers(results, whole, sounds, close=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_files_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 16, "tile_size": 512})
    write_model(tmp_path / "model", shape=SHAPE.model_copy(update=PATCH), frames=frames)
    candidate, reference = (tmp_path / f"{name}.gguf" for name in ("ours", "theirs"))
    write_gguf_model(tmp_path / "model", VISION, kind, candidate, tmp_path / "mmproj-ours.gguf", "seeing")
    _as_published(tmp_path / "model")
    with Converter(tmp_path / "converter") as converter:
        converter.convert(tmp_path / "model", reference, kind, pre="qwen2")
        converter.convert(tmp_path / "model", tmp_path / "mmproj-theirs.gguf", kind, mmproj=True)
    for name in ("{}.gguf", "mmproj-{}.gguf"):
        mine, other = (GgufFile.read(tmp_path / name.format(one)) for one in ("ours", "theirs"))
        _check_equal(mine, other, set(), keys=name.startswith("mmproj"))


def _check_equal(mine: GgufFile, other: GgufFile, unlike: set[str], *, keys: bool = True) -> None:
    """Compares tensors, apart from the content of those named, and keys."""
    assert mine.tensors.keys() == other.tensors.keys()
    for tensor, stored in other.tensors.items():
        assert stored.shape == mine.tensors[tensor].shape, tensor
        if tensor not in unlike:
            assert stored.kind == mine.tensors[tensor].kind, tensor
            # The converter computes roots of variances with PyTorch, the last bit of which is another.
            np.testing.assert_allclose(mine.values(tensor), other.values(tensor), 1e-6, 1e-6, err_msg=tensor)
    if keys:
        assert mine.fields.keys() ^ other.fields.keys() <= OF_FOLDERS
        for key in mine.fields.keys() & other.fields.keys() - OF_FOLDERS:
            assert mine.fields[key] == other.fields[key], key


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_files_of_sound_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    shape = audio_lab.SHAPE.model_copy(
        update={"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 7, "scale_input": False}
    )
    whole = audio_lab.audio_model(shape=shape)
    candidate, reference = (tmp_path / f"mmproj-{name}.gguf" for name in ("ours", "theirs"))
    write_projector(whole, candidate, "hearing", half=kind != "f32")
    _as_lfm2_audio(tmp_path / "model", whole)
    with Converter(tmp_path / "converter") as converter:
        converter.convert(tmp_path / "model", reference, kind, mmproj=True)
    _check_equal(GgufFile.read(candidate), GgufFile.read(reference), {"a.position_embd.weight"})


def _as_lfm2_audio(folder: Path, whole: MultimodalModel) -> None:
    """Writes what the converter reads of a folder of LFM2-Audio."""
    tensors = {"audio_embedding.embedding.weight": torch.zeros(6000, 64)}
    for name, tensor in whole.model.tower.state_dict().items():
        tensors[audio_lab.published_name(name)] = tensor
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    shape = cast(AudioShape, whole.shape)
    encoder = {"d_model": shape.hidden_size, "n_heads": shape.num_attention_heads, "feat_in": shape.num_mel_bins}
    config = {
        "architectures": ["Lfm2AudioForConditionalGeneration"],
        "model_type": "lfm2_audio",
        "encoder": {**encoder, "n_layers": shape.num_hidden_layers},
        "lfm": {"hidden_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))


def _as_published(folder: Path) -> None:
    """Renames the encoder's tensors to the names of published models, which the converter knows."""
    weights = folder / "model.safetensors"
    prefix = "model.vision_tower."
    tensors = {name.replace(prefix, f"{prefix}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Lfm2VlForConditionalGeneration"]
