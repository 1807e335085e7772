"""Studies in memory: the latest are read when a server starts, large ones beside the requests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from live_lab import LiveLab

from nas.core.errors import UnknownName
from nas.service import live_studies
from nas.service.live_reading import BeingRead
from nas.service.live_studies import LiveStudies
from nas.service.live_study import LiveStudy
from nas.store import columns, studies
from nas.store.rows import StudyState


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    made = LiveLab(tmp_path)
    for name in ("old", "live", "new"):
        study = made.study(name)
        for _ in range(4):
            made.complete(study, 1.0, 1.0, 1.0)
        if name != "live":
            studies.set_state(made.store, study, StudyState.COMPLETE)
    return made


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The studies that were read whole, by name."""
    read, whole = list[str](), LiveStudy._read_whole

    def note(study: LiveStudy) -> None:
        whole(study)
        read.append(study.name)

    monkeypatch.setattr(LiveStudy, "_read_whole", note)
    return read


def wait(order: list[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(order) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("at_once", [2, 100])
def test_those_that_go_on_are_read_first_and_once(lab: LiveLab, order: list[str], at_once: int) -> None:
    with LiveStudies(lab.store, at_once=at_once) as live:
        live.warm()
        wait(order, 3)
        assert {live.get(name).name for name in order} == {"live", "new", "old"}
    assert order == ["live", "new", "old"]


def test_memory_is_bounded(lab: LiveLab, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_studies, "MOST_WARMED", 11)
    with LiveStudies(lab.store) as live:
        live.warm()
        wait(order, 2)
        assert live.get("old").name == "old"  # what did not fit is read when it is looked at
    assert order == ["live", "new", "old"]
    with LiveStudies(lab.store, kept=1) as live:
        live.warm()
        wait(order, 4)
    assert len(live) == 1


def test_the_end_abandons_what_is_being_read(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, states = threading.Event(), threading.Event(), columns.states

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return states(*args)

    monkeypatch.setattr(columns, "states", slow)
    monkeypatch.setattr("nas.service.live_study._TRIALS_PER_PIECE", 1)
    live = LiveStudies(lab.store, at_once=2)
    with live:
        live.warm()
        assert begun.wait(60)
        with pytest.raises(BeingRead, match=r"trials of study 'live' are being read: 0 of 4"):
            live.get("live", patience_s=0.01)
        threading.Timer(0.2, go_on.set).start()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reading")]
    study = live._of(studies.find_id(lab.store, "live"))
    assert (study.revision, study.known) == (0, 0)


def test_who_asks_is_told_what_went_wrong(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveStudies(lab.store, at_once=2)

    def gone(*_: Any) -> Any:
        raise UnknownName("study", "live", ())

    monkeypatch.setattr(columns, "states", gone)
    with pytest.raises(UnknownName):
        live.get("live", patience_s=60)
