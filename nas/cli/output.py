"""Output of commands: data on stdout, messages on stderr; formatted on a terminal, plain otherwise.

Text may come from devices and agents, so terminal control characters are escaped.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from nas.core.logs import visible, without_passwords
from nas.core.units import show_figure

JsonFlag = Annotated[bool, typer.Option("--json", help="Output JSON.")]
LogJsonFlag = Annotated[bool, typer.Option("--log-json", help="Log JSON lines, for a log collector.")]

_LEAST = 4
"""Characters of a table's column that is cut."""

Row = dict[str, object]


class Format(StrEnum):
    """Formats of a table."""

    TABLE = "table"
    MARKDOWN = "md"
    CSV = "csv"


def say(message: str) -> None:
    """Prints a message on stderr, without passwords in URLs; where nobody can read it any more, it is lost.

    The terminal of a launch may be closed, or the program that read its messages; the study goes on.
    """
    with contextlib.suppress(OSError):
        typer.echo(visible(without_passwords(message), keep="\n\t"), err=True)


def asked_lines() -> Iterator[str]:
    """Yields the lines of stdin, with a prompt before each where a terminal asks."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        if not (line := sys.stdin.readline()):
            return
        yield line


def print_answers(pieces: Iterable[str]) -> None:
    """Prints pieces of text on stdout as they come, without what a terminal would interpret."""
    for piece in pieces:
        typer.echo(visible(piece, keep="\n\t"), nl=False)


def print_json(value: Any) -> None:
    """Prints `value` as indented JSON on stdout."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=2, ensure_ascii=not is_unicode, allow_nan=False)
    if not text.replace("\n", "").isprintable():
        text = "".join(
            character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
            for character in text
        )
    typer.echo(text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Prints a table on stdout: formatted on a terminal, otherwise tab-separated with a header line.

    Where it is wider than the terminal, empty columns are left out, and the last one (a layout, a reason) is printed
    below, beside the first one and never cut.
    """
    texts = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *texts):
            typer.echo("\t".join(line))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # Layouts contain brackets, which rich would parse as markup; and it prints nothing where $COLUMNS is 0.
    console = Console(markup=False, highlight=False, width=shutil.get_terminal_size().columns)
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    is_wide = len(columns) > 2 and sum(widths) + 2 * len(widths) > console.width
    if is_wide and (full := [i for i, column in enumerate(zip(*texts, strict=True)) if any(column)]):
        columns, *texts = ([line[i] for i in full] for line in (columns, *texts))
        widths = [widths[i] for i in full]
    last = -1 if is_wide else len(columns)
    table = Table(
        *columns[:last], box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0)
    )
    cells = list(zip(columns, *texts, strict=True))[:last]
    for column, width in zip(table.columns, _fitted(cells, console.width - 2 * len(cells)), strict=True):
        column.width = width
    for line in texts:
        table.add_row(*line[:last])
    console.print(table)
    if is_wide:
        for line in filter(lambda line: line[-1], [columns, *texts]):
            console.print(f"{line[0]:<{widths[0]}}  {line[-1]}", soft_wrap=True)


def _fitted(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Returns widths of columns that have room together: cells break between words first, the first column last."""
    widths = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    for least in (words, [words[0], *[_LEAST] * (len(words) - 1)], [_LEAST] * len(words)):
        while sum(widths) > room and (wide := [i for i, width in enumerate(widths) if width > least[i]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def print_rows(
    format: Format, columns: Sequence[str], cells: Iterable[Sequence[str]], rows: Sequence[Row], *, numbers: int
) -> None:
    """Prints a table on stdout, in Markdown, or as CSV.

    Args:
        format: of the table.
        columns: headers of `cells`.
        cells: texts.
        rows: the same with full precision and names of their own, for CSV.
        numbers: of columns at the end that are right-aligned in Markdown.
    """
    if format is Format.CSV:
        from nas.search.analysis.report import harmless  # which takes long to load

        table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(
            {
                name: harmless(visible(value, keep="\n\t")) if isinstance(value, str) else value
                for name, value in row.items()
            }
            for row in rows
        )
    elif format is Format.MARKDOWN:
        rule = ["---"] * (len(columns) - numbers) + ["---:"] * numbers
        for line in (columns, rule, *cells):
            typer.echo(visible("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"))
    else:
        print_table(columns, cells)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Prints one line per (name, value) on stdout, skipping None."""
    pairs = [(visible(name), value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        typer.echo(f"{name:<{width}}  {visible(str(value))}")


def figure_text(
    value: float | None,
    unit: str = "",
    ends: tuple[float | None, float | None] = (None, None),
    reason: str | None = None,
) -> str:
    """Formats a figure with its 95 % interval, or why it is not known."""
    return f"unknown: {reason or 'not read'}" if value is None else show_figure(value, *ends, unit)


def when(at: float | None) -> str:
    """Formats seconds since the epoch in local time with its zone; 'never' for None and 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)) if at else "never"
