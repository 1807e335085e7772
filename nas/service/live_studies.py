"""The studies that are looked at, in memory; large ones are read beside the requests, or before any."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Self

from nas.core.errors import NasError
from nas.service.live_reading import PATIENCE_S, BeingRead, Readers
from nas.service.live_study import LiveStudy
from nas.store import columns, pages, studies
from nas.store.rows import StudyState
from nas.store.store import Store

KEPT = 32
"""Studies in memory; the least recently looked at goes first."""
AT_ONCE = 2000
"""Trials up to which a study is read by the request that wants it."""
WARMED = 20
"""Studies that are read when the server starts: a page of the list."""
MOST_WARMED = 500_000
"""Trials of all of them, some 200 bytes each; what does not fit is read when it is looked at."""


class LiveStudies:
    """The studies that are looked at; at the end of the context all reading is abandoned.

    Args:
        store: where they are.
        kept: how many are kept in memory at most.
        at_once: trials up to which a request reads a study itself.
    """

    def __init__(self, store: Store, kept: int = KEPT, at_once: int = AT_ONCE) -> None:
        self._store, self._kept, self._at_once = store, kept, at_once
        self._lock = threading.Lock()
        self._studies: OrderedDict[int, LiveStudy] = OrderedDict()
        self._readers = Readers()

    def __len__(self) -> int:
        return len(self._studies)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.__exit__()

    def warm(self) -> None:
        """Begins to read the latest studies, before anybody looks at them."""
        self._readers.read("the latest studies", self._warm, 0.0)

    def get(self, name: str, patience_s: float = PATIENCE_S) -> LiveStudy:
        """The study of that name as it is now.

        Args:
            name: of the study.
            patience_s: seconds that are waited for a large one that was not looked at before.

        Raises:
            BeingRead: it takes longer.
            InvalidInput: its space is none of this version's.
            UnknownName: no such study.
        """
        found = self._of(studies.find_id(self._store, name))
        # Not under the lock of all: a large study takes seconds when it is looked at first.
        if not self._read(found, patience_s):
            raise BeingRead(f"trials of study {name!r}", found.known, found.trials)
        found.refresh()
        return found

    def _of(self, id: int) -> LiveStudy:
        with self._lock:
            found = self._studies.pop(id, None) or LiveStudy(self._store, id, self._readers)
            self._studies[id] = found
            if len(self._studies) > self._kept:
                self._studies.popitem(last=False)
            return found

    def _read(self, study: LiveStudy, patience_s: float | None) -> bool:
        """Whether it need not be read whole, or has been within the patience; None: however long that takes."""
        if study.revision or columns.count(self._store, study.id) <= self._at_once:
            return True
        return self._readers.read(("trials", study.id), study.refresh, patience_s)

    def _warm(self) -> None:
        """Those that go on first, then the newest: as many as the list shows at once, and as memory allows."""
        latest = pages.latest_studies(self._store, limit=min(WARMED, self._kept))
        room, wanted = MOST_WARMED, []
        for row in sorted(latest, key=lambda row: (row.state is not StudyState.RUNNING, -row.id)):
            room -= row.trials
            if room >= 0:
                wanted.append(row.id)
        # Layouts after all trials: only a part of a study's page waits for them.
        for id in wanted:
            self._warm_one(id, layouts=False)
        for id in wanted:
            self._warm_one(id, layouts=True)

    def _warm_one(self, id: int, *, layouts: bool) -> None:
        self._readers.check()
        found = self._of(id)
        if not self._read(found, None):
            return
        try:
            found.refresh()
            if layouts:
                found.read_layouts(None)
        except NasError:
            return  # who looks at it is told why
