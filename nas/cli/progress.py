"""What a long command is doing, on stderr: bars on a terminal, otherwise lines now and then."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nas.cli.output import say
from nas.core.logs import visible, without_passwords
from nas.core.progress import Log, Progress
from nas.core.units import show_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_FIRST_S = 10.0
"""Seconds after which work is worth a line."""
_EVERY_S = 30.0
"""Seconds between two lines about one piece of work."""
_SILENT_S = 60.0
"""Seconds of silence after which a line says what is still being done."""
_REDRAWS_PER_S = 4
_AT_ONCE_S = 1.0


@contextmanager
def activity(what: str) -> Iterator[Log]:
    """Shows what a command is doing while the context is open; yields what takes its lines.

    Lines of `Progress` become bars, or a line now and then with the time left; all others are printed. The command goes
    on where stderr cannot be written to any more.

    what: is done until a line says more.
    """
    from rich.console import Console  # takes a tenth of a second to load

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    display = _Bars(console, what) if console.is_terminal else _Lines(what)
    with display.open():
        yield display.log


@dataclass
class _Work:
    """A piece of work.

    Args:
        first: parts that were done before it began, or at once: an earlier command did them.
        done: parts that are done.
        total: all parts.
        began: monotonic time.
        line_at: time of the last line about it; None: there was none.
    """

    first: int
    done: int
    total: int
    began: float = field(default_factory=lambda: time.monotonic())
    line_at: float | None = None

    @property
    def time_left(self) -> str:
        """The estimated time left; empty: not known, or none."""
        if not self.first < self.done < self.total:
            return ""
        seconds = (time.monotonic() - self.began) * (self.total - self.done) / (self.done - self.first)
        return f"about {show_duration(seconds, rough=True)} left"


class _Display(ABC):
    """Shows lines as they come, and pieces of work by how far they are."""

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Returns the context in which something is shown."""

    @abstractmethod
    def _print(self, line: str) -> None: ...

    @abstractmethod
    def _show(self, line: Progress, work: _Work) -> None: ...

    def log(self, line: str) -> None:
        """Shows a line."""
        with _unbroken():
            if not isinstance(line, Progress):
                self._print(line)
                return
            work = self._works.get(line.what)
            if work is None or line.done < work.done:
                work = self._works[line.what] = _Work(line.done, line.done, line.total)
            work.done, work.total = line.done, line.total
            if time.monotonic() - work.began < _AT_ONCE_S:
                work.first = line.done
            self._show(line, work)
            if line.done >= line.total:
                del self._works[line.what]


class _Lines(_Display):
    """Lines of text."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._now, self._silent_s = what, _FIRST_S
        self._began = self._line_at = time.monotonic()
        self._end = threading.Event()

    @contextmanager
    def open(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _print(self, line: str) -> None:
        self._now, self._began = line, time.monotonic()
        self._say(line)

    def _show(self, line: Progress, work: _Work) -> None:
        now = time.monotonic()
        self._now, self._began = line, now
        due = now - work.began >= _FIRST_S if work.line_at is None else now - work.line_at >= _EVERY_S
        if due or (work.line_at is not None and work.done >= work.total):
            work.line_at = now
            self._say(", ".join(filter(None, (line, work.time_left))))

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            if time.monotonic() - self._line_at >= self._silent_s:
                with _unbroken():
                    self._say(f"{self._now}: {show_duration(time.monotonic() - self._began)} so far")

    def _say(self, line: str) -> None:
        self._line_at, self._silent_s = time.monotonic(), _SILENT_S
        say(line)


class _Bars(_Display):
    """Bars on a terminal, below the lines."""

    def __init__(self, console: Console, what: str) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        super().__init__()
        whole, cut = Column(no_wrap=True), Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=cut),
            BarColumn(20),
            TextColumn("{task.fields[state]}", markup=False, table_column=whole),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=_REDRAWS_PER_S,
            redirect_stdout=False,  # which has data
            expand=True,
        )
        self._now = self._bars.add_task(_safe(what), total=None, state="")

    @contextmanager
    def open(self) -> Iterator[None]:
        with _unbroken():
            self._bars.start()
        try:
            yield
        finally:
            with _unbroken():
                self._bars.stop()

    def _print(self, line: str) -> None:
        self._console.print(_safe(line), soft_wrap=True)
        self._bars.reset(self._now, total=None, description=_safe(line.partition("\n")[0]))

    def _show(self, line: Progress, work: _Work) -> None:
        if line.what not in self._tasks:
            self._tasks[line.what] = self._bars.add_task(_safe(line.what), state="")
        task = self._tasks[line.what]
        state = filter(None, (f"{line.done:,} of {line.total:,}", line.detail, work.time_left))
        self._bars.update(task, completed=line.done, total=line.total, state=_safe(", ".join(state)))
        if line.done >= line.total:
            self._bars.remove_task(self._tasks.pop(line.what))


def _safe(text: str) -> str:
    return visible(without_passwords(text), keep="\n\t")


@contextmanager
def _unbroken() -> Iterator[None]:
    """Ends what is shown, rather than the command, where stderr cannot be written to any more."""
    try:
        yield
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)
