"""Folders of late-interaction models: sentence-transformers computes the same vectors; damaged ones are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval_lab import LAYOUT, write_model

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.train.retrieval.release import open_retriever
from nas.train.retrieval.retriever import TorchEncoder

TEXTS = ["the cat", "", "größer " * 40, "  on the mat <|im_end|>\n\tx", "日本語"]
MODELS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "lfm2": (LAYOUT, {"lengths": (32, 64)}),
    "without expansion": (Layout.parse("d64 v320 untied ffn=swiglu:96 [A4/2 A4/2]"), {"expansion": False}),
    "bidirectional": (LAYOUT, {"lengths": (32, 64), "bidirectional": True}),
    "own class": (Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]"), {"lengths": (32, 64)}),
}


def test_sentence_transformers_computes_the_same_vectors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it loads
        from sentence_transformers import MultiVectorEncoder
    for name, (layout, more) in MODELS.items():
        folder = tmp_path / name
        write_model(folder, layout, **more)
        upstream = MultiVectorEncoder(str(folder), device="cpu", trust_remote_code=True, local_files_only=True)
        encoder = TorchEncoder(*open_retriever(folder))
        queries, documents = encoder.queries(TEXTS), encoder.documents(TEXTS)
        reference = upstream.encode_query(TEXTS), upstream.encode_document(TEXTS)
        for embeddings, vectors in zip((queries, documents), reference, strict=True):
            for rows, expected in zip(embeddings, vectors, strict=True):
                assert rows.shape == expected.shape
                np.testing.assert_allclose(rows, expected.numpy(), atol=1e-5)
        scores = [[(query @ rows.T).max(1).sum() for rows in documents] for query in queries]
        np.testing.assert_allclose(upstream.similarity(*reference).numpy(), scores, atol=1e-3)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, tokens = write_model(tmp_path / "model", lengths=(16, 40))
    model, read = open_retriever(tmp_path / "model")
    assert (read.lengths, read.expansion, read.end) == (tokens.lengths, tokens.expansion, tokens.end)
    for reference, candidate in zip(
        TorchEncoder(written, tokens).documents(TEXTS), TorchEncoder(model, read).documents(TEXTS), strict=True
    ):
        np.testing.assert_allclose(reference, candidate, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"skiplist_words": ["!"]}, "words that are skipped"),
        ({"query_prefix": "[unused0]"}, "markers other than"),
        ({"attend_to_expansion_tokens": False}, "not attended to"),
    ],
)
def test_settings_that_are_not_computed_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(Unsupported, match=problem):
        open_retriever(tmp_path / "model")


def test_projections_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    path = folder / "1_Dense" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"use_residual": True}))
    with pytest.raises(InvalidInput, match="residual connection"):
        open_retriever(folder)
    path.write_text(json.dumps(content))
    (folder / "2_Dense").mkdir()
    with pytest.raises(InvalidInput, match="1_Dense, 2_Dense"):
        open_retriever(folder)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    dense = folder / "1_Dense" / "model.safetensors"
    content = dense.read_bytes()
    dense.write_bytes(content[:-1])
    with pytest.raises(InvalidInput, match="1_Dense"):
        open_retriever(folder)
    dense.write_bytes(content)
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"query_length": "many"}))
    with pytest.raises(InvalidInput, match="lengths"):
        open_retriever(folder)
    path.unlink()
    with pytest.raises(InvalidInput, match="no late-interaction model"):
        open_retriever(folder)
