"""Whole searches: real agent and database, a fake runtime; the live study is a process, interrupted on Ray.

Whole studies on Ray are in test_study_kill.py and test_compute_cluster.py.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_lab import LIMIT_S, NAS, WITHOUT_RAY, Lab, finish

from nas.core.errors import NasError
from nas.core.space import SearchSpace
from nas.infra.store import jobs, results, studies, trials
from nas.infra.store.rows import StudyState
from nas.search.study.events import all_events
from nas.search.study.proposals import replay
from tests.support.waiting import until

TRIALS = 6
Report = dict[str, Any]
NOT_BEGUN = ("no database", "no study")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("search"), program=WITHOUT_RAY)


@pytest.fixture(scope="module")
def first(lab: Lab) -> Report:
    """A finished study; one that an earlier try of this fixture began is resumed."""
    has_begun = state(lab, "first") not in NOT_BEGUN
    report: Report = lab.json_here(*lab.launch("first", "--trials", str(TRIALS), *(["--resume"] if has_begun else [])))
    return report


@pytest.fixture
def done_by_first(lab: Lab, first: Report) -> set[str]:
    return keys(lab)


def keys(lab: Lab) -> set[str]:
    store = lab.store()
    try:
        with store.read() as connection:
            return set(connection.exec_driver_sql("SELECT result_key FROM result").scalars())
    finally:
        store.close()


def state(lab: Lab, study: str) -> str:
    try:
        store = lab.store()
    except NasError:
        return "no database"
    try:
        return studies.get(store, study).state.value
    except NasError:
        return "no study"
    finally:
        store.close()


def test_a_launch_ends_with_a_consistent_report(lab: Lab, first: Report) -> None:
    assert first["state"] == "complete"
    counts = first["trials"]
    assert counts["proposed"] == TRIALS
    assert counts["running"] == counts["failed"] == 0
    assert sum(counts.values()) == 2 * TRIALS
    assert {row["name"] for row in first["references"]} == {"published", "attention"}
    assert counts["complete"] == len(first["ranking"])
    assert first["front"]
    assert first["hypervolume"] is not None
    assert first["stage_seconds"]["train"] > 0
    assert first["stage_seconds"]["measure"] > 0
    assert lab.json_here("study", "show", "first") == first
    assert {path.name for path in (lab.home / "studies" / "first").iterdir()} >= {"front.png", "front.svg"}


def test_nothing_is_left_to_do_and_the_log_replays(lab: Lab, first: Report) -> None:
    store = lab.store()
    study = studies.get(store, "first")
    rows, log = trials.all(store, study.id), all_events(store, study.id)
    assert [row.number for row in rows] == list(range(TRIALS + 2))
    assert jobs.live(store) == []
    space = SearchSpace.model_validate(study.space)
    assert replay(space, lambda layout: True, rows, log) == []
    with store.read() as connection:
        firsts = Counter(connection.exec_driver_sql("SELECT result_key FROM result_use WHERE first").scalars())
    assert set(firsts.values()) == {1}
    assert not list((lab.home / "work" / "exports").glob("*/*")), "exports were moved into the store"
    store.close()


def test_another_study_of_the_space_repeats_no_stage(lab: Lab, first: Report, done_by_first: set[str]) -> None:
    second = lab.json_here(*lab.launch("second", "--trials", str(TRIALS)))
    assert keys(lab) == done_by_first
    seconds = second["stage_seconds"]
    assert [seconds[stage] for stage in ("export", "measure", "train")] == [0.0, 0.0, 0.0]
    assert [row["layout_id"] for row in second["ranking"]] == [row["layout_id"] for row in first["ranking"]]
    assert second["hypervolume"] == pytest.approx(first["hypervolume"])


def test_a_study_s_name_is_not_taken_twice(lab: Lab, first: Report) -> None:
    assert "a study named 'first' exists" in lab.run_here(*lab.launch("first"), code=3).err


@pytest.fixture
def live(lab: Lab) -> Iterator[Any]:
    """A study that will not be finished for a while."""
    lab.space("other", search={"proposer": "random", "seeds": 0, "seed": 7})
    with lab.start(*lab.launch("live", "--trials", "300", space="other")) as process:
        until(lambda: state(lab, "live") == "running", LIMIT_S)
        yield process
        process.kill()


def test_a_live_study_is_paused_resumed_and_stopped_from_outside(lab: Lab, live: Any) -> None:
    busy = lab.run_here(*lab.launch("live", "--resume", space="other"), code=4)
    assert "is run by" in busy.err
    lab.run_here("study", "pause", "live")
    until(lambda: state(lab, "live") == "paused", LIMIT_S)
    refused = lab.run_here(*lab.launch("live", "--resume", space="other"), code=4)
    assert "it was paused, and now continues" in refused.err
    until(lambda: state(lab, "live") == "running", LIMIT_S)
    lab.run_here("study", "stop", "live")
    stopped = finish(live)
    assert "--study live --resume" in stopped.stderr
    assert state(lab, "live") == "stopped"
    assert lab.json_here("study", "show", "live")["state"] == StudyState.STOPPED
    with replace(lab, program=NAS).start(*lab.launch("live", "--resume", space="other")) as interrupted:
        until(lambda: state(lab, "live") == "running", LIMIT_S)
        interrupted.send_signal(signal.SIGINT)
        finish(interrupted, code=130)
    assert state(lab, "live") == "stopped"
    store = lab.store()
    assert jobs.live(store) == []
    assert results.summaries(store, studies.get(store, "live").id) is not None
    store.close()


def test_a_fresh_home_is_made(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    assert "no database" in lab.run_here("study", "show", "x", code=3).err
