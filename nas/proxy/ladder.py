"""Training jobs of a rung, and scores per seed from their results. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nas.core.layout import Layout, narrow
from nas.core.quality_config import QualityConfig
from nas.core.task import make_task
from nas.proxy.corpus import BYTE_VOCAB, CorpusRef
from nas.proxy.job import LmRun, TaskRun, TrainJob, TrainResult


def proxy_of(layout: Layout, config: QualityConfig) -> Layout:
    """Returns the proxy of `layout`, with unchanged windows; layouts with the same proxy share its results.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    return narrow(layout, config.proxy_d_model, BYTE_VOCAB)


def rung_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Returns every training that enters the quality of `layout` at a rung.

    Groups accumulate: those of earlier rungs count, too, at their latest settings, so some jobs already have results.
    A language-model job resumes from the previous rung's if that trained the same seed.

    Args:
        config: the ladder.
        rung: its position, counted from 0.
        layout: at deploy scale, or already narrow.
        corpus: of the language model.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    return _task_jobs(config, rung, layout) + _lm_jobs(config, rung, layout, corpus)


def seed_scores(jobs: Iterable[TrainJob], results: Mapping[str, TrainResult]) -> dict[int, dict[str, float]]:
    """Returns seed -> evaluation group -> score of the finished trainings of `jobs`.

    Raises:
        KeyError: a job has no result under its key.
    """
    scores: dict[int, dict[str, float]] = {}
    for job in jobs:
        found = results[job.key].scores
        if isinstance(job.run, TaskRun) and job.run.entry:
            found = {f"task/{job.run.entry}": score for score in found.values()}
        scores.setdefault(job.seed, {}).update(found)
    return scores


def seed_counts(jobs: Iterable[TrainJob]) -> dict[str, int]:
    """Returns unit of quality (`nas.proxy.quality.unit_of`) -> seeds that `jobs` train."""
    return dict(
        Counter(f"task/{job.run.entry or job.run.task}" if isinstance(job.run, TaskRun) else "lm" for job in jobs)
    )


def _proxy(config: QualityConfig, layout: Layout, length: int) -> Layout:
    """Returns the proxy for sequences of `length` tokens: windows keep their ratio to the context."""
    return narrow(layout, config.proxy_d_model, BYTE_VOCAB, length / config.context)


def _task_jobs(config: QualityConfig, rung: int, layout: Layout) -> list[TrainJob]:
    latest = {name: rung_ for rung_ in config.rungs[: rung + 1] for name in rung_.tasks}
    jobs = []
    for name, at in latest.items():
        stage = at.tasks[name]
        task = stage.task or name
        run = TaskRun(task=task, settings=stage.settings, entry=None if task == name else name)
        proxy = _proxy(config, layout, make_task(task, stage.settings).length)
        jobs += [
            _job(config, proxy, run, stage.steps, seed, batch=stage.batch or config.task_batch, lr=config.task_lr)
            for seed in at.task_seeds(name)
        ]
    return jobs


def _lm_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Returns the jobs of the latest rung with a language model; it resumes from earlier ones."""
    proxy = _proxy(config, layout, config.length)
    run = LmRun(corpus=corpus, length=config.length, eval_bytes=config.eval_bytes)
    latest: dict[int, TrainJob] = {}
    for at in config.rungs[: rung + 1]:
        if not at.lm_steps:
            continue
        before, latest = latest, {}
        for seed in at.seeds:
            shorter = before.get(seed)
            if shorter is not None and shorter.steps == at.lm_steps:
                latest[seed] = shorter
                continue
            job = _job(config, proxy, run, at.lm_steps, seed, batch=config.batch, lr=config.lr)
            latest[seed] = job.model_copy(update={"resume_from": shorter.key if shorter else None})
    return list(latest.values())


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
        weight_decay=config.weight_decay,
        clip=config.clip,
        ema=config.ema,
        seed=seed,
    )
