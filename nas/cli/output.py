"""What commands write: data on stdout, messages on stderr; for people on a terminal, plain everywhere else.

Much of it was said by devices and agents, so characters that do something to a terminal are written as escapes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from nas.core.logs import without_passwords
from nas.core.visible import visible

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogJsonFlag = Annotated[bool, typer.Option("--log-json", help="Log JSON lines, for a log collector.")]


def say(message: str) -> None:
    """A message for people, on stderr; never with the password of a URL."""
    typer.echo(visible(without_passwords(message), keep="\n\t"), err=True)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if not text.replace("\n", "").isprintable():
        text = "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
    typer.echo(text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table on stdout: drawn for a terminal, tab-separated with a header line otherwise."""
    texts = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *texts):
            typer.echo("\t".join(line))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for line in texts:
        table.add_row(*line)
    # Layouts hold brackets, which rich would take for markup.
    Console(markup=False, highlight=False).print(table)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Name and value, a line each, on stdout."""
    pairs = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        typer.echo(f"{name:<{width}}  {visible(str(value))}")


def when(at: float | None) -> str:
    """A moment in seconds since the epoch, in this machine's time zone; 'never' for None and 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "never"


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 04 s, or 5 s."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole:02} s" if minutes else f"{whole} s"
