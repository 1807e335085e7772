"""Parts of held-out text: what the sequence lets one recall, the rest, late positions; scores and chance of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nas.model.text.corpus import Domain
from nas.model.text.generators import joined, recall_text
from nas.search.proxy.data import BYTE_GRAM, IGNORE, Group, LmData, Part, evaluate, recallable, score_groups
from nas.search.proxy.job import is_part

Ids = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Hits = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def domain(text: bytes, train: bytes = b"#" * 1000) -> Domain:
    return Domain(np.frombuffer(train, np.uint8), np.frombuffer(text, np.uint8))


def windows(*texts: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.stack([np.frombuffer(text, np.uint8) for text in texts])


def recalled(text: Ids, train: bytes = b"#" * 1000) -> Hits:
    return recallable(text, np.frombuffer(train, np.uint8), BYTE_GRAM)


def masked_text(text: bytes, where: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    """The text, its labels that are not recallable replaced by dots; the first byte is no label."""
    return "".join(chr(byte) if hit else "." for byte, hit in zip(text[1:], where, strict=True))


def test_a_label_is_recallable_if_its_six_bytes_occurred_in_the_same_window() -> None:
    texts = (b"keyword=17; other=3; keyword=19;", b"no keyword=1 is repeated in here")
    hits = recalled(windows(*texts))
    assert masked_text(texts[0], hits[0]) == "." * 25 + "rd=1" + ".."
    assert not hits[1].any()


@pytest.mark.parametrize("n", [0, 1, 7])
def test_hits_agree_with_a_search_of_every_window(n: int) -> None:
    generator = np.random.default_rng(n)
    text = generator.integers(97, 99, (5, 60)).astype(np.uint8)
    mask = recalled(text)
    for row, hits in zip(text, mask, strict=True):
        whole = row.tobytes()
        for label in range(1, len(whole)):
            gram = whole[label - BYTE_GRAM + 1 : label + 1]
            expected = label >= BYTE_GRAM - 1 and gram in whole[:label]
            assert hits[label - 1] == expected


def test_what_training_text_has_often_is_known_without_the_window() -> None:
    text = b"return self; x; return self; abcdefg; abcdefg"
    rare = recalled(windows(text))[0]
    hits = recalled(windows(text), b"return self; ............." * 40_000)[0]
    assert rare.sum() > hits.sum() > 0
    assert masked_text(text, hits).endswith("fg")


def test_the_answers_of_generated_text_are_recallable_within_their_distance() -> None:
    document = joined(recall_text(1, 60_000, distances=(128,)))
    text = np.frombuffer(document.text, np.uint8)
    length = 512
    starts = np.arange(0, text.size - length - 1, length)
    mask = recalled(np.stack([text[start : start + length + 1] for start in starts]))
    inside, hit = 0, 0
    for first, end, distance in document.recalls:
        row, column = divmod(first, length)
        if column - distance - 6 >= 0 and end - row * length <= length and row < len(starts):
            inside += 1
            hit += int(mask[row, column - 1 : column + 4].all())
    assert inside > 100
    assert hit == inside


def test_parts_have_the_chance_of_their_own_labels() -> None:
    text = (b"name=12345; other=98765; " * 200)[:4000] + bytes(range(97, 123)) * 40
    data = LmData({"a": domain(text)}, batch=1, length=512, eval_bytes=4096, seed=0)
    group = data.groups()["lm/a"]
    assert set(group.parts) == {"recall", "rest", "late"}
    recall, rest, late = (group.parts[name] for name in ("recall", "rest", "late"))
    assert torch.equal(recall.where, ~rest.where)
    assert late.where[:, -128:].all()
    assert not late.where[:, :-128].any()
    share = np.bincount(np.frombuffer(text, np.uint8), minlength=256) / len(text)
    for part in (recall, rest, late):
        by_hand = -np.log2(share[group.labels[part.where].numpy()]).mean()
        assert part.chance == pytest.approx(by_hand)
    short = LmData({"a": domain(text)}, batch=1, length=128, eval_bytes=4096, seed=0)
    assert "late" not in short.groups()["lm/a"].parts


class Fixed(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits.expand(*inputs.shape, -1)


def test_the_unigram_model_scores_chance_in_every_part() -> None:
    text = (b"name=12345; other=98765; " * 200)[:4000]
    source = domain(text)
    data = LmData({"a": source}, batch=1, length=100, eval_bytes=4000, seed=0)
    logits = torch.from_numpy(-source.surprise * math.log(2)).float().nan_to_num(neginf=-100.0)
    scores = score_groups(Fixed(logits), data.groups(), torch.device("cpu"))
    assert scores.keys() == {"lm/a", "lm/a.recall", "lm/a.rest"}
    for name, (got, chance) in scores.items():
        assert got.loss == pytest.approx(chance, rel=1e-2 if name == "lm/a" else 1e-5), name


def test_losses_are_per_label_or_per_byte_and_ignored_labels_do_not_count() -> None:
    logits = torch.tensor([0.0, math.log(3.0)])
    labels = torch.tensor([[0, 1, IGNORE]])
    where = torch.tensor([[False, True, False]])
    plain = Group(torch.zeros(1, 3, dtype=torch.long), labels, 0.0, 1.0, parts={"x": Part(where, 0.0)})
    scores = evaluate(Fixed(logits), plain, torch.device("cpu"))
    assert scores[""].loss == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)
    assert scores[""].accuracy == 0.5
    assert scores["x"].loss == pytest.approx(math.log(4 / 3))
    assert scores["x"].accuracy == 1.0
    sized = Group(plain.inputs[:, :2], labels[:, :2], 0.0, math.log(2), sizes=torch.tensor([1, 4]))
    per_byte = evaluate(Fixed(logits), sized, torch.device("cpu"))[""].loss
    assert per_byte == pytest.approx((2.0 + math.log2(4 / 3)) / 5)


def test_parts_are_told_from_groups_by_name() -> None:
    parts = {"lm/code.recall", "lm/a.txt.late", "lm/docs/*.rest.rest"}
    groups = parts | {"lm/code", "lm/a.txt", "lm/docs/*.rest", "lm/alone.late", "task/x", "task/x.recall"}
    assert {group for group in groups if is_part(group, groups)} == parts
