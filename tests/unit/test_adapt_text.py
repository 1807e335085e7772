"""Halves of held-out text, and generated text with answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from adapt_lab import LAYOUT, sources, write_lab

from nas.core.errors import InvalidInput
from nas.core.replacement import RECALL_GROUP, RECALLABLE_GROUP, TEXT_GROUP
from nas.model.nn.mixes import ScoredText
from nas.train.adapt.text import recall_text, report_sources, report_text, selection_text
from nas.train.pretrain.data import Tokens, Vocabulary


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def vocabulary(lab: Path) -> Vocabulary:
    return Vocabulary(lab / "tokenizer.json", LAYOUT.vocab)


def test_nothing_is_reported_on_text_that_choices_are_made_by(lab: Path, vocabulary: Vocabulary) -> None:
    (source,) = sources(lab)
    chosen, reported = (function([source], 32, 1 << 20) for function in (selection_text, report_text))
    middle = len(source.held_out) // 2
    windows = source.held_out[: middle // 32 * 32].reshape(-1, 32).tolist()
    assert sorted(chosen.ids.tolist()) == sorted(windows)
    assert reported.ids.flatten().tolist() == source.held_out[middle:][: reported.ids.numel()].tolist()
    (half,) = report_sources([source], vocabulary, 1 << 20)
    assert half.held_out.tolist() == source.held_out[middle:].tolist()
    before = vocabulary.bytes_of(source.held_out[:middle])
    assert before + half.held_out_bytes == source.held_out_bytes > 2000
    assert report_sources([Tokens("small", "k", source.train, source.held_out, 100)], vocabulary, 1 << 20) == []


def test_every_source_gives_as_many_windows() -> None:
    ids = np.arange(6400, dtype=np.uint16) % 50
    text = selection_text([Tokens(name, name, ids, ids + 50 * i, 9999) for i, name in enumerate("ab")], 32, 2048)
    assert text.ids.shape == (64, 32)
    of_first = text.ids[:, 0] < 50
    assert of_first.sum() == 32
    assert 4 <= of_first[:16].sum() <= 12, "the first windows are a sample of all"
    again = selection_text([Tokens(name, name, ids, ids + 50 * i, 9999) for i, name in enumerate("ab")], 32, 2048)
    assert torch.equal(text.ids, again.ids)


def test_recallable_positions_predict_a_pair_that_occurred_before() -> None:
    generator = np.random.default_rng(0)
    ids = generator.integers(16, size=4096).astype(np.uint16)
    train = np.zeros(1 << 16, np.uint16)
    text = selection_text([Tokens("a", "a", train, ids, 9999)], 64, 1024)
    for row, where in zip(text.ids.tolist(), text.groups[RECALLABLE_GROUP].tolist(), strict=True):
        pairs: set[tuple[int, int]] = set()
        for at, pair in enumerate(pairwise(row)):
            assert where[at] == (pair in pairs)
            pairs.add(pair)
        assert not where[-1]


def test_answers_follow_from_their_window(vocabulary: Vocabulary) -> None:
    text = recall_text(vocabulary, 160, 1600, 0)
    where = text.groups[RECALL_GROUP]
    assert text.ids.shape == where.shape == (10, 160)
    assert where.any(-1).all()
    for row, positions in zip(text.ids, where, strict=True):
        ids, mask = row.tolist(), positions.tolist()
        at = 0
        while at < len(ids):
            if not mask[at]:
                at += 1
                continue
            end = next(i for i in range(at, len(ids)) if not mask[i])
            answer = vocabulary._tokenizer.decode(ids[at + 1 : end + 1])
            digits = "".join(filter(str.isdigit, answer))
            assert len(digits) == 5, "a value and what its first and last token hold beside it"
            assert digits in vocabulary._tokenizer.decode(ids[: at + 1])
            at = end
    assert text.sha256 == recall_text(vocabulary, 160, 1600, 0).sha256 != recall_text(vocabulary, 160, 1600, 1).sha256


def test_windows_without_room_for_an_answer_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(
        InvalidInput, match=r"fits into 16 tokens: raise library.score_length, or set library.recall_tokens"
    ):
        recall_text(vocabulary, 16, 64, 0)


def test_two_texts_are_scored_as_one() -> None:
    one = ScoredText(torch.zeros(3, 4, dtype=torch.int64), {TEXT_GROUP: torch.ones(3, 4, dtype=torch.bool)})
    other = ScoredText(torch.ones(2, 4, dtype=torch.int64), {RECALL_GROUP: torch.eye(4, dtype=torch.bool)[:2]})
    both = one.with_windows_of(other)
    values = torch.arange(20.0).view(5, 4)
    assert both.means(values) == {TEXT_GROUP: pytest.approx(5.5), RECALL_GROUP: pytest.approx((12 + 17) / 2)}
    assert both.part(0, 4).means(values[::4]) == {TEXT_GROUP: pytest.approx(1.5), RECALL_GROUP: pytest.approx(17.0)}
    assert [len(batch) for batch in both.passes(1 << 24)] == [1] * 5
