"""Generated text: answers stand where they are said to, at the distance that was asked for; languages are grammars."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from nas.model.text.generators import (
    FORMS,
    SCRIPTS,
    Dice,
    Document,
    Language,
    joined,
    languages_text,
    recall_document,
    recall_text,
)


def check_answers(document: Document) -> None:
    text = document.text
    for start, end, distance in document.recalls:
        assert text[start:end].isdigit()
        assert text[start:end] == text[start - distance : end - distance]
        # What stands before both is the same: enough for an n-gram of six bytes to be found again.
        assert text[start - 5 : start] == text[start - distance - 5 : start - distance]
        before = text[: start - distance]
        assert text[start - 12 : end] not in before, "the key was not stated before"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("items", "distance"), [(1, 128), (4, 256), (16, 2048), (1000, 4096)])
def test_answers_repeat_facts_at_their_distance(form: str, items: int, distance: int) -> None:
    for seed in range(5):
        document = recall_document(Dice(seed), form, items, distance)
        check_answers(document)
        assert document.recalls[0].distance == distance
        assert 1 <= len(document.recalls) <= items
        if items <= 16 and distance >= 100 * items:
            assert len(document.recalls) == items


@pytest.mark.parametrize("form", FORMS)
def test_a_distance_shorter_than_the_question_gives_the_next_longer_one(form: str) -> None:
    document = recall_document(Dice(1), form, 4, 16)
    check_answers(document)
    assert all(16 < recall.distance < 120 for recall in document.recalls)


def test_each_distance_gets_the_same_share_of_text() -> None:
    documents = recall_text(3, 200_000, distances=(256, 1024, 4096))
    sizes: Counter[int] = Counter()
    for document in documents:
        sizes[document.recalls[0].distance] += len(document.text)
    assert set(sizes) == {256, 1024, 4096}
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    check_answers(joined(documents[:20]))


def test_generated_text_is_the_same_on_every_machine() -> None:
    """Another digest means another default corpus: raise `nas.model.text.default.RECIPE` with it."""
    recalled = joined(recall_text(7, 20_000)).text
    spoken = languages_text(7, 20_000)
    assert hashlib.sha256(recalled).hexdigest()[:16] == "6f9dae814847d999"
    assert hashlib.sha256(spoken.encode()).hexdigest()[:16] == "df9f374feb243c18"
    assert recalled != joined(recall_text(8, 20_000)).text
    assert spoken != languages_text(8, 20_000)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_language_uses_its_own_letters_and_its_lexicon(script: str) -> None:
    language = Language(Dice(5), script)
    text = language.text(Dice(6), 4000)
    assert set(text) <= set("".join(SCRIPTS[script])) | set(" .,\n")
    words = Counter(text.replace(".", "").replace(",", "").split())
    assert words.most_common(1)[0][1] > 10 * min(words.values())
    assert len(text.encode()) >= 4000
