"""Text from outside, made harmless for terminals and for files that are read line by line."""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """`text`, in which what would start a line, move a cursor or turn the reading direction stands as its escape.

    Args:
        text: anything.
        keep: such characters that may stay.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )
