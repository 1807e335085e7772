"""Trains one proxy: a few hundred AdamW steps, a weight average, scores above chance.

A killed training resumes from the last checkpoint under its key and gives the same numbers (`nas.nn.fit`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.task import IGNORE
from nas.nn.distillation import TopK, decoupled_top_k
from nas.nn.fit import Log, Optimiser, Stage, TrainingCheckpoint, TrainingState, Worker, fit, save_tensors, thinned
from nas.nn.model import Model
from nas.proxy.data import Data, open_data, score
from nas.proxy.job import CHECKPOINT, WEIGHTS, Teaching, TrainJob, TrainResult, proxy_layout, run_inputs
from nas.proxy.teacher import TaughtData, predictions, trained_model

BALANCE_RATE = 0.01
"""Step of the experts' load-balancing bias; ten times DeepSeek-V3's, for runs a thousand times shorter."""

_FINITE_CHECK_STEPS = 25
_CURVE_POINTS = 60


def train(
    job: TrainJob,
    *,
    yield_hook: Callable[[], object],
    checkpoint_dir: Path,
    device: str = "auto",
    log: Log,
    threads: int = 1,
    checkpoint_s: float = 20.0,
) -> TrainResult:
    """Runs `job` to its end, from its last checkpoint if there is one.

    Args:
        job: what to train.
        yield_hook: called before each step; may block (the host lock waits there).
        checkpoint_dir: holds one folder per key.
        device: a torch device, or 'auto': CUDA where there is one, else the CPU.
        log: takes one line at a time.
        threads: torch threads of this process.
        checkpoint_s: seconds between checkpoints.

    Raises:
        CandidateFailed: the loss is not finite, or memory runs out.
        InfrastructureFailed: this host has another corpus than the job names.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    worker = Worker(torch.device(device), log, yield_hook)
    torch.set_num_threads(threads)
    data: Data = open_data(job)
    with _memory_errors(job):
        if job.teacher is not None:
            taught_by = partial(
                _teacher, job.teacher.job, worker, checkpoint_dir=checkpoint_dir, threads=threads,
                checkpoint_s=checkpoint_s,
            )  # fmt: skip
            data = TaughtData(data, predictions(job, job.teacher, data, taught_by, yield_hook))
        model = Model(proxy_layout(job), job.seed).to(worker.device)
        state = TrainingState(model, Optimiser(job.weight_decay, job.clip, BALANCE_RATE), job.steps, ema=job.ema)
        checkpoint = TrainingCheckpoint(
            checkpoint_dir / job.key / CHECKPOINT,
            {"run": content_hash(run_inputs(job))},
            checkpoint_s,
            resume_from=None if job.resume_from is None else checkpoint_dir / job.resume_from / CHECKPOINT,
        )
        fit(
            state, [_stage(job, data)], checkpoint, worker, name=f"{job.key[:12]} on {worker.describe()}",
            check_steps=_FINITE_CHECK_STEPS,
        )  # fmt: skip
        return _result(job, state, data, worker, checkpoint.path.with_name(WEIGHTS))


def _teacher(job: TrainJob, worker: Worker, *, checkpoint_dir: Path, threads: int, checkpoint_s: float) -> Model:
    """Returns the trained model of `job`; trains it unless its weights are in `checkpoint_dir`.

    Raises:
        InfrastructureFailed: it cannot be trained, which is not its students' fault.
    """
    if (model := trained_model(job, checkpoint_dir, worker.device)) is None:
        try:
            train(
                job, yield_hook=worker.yield_hook, checkpoint_dir=checkpoint_dir, device=str(worker.device),
                log=worker.log, threads=threads, checkpoint_s=checkpoint_s,
            )  # fmt: skip
        except CandidateFailed as error:
            raise InfrastructureFailed(f"the teacher {job.key[:12]} cannot be trained: {error}") from error
        model = trained_model(job, checkpoint_dir, worker.device)
    assert model is not None, "a finished training has weights"
    return model


def _stage(job: TrainJob, data: Data) -> Stage:
    return Stage(
        name=job.run.name,
        steps=job.steps,
        tokens=data.batch(0)[0].numel(),
        batches=lambda step: [data.batch(step)],
        loss=_loss(job.teacher),
        rate=lambda step: job.lr * min(1.0, (step + 1) / max(job.warmup, 1)),
    )


def _loss(teaching: Teaching | None) -> Callable[..., Tensor]:
    """Returns the loss function: the mean cross-entropy over all labels, in part the teacher's term; nats."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor, *known: Tensor) -> Tensor:
        logits = model(inputs).flatten(0, 1).float()
        own = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE)
        if teaching is None:
            return own
        theirs = TopK(*(each.flatten(0, 1) for each in known))
        taught = decoupled_top_k(logits, theirs, teaching.temperature).mean()
        return (1 - teaching.weight) * own + teaching.weight * taught

    return loss


def _result(job: TrainJob, state: TrainingState, data: Data, worker: Worker, weights: Path) -> TrainResult:
    """Scores the averaged weights and writes them."""
    assert state.average is not None
    with state.timed():
        scored = score(state.average, data.groups(), worker.device)
        save_tensors(state.average.module.state_dict(), weights, {"step": state.step})
    return TrainResult(
        key=job.key,
        scores={name: chance - got.loss for name, (got, chance) in scored.items()},
        losses={name: got.loss for name, (got, _) in scored.items()},
        accuracy={name: got.accuracy for name, (got, _) in scored.items()},
        curve=thinned(state.losses, _CURVE_POINTS),
        steps=state.step,
        tokens=state.step * data.batch(0)[0].numel(),
        seconds=state.seconds,
        cpu_seconds=state.cpu_seconds,
        device=worker.describe(),
        weights=str(weights),
        weights_sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )


@contextmanager
def _memory_errors(job: TrainJob) -> Iterator[None]:
    """Converts failed allocations into `CandidateFailed`; on a CPU, torch raises a plain RuntimeError for them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "allocate memory" not in str(error):
            raise
        raise CandidateFailed("out_of_memory", f"training {job.key[:12]}: {error}") from error
