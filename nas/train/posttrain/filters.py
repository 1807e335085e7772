"""Filters of conversations: language, exact and near duplicates, length, overlap with evaluations (LFM2 report, 4.2.1).

Near duplicates are found by MinHash with locality-sensitive hashing (Broder 1997; Leskovec et al., "Mining of massive
datasets", section 3.4), and each candidate pair is checked by its exact Jaccard similarity, so nothing is dropped by a
collision of hashes.

Near duplicates and overlaps compare words as `words_of` splits them: whatever case, width and punctuation, and of
scripts without spaces, such as Chinese, each character.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nas.core.strict import StrictKeys
from nas.train.posttrain.conversations import Conversation
from nas.train.posttrain.languages import language_of

_PERMUTATIONS = 128
_SHINGLE = 3
_RECALL = 0.99
_LEAST_CONTAINED = 5
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "YI ", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
_OPERATORS = "*/%-"


class Filters(StrictKeys):
    """Which conversations are dropped."""

    languages: tuple[str, ...] = Field(
        (), exclude_if=lambda codes: not codes, description="codes of ISO 639; text detected as another one is dropped"
    )
    length: int = Field(4096, ge=2, description="most tokens; longer conversations are dropped, never cut")
    duplicates: bool = Field(True, description="drop all but the first of equal ones, whatever case, width and spaces")
    near_duplicates: float | None = Field(
        None, gt=0, le=1, description="least Jaccard similarity of word 3-grams at which a later one is dropped"
    )
    ngram: int = Field(13, ge=1, description="words that a question may not share with one of an evaluation")


def text_of(conversation: Conversation) -> str:
    """Returns the texts of all messages."""
    return "\n".join(text for message in conversation.messages for text in message.texts())


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case and NFKC, without punctuation; characters that are words by themselves.

    These are the letters of scripts without spaces between words, symbols, and operators such as * and a minus.
    """
    text = re.sub(r"(?<=[^\W\d_])-", " ", unicodedata.normalize("NFKC", text).casefold())
    return text.translate(_PARTS).split()


class _Parts(dict[int, str]):
    """Code point -> what it is replaced by, so that `split` finds words; see `words_of`."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)[0]
        alone = category == "S" or character in _OPERATORS
        if category in "LM":
            alone = unicodedata.name(character, "").startswith(_WITHOUT_SPACES)
        text = f" {character} " if alone else character if category in "LMN" else " "
        return self.setdefault(code, text)


_PARTS = _Parts({0x2212: " - "})


def question_text(conversation: Conversation) -> str:
    """Returns the contents of all messages but the assistant's, in lower case, with single spaces."""
    return _text_without(conversation, "assistant")


def overlap_text(conversation: Conversation) -> str:
    """Returns the same without system prompts: what overlaps are looked for in. Many questions may have one prompt."""
    return _text_without(conversation, "assistant", "system", "developer")


def _text_without(conversation: Conversation, *roles: str) -> str:
    texts = (message.text for message in conversation.messages if message.role not in roles)
    return " ".join(" ".join(texts).lower().split())


def without_duplicates(conversations: Sequence[Conversation]) -> list[int]:
    """Returns the indices of the first of each set of conversations with equal texts and tools."""
    first: dict[tuple[str, str], int] = {}
    for index, conversation in enumerate(conversations):
        text = unicodedata.normalize("NFKC", text_of(conversation)).casefold()
        first.setdefault((" ".join(text.split()), _tools(conversation)), index)
    return list(first.values())


def _tools(conversation: Conversation) -> str:
    return json.dumps(conversation.tools, sort_keys=True)


def in_languages(conversations: Sequence[Conversation], languages: Sequence[str]) -> list[int]:
    """Returns the indices of conversations whose users and assistants are not detected to use another language.

    Conversations whose language cannot be said are among them; see `language_of`.
    """
    codes = {None, *languages}
    return [index for index, conversation in enumerate(conversations) if language_of(_spoken(conversation)) in codes]


def _spoken(conversation: Conversation) -> str:
    return "\n".join(message.text for message in conversation.messages if message.role in ("user", "assistant"))


def without_near_duplicates(conversations: Sequence[Conversation], threshold: float) -> list[int]:
    """Returns the indices of conversations whose Jaccard similarity with every earlier kept one is below `threshold`.

    Conversations with different tools are not compared. A pair at the threshold is found with a probability of at least
    0.99.
    """
    rows = rows_of_band(threshold)
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    shingles: dict[int, frozenset[int]] = {}
    for index, conversation in enumerate(conversations):
        words, tools = words_of(text_of(conversation)), _tools(conversation)
        grams = frozenset(zlib.crc32(gram.encode()) for gram in _grams(words, _SHINGLE))
        signature = minhash(grams)
        keys = [(start, signature[start : start + rows].tobytes()) for start in range(0, _PERMUTATIONS, rows)]
        candidates = {other for key in keys for other in buckets[key]}
        if any(
            jaccard(grams, shingles[other]) >= threshold and tools == _tools(conversations[other])
            for other in candidates
        ):
            continue
        shingles[index] = grams
        for key in keys:
            buckets[key].append(index)
    return list(shingles)


def without_overlap(texts: Sequence[str], evaluations: Iterable[str], ngram: int) -> list[int]:
    """Returns the indices of questions that share no `ngram` words in a row with a question of an evaluation.

    Of a question of an evaluation with fewer words, but at least five, all are looked for in a row. With still fewer
    words a question would be part of too many others: those are the same that have equal words.
    """
    evaluated: dict[int, set[str]] = defaultdict(set)
    whole: set[str] = set()
    for text in evaluations:
        words = words_of(text)
        if len(words) < min(ngram, _LEAST_CONTAINED):
            whole.add(" ".join(words))
        else:
            size = min(ngram, len(words))
            evaluated[size].update(_grams(words, size))

    def overlaps(text: str) -> bool:
        words = words_of(text)
        return " ".join(words) in whole or any(
            len(words) >= size and not grams.isdisjoint(_grams(words, size)) for size, grams in evaluated.items()
        )

    return [index for index, text in enumerate(texts) if not overlaps(text)]


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


def _grams(words: Sequence[str], size: int) -> list[str]:
    return [" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))]
