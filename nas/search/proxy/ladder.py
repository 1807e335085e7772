"""Training jobs of a rung, and scores per seed from their results. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.core.quality_config import CorpusFiles, QualityConfig, Rung, Teacher
from nas.core.task import make_task, text_length
from nas.model.text.corpus import BYTE_VOCAB, CorpusRef
from nas.search.proxy.job import LibraryRun, LmRun, TaskRun, Teaching, TrainJob, TrainResult

_TEACHER_SEED = 0


def proxy_of(layout: Layout, config: QualityConfig) -> Layout:
    """Returns the proxy of `layout` for sequences of the language model; layouts with the same proxy share its results.

    Where proxies are scored after quantisation, it has that of the layout.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    if config.library is not None:
        return layout
    proxy = _proxy(config, layout, config.length)
    if config.rounding is None:
        return proxy
    return replace(proxy, quantisation=layout.quantisation or config.rounding.quantisations[0])


def rung_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Returns every job that enters the quality of `layout` at a rung: trainings, or evaluations under `from: library`.

    Groups of earlier rungs count, too, at their latest settings. A language-model job resumes from the previous rung's
    if that trained the same seed. `corpus` is that of the language model, or the file of a library's scores.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    if config.library is not None:
        return _library_jobs(config.rungs[rung], layout, corpus)
    return _task_jobs(config, rung, layout) + _lm_jobs(config, rung, layout, corpus)


def seed_scores(
    jobs: Iterable[TrainJob], results: Mapping[str, TrainResult], quantisation: str = ""
) -> dict[int, dict[str, float]]:
    """Returns seed -> evaluation group -> score of the finished trainings of `jobs`.

    Where these are scored after quantisation, `quantisation` is that of the layout; "": the references'.

    Raises:
        KeyError: a job has no result under its key.
    """
    scores: dict[int, dict[str, float]] = {}
    for job in jobs:
        result = results[job.key]
        groups = (
            result.scores if job.rounding is None else result.rounded[quantisation or job.rounding.quantisations[0]]
        )
        if isinstance(job.run, TaskRun) and job.run.entry:
            groups = {f"task/{job.run.entry}": score for score in groups.values()}
        scores.setdefault(job.seed, {}).update(groups)
    return scores


def seed_counts(jobs: Iterable[TrainJob]) -> dict[str, int]:
    """Returns unit of quality (`nas.search.proxy.quality.unit_of`) -> seeds that `jobs` train."""
    return dict(
        Counter(f"task/{job.run.entry or job.run.task}" if isinstance(job.run, TaskRun) else "lm" for job in jobs)
    )


def _proxy(config: QualityConfig, layout: Layout, length: int) -> Layout:
    """Returns the proxy for sequences of `length` tokens: windows and states keep their ratio to the context."""
    vocab = BYTE_VOCAB if config.tokenizer is None else config.tokenizer.vocab
    return narrow(layout, config.proxy_d_model, vocab, context=config.context, length=length)


def _library_jobs(rung: Rung, layout: Layout, scores: CorpusRef) -> list[TrainJob]:
    assert rung.library is not None
    path = str(Path(scores.base) / scores.source.files[0]) if isinstance(scores.source, CorpusFiles) else ""
    run = LibraryRun(path=path, sha256=scores.hash, evaluated=rung.library)
    nothing: dict[str, Any] = {
        "steps": 1,
        "batch": 1,
        "lr": 1.0,
        "warmup": 0,
        "weight_decay": 0.0,
        "clip": 1.0,
        "ema": 0.0,
    }
    return [TrainJob(layout=layout.to_json(), run=run, seed=seed, **nothing) for seed in rung.seeds]


def _task_jobs(config: QualityConfig, rung: int, layout: Layout) -> list[TrainJob]:
    latest = {name: rung_ for rung_ in config.rungs[: rung + 1] for name in rung_.tasks}
    jobs = []
    for name, at in latest.items():
        stage = at.tasks[name]
        task = stage.task or name
        run = TaskRun(task=task, settings=stage.settings, entry=None if task == name else name)
        proxy = _proxy(config, layout, text_length(make_task(task, stage.settings)))
        jobs += [
            _job(config, proxy, run, stage.steps, seed, batch=stage.batch or config.task_batch, lr=config.task_lr)
            for seed in at.task_seeds(name)
        ]
    return jobs


def _lm_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Returns the jobs of the latest rung with a language model; it resumes from earlier ones."""
    proxy = _proxy(config, layout, config.length)
    bpe = None if config.tokenizer is None else config.tokenizer.vocab
    run = LmRun(corpus=corpus, bpe=bpe, length=config.length, eval_bytes=config.eval_bytes)
    latest: dict[int, TrainJob] = {}
    for at in config.rungs[: rung + 1]:
        if not at.lm_steps:
            continue
        before, latest = latest, {}
        teaching = None if at.teacher is None else _teaching(config, at.teacher, run, at.lm_steps)
        for seed in at.seeds:
            shorter = before.get(seed)
            if shorter is not None and shorter.teacher != teaching:
                shorter = None
            if shorter is not None and shorter.steps == at.lm_steps:
                latest[seed] = shorter
                continue
            job = _job(config, proxy, run, at.lm_steps, seed, batch=config.batch, lr=config.lr)
            latest[seed] = job.model_copy(update={"resume_from": shorter.key if shorter else None, "teacher": teaching})
    return list(latest.values())


def _teaching(config: QualityConfig, teacher: Teacher, run: LmRun, steps: int) -> Teaching:
    """Returns the teacher of a rung's language models; it is trained alike, with the first seed, for its own steps."""
    if teacher.layout == "published":
        raise InvalidInput("'published' names a reference of a space: give the teacher's layout", where="teacher")
    proxy = _proxy(config, Layout.parse(teacher.layout), config.length)
    job = _job(config, proxy, run, teacher.steps or steps, _TEACHER_SEED, batch=config.batch, lr=config.lr)
    return Teaching(job=job, weight=teacher.weight, temperature=teacher.temperature, k=teacher.k)


def _job(
    config: QualityConfig, proxy: Layout, run: LmRun | TaskRun, steps: int, seed: int, *, batch: int, lr: float
) -> TrainJob:
    return TrainJob(
        layout=proxy.to_json(),
        run=run,
        steps=steps,
        batch=batch,
        lr=lr,
        warmup=config.warmup,
        decay=config.decay,
        optimiser=config.optimiser,
        betas=config.betas,
        precision=config.precision,
        weight_decay=config.weight_decay,
        clip=config.clip,
        ema=config.ema,
        seed=seed,
        rounding=config.rounding,
    )
