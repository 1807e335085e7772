"""Training of models of images and text: data, stages, frozen parts, resume, and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runner import nas
from pretrain_lab import KilledError, alone, killed_after
from retrieval_lab import write_lines
from safetensors.torch import load_file
from tokenizer_lab import write_qwen3
from vision_lab import FRAMES, SHAPE, write_colours, write_image, write_model

from nas.core.errors import InvalidInput, UnknownName
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, fit
from nas.model.nn.optimisers import Optimiser, OptimiserKind
from nas.model.nn.primitives import Linear
from nas.train.posttrain import trained_folder
from nas.train.posttrain.conversations import ChatTokenizer
from nas.train.towers.data import read_media_lines
from nas.train.towers.release import MultimodalModel, TowerFolder
from nas.train.towers.training import Data, TowerRecord, train_tower
from nas.train.towers.vision import VISION, VisionSettings

QUICK = {"epochs": 4, "batch": 4, "lr": 5e-3, "held_out": 0, "tower": SHAPE.model_dump(), "warmup": 0}
TEXTS = [
    {"messages": [{"role": "user", "content": f"{n} plus 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8)
]


def train(folder: Path, stage: str, start: str = "model", output: str = "out", **more: Any) -> TowerRecord:
    """Trains on colours, and on texts beside them if there are any."""
    data = folder / "colours" / "data.jsonl"
    if not data.exists():
        write_colours(folder / "colours")
    texts = [folder / "texts.jsonl"] if (folder / "texts.jsonl").exists() else []
    options = {name: more.pop(name) for name in ("checkpoint_s", "log") if name in more}
    settings = VisionSettings.model_validate(QUICK | {"stage": stage} | more)
    log = options.pop("log", lambda line: None)
    evaluate = more_data(folder) if stage == "joint" else []
    return train_tower(str(folder / start), Data([data], texts, evaluate), settings, folder / output, log, **options)


def more_data(folder: Path) -> list[Path]:
    return [write_colours(folder / "evaluate", 6)]


def parts(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of the encoder, the connector and the language model of a folder."""
    tensors = load_file(folder / "model.safetensors")
    prefixes = {"encoder": "model.vision_tower.", "connector": "model.multi_modal_projector.", "backbone": "model.lang"}
    return {
        part: {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for part, prefix in prefixes.items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_the_connector_learns_alone_and_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    write_model(tmp_path / "model")
    faster = {"epochs": 8, "lr": 0.03}
    whole = train(tmp_path, "connector", **faster)
    assert whole.curve[-1][1] < 0.95 * whole.curve[0][1]  # the language model is random, and frozen
    before, after = parts(tmp_path / "model"), parts(tmp_path / "out")
    assert equal(before["encoder"], after["encoder"]) and equal(before["backbone"], after["backbone"])
    assert not equal(before["connector"], after["connector"])
    (tmp_path / "out").rename(tmp_path / "whole")
    worker = killed_after(5)
    with monkeypatch.context() as patch:
        patch.setattr(trained_folder, "Worker", lambda device, log, hook: worker)
        with pytest.raises(KilledError):
            train(tmp_path, "connector", checkpoint_s=0, **faster)
    with pytest.raises(InvalidInput, match="another training"):
        train(tmp_path, "connector", lr=1e-3)
    lines: list[Any] = []
    resumed = train(tmp_path, "connector", log=lines.append, **faster)
    assert "training out from step 5 to 24" in lines
    assert resumed.weights == whole.weights
    assert train(tmp_path, "connector", log=lines.append, **faster) == resumed
    assert lines[-1].endswith("is trained with these settings already")


def test_all_parts_are_trained_with_text_and_tiles(tmp_path: Path, home: Path) -> None:
    write_model(tmp_path / "model")
    with pytest.raises(InvalidInput, match="needs --text"):
        train(tmp_path, "mid")
    write_lines(tmp_path / "texts.jsonl", TEXTS)
    mid = train(tmp_path, "mid", "model", "mid", held_out=0.3, text_steps=0.2)
    assert mid.texts + mid.after["texts"] == 8 and mid.examples + mid.after["conversations"] == 12
    assert mid.after["loss"] < mid.before["loss"] and mid.after["loss of texts"] < mid.before["loss of texts"]
    assert not TowerFolder.read(tmp_path / "mid", VISION).processor.do_image_splitting
    joint = train(tmp_path, "joint", "mid", "joint", epochs=0.5, image_tokens=(4, 8), tiles=6, encoder=0)
    frames = TowerFolder.read(tmp_path / "joint", VISION).processor
    assert (frames.do_image_splitting, frames.max_tiles, frames.max_image_tokens) == (True, 6, 8)
    assert joint.source.startswith("mid, SHA-256 ")
    assert joint.before["conversations"] == 6 and joint.examples == 12
    before, after = parts(tmp_path / "mid"), parts(tmp_path / "joint")
    assert equal(before["encoder"], after["encoder"])
    assert not equal(before["backbone"], after["backbone"])


def test_text_alone_comes_first() -> None:
    settings = VisionSettings.of_stage("mid")
    np.testing.assert_allclose(settings.text_shares(100)[[0, 1, 5, 99]], [1, 0.86, 0.3, 0.3])
    assert set(VisionSettings.of_stage("connector").text_shares(5)) == {0.0}
    assert set(VisionSettings.of_stage("joint").text_shares(5)) == {0.3}
    optimiser = settings.optimiser()
    assert optimiser.parts == {"tower.encoder": 0.2, "tower.connector": 1.0, "backbone": 1.0}
    assert optimiser.weight_decay == 1e-6
    with pytest.raises(UnknownName):
        VisionSettings.of_stage("last")
    with pytest.raises(ValueError, match="every part is frozen"):
        VisionSettings.model_validate({"stage": "mid", "encoder": 0, "connector": 0, "backbone": 0})
    with pytest.raises(ValueError, match="which is frozen"):
        VisionSettings.model_validate({"stage": "connector", "text": 0.1})
    for stage in ([1], "last", None):
        with pytest.raises(ValueError, match="stage"):
            VisionSettings.model_validate({"stage": stage})
    with pytest.raises(InvalidInput, match="image_tokens"):
        settings.model_copy(update={"image_tokens": (9, 8)}).processor(FRAMES)


def test_encoders_bring_their_patches(tmp_path: Path, home: Path) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 8})
    write_model(tmp_path / "other", shape=SHAPE.model_copy(update={"patch_size": 8}), frames=frames)
    write_qwen3(tmp_path / "model")
    settings = VisionSettings.model_validate(QUICK | {"stage": "connector", "epochs": 0.2, "image_tokens": (4, 16)})
    data = Data([write_colours(tmp_path / "colours")])
    train_tower(str(tmp_path / "model"), data, settings, tmp_path / "out", lambda line: None, tmp_path / "other")
    assert TowerFolder.read(tmp_path / "out", VISION).processor.encoder_patch_size == 8
    assert equal(parts(tmp_path / "other")["encoder"], parts(tmp_path / "out")["encoder"])
    odd = settings.model_copy(update={"tower": SHAPE.model_copy(update={"patch_size": 14})})
    with pytest.raises(InvalidInput, match="tile_size must be divisible by 28"):
        train_tower(str(tmp_path / "model"), data, odd, tmp_path / "odd", lambda line: None)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> MultimodalModel:
    return write_model(tmp_path_factory.mktemp("vision") / "model")


