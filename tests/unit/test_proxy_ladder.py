"""From the configuration's rungs to jobs, and the configuration's own rules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.job import LmRun, TaskRun, TrainJob, TrainResult
from nas.search.proxy.ladder import rung_jobs, seed_counts, seed_scores

LAYOUT = Layout.parse("d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8]")
CORPUS = CorpusRef(source="default", hash="0" * 64)


def ladder(*rungs: dict[str, Any]) -> QualityConfig:
    return QualityConfig.model_validate({"rungs": list(rungs)})


CONFIG = ladder(
    {"name": "recall", "tasks": {"selcopy": {"steps": 5}, "mqar": {"steps": 9, "seeds": [0, 1, 2]}}},
    {"name": "short", "lm_steps": 10},
    {"name": "long", "lm_steps": 30, "seeds": [0, 1], "tasks": {"selcopy": {"steps": 5}}},
)


def described(jobs: list[TrainJob]) -> set[tuple[str, int, int]]:
    return {(job.run.task if isinstance(job.run, TaskRun) else "lm", job.steps, job.seed) for job in jobs}


def test_groups_add_up_along_the_ladder() -> None:
    mqar = {("mqar", 9, 0), ("mqar", 9, 1), ("mqar", 9, 2)}
    assert described(rung_jobs(CONFIG, 0, LAYOUT, CORPUS)) == {("selcopy", 5, 0)} | mqar
    assert described(rung_jobs(CONFIG, 1, LAYOUT, CORPUS)) == {("selcopy", 5, 0), ("lm", 10, 0)} | mqar
    selcopy = {("selcopy", 5, 0), ("selcopy", 5, 1)}
    assert described(rung_jobs(CONFIG, 2, LAYOUT, CORPUS)) == {("lm", 30, 0), ("lm", 30, 1)} | selcopy | mqar


def test_windows_are_the_same_share_of_every_sequence() -> None:
    windowed = Layout.parse("d1024 v65536 ffn=swiglu:4608 [C3 W16/8@2048]")
    jobs = rung_jobs(CONFIG, 1, windowed, CORPUS)
    windows = {job.run.task if isinstance(job.run, TaskRun) else "lm": window(job) for job in jobs}
    assert windows == {"selcopy": 20 // 2, "mqar": 36 // 2, "lm": 128 // 2}
    longer = CONFIG.model_copy(update={"context": 8192})
    assert {window(job) for job in rung_jobs(longer, 1, windowed, CORPUS) if isinstance(job.run, LmRun)} == {32}


def window(job: TrainJob) -> int:
    return Layout.from_json(job.layout).layers[1].mixers[0].int("window")


def test_what_an_earlier_rung_trained_has_the_same_key() -> None:
    keys = [{job.key for job in rung_jobs(CONFIG, rung, LAYOUT, CORPUS)} for rung in range(3)]
    assert keys[0] < keys[1]
    assert len(keys[0] & keys[2]) == 4


def test_a_longer_rung_goes_on_from_the_shorter_one_of_the_same_seed() -> None:
    short = next(job for job in rung_jobs(CONFIG, 1, LAYOUT, CORPUS) if isinstance(job.run, LmRun))
    long = {job.seed: job for job in rung_jobs(CONFIG, 2, LAYOUT, CORPUS) if isinstance(job.run, LmRun)}
    assert short.resume_from is None
    assert long[0].resume_from == short.key
    assert long[1].resume_from is None


def test_a_rung_of_equal_length_adds_seeds_only() -> None:
    config = ladder({"name": "a", "lm_steps": 10}, {"name": "b", "lm_steps": 10, "seeds": [0, 1]})
    first, second = rung_jobs(config, 0, LAYOUT, CORPUS), rung_jobs(config, 1, LAYOUT, CORPUS)
    assert first[0].key in {job.key for job in second}
    assert len(second) == 2


def test_proxies_are_narrow_and_byte_level() -> None:
    proxy = Layout.from_json(rung_jobs(CONFIG, 1, LAYOUT, CORPUS)[-1].layout)
    assert (proxy.d_model, proxy.vocab, proxy.depth) == (64, 256, 3)


def result(job: TrainJob, scores: dict[str, float]) -> TrainResult:
    return TrainResult(
        key=job.key, scores=scores, losses={}, accuracy={}, curve=[], steps=1, tokens=1, seconds=0, cpu_seconds=0,
        device="cpu", weights_sha256="",
    )  # fmt: skip


def test_scores_are_gathered_by_seed() -> None:
    jobs = rung_jobs(CONFIG, 2, LAYOUT, CORPUS)
    results = {}
    for job in jobs:
        group = f"task/{job.run.task}" if isinstance(job.run, TaskRun) else "lm/code"
        results[job.key] = result(job, {group: job.seed + 0.5})
    scores = seed_scores(jobs, results)
    assert scores[0] == {"lm/code": 0.5, "task/selcopy": 0.5, "task/mqar": 0.5}
    assert scores[2] == {"task/mqar": 2.5}


def test_tasks_of_what_is_rescored_are_trained_at_the_top_with_some_of_the_fresh_seeds() -> None:
    tasks = {"automata": {"steps": 7, "seeds": [100]}, "mqar": {"steps": 8}}
    config = QualityConfig.model_validate(
        CONFIG.model_dump() | {"rescore": {"seeds": [100, 101], "tasks": tasks}, "anchors": None}
    )
    described_before = described(rung_jobs(config, 2, LAYOUT, CORPUS))
    assert described_before == described(rung_jobs(CONFIG, 2, LAYOUT, CORPUS))
    fresh = described(rung_jobs(config.rescored, 2, LAYOUT, CORPUS))
    of_all = {(task, steps, seed) for task, steps in (("mqar", 8), ("selcopy", 5)) for seed in (100, 101)}
    assert {job for job in fresh if job[0] != "lm"} == of_all | {("automata", 7, 100)}
    assert "automata" not in {task for task, _, _ in described(rung_jobs(config.rescored, 1, LAYOUT, CORPUS))}
    with pytest.raises(ValidationError, match=r"automata has seeds \[0\], which are none of \[100\]"):
        QualityConfig.model_validate({"rescore": {"seeds": [100], "tasks": {"automata": {"steps": 7, "seeds": [0]}}}})


def test_one_task_may_have_several_entries_of_their_own_difficulty_and_batch() -> None:
    stages = {
        "mqar-4": {"task": "mqar", "steps": 5, "settings": {"length": 128}, "batch": 16},
        "mqar-16": {"task": "mqar", "steps": 5, "settings": {"pairs": 16, "length": 128}},
    }
    jobs = rung_jobs(ladder({"name": "recall", "tasks": stages, "seeds": [0, 1]}), 0, LAYOUT, CORPUS)
    assert [job.batch for job in jobs] == [16, 16, 8, 8]
    results = {job.key: result(job, {"task/mqar": float(index)}) for index, job in enumerate(jobs)}
    assert seed_scores(jobs, results)[1] == {"task/mqar-4": 1.0, "task/mqar-16": 3.0}
    assert seed_counts(jobs) == {"task/mqar-4": 2, "task/mqar-16": 2}
    plain = ladder({"name": "recall", "tasks": {"mqar": {**stages["mqar-16"]}}})
    assert rung_jobs(plain, 0, LAYOUT, CORPUS)[0].key == jobs[2].key, "a name changes no training"


def test_other_seeds_replace_those_of_rungs_and_tasks() -> None:
    jobs = rung_jobs(CONFIG.with_seeds((7, 8)), 2, LAYOUT, CORPUS)
    assert {job.seed for job in jobs} == {7, 8}
    assert described(jobs) == {(name, steps, seed) for name, steps, _ in described(jobs) for seed in (7, 8)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors": {"layouts": 1}}, "leave 4 degrees of freedom"),
        ({"anchors": {"seeds": [0, 0, 1]}}, "seeds must differ"),
        ({"rescore": {"seeds": [100, 0]}}, r"rungs train with seeds \[0\], so these are not fresh"),
    ],
)
def test_anchors_and_fresh_seeds_that_tell_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QualityConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("rungs", "message"),
    [
        ([{"name": "a", "lm_steps": 9}, {"name": "b", "lm_steps": 8}], "'b' trains .* 8 steps, fewer than 9"),
        ([{"name": "a", "lm_steps": 9}, {"name": "a", "lm_steps": 9}], "two rungs are called a"),
        ([{"name": "a"}], "trains nothing"),
        ([{"name": "a", "tasks": {"selcop": {"steps": 1}}}], "did you mean 'selcopy'"),
        ([{"name": "a", "tasks": {"mqar": {"steps": 1, "settings": {"pair": 2}}}}], "did you mean 'pairs'"),
        ([{"name": "a", "tasks": {"mqar": {"steps": 1, "settings": {"pairs": 99}}}}], "between 1 and keys"),
        ([{"name": "a", "lm_steps": 9, "keep": 1.5}], "keep must be a fraction"),
        ([{"name": "a", "lm_steps": 9, "keep": 0}], "keep must be a fraction"),
        ([{"name": "a", "lm_steps": 9, "seeds": [1, 1]}], "seeds must differ"),
        ([{"name": "a", "lm_step": 9}], "Extra inputs"),
        ([], "at least 1 item"),
    ],
)
def test_ladders_that_cannot_work_are_refused(rungs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ladder(*rungs)


@pytest.mark.parametrize(
    ("keep", "candidates", "promoted"),
    [(None, 7, 7), (3, 7, 3), (3, 2, 2), (0.5, 7, 4), (0.1, 3, 1), (0.5, 0, 0), (0.07, 100, 7)],
)
def test_how_many_go_on(keep: float | None, candidates: int, promoted: int) -> None:
    assert Rung.model_validate({"name": "a", "lm_steps": 1, "keep": keep}).promoted(candidates) == promoted


def test_the_default_configuration_survives_json() -> None:
    config = QualityConfig()
    assert QualityConfig.model_validate_json(config.model_dump_json()) == config


def test_what_the_orchestrator_needs_loads_no_torch() -> None:
    modules = "nas.search.proxy.ladder, nas.search.proxy.quality, nas.model.text.corpus"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
