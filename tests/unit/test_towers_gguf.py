"""Models that read images or sound as two GGUF files: names, keys, types, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import audio_lab
import numpy as np
import pytest
import torch
from cli_runner import nas
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from speech_lab import SPEECH, TOKENS
from vision_lab import FRAMES, SHAPE, vision_model, write_model

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.train.towers.audio import AUDIO
from nas.train.towers.gguf import differences, image_tensors, sound_tensors, write_gguf_model, write_projector
from nas.train.towers.speech import SpeechHead
from nas.train.towers.vision import VISION

PUBLISHED = {"encoder.": "vision_tower.vision_model.", "connector.": "multi_modal_projector."}
"""Names in files of LFM2-VL, which the package `gguf` maps to those of GGUF files."""


def test_names_are_those_of_the_package_gguf() -> None:
    tower = vision_model().model.tower
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 3)  # it numbers the connector's maps, 1 and 2, as it numbers layers
    tensors = image_tensors(tower, SHAPE.patch_size)
    state = {}
    for name, tensor in tower.state_dict().items():
        part = next(part for part in PUBLISHED if name.startswith(part))
        gguf_name = names.get_name(PUBLISHED[part] + name.removeprefix(part), (".weight", ".bias"))
        state[gguf_name] = tensor.numpy()
    assert tensors.keys() == state.keys()
    patches = state.pop("v.patch_embd.weight").reshape(32, 4, 4, 3)
    np.testing.assert_array_equal(tensors["v.patch_embd.weight"], np.moveaxis(patches, 3, 1))
    for gguf_name, values in state.items():
        np.testing.assert_array_equal(tensors[gguf_name], values, err_msg=gguf_name)


def test_a_connector_without_biases_gets_zeros() -> None:
    plain = SHAPE.model_copy(update={"projector_bias": False, "projector_use_layernorm": False})
    tensors = image_tensors(vision_model(shape=plain).model.tower, plain.patch_size)
    assert not tensors["mm.1.bias"].any() and tensors["mm.2.bias"].shape == (64,)
    assert "mm.input_norm.weight" not in tensors


def test_the_file_of_a_tower_has_its_shape(tmp_path: Path) -> None:
    whole = vision_model()
    for half in (False, True):
        write_projector(whole, tmp_path / "t.gguf", "seeing", half=half)
        file = GgufFile.read(tmp_path / "t.gguf")
        expected = {
            "general.architecture": "clip",
            "general.type": "mmproj",
            "general.name": "seeing",
            "general.file_type": int(half),
            "clip.has_vision_encoder": True,
            "clip.projector_type": "lfm2",
            "clip.use_gelu": True,
            "clip.vision.projection_dim": 64,
            "clip.vision.patch_size": 4,
            "clip.vision.embedding_length": 32,
            "clip.vision.feed_forward_length": 48,
            "clip.vision.block_count": 2,
            "clip.vision.attention.head_count": 4,
            "clip.vision.projector.scale_factor": 2,
            "clip.vision.image_mean": [0.5, 0.5, 0.5],
            "clip.vision.image_std": [0.5, 0.5, 0.5],
        }
        assert {name: file.fields.get(name) for name in expected} == expected
        types = {name: tensor.type_name for name, tensor in file.tensors.items()}
        assert types["v.blk.1.ffn_up.weight"] == types["mm.2.weight"] == ("F16" if half else "F32")
        assert types["v.position_embd.weight"] == types["v.blk.0.attn_q.bias"] == types["mm.input_norm.weight"] == "F32"
        assert file.tensors["v.patch_embd.weight"].shape == (32, 3, 4, 4)
        assert len(GGUFReader(tmp_path / "t.gguf").tensors) == len(file.tensors)


def test_weights_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    whole = vision_model()
    whole.model.tower.connector.linear_2.weight[0, 0] = 1e5
    write_projector(whole, tmp_path / "t.gguf", "seeing", half=False)
    with pytest.raises(InvalidInput, match=r"mm\.2\.weight holds values that float16"):
        write_projector(whole, tmp_path / "h.gguf", "seeing", half=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t.gguf"]


def test_layouts_of_the_patched_build_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", layout=Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]"))
    with pytest.raises(Unsupported, match="not of hilnas"):
        write_gguf_model(tmp_path / "model", VISION, "f32", tmp_path / "m.gguf", tmp_path / "p.gguf", "seeing")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_writes_both_files_and_names_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"))
    done = nas("family", "gguf", "model", "-q", "f32", "-o", "m.gguf", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["file"], report["mmproj"]["file"]) == ("m.gguf", "mmproj-m.gguf")
    assert report["mmproj"]["size"] == Path("mmproj-m.gguf").stat().st_size
    language = GgufFile.read(Path("m.gguf"))
    assert language.header.arch == "lfm2" and "<|image_start|>" in language.fields["tokenizer.ggml.tokens"]
    assert "tile_size of images is 512, not 32" in done.err and "--image-max-tokens 16" in done.err
    assert nas("family", "gguf", "model", "-q", "q9", "-o", "m.gguf").code != 0
    assert "is a folder; name a file" in nas("family", "gguf", "model", "-o", ".").err
    once = FRAMES.model_copy(update={"do_image_splitting": False})
    assert differences(vision_model(frames=once)) == [
        "large images are cut into tiles, which they were not in training"
    ]
    assert not differences(vision_model(frames=FRAMES.model_copy(update={"tile_size": 512})))


def test_names_of_sound_are_those_of_the_package_gguf() -> None:
    tower = audio_lab.audio_model().model.tower
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 7)
    expected = {"a.position_embd.weight"}
    for name in tower.state_dict():
        if "running" not in name and "num_batches" not in name:
            stored = names.get_name(audio_lab.published_name(name), (".weight", ".bias"))
            assert stored is not None, name
            expected.add(stored)
    assert sound_tensors(tower, audio_lab.SHAPE).keys() == expected


def test_what_mtmd_lacks_is_in_the_weights() -> None:
    """Its encoder has no factor behind the subsampling, no statistics, and positions of 512 numbers."""
    tower = audio_lab.audio_model().model.tower
    tensors = {name: torch.from_numpy(values) for name, values in sound_tensors(tower, audio_lab.SHAPE).items()}
    encoder, rows = tower.encoder, torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    assert encoder.subsampling.linear.weight.shape == (32, 16)
    out = torch.nn.functional.linear(inputs, tensors["a.pre_encode.out.weight"], tensors["a.pre_encode.out.bias"])
    torch.testing.assert_close(out, encoder.subsampling.linear(inputs) * encoder.input_scale)
    norm = tensors["a.blk.1.conv_norm.weight"], tensors["a.blk.1.conv_norm.bias"]
    torch.testing.assert_close(rows * norm[0] + norm[1], encoder.layers[1].conv.norm(rows))
    places = torch.arange(20.0, -21, -1)[:, None]
    wide = places * torch.exp(-torch.arange(256) / 256 * np.log(10_000.0))
    waves = torch.stack([wide.sin(), wide.cos()], -1).flatten(1)
    projected = encoder.layers[0].self_attn.relative_k_proj(encoder.encode_positions(torch.zeros(1, 21, 32))[0])
    torch.testing.assert_close(waves @ tensors["a.blk.0.linear_pos.weight"].T, projected, atol=1e-5, rtol=1e-4)


def test_the_file_of_a_tower_of_sound_has_its_shape(tmp_path: Path) -> None:
    plain = {"attention_bias": False, "convolution_bias": False, "projector_bias": False}
    whole = audio_lab.audio_model(shape=audio_lab.SHAPE.model_copy(update=plain))
    write_projector(whole, tmp_path / "t.gguf", "hearing", half=True)
    file = GgufFile.read(tmp_path / "t.gguf")
    expected = {
        "general.type": "mmproj",
        "general.file_type": 1,
        "clip.has_audio_encoder": True,
        "clip.projector_type": "lfm2a",
        "clip.audio.projection_dim": 64,
        "clip.audio.embedding_length": 32,
        "clip.audio.feed_forward_length": 48,
        "clip.audio.block_count": 2,
        "clip.audio.attention.head_count": 4,
        "clip.audio.num_mel_bins": 16,
    }
    assert {name: file.fields.get(name) for name in expected} == expected
    types = {name: tensor.type_name for name, tensor in file.tensors.items()}
    halves = {name for name, kind in types.items() if kind == "F16"}
    assert {"a.pre_encode.out.weight", "a.blk.1.linear_pos.weight", "mm.a.mlp.3.weight"} <= halves
    assert not [name for name in halves if "conv" in name or "bias" in name or "norm" in name]
    for name in ("a.blk.0.attn_q.bias", "a.blk.0.conv_dw.bias", "a.blk.0.ffn_up_1.bias", "mm.a.mlp.1.bias"):
        assert not file.values(name).any()
    assert file.tensors["a.conv1d.0.bias"].shape == (8, 1, 1) and file.tensors["a.blk.0.conv_dw.weight"].shape == (
        32,
        9,
    )
    assert file.tensors["a.position_embd.weight"].shape == (6000, 64)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 48}, "hidden_size is 48"),
        ({"hidden_size": 1024}, "hidden_size is 1024"),
        ({"conv_kernel_size": 5}, "conv_kernel_size is 5, and it has 9"),
        ({"subsampling_factor": 4}, "subsampling_factor is 4, and it has 8"),
        ({"projector_use_layernorm": False}, "LayerNorm"),
    ],
)
def test_encoders_that_mtmd_does_not_compute_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    audio_lab.write_model(tmp_path / "model", shape=audio_lab.SHAPE.model_copy(update=changes))
    with pytest.raises(Unsupported, match=problem):
        write_gguf_model(tmp_path / "model", AUDIO, "f32", tmp_path / "m.gguf", tmp_path / "p.gguf", "hearing")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_writes_both_files_of_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    audio_lab.write_model(Path("model"))
    done = nas("family", "gguf", "model", "-q", "f32", "-o", "m.gguf", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["mmproj"]["size"] == Path("mmproj-m.gguf").stat().st_size
    assert "<audio>" in GgufFile.read(Path("m.gguf")).fields["tokenizer.ggml.tokens"]
    assert "--mmproj mmproj-m.gguf --audio AUDIO" in done.err and "tile" not in done.err
    whole = audio_lab.audio_model()
    assert not differences(whole)
    whole.model.head = SpeechHead(SPEECH, 64, TOKENS)
    assert differences(whole) == ["answers are text alone: it has no head that speaks"]
