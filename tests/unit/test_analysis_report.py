"""What `nas study show --json` is made of."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from study_support import DEVICE, TINY, Bed, bed_of

from nas.core.errors import UnknownName
from nas.core.layout import Layout
from nas.core.pareto import hypervolume
from nas.core.trial import TrialState
from nas.infra.store import events, trials
from nas.search.analysis.record import read_study
from nas.search.analysis.report import study_report
from nas.search.proposers import Observation
from nas.search.study.events import Calibrated

TRIALS = 6
Report = dict[str, Any]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("report")
    bed = bed_of(folder)
    bed.run(TRIALS)
    return bed


@pytest.fixture(scope="module")
def report(bed: Bed) -> Report:
    return study_report(bed.store, "study")


def test_it_is_plain_json(report: Report) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_it_names_the_study_and_counts_its_trials(report: Report, bed: Bed) -> None:
    assert (report["study"], report["state"], report["space"]["name"]) == ("study", "complete", "tiny")
    counts = report["trials"]
    assert {"proposed", "complete", "infeasible", "stopped", "failed", "running"} <= counts.keys()
    assert counts["proposed"] == TRIALS
    assert sum(counts.values()) == 2 * TRIALS
    states = [row.status.state for row in trials.all(bed.store, 1) if row.origin != "reference"]
    assert counts["complete"] == states.count(TrialState.COMPLETE)


def test_objectives_say_what_their_numbers_mean(report: Report) -> None:
    expected = {"name", "metric", "aggregate", "device", "runtime", "workload", "direction", "unit", "transform"}
    assert all(objective.keys() == expected for objective in report["objectives"])
    by_name = {objective["name"]: objective for objective in report["objectives"]}
    assert (by_name["quality"]["direction"], by_name["quality"]["transform"]) == ("max", "linear")
    latency = by_name["latency"]
    assert (latency["unit"], latency["workload"], latency["aggregate"]) == ("ms", "chat", None)


def test_budgets_are_told_in_units_and_as_written(report: Report) -> None:
    reference = next(row for row in report["references"] if row["name"] == "published")
    (measurement,) = reference["measurements"]
    for budget, factor in zip(report["budgets"], (2.0, 1.6), strict=True):
        assert budget["limit"] == pytest.approx(factor * measurement["figures"][budget["metric"]]["value"])
        assert budget["ratio"] == pytest.approx(factor)
        assert (budget["written"], budget["device"], budget["runtime"]) == (f"{factor:g}x", "local", "fake")


def test_every_row_carries_what_it_rests_on(report: Report) -> None:
    expected = {
        "trial", "layout_id", "layout", "objectives", "rank", "hv_contribution", "p_front", "ties", "params",
        "measurements", "quality",
    }  # fmt: skip
    rows = [*report["ranking"], *report["references"]]
    assert report["ranking"]
    for row in rows:
        assert expected <= row.keys()
        assert Layout.parse(row["layout"]).id == row["layout_id"]
        assert row["params"].keys() == {"total", "active", "non_embedding"}
        (measurement,) = row["measurements"]
        assert len(measurement["repetitions"]) == TINY["protocol"]["confirm_repetitions"]
        assert all(rep["sample"]["decode_ns"] for rep in measurement["repetitions"])
        assert measurement["place"] == {"device": "local", "runtime": "fake", "workload": "chat"}
        assert row["objectives"]["latency"] == pytest.approx(measurement["figures"]["latency"]["value"])
        assert row["objectives"]["quality"] == pytest.approx(row["quality"]["value"])
        assert row["quality"]["rung"] == "third"


def test_the_front_is_the_ranking_s_head_and_makes_the_hypervolume(report: Report) -> None:
    front, ranking = report["front"], report["ranking"]
    assert front == ranking[: len(front)]
    assert [row["rank"] for row in ranking] == sorted(row["rank"] for row in ranking)
    assert {row["rank"] for row in front} == {0}
    names = [objective["name"] for objective in report["objectives"]]
    points = [[row["coordinates"][name] for name in names] for row in front]
    corner = [report["reference_point"][name] for name in names]
    assert report["hypervolume"] == pytest.approx(hypervolume(points, corner))


def test_the_reference_point_is_made_of_budgets_and_the_attention_reference(report: Report) -> None:
    attention = next(row for row in report["references"] if row["name"] == "attention")
    point = report["reference_point"]
    assert point["memory"] == pytest.approx(math.log(2.0))
    assert point["quality"] == pytest.approx(-(attention["quality"]["value"] - 3 * attention["quality"]["sd"]))


def test_the_published_reference_is_the_unit(report: Report) -> None:
    published = next(row for row in report["references"] if row["name"] == "published")
    assert published["quality"]["value"] == pytest.approx(1.0)
    assert published["coordinates"]["latency"] == pytest.approx(0.0)
    assert {row["name"] for row in report["references"]} == {"published", "attention"}
    numbers = {row["trial"] for row in report["references"]}
    assert numbers.isdisjoint(row["trial"] for row in report["ranking"])


def test_hypervolume_has_an_interval_and_a_history(report: Report) -> None:
    interval = report["hypervolume_ci95"]
    assert interval["hypervolume"] == pytest.approx(report["hypervolume"])
    assert interval["low"] <= interval["high"]
    history = report["history"]
    assert [moment["complete"] for moment in history] == list(range(1, report["trials"]["complete"] + 1))
    reached = [moment["hypervolume"] for moment in history]
    assert reached == sorted(reached)
    assert reached[-1] == pytest.approx(report["hypervolume"])
    assert [moment["elapsed_s"] for moment in history] == sorted(moment["elapsed_s"] for moment in history)


def test_why_a_study_ended_is_told(report: Report) -> None:
    assert report["ended"] == {"rule": "trials", "message": f"all {TRIALS} layouts were proposed"}
    assert report["expected_gain"] is None  # evolution tells none


def test_seconds_are_told_by_stage(report: Report) -> None:
    assert {"export", "measure", "train", "propose"} <= report["stage_seconds"].keys()
    assert report["stage_seconds"]["train"] > 0
    assert report["stage_seconds"]["measure"] > 0


def test_whatever_became_of_a_trial_is_told_as_the_proposer_was(report: Report, bed: Bed) -> None:
    observations = report["told"]
    assert [row["trial"] for row in observations] == [trial.number for trial in trials.all(bed.store, 1)]
    counts = Counter(row["status"] for row in observations if row["origin"] != "reference")
    assert counts == {state: count for state, count in report["trials"].items() if count and state != "proposed"}
    ranked = {row["trial"]: row for row in report["ranking"]}
    assert 0 < len(ranked) < len(observations) - len(report["references"])
    for row in observations:
        observation = Observation.from_json(row | {"layout": Layout.parse(row["layout"]).to_json()})
        if row["trial"] in ranked:
            assert observation.objectives == ranked[row["trial"]]["coordinates"]
        assert 0 <= row["after_s"] <= report["elapsed_s"]
    spent = [row["stage_seconds"].get("train", 0.0) for row in observations]
    assert sum(spent) == pytest.approx(report["stage_seconds"]["train"])


def test_before_the_references_are_done_there_is_no_hypervolume(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)

    def enough(stage: str, spec: Mapping[str, Any]) -> None:
        if stage == "train" and spec["jobs"][0]["steps"] == 24:
            raise ZeroDivisionError

    bed.compute.fail = enough
    with pytest.raises(ZeroDivisionError):
        bed.run(3)
    report = study_report(bed.store, "study")
    assert report["hypervolume"] is None
    assert report["reference_point"] is None
    assert report["front"] == report["ranking"] == []
    json.dumps(report, allow_nan=False)


def test_one_device_under_two_names_is_reported_under_both(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.run(1)
    events.append(bed.store, 1, {"what": Calibrated.what, "id": DEVICE.id, "device": "laptop"})
    record = read_study(bed.store, "study")
    assert {place.device for row in record.records.values() for place in row.measurements} == {"local", "laptop"}


def test_an_unknown_study_is_refused_with_the_nearest(bed: Bed) -> None:
    with pytest.raises(UnknownName, match="did you mean 'study'"):
        study_report(bed.store, "studdy")


def test_the_noise_of_its_measurements_is_told_in_a_line(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.jobs.foreign_cpu = 0.9
    bed.ledger()
    assert study_report(bed.store, "study")["noise"] is None
    bed.run(1)
    noise = study_report(bed.store, "study")["noise"]
    assert noise["foreign_cpu"] == pytest.approx(0.9)
    assert 0.01 < noise["interval"] < 0.15
    assert noise["text"] == (
        f"measured while other processes used 0.9 of a core; intervals ±{100 * noise['interval']:.1f} % (median)"
    )


def test_what_ran_beside_a_few_measurements_is_told_too(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.ledger()
    bed.jobs.foreign_cpu = 0.1
    bed.run(3)
    bed.jobs.foreign_cpu = 1.7
    bed.run(4)
    noise = study_report(bed.store, "study")["noise"]
    assert (noise["foreign_cpu"], noise["most_foreign_cpu"]) == (pytest.approx(0.1), pytest.approx(1.7))
    assert noise["text"].startswith("measured while other processes used 0.1 of a core (at most 1.7); intervals")
