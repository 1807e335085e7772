"""Real studies compared: which are run, what is kept of them, and what the page says."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from study_support import Bed, tiny_space

from benchmarks.search.recorded import Recorded, load, recorded, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import complete, curve, figures
from benchmarks.study.page import page
from benchmarks.study.plot import draw
from benchmarks.study.stacks import built_of
from benchmarks.study.terms import Terms, campaign, space_of
from nas.core.errors import InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.infra.store.store import Store
from nas.search.analysis.report import study_report
from nas.testing.fake_runtime import FakeRuntime

TRIALS = 8


def home(folder: Path) -> Store:
    """The database of a campaign in `folder`."""
    (folder / "home").mkdir(parents=True)
    return Store.open(f"sqlite:///{folder / 'home' / 'hilnas.db'}", artifacts=folder / "home" / "artifacts")


def run(folder: Path, proposer: str, seed: int, trials: int, name: str) -> Store:
    """Runs a study of a tiny space; gives its database."""
    search = {"proposer": proposer, "seed": seed, "seeds": 3, "pool": 16}
    bed = Bed(home(folder), folder, tiny_space(search=search), FakeRuntime(folder / "fake"))  # type: ignore[arg-type]
    asyncio.run(bed.orchestrator(bed.ledger(name=name), trials).run())
    return bed.store


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Of a tiny space: an engine that is called ours, and another."""
    tables = []
    for engine, proposer, seed in (("ehvi", "evolution", 0), ("random", "random", 0), ("ehvi", "evolution", 2)):
        name = Terms(engine, seed, TRIALS).study
        with closing(run(tmp_path_factory.mktemp("study"), proposer, seed, TRIALS, name)) as store:
            tables.append(recorded(study_report(store, name), engine=engine))
    return tables


def test_all_engines_have_equal_budgets_and_each_seed_is_whole_before_the_next() -> None:
    planned = campaign(("ehvi", "random"), (0, 1), 60)
    assert [terms.study for terms in planned] == [
        "ehvi-0",
        "random-0",
        "ehvi-1",
        "random-1",
    ]
    assert {terms.trials for terms in planned} == {60}


def test_the_space_of_a_study_has_its_engine_and_seed_and_may_grow() -> None:
    space = SearchSpace.model_validate(space_of("lfm2-study", Terms("ehvi", 3, 60)))
    assert (space.search.proposer, space.search.seed) == ("ehvi", 3)
    assert space_of("lfm2-study", Terms("ehvi", 3, 90)) == space_of("lfm2-study", Terms("ehvi", 3, 60)), "cannot grow"


def test_a_campaign_runs_what_is_not_finished(tmp_path: Path) -> None:
    run(tmp_path, "random", 0, 3, "random-0").close()
    messages: list[str] = []
    started = Campaign(tmp_path, "lfm2-study", say=messages.append)
    planned = campaign(("ehvi", "random"), (0,), 3)
    assert [terms.study for terms in started.tell(planned)] == ["ehvi-0"]
    assert messages[-1].startswith("1 of 2 studies to run: about ")
    started.run([Terms("random", 0, 3)])
    assert not (tmp_path / "spaces").exists(), "a finished study was launched"
    assert [terms.trials for terms in started.tell([Terms("random", 0, 4)])] == [4]


def test_curves_end_where_the_study_ends(studies: list[Recorded]) -> None:
    computed = figures(studies)
    for study, row in zip(studies, computed["studies"], strict=True):
        curves = {by: curve(study, computed["corner"], by) for by in ("trial", "device_s")}
        for points in curves.values():
            assert [at for at, _ in points] == sorted(at for at, _ in points)
            assert [volume for _, volume in points] == sorted(volume for _, volume in points)
            assert points[-1][1] == pytest.approx(row["reached"], rel=1e-4)
        assert curves["trial"][-1][0] == row["trials"] == TRIALS == sum(row["ended"].values())


def test_the_union_front_is_no_worse_than_any_study(studies: list[Recorded]) -> None:
    computed = figures(studies)
    compared = computed["studies"]
    assert all(0 < row["share"] <= 1 for row in compared)
    layouts = {row["layout"] for study in studies for row in complete(study)}
    assert {winner["layout"] for winner in computed["front"]} <= layouts
    for winner in computed["front"]:
        assert set(winner["found_by"]) <= {row["study"] for row in compared}
    gains = [winner["adds"] for winner in computed["front"]]
    assert gains == sorted(gains, reverse=True)


def test_what_stacks_are_built_of() -> None:
    stacks = built_of(
        [Layout.parse("d128 v256 ffn=swiglu:320 [C3*2 A2/1]"), Layout.parse("d128 v256 ffn=swiglu:320 [A2/1*6]")]
    )
    assert (stacks.layouts, stacks.depth, stacks.experts) == (2, 4.5, 0.0)
    assert [stacks.mixers[height]["gqa"] for height in ("bottom", "middle", "top")] == [0.5, 0.5, 1.0]
    assert stacks.layers == {"conv": 1.0, "gqa": 3.5} and stacks.having == {"conv": 0.5, "gqa": 1.0}


def test_page_and_plot_come_from_the_table_alone(studies: list[Recorded], tmp_path: Path) -> None:
    write(studies, tmp_path / "table.json")
    read = load(tmp_path / "table.json")
    assert read == json.loads(json.dumps(studies))
    computed: dict[str, Any] = figures(read)
    assert json.loads(json.dumps(computed, allow_nan=False)) == computed
    text = page(computed)
    for row in computed["studies"]:
        assert f"{row['reached'] / computed['union_hypervolume']:.3f}" in text
    for winner in computed["front"][:10]:
        assert winner["layout"] in text
    assert f"{len(computed['front'])} layout" in text
    assert "nan" not in text and "None" not in text
    draw(read, computed["corner"], computed["union_hypervolume"], tmp_path / "img" / "plot.png")
    assert (tmp_path / "img" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_that_cannot_be_run_is_not_tried_again(tmp_path: Path) -> None:
    messages: list[str] = []
    started = Campaign(tmp_path, "lfm2-study", say=messages.append)
    with pytest.raises(NasError, match=r"study nonsense-0 did not come to its end: .*nonsense-0\.yaml"):
        started.run([Terms("nonsense", 0, 3)])
    assert messages[1:] == ["nonsense-0: begins, 3 trials"]
    (tmp_path / "broken.yaml").write_text("v: 1\nname: broken\nmixers: {}\n")
    with pytest.raises(InvalidInput, match=r"broken\.yaml:3"):
        Campaign(tmp_path, str(tmp_path / "broken.yaml"), say=messages.append).tell([Terms("random", 0, 3)])
