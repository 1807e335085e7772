"""Trains proxies: a few hundred optimiser steps, then scores above chance. Seeds of one layout train in one pass.

A killed training resumes from the last checkpoint under its key and gives the same numbers (`nas.model.nn.fit`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InfrastructureFailed, is_out_of_memory
from nas.core.progress import Log
from nas.core.task import IGNORE, Exhibit, MediaTask, RetrievalTask, SpectraTask, make_task
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Checkpoint, RoundingRuntime
from nas.model.nn.distillation import TopK, decoupled_top_k
from nas.model.nn.fit import (
    SeedsApart,
    TrainingCheckpoint,
    TrainingPhase,
    TrainingState,
    Worker,
    device_of,
    fit,
    precision_of,
    save_tensors,
    thinned,
)
from nas.model.nn.maxsim import maxsim
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.seeds import of_seed, stacked, unstackable
from nas.model.nn.weights import padded_weights
from nas.search.proxy.data import Data, logits_and_labels, open_data, score_groups, spectra
from nas.search.proxy.job import (
    CHECKPOINT,
    STABLE,
    TaskRun,
    Teaching,
    TrainJob,
    TrainResult,
    exported_layout,
    proxy_layout,
    run_inputs,
    weights_file,
)
from nas.search.proxy.teacher import TaughtData, predictions, trained_model

BALANCE_RATE = 0.01
"""Step of the experts' load-balancing bias; ten times DeepSeek-V3's, for runs a thousand times shorter."""

_FINITE_CHECK_STEPS = 25
_CURVE_POINTS = 60
_TOKENS_AT_ONCE = (2048, 1 << 17)
"""Most tokens of a pass over stacked seeds, on a CPU (`benchmarks.quality.throughput`) and on an accelerator."""


def train(job: TrainJob, **options: Any) -> TrainResult:
    """Runs `job` alone, with the options of `train_seeds`.

    Raises:
        CandidateFailed: the loss is not finite, or memory runs out.
        InfrastructureFailed: this host has another corpus than the job names.
    """
    (outcome,) = train_seeds([job], **options)
    if isinstance(outcome, CandidateFailed):
        raise outcome
    return outcome


def train_seeds(
    jobs: Sequence[TrainJob],
    *,
    yield_hook: Callable[[], object],
    checkpoint_dir: Path,
    device: str = "auto",
    log: Log,
    threads: int = 1,
    checkpoint_s: float = 20.0,
) -> list[TrainResult | CandidateFailed]:
    """Runs jobs that differ in their seed alone to their end, each from its last checkpoint if there is one.

    Seeds that are at the same step train in one pass, as many as fit, to the same numbers as alone: on one kind of CPU
    to the bit, as parameters are stacked for one seed, too. Seeds that fail together train again one by one, so that
    each gets its own outcome; so do seeds that another process trains at the same time and brings to other steps.

    Args:
        jobs: of one `seeds_key`.
        yield_hook: called before each step; may block (the host lock waits there).
        checkpoint_dir: holds one folder per key.
        device: a torch device, or 'auto': CUDA where there is one, else the CPU.
        log: takes one line at a time.
        threads: torch threads of this process.
        checkpoint_s: seconds between checkpoints.

    Returns:
        The result of each job, or why its candidate failed.

    Raises:
        InfrastructureFailed: this host has another corpus than the jobs name.
    """
    worker = Worker(device_of(device), log, yield_hook)
    torch.set_num_threads(threads)
    assert len({job.seeds_key for job in jobs}) == 1, "jobs differ in more than their seed"
    outcomes: dict[str, TrainResult | CandidateFailed] = {}
    waiting = _passes(jobs, checkpoint_dir, checkpoint_s, worker)
    while waiting:
        together = waiting.pop(0)
        try:
            results = _train(together, checkpoint_dir, checkpoint_s, worker)
        except CandidateFailed as error:
            if len(together) == 1:
                outcomes[together[0].key] = error
            else:
                log(f"{error}: the {len(together)} seeds train one by one")
                waiting = [[job] for job in together] + waiting
        except SeedsApart:
            log(f"another process trains some of the {len(together)} seeds: they train one by one")
            waiting = [[job] for job in together] + waiting
        else:
            outcomes |= {result.key: result for result in results}
    return [outcomes[job.key] for job in jobs]


def _passes(
    jobs: Sequence[TrainJob], checkpoint_dir: Path, checkpoint_s: float, worker: Worker
) -> list[list[TrainJob]]:
    """Divides jobs into those that train in one pass: at the same step, and as many as the device takes at once."""
    if len(jobs) == 1:
        return [list(jobs)]
    if alone := unstackable(Model(proxy_layout(jobs[0]), None)):
        worker.log(f"{', '.join(alone)} cannot be stacked: {len(jobs)} seeds train one by one")
        return [[job] for job in jobs]
    most = max(1, worker.most_tokens(*_TOKENS_AT_ONCE) // _tokens(open_data(jobs[0])))
    by_step: dict[int, list[TrainJob]] = {}
    for job in jobs:
        checkpoint = _checkpoint(job, checkpoint_dir, checkpoint_s).latest(worker.log)
        by_step.setdefault(0 if checkpoint is None else checkpoint[1], []).append(job)
    parts = []
    for same in by_step.values():
        count = -(-len(same) // most)
        size = -(-len(same) // count)
        parts += [same[start : start + size] for start in range(0, len(same), size)]
    return parts


def _checkpoint(job: TrainJob, checkpoint_dir: Path, checkpoint_s: float) -> TrainingCheckpoint:
    return TrainingCheckpoint(
        checkpoint_dir / job.key / CHECKPOINT,
        {"run": content_hash(run_inputs(job))},
        checkpoint_s,
        resume_from=None if job.resume_from is None else checkpoint_dir / job.resume_from / STABLE,
    )


def _train(jobs: Sequence[TrainJob], checkpoint_dir: Path, checkpoint_s: float, worker: Worker) -> list[TrainResult]:
    """Trains jobs in one pass.

    Raises:
        CandidateFailed: the loss of one is not finite, or memory runs out.
    """
    first = jobs[0]
    names = ", ".join(job.key[:12] for job in jobs)
    with _memory_errors(first):
        data = [_data(job, worker, checkpoint_dir, checkpoint_s) for job in jobs]
        models = [Model(proxy_layout(job), job.seed) for job in jobs]
        seeds = None if unstackable(models[0]) else len(jobs)
        model = (models[0] if seeds is None else stacked(models)).to(worker.device)
        settings = Optimiser(first.weight_decay, first.clip, BALANCE_RATE, first.betas, kind=first.optimiser)
        state = TrainingState(model, settings, first.steps, first.ema, seeds)
        fit(
            state,
            _phases(first, data, seeds),
            [_checkpoint(job, checkpoint_dir, checkpoint_s) for job in jobs],
            worker,
            name=f"{names} on {worker.describe()}",
            precision=lambda: precision_of(worker.device, first.precision),
            check_steps=_FINITE_CHECK_STEPS,
        )
        return _results(jobs, state, data, worker, checkpoint_dir)


def _data(job: TrainJob, worker: Worker, checkpoint_dir: Path, checkpoint_s: float) -> Data:
    """Opens the data of a job, with the predictions of its teacher if it has one.

    Raises:
        InfrastructureFailed: the teacher cannot be trained or takes too much memory, which is not its students' fault.
    """
    data = open_data(job)
    if job.teacher is None:
        return data
    teacher = job.teacher.job
    taught_by = partial(_teacher, teacher, worker, checkpoint_dir, checkpoint_s)
    try:
        with _memory_errors(teacher):
            return TaughtData(data, predictions(job, job.teacher, data, taught_by, worker.yield_hook))
    except CandidateFailed as error:
        raise InfrastructureFailed(f"the teacher {teacher.key[:12]} failed: {error}") from error


def _teacher(job: TrainJob, worker: Worker, checkpoint_dir: Path, checkpoint_s: float) -> Model:
    """Returns the trained model of `job`; trains it unless its weights are in `checkpoint_dir`.

    Raises:
        CandidateFailed: see `_train`.
    """
    if (model := trained_model(job, checkpoint_dir, worker.device)) is None:
        _train([job], checkpoint_dir, checkpoint_s, worker)
        model = trained_model(job, checkpoint_dir, worker.device)
    assert model is not None, "a finished training has weights"
    return model


def _phases(job: TrainJob, data: Sequence[Data], seeds: int | None) -> list[TrainingPhase]:
    """Returns warm-up and a constant learning rate, then its linear decay (Hu et al. 2024, "MiniCPM", section 4)."""
    stable = job.steps - job.decay_steps

    def batches(first: int) -> Callable[[int], list[tuple[Tensor, ...]]]:
        def of_step(step: int) -> list[tuple[Tensor, ...]]:
            batches = [seed_data.batch(first + step) for seed_data in data]
            return [batches[0] if seeds is None else tuple(map(torch.cat, zip(*batches, strict=True)))]

        return of_step

    tokens = len(data) * _tokens(data[0])
    shape = () if seeds is None else (seeds,)
    task = make_task(job.run.task, job.run.settings) if isinstance(job.run, TaskRun) else None
    loss = _loss(job.teacher, shape, task.media if isinstance(task, MediaTask) else None)
    if isinstance(task, RetrievalTask):
        loss = _search_loss(task.query, shape)
    elif isinstance(task, SpectraTask):
        loss = _spectra_loss(shape)
    warm = TrainingPhase(
        job.run.name,
        stable,
        tokens,
        batches(0),
        loss,
        rate=lambda step: job.lr * min(1.0, (step + 1) / max(job.warmup, 1)),
        keep=STABLE,
    )
    falling = TrainingPhase(
        f"{job.run.name}, falling rate",
        job.decay_steps,
        tokens,
        batches(stable),
        loss,
        rate=lambda step: job.lr * (1 - (step + 1) / (job.decay_steps + 1)),
    )
    return [warm, falling]


def _loss(teaching: Teaching | None, seeds: tuple[int, ...], media: Exhibit | None = None) -> Callable[..., Tensor]:
    """Returns the loss function of each of the stacked models, or of the only one, in nats.

    It is the mean cross-entropy over all labels, in part the teacher's term. Examples of vision and audio begin with
    what they are about.
    """

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor, *taught: Tensor) -> Tensor:
        logits, labels = logits_and_labels(model, inputs, labels, media)
        logits = logits.flatten(0, 1).float()
        nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
        mean = nats.view(*seeds, -1).sum(-1) / (labels != IGNORE).view(*seeds, -1).sum(-1)
        if teaching is None:
            return mean
        likeliest = TopK(*(tensor.flatten(0, 1) for tensor in taught))
        divergence = decoupled_top_k(logits, likeliest, teaching.temperature).view(*seeds, -1).mean(-1)
        return (1 - teaching.weight) * mean + teaching.weight * divergence

    return loss


def _search_loss(query: int, seeds: tuple[int, ...]) -> Callable[..., Tensor]:
    """Returns the loss function of retrieval: cross-entropy of the right document among all of the step, in nats."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(model, Model), "layouts of retrieval tasks give vectors"
        queries, documents = (
            vectors.view(-1, len(inputs) // (seeds or (1,))[0], *vectors.shape[1:])
            for vectors in (model.vectors(inputs[:, :query]), model.vectors(inputs[:, query:]))
        )
        text = torch.ones(documents.shape[1:3], dtype=torch.bool, device=inputs.device)
        right = torch.arange(len(text), device=inputs.device)
        of_seeds = zip(queries, documents, strict=True)
        return torch.stack([F.cross_entropy(maxsim(*pair, text), right) for pair in of_seeds]).view(seeds)

    return loss


def _spectra_loss(seeds: tuple[int, ...]) -> Callable[..., Tensor]:
    """Returns the loss function of detokenizers: the mean absolute error of spectra."""

    def loss(model: nn.Module, codes: Tensor, labels: Tensor) -> Tensor:
        return (spectra(model, codes) - labels).abs().view(*seeds, -1).mean(-1)

    return loss


def _tokens(data: Data) -> int:
    """Returns the positions of a step."""
    return data.batch(0)[1].shape[:2].numel()


def _results(
    jobs: Sequence[TrainJob], state: TrainingState, data: Sequence[Data], worker: Worker, checkpoint_dir: Path
) -> list[TrainResult]:
    """Scores the weights of each seed and writes them.

    Raises:
        CandidateFailed: a score is not finite.
    """
    evaluated, scored = state.evaluated(), []
    for index, (job, seed_data) in enumerate(zip(jobs, data, strict=True)):
        model, losses = evaluated, state.losses
        with state.timed():
            if state.seeds is not None:
                model, losses = Model(proxy_layout(job), None).to(worker.device).eval(), losses[:, index]
                model.load_state_dict(of_seed(evaluated.state_dict(), index))
            scores = score_groups(model, seed_data.groups(), worker.device)
            path = weights_file(checkpoint_dir, job.key)
            graph = {
                name: tensor
                for name, tensor in model.state_dict().items()
                if not name.startswith(("projection.", "tower."))
            }
            save_tensors(padded_weights(graph, exported_layout(job)), path, {"step": state.step})
            weights = Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())
            rounded = _rounded_scores(job, weights, seed_data, worker)
        numbers = [score.loss for score, _ in scores.values()] + [n for row in rounded.values() for n in row.values()]
        if not all(map(math.isfinite, numbers)):
            raise CandidateFailed("not_finite", f"training {job.key[:12]} ends with scores that are not finite")
        scored.append((job, scores, losses, weights, rounded))
    return [
        TrainResult(
            key=job.key,
            scores={name: chance - score.loss for name, (score, chance) in scores.items()},
            losses={name: score.loss for name, (score, _) in scores.items()},
            accuracy={name: score.accuracy for name, (score, _) in scores.items()},
            curve=thinned(losses, _CURVE_POINTS),
            steps=state.step,
            tokens=state.step * _tokens(data[0]),
            seconds=state.seconds / len(jobs),
            cpu_seconds=state.cpu_seconds / len(jobs),
            device=worker.describe(),
            weights_sha256=weights.sha256,
            rounded=rounded,
        )
        for job, scores, losses, weights, rounded in scored
    ]


def _rounded_scores(job: TrainJob, weights: Checkpoint, data: Data, worker: Worker) -> dict[str, dict[str, float]]:
    """Returns scores of trained weights in each quantisation of the job's `rounding`.

    Raises:
        InfrastructureFailed: the runtime needs a build for this machine, and there is none.
    """
    if job.rounding is None:
        return {}
    runtime = RUNTIMES[job.rounding.runtime]
    assert isinstance(runtime, RoundingRuntime), "checked before the study began"
    above_chance = {}
    for name in job.rounding.quantisations:
        model = runtime.rounded(exported_layout(job), name, weights).to(worker.device)
        scores = score_groups(model, data.groups(), worker.device)
        above_chance[name] = {group: chance - score.loss for group, (score, chance) in scores.items()}
    return above_chance


@contextmanager
def _memory_errors(job: TrainJob) -> Iterator[None]:
    """Converts failed allocations into `CandidateFailed`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CandidateFailed("out_of_memory", f"training {job.key[:12]}: {error}") from error
