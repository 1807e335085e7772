"""A study as Optuna's own tools read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import optuna
import pytest
from study_support import TINY, Bed, bed_of, tiny_space

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import leases
from nas.search.analysis.optuna_export import Parameters, mirror
from nas.search.analysis.report import study_report
from nas.search.proposers import Sampler
from nas.search.spaces import load_space


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    strict = [{"metric": "decode_p50", "max": "1.05x", "workload": "chat"}]
    return bed_of(tmp_path, tiny_space(budgets=strict))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'optuna.db'}"


def load(url: str, name: str = "study") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=url)


def test_optuna_finds_the_front_that_we_find(bed: Bed, url: str) -> None:
    bed.run(8)
    done = mirror(bed.store, "study", url)
    report, copy = study_report(bed.store, "study"), load(url)
    assert (done.added, done.trials) == (8, 8)
    assert [direction.name for direction in copy.directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]
    front = {row["trial"]: row for row in report["front"]}
    best = {trial.user_attrs["trial"]: trial for trial in copy.best_trials}
    assert best.keys() == front.keys() and best
    for number, trial in best.items():
        assert trial.values == pytest.approx(list(front[number]["objectives"].values()))
        assert trial.user_attrs["layout"] == front[number]["layout"]
    states = {trial.user_attrs["state"]: trial.state.name for trial in copy.trials}
    expected = {"complete": "COMPLETE", "stopped": "PRUNED", "infeasible": "PRUNED", "failed": "FAIL"}
    assert states.items() <= expected.items()
    broken = {t.user_attrs["trial"] for t in copy.trials if max(t.constraints.values()) > 0}
    assert broken and broken == {t.user_attrs["trial"] for t in copy.trials if t.user_attrs["state"] == "infeasible"}
    assert copy.user_attrs["reference published"]["layout"] == report["references"][0]["layout"]
    assert copy.metric_names == ["quality", "latency", "memory"]


def test_again_copies_what_is_new(bed: Bed, url: str) -> None:
    bed.run(3)
    assert mirror(bed.store, "study", url).added == 3
    assert mirror(bed.store, "study", url).added == 0
    bed.run(6)
    done = mirror(bed.store, "study", url)
    assert (done.added, done.trials) == (3, 6)
    assert sorted(trial.user_attrs["trial"] for trial in load(url).trials) == list(range(2, 8))
    assert sorted({study.study_name for study in optuna.get_all_study_summaries(url)}) == ["study"]


def test_a_copy_that_was_killed_goes_on(bed: Bed, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.run(3)
    add, written = optuna.Study.add_trial, []

    def die_at_the_second(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        written.append(trial)
        if len(written) == 2:
            raise KeyboardInterrupt
        add(study, trial)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "add_trial", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            mirror(bed.store, "study", url)
    assert (mirror(bed.store, "study", url).added, len(load(url).trials)) == (2, 3)


def test_trials_that_may_be_tried_again_are_not_copied_yet(bed: Bed, url: str) -> None:
    bed.run(1)
    bed.compute.fail = _no_training_of_the_next()
    bed.run(3)
    assert mirror(bed.store, "study", url).added == 2
    bed.compute.fail = lambda stage, spec: None
    bed.run(3)
    assert mirror(bed.store, "study", url).added == 1


def test_complete_trials_of_a_study_that_runs_wait_for_their_fresh_scores(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    bed = bed_of(tmp_path, tiny_space(quality={**TINY["quality"], "rescore": {"seeds": [100, 101]}}))
    bed.run(8)  # its lease is not given back
    done = mirror(bed.store, "study", url)
    assert done.waiting > 0 and done.added + done.waiting == 8
    assert all(trial.state.name != "COMPLETE" for trial in load(url).trials)
    lease = leases.current(bed.store, 1)
    assert lease is not None
    leases.release(bed.store, lease)
    assert mirror(bed.store, "study", url)[2:] == (done.waiting, 8, 0)


def _no_training_of_the_next() -> object:
    broken: list[object] = []

    def fail(stage: str, spec: dict[str, list[dict[str, object]]]) -> None:
        if stage == "train":
            broken.append(spec["jobs"][0]["layout"])
            if spec["jobs"][0]["layout"] == broken[0]:
                raise InfrastructureFailed("a worker died")

    return fail


@pytest.mark.parametrize("name", ["lfm2", "lfm2-mixed", "lfm2-demo", "xlstm"])
def test_every_layout_of_a_space_has_the_same_distributions(name: str) -> None:
    space = load_space(name)
    sampler, rng, parameters = Sampler(space), np.random.default_rng(0), Parameters(space)
    distributions: dict[str, object] = {}
    for layout in (sampler.draw(rng) for _ in range(20)):
        for key, (value, distribution) in parameters.of(layout).items():
            assert distribution._contains(distribution.to_internal_repr(value)), key
            assert distributions.setdefault(key, distribution) == distribution
    assert {"depth", "d_model", f"{space.mixers[0].kind}.layers", "layer00.mixer"} <= distributions.keys()
    choices = distributions["layer00.mixer"]
    assert isinstance(choices, optuna.distributions.CategoricalDistribution)
    assert choices.choices == space.mixer_choices


def test_other_studies_and_our_own_database_are_left_alone(bed: Bed, url: str, tmp_path: Path) -> None:
    bed.run(1)
    optuna.create_study(study_name="study", storage=url).add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(InvalidInput, match="no copy of this study"):
        mirror(bed.store, "study", url)
    assert mirror(bed.store, "study", url, "other").name == "other"
    assert len(load(url, "study").trials) == 1
    with pytest.raises(InvalidInput, match="database of hilnas"):
        mirror(bed.store, "study", bed.store.engine.url.render_as_string())
    for bad in ("nowhere", "mysql://x/y", "sqlite://"):
        with pytest.raises(InvalidInput, match=r"^--optuna: "):
            mirror(bed.store, "study", bad)
    (tmp_path / "text.db").write_text("no database at all, but a text of some length")
    with pytest.raises(InvalidInput, match="not an SQLite database"):
        mirror(bed.store, "study", f"sqlite:///{tmp_path / 'text.db'}")
    with pytest.raises(InfrastructureFailed, match="cannot be opened"):
        mirror(bed.store, "study", f"sqlite:///{tmp_path}/none/optuna.db")