def test_all_forms_of_data_are_read(tmp_path: Path, vision: MultimodalModel) -> None:
    write_image(tmp_path / "a.png", 20, 10)
    write_image(tmp_path / "b.png", 10, 20)
    question = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]
    lines = [
        {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What?"}, ANSWER]},
        {"messages": [{"role": "user", "content": question}, ANSWER]},
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}],
        },
        {"image": "a.png", "question": "What?", "answer": "A"},
        {"file_name": "a.png", "text": "A"},
        {"images": ["a.png", "b.png"], "messages": [{"role": "user", "content": "Both?"}, ANSWER]},
    ]
    write_lines(tmp_path / "metadata.jsonl", lines)
    read = read_media_lines(tmp_path, ChatTokenizer(vision.tokenizer, "model"), VISION)
    texts = [line.conversation.messages[0].content for line in read]
    one = "<image>What?"
    assert texts == [one, one, "<image>\nWhat?", one, "<image>", "<image><image>Both?"]
    assert [len(line.files) for line in read] == [1, 1, 1, 1, 1, 2]
    assert read[1].files[0].size == (20, 10)
    assert {line.conversation.answer for line in read} == {"A"}
    expanded = read[5].expanded(vision.processor).messages[0].text
    assert expanded.count("<|image_start|>") == 2 and expanded.endswith("<|image_end|>Both?")


