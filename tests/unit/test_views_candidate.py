"""What is shown of one candidate and of several side by side, on a study that really ran."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from study_support import TINY, Bed, bed_of, snapshot, tiny_space

from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.trial import TrialState
from nas.infra.store import events, trials
from nas.search.analysis.hardware import hardware_report
from nas.search.analysis.record import read_study
from nas.search.analysis.snapshot import Snapshots
from nas.search.study.events import CorpusUsed
from nas.serve.views.candidate import CandidateView, Forecasts, Ratio, candidate_views, comparison_view

TRIALS = 6


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("candidate")
    bed = bed_of(folder)
    bed.run(TRIALS)
    events.append(bed.store, 1, {"what": CorpusUsed.what, "hash": "0" * 64, "versions": {}, "made_of": {}})
    return bed


@pytest.fixture(scope="module")
def complete(bed: Bed) -> list[int]:
    rows = trials.all(bed.store, 1, states=[TrialState.COMPLETE])
    return [row.number for row in rows if row.origin != "reference"]


@pytest.fixture(scope="module")
def view(bed: Bed, complete: list[int]) -> CandidateView:
    (candidate,) = candidate_views(bed.store, snapshot(bed.store), complete[-1:])
    return candidate


def test_every_trial_has_a_view_in_plain_json(bed: Bed) -> None:
    numbers = [row.number for row in trials.all(bed.store, 1)]
    views = candidate_views(bed.store, snapshot(bed.store), numbers)
    assert [candidate.trial for candidate in views] == numbers
    for candidate in views:
        assert CandidateView.model_validate(json.loads(candidate.model_dump_json(by_alias=False))) == candidate
        row = trials.get(bed.store, 1, candidate.trial)
        assert (candidate.state, candidate.layout.id, candidate.reason) == (
            row.status.state,
            row.layout_id,
            row.status.reason,
        )
    assert [candidate.name for candidate in views[:2]] == ["published", "attention"]


def test_objectives_stand_beside_the_references(view: CandidateView, bed: Bed) -> None:
    record = read_study(bed.store, "study")
    assert [objective.name for objective in view.objectives] == ["quality", "latency", "memory"]
    for index, objective in enumerate(view.objectives):
        for name, reference in record.references.items():
            axis = reference.axes[index]
            assert axis is not None and objective.references[name] == axis.value
    assert view.objectives[0].rung == "third" and view.objectives[1].rung is None


def test_qualities_are_compared_at_the_rung_that_was_reached(bed: Bed) -> None:
    stopped = [row.number for row in trials.all(bed.store, 1, states=[TrialState.STOPPED])]
    assert stopped
    for candidate in candidate_views(bed.store, snapshot(bed.store), stopped):
        last = [row for row in candidate.evaluations if not row.group][-1]
        assert candidate.objectives[0].rung == last.rung != "third"
        assert candidate.objectives[0].value == last.value
        assert candidate.objectives[0].references == last.references
        assert last.references["published"] == pytest.approx(1.0)


def test_places_carry_every_token_s_time(view: CandidateView) -> None:
    (place,) = view.measurements
    assert place.name == "chat on local/fake"
    assert len(place.repetitions) == TINY["protocol"]["confirm_repetitions"]
    assert all(len(repetition.token_ms) == TINY["workloads"]["chat"]["gen"] for repetition in place.repetitions)
    latency = view.objectives[1]
    assert place.ratios["latency"] == pytest.approx(latency.value / latency.references["published"])  # type: ignore[operator]
    assert place.artifact in {artifact.sha256 for artifact in view.artifacts if artifact.scale == "deploy"}


def test_artifacts_are_told_with_their_hashes(view: CandidateView) -> None:
    assert {artifact.scale for artifact in view.artifacts} == {"deploy", "proxy"}
    assert all(artifact.present and len(artifact.sha256) == 64 for artifact in view.artifacts)


def test_trainings_are_told_by_rung_and_seed(view: CandidateView) -> None:
    assert [(training.rung, training.run, training.seed, training.steps) for training in view.trainings] == [
        ("first", "lm", 0, 6), ("second", "lm", 0, 12), ("third", "lm", 0, 24), ("third", "lm", 1, 24)
    ]  # fmt: skip


def test_without_a_note_of_the_corpus_seeds_are_not_known_but_rungs_are(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.run(1)
    (candidate,) = candidate_views(bed.store, snapshot(bed.store), [0])
    assert {training.rung for training in candidate.trainings} == {"first", "second", "third"}
    assert {training.seed for training in candidate.trainings} == {None}


def test_ancestors_are_told_nearest_first(bed: Bed) -> None:
    children = [row for row in trials.all(bed.store, 1) if row.parents]
    assert children
    for row in children:
        (candidate,) = candidate_views(bed.store, snapshot(bed.store), [row.number])
        assert [ancestor.trial for ancestor in candidate.ancestors if ancestor.generations == 1] == list(row.parents)
        generations = [ancestor.generations for ancestor in candidate.ancestors]
        assert generations == sorted(generations)
        assert len({ancestor.trial for ancestor in candidate.ancestors}) == len(generations)


def test_commands_name_the_layout_and_the_workload(view: CandidateView) -> None:
    bench, profile, export = (shlex.split(command.command) for command in view.commands)
    assert profile == [*bench[: bench.index("--reps")], "--reps", "2", "--profile", "--trial", f"study/{view.trial}"]
    assert bench[:2] == ["nas", "bench"] and Layout.parse(bench[2]).id == view.layout.id
    assert bench[bench.index("--prompt") + 1] == "64" and bench[bench.index("--gen") + 1] == "16"
    assert export[:2] == ["nas", "export"] and export[export.index("--seed") + 1] == "0"
    assert view.commands[0].beside == ()


def test_what_a_command_cannot_say_is_told_beside_it(tmp_path: Path) -> None:
    space = tiny_space(workloads={"chat": {"prompt": 64, "gen": 16, "kv_type": "q8_0"}})
    bed = bed_of(tmp_path, space)
    bed.run(1)
    (candidate,) = candidate_views(bed.store, snapshot(bed.store), [0])
    assert candidate.commands[0].beside == ("kv_type q8_0",)


def test_unknown_trials_are_refused(bed: Bed) -> None:
    with pytest.raises(UnknownName):
        candidate_views(bed.store, snapshot(bed.store), [999])


def test_several_candidates_stand_side_by_side(bed: Bed, complete: list[int]) -> None:
    numbers = [0, *complete[:2]]
    comparison = comparison_view(bed.store, snapshot(bed.store), numbers)
    assert [candidate.trial for candidate in comparison.candidates] == numbers
    for place, candidate in enumerate(comparison.candidates):
        assert [row.layers[place] for row in comparison.rows if row.layers[place] is not None] == list(
            range(len(candidate.layout.layers))
        )
    assert any(row.differs for row in comparison.rows)
    latency = next(row for row in comparison.figures if row.metric == "latency")
    assert [figure.value if figure else None for figure in latency.figures] == [
        candidate.measurements[0].figures["latency"].value for candidate in comparison.candidates
    ]
    quality = next(row for row in comparison.evaluations if (row.rung, row.group) == ("third", ""))
    assert quality.values[0] == pytest.approx(1.0) and quality.differences[0] == 0
    assert quality.differences[1] == pytest.approx(quality.values[1] - 1)  # type: ignore[operator]


def test_a_ratio_tells_apart_what_its_interval_does() -> None:
    assert not Ratio(value=1.1, low=0.9, high=1.3).apart
    assert Ratio(value=1.1, low=1.05, high=1.15).apart


@pytest.mark.parametrize("numbers", [[], [0], [0, 0], list(range(7))])
def test_two_to_six_different_trials_are_compared(bed: Bed, numbers: list[int]) -> None:
    with pytest.raises(InvalidInput, match="2 to 6 different trials"):
        comparison_view(bed.store, snapshot(bed.store), numbers)


def test_forecasts_are_those_of_the_study_s_hardware_models(bed: Bed) -> None:
    forecasts = Forecasts(Snapshots(bed.store))
    models = hardware_report(bed.store, "study").models
    assert any(model.candidates for model in models)
    predictions = forecasts.of_trial("study", 2).forecasts
    assert [(row.metric, row.measurements) for row in predictions] == [(row.metric, row.measurements) for row in models]
    for prediction, model in zip(predictions, models, strict=True):
        candidate = next((row for row in model.candidates if row.trial == 2), None)
        assert (prediction.predicted, prediction.measured) == (
            (candidate.predicted, candidate.measured) if candidate else (None, None)
        )
        assert (prediction.reason is None) == (candidate is not None)
    assert forecasts.of_trial("study", 2).forecasts == predictions


def test_a_large_study_s_models_are_not_fitted_for_a_page(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.serve.views.candidate.MOST_TRIALS", 3)
    answer = Forecasts(Snapshots(bed.store)).of_trial("study", 2)
    assert answer.forecasts == () and answer.reason is not None and "nas study hardware study" in answer.reason
