"""Tables of `benchmarks.quality` as Markdown, and their places in docs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_END = "<!-- end -->"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the rows as a table with their keys as its head; empty without rows."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([row[name] for name in head] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fill(page: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- NAME -->` and the next `<!-- end -->` of a page."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition(_END)
    assert begin and end, f"{page} has no marks of {name}"
    page.write_text(head + begin + text + end + tail, encoding="utf-8")
