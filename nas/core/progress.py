"""Lines of a log that say how far a piece of work is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

Log = Callable[[str], None]
"""Takes a line at a time, for people: text, or a `Progress`."""

_FORM = re.compile(r"(?P<what>.+?): (?P<done>[\d,]+) of (?P<total>[\d,]+)(?:, (?P<detail>.*))?")


class Progress(str):
    """A line that says how far a piece of work is.

    Where lines are printed it is one of them; a display draws it as a bar (`nas.cli.progress`).

    Args:
        what: the work, by which its lines belong together.
        done: parts that are done.
        total: all parts.
        detail: more about its state, such as a loss.

    Example:
        >>> print(Progress("healing", 1200, 4096, "loss 2.1"))
        healing: 1,200 of 4,096, loss 2.1
    """

    what: str
    done: int
    total: int
    detail: str

    def __new__(cls, what: str, done: int, total: int, detail: str = "") -> Self:
        line = super().__new__(cls, f"{what}: {done:,} of {total:,}{f', {detail}' if detail else ''}")
        line.what, line.done, line.total, line.detail = what, done, total, detail
        return line

    @classmethod
    def read(cls, line: str) -> str:
        """Returns a line of a file as it was before it was written there."""
        form = _FORM.fullmatch(line)
        if form is None:
            return line
        done, total = (int(form[name].replace(",", "")) for name in ("done", "total"))
        return cls(form["what"], done, total, form["detail"] or "")
