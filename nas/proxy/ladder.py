"""From a rung of the configuration to training jobs, and from their results to scores per seed. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nas.core.layout import Layout
from nas.core.narrow import narrow
from nas.core.quality_config import QualityConfig
from nas.core.task import make_task
from nas.proxy.corpus import BYTE_VOCAB, CorpusRef
from nas.proxy.job import LmRun, TaskRun, TrainJob, TrainResult


def proxy_of(layout: Layout, config: QualityConfig) -> Layout:
    """What is trained for `layout`, with windows as they are; layouts with one proxy share its results.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    return narrow(layout, config.proxy_d_model, BYTE_VOCAB)


def rung_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Every training that the quality of `layout` at rung number `rung` is made of.

    Groups add up along the ladder: those of earlier rungs count on, at their latest settings, so part of the jobs has
    results already; keys tell. A language-model job goes on from the rung before where that trained the same seed.

    Args:
        config: the ladder.
        rung: its position, counted from 0.
        layout: at deploy scale, or already narrow.
        corpus: what the language model learns.

    Raises:
        InvalidInput: the layout is narrower than the proxies.
    """
    return _task_jobs(config, rung, layout) + _lm_jobs(config, rung, layout, corpus)


def seed_scores(jobs: Iterable[TrainJob], results: Mapping[str, TrainResult]) -> dict[int, dict[str, float]]:
    """Seed -> evaluation group -> score, of the finished trainings of `jobs`.

    Raises:
        KeyError: a job has no result under its key.
    """
    scores: dict[int, dict[str, float]] = {}
    for job in jobs:
        scores.setdefault(job.seed, {}).update(results[job.key].scores)
    return scores


def _proxy(config: QualityConfig, layout: Layout, length: int) -> Layout:
    """What is trained on sequences of `length` tokens: windows keep their ratio to the context."""
    return narrow(layout, config.proxy_d_model, BYTE_VOCAB, length / config.context)


def _task_jobs(config: QualityConfig, rung: int, layout: Layout) -> list[TrainJob]:
    latest = {name: rung_ for rung_ in config.rungs[: rung + 1] for name in rung_.tasks}
    jobs = []
    for name, at in latest.items():
        stage = at.tasks[name]
        run = TaskRun(task=name, settings=stage.settings)
        proxy = _proxy(config, layout, make_task(name, stage.settings).length)
        jobs += [
            _job(config, proxy, run, stage.steps, seed, batch=config.task_batch, lr=config.task_lr)
            for seed in at.task_seeds(name)
        ]
    return jobs


def _lm_jobs(config: QualityConfig, rung: int, layout: Layout, corpus: CorpusRef) -> list[TrainJob]:
    """Of the latest rung with a language model; earlier ones are only what it goes on from."""
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
