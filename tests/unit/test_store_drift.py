"""Reference runs over time, and when a device must be calibrated again."""

from __future__ import annotations

import pytest
from store_support import StillClock

from nas.infra.store import calibrations
from nas.infra.store.calibrations import KEPT_S, LATEST_RUNS, ReferenceRun, drift, note_runs, off_by
from nas.infra.store.store import Store

PLACE = ("box", "fake", "b1")


pytestmark = pytest.mark.usefixtures("registered")


def runs(*ratios: float, calm: bool = True, celsius: float | None = 40.0) -> list[ReferenceRun]:
    return [ReferenceRun(ratio, celsius, calm) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "off", "recalibrate"),
    [
        ([1.0, 1.02, 0.99], -0.01, False),
        ([1.19, 1.9, 3.0], 0.19, False),
        ([1.21, 1.3, 1.4], 0.21, True),
        ([0.94, 0.99, 1.5], -0.06, True),
        ([0.96, 0.94, 1.0, 1.1, 1.0, 1.0], -0.05, True),
    ],
)
def test_the_floor_decides(ratios: list[float], off: float, recalibrate: bool) -> None:
    assert off_by(ratios) == (pytest.approx(off), recalibrate)


def test_points_come_back_in_order_with_what_was_noted(store: Store, clock: StillClock) -> None:
    calibration = calibrations.put(store, *PLACE, 100.0, {})
    note_runs(store, PLACE, "job.0", runs(1.001, 0.998), 100.0)
    clock.time += 10
    note_runs(store, PLACE, "job.1", runs(1.5, calm=False, celsius=None), 90.0)
    [series] = drift(store, "box")
    assert (series.device, series.runtime, series.build, series.calibration) == (*PLACE, calibration)
    assert [(point.at, point.job, point.calibration_ms, point.run) for point in series.points] == [
        (1000.0, "job.0", 100.0, ReferenceRun(1.001, 40.0, True)),
        (1000.0, "job.0", 100.0, ReferenceRun(0.998, 40.0, True)),
        (1010.0, "job.1", 90.0, ReferenceRun(1.5, None, False)),
    ]
    assert (series.off, series.recalibrate) == (None, False), "three runs say nothing yet"


def test_a_round_that_is_read_again_is_noted_once(store: Store) -> None:
    for _ in range(2):
        note_runs(store, PLACE, "job.0", runs(1.0), 100.0)
    note_runs(store, PLACE, "job.1", [], 100.0)
    [series] = drift(store, "box")
    assert len(series.points) == 1
    assert series.calibration is None


def test_the_latest_runs_since_the_calibration_say_whether_to_recalibrate(store: Store, clock: StillClock) -> None:
    note_runs(store, PLACE, "old", runs(*[2.0] * LATEST_RUNS), 50.0)
    clock.time += 1
    calibrations.put(store, *PLACE, 100.0, {})
    note_runs(store, PLACE, "busy", runs(*[1.01] * 3, *[1.9] * (LATEST_RUNS - 3), calm=False), 100.0)
    [series] = drift(store, "box")
    assert (series.off, series.recalibrate) == (pytest.approx(0.01), False)
    clock.time += 1
    note_runs(store, PLACE, "slow", runs(*[1.3] * LATEST_RUNS), 100.0)
    [series] = drift(store, "box")
    assert (series.off, series.recalibrate) == (pytest.approx(0.3), True)


def test_times_can_be_chosen(store: Store, clock: StillClock) -> None:
    calibrations.put(store, "box", "idle", "b1", 5.0, {})
    note_runs(store, PLACE, "job.0", runs(1.0), 100.0)
    clock.time += 100
    note_runs(store, ("box", "fake", "b2"), "job.1", runs(1.0), 100.0)
    assert [(series.runtime, series.build, len(series.points)) for series in drift(store, "box")] == [
        ("idle", "b1", 0), ("fake", "b2", 1), ("fake", "b1", 1),
    ]  # fmt: skip
    assert [(series.build, len(series.points)) for series in drift(store, "box", since=clock.time)] == [
        ("b1", 0),
        ("b2", 1),
    ]
    assert drift(store, "phone") == []


def test_old_runs_go(store: Store, clock: StillClock) -> None:
    other = ("box", "fake", "b2")
    note_runs(store, PLACE, "old", runs(1.0), 100.0)
    note_runs(store, other, "other", runs(1.0), 100.0)
    clock.time += KEPT_S + 1
    note_runs(store, PLACE, "new", runs(1.0), 100.0)
    survivors = {point.job for series in drift(store, "box") for point in series.points}
    assert survivors == {"new", "other"}


def test_there_are_never_too_many(store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrations, "KEPT_ROUNDS", 5)
    for n in range(12):
        clock.time += 1
        note_runs(store, PLACE, f"job.{n}", runs(1.0, 1.0), 100.0)
    [series] = drift(store, "box")
    assert [point.job for point in series.points][::2] == [f"job.{n}" for n in range(7, 12)]
