"""Filters of conversations: language, exact and near duplicates, length, overlap with evaluations (LFM2 report, 4.2.1).

Near duplicates are found by MinHash with locality-sensitive hashing (Broder 1997; Leskovec et al., "Mining of massive
datasets", section 3.4), and each candidate pair is checked by its exact Jaccard similarity, so nothing is dropped by a
collision of hashes.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.posttrain.conversations import Conversation
from nas.posttrain.languages import language_of

_PERMUTATIONS = 128
_SHINGLE = 3
_RECALL = 0.99


class Filters(BaseModel):
    """Which conversations are dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    languages: tuple[str, ...] = Field(
        (), exclude_if=lambda codes: not codes, description="codes of ISO 639; text detected as another one is dropped"
    )
    length: int = Field(4096, ge=2, description="most tokens; longer conversations are dropped, never cut")
    duplicates: bool = Field(True, description="drop all but the first of equal ones, whatever case and spaces")
    near_duplicates: float | None = Field(
        None, gt=0, le=1, description="least Jaccard similarity of word 3-grams at which a later one is dropped"
    )
    ngram: int = Field(13, ge=1, description="words that a question may not share with one of an evaluation")


def text_of(conversation: Conversation) -> str:
    """Returns the contents of all messages in lower case, with single spaces."""
    return " ".join(" ".join(message.content for message in conversation.messages).lower().split())


def question_text(conversation: Conversation) -> str:
    """Returns the contents of all messages but the assistant's, in lower case, with single spaces."""
    said = (message.content for message in conversation.messages if message.role != "assistant")
    return " ".join(" ".join(said).lower().split())


def without_duplicates(conversations: Sequence[Conversation]) -> list[int]:
    """Returns the indices of the first of each set of equal conversations."""
    first: dict[str, int] = {}
    for index, conversation in enumerate(conversations):
        first.setdefault(text_of(conversation), index)
    return list(first.values())


def in_languages(conversations: Sequence[Conversation], languages: Sequence[str]) -> list[int]:
    """Returns the indices of conversations whose users and assistants are not detected to use another language.

    Conversations whose language cannot be said are among them; see `language_of`.
    """
    wanted = {None, *languages}
    return [index for index, each in enumerate(conversations) if language_of(_spoken(each)) in wanted]


def _spoken(conversation: Conversation) -> str:
    return "\n".join(each.content for each in conversation.messages if each.role in ("user", "assistant"))


def without_near_duplicates(conversations: Sequence[Conversation], threshold: float) -> list[int]:
    """Returns the indices of conversations whose Jaccard similarity with every earlier kept one is below `threshold`.

    A pair at the threshold is found with a probability of at least 0.99.
    """
    rows = rows_of_band(threshold)
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    shingles: dict[int, frozenset[int]] = {}
    for index, conversation in enumerate(conversations):
        own = frozenset(_shingles(text_of(conversation)))
        signature = minhash(own)
        keys = [(start, signature[start : start + rows].tobytes()) for start in range(0, _PERMUTATIONS, rows)]
        candidates = {other for key in keys for other in buckets[key]}
        if any(jaccard(own, shingles[other]) >= threshold for other in candidates):
            continue
        shingles[index] = own
        for key in keys:
            buckets[key].append(index)
    return list(shingles)


def without_overlap(
    conversations: Sequence[Conversation], evaluations: Sequence[Conversation], ngram: int
) -> list[int]:
    """Returns the indices of conversations whose question shares no `ngram` words in a row with an evaluation's.

    Of a question with fewer words, all words together count as one n-gram.
    """
    known = {gram for each in evaluations for gram in _grams(question_text(each), ngram)}
    return [
        index
        for index, conversation in enumerate(conversations)
        if known.isdisjoint(_grams(question_text(conversation), ngram))
    ]


def rows_of_band(threshold: float) -> int:
    """Returns the most rows per band at which a pair of similarity `threshold` is found with probability 0.99.

    With R rows in each of P / R bands, it is found with probability 1 - (1 - threshold^R)^(P / R).
    """
    fitting = [
        rows for rows in (1, 2, 4, 8, 16, 32, 64, 128) if 1 - (1 - threshold**rows) ** (_PERMUTATIONS / rows) >= _RECALL
    ]
    return max(fitting, default=1)


def minhash(shingles: frozenset[int]) -> NDArray[np.uint64]:
    """Returns the MinHash signature of a set of 32-bit values, [128].

    Hash functions are multiply-shift, (a x + b mod 2^64) >> 32 with odd a (Dietzfelbinger et al. 1997).
    """
    values = np.fromiter(sorted(shingles), np.uint64)
    hashed = (_FACTORS[:, None] * values + _OFFSETS[:, None]) >> np.uint64(32)
    return np.asarray(hashed.min(1), np.uint64)


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """Returns the size of the intersection as a share of the union's."""
    return len(a & b) / len(a | b)


_FACTORS, _OFFSETS = np.random.default_rng(0).integers(2**64, size=(2, _PERMUTATIONS), dtype=np.uint64)
_FACTORS |= np.uint64(1)


def _shingles(text: str) -> list[int]:
    return [zlib.crc32(gram.encode()) for gram in _grams(text, _SHINGLE)]


def _grams(text: str, size: int) -> list[str]:
    words = text.split()
    return [" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))]
