"""Folders of late-interaction models: sentence-transformers computes the same vectors; damaged ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
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
SCRIPT = """
import json, sys
import numpy as np
from sentence_transformers import MultiVectorEncoder

texts = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    model = MultiVectorEncoder(folder, device="cpu", trust_remote_code=True, local_files_only=True)
    queries, documents = model.encode_query(texts), model.encode_document(texts)
    rows = {f"query{i}": rows.numpy() for i, rows in enumerate(queries)}
    rows |= {f"document{i}": rows.numpy() for i, rows in enumerate(documents)}
    np.savez(folder + "/theirs.npz", scores=model.similarity(queries, documents).numpy(), **rows)
"""
MODELS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "lfm2": (LAYOUT, {"lengths": (32, 64)}),
    "without expansion": (Layout.parse("d64 v320 untied ffn=swiglu:96 [A4/2 A4/2]"), {"expansion": False}),
    "bidirectional": (LAYOUT, {"lengths": (32, 64), "bidirectional": True}),
    "own class": (Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]"), {"lengths": (32, 64)}),
}


def test_sentence_transformers_computes_the_same_vectors(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in MODELS]
    for folder, (layout, more) in zip(folders, MODELS.values(), strict=True):
        write_model(folder, layout, **more)
    command = [sys.executable, "-c", SCRIPT, json.dumps(TEXTS), *map(str, folders)]  # it takes 15 s to load
    subprocess.run(command, check=True, timeout=500)
    for folder in folders:
        theirs, encoder = np.load(folder / "theirs.npz"), TorchEncoder(*open_retriever(folder))
        ours = {"query": encoder.queries(TEXTS), "document": encoder.documents(TEXTS)}
        for name, vectors in ours.items():
            for number, rows in enumerate(vectors):
                assert rows.shape == theirs[f"{name}{number}"].shape
                np.testing.assert_allclose(rows, theirs[f"{name}{number}"], atol=1e-5)
        scores = [[(query @ rows.T).max(1).sum() for rows in ours["document"]] for query in ours["query"]]
        np.testing.assert_allclose(theirs["scores"], scores, atol=1e-3)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, tokens = write_model(tmp_path / "model", lengths=(16, 40))
    model, read = open_retriever(tmp_path / "model")
    assert (read.lengths, read.expansion, read.end) == (tokens.lengths, tokens.expansion, tokens.end)
    for ours, theirs in zip(
        TorchEncoder(written, tokens).documents(TEXTS), TorchEncoder(model, read).documents(TEXTS), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


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
