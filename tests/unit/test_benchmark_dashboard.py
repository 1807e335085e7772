"""The studies that the dashboard's benchmark makes are such as a search could have left."""

from __future__ import annotations

import pytest
from store_support import open_store

from benchmarks.dashboard.candidates import Judge
from benchmarks.dashboard.maker import FLYING, Orchestrator, add_study
from nas.core.measurement import Measurement
from nas.core.trial import TERMINAL, derive
from nas.infra.store import results, trials
from nas.infra.store.store import Store
from nas.search.analysis.snapshot import Snapshots
from nas.search.study.events import all_events
from nas.serve.views.study import points

TRIALS = 120


@pytest.fixture(scope="module")
def made_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, int]:
    folder = tmp_path_factory.mktemp("made_study")
    store = open_store(folder)
    file = folder / "study.jsonl"
    return store, add_study(store, "many", Judge(), file, trials=TRIALS, seed=0, running=True)


def test_trials_end_in_many_ways_and_the_last_have_not_ended(made_study: tuple[Store, int]) -> None:
    store, study = made_study
    states = {trial.number: trial.status.state for trial in trials.all(store, study)}
    assert len(states) == TRIALS + 2
    assert {"complete", "infeasible", "stopped"} < set(states.values())
    going_on = [number for number, state in states.items() if state not in TERMINAL]
    assert going_on and min(going_on) >= TRIALS + 2 - FLYING
    log = all_events(store, study)
    for number in (0, 1, 5, TRIALS):
        assert derive(event for event in log if event.trial == number).state is states[number]
    measured = [Measurement.model_validate(result.payload["value"]) for result in results.of_trial(store, study, 0)]
    assert {measurement.device for measurement in measured} == {"phone-3f1c", "laptop-90b2"}


def test_one_more_trial_is_news_to_a_viewer(made_study: tuple[Store, int]) -> None:
    store, study = made_study
    snapshots = Snapshots(store)
    before = points(snapshots.get("many"))
    assert before.hypervolume and before.front
    number = Orchestrator(store, study, Judge()).add()
    assert points(snapshots.get("many"), before.revision).columns.trial == [number]
