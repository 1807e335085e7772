"""Teachers on disk: their scores are those of transformers, and an interrupted command continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runner import nas
from retrieval_lab import texts, write_lines, write_model
from tokenizer_lab import write_qwen3

from nas.core.errors import InvalidInput
from nas.train.posttrain.start import start_model
from nas.train.release.tokenizer import BOS, byte_tokenizer
from nas.train.retrieval.data import read_examples
from nas.train.retrieval.index import build_index
from nas.train.retrieval.teacher import ClassifierTeacher, LanguageTeacher, write_scores

PAIRS: list[dict[str, Any]] = [{"query": text[4:20], "positive": text, "negatives": ["x"]} for text in texts(12)]


def quiet(line: object) -> None:
    """Takes a line of the log."""


def write_classifier(folder: Path, template: str = "") -> Path:
    """A random Llama with one output for a whole sequence, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=None, initializer_range=0.5, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(320).tokenizer, bos_token=BOS)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_language_model_scores_by_the_chance_of_the_query(tmp_path: Path) -> None:
    folder, documents = write_qwen3(tmp_path / "qwen"), ["the cat", "größer " * 200, ""]
    teacher = LanguageTeacher(start_model(str(folder)))
    scores = teacher.scores("on the mat", documents)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sought = torch.tensor(teacher._ids("on the mat"))
    for document, score in zip(documents, scores, strict=True):
        room = 512 - len(sought)
        ids = [*teacher._start, *teacher._ids(document)[:room], *teacher._ids("\n\n"), *sought.tolist()]
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logs[-len(sought) - 1 : -1].gather(1, sought[:, None]).mean().item()
        assert score == pytest.approx(expected, rel=1e-4)


def test_a_cross_encoder_reads_a_pair_and_a_reward_model_a_conversation(tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    pair, chat = write_classifier(tmp_path / "pair"), write_classifier(tmp_path / "chat", template)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(pair)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(pair)
    for folder, encoded in (
        (pair, tokenizer("cat", "on the mat", return_tensors="pt")),
        (chat, tokenizer("<user>cat<assistant>on the mat", add_special_tokens=False, return_tensors="pt")),
    ):
        first, long = ClassifierTeacher(folder).scores("cat", ["on the mat", "mat " * 300])
        assert first == pytest.approx(model(**encoded).logits.item(), rel=1e-5) and long != first


def test_scores_are_data_and_an_interrupted_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    folder = str(write_classifier(tmp_path / "teacher"))
    assert write_scores(folder, [data], tmp_path / "whole.jsonl", quiet, documents=4) == 12
    examples = read_examples(tmp_path / "whole.jsonl")
    assert [example.query for example in examples] == [pair["query"] for pair in PAIRS]
    assert {len(example.documents) for example in examples} <= {3, 4} and examples[0].documents[:2] == (
        PAIRS[0]["positive"], "x")  # fmt: skip
    calls, scores_of = [0], ClassifierTeacher.scores

    def interrupted(self: ClassifierTeacher, *arguments: Any) -> list[float]:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return scores_of(self, *arguments)

    monkeypatch.setattr(ClassifierTeacher, "scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_scores(folder, [data], tmp_path / "part.jsonl", quiet, documents=4)
    assert not (tmp_path / "part.jsonl").exists()
    with (tmp_path / "part.jsonl.part").open("a") as file:
        file.write('{"query": "cut')
    write_scores(folder, [data], tmp_path / "part.jsonl", quiet, documents=4)
    assert (tmp_path / "part.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert calls[0] == 6 + 7 and not (tmp_path / "part.jsonl.part").exists()
    with pytest.raises(InvalidInput, match="scores already"):
        write_scores(folder, [tmp_path / "whole.jsonl"], tmp_path / "again.jsonl", quiet)


def test_each_query_has_documents_to_compare(tmp_path: Path) -> None:
    pairs = [*({"query": f"q{number}", "positive": "a"} for number in range(6)), {"query": "last", "positive": "b"}]
    folder = str(write_classifier(tmp_path / "teacher"))
    write_scores(folder, [write_lines(tmp_path / "two.jsonl", pairs)], tmp_path / "s.jsonl", quiet, documents=2)
    assert all(set(example.documents) == {"a", "b"} for example in read_examples(tmp_path / "s.jsonl"))
    with pytest.raises(InvalidInput, match="has one document in all"):
        write_scores(folder, [write_lines(tmp_path / "one.jsonl", pairs[:6])], tmp_path / "t.jsonl", quiet)


def test_the_command_takes_documents_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "finder", lengths=(16, 48))
    lines = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts(30))]
    build_index(tmp_path / "finder", [write_lines(tmp_path / "d.jsonl", lines)], tmp_path / "index", quiet)
    write_lines(tmp_path / "pairs.jsonl", PAIRS[:2])
    write_qwen3(tmp_path / "qwen")
    command = ["family", "scores", "qwen", "--data", "pairs.jsonl", "-o", "s.jsonl"]
    done = nas(*command, "--index", "index", "--documents", "5")
    assert done.code == 0, done.err
    (first, _) = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert len(first["documents"]) == 5 and set(first["documents"][2:]) <= {line["text"] for line in lines}
    assert nas("family", "scores", "qwen", "--data", "none.jsonl", "-o", "s.jsonl").code != 0
    write_lines(tmp_path / "beir" / "qrels" / "train.tsv", ["q\t1\t2\n"])
    for output in ("beir/qrels/train.tsv", "qwen/config.json", "index/index.json"):
        done = nas("family", "scores", "qwen", "--data", "beir", "--index", "index", "-o", output)
        assert done.code == 3 and "is a file that this command reads" in done.err
