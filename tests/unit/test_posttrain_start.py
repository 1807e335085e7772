"""Recipes that start from weights of other places, with the tokenizer and the chat template that lie beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runner import nas
from jinja2 import Environment
from pretrain_lab import SETTINGS, run_here, write_corpus, write_family, write_tokenizer
from safetensors.torch import load_file
from tokenizer_lab import ASK, CHATML, with_template, write_model_tokenizer, write_qwen3
from transformers import AutoConfig, AutoModelForCausalLM

from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.family import MemberTraining, member_folder, read_family
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.adapt.checkpoints import import_model
from nas.train.posttrain.conversations import ChatTokenizer, Conversation
from nas.train.posttrain.evaluate import chat_tokenizer
from nas.train.posttrain.model_source import open_model
from nas.train.posttrain.start import Origin, require_member
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain import member_training
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

LAYOUT = Layout.parse("d64 v400 ffn=swiglu:96 [A4/2*2]")
FORGETS = (  # earlier answers lose their reasoning, as in Qwen3's template
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SFT: dict[str, Any] = {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NAS_HOME", "NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_tasks(tmp_path, train=30, test=4, pairs=12, lines=20)
    return tmp_path


def run(folder: Path, *stages: dict[str, Any], start: str = "model", **more: Any) -> MemberTraining:
    recipe = PostTrainingRecipe.model_validate({"start": start, "stages": stages, **more})
    files = FileOptions(gguf=("f16",), context=512)
    return run_recipe("mine", "small", recipe, folder, lambda line: None, workers=2, files=files)


def weights(record: MemberTraining) -> Path:
    key: str = record.config["key"]
    return member_folder("mine", "small") / "training" / key[:12] / "weights.safetensors"


def test_a_recipe_starts_from_a_folder_of_transformers(root: Path) -> None:
    model = write_qwen3(root / "model")
    merge = {"kind": "merge", "method": "task-arithmetic", "models": ["sft"], "weights": [0.5]}
    training = run(root, SFT, merge)
    first, sft, merged = training.history
    assert [record.kind for record in training.history] == ["start", "sft", "merge"]
    assert first.start.startswith("qwen3 in model, SHA-256 ") and first.steps == 0
    assert sft.start == f"checkpoint:{first.checkpoint}"
    import_model(model, root / "imported.safetensors")
    original, tuned, half = (load_file(path) for path in (root / "imported.safetensors", weights(sft), weights(merged)))
    for name, tensor in load_file(weights(first)).items():
        assert torch.equal(tensor, original[name])
        torch.testing.assert_close(half[name], tensor + 0.5 * (tuned[name] - tensor))
    (member,) = read_family("mine").members
    assert Layout.parse(member.layout) == Layout.parse("d64 v400 ffn=swiglu:96 [A4/2(rope_theta=10000)*2]")
    folder = member_folder("mine", "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((folder / "transformers" / name).read_text()) == json.loads((model / name).read_text())
    assert list(folder.glob("gguf/*.gguf"))
    chat = chat_tokenizer(folder)
    assert chat.render([], ask=True) == "<|im_start|>assistant\n"
    assert run(root, SFT, merge).config["key"] == training.config["key"], "nothing is trained again"

    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "A talk.\n" + settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    start, again = run(root, SFT).history
    assert start.checkpoint == first.checkpoint and again.config["key"] != sft.config["key"], "the template counts"
    torch.manual_seed(2)
    (model / "model.safetensors").unlink()
    write_other_weights(model)
    other, after = run(root, SFT).history
    assert other.config["key"] != first.config["key"] and after.config["key"] != again.config["key"]


def test_files_are_for_as_many_tokens_as_the_model_to_start_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_qwen3(root / "model")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    (root / "recipe.yaml").write_text(json.dumps({"start": "model", "stages": [SFT]}))
    contexts: list[int] = []

    def record(*_: object, files: FileOptions, **more: object) -> MemberTraining:
        contexts.append(files.context)
        raise InvalidInput("enough")

    monkeypatch.setattr("nas.train.recipe.run_recipe", record)
    assert "enough" in nas("family", "post", "mine", "--size", "small", "--recipe", str(root / "recipe.yaml")).err
    assert contexts == [4096]


def test_a_file_of_weights_is_no_model_to_talk_to(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    message = "is a file: name a GGUF file, or a folder"
    with pytest.raises(InvalidInput, match=message), open_model(tmp_path / "model.safetensors", 64):
        pass


def write_other_weights(model: Path) -> None:
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def test_a_recipe_starts_from_an_adapted_child(root: Path) -> None:
    write_tokenizer(root / "tokenizer.json", write_corpus(root / "corpus"), 400)
    adapted = root / "adapted"
    adapted.mkdir()
    (adapted / "request.json").write_text("{}")
    with pytest.raises(InvalidInput, match="adapted: its adaptation has not ended"):
        run(root, SFT, start="adapted")
    child = Model(LAYOUT, seed=7)
    save_weights(child, adapted / "child.safetensors")
    options = FileOptions(name="child", tokenizer=root / "tokenizer.json", gguf=())
    write_files(adapted / "files", LAYOUT, RandomWeights(1), options, lambda line: None)
    settings = SETTINGS.model_copy(update={"tokens": 1024}).model_dump(mode="json")
    text = {"kind": "pretrain", "corpus": ["corpus"], "settings": settings}
    first, more, _ = run(root, text, SFT, start="adapted").history
    assert first.start.startswith("adapted child in adapted, SHA-256 ")
    assert more.start == f"checkpoint:{first.checkpoint}"
    for name, tensor in load_file(weights(first)).items():
        assert torch.equal(tensor, child.state_dict()[name]), "weights are those in float32"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "tokenizer.json: has no chat template"),
        (CHATML, "chat template does not continue a question with the answer and one of"),
        ("{{ nothing.there }}", "its chat template refuses a conversation: 'nothing'"),
        ("{% for", "its chat template refuses a conversation: "),
    ],
    ids=["none", "no question", "undefined", "broken"],
)
def test_templates_that_cannot_be_trained_on_are_refused(root: Path, template: str | None, problem: str) -> None:
    write_qwen3(root / "model", with_template(template))
    with pytest.raises(InvalidInput, match=problem):
        run(root, SFT)
    assert not member_folder("mine", "small").exists()


def test_folders_that_do_not_fit_are_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere: no such folder"):
        run(root, SFT, start="nowhere")
    model = write_qwen3(root / "model")
    with pytest.raises(UnknownName, match="unknown earlier stage 'base'"):
        run(root, SFT | {"from": "base"})
    with pytest.raises(ValueError, match="'start' is a kind of stage"):
        run(root, SFT | {"name": "start"})
    write_family()
    recipe = PostTrainingRecipe.model_validate({"start": "model", "stages": [SFT]})
    with pytest.raises(InvalidInput, match=r"^start: .*model holds d64 v400 .*, but 1M of tiny is d64 v320"):
        run_recipe("tiny", "1M", recipe, root, lambda line: None)
    with pytest.raises(UnknownName, match="size of tiny"):
        run_recipe("tiny", "2M", recipe, root, lambda line: None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: has 310 tokens, but the embedding of .*model 300 rows"):
        run(root, SFT)
    (model / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(Unsupported, match="biases"):
        run(root, SFT)


def test_no_new_family_is_named_like_the_data_of_another_one(root: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'mine\.json' is the address of another family's data"):
        require_member("mine.json", "small", Origin(root, LAYOUT, "llama", (), root / "tokenizer.json"))
    assert not member_folder("mine.json", "small").exists()


def test_what_a_template_or_tokenizer_cannot_say_is_named_by_file_and_line(root: Path) -> None:
    system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    write_qwen3(root / "model", with_template(system + CHATML + ASK))
    line = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    first = {"messages": [{"role": "system", "content": "be brief"}, *line["messages"]]}
    spelled = {"messages": [{"role": "user", "content": "<|endoftext|>"}, line["messages"][1]]}
    for bad, problem in ((first, "refuses a conversation: no system"), (spelled, "contains the special token <|endof")):
        (root / "train.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(bad)}\n")
        with pytest.raises(InvalidInput, match=rf"train\.jsonl:2: .*{problem}"):
            run(root, SFT)


def test_a_models_template_is_rendered_as_by_plain_jinja(root: Path) -> None:
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    chat = ChatTokenizer.read(write_model_tokenizer(root / "model", with_template(marked + ASK)))
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [{"role": role, "content": content} for role, content in turns]
    one = Conversation.model_validate({"messages": messages})
    text = Environment(trim_blocks=True).from_string(CHATML).render(messages=messages)
    ids, answers = chat.conversation(one)
    assert chat.decode(ids.tolist()) == text.removesuffix("\n")
    assert chat.decode(ids[answers].tolist()) == "two<|im_end|>four<|im_end|>"
    question = chat.question(one.question)
    assert np.array_equal(ids[: len(question)], question) and answers[len(question) :].all()
    assert chat.answer_of([*ids[len(question) :].tolist(), 65]) == "four" and chat.begin == ""


def test_the_last_answer_alone_counts_where_earlier_ones_change(root: Path) -> None:
    chat = ChatTokenizer.read(write_model_tokenizer(root / "model", with_template(FORGETS)))
    contents = ["one", "two", "three", "four"]
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    one = Conversation.model_validate({"messages": messages})
    ids, answers = chat.conversation(one)
    assert chat.decode(ids[answers].tolist()) == "four<|im_end|>"
    assert chat.decode(ids[~answers].tolist()).endswith("two<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
                                                        "<|im_start|>assistant\n<think>\n\n</think>\n\n")  # fmt: skip
    assert ids[~answers].tolist() == chat.question(one.question)


def test_answers_that_a_template_changes_are_refused(root: Path) -> None:
    shouts = CHATML.replace("{{ m.content }}", "{{ m.content | replace('!', '.') }}") + ASK
    chat = ChatTokenizer.read(write_model_tokenizer(root / "model", with_template(shouts)))
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two!"}]
    with pytest.raises(InvalidInput, match="its chat template changes the answer 'two!'"):
        chat.conversation(Conversation.model_validate({"messages": messages}))
