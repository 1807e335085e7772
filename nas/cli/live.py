"""A running study on stderr: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nas.cli.output import duration, say
from nas.service.progress import Snapshot

Update = Callable[[Snapshot], None]

_REDRAWS_PER_S = 4
_LINE_EVERY_S = 15.0
_FRONT_ROWS = 12
_ACTIVE_ROWS = 6


@contextmanager
def live_display(*, quiet: bool = False) -> Iterator[Update]:
    """Gives the function to call with every snapshot, for as long as the context lasts."""
    console = Console(stderr=True, markup=False, highlight=False)
    if quiet:
        yield lambda snapshot: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=_REDRAWS_PER_S, transient=True) as live:
            yield lambda snapshot: live.update(draw(snapshot))
    else:
        yield _Lines().update


class _Lines:
    """A line when trials have moved on, and one every now and then while they have not."""

    def __init__(self) -> None:
        self._last, self._at = "", -_LINE_EVERY_S

    def update(self, snapshot: Snapshot) -> None:
        moved = f"{snapshot.proposed} {sorted(snapshot.states.items())} {len(snapshot.front)}"
        now = time.monotonic()
        if moved != self._last or now - self._at >= _LINE_EVERY_S:
            self._last, self._at = moved, now
            say(line(snapshot))


def line(snapshot: Snapshot) -> str:
    """A snapshot in one line."""
    parts = [duration(snapshot.elapsed_s), f"{snapshot.proposed}/{snapshot.wanted} proposed", _states(snapshot)]
    if snapshot.hypervolume is not None:
        parts.append(f"hypervolume {snapshot.hypervolume:.4g}")
    if snapshot.active:
        parts.append("; ".join(snapshot.active))
    if snapshot.left_s is not None:
        parts.append(f"about {duration(snapshot.left_s)} left")
    return " | ".join(part for part in parts if part)


def draw(snapshot: Snapshot) -> RenderableType:
    """A snapshot as a small screen: counts, what is running, the front so far."""
    volume = "after the references" if snapshot.hypervolume is None else f"{snapshot.hypervolume:.4g}"
    left = "" if snapshot.left_s is None else f", about {duration(snapshot.left_s)} left"
    facts = Table.grid(padding=(0, 2))
    facts.add_row("study", Text(snapshot.study, style="bold"))
    facts.add_row("trials", f"{snapshot.proposed} of {snapshot.wanted} proposed: {_states(snapshot) or 'none yet'}")
    facts.add_row("hypervolume", volume)
    facts.add_row("time", f"{duration(snapshot.elapsed_s)}{left}")
    shown = snapshot.active[:_ACTIVE_ROWS]
    more = len(snapshot.active) - len(shown)
    facts.add_row("now", "\n".join([*shown, *([f"and {more} more"] if more else [])]) or "waiting")
    return Group(facts, _front_table(snapshot)) if snapshot.front else facts


def _states(snapshot: Snapshot) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(snapshot.states.items()))


def _front_table(snapshot: Snapshot) -> Table:
    table = Table("trial", *snapshot.objectives, "layout", box=SIMPLE_HEAD, title="front so far", title_justify="left")
    for row in snapshot.front[:_FRONT_ROWS]:
        values = [f"{value:.4g}" for value in row.values]
        table.add_row(str(row.trial), *values, Text(row.layout, overflow="ellipsis", no_wrap=True))
    return table
