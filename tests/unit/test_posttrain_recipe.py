"""Recipes: from which weights each stage starts, names of stages, and what is refused before the first one begins."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrain_lab import LAYOUT, SETTINGS, end_sampled_answers, tiny_family
from safetensors.torch import load_file, save_file

from nas.core.errors import InvalidInput
from nas.core.family import MemberTraining, read_record
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.serve.views.family import member_folder
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain.recipe import Settings, complete
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions
from nas.train.retrieval.training import RetrievalRecord

_LENGTHS = "import sys\nfor line in sys.stdin: print(len(line))"
SFT = {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1}


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_family(tmp_path, monkeypatch)
    write_tasks(tmp_path, train=30, test=4, pairs=12, lines=20)
    return tmp_path


def text(tokens: int, **more: Any) -> dict[str, Any]:
    """A stage of pre-training."""
    settings = SETTINGS.model_copy(update={"tokens": tokens}).model_dump(mode="json")
    return {"kind": "pretrain", "corpus": ["corpus"], "settings": settings, **more}


def run(folder: Path, *stages: dict[str, Any], transformers: bool = False) -> MemberTraining:
    recipe = PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})
    files = FileOptions(gguf=(), transformers=transformers)
    return run_recipe("tiny", "1M", recipe, folder, lambda line: None, workers=1, files=files)


def weights(record: MemberTraining) -> Path:
    return member_folder("tiny", "1M") / "training" / record.config["key"][:12] / "weights.safetensors"


def test_each_stage_starts_from_the_one_before(member: Path) -> None:
    long = {"kind": "long", "corpus": ["corpus"], "settings": {"batch_tokens": 1024}}
    stages = [text(8 * 256), long, SFT, text(4 * 256)]
    history = run(member, *stages).history
    assert [record.kind for record in history] == ["pretrain", "long", "sft", "pretrain"]
    assert history[0].start == "random:0"
    for before, after in pairwise(history):
        assert after.start == f"checkpoint:{before.checkpoint}"
    (stage,) = history[1].config["recipe"]["stages"]
    assert (stage["name"], stage["length"], stage["share"]) == ("long", 1024, 1)
    tokens = history[1].config["recipe"]["tokens"]
    assert tokens == round(history[0].tokens / 10), "the report's share"
    first, again = history[0].curve, history[3].curve
    assert again[0][1] < first[0][1] - 0.3, "a later pre-training does not begin at a uniform distribution"
    alone = run(member, text(4 * 256))
    assert alone.start == "random:0" and alone.config["key"] != history[3].config["key"]


def test_a_long_stage_after_a_pretraining_takes_over_its_long_sequences() -> None:
    pair = {"kind": "pretrain", "corpus": ["a"]}, {"kind": "long", "corpus": ["b"]}
    for stages, parts in (
        (pair, ["pretrain", "long"]),
        (pair[:1], [None]),
        ((*pair, pair[0]), ["pretrain", "long", None]),
    ):
        recipe = PostTrainingRecipe.model_validate({"stages": stages})
        requests: list[Any] = recipe.requests(Path("folder"))
        assert [request.only for request in requests] == parts
    whole, _ = complete(Settings(tokens=11 * 10**10), LAYOUT)
    first, _ = complete(Settings(tokens=10 * 10**10), LAYOUT, only="pretrain")
    last, _ = complete(Settings(), LAYOUT, only="long", prior_tokens=10 * 10**10)
    assert last.tokens == 10**10 and (last.lr, last.batch_tokens) == (whole.lr, whole.batch_tokens)
    assert [stage.length for stage in (*first.stages, *last.stages)] == [stage.length for stage in whole.stages]
    assert last.stages[0].schedule.factor(10**4 - 1, 10**4) == pytest.approx(0.1)


def test_stages_have_names_and_may_start_from_any_earlier_one(member: Path) -> None:
    one = {**SFT, "name": "one"}
    two = {**SFT, "name": "two", "from": "pretrain", "lr": 1e-3}
    merge = {"kind": "merge", "method": "task-arithmetic", "models": ["one", "two"], "weights": [0.5, 0.25]}
    training = run(member, text(4 * 256), one, two, merge)
    base, first, second, last = training.history
    assert [record.name for record in training.history] == ["", "one", "two", ""]
    assert second.start == first.start == f"checkpoint:{base.checkpoint}" and second.checkpoint != first.checkpoint
    assert last.start == "task-arithmetic of one, two"
    base_, one_, two_, merged = (load_file(weights(record)) for record in training.history)
    for name, tensor in merged.items():
        expected = base_[name] + 0.5 * (one_[name] - base_[name]) + 0.25 * (two_[name] - base_[name])
        torch.testing.assert_close(tensor, expected)
    assert run(member, merge).checkpoint == last.checkpoint, "names of an earlier recipe are known"
    renamed = run(member, text(4 * 256), {**one, "name": "uno"}, two, {**merge, "models": ["uno", "two"]})
    assert renamed.checkpoint == last.checkpoint and renamed.before[1].name == "uno", "names change no key"


def test_weights_of_shards_are_merged(member: Path) -> None:
    training = run(member, text(4 * 256), SFT)
    tensors = {name: 2 * tensor for name, tensor in load_file(weights(training)).items()}
    folder, names = member / "shards", sorted(tensors)
    folder.mkdir()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"layout": LAYOUT.format()})
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    merge: dict[str, Any] = {"kind": "merge", "models": ["sft", "shards"]}
    (state := weights(training).with_name("checkpoint.safetensors")).write_bytes(b"of a run that was killed")
    merged = load_file(weights(last := run(member, text(4 * 256), SFT, merge)))
    assert not state.exists()
    for name, tensor in load_file(weights(training)).items():
        torch.testing.assert_close(merged[name], 1.5 * tensor)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    index = {name: file.replace("b.", "c.") for name, file in index.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert run(member, text(4 * 256), SFT, merge).config["key"] != last.config["key"], "files are part of the key"
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInput, match=r"shards: its files name no layout; `nas import` converts"):
        run(member, text(4 * 256), SFT, merge)


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        (
            [{"kind": "merge", "models": ["prefer"]}],
            r"^models: prefer is neither weights nor an earlier stage; stages: ",
        ),
        (
            [{"kind": "merge", "models": ["sft"], "base": "none", "method": "ties"}],
            r"^base: .*/none is neither weights",
        ),
        ([{"kind": "merge", "models": ["sft"], "weights": [1, 2]}], r"^weights: 2 weights for 1 models"),
        ([{**SFT, "from": "stf"}], r"^from: unknown earlier stage 'stf'; did you mean 'sft'"),
        ([{**SFT, "from": "prefer"}], r"^from: unknown earlier stage 'prefer'"),
        ([{**SFT, "curriculum": {"models": ["merge"], "judge": "exact"}}], r"^curriculum\.models: merge is neither"),
        ([{**SFT, "curriculum": {"models": ["corpus"]}}], r"^curriculum\.models: .*/corpus is a folder"),
    ],
)
def test_names_are_checked_before_the_first_stage_begins(
    member: Path, stages: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        run(member, text(4 * 256), SFT, *stages)
    assert not (member_folder("tiny", "1M") / "training").exists()


def test_first_stages_that_lack_weights_are_refused(member: Path) -> None:
    with pytest.raises(InvalidInput, match="long: a stage `long` continues a training; none comes before"):
        run(member, {"kind": "long", "corpus": ["corpus"]})
    with pytest.raises(InvalidInput, match=r"base: .*pretrain is neither weights nor an earlier stage; stages: none"):
        other = Model(Layout.parse("d32 v320 ffn=swiglu:64 [C3]"))
        save_weights(other, member / "other.safetensors")
        run(member, {"kind": "merge", "models": ["other.safetensors"], "method": "ties"})


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a", "a"], "'a' is the name of two stages"),
        (["sft", ""], "'sft' is a kind of stage"),
        (["A b", ""], "pattern"),
    ],
)
def test_names_of_stages_are_their_own(names: list[str], problem: str) -> None:
    stages = [{**SFT, "name": name} for name in names]
    with pytest.raises((InvalidInput, ValueError), match=problem):
        PostTrainingRecipe.model_validate({"stages": stages})


def test_training_data_is_apart_from_evaluations_and_benchmarks(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_sampled_answers(monkeypatch)

    def lines(name: str, *rows: dict[str, Any]) -> None:
        (member / name).parent.mkdir(parents=True, exist_ok=True)
        (member / name).write_text("".join(json.dumps(line) + "\n" for line in rows))

    def question(content: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    def answered(content: str) -> dict[str, Any]:
        return {"messages": [*question(content)["messages"], {"role": "assistant", "content": "seven"}]}

    tests = ["How many days has a week?", "How many colours has a rainbow?"]
    lines("asked.jsonl", answered(tests[0]))
    lines("data/HuggingFaceH4/MATH-500/test.jsonl", {"problem": tests[1], "solution": "7", "answer": "7"})
    inside = [f"Tell me: {content} I wonder." for content in tests]
    lines("chat.jsonl", *map(answered, (*inside, "What is the sum of 3 and 4?", "And of four and three?")))
    pairs = [{**question(content), "chosen": "seven", "rejected": "six"} for content in (*inside, "What is 3 + 4?")]
    lines("pairs.jsonl", *pairs)
    apart = {"evaluate": ["asked.jsonl"], "benchmarks": "data"}
    judge = {"questions": ["chat.jsonl"], "judge_command": ["python3", "-c", _LENGTHS], "samples": 2}
    prefer = {"kind": "prefer", "epochs": 1, "batch": 2, "held_out": 0, "answer_tokens": 4}
    for changes, counts in (({}, (4, 3)), ({"evaluate": ["asked.jsonl"]}, (3, 2)), (apart, (2, 1))):
        sft = {**SFT, "data": [{"path": "chat.jsonl"}], "held_out": 0, **changes}
        training = run(member, text(4 * 256), sft, {**prefer, "pairs": ["pairs.jsonl"], **changes})
        assert (training.before[1].config["conversations"], training.config["preferences"]) == counts
    messages: list[str] = []
    stages = [text(4 * 256), {**SFT, **apart}, {**prefer, **judge, **apart}]
    recipe = PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})
    run_recipe("tiny", "1M", recipe, member, messages.append, workers=1, files=FileOptions(gguf=(), transformers=False))
    assert "2 of 4 questions overlap those of evaluations and were dropped" in messages
    with pytest.raises(InvalidInput, match=r"nowhere: has no data of any benchmark"):
        run(member, text(4 * 256), {**SFT, "benchmarks": "nowhere"})


def test_the_last_stage_may_train_a_late_interaction_model_in_a_folder_of_its_own(
    member: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(member)
    lines = (member / "pairs.jsonl").write_text
    lines("".join(json.dumps({"query": f"word {n}", "positive": f"the {n} th text"}) + "\n" for n in range(8)))
    retrieval = {"kind": "retrieval", "data": ["pairs.jsonl"], "batch": 4, "width": 8, "document_length": 16}
    retrieval |= {"query_length": 8, "held_out": 0}
    record = run(member, text(4 * 256), retrieval, transformers=True)
    assert [stage.kind for stage in record.history] == ["pretrain"]
    trained = read_record(member_folder("tiny", "1M") / "retrieval" / "retrieval.json", RetrievalRecord)
    assert trained is not None
    assert (trained.settings.width, trained.steps) == (8, 2)
    assert trained.source == f"1M of tiny, SHA-256 {record.checkpoint[:12]}"
    (member / "tiny" / "1M").mkdir(parents=True)  # which is no model
    run(member, text(4 * 256), {**retrieval, "name": "small", "width": 4}, transformers=True)
    assert (member_folder("tiny", "1M") / "retrieval-small" / "retrieval.json").exists()
    lines("{}\n")
    with pytest.raises(InvalidInput, match=r"pairs\.jsonl:1"):
        run(member, text(8 * 256), retrieval)
    with pytest.raises(ValueError, match="is the last"):
        run(member, retrieval, text(4 * 256))
    with pytest.raises(ValueError, match="nothing comes before"):
        run(member, retrieval)
