"""A candidate's proxy trainings: which result is of which rung, task and seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig
from nas.proxy.corpus import CorpusRef
from nas.proxy.job import LmRun, TrainJob, TrainResult
from nas.proxy.ladder import rung_jobs
from nas.store.rows import Result

_NO_CORPUS = "f" * 64
"""Stands for one that is not known: no stored training has it, while those of tasks need none."""


class Training(BaseModel):
    """One training of the proxy."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Of the result."""
    rung: str | None
    """The first one that trains it; None where it is not known any more."""
    run: str
    """'lm' or the task's name."""
    seed: int | None
    """None where it is not known: the study is older than the note of its corpus."""
    steps: int
    tokens: int
    seconds: float
    device: str
    curve: tuple[tuple[int, float], ...]
    """(step, mean training loss in nats since the point before)."""
    scores: dict[str, float]
    """Evaluation group -> amount above chance."""
    losses: dict[str, float]
    accuracy: dict[str, float]
    weights_sha256: str

    @property
    def name(self) -> str:
        """Such as 'lm, rung long'."""
        return f"{self.run}, rung {self.rung}" if self.rung else self.run


def trainings(
    config: QualityConfig, layout: Layout, stored: Iterable[Result], corpora: Sequence[str] = ()
) -> list[Training]:
    """The finished trainings among a trial's results, by rung, run and seed.

    Args:
        config: the study's ladder.
        layout: of the trial.
        stored: results of the trial, of any stage.
        corpora: hashes of what the study's language models were trained on, as far as they were noted.
    """
    values = [row.payload["value"] for row in stored if row.stage == "train" and "value" in row.payload]
    jobs = _jobs(config, layout, corpora or (_NO_CORPUS,))
    found = [_training(config, TrainResult.model_validate(value), jobs) for value in values]
    order = {rung.name: place for place, rung in enumerate(config.rungs)}
    return sorted(found, key=lambda each: (order.get(each.rung or "", len(order)), each.run, each.seed or 0, each.key))


def _jobs(config: QualityConfig, layout: Layout, corpora: Iterable[str]) -> dict[str, tuple[str, TrainJob]]:
    """Result key -> the first rung that trains it, and how."""
    found: dict[str, tuple[str, TrainJob]] = {}
    for corpus in corpora:
        reference = CorpusRef(source="default", hash=corpus)
        for place, rung in enumerate(config.rungs):
            further = range(config.further_seeds + 1) if place == len(config.rungs) - 1 else (0,)
            for seeds in further:
                for job in rung_jobs(config.with_seeds(seeds), place, layout, reference):
                    found.setdefault(job.key, (rung.name, job))
    return found


def _training(config: QualityConfig, result: TrainResult, jobs: Mapping[str, tuple[str, TrainJob]]) -> Training:
    rung, job = jobs.get(result.key, (None, None))
    if job is None:
        run = "lm" if any(group.startswith("lm/") for group in result.scores) else _task(result)
        rung = next((each.name for each in config.rungs if run == "lm" and each.lm_steps == result.steps), None)
    else:
        run = "lm" if isinstance(job.run, LmRun) else job.run.task
    return Training(
        key=result.key, rung=rung, run=run, seed=job.seed if job else None, steps=result.steps, tokens=result.tokens,
        seconds=result.seconds, device=result.device, curve=tuple(result.curve), scores=result.scores,
        losses=result.losses, accuracy=result.accuracy, weights_sha256=result.weights_sha256,
    )  # fmt: skip


def _task(result: TrainResult) -> str:
    return ", ".join(group.removeprefix("task/") for group in sorted(result.scores))
