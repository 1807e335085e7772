"""How long a study takes: from stored durations, from guesses, and from its own pace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_support import StillClock, key
from study_support import TINY, tiny_space

from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.core.trial import EventKind
from nas.infra.store import events, results, studies, trials
from nas.infra.store.rows import NewTrial, Origin
from nas.infra.store.store import Store
from nas.measure.runtimes import RUNTIMES
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import Quality
from nas.search.study.estimate import Estimate, Span, _ladder, about, estimate, estimate_left, in_words
from nas.search.study.events import Calibrated, Closed, Launched, Note, QualityKnown
from nas.testing.fake_runtime import FakeRuntime

RUNGS = [{**rung, "keep": None} for rung in TINY["quality"]["rungs"]]
ALL_CLIMB: dict[str, Any] = {"budgets": [], "quality": TINY["quality"] | {"rungs": RUNGS}}
"""Changes of the tiny space after which every layout is screened, trained and confirmed."""
STEPS = 6 + 6 + 12 + 24
"""That are trained of one layout: two rungs, and of the third the seed that is resumed and the one that begins."""
PATH = (EventKind.EXPORTED, EventKind.MEASURING, EventKind.GATED_IN, EventKind.TRAINING, EventKind.CONFIRMING)


def begin(store: Store, space: SearchSpace, name: str, trials: int) -> int:
    study = studies.create(store, name, space.model_dump(mode="json"), seed=0, version="0").id
    log(store, study, Launched(trials))
    log(store, study, Calibrated("local", "fake", "box", "build", 1.0))
    return study


def log(store: Store, study: int, note: Note) -> None:
    events.append(store, study, note.to_json())


def complete(
    store: Store, study: int, space: SearchSpace, layout: Layout, origin: Origin, *, run_s: float, train_s: float
) -> int:
    """Adds a trial whose repetitions took `run_s`, its trainings `train_s` in all, its export 1 s, its check 2 s."""
    number = trials.propose(store, study, [NewTrial(layout.to_json(), layout.id, origin)])[0].number
    use = (study, number)
    for kind in PATH:
        trials.add_event(store, study, number, kind, {"rung": 2} if kind is EventKind.TRAINING else {})
    workload = space.workloads["chat"].model_dump(mode="json")
    for repetitions in (2, 3):
        value = {"device": "box", "runtime": "fake", "workload": workload, "figures": {"ttft": {"n": repetitions}}}
        name = key("measure", study, number, repetitions)
        results.put(store, name, "measure", {"value": value}, seconds=run_s * repetitions, trial=use)
    rungs = _ladder(space.quality, layout, CorpusRef(source="default", hash="0" * 64))
    works = {name: training.work for rung in rungs for name, training in rung.items()}
    for name, work in works.items():
        spent = train_s * work / sum(works.values())
        results.put(store, name, "train", {"value": {}}, seconds=spent, trial=use)
    results.put(store, key("export", study, number), "export", {"value": {}}, seconds=1.0, trial=use)
    results.put(store, key("gate", study, number), "gate", {"value": {}}, seconds=2.0, trial=use)
    trials.add_event(store, study, number, EventKind.COMPLETE, {})
    return number


def known(store: Store, space: SearchSpace, name: str = "earlier", *, run_s: float = 3.0, train_s: float = 48.0) -> int:
    """A study of which both references are complete."""
    study = begin(store, space, name, trials=4)
    for layout in space.references.layouts().values():
        complete(store, study, space, layout, "reference", run_s=run_s, train_s=train_s)
    return study


def variants(count: int) -> list[Layout]:
    """Layouts of nearly the size of the references."""
    return [Layout.parse(f"d128 v256 ffn=swiglu:{320 + 32 * n} [C3 A2/1 C3]") for n in range(1, count + 1)]


def seconds(found: Estimate) -> dict[str, float]:
    return {part.name: part.seconds.typical for part in found.parts}


def test_stored_durations_times_the_plan(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    known(store, space)
    found = estimate(store, space, 4, {"local": "box"}, workers=1)
    parts = seconds(found)
    # 4 trials with 2 repetitions, and 2 references with 3; they take about as long as the stored references.
    assert parts["screen"] == pytest.approx((4 * 2 + 2 * 3) * 3.0, rel=0.05)
    assert parts["training"] == pytest.approx(6 * STEPS, rel=0.05)
    assert parts["confirm"] == pytest.approx(4 * 3 * 3.0 + 6 * 2.0, rel=0.05)
    assert parts["export"] == pytest.approx(6 * 1.0)
    assert found.seconds.typical == pytest.approx(sum(parts.values()))
    assert found.seconds.low <= found.seconds.typical <= found.seconds.high
    assert found.based_on == ["4 measurements of this device", "8 trainings of this database"]
    assert "guess" not in str(found.based_on)


def test_workers_share_the_trainings(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    known(store, space)
    one, two = (seconds(estimate(store, space, 4, {"local": "box"}, workers=n)) for n in (1, 2))
    assert two["training"] == pytest.approx(one["training"] / 2)
    assert two["screen"] == one["screen"]


def test_another_device_is_measured_while_proxies_are_trained(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB, devices=["box"])
    known(store, tiny_space(**ALL_CLIMB))
    found = estimate(store, space, 4, {"local": "here", "box": "box"}, workers=1)
    parts = seconds(found)
    assert found.seconds.typical < sum(parts.values())
    assert found.seconds.typical - parts["waiting"] == pytest.approx(
        parts["calibration"] + parts["training"] + parts["export"] + 12.0
    )


def test_budgets_on_quality_refuse_nobody_before_the_top(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB | {"budgets": [{"metric": "quality", "min": "0.9x"}]})
    found, free = (estimate(None, each, 8, {}, 1) for each in (space, tiny_space(**ALL_CLIMB)))
    assert found.seconds == free.seconds
    assert "budgets on quality (assumed to be kept by all that reach the top rung)" in found.depends_on
    assert not any("keep their budgets" in each for each in found.depends_on)


def test_guesses_are_called_guesses(store: Store) -> None:
    for database in (None, store):
        found = estimate(database, tiny_space(), 4, {"local": "box"}, workers=1)
        assert found.based_on == [
            "a guess for local: nothing was measured there yet",
            "a guess for trainings: nothing was trained here yet",
        ]
        assert found.seconds.high > 2 * found.seconds.typical


def test_measurements_of_another_device_do_not_count(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    known(store, space)
    found = estimate(store, space, 4, {"local": "another"}, workers=1)
    assert found.based_on[0] == "a guess for local: nothing was measured there yet"


def test_anchors_and_fresh_seeds_are_counted(store: Store) -> None:
    settings = {"anchors": {"layouts": 3, "seeds": [10, 11, 12]}, "rescore": {"seeds": [20, 21]}}
    space = tiny_space(**ALL_CLIMB | {"quality": ALL_CLIMB["quality"] | settings})
    known(store, tiny_space(**ALL_CLIMB))
    parts = seconds(estimate(store, space, 4, {"local": "box"}, workers=1))
    # A step takes a second. 3 + 2 layouts are trained on 3 seeds, each for 24 steps in all.
    assert parts["anchors"] == pytest.approx(5 * 3 * 24, rel=0.05)
    # Half of 4 candidates and 2 references, on 2 fresh seeds from the start.
    assert parts["re-score"] == pytest.approx((2 + 2) * 2 * 24, rel=0.05)


def test_fresh_seeds_that_were_trained_are_not_counted_again(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB | {"quality": ALL_CLIMB["quality"] | {"rescore": {"seeds": [20, 21]}}})
    study = known(store, space, "now")
    for layout in variants(4):
        last = complete(store, study, space, layout, "proposal", run_s=3.0, train_s=48.0)
    log(store, study, Closed("trials", "4 layouts were proposed"))
    left = []
    config, corpus = space.quality.with_seeds((20, 21)), CorpusRef(source="default", hash="0" * 64)
    for layout in (None, *space.references.layouts().values(), *variants(2)):
        for job in rung_jobs(config, 2, layout, corpus) if layout else []:
            results.put(store, job.key, "train", {"value": {}}, seconds=24.0, trial=(study, last))
        found = estimate_left(store, studies.get(store, "now"), workers=1)
        assert found is not None
        left.append(round(seconds(found).get("re-score", 0.0)))
    # Half of 4 candidates and 2 references, then one fewer each time.
    assert left[-2] > 0
    assert left == pytest.approx([number * left[-2] for number in (4, 3, 2, 1, 0)], rel=0.05)


def test_a_study_half_done_is_estimated_by_its_own_durations(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    known(store, tiny_space(**ALL_CLIMB | {"quality": ALL_CLIMB["quality"] | {"lr": 1e-3}}), run_s=99, train_s=999)
    study = known(store, space, "now", run_s=6.0, train_s=80.0)
    for layout in variants(2):
        complete(store, study, space, layout, "proposal", run_s=6.0, train_s=80.0)
    found = estimate_left(store, studies.get(store, "now"), workers=1)
    assert found is not None
    parts = seconds(found)
    assert "calibration" not in parts
    assert parts["screen"] == pytest.approx(2 * 2 * 6.0, rel=0.1)
    assert parts["training"] == pytest.approx(2 * 80.0, rel=0.1)
    assert found.based_on[0] == "8 measurements of this device"


def test_its_pace_corrects_the_sum_of_its_work(store: Store, clock: StillClock) -> None:
    space = tiny_space(**ALL_CLIMB)
    study = known(store, space, "now")
    for layout in variants(3):
        complete(store, study, space, layout, "proposal", run_s=3.0, train_s=48.0)
    as_planned = 5 * ((2 + 3) * 3.0 + 48.0 + 1.0 + 2.0)
    log(store, study, Launched(4))
    clock.sleep(2 * as_planned)
    log(store, study, Calibrated("local", "fake", "box", "build", 1.0))
    found = estimate_left(store, studies.get(store, "now"), workers=1)
    assert found is not None and "the pace of this study so far" in found.based_on
    assert seconds(found)["training"] == pytest.approx(2 * 48.0, rel=0.1)


def test_little_is_left_once_all_have_ended(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    study = known(store, space, "now")
    log(store, study, Closed("trials", "all 0 layouts were proposed"))
    found = estimate_left(store, studies.get(store, "now"), workers=1)
    assert found is not None and found.seconds.high == 0


def test_a_finished_rung_of_a_waiting_trial_is_not_counted_again(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    study = known(store, space, "now")
    log(store, study, Closed("trials", "1 layout was proposed"))
    (layout,) = variants(1)
    trial = trials.propose(store, study, [NewTrial(layout.to_json(), layout.id, "proposal")])[0].number
    for kind in (*PATH[:3], EventKind.TRAINING):
        trials.add_event(store, study, trial, kind, {"rung": 0} if kind is EventKind.TRAINING else {})
    left = estimate_left(store, studies.get(store, "now"), workers=1)
    note = QualityKnown(0, Quality(rung="first", value=1.0, per_group={}, sd=0.1, n_seeds=1))
    trials.add_event(store, study, trial, EventKind.PROGRESS, note.to_json())
    after = estimate_left(store, studies.get(store, "now"), workers=1)
    assert left is not None and after is not None
    assert seconds(left)["training"] - seconds(after)["training"] == pytest.approx(6.0, rel=0.1)


def test_hours_limit_the_proposals(store: Store) -> None:
    space = tiny_space(**ALL_CLIMB)
    known(store, space)
    limited = tiny_space(**ALL_CLIMB, search=TINY["search"] | {"stop": {"hours": 0.25}})
    found = [estimate(store, each, 1000, {"local": "box"}, workers=1).seconds.typical for each in (space, limited)]
    assert found[0] > 10 * 3600
    assert 0.2 * 3600 < found[1] < 0.35 * 3600


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "5 s"), (42, "40 s"), (80, "80 s"), (130, "2 min"), (1300, "20 min"), (3500, "1 h"), (7900, "2 h 10 min"),
     (50_000, "14 h"), (190_000, "2 d 5 h")],
)  # fmt: skip
def test_durations_have_few_digits(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_a_range_in_words() -> None:
    assert in_words(Span(low=5400, typical=7800, high=10800)) == "about 2 h 10 min (1 h 30 min to 3 h)"
    assert in_words(Span(low=600, typical=600, high=600)) == "about 10 min"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path) -> None:
    RUNTIMES.add("fake", FakeRuntime(tmp_path))
