"""How long a study takes: by a guess, by the pace of earlier studies, and by its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_support import StillClock
from study_support import TINY, tiny_space
from test_study_events import TIMED

from nas.core.layout import Layout
from nas.core.profile import ProfileSummary
from nas.core.space import SearchSpace
from nas.core.trial import EventKind
from nas.core.units import show_duration
from nas.infra.store import events, studies, trials
from nas.infra.store.rows import NewTrial, Origin
from nas.infra.store.store import Store
from nas.measure.runtimes import RUNTIMES
from nas.search.proxy.quality import Quality
from nas.search.study.estimate import Estimate, Span, estimate, estimate_left
from nas.search.study.events import (
    Calibrated,
    Closed,
    Launched,
    Marked,
    Named,
    Note,
    Profiled,
    QualityKnown,
    Remeasured,
    Rescored,
)
from nas.testing.fake_runtime import FakeRuntime

RUNGS = [{**rung, "keep": None} for rung in TINY["quality"]["rungs"]]
ALL_CLIMB: dict[str, Any] = {
    "budgets": [],
    "quality": TINY["quality"] | {"rungs": RUNGS},
    "protocol": TINY["protocol"] | {"remeasure": None},
}
"""Changes of the tiny space after which every layout is screened, trained and confirmed, and nothing is done again."""
PATH = (EventKind.EXPORTED, EventKind.MEASURING, EventKind.GATED_IN, EventKind.TRAINING, EventKind.CONFIRMING)
QUALITY = Quality(rung="third", value=1.0, per_group={}, sd=0.1, n_seeds=1)


def begin(store: Store, space: SearchSpace, name: str, trials: int, device: str = "box") -> int:
    study = studies.create(store, name, space.model_dump(mode="json"), seed=0, version="0").id
    log(store, study, Launched(trials))
    log(store, study, Calibrated("local", "fake", device, "build", 1.0, 3, {}, {}))
    return study


def log(store: Store, study: int, note: Note) -> None:
    events.append(store, study, note.to_json())


def complete(store: Store, study: int, layout: Layout, origin: Origin = "proposal") -> int:
    number = trials.propose(store, study, [NewTrial(layout.to_json(), layout.id, origin)])[0].number
    for kind in PATH:
        trials.add_event(store, study, number, kind, {"rung": 2} if kind is EventKind.TRAINING else {})
    trials.add_event(store, study, number, EventKind.PROGRESS, QualityKnown(2, QUALITY).to_json())
    trials.add_event(store, study, number, EventKind.COMPLETE, {})
    return number


def half_done(store: Store, space: SearchSpace, clock: StillClock, seconds: float, name: str = "now") -> int:
    """A study of eight trials, of which both references and four trials are complete after `seconds`."""
    study = begin(store, space, name, trials=8)
    for layout in space.references.layouts().values():
        complete(store, study, layout, "reference")
    clock.sleep(seconds)
    for n in range(1, 5):
        complete(store, study, Layout.parse(f"d128 v256 ffn=swiglu:{320 + 32 * n} [C3 A2/1 C3]"))
    return study


def seconds(forecast: Estimate) -> dict[str, float]:
    return {part.name: part.seconds.typical for part in forecast.parts}


def time_left(store: Store, workers: int = 1, name: str = "now") -> Estimate:
    forecast = estimate_left(store, studies.get(store, name), workers)
    assert forecast is not None
    return forecast


def test_a_guess_is_called_a_guess(store: Store) -> None:
    for database in (None, store):
        forecast = estimate(database, tiny_space(), 4, {"local": "box"}, workers=1)
        assert forecast.based_on == ["a guess: too few trials have ended here yet"]
        assert forecast.seconds.high == pytest.approx(9 * forecast.seconds.low)


def test_work_grows_with_trials_and_trainings_are_shared_by_workers() -> None:
    space = tiny_space(**ALL_CLIMB)
    four, eight, shared = (seconds(estimate(None, space, n, {}, w)) for n, w in ((4, 1), (8, 1), (4, 2)))
    assert four.keys() == {"calibration", "export", "screen", "training", "confirm"}
    assert (eight["screen"], eight["training"]) == pytest.approx((10 / 6 * four["screen"], 10 / 6 * four["training"]))
    assert (shared["screen"], shared["training"]) == pytest.approx((four["screen"], four["training"] / 2))


def test_a_study_half_done_takes_as_long_again(store: Store, clock: StillClock) -> None:
    space = tiny_space(**ALL_CLIMB)
    half_done(store, space, clock, 600.0)
    forecast = time_left(store)
    assert forecast.based_on == ["the pace of this study so far"]
    assert "calibration" not in seconds(forecast)
    calibration_s = seconds(estimate(None, space, 8, {}, 1))["calibration"]
    work_s = sum(seconds(estimate(None, space, 8, {}, 1)).values()) - calibration_s
    pace = 600.0 / (calibration_s + work_s * 6 / 10)
    assert forecast.seconds.typical == pytest.approx(pace * work_s * 4 / 10)


def test_earlier_studies_of_the_same_device_tell_the_pace(store: Store, clock: StillClock) -> None:
    space = tiny_space(**ALL_CLIMB)
    half_done(store, space, clock, 600.0, "earlier")
    forecast = estimate(store, space, 8, {"local": "box"}, workers=1)
    assert forecast.based_on == ["the pace of an earlier study here"]
    assert sum(seconds(forecast).values()) == pytest.approx(forecast.seconds.typical)
    begin(store, space, "now", 8)
    assert time_left(store).based_on == forecast.based_on
    assert estimate(store, space, 8, {"local": "another"}, workers=1).based_on[0].startswith("a guess")


def test_a_busy_machine_widens_the_range_before_trials_have_ended(store: Store, clock: StillClock) -> None:
    space = tiny_space(**ALL_CLIMB)
    begin(store, space, "now", 8)
    first = time_left(store).seconds
    assert first.high == pytest.approx(9 * first.low)
    clock.sleep(900.0)
    later = time_left(store).seconds
    slowest = 900.0 / seconds(estimate(None, space, 8, {}, 1))["calibration"]
    assert later.typical / first.typical == pytest.approx(slowest**0.5)
    assert later.high == pytest.approx(first.typical * slowest)
    assert later.high > first.high


def test_time_left_falls_while_a_stage_is_under_way(store: Store, clock: StillClock) -> None:
    study = half_done(store, tiny_space(**ALL_CLIMB), clock, 600.0)
    layout = Layout.parse("d128 v256 ffn=swiglu:480 [C3 A2/1 C3]")
    trial = trials.propose(store, study, [NewTrial(layout.to_json(), layout.id, "proposal")])[0].number
    for kind in PATH[:2]:
        trials.add_event(store, study, trial, kind, {})
    typical = []
    for seconds in (0.0, 1.0, 1.0, 3600.0):
        clock.sleep(seconds)
        typical.append(time_left(store).seconds.typical)
    assert (typical[1], typical[2]) == pytest.approx((typical[0] - 1, typical[0] - 2))
    assert typical[3] > typical[0], "it takes longer than by the pace so far"


def test_a_page_counts_the_cores_that_a_launch_may_use(
    store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(store, tiny_space(**ALL_CLIMB), clock, 600.0)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    assert estimate_left(store, studies.get(store, "now")) == time_left(store, workers=3)


def test_what_people_add_changes_no_estimate(store: Store, clock: StillClock) -> None:
    study = half_done(store, tiny_space(**ALL_CLIMB), clock, 600.0)
    clock.sleep(60.0)
    before = time_left(store)
    log(store, study, Marked(2, star=True, tags=(), text=""))
    log(store, study, Profiled(2, "box", "fake", "b", 32, 4, 1, ProfileSummary.model_validate(TIMED)))
    assert time_left(store) == before


def test_anchors_are_counted_until_their_rung_has_a_scale(store: Store, clock: StillClock) -> None:
    settings = {"anchors": {"layouts": 3, "seeds": [10, 11, 12]}}
    space = tiny_space(**ALL_CLIMB | {"quality": ALL_CLIMB["quality"] | settings})
    parts = seconds(estimate(None, space, 4, {}, workers=1))
    # 3 + 2 layouts on 3 seeds for 24 steps in all; 4 + 2 layouts for 6 + 6 + 12 + 24.
    assert parts["anchors"] / parts["training"] == pytest.approx(5 * 3 * 24 / (6 * 48))
    half_done(store, space, clock, 600.0)
    assert "anchors" not in seconds(time_left(store))


def test_fresh_seeds_that_were_trained_are_not_counted_again(store: Store, clock: StillClock) -> None:
    space = tiny_space(**ALL_CLIMB | {"quality": ALL_CLIMB["quality"] | {"rescore": {"seeds": [20, 21]}}})
    study = half_done(store, space, clock, 600.0)
    log(store, study, Closed("trials", "4 layouts were proposed"))
    remaining = []
    for trial in range(5):
        remaining.append(time_left(store).seconds.typical > 0)
        trials.add_event(store, study, trial, EventKind.PROGRESS, Rescored(QUALITY, {20: 1.0}).to_json())
    assert remaining == [True] * 4 + [False], "two references, and half of four candidates"


def test_rounds_of_the_second_measurement_are_counted_until_they_are_done(store: Store, clock: StillClock) -> None:
    again = {**TINY["protocol"], "remeasure": {"rounds": 3, "repetitions": 4, "members": 1}}
    space = tiny_space(**ALL_CLIMB | {"protocol": again})
    parts = seconds(estimate(None, space, 4, {}, workers=1))
    # 3 rounds x 4 runs of one layout and the reference; 2 runs of four layouts and two references.
    assert parts["re-measure"] / parts["screen"] == pytest.approx(3 * 4 * 2 / (2 * 6))
    study = half_done(store, space, clock, 600.0)
    log(store, study, Closed("trials", "4 layouts were proposed"))
    remaining = []
    for round_ in range(3):
        remaining.append(time_left(store).seconds.typical > 0)
        for trial in (0, 2):
            trials.add_event(store, study, trial, EventKind.PROGRESS, Remeasured(round_, ()).to_json())
    assert remaining == [True] * 3 and time_left(store).seconds.typical == 0
    log(store, study, Named((2, 3)))
    assert time_left(store).seconds.typical > 0, "the front has two layouts, one more than expected"
    log(store, study, Launched(10))
    typical = time_left(store).seconds.typical
    log(store, study, Named((2,)))
    assert time_left(store).seconds.typical == typical > 0, "six layouts are to come, and another front"


def test_a_finished_rung_of_a_waiting_trial_is_not_counted_again(store: Store) -> None:
    study = begin(store, tiny_space(**ALL_CLIMB), "now", trials=1)
    layout = Layout.parse("d128 v256 ffn=swiglu:352 [C3 A2/1 C3]")
    trial = trials.propose(store, study, [NewTrial(layout.to_json(), layout.id, "proposal")])[0].number
    for kind in (*PATH[:3], EventKind.TRAINING):
        trials.add_event(store, study, trial, kind, {"rung": 0} if kind is EventKind.TRAINING else {})
    before = seconds(time_left(store))["training"]
    trials.add_event(store, study, trial, EventKind.PROGRESS, QualityKnown(0, QUALITY).to_json())
    assert seconds(time_left(store))["training"] < before


def test_nothing_is_left_once_all_have_ended(store: Store, clock: StillClock) -> None:
    study = half_done(store, tiny_space(**ALL_CLIMB), clock, 600.0)
    log(store, study, Closed("trials", "all 4 layouts were proposed"))
    assert time_left(store).seconds.high == 0


def test_budgets_on_quality_refuse_nobody_before_the_top() -> None:
    space = tiny_space(**ALL_CLIMB | {"budgets": [{"metric": "quality", "min": "0.9x"}]})
    bounded, free = (estimate(None, variant, 8, {}, 1) for variant in (space, tiny_space(**ALL_CLIMB)))
    assert bounded.seconds == free.seconds
    assert "budgets on quality (assumed to be kept by all that reach the top rung)" in bounded.depends_on
    assert not any("keep their budgets" in condition for condition in bounded.depends_on)


def test_hours_limit_the_proposals() -> None:
    limited = tiny_space(**ALL_CLIMB, search=TINY["search"] | {"stop": {"hours": 0.25}})
    spaces = (tiny_space(**ALL_CLIMB), limited)
    whole, part = (estimate(None, space, 1000, {}, workers=1).seconds.typical for space in spaces)
    assert whole > 3 * 3600
    assert 0.2 * 3600 < part < 0.35 * 3600


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3, "5 s"),
        (42, "40 s"),
        (80, "80 s"),
        (130, "2 min"),
        (1300, "20 min"),
        (3500, "1 h"),
        (7900, "2 h 10 min"),
        (50_000, "14 h"),
        (190_000, "2 d 5 h"),
    ],
)
def test_rough_durations_have_few_digits(seconds: float, text: str) -> None:
    assert show_duration(seconds, rough=True) == text


def test_a_range_in_words() -> None:
    assert Span(low=5400, typical=7800, high=10800).text == "about 2 h 10 min (1 h 30 min to 3 h)"
    assert Span(low=600, typical=600, high=600).text == "about 10 min"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path) -> None:
    RUNTIMES.add("fake", FakeRuntime(tmp_path))
