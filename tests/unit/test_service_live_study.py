"""Live studies: what was kept up step by step is what a report computes anew."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_lab import LiveLab
from sqlalchemy import event as sqlalchemy_event

from nas.core.archive import FrontArchive
from nas.core.errors import UnknownName
from nas.core.scoring import Axis
from nas.core.trial import EventKind
from nas.service.live_points import Points, points
from nas.service.live_studies import LiveStudies
from nas.service.ranking import front_hypervolume, rank_trials
from nas.service.record import CALIBRATED, LAUNCHED
from nas.service.report import study_report
from nas.store import events, studies, trials
from nas.store.rows import StudyState

# Few distinct values, so that ties and equal points are common.
GRID = st.integers(0, 6).map(lambda step: step / 4)


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@given(st.integers(2, 4).flatmap(lambda m: st.lists(st.tuples(*[GRID] * m), max_size=30).map(lambda rows: (m, rows))))
def test_an_archive_has_the_front_and_hypervolume_of_the_ranking(given: tuple[int, list[tuple[float, ...]]]) -> None:
    m, rows = given
    archive, corner, axes = FrontArchive([1.2] * m), [1.2] * m, dict[int, list[Axis]]()
    for trial, row in enumerate(rows):
        axes[trial] = [Axis(value=0.0, coordinate=each, sd=0.0) for each in row]
        archive.take([trial], [row])
        ranked = rank_trials(axes, corner, draws=0)
        assert sorted(archive.keys.tolist()) == sorted(place.trial for place in ranked if place.rank == 0)
        assert archive.hypervolume == pytest.approx(front_hypervolume(axes, corner), abs=1e-12)
    at_once = FrontArchive(corner)
    gains = at_once.take(range(len(rows)), np.array(rows).reshape(-1, m))
    assert at_once.keys.tolist() == archive.keys.tolist()
    assert math.fsum(gains) == pytest.approx(at_once.hypervolume) == pytest.approx(archive.hypervolume)


def test_many_points_at_once_are_taken_as_one_by_one() -> None:
    rows = np.random.default_rng(0).random((3000, 3))
    at_once, one_by_one = FrontArchive([1.0] * 3), FrontArchive([1.0] * 3)
    gains = at_once.take(range(len(rows)), rows)
    assert gains.tolist() == [one_by_one.take([key], [row])[0] for key, row in enumerate(rows)]
    assert at_once.keys.tolist() == one_by_one.keys.tolist()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("complete"), GRID, GRID, GRID, st.sampled_from([0, 0, 0, 1])),
        st.tuples(st.just("noisy"), GRID, GRID, GRID, st.just(0)),
        st.tuples(st.just("better known"), GRID, GRID, GRID, st.integers(0, 5)),
        st.tuples(st.just("proposed"), GRID, GRID, GRID, st.just(0)),
        st.tuples(st.just("failed"), GRID, GRID, GRID, st.just(0)),
        st.tuples(st.just("judged"), GRID, GRID, GRID, st.just(0)),
        st.tuples(st.just("looked at"), GRID, GRID, GRID, st.just(0)),
    ),
    max_size=14,
)


def take(lab: LiveLab, study: int, step: tuple[str, float, float, float, int], complete: list[int]) -> None:
    what, *numbers, which = step
    quality, latency, memory = (0.5 + number for number in numbers)
    if what in ("complete", "noisy"):
        complete.append(lab.complete(study, quality, latency, memory, noisy=what == "noisy"))
    elif what == "better known" and complete:
        trial = complete[which % len(complete)]
        lab.measure(study, trial, latency, memory, n=3 + which)
        lab.note_quality(study, trial, quality)
    elif what == "proposed":
        lab.propose(study)
    elif what == "failed":
        trials.add_event(lab.store, study, lab.propose(study), EventKind.FAILED, {"reason": "crash"})
    elif what == "judged":
        lab.judge(study)


def check_against_report(told: Points, report: dict[str, Any]) -> None:
    ranking = {row["trial"]: row for row in report["ranking"]}
    assert told.front is not None
    on = [entry for entry in told.front if entry.on]
    assert [entry.trial for entry in on] == [row["trial"] for row in report["front"]]
    assert {entry.trial for entry in told.front} == {
        trial for row in report["front"] for trial in (row["trial"], *row["ties"])
    }
    for entry in told.front:
        row = ranking[entry.trial]
        assert (entry.p_front, list(entry.ties), entry.layout) == (row["p_front"], row["ties"], row["layout"])
        assert entry.values == pytest.approx(row["objectives"], rel=1e-5)
        for name, value in entry.values.items():
            low, high = entry.low[name], entry.high[name]
            assert low is not None and value is not None and high is not None and low <= value <= high
    assert {entry.name for entry in told.references} == {row["name"] for row in report["references"]}
    assert told.hypervolume == (None if (volume := report["hypervolume"]) is None else pytest.approx(volume, abs=1e-9))
    assert told.device_seconds == pytest.approx(report["stage_seconds"]["measure"])
    assert told.course is not None
    if told.course.hypervolume:
        assert told.course.hypervolume[-1] == told.hypervolume
    for trial, row in ranking.items():
        for name, value in row["objectives"].items():
            assert told.told.values[name][trial] == pytest.approx(value, rel=1e-5)


@settings(max_examples=25)
@given(STEPS, st.booleans())
def test_what_is_kept_up_is_what_is_read_whole_and_what_a_report_says(steps: list[Any], judged: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lab = LiveLab(Path(folder))
        study = lab.study(judged=judged)
        lab.complete(study, 1.0, 0.5, 0.5, "reference")
        live, complete = LiveStudies(lab.store), list[int]()
        shown = viewed(None, points(live.get("study"), axes=ASKED))
        for step in steps:
            take(lab, study, step, complete)
            if step[0] == "looked at":
                shown = viewed(shown, points(live.get("study"), shown.revision, ASKED))
        shown = viewed(shown, points(live.get("study"), shown.revision, ASKED))
        whole = points(LiveStudies(lab.store).get("study"), axes=ASKED)
        assert shown.model_dump_json() == whole.model_dump_json()
        check_against_report(points(LiveStudies(lab.store).get("study")), study_report(lab.store, "study"))
        lab.store.close()


ASKED = ("latency", "quality", "decode_p50.chat@local.fake", "params_total", "kv_bytes")


def viewed(before: Points | None, delta: Points) -> Points:
    """What a viewer has after a delta."""
    if before is None:
        return delta
    kept = {"course": delta.course or before.course, "front": before.front if delta.front is None else delta.front}
    merged = delta.model_copy(deep=True, update=kept)
    for name in ("trial", *_PLAIN):
        setattr(merged.told, name, _merged(getattr(before.told, name), getattr(delta.told, name), before, delta))
    for key, column in delta.told.values.items():
        merged.told.values[key] = _merged(before.told.values[key], column, before, delta)
    return merged


_PLAIN = ("status", "origin", "rung", "feasible", "noisy")


def _merged(old: list[Any], new: list[Any], before: Points, delta: Points) -> list[Any]:
    rows = dict(zip(before.told.trial, old, strict=True)) | dict(zip(delta.told.trial, new, strict=True))
    return [rows[trial] for trial in sorted(rows)]


def test_what_did_not_change_is_not_told_again(lab: LiveLab) -> None:
    study = lab.study()
    live = LiveStudies(lab.store)
    first = lab.complete(study, 1.0, 1.5, 1.5)
    lab.complete(study, 1.0, 1.2, 1.2)
    seen = points(live.get("study")).revision
    nothing = points(live.get("study"), seen)
    assert (nothing.told.trial, nothing.course, nothing.revision) == ([], None, seen)
    lab.note_quality(study, first, 1.1)
    delta = points(live.get("study"), seen)
    assert delta.told.trial == [first]
    assert delta.trials == 2


def test_reading_again_costs_no_more_than_what_is_new(lab: LiveLab) -> None:
    study = lab.study()
    trial = lab.complete(study, 1.0, 1.5, 1.5)
    lab.multiply(study, trial, 3000)
    live = LiveStudies(lab.store)
    live.get("study", patience_s=120.0)
    with counted(lab) as rows:
        live.get("study")
    assert len(rows) <= 3
    lab.note_quality(study, 7, 1.1)
    with counted(lab) as rows:
        live.get("study")
    assert len(rows) <= 10


def test_many_trials_are_read_in_pieces(lab: LiveLab) -> None:
    study = lab.study()
    trial = lab.complete(study, 1.0, 1.5, 1.5)
    lab.multiply(study, trial, 20_000)
    with counted(lab) as statements:
        live = LiveStudies(lab.store).get("study", patience_s=120.0)
    assert len(statements) < 100
    assert live.table.states() == {"complete": 20_001}
    rows = live.table.rows["axes"][:, :, 1]
    axes = {i: [Axis(value=0.0, coordinate=each, sd=0.0) for each in rows[i]] for i in live.course.front}
    assert front_hypervolume(axes, live.corner or []) == pytest.approx(live.course.hypervolume)
    assert live.device_seconds.total == pytest.approx(2.0 * 20_001)


def test_a_study_that_is_launched_again_is_not_read_whole_again(lab: LiveLab) -> None:
    study, live = lab.study(), LiveStudies(lab.store)
    lab.complete(study, 1.0, 1.5, 1.5)
    table = live.get("study").table
    events.append(lab.store, study, {"what": LAUNCHED, "trials": 9, "accept_noise": False})
    assert live.get("study").table is table and live.get("study").wanted == 9
    events.append(lab.store, study, {"what": CALIBRATED, "id": "box-2", "device": "local"})
    assert live.get("study").table is not table


@contextmanager
def counted(lab: LiveLab) -> Iterator[list[str]]:
    """The statements that the database is sent."""
    sent: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(("SELECT", "WITH")):
            sent.append(statement)

    sqlalchemy_event.listen(lab.store.engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        sqlalchemy_event.remove(lab.store.engine, "before_cursor_execute", note)


def test_the_least_recently_looked_at_study_goes_first(lab: LiveLab) -> None:
    for name in ("a", "b", "c"):
        lab.study(name)
    live = LiveStudies(lab.store, kept=2)
    a = live.get("a")
    live.get("b")
    assert live.get("a") is a
    live.get("c")
    assert live.get("a") is a
    assert len(live) == 2


def test_a_study_that_is_made_anew_is_another_one(lab: LiveLab) -> None:
    old = lab.study()
    live = LiveStudies(lab.store)
    before = points(live.get("study"))
    studies.delete(lab.store, old)
    with pytest.raises(UnknownName):
        live.get("study")
    lab.study()
    after = points(live.get("study"))
    assert after.study != before.study and after.revision > before.revision


def test_the_state_is_the_studys(lab: LiveLab) -> None:
    study = lab.study()
    live = LiveStudies(lab.store)
    assert (live.get("study").state, live.get("study").wanted) == (StudyState.RUNNING, 4)
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert live.get("study").over


def test_viewers_at_once_read_a_study_once(lab: LiveLab) -> None:
    study = lab.study()
    lab.multiply(study, lab.complete(study, 1.0, 1.5, 1.5), 500)
    live, told = LiveStudies(lab.store), list[Points]()
    viewers = [threading.Thread(target=lambda: told.append(points(live.get("study")))) for _ in range(8)]
    with counted(lab) as statements:
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join(60)
    assert len({each.model_dump_json() for each in told}) == 1 and len(told) == 8
    assert sum("max(event.id)" in statement and "GROUP BY" in statement for statement in statements) <= 2
