"""Spaces whose candidates choose their quantisation: what is a candidate, what is trained once, and what decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runner import nas
from pydantic import ValidationError
from study_support import TINY, bed_of, lm_job, tiny_space

from nas.cli.space import plan_fields
from nas.core.errors import UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.quality_config import Rounding
from nas.core.space import RuntimeSpace, SearchSpace
from nas.core.workload import Workload
from nas.infra.store.rows import StudyState
from nas.measure.protocol.calibration import known_runtime
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Checkpoint, RoundingRuntime
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.model.text.corpus import CorpusRef, refer
from nas.search.analysis.archive import export_study, import_study
from nas.search.analysis.optuna_export import Parameters
from nas.search.analysis.record import read_study
from nas.search.analysis.report import study_report, study_table
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proposers import Features, Sampler
from nas.search.proposers.hardware import Costs, HardwareModel, Measured
from nas.search.proposers.heuristics import seed_layouts
from nas.search.proposers.mutation import crossover, mutate
from nas.search.proxy.job import TrainJob, TrainResult, exported_layout, weights_file
from nas.search.proxy.ladder import proxy_of, rung_jobs, seed_scores
from nas.search.proxy.train import train
from nas.search.spaces.identity import space_difference, space_json, space_yaml
from nas.search.spaces.loader import parse_space
from nas.search.study.check import support_filter
from nas.search.study.estimate import estimate
from nas.search.study.proposals import replay
from nas.serve.views.candidate import candidate_views
from nas.testing.fake_runtime import FakeRuntime
from nas.testing.inline_study import trained
from nas.train.scaling.candidates import Size, candidates
from nas.train.scaling.source import study_origin

LISTED = [{"name": "fake", "quantisation": ["q4_0", "q8_0"]}]
PLAIN = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")
Q4, Q8 = (Layout.parse(f"d128 v256 q={name} ffn=swiglu:320 [C3 A2/1 C3]") for name in ("q4_0", "q8_0"))


def chosen_space(**changes: Any) -> SearchSpace:
    return tiny_space(**({"runtimes": LISTED} | changes))


def test_a_layout_names_its_quantisation() -> None:
    assert Q8.format() == "d128 v256 q=q8_0 ffn=swiglu:320 [C3 A2/1 C3]" and Layout.from_json(Q8.to_json()) == Q8
    assert Q8.architecture == PLAIN and len({PLAIN.id, Q4.id, Q8.id}) == 3
    assert "quantisation" not in PLAIN.to_json(), "ids of layouts without one are as ever"


def test_every_layout_of_the_space_has_one_choice() -> None:
    sampler, rng = Sampler(chosen_space()), np.random.default_rng(0)
    drawn = [sampler.draw(rng) for _ in range(40)]
    assert {layout.quantisation for layout in drawn} == {"q4_0", "q8_0"}
    assert all(not sampler.contains(layout) for layout in drawn)
    assert sampler.contains(PLAIN) == ["quantisation none is none of q4_0, q8_0"]
    assert Sampler(tiny_space()).contains(Q8) == ["quantisation q8_0 is none of a choice"]
    edited = [mutate(Q4, sampler, rng)[0] for _ in range(100)]
    assert all(not sampler.contains(layout) for layout in edited)
    assert Q8 in edited, "an edit may change nothing else"
    crossed = [crossover(Q4, layout, sampler, rng)[0] for layout in drawn]
    assert all(not sampler.contains(layout) for layout in crossed)
    assert {layout.quantisation for layout in crossed} == {"q4_0", "q8_0"}
    assert Q4 in seed_layouts(sampler, 3), "references are proposed in their quantisation"
    features = Features(chosen_space())
    differ = features.vector(Q4) != features.vector(Q8)
    assert [name for name, other in zip(features.names, differ, strict=True) if other] == [
        "quantisation=q4_0", "quantisation=q8_0",
    ]  # fmt: skip


def test_optuna_sees_the_quantisation() -> None:
    value, distribution = Parameters(chosen_space()).of(Q8)["quantisation"]
    assert value == "q8_0" and distribution.to_internal_repr("q8_0") == 1
    assert "quantisation" not in Parameters(tiny_space()).of(PLAIN)


def test_listed_layouts_have_all_choices_unless_they_name_one() -> None:
    document = {key: value for key, value in TINY.items() if key not in ("model", "mixers", "ffn", "limits")}
    both = [PLAIN.format(), "d128 v256 q=q8_0 ffn=swiglu:352 [A2/1*3]"]
    space = SearchSpace.model_validate(document | {"runtimes": LISTED, "layouts": both})
    assert [layout.format() for layout in space.listed()] == [Q4.format(), Q8.format(), both[1]]
    listed = Sampler(space).listed
    assert listed is not None and len(listed.layouts) == 3
    with pytest.raises(ValidationError, match="q=q8_0 is no choice of a runtime's `quantisation`"):
        SearchSpace.model_validate(document | {"layouts": both})


@pytest.mark.parametrize(
    ("runtimes", "message"),
    [
        ([{"name": "fake", "quantisation": []}], "must name one or more, each once"),
        ([{"name": "fake", "quantisation": ["q4_0", "q4_0"]}], "must name one or more, each once"),
        ([{"name": "fake", "quantisation": "q8_0", "choices": ["q4_0"]}], "leave them out"),
        ([*LISTED, {"name": "other", "quantisation": ["q4_0"]}], "of one runtime, which occurs once"),
        ([*LISTED, {"name": "fake", "quantisation": "f16"}], "of one runtime, which occurs once"),
    ],
)
def test_wrong_lists_are_named(runtimes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_space(runtimes=runtimes)


def test_an_unknown_choice_and_a_runtime_that_cannot_round_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RUNTIMES.add("fake", FakeRuntime(tmp_path))
    with pytest.raises(UnknownName, match="q8_0"):
        known_runtime(RuntimeSpace.model_validate(LISTED[0]))
    monkeypatch.delattr(FakeRuntime, "rounded")
    with pytest.raises(Unsupported, match="name one, not a list"):
        known_runtime(RuntimeSpace.model_validate({"name": "fake", "quantisation": ["q4_0"]}))
    known_runtime(RuntimeSpace.model_validate({"name": "executorch", "quantisation": ["8da4w", "8da8w+ffn:8da4w_64"]}))


def test_a_space_keeps_its_list_and_one_without_is_as_ever() -> None:
    space = chosen_space()
    text = space_yaml(space)
    assert parse_space(text, "space") == space
    assert "quantisation: [q4_0, q8_0]" in text and "choices: [q4_0" not in text
    assert space_json(tiny_space())["runtimes"] == [{"name": "fake", "quantisation": "q4_0", "build": "stock"}]
    (difference,) = space_difference(tiny_space(), space)
    assert difference.startswith("runtimes: ") and '"choices": ["q4_0", "q8_0"]' in difference.partition("->")[2]
    assert space.runtimes[0].title == "fake q4_0|q8_0" and space.labels("fake q4_0|q8_0") == ["fake"]


def test_a_list_has_each_layout_in_each_quantisation() -> None:
    chosen = chosen_space(budgets=[], protocol={**TINY["protocol"], "remeasure": None})
    listed = chosen.listing(Layout.parse(f"d128 v256 ffn=swiglu:{width} [C3 A2/1 C3]") for width in (256, 384))
    screens = [
        {part.name: part.seconds.typical for part in estimate(None, space, trials, {}, 1).parts}["screen"]
        for space, trials in ((listed, 40), (chosen, 4))
    ]
    assert screens[0] == pytest.approx(screens[1])
    assert dict(plan_fields(listed, 40))["screen"].startswith("4 + 2 references")


def test_one_training_scores_all_choices_of_an_architecture() -> None:
    corpus, config = CorpusRef(source="default", hash="0" * 64), chosen_space().quality
    jobs = rung_jobs(config, 0, Q4, corpus)
    assert [job.key for job in jobs] == [job.key for job in rung_jobs(config, 0, Q8, corpus)]
    plain = rung_jobs(tiny_space().quality, 0, Q4, corpus)
    assert jobs[0].key != plain[0].key and plain[0].rounding is None
    assert proxy_of(Q4, config) != proxy_of(Q8, config), "their qualities are no ties"
    assert proxy_of(PLAIN, config) == proxy_of(Q4, config)
    assert proxy_of(Q4, tiny_space().quality) == proxy_of(Q8, tiny_space().quality)


def test_trained_weights_are_scored_as_the_runtime_rounds_them(tmp_path: Path, llama_build: Build) -> None:
    rounding = Rounding(runtime="llama.cpp", quantisations=("q4_0", "f32"))
    run = lm_job().run.model_copy(update={"corpus": refer("default", tmp_path)})
    job = lm_job(steps=8).model_copy(update={"rounding": rounding, "run": run})
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=print)
    assert result.rounded["f32"] == pytest.approx(result.scores, abs=1e-5)
    assert result.rounded["q4_0"].keys() == result.scores.keys()
    assert result.rounded["q4_0"] != pytest.approx(result.scores, abs=1e-5)
    assert seed_scores([job], {job.key: result}, "f32") == {0: result.rounded["f32"]}
    assert seed_scores([job], {job.key: result}) == {0: result.rounded["q4_0"]}
    runtime = RUNTIMES["llama.cpp"]
    assert isinstance(runtime, RoundingRuntime)
    checkpoint = Checkpoint(weights_file(tmp_path, job.key), result.weights_sha256)
    rounded = runtime.rounded(exported_layout(job), "q4_0", checkpoint).state_dict()["layers.0.ffn.down.weight"]
    steps = (rounded.reshape(-1, 32) / rounded.reshape(-1, 32).abs().amax(1, keepdim=True) * 8).round(decimals=3)
    assert len(torch.unique(steps)) <= 17, "four bits a block"


def test_names_of_layers_need_as_many_in_every_candidate() -> None:
    shares = chosen_space(runtimes=[{"name": "fake", "quantisation": ["q8_0", "q8_0+ffn.1/3:q4_0"]}])
    drawn = [Sampler(shares).draw(np.random.default_rng(seed)).quantisation for seed in range(20)]
    assert set(drawn) == {"q8_0", "q8_0+ffn.1/3:q4_0"}
    with pytest.raises(ValidationError, match=r"names layer 90.*name shares of the depth"):
        chosen_space(runtimes=[{"name": "fake", "quantisation": ["q8_0", "q8_0+ffn.90:q4_0"]}])


def test_a_study_measures_and_scores_each_choice(tmp_path: Path) -> None:
    widths = (320, 384, 448)
    document = {key: value for key, value in TINY.items() if key not in ("model", "mixers", "ffn", "limits")}
    listed = {"layouts": [f"d128 v256 ffn=swiglu:{width} [C3 A2/1 A2/1]" for width in widths]}
    quality = {"proxy_d_model": 32, "rungs": [{"name": "only", "lm_steps": 6}]}
    space = SearchSpace.model_validate(document | listed | {"runtimes": LISTED, "quality": quality, "budgets": []})
    bed = bed_of(tmp_path, space, quantisations=("q4_0", "q8_0"))
    jobs: list[str] = []

    def train_once(job: TrainJob, spec: Mapping[str, Any]) -> TrainResult:
        jobs.append(job.key)
        return trained(job, spec)

    bed.compute.train = train_once
    assert bed.run(6) is StudyState.COMPLETE
    assert len(jobs) == len(set(jobs)) == len(widths) + 2, "an architecture trains once, the two references too"
    study = StudySnapshot(read_study(bed.store, "study"))
    for record in study.record.records.values():
        stored = {result.quantisation for result in record.results if result.quantisation is not None}
        assert stored == {record.layout.quantisation or "q4_0"}, record.layout
    report = study_report(bed.store, "study")
    rows = {row["layout"]: row for row in report["ranking"]}
    coarse = [text for text in rows if "q=q4_0" in text]
    assert (len(rows), len(coarse)) == (6, 3)
    for text in coarse:
        row, other = rows[text], rows[text.replace("q=q4_0", "q=q8_0")]
        assert other["quality"]["value"] == pytest.approx(2 * row["quality"]["value"]), "it is of rounded proxies"
        assert other["objectives"]["memory"] > row["objectives"]["memory"], "and bytes are of the file"
    assert all("q=q" in row["layout"] for row in report["front"])
    assert "q=q8_0" in str(study_table(study))
    for number, record in study.record.records.items():
        (view,) = candidate_views(bed.store, study, [number])
        assert view.layout.text == record.layout.format()
        stored_as = record.layout.quantisation or "q4_0"
        assert {(artifact.quantisation, artifact.scale) for artifact in view.artifacts} >= {(stored_as, "deploy")}
        benches = [command.command for command in view.commands if "nas bench" in command.command]
        assert benches and all(f"-q {stored_as}" in bench for bench in benches)
        assert [(training.run, training.rung) for training in view.trainings] == [("lm", "only")]
    with (tmp_path / "archive").open("wb") as file:
        export_study(bed.store, 1, file)
    with (tmp_path / "archive").open("rb") as archive:
        import_study(bed.store, archive, name="copy")
    assert study_report(bed.store, "copy")["front"] == report["front"]
    (best,) = (Layout.parse(row["layout"]) for row in report["front"][:1])
    for winner in (best, *(replace(best, quantisation=name) for name in ("q4_0", "q8_0"))):
        criteria = study_origin(bed.store, "study", (winner,), (), None).criteria
        (measured_on,) = criteria.space.runtimes
        assert (measured_on.quantisation, measured_on.choices) == (winner.quantisation, ()), "a family has the parent's"
        assert criteria.quality == rows[winner.format()]["quality"]["value"]
        (member,) = candidates(winner, Size("1M", winner.params.total), winner.vocab)
        assert member.layout == winner.architecture, "which its members do not name"


@pytest.mark.parametrize("proposer", ["ehvi", "evolution"])
def test_a_search_over_quantisations_is_replayed(proposer: str, tmp_path: Path) -> None:
    search = {"proposer": proposer, "seeds": 4, "pool": 32}
    space = chosen_space(search=search, budgets=[])
    bed = bed_of(tmp_path, space, quantisations=("q4_0", "q8_0"))
    assert bed.run(16) is StudyState.COMPLETE
    ledger = bed.ledger()
    rows, sampler = ledger.trials(), Sampler(space)
    operators = {(row.record or {}).get("operator") for row in rows}
    assert operators > {"seed"} if proposer == "ehvi" else operators >= {"seed", "crossover"}
    assert all(not sampler.contains(Layout.from_json(row.layout)) for row in rows if row.origin != "reference")
    assert replay(space, support_filter(space), rows, ledger.events()) == []


def test_a_hardware_model_learns_what_a_quantisation_costs() -> None:
    space = chosen_space()
    layouts = [Sampler(space).draw(np.random.default_rng(seed)) for seed in range(40)]
    layouts = list({layout.id: layout for layout in layouts}.values())
    weights = np.array([layout.params.active * (1.9 if layout.quantisation == "q8_0" else 1) for layout in layouts])
    logs = np.log(1e-6 * weights + 0.1)
    training, unseen = slice(0, 24), slice(24, None)
    measured = Measured(layouts[training], logs[training], np.full(len(logs[training]), 0.001))
    off = {}
    for names in ((), space.quantisations):
        model = HardwareModel(Costs(Workload(prompt=64, gen=16), ("conv", "gqa", "swiglu"), "ms", names), measured)
        off[names] = np.abs(model.predict(layouts[unseen]).mean - logs[unseen]).max()
    assert off[space.quantisations] < 0.05 < off[()]


def test_commands_take_the_quantisation_of_a_layout(tmp_path: Path) -> None:
    text = "d64 v128 q=q8_0 ffn=swiglu:96 [A2/1 C3]"
    for options, stored_as in (((), "q8_0"), (("-q", "f16"), "f16"), (("-q", "q8_0+ffn:q4_0"), "q8_0+ffn:q4_0")):
        written = json.loads(nas("export", text, "-o", str(tmp_path / stored_as), "--json", *options).out)
        plain = json.loads(
            nas("export", text.replace(" q=q8_0", ""), "-o", str(tmp_path / "plain"), "-q", stored_as, "--json").out
        )
        assert (written["quantisation"], written["sha256"]) == (stored_as, plain["sha256"])
    unknown = nas("export", text.replace("q8_0", "q9"), "-o", str(tmp_path / "none"))
    assert unknown.code == 3 and "unknown quantisation of llama.cpp 'q9'" in unknown.err
    unreadable = nas("export", text.replace("q8_0", "Q+"), "-o", str(tmp_path / "none"))
    assert unreadable.code == 3 and "'Q+' is no name of a quantisation" in unreadable.err
