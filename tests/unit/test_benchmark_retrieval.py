"""The benchmark of retrieval: its figures, and BM25 beside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from retrieval_lab import retriever as lab_retriever
from retrieval_lab import texts

from benchmarks.retrieval import bm25, gains, interval, ranks_of, scores
from benchmarks.retrieval_compare import BiEncoder, chapters, glosses, throughput, train_bi_encoder, write_page


def test_figures_are_those_of_ranks() -> None:
    ranks = ranks_of([[4, 2], [1], [3, 5]], [2, 1, 7])
    assert ranks.tolist() == [2, 1, math.inf]
    np.testing.assert_allclose(gains(ranks), [1 / math.log2(3), 1, 0])
    assert gains(np.array([10.0, 11.0]))[1] == 0
    assert scores(ranks)["recall@1"][0] == 0.3333
    mean, low, high = interval(np.array([0.0, 1.0] * 200))
    assert mean == 0.5 and 0.4 < low < 0.5 < high < 0.6


def test_bm25_finds_words() -> None:
    documents = {f"{number}": f"filler text number {number}" for number in range(200)}
    documents["7"] = "a partition is mounted"
    assert bm25(documents, ["partition mounted"])[0][0] == "7"


def test_a_bi_encoder_is_trained_and_has_one_vector(tmp_path: Path) -> None:
    retriever, tokens = lab_retriever(lengths=(16, 48), expansion=False)
    model = BiEncoder(retriever).requires_grad_(True)
    pairs = [(text[4:20], text) for text in texts(32)]
    before = model(*tokens.queries(["the cat"])).detach().clone()
    train_bi_encoder(model, tokens, pairs, batch=8, lr=1e-2)
    after = model(*tokens.queries(["the cat", "a"])).detach()
    assert after.shape == (2, 16) and not np.allclose(before[0], after[0])
    np.testing.assert_allclose(after.norm(dim=-1), 1, atol=1e-5)


def test_the_page_gets_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.retrieval_compare.fastest", lambda run: run() is None or 0.5)
    figures = throughput("d64 v256 ffn=swiglu:64 [C3 A4/2]")
    measured = {**scores(np.array([1.0, 2.0, math.inf])), "gains": [1.0, 0.6, 0.0], "index_bytes": 256.0}
    page = tmp_path / "page.md"
    names = ("comparison", "throughput", "languages")
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names))
    searches = {"late interaction": measured, "BM25": measured}
    write_page(page, {"searches": searches, "throughput": figures, "languages": {"packages-de": searches}})
    text = page.read_text()
    assert "| BM25 | 0.54" in text and "| 32 | 64.0" in text and "| packages-de | late interaction | 0.54" in text


def test_glosses_without_their_words_and_chapters_are_read(tmp_path: Path) -> None:
    (tmp_path / "wordnet").mkdir()
    lines = [
        "  1 licence",
        '00000001 03 n 02 pine_tree 0 conifer 1 000 | a tree with needles; "tall pines"',
        "00000002 03 n 01 oak 0 000 | the wood of any oak  ",
        '00000003 03 n 01 ash 0 001 @ 00000001 n 0000 | what a fire leaves; "grey"',
    ]
    (tmp_path / "wordnet" / "data.noun").write_text("\n".join(lines))
    assert list(glosses(tmp_path)) == [
        ("00000001", "pine tree, conifer", "a tree with needles"),
        ("00000003", "ash", "what a fire leaves"),
    ]
    library = tmp_path / "doc/python3.11/html/_sources/library"
    library.mkdir(parents=True)
    (library / "json.rst.txt").write_text(
        ".. module:: json\n   :synopsis: Encode.\n\n.. note::\n\n:mod:`json` is *it*.\n"
    )
    (library / "intro.rst.txt").write_text("No module.")
    assert list(chapters(tmp_path)) == [("json.rst.txt", "Encode.", "json is it.")]