ANSWER = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"image": "../secret.png", "question": "What?", "answer": "A"}, "not in the folder"),
        ({"image": "/etc/passwd", "question": "What?", "answer": "A"}, "not in the folder"),
        ({"image": "link.png", "question": "What?", "answer": "A"}, "not in the folder"),
        ({"image": "a\0.png", "question": "What?", "answer": "A"}, "no file|not in the folder"),
        ({"image": "none.png", "question": "What?", "answer": "A"}, "there is no file none.png"),
        ({"image": 3, "question": "What?", "answer": "A"}, "no path"),
        ({"images": ["a.png"], "messages": [{"role": "user", "content": "<image><image>"}, ANSWER]}, "1 images, but 2"),
        ({"image": "a.png", "question": "What?", "answer": "<image>"}, "alone they may"),
        ({"messages": [{"role": "user", "content": "No image?"}, ANSWER]}, "has no image"),
        ({"image": "a.png", "question": "<|image_end|>", "answer": "A"}, "special token"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWER]}, "neither text nor image"),
        ({"image": "a.png"}, "no conversation"),
        ("[1]\n", "no JSON object"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path: Path, vision: MultimodalModel, line: Any, problem: str) -> None:
    write_image(tmp_path / "secret.png", 8, 8)
    folder = tmp_path / "data"
    folder.mkdir()
    write_image(folder / "a.png", 8, 8)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    good = {"image": "a.png", "question": "What?", "answer": "A"}
    path = write_lines(folder / "data.jsonl", [good, line])
    with pytest.raises(InvalidInput, match=problem) as raised:
        read_media_lines(path, ChatTokenizer(vision.tokenizer, "model"), VISION)
    assert str(raised.value).startswith(f"{path}:2: ")


def test_the_commands_train_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"))
    write_colours(Path("colours"), 3)
    Path("stage.yaml").write_text("stage: connector\nbatch: 3\nheld_out: 0\n")
    command = ("family", "vision", "model", "--data", "colours/data.jsonl", "-o", "out", "--config", "stage.yaml")
    trained = nas(*command, "--json")
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["settings"]["lr"] == 1e-3
    again = nas(*command)
    assert "connector" in again.out and "nas chat out --image" in again.err
    assert "is for the stage connector" in nas(*command, "--stage", "mid").err
    assert "--stage" in nas(*command[:-2]).err
    chat = ("chat", "out", "--image", "colours/0.png", "--tokens", "2", "--temperature", "0")
    answers = nas(*chat, stdin="Colour?\nAnd now?\n")
    assert answers.code == 0 and answers.out.count("\n") >= 2, answers.err
    cut = nas(*chat, "--image-tokens", "300", "--context", "40", stdin="Colour?\n")
    assert cut.code == 0
    assert "no file none.png" in nas("chat", "out", "--image", "none.png", stdin="a\n").err
    assert "applies only with --image" in nas("chat", "out", "--image-tokens", "8", stdin="a\n").err
    assert "no model of images and text" in nas("chat", "colours", "--image", "colours/0.png", stdin="a\n").err


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_part_has_its_share_of_the_rate(tmp_path: Path, kind: OptimiserKind) -> None:
    names = ("slow", "frozen", "other", "slow_too")
    model = torch.nn.ModuleDict({name: Linear(4, 3) for name in names})
    for part in model.values():
        torch.nn.init.ones_(part.weight)
    settings = Optimiser(0.0, torch.inf, 0.0, kind=kind, parts={"slow": 0.25, "frozen": 0.0})
    state = TrainingState(model, settings, 1)
    inputs = torch.tensor([[1.0, 2.0, 3.0, 5.0]])
    phase = TrainingPhase(
        "test", 1, 1, lambda step: [(inputs,)], lambda model, x: sum(part(x).sum() for part in model.values()),
        lambda step: 0.1,
    )  # fmt: skip
    fit(state, [phase], [TrainingCheckpoint(tmp_path / "a.safetensors", {})], alone(), name="test")
    changes = {name: (1 - part.weight.detach()).abs().max().item() for name, part in model.items()}
    assert changes["frozen"] == 0 and changes["other"] > 0
    np.testing.assert_allclose(changes["slow"], changes["other"] / 4, rtol=1e-3)
    np.testing.assert_allclose(changes["slow_too"], changes["other"], rtol=1e-5)
