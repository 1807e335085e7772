"""Teachers of proxies: cached predictions, keys that name the teacher, stopped trainings that continue alike."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig
from nas.model.text.corpus import MIN_BYTES, CorpusRef, refer
from nas.search.proxy import teacher as teacher_module
from nas.search.proxy.data import open_data
from nas.search.proxy.job import LmRun, Teaching, TrainJob, TrainResult, weights_file
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.teacher import predictions, trained_model
from nas.search.proxy.train import train

STUDENT = Layout.parse("d32 v256 ffn=swiglu:32 [C3]")
TEACHER = Layout.parse("d32 v256 ffn=swiglu:64 [C3 A2/1]")


@pytest.fixture
def corpus(tmp_path: Path, home: Path) -> CorpusRef:
    (tmp_path / "a.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000))[:MIN_BYTES])
    return refer(["a.txt"], tmp_path)


def job(corpus: CorpusRef, layout: Layout = STUDENT, **changes: Any) -> TrainJob:
    fields: dict[str, Any] = {
        "layout": layout.to_json(), "run": LmRun(corpus=corpus, length=16, eval_bytes=256), "steps": 6, "batch": 2,
        "lr": 3e-3, "warmup": 4, "weight_decay": 0.1, "clip": 1.0, "ema": 0.9, "seed": 0,
    }  # fmt: skip
    return TrainJob(**(fields | changes))


def taught(corpus: CorpusRef, **changes: Any) -> TrainJob:
    settings: dict[str, Any] = {"weight": 0.5, "temperature": 2.0, "k": 4} | changes
    return job(corpus, teacher=Teaching(job=job(corpus, TEACHER, steps=5), **settings))


def run(job: TrainJob, folder: Path, stop: int | None = None) -> TrainResult:
    calls = iter(range(10**6 if stop is None else stop))

    def hook() -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    every = 60.0 if stop is None else 0.0
    return train(job, yield_hook=hook, checkpoint_dir=folder, device="cpu", log=lambda line: None, checkpoint_s=every)


def test_a_student_trains_its_teacher_where_nobody_has(corpus: CorpusRef, tmp_path: Path) -> None:
    student = taught(corpus)
    assert student.teacher is not None
    result = run(student, tmp_path / "one")
    alone = run(job(corpus), tmp_path / "one")
    assert result.key != alone.key
    assert result.weights_sha256 != alone.weights_sha256
    assert trained_model(student.teacher.job, tmp_path / "one", torch.device("cpu")) is not None
    # Where it was trained before, and where its predictions are all that is left, the numbers are the same.
    run(student.teacher.job, tmp_path / "two")
    for folder in ("two", "three"):
        assert run(student, tmp_path / folder).weights_sha256 == result.weights_sha256
    assert not (tmp_path / "three" / student.teacher.job.key).exists()


@pytest.mark.parametrize("stop", [3, 8, 14])
def test_a_stopped_training_goes_on_to_the_same_numbers(stop: int, corpus: CorpusRef, tmp_path: Path) -> None:
    """Stopped while the teacher is trained, while it predicts, and while the student is trained."""
    student = taught(corpus)
    whole = run(student, tmp_path / "whole")
    shutil.rmtree(tmp_path / "cache" / "teachers")
    with pytest.raises(KeyboardInterrupt):
        run(student, tmp_path / "cut", stop)
    assert run(student, tmp_path / "cut").weights_sha256 == whole.weights_sha256


def test_predictions_are_the_teachers_and_are_computed_once(corpus: CorpusRef, tmp_path: Path) -> None:
    student = taught(corpus)
    assert student.teacher is not None
    run(student.teacher.job, tmp_path)
    model = trained_model(student.teacher.job, tmp_path, torch.device("cpu"))
    assert model is not None
    data = open_data(student)
    cache = predictions(student, student.teacher, data, lambda: model, lambda: None)
    with torch.no_grad():
        logits = model.eval()(data.batch(3)[0])
    log_p, ids = cache.at(3)
    assert torch.equal(ids, logits.topk(4).indices)
    assert torch.allclose(log_p, logits.log_softmax(-1).topk(4).values, atol=5e-3)

    def again() -> Any:
        raise AssertionError

    predictions(student, student.teacher, data, again, lambda: None)
    other = student.model_copy(update={"seed": 1})
    with pytest.raises(AssertionError):
        predictions(other, student.teacher, open_data(other), again, lambda: None)


def test_a_teacher_that_diverges_is_not_its_students_fault(corpus: CorpusRef, tmp_path: Path) -> None:
    wild = Teaching(job=job(corpus, TEACHER, steps=30, lr=1e30, warmup=0), weight=0.5, temperature=1.0, k=2)
    with pytest.raises(InfrastructureFailed, match=r"the teacher .* failed: .*not finite"):
        run(job(corpus, teacher=wild), tmp_path)


def test_a_teacher_that_takes_too_much_memory_is_not_its_students_fault(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(logits: torch.Tensor, k: int) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(teacher_module, "top_k", out_of_memory)
    with pytest.raises(InfrastructureFailed, match=r"the teacher .* failed: .*"):
        run(taught(corpus), tmp_path)


def test_a_measurement_need_not_wait_for_those_who_wait_for_a_teacher(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process trains the teacher, and lets a measurement run, which waits for this process, too."""
    student = taught(corpus)
    run(student, tmp_path)
    lock, cache = sorted((tmp_path / "cache" / "teachers").iterdir(), key=Path.is_dir)
    away = cache.rename(tmp_path / "known")
    monkeypatch.setattr(teacher_module, "_DEADLINE_S", 5.0)
    with ExitStack() as other:
        other.enter_context(locked(lock))

        def measured() -> None:
            if away.exists():
                away.rename(cache)
                other.close()

        train(student, yield_hook=measured, checkpoint_dir=tmp_path / "two", device="cpu", log=lambda line: None)
    assert not (tmp_path / "two" / student.teacher.job.key).exists() if student.teacher else False


