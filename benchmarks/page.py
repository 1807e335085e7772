"""Markdown tables of the benchmarks, and their places on pages in docs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

_END = "<!-- end -->"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table; a line that ends each row."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the rows as a table with the keys of the first as its head; empty without rows."""
    return table(list(rows[0]), [[row[name] for name in rows[0]] for row in rows]) if rows else ""


def mean_and_deviation(values: Sequence[float]) -> str:
    """Returns the mean ± the standard deviation, which a single value has not."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def write_part(page: Path | None, name: str, text: str) -> None:
    """Fills a part of a page; without a page, prints it."""
    print(text, end="") if page is None else fill(page, name, text)


def fill(page: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- NAME -->` and the next `<!-- end -->` of a page."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise SystemExit(f"{page} has no marks of {name}")
    page.write_text(head + begin + text + end + tail, encoding="utf-8")
