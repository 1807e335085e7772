"""Snapshots: one that was kept up step by step equals one that is read whole, and says what a report says."""

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
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live_lab import LiveLab
from sqlalchemy import event as sqlalchemy_event

from nas.core.errors import InvalidInput, UnknownName
from nas.core.pareto import FrontArchive, front_hypervolume, rank_trials
from nas.core.scoring import Axis
from nas.core.trial import EventKind
from nas.infra.store import events, studies, trials
from nas.infra.store.rows import StudyState
from nas.search.analysis.report import study_report
from nas.search.analysis.snapshot import Snapshots, StudySnapshot
from nas.search.study.events import Calibrated, Launched, elapsed
from nas.serve.views.study import Points, points
from tests.support.waiting import until

# Few distinct values, so that ties and equal points are common.
GRID = st.integers(0, 6).map(lambda step: step / 4)


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@given(st.integers(2, 4).flatmap(lambda m: st.lists(st.tuples(*[GRID] * m), max_size=30).map(lambda rows: (m, rows))))
def test_an_archive_has_the_front_and_hypervolume_of_the_ranking(case: tuple[int, list[tuple[float, ...]]]) -> None:
    m, rows = case
    archive, corner, axes = FrontArchive([1.2] * m), [1.2] * m, dict[int, list[Axis]]()
    for trial, row in enumerate(rows):
        axes[trial] = [Axis(value=0.0, coordinate=coordinate, sd=0.0) for coordinate in row]
        archive.take([trial], [row])
        ranked = rank_trials(axes, corner, chances={})
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
    if what == "complete":
        complete.append(lab.complete(study, quality, latency, memory))
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


def check_against_report(view: Points, report: dict[str, Any]) -> None:
    ranking = {row["trial"]: row for row in report["ranking"]}
    assert view.front is not None
    on = [entry for entry in view.front if entry.on]
    assert [entry.trial for entry in on] == [row["trial"] for row in report["front"]]
    assert {entry.trial for entry in view.front} == {
        trial for row in report["front"] for trial in (row["trial"], *row["ties"])
    }
    for entry in view.front:
        row = ranking[entry.trial]
        assert (entry.p_front, list(entry.ties), entry.layout) == (row["p_front"], row["ties"], row["layout"])
        assert entry.values == pytest.approx(row["objectives"], rel=1e-5)
        for name, value in entry.values.items():
            low, high = entry.low[name], entry.high[name]
            assert low is not None and value is not None and high is not None and low <= value <= high
    assert {entry.name for entry in view.references} == {row["name"] for row in report["references"]}
    assert view.hypervolume == (None if (volume := report["hypervolume"]) is None else pytest.approx(volume, abs=1e-9))
    assert view.device_seconds == pytest.approx(report["stage_seconds"]["measure"])
    assert view.curve is not None
    assert (view.curve.hypervolume or [0.0])[-1] == (view.hypervolume or 0.0)
    for trial, row in ranking.items():
        for name, value in row["objectives"].items():
            assert view.columns.values[name][trial] == pytest.approx(value, rel=1e-5)


