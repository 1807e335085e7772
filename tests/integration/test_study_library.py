"""A study of mixes of a library's blocks: written by `nas adapt`, searched and resumed by `nas launch`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from adapt_lab import LAYOUT, RECALLING, write_lab
from study_lab import WITHOUT_RAY, Lab

from nas.core.layout import Layout
from nas.core.quality_config import LIBRARY_PARTS
from nas.core.replacement import RECALL_GROUP, TEXT_GROUP, LibraryScores
from nas.core.trial import TrialState
from nas.model.nn.mixes import compared
from nas.search.analysis.record import read_study
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.mixes import assembled_mix, held_out, trained_model
from nas.search.spaces import load_space
from nas.serve.views.candidate import candidate_views

TRIALS = 4
LEAST_RECALL = 0.6
"""The limit on recall, as a share of the model's."""
Report = dict[str, Any]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("library"), program=WITHOUT_RAY)
    model = write_lab(lab.folder / "model")
    (model / "settings.json").write_text(RECALLING.model_dump_json())
    lab.run_here(
        "adapt", str(model / "teacher.safetensors"), "--tokenizer", str(model / "tokenizer.json"),
        "--corpus", str(model / "text"), "--config", str(model / "settings.json"), "--runtime", "fake",
        "--budget", "file_size<=100MB", "--prompt", "64", "--gen", "16", "--library", str(lab.folder / "blocks"),
        "--output", str(lab.folder / "out"), "--write-space", str(path_of(lab)), "--mixes", "12",
    )  # fmt: skip
    space = yaml.safe_load(path_of(lab).read_text())
    space["objectives"].append({"name": "recall", "metric": "quality.recall"})
    space["budgets"].append({"metric": "quality.recall", "min": LEAST_RECALL})
    again = {"rounds": 2, "repetitions": 2, "members": 2}
    space |= {"protocol": {"screen_repetitions": 2, "confirm_repetitions": 2, "deadline_s": 20, "remeasure": again}}
    path_of(lab).write_text(yaml.safe_dump(space, sort_keys=False))
    return lab


@pytest.fixture(scope="module")
def report(lab: Lab) -> Report:
    report: Report = lab.json_here(*lab.launch("mixes", "--trials", str(TRIALS), space="mixes"))
    return report


def path_of(lab: Lab) -> Path:
    return lab.folder / "mixes.yaml"


def test_a_study_ends_with_a_front_of_assembled_mixes(lab: Lab, report: Report) -> None:
    assert report["state"] == "complete"
    assert report["trials"]["proposed"] == TRIALS
    assert report["trials"]["failed"] == 0
    assert report["front"]
    assert report["hypervolume"] is not None
    listed = {layout.id for layout in load_space(path_of(lab)).listed()}
    assert {row["layout_id"] for row in report["ranking"]} <= listed


def test_quality_is_what_the_assembled_mix_has(lab: Lab, report: Report) -> None:
    path = lab.folder / "mixes-scores.json"
    scores = LibraryScores.read(path)
    teacher, text = trained_model(scores, torch.device("cpu")), held_out(scores, path)
    for row in report["ranking"]:
        mix = assembled_mix(scores, teacher, Layout.parse(row["layout"]))
        parts = [text.part(number, LIBRARY_PARTS) for number in range(LIBRARY_PARTS)]
        pairs = [(part, compared(teacher, mix, part)) for part in parts]
        shares = {}
        for group in (TEXT_GROUP, RECALL_GROUP):
            lost = sum(part.means(both.kl)[group] for part, both in pairs)
            shares[group] = 1 - lost / sum(part.means(both.uniform)[group] for part, both in pairs)
        assert row["objectives"]["quality"] == pytest.approx(fmean(shares.values()), abs=1e-4)
        assert row["objectives"]["recall"] == pytest.approx(shares[RECALL_GROUP], abs=1e-4)
    (published,) = (row for row in report["references"] if row["name"] == "published")
    assert Layout.parse(published["layout"]) == LAYOUT


def test_a_candidate_s_page_shows_both_rungs(lab: Lab, report: Report) -> None:
    store = lab.store()
    try:
        number = report["ranking"][0]["trial"]
        (view,) = candidate_views(store, StudySnapshot(read_study(store, "mixes")), [number])
    finally:
        store.close()
    assert [(training.rung, training.run, training.seed) for training in view.trainings] == [
        ("sum", "library", 0),
        *(("assembled", "library", part) for part in range(4)),
    ]
    assert [evaluation.rung for evaluation in view.evaluations if not evaluation.group] == ["sum", "assembled"]


def test_resumed_it_repeats_nothing_and_refuses_other_scores(lab: Lab, report: Report) -> None:
    again = lab.json_here("launch", "--yes", "--workers", "2", "--study", "mixes", "--resume", "--trials", str(TRIALS))
    assert again["ranking"] == report["ranking"]
    scores = lab.folder / "mixes-scores.json"
    before = scores.read_text()
    scores.write_text(before + "\n")
    try:
        refused = lab.run_here(*lab.launch("mixes", "--resume", "--trials", str(TRIALS + 1), space="mixes"), code=3)
    finally:
        scores.write_text(before)
    assert "another content of mixes-scores.json" in refused.err


def test_a_mix_is_on_the_front_only_if_it_recalls_enough(lab: Lab, report: Report) -> None:
    store = lab.store()
    try:
        records = read_study(store, "mixes").records.values()
    finally:
        store.close()
    assembled = [record for record in records if record.trial.origin != "reference" and "assembled" in record.rungs]
    assert len(assembled) > len(report["ranking"]) > 0
    for record in assembled:
        recall, status = record.rungs["assembled"].recall, record.trial.status
        assert recall is not None
        assert status.state == (TrialState.COMPLETE if recall >= LEAST_RECALL else TrialState.INFEASIBLE)
        if recall < LEAST_RECALL:
            assert status.reason == f"quality.recall on the proxy: {recall:.4g}, limit {LEAST_RECALL:g}"