def test_nothing_is_left_of_predictions_that_were_not_finished(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = tmp_path / "cache" / "teachers"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space left"):
        disk.setattr(os, "posix_fallocate", full)
        run(taught(corpus), tmp_path)
    assert [path.suffix for path in teachers.iterdir()] == [".lock"]
    run(taught(corpus), tmp_path)
    assert sorted(path.suffix for path in teachers.iterdir()) == ["", ".lock"]


def test_damaged_weights_of_the_teacher_are_not_used(corpus: CorpusRef, tmp_path: Path) -> None:
    teacher = job(corpus, TEACHER, steps=5)
    path = weights_file(tmp_path, run(teacher, tmp_path).key)
    path.write_bytes(path.read_bytes()[:100])
    assert trained_model(teacher, tmp_path, torch.device("cpu")) is None


def test_the_key_names_the_teacher_and_its_settings(corpus: CorpusRef) -> None:
    base = taught(corpus)
    others = [job(corpus), *(taught(corpus, **change) for change in ({"weight": 1.0}, {"temperature": 1.0}, {"k": 3}))]
    assert len({base.key, *(other.key for other in others)}) == 5
    assert teacher_module.TEACHER_VERSION == 1


PROXY = Layout.parse("d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8]")


def ladder(*rungs: dict[str, Any]) -> QualityConfig:
    return QualityConfig.model_validate({"rungs": list(rungs)})


def test_a_rung_goes_on_only_under_the_same_teacher() -> None:
    corpus = CorpusRef(source="default", hash="0" * 64)
    layout = "d1024 v65536 ffn=swiglu:4608 [C3 A16/8]"
    same = {"layout": layout, "steps": 7}
    config = ladder(
        {"name": "a", "lm_steps": 5},
        {"name": "b", "lm_steps": 5, "teacher": same},
        {"name": "c", "lm_steps": 9, "teacher": same},
    )
    plain, first, second = (rung_jobs(config, rung, PROXY, corpus)[0] for rung in range(3))
    assert plain.teacher is None
    assert first.resume_from is None
    assert first.teacher is not None
    assert first.teacher.job.steps == 7
    assert first.teacher == second.teacher
    assert second.resume_from == first.key
    by_its_own = ladder({"name": "a", "lm_steps": 5, "teacher": {"layout": layout}})
    (job,) = rung_jobs(by_its_own, 0, PROXY, corpus)
    assert job.teacher is not None
    assert job.teacher.job.steps == 5


def test_the_published_reference_is_named_by_the_space() -> None:
    config = ladder({"name": "a", "lm_steps": 5, "teacher": {}})
    assert config.rungs[0].teacher is not None
    assert config.rungs[0].teacher.layout == "published"
    text = PROXY.format()
    named = config.taught_by(text).rungs[0].teacher
    assert named is not None
    assert named.layout == text


@pytest.mark.parametrize(
    ("rung", "message"),
    [
        ({"tasks": {"selcopy": {"steps": 1}}, "teacher": {}}, "has a teacher, but no lm_steps"),
        ({"lm_steps": 5, "teacher": {"layout": "d1024 nonsense"}}, "layout"),
        ({"lm_steps": 5, "teacher": {"temperature": 0.5}}, "greater than or equal to 1"),
    ],
)
def test_teachers_that_cannot_work_are_refused(rung: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ladder({"name": "a", **rung})
