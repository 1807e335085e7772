"""Live progress of a study that this process runs: a display on a terminal, otherwise lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nas.cli.options import open_store
from nas.cli.output import say
from nas.core.errors import InfrastructureFailed, NasError, UnknownName
from nas.core.trial import TrialState
from nas.core.units import show_duration, show_number
from nas.infra.store.store import Store
from nas.search.analysis.snapshot import Snapshots, StudySnapshot
from nas.search.study.estimate import Estimate, estimate_left
from nas.search.study.events import Launched, notes

_POLL_S = 1.0
"""Seconds between two looks at the study."""
_REDRAWS_PER_S = 4
_LINE_EVERY_S = 15.0
"""Seconds after which a line is printed although nothing changed."""
_ESTIMATE_EVERY_S = 30.0
"""Seconds after which the time left is estimated again, which reads the study's latest results."""
_FRONT_ROWS = 12
"""Trials of the front that are shown at most."""
_ACTIVE_ROWS = 6
"""Lines of running work at most."""
_ACTIVE_READ = 64
"""Trials that have not ended of which at most `_ACTIVE_ROWS` are shown: many of them may wait for others."""


@dataclass(frozen=True)
class Progress:
    """What the display shows.

    Args:
        study: at its newest event.
        elapsed_s: seconds since the launch.
        time_left: estimate of what remains; None where it is not known.
    """

    study: StudySnapshot
    elapsed_s: float
    time_left: Estimate | None = None


class LiveProgress:
    """Shows the progress of a study while the context is open.

    A thread reads the study from the database, as pages do.

    Args:
        study: name.
        db: URL; None: the default database.
        workers: parallel trainings; None: not known.
    """

    def __init__(self, study: str, db: str | None, workers: int | None) -> None:
        self._study, self._db, self._workers = study, db, workers
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live progress", daemon=True)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def notice(self) -> None:
        """Begins to read the study at its first event, because before that it may not be in the database."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        console = Console(stderr=True, markup=False, highlight=False)
        try:
            with ExitStack() as stack:
                store = stack.enter_context(open_store(self._db))
                snapshots = stack.enter_context(Snapshots(store))
                if console.is_terminal:
                    live = Live(console=console, refresh_per_second=_REDRAWS_PER_S, transient=True)
                    stack.enter_context(live)
                    self._poll(store, snapshots, lambda progress: live.update(draw(progress)))
                else:
                    self._poll(store, snapshots, Lines().update)
        except UnknownName:
            pass  # invalid input: the study is deleted
        except NasError as error:
            say(f"no live progress: {error}")

    def _poll(self, store: Store, snapshots: Snapshots, show: Callable[[Progress], None]) -> None:
        remaining, estimated = None, -_ESTIMATE_EVERY_S
        while True:
            has_ended = self._end.wait(_POLL_S)
            try:
                snapshot = snapshots.get(self._study)
                elapsed = time.monotonic() - self._start
                if elapsed - estimated >= _ESTIMATE_EVERY_S:
                    remaining, estimated = estimate_left(store, snapshot.record.study, self._workers), elapsed
            except InfrastructureFailed:
                if not has_ended:
                    continue  # a database in trouble, of which the study's own writes tell
            else:
                show(Progress(snapshot, elapsed, None if has_ended else remaining))
            if has_ended:
                return


class Lines:
    """Prints a line when trials change state, and at least every `_LINE_EVERY_S` seconds."""

    def __init__(self) -> None:
        self._state: object = None
        self._shown_at = -_LINE_EVERY_S

    def update(self, progress: Progress) -> None:
        """Prints the line, unless nothing changed since the last one."""
        state, now = (progress.study.states(), progress.study.curve.front), time.monotonic()
        if state != self._state or now - self._shown_at >= _LINE_EVERY_S:
            self._state, self._shown_at = state, now
            say(line(progress))


def line(progress: Progress) -> str:
    """Formats the progress as one line."""
    study = progress.study
    parts = [show_duration(progress.elapsed_s), f"{_proposed(study, '/')} proposed", _states(study)]
    if study.curve.hypervolume is not None:
        parts.append(f"hypervolume {show_number(study.curve.hypervolume, digits=3)}")
    parts.append("; ".join(_active(study)))
    if progress.time_left is not None:
        parts.append(f"{progress.time_left.seconds.text} left")
    return " | ".join(part for part in parts if part)


def draw(progress: Progress) -> RenderableType:
    """Renders the progress: trial counts, running work and the current Pareto front."""
    study, volume = progress.study, progress.study.curve.hypervolume
    remaining = "" if progress.time_left is None else f", {progress.time_left.seconds.text} left"
    active = _active(study)
    more = [f"and {len(active) - _ACTIVE_ROWS} more"] if len(active) > _ACTIVE_ROWS else []
    facts = Table.grid(padding=(0, 2))
    facts.add_row("study", Text(study.name, style="bold"))
    facts.add_row("trials", f"{_proposed(study, ' of ')} proposed: {_states(study) or 'none yet'}")
    facts.add_row("hypervolume", "after the references" if volume is None else show_number(volume, digits=3))
    facts.add_row("time", f"{show_duration(progress.elapsed_s)}{remaining}")
    facts.add_row("now", "\n".join([*active[:_ACTIVE_ROWS], *more]) or "waiting")
    return Group(facts, _front_table(study)) if study.curve.front else facts


def _proposed(study: StudySnapshot, between: str) -> str:
    """Returns how many of all layouts were proposed, references not counted."""
    launched = notes(study.record.log.notes, Launched)
    count = sum(study.states().values())
    return f"{count}{between}{launched[-1].trials}" if launched else str(count)


def _states(study: StudySnapshot) -> str:
    """Returns the counts of trials in the order of a trial's life."""
    counts = study.states()
    order = [state.value for state in TrialState if state.value in counts]
    return ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in order)


def _active(study: StudySnapshot) -> list[str]:
    """Returns a line for each trial that has not ended and does not wait for others."""
    references = {layout.id: name for name, layout in study.space.references.layouts().items()}
    lines = []
    for record in study.active(_ACTIVE_READ):
        trial, status = record.trial, record.trial.status
        training = status.rung if status.state is TrialState.TRAINING else None
        if training is not None and study.space.quality.rungs[training].name in record.rungs:
            continue  # it has finished its rung, which is not decided yet
        name = f"trial {trial.number}"
        if trial.origin == "reference":
            name = f"{references.get(record.layout.id, name)} reference"
        lines.append(f"{name}: {trial.status.state.value.replace('_', ' ')}")
    return lines


def _front_table(study: StudySnapshot) -> Table:
    objectives = [objective.name for objective in study.space.objectives]
    table = Table("trial", *objectives, "layout", box=SIMPLE_HEAD, title="front so far", title_justify="left")
    for row in [row for row in study.front if row.rank == 0][:_FRONT_ROWS]:
        record = study.records[row.trial]
        values = [show_number(axis.value, digits=3) for axis in record.axes if axis is not None]
        table.add_row(str(row.trial), *values, Text(record.layout.format(), overflow="ellipsis", no_wrap=True))
    return table
