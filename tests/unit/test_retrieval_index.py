"""Indexes of documents: exact, resumed after a kill, and refused where they are not whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval_lab import texts, write_lines, write_model
from safetensors.torch import load_file, save_file

from nas.core.errors import InvalidInput
from nas.train.retrieval import index as index_module
from nas.train.retrieval.index import Index, build_index, open_index
from nas.train.retrieval.retriever import TorchEncoder


class KilledError(Exception):
    """Stands for a kill."""


def documents(folder: Path, count: int = 20) -> Path:
    lines = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts(count))]
    lines += [{"id": "empty", "text": ""}, {"id": "long", "text": "a b c d " * 500}]
    return write_lines(folder / "documents.jsonl", lines)


def build(folder: Path, source: Path | None = None) -> list[str]:
    lines: list[Any] = []
    build_index(folder / "model", [source or folder / "documents.jsonl"], folder / "index", lines.append)
    return lines


def test_a_search_returns_the_best_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_PART", 8)
    model, tokens = write_model(tmp_path / "model", lengths=(16, 64))
    documents(tmp_path)
    record = build_index(tmp_path / "model", [tmp_path / "documents.jsonl"], tmp_path / "index", lambda line: None)
    assert record.documents == 22 and record.cut >= 1
    (hits,) = open_index(tmp_path / "index")(["cat on the mat"], 22)
    assert {hit.id for hit in hits} == {*(f"d{number}" for number in range(20)), "empty", "long"}
    (query,) = TorchEncoder(model, tokens).queries(["cat on the mat"])
    for hit in hits:
        (rows,) = TorchEncoder(model, tokens).documents([hit.text])
        np.testing.assert_allclose(hit.score, (query @ rows.T).max(1).sum(), atol=0.01)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    (tmp_path / "model").rename(tmp_path / "moved")
    assert open_index(tmp_path / "index", tmp_path / "moved")(["cat on the mat"], 22) == [hits]


def test_a_killed_index_resumes_and_is_not_searched_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_PART", 4)
    write_model(tmp_path / "model")
    documents(tmp_path)
    build(tmp_path)
    (tmp_path / "index").rename(tmp_path / "whole")
    calls, documents_of = [], TorchEncoder.documents

    def killed(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KilledError
        return documents_of(*arguments)

    (tmp_path / "index").mkdir()
    (tmp_path / "index" / ".request.json.abc").touch()  # a kill while the first file was written
    with monkeypatch.context() as patch:
        patch.setattr(TorchEncoder, "documents", killed)
        with pytest.raises(KilledError):
            build(tmp_path)
    with pytest.raises(InvalidInput, match="not finished"):
        Index(tmp_path / "index")
    (tmp_path / "index" / "documents-00001.jsonl").unlink()  # a kill between the two files of a part
    other = write_lines(tmp_path / "other.jsonl", [{"id": "a", "text": "b"}])
    with pytest.raises(InvalidInput, match="other documents"):
        build(tmp_path, other)
    build(tmp_path)
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
    for name in names:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert build(tmp_path) == [f"{tmp_path / 'index'} holds the index of these documents already"]


def test_damaged_indexes_and_other_models_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    documents(tmp_path)
    build(tmp_path)
    vectors = tmp_path / "index" / "vectors-00000.npy"
    content = vectors.read_bytes()
    for damaged in (content[:-10], b""):
        vectors.write_bytes(damaged)
        with pytest.raises(InvalidInput, match="damaged"):
            Index(tmp_path / "index")
    vectors.write_bytes(content)
    write_model(tmp_path / "other", lengths=(8, 64))
    with pytest.raises(InvalidInput, match="not the model"):
        open_index(tmp_path / "index", tmp_path / "other")
    with pytest.raises(InvalidInput, match="no index"):
        Index(tmp_path / "model")
    with pytest.raises(InvalidInput, match="not empty"):
        build_index(tmp_path / "model", [tmp_path / "documents.jsonl"], tmp_path / "other", lambda line: None)
    for content, problem in ((b"", "no JSON"), (b"[]", "no JSON object")):
        (tmp_path / "other" / "index.json").write_bytes(content)
        with pytest.raises(InvalidInput, match=problem):
            build_index(tmp_path / "model", [tmp_path / "documents.jsonl"], tmp_path / "other", lambda line: None)


def test_weights_in_shards_are_part_of_what_an_index_is_of(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    documents(tmp_path)
    single, shard = (tmp_path / "model" / name for name in ("model.safetensors", "model-00001-of-00001.safetensors"))
    weights = load_file(single)
    single.rename(shard)
    index = {"weight_map": dict.fromkeys(weights, shard.name)}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    build(tmp_path)
    open_index(tmp_path / "index")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, shard)
    with pytest.raises(InvalidInput, match="not the model"):
        open_index(tmp_path / "index")


def test_a_compressed_file_that_is_named_without_its_ending_is_part_of_the_key(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    packed = tmp_path / "documents.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"id": "a", "text": "a cat"}\n'))
    build(tmp_path)
    packed.write_bytes(gzip.compress(b'{"id": "a", "text": "a dog"}\n'))
    with pytest.raises(InvalidInput, match="other documents"):
        build(tmp_path)


def test_ids_of_two_sources_are_apart(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    source = documents(tmp_path)
    with pytest.raises(InvalidInput, match="an earlier source has a document"):
        build_index(tmp_path / "model", [source, source], tmp_path / "index", lambda line: None)
