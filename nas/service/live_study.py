"""A study as the live pages see it: in memory, kept up from the event log, never computed anew for a request.

A table is read whole once, in bounded pieces; from then on only the trials that new events speak of are read again.
What a study holds is a function of the database alone: a table that was kept up equals one that is read whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from nas.core.trial import Event, EventKind
from nas.search import Volume
from nas.service.live_axes import axis_views, cache_context, place_figures
from nas.service.live_course import DeviceSeconds, LiveCourse
from nas.service.live_details import LiveDetails
from nas.service.live_front import FrontRow, LiveFront
from nas.service.live_reading import PATIENCE_S, BeingRead, Readers
from nas.service.live_structure import LiveStructure
from nas.service.live_table import ID_DIGITS, ORIGINS, Constants, LiveTable
from nas.service.live_text import ColumnTexts
from nas.service.record import CALIBRATED, LAUNCHED
from nas.service.scales import PUBLISHED, figures_from_json
from nas.service.stored_space import stored_space
from nas.store import columns, events, studies
from nas.store.columns import Completion
from nas.store.rows import Study, StudyState
from nas.store.store import Store

LAYOUTS_AT_ONCE = 2000
"""Layouts that a request reads itself."""

_FROZEN = ("scales", "reference_point")
_EVENTS_PER_READ = 1000
_TRIALS_PER_PIECE = 1000


class LiveStudy:
    """One study; there is nothing to read of it before it was refreshed. Who reads it holds its lock.

    Args:
        store: where it is.
        id: its id.
        readers: read its layouts beside requests, and say when to stop.
    """

    def __init__(self, store: Store, id: int, readers: Readers) -> None:
        self._store, self.id, self._readers = store, id, readers
        self.lock = threading.RLock()
        self.revision = 0
        """The newest event that is taken into account; 0 until all of it was read once."""
        self.known = self.trials = 0
        """How many of how many trials have been read, while it is read whole. Needs no lock."""

    def refresh(self) -> None:
        """Takes over what has happened.

        Raises:
            InvalidInput: its space is none of this version's.
            UnknownName: the study is gone.
        """
        with self.lock:
            if self.revision == 0:
                self._read_whole()
            while news := events.since(self._store, self.id, self.revision, limit=_EVENTS_PER_READ):
                if any(_may_change_all(event) for event in news) and self._changes(news[-1].id):
                    self._read_whole()
                else:
                    self._read_news(news)

    def _read_whole(self) -> None:
        revision = events.last_id(self._store, self.id)
        self._know(studies.get(self._store, self.id), revision)
        self.table = LiveTable(len(self.space.objectives), len(self.constants.further))
        self.texts = ColumnTexts()
        self.structure = LiveStructure(self._store, self.id, cache_context(self.space), self._readers.check)
        self.details = LiveDetails(self._store, self.id, self.constants)
        self._front = LiveFront(self.space, self.details)
        self.device_seconds = DeviceSeconds()
        self.course = LiveCourse(self.corner)
        self.trials = columns.count(self._store, self.id)
        for start in range(0, self.trials, _TRIALS_PER_PIECE):
            self._readers.check()
            self.known = start
            self._read(range(start, min(self.trials, start + _TRIALS_PER_PIECE)))
        self.course.complete(columns.completions(self._store, self.id, up_to=revision), self.table)
        self.course_changed = self.counted_changed = self.revision = revision

    def _changes(self, revision: int) -> bool:
        """Whether trials are judged otherwise than before; a study that is launched again judges them as it did."""
        before = self.constants, self.corner
        self._know(studies.get(self._store, self.id), revision)
        return before != (self.constants, self.corner)

    def _know(self, study: Study, revision: int) -> None:
        self.name, self.state = study.name, study.state
        self.space = space = stored_space(study)
        notes = columns.notes(self._store, self.id, (CALIBRATED, LAUNCHED), _FROZEN, up_to=revision)
        told = [note.payload for note in notes]
        devices = sorted({(note["id"], note["device"]) for note in told if note.get("what") == CALIBRATED})
        figures = figures_from_json(study.scales["figures"][PUBLISHED]) if study.scales else None
        self.constants = Constants(space, devices, figures, place_figures(space))
        layouts = space.references.layouts()
        self._references = {layout.id[:ID_DIGITS]: name for name, layout in layouts.items()}
        self.wanted = next((note["trials"] for note in reversed(told) if note.get("what") == LAUNCHED), None)
        """Trials that it is to have, references not counted; None where it was never launched."""
        point = study.reference_point
        self.corner = [point[objective.name] for objective in space.objectives] if point else None
        self.axes = axis_views(space, figures, self.corner)
        self.judged = max((note.id for note in notes if note.payload.get("what") != LAUNCHED), default=0)
        """The event by which all trials are judged as they are."""

    def _read_news(self, news: Sequence[Event]) -> None:
        touched = sorted({event.trial for event in news if event.trial is not None})
        self._read(touched)
        self.texts.forget(touched)
        new = [Completion(e.id, e.trial, e.at) for e in news if e.kind is EventKind.COMPLETE and e.trial is not None]
        if new or self.course.counts(touched):
            self.counted_changed = news[-1].id
        if self.course.revise(touched, self.table) or new:
            self.course_changed = news[-1].id
        self.course.complete(new, self.table)
        if any(event.kind is EventKind.STUDY and "state" in event.payload for event in news):
            self.state = studies.get(self._store, self.id).state
        self.revision = news[-1].id

    def _read(self, trials: Sequence[int]) -> None:
        self.device_seconds.add(self.table.read(self._store, self.id, trials, self.constants))

    def read_layouts(self, patience_s: float | None = PATIENCE_S) -> None:
        """Makes sure that the layouts of all trials are known; not to be called under the study's lock.

        Args:
            patience_s: seconds that are waited where many are to be read; None: however long that takes.

        Raises:
            BeingRead: it takes longer.
        """
        trials = len(self.table)
        if trials - self.structure.known <= LAYOUTS_AT_ONCE:
            self.structure.read(trials)
        elif not self._readers.read(("layouts", self.id), lambda: self.structure.read(trials), patience_s):
            raise BeingRead(f"layouts of study {self.name!r}", self.structure.known, trials)

    def front(self) -> list[FrontRow]:
        """The front, best first, and what is tied with it."""
        return self._front.rows(self.table, self.course, self.counted_changed)

    def volume(self) -> Volume | None:
        """The hypervolume with its 95 % interval; None where it cannot be told."""
        return self._front.volume(self.table, self.course, self.counted_changed)

    def references(self) -> dict[str, int]:
        """Reference layout -> its trial, of those that have been proposed."""
        rows = self.table.rows
        trials = np.flatnonzero(rows["origin"] == ORIGINS.index("reference")).tolist()
        return {self._references[rows["layout_id"][trial].decode()]: trial for trial in trials}

    @property
    def over(self) -> bool:
        """Whether no orchestrator is expected to go on."""
        return self.state in (StudyState.COMPLETE, StudyState.STOPPED, StudyState.FAILED)


def _may_change_all(event: Event) -> bool:
    """Whether all trials may be judged otherwise after it."""
    told = event.payload
    return event.kind is EventKind.STUDY and (
        told.get("what") in (CALIBRATED, LAUNCHED) or any(field in told for field in _FROZEN)
    )
