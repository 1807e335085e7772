"""What a study's page tells of all trials at once, kept until the study goes on and it is worth while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from nas.service.live_structure import ShareView, share_views
from nas.service.live_studies import KEPT
from nas.service.live_study import LiveStudy
from nas.service.place_agreement import PlaceAgreement, place_agreements

_TIMES_ITS_COST = 100.0
"""A summary is kept for so many times what it took: 3 s where there are 100,000 trials, nothing where there are few."""


class Summary(NamedTuple):
    """Of one study at one revision.

    Args:
        blocks: where which kind of block stands; None where the layouts were not read yet.
        agreement: between places.
    """

    blocks: list[ShareView] | None
    agreement: list[PlaceAgreement]


class _Kept(NamedTuple):
    """A summary that was found at a revision; it stands in for those of later ones until a moment."""

    revision: int
    until: float
    summary: Summary


class Summaries:
    """The last summaries of the studies that are looked at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def of(self, study: LiveStudy) -> Summary:
        """The study's; its lock is held."""
        known = study.structure.known >= len(study.table)
        with self._lock:
            kept = self._kept.get(study.id)
        now = time.monotonic()
        if (
            kept is None
            or (kept.revision != study.revision and now > kept.until)
            or (known and kept.summary.blocks is None)
        ):
            summary = Summary(_blocks(study) if known else None, place_agreements(study))
            kept = _Kept(study.revision, now + _TIMES_ITS_COST * (time.monotonic() - now), summary)
        with self._lock:
            self._kept[study.id] = kept
            self._kept.move_to_end(study.id)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return kept.summary


def _blocks(study: LiveStudy) -> list[ShareView]:
    front = study.details.layouts(study.course.front)
    return share_views(study.structure.blocks, [front[trial] for trial in study.course.front])
