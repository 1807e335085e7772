"""Trains one proxy: a few hundred AdamW steps, a weight average, scores above chance.

A training can be killed at any moment: it goes on from the last checkpoint under its key and ends with the same
numbers. On a CPU that holds bit for bit; on a GPU, whose kernels add in any order, up to rounding.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError

from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed
from nas.core.task import IGNORE
from nas.nn.moe import balance_experts
from nas.proxy.data import Data, open_data
from nas.proxy.evaluate import evaluate
from nas.proxy.job import CHECKPOINT, WEIGHTS, TrainJob, TrainResult, run_inputs
from nas.proxy.state import TrainState, save_atomically, thinned

BALANCE_RATE = 0.01
"""Step of the experts' load-balancing bias; ten times DeepSeek-V3's, for runs a thousand times shorter."""

_FINITE_CHECK_STEPS = 25

Log = Callable[[str], None]


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
    """Runs `job` to its end, from the last checkpoint where there is one.

    Args:
        job: what to train.
        yield_hook: called before each step; may block (the host lock waits there).
        checkpoint_dir: holds one folder per key.
        device: a torch device, or 'auto': CUDA where there is one, else the CPU.
        log: takes one line at a time.
        threads: torch threads of this process.
        checkpoint_s: seconds between checkpoints.

    Raises:
        CandidateFailed: the loss is no longer finite, or memory runs out.
        InfrastructureFailed: this host has another corpus than the job names.
    """
    place = _device(device)
    torch.set_num_threads(threads)
    data = open_data(job)
    with _memory_errors(job):
        session = _Session(job, place, checkpoint_dir, log)
        session.run(data, yield_hook, checkpoint_s)
        return session.result(data)


class _Session:
    """One process' part of a training."""

    def __init__(self, job: TrainJob, device: torch.device, folder: Path, log: Log) -> None:
        self.job, self.device, self.log = job, device, log
        self.folder = folder / job.key
        self.state = TrainState(job, device)
        self.seconds = self.cpu_seconds = 0.0
        self._restore(folder)
        log(f"training {job.key[:12]} on {_describe(device)} from step {self.state.step} to {job.steps}")

    def _restore(self, folder: Path) -> None:
        if (scalars := self._restore_from(self.folder / CHECKPOINT)) is not None:
            self.seconds, self.cpu_seconds = float(scalars["seconds"]), float(scalars["cpu_seconds"])
        elif (
            self.job.resume_from is not None and self._restore_from(folder / self.job.resume_from / CHECKPOINT) is None
        ):
            self.log(f"checkpoint of {self.job.resume_from[:12]} is gone: training from the start, same result")

    def _restore_from(self, path: Path) -> dict[str, float | str] | None:
        if not path.is_file():
            return None
        try:
            scalars = self.state.restore(path)
        except SafetensorError as error:
            self.log(f"{path} is damaged and removed: {error}")
            path.unlink(missing_ok=True)
            return None
        assert scalars["run"] == content_hash(run_inputs(self.job)), f"{path} is of another run"
        return scalars

    def run(self, data: Data, yield_hook: Callable[[], object], checkpoint_s: float) -> None:
        """Trains the steps that are left; saves every `checkpoint_s` seconds and at the end."""
        saved = time.monotonic()
        while self.state.step < self.job.steps:
            yield_hook()
            with self._timed():
                self._step(data)
                if self.state.step % _FINITE_CHECK_STEPS == 0:
                    self._check_finite()
            if time.monotonic() - saved > checkpoint_s:
                self._save()
                saved = time.monotonic()
        self._save()

    def _step(self, data: Data) -> None:
        state, job = self.state, self.job
        inputs, labels = (tensor.to(self.device) for tensor in data.batch(state.step))
        logits = state.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), job.clip)
        for group in state.optimizer.param_groups:
            group["lr"] = job.lr * min(1.0, (state.step + 1) / max(job.warmup, 1))
        state.optimizer.step()
        state.optimizer.zero_grad()
        balance_experts(state.model, BALANCE_RATE)
        state.average.update_parameters(state.model)
        state.losses[state.step] = loss.detach()
        state.step += 1

    def _check_finite(self) -> None:
        finite = self.state.losses[: self.state.step].isfinite()
        if not bool(finite.all()):
            raise CandidateFailed("diverged", f"loss is not finite at step {int(finite.int().argmin()) + 1}")

    def _save(self) -> None:
        self._check_finite()
        run = content_hash(run_inputs(self.job))
        scalars: dict[str, float | str] = {"run": run, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        self.state.save(self.folder / CHECKPOINT, scalars)

    def result(self, data: Data) -> TrainResult:
        """Scores the averaged weights and writes them."""
        with self._timed():
            groups = data.groups()
            scores = {name: evaluate(self.state.average, group, self.device) for name, group in groups.items()}
            weights = self.folder / WEIGHTS
            save_atomically(self.state.averaged_weights(), weights, {"step": self.state.step})
        above = {name: group.chance - scores[name].loss for name, group in groups.items()}
        return TrainResult(
            key=self.job.key,
            scores=above,
            losses={name: score.loss for name, score in scores.items()},
            accuracy={name: score.accuracy for name, score in scores.items()},
            curve=thinned(self.state.losses),
            steps=self.state.step,
            tokens=self.state.step * data.batch(0)[0].numel(),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            device=_describe(self.device),
            weights=str(weights),
            weights_sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        wall, processor = time.monotonic(), time.process_time()
        yield
        self.seconds += time.monotonic() - wall
        self.cpu_seconds += time.process_time() - processor


@contextmanager
def _memory_errors(job: TrainJob) -> Iterator[None]:
    """On the CPU torch reports an allocation that fails as a plain RuntimeError, on CUDA as an error of its own."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "allocate memory" not in str(error):
            raise
        raise CandidateFailed("out_of_memory", f"training {job.key[:12]}: {error}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _describe(device: torch.device) -> str:
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
