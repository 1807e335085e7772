"""Answers and chat of a member's files: those of GGUF in float32 equal PyTorch's, and a .pte answers, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas
from pretrain_lab import LAYOUT, SETTINGS, run_here, write_corpus, write_family, write_tokenizer

from nas.core.errors import InvalidInput
from nas.core.logs import visible
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.posttrain.files import Chat, chat_tokenizer, open_dialogue
from nas.posttrain.generation import generate
from nas.posttrain.recipe import read_recipe, run_recipe
from nas.posttrain.tasks import write_tasks
from nas.pretrain import member_training
from nas.release.options import FileOptions
from nas.views.family import member_folder


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_corpus(tmp_path / "corpus")
    write_tokenizer(tmp_path / "tokenizer.json", tmp_path / "corpus")
    write_family()
    write_tasks(tmp_path, train=30, test=4, pairs=2, lines=20)
    settings = SETTINGS.model_copy(update={"tokens": 2 * 256}).model_dump(mode="json")
    stages: list[dict[str, object]] = [
        {"kind": "pretrain", "corpus": ["corpus"], "settings": settings},
        {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1},
    ]
    (tmp_path / "recipe.yaml").write_text(json.dumps({"tokenizer": "tokenizer.json", "stages": stages}))
    recipe = read_recipe(tmp_path / "recipe.yaml")
    files = FileOptions(gguf=("f32",), context=512)
    run_recipe("tiny", "1M", recipe, tmp_path, lambda line: None, workers=1, files=files)
    return member_folder("tiny", "1M")


def test_answers_of_a_gguf_file(member: Path, tmp_path: Path) -> None:
    chat, model = chat_tokenizer(member), Model(LAYOUT, None)
    key = json.loads((member / "training.json").read_text())["config"]["key"]
    load_weights(model, member / "training" / key[:12] / "weights.safetensors")
    with open_dialogue(member, "F32", 256) as dialogue:
        talk = Chat(dialogue, chat)
        for text in ("What is 2 + 3?", "And two more?"):
            pieces = list(talk.say(text, most=12, temperature=0.0, seed=0))
            question = chat.question(talk.messages[:-1])
            (expected,) = generate(model.eval(), [question], 12, chat.ends)
            assert "".join(pieces) == talk.messages[-1].content == chat.answer_of(expected)
        assert [each.role for each in talk.messages] == ["user", "assistant"] * 2
        with pytest.raises(InvalidInput, match="special token"):
            list(talk.say("<|im_end|>", most=1, temperature=0.0, seed=0))
        with pytest.raises(InvalidInput, match="leave no room"):
            list(talk.say("word " * 256, most=1, temperature=0.0, seed=0))
        first, again = (list(dialogue.answer(question, 9, (), temperature=2.0, seed=3)) for _ in range(2))
        assert first == again and len(first) == 9
    of_member = ("tiny", "--size", "1M")
    done = nas("family", "chat", *of_member, "-q", "f32", "--temperature", "0", "--tokens", "12",
               stdin="\n<|im_end|>\nWhat is 2 + 3?\n")  # fmt: skip
    assert done.code == 0 and "special token" in done.err
    assert done.out.removesuffix("\n").removeprefix("\n") == visible(talk.messages[1].content, keep="\n\t")
    done = nas("family", "evaluate", *of_member, "--tasks", str(tmp_path / "test.jsonl"), "-q", "f32",
               "--json")  # fmt: skip
    found = json.loads(done.out)["scores"]
    assert done.code == 0 and found["pytorch"].keys() == found["f32"].keys()
    for task, score in found["f32"].items():
        assert score == found["pytorch"][task] | {"lost": 0, "gained": 0} and found["f32"]["all"]["questions"] == 4
    card = (member / "README.md").read_text()
    assert "## Exact answers" in card and "f32 less PyTorch" in card
    table = nas("family", "evaluate", *of_member, "--tasks", str(tmp_path / "test.jsonl"), "-q", "8da4w", "-q", "q4_0")
    assert (
        table.code == 0 and "8da4w: none: not asked for" in table.err and "q4_0: none: no file was written" in table.err
    )
    refused = nas("family", "evaluate", *of_member, "--tasks", str(tmp_path / "test.jsonl"), "-q", "int1")
    assert refused.code == 3 and "unknown quantisation 'int1'" in refused.err
    training = json.loads((member / "training.json").read_text())
    done = nas("family", "post", *of_member, "--recipe", str(tmp_path / "recipe.yaml"), "--json")
    assert done.code == 0 and json.loads(done.out) == training, "nothing is trained again"
    assert "8da4w: none: not asked for" in (member / "README.md").read_text()
    table = nas("family", "post", *of_member, "--recipe", str(tmp_path / "recipe.yaml")).out
    assert "sft" in table and "bits per byte" in table
