"""Answers and chat of a member's files: those of GGUF in float32 equal PyTorch's, and a .pte answers, too."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from pretrain_lab import LAYOUT, SETTINGS, run_here, write_corpus, write_family, write_tokenizer
from tokenizer_lab import write_qwen3

from nas.core.errors import InvalidInput
from nas.core.logs import visible
from nas.model.nn.model import Model
from nas.model.nn.weights import load_model, load_weights
from nas.serve.views.family import member_folder
from nas.train.adapt.checkpoints import read_model
from nas.train.posttrain.conversations import ChatTokenizer
from nas.train.posttrain.evaluate import Chat, chat_tokenizer, open_dialogue
from nas.train.posttrain.generation import answerer, generate
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain import member_training
from nas.train.pretrain.member_training import WEIGHTS
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions


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
    described = {"tokenizer": "tokenizer.json", "stages": stages}
    (tmp_path / "recipe.yaml").write_text(json.dumps(described))
    recipe = PostTrainingRecipe.model_validate(described)
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
        assert [message.role for message in talk.messages] == ["user", "assistant"] * 2
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
    scores = json.loads(done.out)["scores"]
    assert done.code == 0 and scores["f32"]["all"]["questions"] == 4
    assert scores["f32"] == {task: score | {"lost": 0, "gained": 0} for task, score in scores["pytorch"].items()}
    card = (member / "README.md").read_text()
    assert "## Exact answers" in card and "f32 less PyTorch" in card
    table = nas("family", "evaluate", *of_member, "--tasks", str(tmp_path / "test.jsonl"), "-q", "8da4w", "-q", "q4_0")
    assert (
        table.code == 0 and "8da4w: none: not asked for" in table.err and "q4_0: none: no file was written" in table.err
    )
    refused = nas("family", "evaluate", *of_member, "--tasks", str(tmp_path / "test.jsonl"), "-q", "int1")
    assert refused.code == 3 and "unknown quantisation 'int1'" in refused.err
    _check_benchmarks(member, tmp_path, chat, model.eval())
    _check_server(member, tmp_path)
    training = json.loads((member / "training.json").read_text())
    done = nas("family", "post", *of_member, "--recipe", str(tmp_path / "recipe.yaml"), "--json")
    assert done.code == 0 and json.loads(done.out) == training, "nothing is trained again"
    assert "8da4w: none: not asked for" in (member / "README.md").read_text()
    table = nas("family", "post", *of_member, "--recipe", str(tmp_path / "recipe.yaml")).out
    assert "sft" in table and "bits per byte" in table


def test_a_member_that_started_from_a_trained_model_answers_in_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_qwen3(tmp_path / "model")
    write_tasks(tmp_path, train=30, test=4, pairs=2, lines=20)
    sft = {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1}
    recipe = PostTrainingRecipe.model_validate({"start": "model", "stages": [sft]})
    files = FileOptions(gguf=("f32",), context=512)
    record = run_recipe("mine", "small", recipe, tmp_path, lambda line: None, workers=1, files=files)
    member = member_folder("mine", "small")
    chat = chat_tokenizer(member)
    weights = member / "training" / record.config["key"][:12] / WEIGHTS
    model = load_model(weights, read_model(tmp_path / "model").layout)
    with open_dialogue(member, "F32", 256) as dialogue:
        talk = Chat(dialogue, chat)
        for text in ("What is 2 + 3?", "And two more?"):
            answer = "".join(talk.say(text, most=12, temperature=0.0, seed=0))
            (expected,) = generate(model, [chat.question(talk.messages[:-1])], 12, chat.ends)
            assert answer == chat.answer_of(expected)
        with pytest.raises(InvalidInput, match="special token"):
            list(talk.say("<|endoftext|>", most=1, temperature=0.0, seed=0))


def _check_benchmarks(member: Path, tmp_path: Path, chat: ChatTokenizer, model: Model) -> None:
    """Scores and answers of the GGUF file to public benchmarks are those of PyTorch."""
    question, continuations = chat.encode("one two"), [chat.encode(text) for text in (" A", "B", "three")]
    with open_dialogue(member, "F32", 64) as dialogue:
        scores = dialogue.scores(question, continuations)
        with pytest.raises(InvalidInput, match="leave no room for a continuation"):
            dialogue.scores([5] * 64, continuations)
    for score, expected in zip(scores, answerer(model, chat).scores(question, continuations), strict=True):
        assert score.greedy == expected.greedy
        assert score.log_probability == pytest.approx(expected.log_probability, abs=1e-3)
    plus = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(4)]
    choices = [{"Question": f"Which {i}?", "A": "a", "B": "b", "C": "c", "D": "d", "Answer": "A"} for i in range(2)]
    files: dict[str, list[dict[str, Any]]] = {"HuggingFaceH4/MATH-500": [{**plus[1], "problem": "x", "solution": "2"}]}
    files |= {
        f"openai/MMMLU/{name}": choices for name in ["AR_XY", "DE_DE", "ES_LA", "FR_FR", "JA_JP", "KO_KR", "ZH_CN"]
    }
    for folder, docs in files.items():
        path = tmp_path / "data" / folder / "test.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    arguments = ("family", "evaluate", "tiny", "--size", "1M", "-q", "f32", "--context", "256")
    done = nas(*arguments, "--benchmarks", str(tmp_path / "data"), "--limit", "1", "--json")
    assert done.code == 0 and "gsm8k: left out: " in done.err
    record = json.loads(done.out)
    assert record == json.loads((member / "benchmarks.json").read_text())
    assert {row: score["questions"] for row, score in record["scores"]["pytorch"].items()} == {
        "math_500": 1,
        "mmmlu": 7,
    }
    of_pytorch = record["scores"]["pytorch"].items()
    assert record["scores"]["f32"] == {row: score | {"lost": 0, "gained": 0} for row, score in of_pytorch}
    card = (member / "README.md").read_text()
    assert "## Exact answers" in card and "## Benchmarks" in card and "lm-evaluation-harness 0.4.13" in card
    for both in ((), ("--tasks", str(tmp_path / "test.jsonl"), "--benchmarks", str(tmp_path))):
        refused = nas(*arguments, *both)
        assert refused.code == 3 and "give either --tasks or --benchmarks" in refused.err


def _check_server(member: Path, tmp_path: Path) -> None:
    """The server's command line has the file and the settings as arguments of their own."""
    server = tmp_path / "a server"
    server.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
    server.chmod(0o755)
    arguments = ("family", "serve", "tiny", "--size", "1M", "-q", "f32", "--context", "256", "--port", "1234")
    (file,) = member.glob("*/*.gguf")
    expected = [
        str(server), "--model", str(file), "--alias", file.stem, "--ctx-size", "256", "--host", "127.0.0.1", "--port",
        "1234", "--jinja",
    ]  # fmt: skip
    argv = [sys.executable, "-m", "nas.cli", *arguments, "--program", str(server)]
    done = subprocess.run(argv, capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout) == expected
    assert shlex.split(nas(*arguments, "--program", str(server), "--print").out) == expected
    missing = nas(*arguments, "--program", "no-such-server")
    assert missing.code == 4 and "no no-such-server found: install llama.cpp" in missing.err
    refused = nas(*arguments[:-6], "-q", "8da4w")
    assert refused.code == 3 and "unknown file '8da4w'" in refused.err
