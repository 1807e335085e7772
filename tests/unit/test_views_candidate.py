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
    (found,) = candidate_views(bed.store, snapshot(bed.store), complete[-1:])
    return found


def test_every_trial_has_a_view_in_plain_json(bed: Bed) -> None:
    numbers = [row.number for row in trials.all(bed.store, 1)]
    views = candidate_views(bed.store, snapshot(bed.store), numbers)
    assert [each.trial for each in views] == numbers
    for each in views:
        assert CandidateView.model_validate(json.loads(each.model_dump_json(by_alias=False))) == each
        row = trials.get(bed.store, 1, each.trial)
        assert (each.state, each.layout.id, each.reason) == (row.status.state, row.layout_id, row.status.reason)
    assert [each.name for each in views[:2]] == ["published", "attention"]


def test_objectives_stand_beside_the_references(view: CandidateView, bed: Bed) -> None:
    record = read_study(bed.store, "study")
    assert [each.name for each in view.objectives] == ["quality", "latency", "memory"]
    for index, each in enumerate(view.objectives):
        for name, reference in record.references.items():
            axis = reference.axes[index]
            assert axis is not None and each.references[name] == axis.value
    assert view.objectives[0].rung == "third" and view.objectives[1].rung is None


def test_qualities_are_compared_at_the_rung_that_was_reached(bed: Bed) -> None:
    stopped = [row.number for row in trials.all(bed.store, 1, states=[TrialState.STOPPED])]
    assert stopped
    for each in candidate_views(bed.store, snapshot(bed.store), stopped):
        last = [row for row in each.evaluations if not row.group][-1]
        assert each.objectives[0].rung == last.rung != "third"
        assert each.objectives[0].value == last.value
        assert each.objectives[0].references == last.references
        assert last.references["published"] == pytest.approx(1.0)


def test_places_carry_every_token_s_time(view: CandidateView) -> None:
    (place,) = view.measurements
    assert place.name == "chat on local/fake"
    assert len(place.repetitions) == TINY["protocol"]["confirm_repetitions"]
    assert all(len(each.token_ms) == TINY["workloads"]["chat"]["gen"] for each in place.repetitions)
    latency = view.objectives[1]
    assert place.ratios["latency"] == pytest.approx(latency.value / latency.references["published"])  # type: ignore[operator]
    assert place.artifact in {each.sha256 for each in view.artifacts if each.scale == "deploy"}


def test_artifacts_are_told_with_their_hashes(view: CandidateView) -> None:
    assert {each.scale for each in view.artifacts} == {"deploy", "proxy"}
    assert all(each.present and len(each.sha256) == 64 for each in view.artifacts)


def test_trainings_are_told_by_rung_and_seed(view: CandidateView) -> None:
    assert [(each.rung, each.run, each.seed, each.steps) for each in view.trainings] == [
        ("first", "lm", 0, 6), ("second", "lm", 0, 12), ("third", "lm", 0, 24), ("third", "lm", 1, 24)
    ]  # fmt: skip


def test_without_a_note_of_the_corpus_seeds_are_not_known_but_rungs_are(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.run(1)
    (found,) = candidate_views(bed.store, snapshot(bed.store), [0])
    assert {each.rung for each in found.trainings} == {"first", "second", "third"}
    assert {each.seed for each in found.trainings} == {None}


def test_ancestors_are_told_nearest_first(bed: Bed) -> None:
    children = [row for row in trials.all(bed.store, 1) if row.parents]
    assert children
    for row in children:
        (each,) = candidate_views(bed.store, snapshot(bed.store), [row.number])
        assert [found.trial for found in each.ancestors if found.generations == 1] == list(row.parents)
        generations = [found.generations for found in each.ancestors]
        assert generations == sorted(generations)
        assert len({found.trial for found in each.ancestors}) == len(generations)


def test_commands_name_the_layout_and_the_workload(view: CandidateView) -> None:
    bench, profile, export = (shlex.split(each.command) for each in view.commands)
    assert profile == [*bench[: bench.index("--reps")], "--reps", "2", "--profile", "--trial", f"study/{view.trial}"]
    assert bench[:2] == ["nas", "bench"] and Layout.parse(bench[2]).id == view.layout.id
    assert bench[bench.index("--prompt") + 1] == "64" and bench[bench.index("--gen") + 1] == "16"
    assert export[:2] == ["nas", "export"] and export[export.index("--seed") + 1] == "0"
    assert view.commands[0].beside == ()


def test_what_a_command_cannot_say_is_told_beside_it(tmp_path: Path) -> None:
    space = tiny_space(workloads={"chat": {"prompt": 64, "gen": 16, "kv_type": "q8_0"}})
    bed = bed_of(tmp_path, space)
    bed.run(1)
    (found,) = candidate_views(bed.store, snapshot(bed.store), [0])
    assert found.commands[0].beside == ("kv_type q8_0",)


def test_unknown_trials_are_refused(bed: Bed) -> None:
    with pytest.raises(UnknownName):
        candidate_views(bed.store, snapshot(bed.store), [999])


def test_several_candidates_stand_side_by_side(bed: Bed, complete: list[int]) -> None:
    numbers = [0, *complete[:2]]
    found = comparison_view(bed.store, snapshot(bed.store), numbers)
    assert [each.trial for each in found.candidates] == numbers
    for place, each in enumerate(found.candidates):
        assert [row.layers[place] for row in found.rows if row.layers[place] is not None] == list(
            range(len(each.layout.layers))
        )
    assert any(row.differs for row in found.rows)
    latency = next(row for row in found.figures if row.metric == "latency")
    assert [figure.value if figure else None for figure in latency.figures] == [
        each.measurements[0].figures["latency"].value for each in found.candidates
    ]
    quality = next(row for row in found.evaluations if (row.rung, row.group) == ("third", ""))
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
    found = forecasts.of_trial("study", 2).forecasts
    assert [(each.metric, each.measurements) for each in found] == [(each.metric, each.measurements) for each in models]
    for each, model in zip(found, models, strict=True):
        told = next((row for row in model.candidates if row.trial == 2), None)
        assert (each.predicted, each.measured) == ((told.predicted, told.measured) if told else (None, None))
        assert (each.reason is None) == (told is not None)
    assert forecasts.of_trial("study", 2).forecasts == found


def test_a_large_study_s_models_are_not_fitted_for_a_page(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.serve.views.candidate.MOST_TRIALS", 3)
    told = Forecasts(Snapshots(bed.store)).of_trial("study", 2)
    assert told.forecasts == () and told.reason is not None and "nas study hardware study" in told.reason
