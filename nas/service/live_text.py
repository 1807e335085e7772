"""The columns of a live study's trials as JSON text, of which only what changed is written anew.

A viewer who comes gets every trial. Those that change stand mostly near the end of the table, so nearly all of the text
is as it was for the viewer before: it is kept in blocks of rows until one of their trials is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import to_json

ROWS = 2048
"""Rows in a block."""


class ColumnTexts:
    """Texts of one table's columns, about 8 bytes a number.

    Args:
        most: columns that are kept; the one that was asked for least recently goes first.
    """

    def __init__(self, most: int = 24) -> None:
        self._most = most
        self._kept: dict[str, dict[int, bytes]] = {}

    def forget(self, trials: Iterable[int]) -> None:
        """Drops what was written of these rows."""
        changed = {trial // ROWS for trial in trials}
        for blocks in self._kept.values():
            for index in changed:
                blocks.pop(index, None)

    def column(self, name: str, size: int, values: Callable[[slice], list[Any]]) -> bytes:
        """A column as a JSON array.

        Args:
            name: of the column.
            size: rows that there are; new ones are to be forgotten first.
            values: gives the column's values in some rows; NaN stands for null.
        """
        blocks = self._kept[name] = self._kept.pop(name, {})
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        every = range(-(-size // ROWS))
        for index in every:
            if index not in blocks:
                some = slice(index * ROWS, min(size, (index + 1) * ROWS))
                blocks[index] = to_json(values(some), inf_nan_mode="null")[1:-1]
        return b"[" + b",".join(blocks[index] for index in every) + b"]"
