"""Columns as text in blocks: always the same as written at once, and written no more often than rows change."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nas.service.live_text import ROWS, ColumnTexts

CHANGES = st.lists(st.lists(st.integers(0, 3 * ROWS), max_size=4), max_size=5)


@given(st.integers(0, 3 * ROWS), CHANGES)
def test_a_column_is_what_is_written_at_once(size: int, changes: list[list[int]]) -> None:
    texts, numbers = ColumnTexts(), [float(i) for i in range(size)]
    for changed in [[], *changes]:
        for at in changed:
            numbers += [math.nan] * (at + 1 - len(numbers))  # rows up to it are new, too
        new = range(size, len(numbers))
        size = len(numbers)
        for at in changed:
            numbers[at] += 0.5
        texts.forget([*changed, *new])
        told = texts.column("value", size, numbers.__getitem__)
        assert json.loads(told) == [None if math.isnan(each) else each for each in numbers]


def test_only_blocks_that_changed_are_written_again() -> None:
    texts, asked = ColumnTexts(), list[slice]()

    def values(some: slice) -> list[Any]:
        asked.append(some)
        return [*range(some.start, some.stop)]

    texts.column("trial", 3 * ROWS + 1, values)
    assert len(asked) == 4
    asked.clear()
    texts.forget([ROWS, ROWS + 7, 3 * ROWS + 1])
    texts.column("trial", 3 * ROWS + 2, values)
    assert asked == [slice(ROWS, 2 * ROWS), slice(3 * ROWS, 3 * ROWS + 2)]


def test_the_column_that_was_asked_for_least_recently_is_forgotten() -> None:
    texts, written = ColumnTexts(most=2), list[str]()

    def column(name: str) -> None:
        texts.column(name, 1, lambda some: written.append(name) or [0])

    for name in ("a", "b", "a", "c", "a", "b"):
        column(name)
    assert written == ["a", "b", "c", "b"]
