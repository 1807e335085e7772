"""Held-out text of an adaptation: a half that choices are made by, another for the figures of the report, and recall.

The first half of each source's held-out tokens gives the scores of alternatives and decides whether healing is undone.
What is reported of the child is computed on the second half, which nothing was chosen by. Recall is generated text
(`nas.model.text.generators`): logs, tables and tool calls, whose answers stand in the same window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.replacement import RECALL_GROUP, RECALLABLE_GROUP, TEXT_GROUP
from nas.model.nn.mixes import ScoredText
from nas.model.text.generators import DISTANCES, FORMS, ITEMS, Dice, recall_document
from nas.search.proxy.data import TOKEN_GRAM, recallable
from nas.train.pretrain.data import MIN_HELD_OUT, Ids, StoredIds, Tokens, Vocabulary

_LEAST_LABELS = 64
"""Fewest recallable positions of a group of their own."""
_DRAWS = 200
"""Documents in a row that are too long before it is said that none fits."""


def selection_text(sources: Sequence[Tokens], length: int, tokens: int) -> ScoredText:
    """Returns windows of `length` tokens of the first halves, `tokens` in all or as many as there are.

    Groups: all positions, and those whose next token completes a pair of tokens that occurred before in the window
    (`nas.search.proxy.data.recallable`), if there are enough of these. Windows are in a random order, always the same,
    so that the first ones are a sample of all.

    Raises:
        InvalidInput: there is no whole window.
    """
    text = _windows(sources, [source.held_out[: _middle(source)] for source in sources], length, tokens)
    return text.rows(torch.randperm(len(text.ids), generator=torch.Generator().manual_seed(0)))


def report_text(sources: Sequence[Tokens], length: int, tokens: int) -> ScoredText:
    """Returns the same of the second halves."""
    return _windows(sources, [source.held_out[_middle(source) :] for source in sources], length, tokens)


def report_sources(sources: Sequence[Tokens], vocabulary: Vocabulary, tokens: int) -> list[Tokens]:
    """Returns the sources that can be scored, with their second halves as held-out text: `tokens` in all at most."""
    scored = [source for source in sources if source.held_out_bytes >= MIN_HELD_OUT]
    reported = []
    for source in scored:
        ids = source.held_out[_middle(source) :][: tokens // len(scored)]
        reported.append(replace(source, held_out=ids, held_out_bytes=vocabulary.bytes_of(ids)))
    return reported


def recall_text(vocabulary: Vocabulary, length: int, tokens: int, seed: int) -> ScoredText:
    """Returns windows of generated documents; its group are the positions that predict a token of an answer.

    Args:
        vocabulary: of the model.
        length: tokens of a window, which holds whole documents.
        tokens: in all, at least one window.
        seed: of the documents.

    Raises:
        InvalidInput: windows are too short for a document.
    """
    rows = max(1, tokens // length)
    ids = np.full((rows, length), vocabulary.end, np.int64)
    answers = np.zeros((rows, length), bool)
    row = at = 0
    for document, is_answer in _documents(vocabulary, length - 1, seed):
        if at + 1 + len(document) > length:
            row, at = row + 1, 0
        if row == rows:
            break
        ids[row, at] = vocabulary.start
        ids[row, at + 1 : at + 1 + len(document)] = document
        answers[row, at : at + len(document)] = is_answer
        at += 1 + len(document)
    return ScoredText(torch.from_numpy(ids), {RECALL_GROUP: torch.from_numpy(answers)})


def _documents(vocabulary: Vocabulary, most: int, seed: int) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    """Yields documents of at most so many tokens without end: ids, and which of them are of answers."""
    dice, skipped = Dice(seed), 0
    while skipped < _DRAWS:
        document = recall_document(dice, dice.choice(tuple(FORMS)), dice.choice(ITEMS), dice.choice(DISTANCES))
        ids, ends = vocabulary.encode_with_ends(document.text.decode("ascii"))
        skipped = skipped + 1 if len(ids) > most else 0
        if not skipped:
            starts = np.concatenate([[0], ends[:-1]])
            yield ids, np.any([(starts < answer.end) & (ends > answer.start) for answer in document.recalls], 0)
    raise InvalidInput(
        f"no text with answers fits into {most + 1} tokens: raise library.score_length, or set library.recall_tokens to"
        " 0",
        where="--config",
    )


def _middle(source: Tokens) -> int:
    return len(source.held_out) // 2


def _windows(sources: Sequence[Tokens], halves: Sequence[StoredIds], length: int, tokens: int) -> ScoredText:
    """Returns whole windows of each half, evenly from the sources, with their groups."""
    most_rows = max(1, tokens // length // len(sources))
    windows, recalled = [], []
    for source, half in zip(sources, halves, strict=True):
        rows = min(most_rows, len(half) // length)
        if rows:
            windows.append(np.asarray(half[: rows * length], np.int64).reshape(rows, length))
            is_recalled = recallable(windows[-1], source.train, TOKEN_GRAM)
            # The last position's next token is not in the window.
            recalled.append(np.pad(is_recalled, ((0, 0), (0, 1))))
    if not windows:
        count = sum(map(len, halves))
        raise InvalidInput(
            f"{', '.join(source.name for source in sources)}: half of what is held out is {count:,} tokens, but scores"
            f" take {length:,} in a row; give more text, or a larger `held_out` or a smaller `library.score_length` in"
            " --config",
            where="--corpus",
        )
    ids, where = (torch.from_numpy(np.concatenate(parts)) for parts in (windows, recalled))
    groups = {TEXT_GROUP: torch.ones_like(where)}
    return ScoredText(ids, groups | ({RECALLABLE_GROUP: where} if where.sum() >= _LEAST_LABELS else {}))
