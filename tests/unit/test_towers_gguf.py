"""Models that read images as two GGUF files: names, keys, types, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_runner import nas
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from retrieval_lab import own_home
from vision_lab import FRAMES, SHAPE, vision_model, write_model

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.train.towers.gguf import differences, image_tensors, write_gguf_model, write_projector
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
        theirs = names.get_name(PUBLISHED[part] + name.removeprefix(part), (".weight", ".bias"))
        state[theirs] = tensor.numpy()
    assert tensors.keys() == state.keys()
    patches = state.pop("v.patch_embd.weight").reshape(32, 4, 4, 3)
    np.testing.assert_array_equal(tensors["v.patch_embd.weight"], np.moveaxis(patches, 3, 1))
    for theirs, values in state.items():
        np.testing.assert_array_equal(tensors[theirs], values, err_msg=theirs)


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


def test_the_command_writes_both_files_and_names_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_home(tmp_path, monkeypatch)
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
    once = FRAMES.model_copy(update={"do_image_splitting": False})
    assert differences(vision_model(frames=once)) == ["large images are cut into tiles, which they were not in training"]
    assert not differences(vision_model(frames=FRAMES.model_copy(update={"tile_size": 512})))
