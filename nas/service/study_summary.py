"""What a study's page tells of all trials at once, kept until the study goes on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from nas.service.live_structure import ShareView, share_views
from nas.service.live_studies import KEPT
from nas.service.live_study import LiveStudy
from nas.service.place_agreement import PlaceAgreement, place_agreements


class Summary(NamedTuple):
    """Of one study at one revision.

    Args:
        blocks: where which kind of block stands; None where the layouts were not read yet.
        agreement: between places.
    """

    blocks: list[ShareView] | None
    agreement: list[PlaceAgreement]


class Summaries:
    """The last summaries of the studies that are looked at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[int, Summary]] = OrderedDict()

    def of(self, study: LiveStudy) -> Summary:
        """The study's; its lock is held."""
        known = study.structure.known >= len(study.table)
        with self._lock:
            revision, kept = self._kept.get(study.id, (-1, None))
        if kept is None or revision != study.revision or (known and kept.blocks is None):
            kept = Summary(_blocks(study) if known else None, place_agreements(study))
        with self._lock:
            self._kept[study.id] = study.revision, kept
            self._kept.move_to_end(study.id)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return kept


def _blocks(study: LiveStudy) -> list[ShareView]:
    front = study.details.layouts(study.course.front)
    return share_views(study.structure.blocks, [front[trial] for trial in study.course.front])
