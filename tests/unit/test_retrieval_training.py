"""Late-interaction models: vectors, scores, data, and training from models of three kinds."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from cli_runner import nas
from pretrain_lab import SETTINGS, KilledError, killed_after, tiny_family
from retrieval_lab import retriever, texts, write_lines
from safetensors.torch import load_file
from tokenizer_lab import write_qwen3

from nas.cli.family.folders import print_training
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.family import member_folder
from nas.core.progress import Log
from nas.model.nn.maxsim import maxsim
from nas.train.adapt.adapt import CHILD, REQUEST
from nas.train.posttrain import trained_folder
from nas.train.pretrain.member_training import train_member
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import byte_tokenizer
from nas.train.retrieval import training
from nas.train.retrieval.data import Example, data_hashes, read_documents, read_examples, read_judgements
from nas.train.retrieval.retriever import TorchEncoder, exact_scores
from nas.train.retrieval.training import RetrievalRecord, RetrievalSettings, distillation, train_retriever

PAIRS: list[dict[str, Any]] = [
    {"query": " ".join(text.split()[3:7]), "positive": text, "negatives": texts(3)} for text in texts(40)
]
SCORED = [
    {"query": " ".join(text.split()[3:7]), "documents": [text, *texts(3)], "scores": [9, 0.5, -1, 2]}
    for text in texts(40)
]
QUICK = RetrievalSettings(epochs=4, batch=8, lr=3e-3, width=16, document_length=48, held_out=0.2)


def train(folder: Path, data: list[dict[str, Any]], log: Log = lambda line: None, **more: Any) -> RetrievalRecord:
    path = write_lines(folder / "data.jsonl", data)
    return train_retriever(str(folder / "model"), [path], QUICK, folder / "out", log, **more)


def test_scores_are_those_of_equation_7() -> None:
    model, tokens = retriever()
    queries, documents = ["the cat", "größer"], ["the cat sat on the mat", "", "def add(a, b): return a + b"]
    encoder = TorchEncoder(model, tokens)
    of_queries, of_documents = encoder.queries(queries), encoder.documents(documents)
    assert [len(rows) for rows in of_queries] == [32, 32]
    assert [len(rows) for rows in of_documents] == [2 + len(text) for text in documents]
    for rows in (*of_queries, *of_documents):
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    expected = [[sum(max(q @ d for d in rows) for q in query) for rows in of_documents] for query in of_queries]
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(rows) for rows in of_documents], batch_first=True)
    text = torch.arange(padded.shape[1]) < torch.tensor([[len(rows)] for rows in of_documents])
    stacked = torch.from_numpy(np.stack(of_queries))
    np.testing.assert_allclose(maxsim(stacked, padded, text), expected, atol=1e-4)
    np.testing.assert_allclose(maxsim(stacked, padded.repeat(2, 1, 1, 1), text.repeat(2, 1, 1)), expected, atol=1e-4)
    starts = np.cumsum([0, *map(len, of_documents[:-1])])
    scores = [exact_scores(query, np.concatenate(of_documents), starts) for query in of_queries]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_vectors_do_not_depend_on_the_batch() -> None:
    model, tokens = retriever()
    documents = [*texts(20), "x", ""]
    together = TorchEncoder(model, tokens).documents(documents)
    for text, rows in zip(documents, together, strict=True):
        (alone,) = TorchEncoder(model, tokens).documents([text])
        np.testing.assert_allclose(rows, alone, atol=1e-5)


def test_long_texts_are_cut_and_queries_are_filled_up() -> None:
    _, tokens = retriever(lengths=(8, 20))
    batch = tokens.queries(["ab", "a" * 50])
    start, query, end = tokens.queries([""]).tokens[0, :3].tolist()
    assert batch.tokens.tolist() == [[start, query, 97, 98, *[end] * 4], [start, query, *[97] * 6]]
    assert batch.text.all()
    assert tokens.documents(["a" * 50]).tokens.shape == (1, 20)
    _, tokens = retriever(lengths=(8, 20), expansion=False)
    assert tokens.queries(["ab", "a"]).text.tolist() == [[True] * 4, [True] * 3 + [False]]


def test_the_distillation_loss_is_equation_8_on_scaled_scores() -> None:
    scores, targets = (
        torch.tensor([[2.0, 4.0, 3.0], [1.0, 5.0, 7.0]]),
        torch.tensor([[0.0, 10.0, 10.0], [4.0, 2.0, 9.0]]),
    )
    compared = torch.tensor([[True, True, True], [True, True, False]])
    losses = distillation(scores, targets, compared, "mse")
    torch.testing.assert_close(losses, torch.tensor([0.25 / 3, 1.0]))
    divergence = distillation(scores, targets, compared, "kl")
    assert divergence[0] > 0 and divergence[1] > 0
    torch.testing.assert_close(distillation(targets * 3 - 1, targets, compared, "kl"), torch.zeros(2))


@pytest.mark.parametrize(("data", "objective"), [(PAIRS, "contrastive"), (SCORED, "distillation")])
def test_training_finds_the_documents(tmp_path: Path, home: Path, data: list[dict[str, Any]], objective: str) -> None:
    write_qwen3(tmp_path / "model")
    record = train(tmp_path, data)
    assert record.objective == objective and record.source.startswith("qwen3 in model, SHA-256 ")
    assert record.curve[-1][1] < 0.7 * record.curve[0][1]
    assert record.after["MRR"] > 0.4 and record.after["queries"] == record.before["queries"] > 0
    assert not (tmp_path / "out" / "training").exists()
    lines: list[str] = []
    assert train(tmp_path, data, log=lines.append) == record and lines == [
        f"{tmp_path / 'out'} is trained with these settings already"
    ]
    assert train(tmp_path, data, log=lambda line: shutil.rmtree(tmp_path / "out" / "training")) == record


def test_counts_among_scores_are_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"documents": 12345.0, "MRR": 0.25}
    record = trained_folder.FolderRecord(
        key="", weights="", source="random:0", layout="", examples=1, steps=2, curve=((1, 2.0), (2, 1.0)),
        before=scores, after=scores, seconds=1.0, device="cpu", hilnas="0",
    )  # fmt: skip
    print_training(Path("out"), record, {}, "nas family index", json=False)
    printed = capsys.readouterr().out
    assert "12,345 -> 12,345" in printed and "0.25 -> 0.25" in printed


def test_other_answers_to_a_query_do_not_count_as_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder:
        """Query N points to the axis N of 10, its document N.M as well, M / 10 long."""

        def __init__(self, model: object, tokens: object) -> None: ...

        def queries(self, texts: list[str]) -> list[Any]:
            return [np.eye(10, dtype=np.float32)[[int(text)]] for text in texts]

        def documents(self, texts: list[str]) -> list[Any]:
            return [np.eye(10, dtype=np.float32)[[int(text[0])]] * float(text[1:]) for text in texts]

    monkeypatch.setattr(training, "TorchEncoder", Encoder)
    examples = [Example(query=f"{n}", documents=(f"{n}.{m}",), positive=True) for n in range(10) for m in (1, 2)]
    start = cast(Any, SimpleNamespace(tokenizer=SimpleNamespace(tokenizer=byte_tokenizer(320))))
    settings = QUICK.model_copy(update={"held_out": 0.5})
    run = training._RetrievalTraining(examples, start, settings, tmp_path, [], 60.0)
    run.worker = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    scores = run.scores(cast(Any, None))
    assert scores["queries"] == scores["documents"] > 0 and scores["MRR"] == 1


def test_a_model_that_scores_all_documents_alike_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder:
        """All vectors are equal."""

        def __init__(self, model: object, tokens: object) -> None: ...

        def queries(self, texts: list[str]) -> list[Any]:
            return [np.ones((1, 4), np.float32) for _ in texts]

        documents = queries

    monkeypatch.setattr(training, "TorchEncoder", Encoder)
    examples = [Example(query=f"{n}", documents=(f"{n}.1",), positive=True) for n in range(40)]
    start = cast(Any, SimpleNamespace(tokenizer=SimpleNamespace(tokenizer=byte_tokenizer(320))))
    settings = QUICK.model_copy(update={"held_out": 0.5})
    run = training._RetrievalTraining(examples, start, settings, tmp_path, [], 60.0)
    run.worker = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    scores = run.scores(cast(Any, None))
    assert scores["recall@1"] == 0 and scores["MRR"] == pytest.approx(1 / scores["documents"])


def test_a_killed_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    write_qwen3(tmp_path / "model")
    whole = train(tmp_path, PAIRS)
    (tmp_path / "out").rename(tmp_path / "whole")
    worker = killed_after(5)
    with monkeypatch.context() as patch:
        patch.setattr(trained_folder, "Worker", lambda device, log, hook: worker)
        with pytest.raises(KilledError):
            train(tmp_path, PAIRS, checkpoint_s=0)
    with pytest.raises(InvalidInput, match="another training"):
        train(tmp_path, PAIRS[:30])
    (partial := tmp_path / "out" / "model.safetensors.k1ll3d.partial").write_bytes(b"half")
    lines: list[str] = []
    resumed = train(tmp_path, PAIRS, log=lines.append)
    assert "training out from step 5 to 16" in lines
    assert resumed.weights == whole.weights and not partial.exists()
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="is missing, or not what the training wrote"):
        train(tmp_path, PAIRS)
    (tmp_path / "out" / "retrieval.json").write_text("{")
    with pytest.raises(InvalidInput, match="no JSON"):
        train(tmp_path, PAIRS)


def test_members_children_and_late_interaction_models_are_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_family(tmp_path, monkeypatch)
    data = write_lines(tmp_path / "data.jsonl", PAIRS)
    settings = QUICK.model_copy(update={"epochs": 0.2})

    def run(name: str, output: str) -> RetrievalRecord:
        return train_retriever(name, [data], settings, tmp_path / output, lambda line: None)

    with pytest.raises(InvalidInput, match=r"no tokenizer yet|not been trained"):
        run("tiny/1M", "none")
    with pytest.raises(UnknownName):
        run("tiny/2M", "none")
    with pytest.raises(InvalidInput, match="FAMILY/SIZE"):
        run("nowhere", "none")
    request = PretrainingRequest((tmp_path / "corpus",), SETTINGS, tokenizer=tmp_path / "tokenizer.json")
    files = FileOptions(gguf=("f16",), context=512)
    train_member("tiny", "1M", replace(request, files=files), lambda line: None)
    record = run("tiny/1M", "first")
    assert record.source.startswith("1M of tiny, SHA-256 ") and record.layout.startswith("d64 v322 ")
    assert run(str(member_folder("tiny", "1M") / "transformers"), "second").layout == record.layout
    (gguf,) = (member_folder("tiny", "1M") / "gguf").glob("*F16.gguf")
    assert run(str(gguf), "of a GGUF file").layout == record.layout
    further = run(str(tmp_path / "first"), "third")
    assert further.layout == record.layout
    before, after = (load_file(tmp_path / name / "1_Dense" / "model.safetensors") for name in ("first", "third"))
    torch.testing.assert_close(before["linear.weight"], after["linear.weight"], atol=0.02, rtol=0)
    child = tmp_path / "adapted"
    (child / "files" / "transformers").mkdir(parents=True)
    shutil.copy(tmp_path / "tokenizer.json", child / "files" / "transformers" / "tokenizer.json")
    write_lines(child / REQUEST, ["{}"])
    shutil.copy(next(member_folder("tiny", "1M").glob("training/*/weights.safetensors")), child / CHILD)
    adapted = run(str(child), "fourth")
    assert adapted.source.startswith("adapted child in adapted, ") and adapted.layout == record.layout
    assert adapted.after == record.after
    with pytest.raises(InvalidInput, match="width"):
        train_retriever(
            str(tmp_path / "first"), [data], settings.model_copy(update={"width": 8}), tmp_path / "x", lambda line: None
        )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken\n", ":2: "),
        ({"query": "a"}, ":2: "),
        ({"query": "a", "documents": ["b", "c"]}, ":2: needs `positive`, or `documents` with `scores`"),
        ({"query": "a", "documents": ["b", "c"], "scores": [1]}, ":2: 2 documents, but 1 scores"),
        ({"query": "a", "documents": ["b"], "scores": [1]}, ":2: a teacher's scores need two documents"),
        ('{"query": "a", "documents": ["b", "c"], "scores": [1, NaN]}\n', ":2: "),
        ({"query": "a", "documents": ["b", "c"], "scores": [1, 2]}, ":2: has lines with a teacher's scores"),
        ({"query": "", "positive": "b"}, ":2: query: "),
        ({"query": "a", "positive": "b", "negatives": "c"}, ":2: give `positive` with `negatives`, a list"),
        ("[1]\n", ":2: "),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, problem: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", [PAIRS[0], line])
    with pytest.raises(InvalidInput) as error:
        read_examples(path)
    assert f"{path}{problem}" in str(error.value)


def write_beir(folder: Path) -> Path:
    write_lines(folder / "corpus.jsonl", [{"_id": 1, "title": "a title", "text": "one"}, {"_id": "2", "text": ""}])
    write_lines(folder / "queries.jsonl", [{"_id": "q", "text": "which one"}])
    write_lines(folder / "qrels" / "train.tsv", ["query-id\tcorpus-id\tscore\n", "q\t1\t2\n", "q\t2\t0\n"])
    return folder


def test_folders_of_beir_are_read(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    assert read_documents(folder) == {"1": "a title one", "2": ""}
    judged = read_judgements(folder, "train")
    assert judged.queries == {"q": "which one"} and judged.relevance == {"q": {"1": 2}}
    (example,) = read_examples(folder)
    assert (example.query, example.documents, example.scores) == ("which one", ("a title one",), ())
    write_lines(folder / "scores.jsonl", [{"query_id": "q", "document_ids": ["2", "1"], "scores": [1, 2]}])
    (example,) = read_examples(folder)
    assert (example.documents, example.scores) == (("", "a title one"), (1, 2))
    before = data_hashes(folder)
    for name in ("corpus.jsonl", "scores.jsonl"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    assert read_examples(folder) == [example]
    assert len(set(data_hashes(folder)) - set(before)) == 2, "compressed files are part of keys, too"


def test_judgements_need_no_names_of_columns(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    (folder / "qrels" / "train.tsv").write_text("q\t1\t2\n\nq\t2\t1\n\n")
    assert read_judgements(folder, "train").relevance == {"q": {"1": 2, "2": 1}}
    (folder / "qrels" / "train.tsv").write_bytes(b"\xef\xbb\xbfq\t1\t2\r\n")
    assert read_judgements(folder, "train").relevance == {"q": {"1": 2}}


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("qrels/train.tsv", "x\t1\t1\n", "train.tsv:4: queries.jsonl has no query 'x'"),
        ("qrels/train.tsv", "q\t1\n", "train.tsv:4: three columns"),
        ("qrels/train.tsv", f"q\t{'d' * 200_000}\t1\n", "train.tsv: cannot read it: field larger than field limit"),
        ("qrels/train.tsv", "q\t7\t1\n", "corpus.jsonl has no document '7'"),
        ("corpus.jsonl", {"_id": "1", "text": "again"}, "corpus.jsonl:3: the id '1' is there twice"),
        ("corpus.jsonl", {"text": "no id"}, "corpus.jsonl:3: _id: "),
        ("corpus.jsonl", {"id": "3", "contents": "no text"}, "corpus.jsonl:3: text: Field required"),
        (
            "scores.jsonl",
            {"query_id": "q", "document_ids": ["1", "9"], "scores": [1, 2]},
            "scores.jsonl:1: corpus.jsonl",
        ),
        ("scores.jsonl", {"query_id": "q", "document_ids": ["1", "2"], "scores": [1]}, "scores.jsonl:1: 2 documents"),
    ],
)
def test_problems_of_beir_are_named(tmp_path: Path, name: str, line: Any, problem: str) -> None:
    folder = write_beir(tmp_path)
    path = folder / name
    content = path.read_text() if path.exists() else ""
    path.write_text(content + (line if isinstance(line, str) else json.dumps(line) + "\n"))
    with pytest.raises(InvalidInput) as error:
        read_examples(folder)
    assert problem in str(error.value)


def test_the_command_trains_indexes_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_qwen3(tmp_path / "model")
    write_lines(tmp_path / "data.jsonl", PAIRS)
    (tmp_path / "settings.yaml").write_text("epochs: 6\nbatch: 8\nlr: 0.003\n")
    result = nas(
        "family", "retrieval", "model", "--data", "data.jsonl", "-o", "out", "--config", "settings.yaml", "--json"
    )
    assert result.code == 0 and json.loads(result.out)["objective"] == "contrastive"
    documents = [{"id": f"d{number}", "text": line["positive"]} for number, line in enumerate(PAIRS)]
    write_lines(tmp_path / "documents.jsonl", documents)
    result = nas("family", "index", "out", "documents.jsonl", "-o", "index")
    assert result.code == 0 and "40" in result.out
    result = nas("family", "search", "index", PAIRS[3]["query"], "--top", "5", "--json")
    hits = json.loads(result.out)["hits"]
    assert len(hits) == 5 and "d3" in [hit["id"] for hit in hits]
    assert hits == sorted(hits, key=lambda hit: -hit["score"])
    assert nas("family", "search", "out", "x").code != 0


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, home: Path) -> None:
    write_qwen3(tmp_path / "model")
    write_lines(tmp_path / "out" / "mine.txt", ["x"])
    with pytest.raises(InvalidInput, match="not empty"):
        train(tmp_path, PAIRS)
    with pytest.raises(InvalidInput, match="or none"):
        train_retriever(
            str(tmp_path / "model"),
            [write_lines(tmp_path / "a.jsonl", PAIRS), write_lines(tmp_path / "b.jsonl", SCORED)],
            QUICK,
            tmp_path / "new",
            lambda line: None,
        )


def test_a_model_that_no_layout_says_is_refused(tmp_path: Path, home: Path) -> None:
    write_lines(tmp_path / "model" / "config.json", [{"model_type": "bert"}])
    with pytest.raises(Unsupported, match="bert"):
        train(tmp_path, PAIRS)
