"""Slices change one knob and nothing else, and are what the search's model predicts of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from cli_runner import nas
from study_support import Bed, bed_of, tiny_space

from nas.core.layout import Layout
from nas.search.analysis.record import read_study
from nas.search.analysis.slices import Slice, slices, study_slices
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proposers import Sampler
from nas.search.proposers.ehvi import EhviSearch
from nas.search.proposers.surrogate import Forecast, Surrogate
from nas.serve.dashboard.pages import render
from nas.serve.views.effects import effects_view
from nas.testing.synthetic import OBJECTIVES, SyntheticProblem

PROBLEM = SyntheticProblem(0)
SEARCH = {"proposer": "ehvi", "seeds": 2, "pool": 16}
HEAD = "d512 v8192 ffn=swiglu:1152"
MIXED = Layout.parse(f"{HEAD} [C3*2 A16/4 C5 A16/8*2 C3 C7]")
CONVS = Layout.parse(f"{HEAD} [C7*8]")


class Counting:
    """Stands for a surrogate: forecasts the number of parameters in thousands, and half of it as the deviation."""

    def predict(self, layouts: Sequence[Layout]) -> tuple[Forecast, None]:
        counts = np.array([[layout.params.total / 1000] for layout in layouts])
        return Forecast(counts, counts / 2), None


def by_knob(*layouts: Layout) -> dict[str, Slice]:
    curves = slices(cast(Surrogate, Counting()), PROBLEM.space, dict(enumerate(layouts)), [MIXED, CONVS])
    return {curve.knob: curve for curve in curves}


def test_an_argument_is_set_in_all_blocks_of_its_kind_and_nothing_else_changes() -> None:
    along = by_knob(MIXED)["conv kernel"]
    assert along.values == (3, 5, 7)
    assert [layout.format() for layout in along.layouts[0]] == [
        f"{HEAD} [C{kernel}*2 A16/4 C{kernel} A16/8*2 C{kernel}*2]" for kernel in (3, 5, 7)
    ]
    widths = by_knob(MIXED)["swiglu width"]
    assert [layout.format().split()[2] for layout in widths.layouts[0]] == [
        f"ffn=swiglu:{width}" for width in (768, 1152, 1536, 2048)
    ]
    assert "gqa heads" not in by_knob(MIXED), "one choice"
    assert "moe width" not in by_knob(MIXED), "no layout has one"


def test_layers_of_a_kind_are_added_and_taken_away_at_even_places() -> None:
    along = by_knob(MIXED)["gqa layers"]
    assert along.values == (0, 1, 2, 3), "as many as were tried"
    assert [layout.format().partition("[")[2] for layout in along.layouts[0]] == [
        "C3*3 C5 C3*3 C7]",
        "C3*3 C5 A16/8 C3*2 C7]",
        "C3*2 A16/4 C5 C3 A16/8 C3 C7]",
        "C3*2 A16/4 C5 A16/8*2 C3 C7]",
    ]
    assert along.layouts[0][3] == MIXED, "at its own number a layout is itself"
    assert [layout.format().partition("[")[2] for layout in by_knob(CONVS)["gqa layers"].layouts[0]] == [
        "C7*8]", "C7*4 A16/8 C7*3]", "C7*2 A16/8 C7*3 A16/8 C7]", "C7 A16/8 C7*2 A16/8 C7 A16/8 C7]"
    ], "the commonest of those tried"  # fmt: skip


def test_a_slice_is_the_mean_of_its_layouts_in_the_mean_deviation() -> None:
    along = by_knob(MIXED, CONVS)["conv kernel"]
    counts = np.array([[layout.params.total / 1000 for layout in along.layouts[number]] for number in (0, 1)])
    assert along.mean[:, 0] == pytest.approx(counts.mean(axis=0))
    assert along.sd[:, 0] == pytest.approx(counts.mean(axis=0) / 2)


def test_they_follow_the_problem_that_the_model_was_told_of() -> None:
    search = EhviSearch(Sampler(PROBLEM.space), 0)
    rng = np.random.default_rng(7)
    observations = [PROBLEM.observe(search.sampler.draw(rng)) for _ in range(80)]
    for observation in observations:
        search.tell(observation)
    search.fix_reference_point(PROBLEM.reference_point)
    front = {
        number: observation.layout
        for number, observation in enumerate(observations)
        if observation.status == "complete"
    }
    curves = slices(
        search.surrogate(),
        PROBLEM.space,
        dict([*front.items()][:6]),
        [observation.layout for observation in observations],
    )
    along = {curve.knob: curve for curve in curves}["gqa kv_heads"]
    truth = np.array(
        [
            [[PROBLEM.truth(layout)[name] for name in ("quality", "decode", "memory")] for layout in layouts]
            for layouts in along.layouts.values()
        ]
    )
    truth[..., 1:] = np.log(truth[..., 1:])
    memory = OBJECTIVES.index("memory")
    assert (np.diff(along.mean[:, memory]) > 0).all(), "more heads, more cache"
    assert (np.abs(along.mean - truth.mean(axis=0)) < 3 * along.sd).all()


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("slices")
    bed = bed_of(folder, tiny_space(search=SEARCH))
    bed.run(4)
    return bed


def test_a_study_shows_those_that_change_an_objective_most(bed: Bed) -> None:
    study = StudySnapshot(read_study(bed.store, "study"))
    every, reason = study_slices(bed.store, study)
    view = effects_view(bed.store, study)
    assert reason is None and view.no_slices is None
    assert 0 < len(view.slices) <= 4 and {curve.knob for curve in view.slices} <= {curve.knob for curve in every}
    front = {row.trial for row in study.front if row.on}
    for curve in view.slices:
        assert set(curve.layouts) <= front
        assert [len(row) for row in curve.predicted] == [len(curve.values)] * len(view.objectives)
        assert all(at.low <= at.value <= at.high for row in curve.predicted for at in row)
    page = render("study_effects.html", view=view)
    assert page.count('<details class="slice"') == len(view.slices)
    assert page.count("data-plot") == len(view.slices) * len(view.objectives)


def test_the_command_prints_a_row_for_each_value(bed: Bed) -> None:
    view = effects_view(bed.store, StudySnapshot(read_study(bed.store, "study")))
    effects, _, rows = nas("study", "effects", "study", "--db", str(bed.store.engine.url)).out.partition("\n\n")
    assert len(effects.splitlines()) == 1 + len(view.knobs)
    assert view.slices
    assert [line.split("\t")[:2] for line in rows.splitlines()[1:]] == [
        [curve.knob, f"{value:g}"] for curve in view.slices for value in curve.values
    ]


def test_why_there_are_none_is_said(bed: Bed) -> None:
    study = StudySnapshot(read_study(bed.store, "study"))
    view = effects_view(bed.store, study, most=2)
    assert not view.slices and "nas study effects study" in (view.no_slices or "")
    assert "not fitted for a page" in render("study_effects.html", view=view)
    for change, reason in (
        ({"proposer": "random"}, "the study's proposer is 'random'"),
        (SEARCH, "they need a front"),
    ):
        name = f"by-{change['proposer']}"
        Bed(bed.store, bed.folder, tiny_space(search=change), bed.runtime).ledger(name=name)
        assert reason in (study_slices(bed.store, StudySnapshot(read_study(bed.store, name)))[1] or "")