@settings(max_examples=examples(25))
@given(STEPS, st.booleans())
def test_a_snapshot_that_was_kept_up_equals_a_new_one_and_the_report(steps: list[Any], judged: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lab = LiveLab(Path(folder))
        study = lab.study(judged=judged)
        lab.complete(study, 1.0, 0.5, 0.5, "reference")
        live, complete = Snapshots(lab.store), list[int]()
        view = viewed(None, points(live.get("study"), axes=AXES))
        for step in steps:
            take(lab, study, step, complete)
            if step[0] == "looked at":
                view = viewed(view, points(live.get("study"), view.revision, AXES))
        view = viewed(view, points(live.get("study"), view.revision, AXES))
        whole = points(Snapshots(lab.store).get("study"), axes=AXES)
        assert view.model_dump_json() == whole.model_dump_json()
        report = study_report(lab.store, "study")
        assert study_report(lab.store, live.get("study")) == report
        check_against_report(points(Snapshots(lab.store).get("study")), report)
        lab.store.close()


AXES = ("latency", "quality", "decode_p50.chat@local.fake", "params_total", "kv_bytes")


def viewed(before: Points | None, delta: Points) -> Points:
    """What a viewer has after a delta."""
    if before is None:
        return delta
    old, new = before.columns, delta.columns
    plain = {name: _merged(getattr(old, name), getattr(new, name), before, delta) for name in ("trial", *_PLAIN)}
    values = {key: _merged(old.values[key], column, before, delta) for key, column in new.values.items()}
    update = {
        "curve": delta.curve or before.curve,
        "front": before.front if delta.front is None else delta.front,
        "columns": new.model_copy(update=plain | {"values": values}),
    }
    return delta.model_copy(update=update)


_PLAIN = ("status", "origin", "rung", "feasible")


def _merged(old: list[Any], new: list[Any], before: Points, delta: Points) -> list[Any]:
    rows = dict(zip(before.columns.trial, old, strict=True)) | dict(zip(delta.columns.trial, new, strict=True))
    return [rows[trial] for trial in sorted(rows)]


def test_what_did_not_change_is_not_told_again(lab: LiveLab) -> None:
    study = lab.study()
    live = Snapshots(lab.store)
    first = lab.complete(study, 1.0, 1.5, 1.5)
    lab.complete(study, 1.0, 1.2, 1.2)
    revision = points(live.get("study")).revision
    nothing = points(live.get("study"), revision)
    assert (nothing.columns.trial, nothing.curve, nothing.revision) == ([], None, revision)
    lab.note_quality(study, first, 1.1)
    delta = points(live.get("study"), revision)
    assert delta.columns.trial == [first]
    assert delta.trials == 2


def test_reading_again_costs_no_more_than_what_is_new(lab: LiveLab) -> None:
    study = lab.study()
    trial = lab.complete(study, 1.0, 1.5, 1.5)
    lab.multiply(study, trial, 3000)
    snapshots = Snapshots(lab.store)
    before = snapshots.get("study")
    with counted(lab) as rows:
        assert snapshots.get("study") is before
    assert len(rows) <= 3
    lab.note_quality(study, 7, 1.1)
    with counted(lab) as rows:
        after = snapshots.get("study")
    assert len(rows) <= 10
    same = [trial for trial in before.records if after.records[trial] is before.records[trial]]
    assert len(same) == 3000 and 7 not in same
    assert before.records[7].quality != after.records[7].quality, "a snapshot does not change"


def test_many_trials_are_read_with_few_statements(lab: LiveLab) -> None:
    study = lab.study()
    trial = lab.complete(study, 1.0, 1.5, 1.5)
    lab.multiply(study, trial, 2000)
    with counted(lab) as statements:
        snapshot = Snapshots(lab.store).get("study")
    assert len(statements) < 40
    assert snapshot.states() == {"complete": 2001}
    axes = {i: snapshot.counted[i] for i in snapshot.curve.front}
    assert front_hypervolume(axes, snapshot.reference_point or []) == pytest.approx(snapshot.curve.hypervolume)
    assert snapshot.device_seconds == pytest.approx(2.0 * 2001)
    moments = [-1.0, *(step.at for step in snapshot.curve.steps), 1e12]
    assert snapshot.device_seconds_until(moments).tolist()[-1] == snapshot.device_seconds


def test_a_study_that_is_launched_again_is_not_read_whole_again(lab: LiveLab) -> None:
    study, snapshots = lab.study(), Snapshots(lab.store)
    lab.complete(study, 1.0, 1.5, 1.5)
    before = snapshots.get("study")
    events.append(lab.store, study, {"what": Launched.what, "trials": 9, "warm_start": []})
    after = snapshots.get("study")
    assert after.records[0] is before.records[0] and after.record.requested == 9
    events.append(lab.store, study, {"what": Calibrated.what, "id": "box-2", "device": "local"})
    assert snapshots.get("study").records[0] is not before.records[0]


def test_running_time_does_not_count_nights(lab: LiveLab) -> None:
    study, snapshots = lab.study(), Snapshots(lab.store)
    start = lab.clock.time
    lab.complete(study, 1.0, 1.5, 1.5)
    ran = snapshots.get("study").record.log.elapsed_s
    assert ran == lab.clock.time - start - 1  # the clock went on after the last event
    lab.clock.time += 1e5
    events.append(lab.store, study, {"what": Launched.what, "trials": 9, "warm_start": []})
    lab.clock.time += 3
    lab.propose(study)
    log = snapshots.get("study").record.log
    assert log.elapsed_s == ran + 3
    assert elapsed(events.since(lab.store, study))[-1] == log.elapsed_s


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
    live = Snapshots(lab.store, most=2)
    a = live.get("a")
    live.get("b")
    assert live.get("a") is a
    live.get("c")
    assert live.get("a") is a
    assert len(live) == 2


def test_a_study_that_is_made_anew_is_another_one(lab: LiveLab) -> None:
    old = lab.study()
    live = Snapshots(lab.store)
    before = points(live.get("study"))
    studies.delete(lab.store, old)
    with pytest.raises(UnknownName):
        live.get("study")
    lab.study()
    after = points(live.get("study"))
    assert after.study != before.study and after.revision > before.revision


def test_the_state_is_the_studys(lab: LiveLab) -> None:
    study = lab.study()
    live = Snapshots(lab.store)
    assert (live.get("study").state, live.get("study").record.requested) == (StudyState.RUNNING, 4)
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert live.get("study").over


def test_viewers_at_once_read_a_study_once(lab: LiveLab) -> None:
    study = lab.study()
    lab.multiply(study, lab.complete(study, 1.0, 1.5, 1.5), 500)
    live, answers = Snapshots(lab.store), list[Points]()
    viewers = [threading.Thread(target=lambda: answers.append(points(live.get("study")))) for _ in range(8)]
    with counted(lab) as statements:
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join(60)
    assert len({answer.model_dump_json() for answer in answers}) == 1 and len(answers) == 8
    assert sum("FROM trial" in statement for statement in statements) == 1


def test_a_view_is_computed_once_for_all_who_ask(lab: LiveLab) -> None:
    lab.study()
    snapshot, calls = Snapshots(lab.store).get("study"), list[int]()
    threads = [threading.Thread(target=lambda: snapshot.cached("it", lambda: calls.append(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls == [1]


def test_memory_is_bounded_by_trials(lab: LiveLab) -> None:
    for name in ("a", "b", "c"):
        study = lab.study(name)
        for _ in range(3):
            lab.propose(study)
    snapshots = Snapshots(lab.store, most_trials=6)
    by_name = {name: snapshots.get(name) for name in ("a", "b", "c")}
    assert len(snapshots) == 2
    assert snapshots.get("c") is by_name["c"] and snapshots.get("a") is not by_name["a"]
    small = Snapshots(lab.store, most_trials=1)
    assert small.get("a") is small.get("a"), "one study is kept, however large it is"


def test_a_study_of_another_version_is_refused_and_others_are_not(lab: LiveLab) -> None:
    lab.study("good")
    studies.create(lab.store, "odd", {"name": "odd", "v": 99}, seed=0, version="9")
    snapshots = Snapshots(lab.store)
    with pytest.raises(InvalidInput, match="cannot read its space"):
        snapshots.get("odd")
    assert snapshots.get("good").name == "good"


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The studies that were read, by name."""
    read = list[str]()

    class Noted(StudySnapshot):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            read.append(self.name)

    monkeypatch.setattr("nas.search.analysis.snapshot.StudySnapshot", Noted)
    return read


def test_the_latest_studies_are_read_before_anybody_looks(lab: LiveLab, order: list[str]) -> None:
    for name in ("old", "live", "new"):
        study = lab.study(name)
        lab.propose(study)
        if name != "live":
            studies.set_state(lab.store, study, StudyState.COMPLETE)
    with Snapshots(lab.store) as snapshots:
        snapshots.warm()
        until(lambda: len(order) == 3)
        for name in order:
            snapshots.get(name)
    assert order == ["live", "new", "old"], "those that run come first"
    order.clear()
    with Snapshots(lab.store, most_trials=2) as snapshots:
        snapshots.warm()
        until(lambda: len(order) == 2)
    assert order == ["live", "new"], "what does not fit into memory is not read"
    assert not [thread for thread in threading.enumerate() if thread.name == "reading studies"]
