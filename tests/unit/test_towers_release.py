"""Models of images and text: transformers computes the same logits; folders are read as written, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import nas
from safetensors.torch import load_file, save_file
from tokenizer_lab import write_qwen3
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel
from vision_lab import FRAMES, LAYOUT, SHAPE, question, vision_model, write_image, write_model

from nas.cli.bench import _model_of
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.train.adapt.checkpoints import read_model
from nas.train.posttrain.conversations import ChatTokenizer, Message
from nas.train.release.templates import TURN, rendered
from nas.train.towers.images import IMAGE
from nas.train.towers.release import MultimodalModel, TowerFolder, encoder_shape, load_encoder
from nas.train.towers.vision import VISION, VisionTower, unshuffled

SIZES = {
    "one frame": [(24, 32)],
    "tiles and a thumbnail": [(100, 70)],
    "odd aspects": [(1, 130), (7, 3)],
    "many images": [(24, 32), (100, 70), (5, 90), (32, 32)],
}
CUSTOM = Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]")


def inputs_of(vision: MultimodalModel, folder: Path, sizes: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    paths = [write_image(folder / f"{number}.png", *size) for number, size in enumerate(sizes)]
    ids, inputs = question(vision, paths, f"What {' or '.join([IMAGE] * len(paths))}?")
    return torch.tensor([ids]), *inputs


@pytest.mark.parametrize(
    "layout", [LAYOUT, Layout.parse("d64 v320 untied ffn=swiglu:96 [A4/2 A4/2]")], ids=["lfm2", "qwen3, untied"]
)
def test_transformers_computes_the_same_logits(tmp_path: Path, layout: Layout) -> None:
    vision = write_model(tmp_path / "model", layout=layout)
    upstream, about = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    read = TowerFolder.read(tmp_path / "model", VISION).open().model
    for name, sizes in SIZES.items():
        tokens, patches, shapes = inputs_of(vision, tmp_path, sizes)
        mask = torch.arange(patches.shape[1]) < shapes.prod(1)[:, None]
        with torch.no_grad():
            expected = upstream(
                input_ids=tokens, pixel_values=patches, spatial_shapes=shapes, pixel_attention_mask=mask.int()
            ).logits
            for model in (vision.model, read):
                torch.testing.assert_close(model(tokens, patches, shapes), expected, atol=1e-4, rtol=0, msg=name)


def test_an_image_changes_what_stands_behind_it_alone(tmp_path: Path) -> None:
    vision = vision_model()
    tokens, patches, shapes = inputs_of(vision, tmp_path, [(24, 32)])
    place = int((tokens == vision.model.placeholder).nonzero()[0, 1])
    logits, changed = (vision.model(tokens, pixels, shapes) for pixels in (patches, patches.flip(1)))
    torch.testing.assert_close(logits[:, :place], changed[:, :place], atol=0, rtol=0)
    assert not torch.allclose(logits[:, place:], changed[:, place:])
    with pytest.raises(InvalidInput, match="placeholders for"):
        vision.model(tokens, patches[:0], shapes[:0])


def test_padding_and_other_frames_change_nothing(tmp_path: Path) -> None:
    vision = vision_model()
    _, patches, shapes = inputs_of(vision, tmp_path, [(24, 32), (32, 16), (8, 8)])
    together = vision.model.tower(patches, shapes)
    apart = [vision.model.tower(patches[i : i + 1, : int(size.prod())], size[None]) for i, size in enumerate(shapes)]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)


def test_unshuffling_puts_the_pixels_of_a_square_together() -> None:
    rows = torch.arange(4 * 6).view(4, 6, 1)
    assert unshuffled(rows, 2)[1, 2].tolist() == [16, 17, 22, 23]


def test_other_layouts_are_read_by_hilnas(tmp_path: Path) -> None:
    vision = write_model(tmp_path / "model", layout=CUSTOM)
    inputs = inputs_of(vision, tmp_path, [(100, 70)])
    read = TowerFolder.read(tmp_path / "model", VISION)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "hilnas_vl"
    assert (read.processor, read.shape, read.context) == (FRAMES, SHAPE, 4096)
    torch.testing.assert_close(read.open().model(*inputs), vision.model(*inputs), atol=1e-6, rtol=0)


def test_the_context_of_a_folder_is_that_of_its_language_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    config["text_config"]["max_position_embeddings"] = 2048
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert TowerFolder.read(tmp_path, VISION).context == 2048


@pytest.mark.parametrize("layout", [LAYOUT, CUSTOM], ids=["stock", "own"])
def test_the_language_model_of_a_folder_is_read_alone(tmp_path: Path, layout: Layout) -> None:
    vision = write_model(tmp_path, layout=layout)
    assert read_model(tmp_path).layout == vision.model.backbone.layout
    answer = nas("chat", str(tmp_path), "--tokens", "2", "--temperature", "0", stdin="hello\n")
    assert answer.code == 0, answer.err


def test_answers_of_two_folders_are_compared(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "a/model")
    write_qwen3(tmp_path / "b/model")
    talk = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}],
        "task": "cats",
    }
    (tmp_path / "questions.jsonl").write_text(json.dumps(talk))
    models = [str(tmp_path / "a/model"), str(tmp_path / "b/model")]
    done = nas("evaluate", *models, "--tasks", str(tmp_path / "questions.jsonl"), "--json")
    assert done.code == 0, done.err
    scores = json.loads(done.out)["scores"]
    assert list(scores) == models and scores[models[1]]["cats"]["lost"] == scores[models[1]]["cats"]["gained"] == 0
    result = nas("evaluate", *models, "--tasks", str(tmp_path / "questions.jsonl"))
    assert "model, points" in result.out and "1" in result.out
    assert "models must differ" in nas("evaluate", *models[:1] * 2, "--tasks", str(tmp_path / "questions.jsonl")).err
    assert "give either --tasks or --benchmarks" in nas("evaluate", *models).err
    assert _model_of(models[0]) == read_model(Path(models[0])).layout, "what `nas bench` measures of a folder"


def test_new_tokens_begin_as_the_mean_of_the_others() -> None:
    vision = vision_model()
    rows = vision.model.backbone.embed.weight
    assert len(rows) == 320 + 104
    torch.testing.assert_close(rows[320:], rows[:320].mean(0).expand(104, -1))


def test_templates_take_contents_in_parts(tmp_path: Path) -> None:
    vision = write_model(tmp_path)
    tokenizer = TowerFolder.read(tmp_path, VISION).tokenizer
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    message, expected = (
        rendered(tokenizer.chat_template or "", {**TURN, "messages": [{"role": "user", "content": content}]}, "")
        for content in (parts, f"{IMAGE}What?")
    )
    assert message == expected
    question = ChatTokenizer(tokenizer, "model").question([Message(role="user", content=f"{IMAGE}What?")])
    assert question.count(vision.model.placeholder) == 1


def encoder_folder(folder: Path, prefix: str = "") -> Siglip2VisionModel:
    torch.manual_seed(5)
    encoder = Siglip2VisionModel(Siglip2VisionConfig(**SHAPE.encoder()))
    folder.mkdir()
    save_file({prefix + name: tensor for name, tensor in encoder.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "siglip2", "vision_config": SHAPE.encoder()}))
    return encoder


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_encoders_are_taken_from_folders_of_siglip2(tmp_path: Path, prefix: str) -> None:
    encoder = encoder_folder(tmp_path / "siglip2", prefix)
    assert encoder_shape(tmp_path / "siglip2", SHAPE, VISION) == SHAPE
    tower = VisionTower(SHAPE, 64)
    load_encoder(tower, tmp_path / "siglip2", VISION)
    for name, tensor in tower.encoder.state_dict().items():
        torch.testing.assert_close(tensor, encoder.state_dict()[name], atol=0, rtol=0)
    with pytest.raises(InvalidInput, match="has shape"):
        load_encoder(VisionTower(SHAPE.model_copy(update={"hidden_size": 64}), 64), tmp_path / "siglip2", VISION)


HUGE = {
    "vision_config__hidden_size": 8192, "vision_config__intermediate_size": 65536,
    "vision_config__num_hidden_layers": 128, "projector_hidden_size": 65536,
}  # fmt: skip
"""A tower of 700 GB."""


def changed(folder: Path, name: str, **values: Any) -> None:
    about = json.loads((folder / name).read_text())
    for key, value in values.items():
        part, _, inner = key.partition("__")
        about[part] = about[part] | {inner: value} if inner else value
    (folder / name).write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("name", "values", "error", "problem"),
    [
        ("config.json", {"vision_config__model_type": "clip_vision_model"}, Unsupported, "no SigLIP2"),
        ("config.json", {"vision_config__hidden_act": "relu"}, Unsupported, "another activation"),
        ("config.json", {"vision_config__hidden_size": 1 << 40}, InvalidInput, "hidden_size"),
        ("config.json", {"vision_config__num_attention_heads": 5}, InvalidInput, "heads do not divide"),
        ("config.json", {"vision_config__intermediate_size": 40}, InvalidInput, "has shape"),
        ("config.json", HUGE, InvalidInput, "has shape"),
        ("config.json", {"image_token_id": 0}, InvalidInput, "image_token_id"),
        ("config.json", {"downsample_factor": 1}, InvalidInput, "another tower"),
        ("config.json", {"text_config": [1]}, Unsupported, "no layout says"),
        ("config.json", {"model_type": "lfm2"}, InvalidInput, "no model of images and text"),
        ("processor_config.json", {"image_processor__tile_size": 1 << 40}, InvalidInput, "tile_size"),
        ("processor_config.json", {"image_processor__resample": 3}, Unsupported, "bilinear"),
        ("processor_config.json", {"image_processor__rescale_factor": "x"}, Unsupported, "scaled"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any], error: type[Exception], problem: str
) -> None:
    write_model(tmp_path)
    changed(tmp_path, name, **values)
    with pytest.raises(error, match=problem):
        TowerFolder.read(tmp_path, VISION).open()


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.multi_modal_projector.linear_1.weight"
    save_file(weights | {name: weights[name] * torch.nan}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="holds NaN"):
        TowerFolder.read(tmp_path, VISION).open()
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="lacks model"):
        TowerFolder.read(tmp_path, VISION).open()


def test_folders_of_transformers_are_read(tmp_path: Path) -> None:
    vision = write_model(tmp_path / "ours")
    config = AutoConfig.from_pretrained(tmp_path / "ours", local_files_only=True)
    config.text_config.norm_eps = 1e-6
    config.vision_config.vision_use_head = True
    torch.manual_seed(7)
    upstream = AutoModelForImageTextToText.from_config(config).eval()
    upstream.save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "theirs" / name)
    about = json.loads((tmp_path / "ours" / "processor_config.json").read_text())["image_processor"]
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(about))
    read = TowerFolder.read(tmp_path / "theirs", VISION)
    tokens, patches, shapes = inputs_of(vision, tmp_path, [(24, 32), (100, 70)])
    mask = torch.arange(patches.shape[1]) < shapes.prod(1)[:, None]
    with torch.no_grad():
        expected = upstream(
            input_ids=tokens, pixel_values=patches, spatial_shapes=shapes, pixel_attention_mask=mask.int()
        ).logits
        torch.testing.assert_close(read.open().model(tokens, patches, shapes), expected, atol=1e-4, rtol=0)
