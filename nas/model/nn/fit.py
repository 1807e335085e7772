"""The training loop that proxies and family members share: steps through a list of phases, with exact resume.

A training can be killed at any moment: started again, it resumes from its last checkpoint and ends with the same
weights. On a CPU that holds bit for bit; on a GPU, whose kernels add in any order, up to rounding, and so it does after
a change of the number of workers.

A checkpoint is one safetensors file with weights, optimiser moments, the losses so far and, where there is one, the
weight average; its header holds scalars as JSON. It needs no position in the data and no random state, as batches
depend on the number of the step alone.

Several seeds of one layout may train in one pass, as stacked parameters (`nas.model.nn.seeds`). Each has a checkpoint
of its own, which it may be continued from alone or with other seeds at the same step.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.progress import Log, Progress
from nas.model.nn.moe import ExpertBias, balance_experts
from nas.model.nn.optimisers import Optimiser, clip_gradients, make_optimisers
from nas.model.nn.seeds import of_seed, of_seeds

_SAVE_SHARE = 20
"""Least time between checkpoints as a multiple of what writing one takes: that of a billion weights holds 12 GB."""
_LOG_S = 10.0
"""Least seconds between progress lines within a phase."""

Precision = Literal["float32", "bfloat16"]
Scalars = dict[str, Any]


class SeedsApart(Exception):
    """Checkpoints of stacked seeds are not of the same step, as another process trains some of them, too."""


@dataclass(frozen=True)
class TrainingPhase:
    """Optimiser steps with one kind of data, one loss and one learning-rate schedule.

    Args:
        name: shown in progress lines.
        steps: number of optimiser steps.
        tokens: tokens trained on in one step, by all workers.
        batches: step of the phase, from 0 -> the passes of this worker, whose gradients are accumulated. A pass holds
            the tensors that `loss` takes after the model.
        loss: (model, *pass) -> this pass' share of the step's loss, which is the sum over all passes and workers; [S]
            for stacked models, each one's own.
        rate: step of the phase, from 0 -> learning rate.
        keep: file name, beside the checkpoint, for the state at the end of the phase; None: it is not kept.
    """

    name: str
    steps: int
    tokens: int
    batches: Callable[[int], Sequence[tuple[Tensor, ...]]]
    loss: Callable[..., Tensor]
    rate: Callable[[int], float]
    keep: str | None = None


@dataclass(frozen=True)
class Worker:
    """This process among the workers of a training.

    Args:
        device: of its model.
        log: takes one line at a time.
        yield_hook: called before each pass; may block (trainings wait there while a device is measured).
        rank: its number, from 0.
        world: number of workers.
    """

    device: torch.device
    log: Log
    yield_hook: Callable[[], object] = lambda: None
    rank: int = 0
    world: int = 1

    def most_tokens(self, cpu: int, accelerator: int) -> int:
        """Returns the most tokens of one pass: a CPU's caches hold few, an accelerator is idle with few."""
        return cpu if self.device.type == "cpu" else accelerator

    def describe(self) -> str:
        """Returns the device's name, with the number of workers where there are several."""
        cuda = self.device.type == "cuda"
        name = f"cuda: {torch.cuda.get_device_name(self.device)}" if cuda else self.device.type
        return name if self.world == 1 else f"{self.world} x {name}"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The file that a training of one seed resumes from.

    Args:
        path: of the file.
        identity: header entries that name the training; a file with other ones belongs to another training.
        interval_s: least seconds between two checkpoints; 0: one after every step.
        resume_from: checkpoint of a shorter training with the same identity, used where `path` does not exist.
    """

    path: Path
    identity: Mapping[str, str]
    interval_s: float = 60.0
    resume_from: Path | None = None

    def latest(self, log: Log) -> tuple[Path, int] | None:
        """Returns the file to resume from and its number of steps; damaged files are removed."""
        for path in (self.path, self.resume_from):
            if path is None or not path.is_file():
                continue
            try:
                with safe_open(path, "pt") as file:
                    scalars: Scalars = json.loads(file.metadata()["scalars"])
            except SafetensorError as error:
                log(f"{path} is damaged and removed: {error}")
                path.unlink(missing_ok=True)
                continue
            assert all(scalars[key] == value for key, value in self.identity.items()), f"{path} is of another run"
            return path, int(scalars["step"])
        if self.resume_from is not None:
            log(f"checkpoint of {self.resume_from.parent.name[:12]} is gone: training from the start, same result")
        return None


@dataclass(eq=False)
class TrainingState:
    """Weights, optimiser state and losses after `step` steps of all phases together.

    Args:
        model: with start values, on the device where it is trained; see `nas.model.nn.seeds` for several seeds.
        optimiser: settings.
        steps: of all phases.
        ema: decay of an exponential moving average of the weights; 0: no average.
        seeds: number of stacked models; None: `model` is a single one.
    """

    model: nn.Module
    optimiser: Optimiser
    steps: int
    ema: float = 0.0
    seeds: int | None = None
    step: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    """Wall time of all steps, without the time in `yield_hook`."""
    cpu_seconds: float = field(default=0.0, init=False)
    """Processor time of all steps."""

    def __post_init__(self) -> None:
        self.optimisers = make_optimisers(self.model, self.optimiser, self.seeds is not None)
        shape = () if self.seeds is None else (self.seeds,)
        self.losses = torch.zeros(self.steps, *shape, device=next(self.model.parameters()).device)
        """Of each step; [steps, S] for stacked models."""
        self.average = copy.deepcopy(self.model).requires_grad_(False) if self.ema else None

    def evaluated(self) -> nn.Module:
        """Returns the model to evaluate: the average with the experts' biases of the last step, or the model itself."""
        if self.average is None:
            return self.model.eval()
        for buffer, last in zip(self.average.buffers(), self.model.buffers(), strict=True):
            buffer.copy_(last)
        return self.average.eval()

    def save(self, paths: Sequence[Path], identities: Sequence[Mapping[str, str]]) -> None:
        """Writes the checkpoint of each seed, each atomically.

        Raises:
            InfrastructureFailed: the disk is full.
        """
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for optimiser in self.optimisers:
                moments = optimiser.state.get(parameter, {})
                tensors |= {f"optimizer.{name}:{moment}": value for moment, value in moments.items()}
        losses = self.losses[: self.step]
        seeds = self.seeds or 1
        seconds = {"seconds": self.seconds / seeds, "cpu_seconds": self.cpu_seconds / seeds}
        for index, (path, identity) in enumerate(zip(paths, identities, strict=True)):
            of_file = tensors if self.seeds is None else of_seed(tensors, index)
            of_file |= {"losses": losses if self.seeds is None else losses[:, index]}
            save_tensors(of_file, path, {"step": self.step, **identity, **seconds})

    def restore(self, paths: Sequence[Path]) -> None:
        """Loads the checkpoints of all seeds in place.

        Raises:
            SeedsApart: they have other numbers of steps; nothing is loaded.
        """
        states, scalars = [], []
        for path in paths:
            with safe_open(path, "pt", device=str(self.losses.device)) as file:
                scalars.append(json.loads(file.metadata()["scalars"]))
                states.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
        if len({values["step"] for values in scalars}) > 1:
            raise SeedsApart
        self.step = int(scalars[0]["step"])
        self.seconds = sum(values["seconds"] for values in scalars)
        self.cpu_seconds = sum(values.get("cpu_seconds", 0.0) for values in scalars)
        losses = [tensors.pop("losses") for tensors in states]
        self.losses[: self.step] = losses[0] if self.seeds is None else torch.stack(losses, 1)
        tensors = states[0] if self.seeds is None else of_seeds(states)
        self.model.load_state_dict(_with_prefix(tensors, "model."))
        if self.average is not None:
            self.average.load_state_dict(_with_prefix(tensors, "average."), strict=False)
        owner = {
            parameter: optimiser
            for optimiser in self.optimisers
            for group in optimiser.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            if moments := _with_prefix(tensors, f"optimizer.{name}:"):
                owner[parameter].state[parameter] = dict(moments)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time that the block takes to `seconds` and `cpu_seconds`."""
        wall, processor = time.monotonic(), time.process_time()
        yield
        self.seconds += time.monotonic() - wall
        self.cpu_seconds += time.process_time() - processor


def fit(
    state: TrainingState,
    phases: Sequence[TrainingPhase],
    checkpoints: Sequence[TrainingCheckpoint],
    worker: Worker,
    *,
    name: str,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    check_steps: int = 1,
) -> None:
    """Trains from the last checkpoint, if there is one, to the end of the last phase, and writes a checkpoint there.

    Args:
        state: start values; holds the result afterwards.
        phases: in their order; `state` counts their steps together.
        checkpoints: one per seed, in the order of the stacked models; written now and then, by worker 0. All resume
            from the same number of steps.
        worker: this process.
        name: of the training, for its progress lines.
        precision: context of forward passes, such as `torch.autocast`.
        check_steps: steps between checks for a loss that is not finite; each check waits for the GPU.

    Raises:
        CandidateFailed: the loss is not finite.
        InfrastructureFailed: a checkpoint cannot be written.
        SeedsApart: the checkpoints are not of the same step; nothing was trained.
    """
    if worker.world > 1:
        # Worker 0 comes here once no worker of a killed command writes any more: all resume from one checkpoint.
        dist.barrier()
    _resume(state, checkpoints, worker.log)
    state.model.train()
    worker.log(f"training {name} from step {state.step:,} to {state.steps:,}")
    worker.log(Progress(f"training {name}", state.step, state.steps))
    objective = _Objective(state.model)
    # Buffers are the experts' loads, which each worker counts, and biases, which stay equal without an exchange.
    parallel = DistributedDataParallel(objective, broadcast_buffers=False) if worker.world > 1 else objective
    interval = checkpoints[0].interval_s
    paths, identities = [file.path for file in checkpoints], [file.identity for file in checkpoints]
    saved = logged = time.monotonic()
    first = 0
    for phase in phases:
        objective.loss, end = phase.loss, first + phase.steps
        while state.step < end:
            rate = _take_step(state, phase, state.step - first, parallel, worker, precision)
            due = worker.rank == 0 and time.monotonic() - saved >= interval
            if due or state.step % check_steps == 0:
                _check_finite(state, check_steps)
            if due:
                began = time.monotonic()
                state.save(paths, identities)
                saved = time.monotonic()
                interval = next_interval(checkpoints[0].interval_s, saved - began)
            if time.monotonic() - logged > _LOG_S or state.step == end:
                loss = float(state.losses[state.step - 1].mean())
                detail = f"{f'{phase.name}, ' * (len(phases) > 1)}loss {loss:.3f}, lr {rate:.2e}"
                worker.log(Progress(f"training {name}", state.step, state.steps, detail))
                logged = time.monotonic()
        if state.step == end and phase.keep is not None and worker.rank == 0:
            state.save([path.with_name(phase.keep) for path in paths], identities)
        first = end
    _check_finite(state, check_steps)
    if not all(bool(parameter.isfinite().all()) for parameter in state.model.parameters()):
        raise CandidateFailed("diverged", "the last step left weights that are not finite; a lower lr may help")
    if worker.rank == 0:
        state.save(paths, identities)


def device_of(name: str = "auto") -> torch.device:
    """Returns a torch device; 'auto': CUDA where there is one, else the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def precision_of(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Returns the context of forward passes whose matrix products have `precision`; weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def training_precision(device: torch.device) -> AbstractContextManager[object]:
    """Returns bfloat16 on GPUs, with float32 weights (LFM2 report, section 4.2.2); else float32, as fast on CPUs."""
    return precision_of(device, "bfloat16" if device.type == "cuda" else "float32")


def native_precision(device: torch.device) -> Precision:
    """Returns bfloat16 where a device multiplies it faster: GPUs since Ampere, x86 with AVX-512 BF16 or AMX."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    features = torch.cpu.get_capabilities()
    return "bfloat16" if features.get("amx_bf16") or features.get("avx512_bf16") else "float32"


def next_interval(interval_s: float, saving_s: float) -> float:
    """Returns the seconds to the next checkpoint after one that took `saving_s`; an interval of 0 stays 0."""
    return max(interval_s, _SAVE_SHARE * saving_s) if interval_s else 0.0


class _Objective(nn.Module):
    """The loss as a module's forward pass, which is what DDP wraps."""

    loss: Callable[..., Tensor]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.loss(self.model, *tensors)


def _resume(state: TrainingState, checkpoints: Sequence[TrainingCheckpoint], log: Log) -> None:
    latest = [checkpoint.latest(log) for checkpoint in checkpoints]
    files = [file for file in latest if file is not None]
    if not files:
        return
    if len(files) < len(latest):
        raise SeedsApart
    state.restore([path for path, _ in files])
    if files[0][0] != checkpoints[0].path:
        state.seconds = state.cpu_seconds = 0.0


def _take_step(
    state: TrainingState,
    phase: TrainingPhase,
    step: int,
    objective: nn.Module,
    worker: Worker,
    precision: Callable[[], AbstractContextManager[object]],
) -> float:
    """Takes one optimiser step, with the gradients of all passes and workers added up; returns its learning rate."""
    if worker.world > 1:
        # Workers wait together, between steps: one that waited alone would block the others in their next exchange.
        if worker.rank == 0:
            worker.yield_hook()
        dist.barrier()
    with state.timed():
        passes, rate = phase.batches(step), phase.rate(step)
    total = torch.zeros_like(state.losses[0])
    for number, tensors in enumerate(passes):
        if worker.world == 1:
            worker.yield_hook()
        # DDP exchanges gradients in the last pass of a step only.
        parallel = objective if isinstance(objective, DistributedDataParallel) else None
        with state.timed(), parallel.no_sync() if parallel and number < len(passes) - 1 else nullcontext():
            with precision():
                loss = objective(*(tensor.to(worker.device, non_blocking=True) for tensor in tensors))
            torch.autograd.backward(loss.sum() * worker.world)  # DDP averages where a sum is wanted
            total += loss.detach()
    with state.timed():
        if worker.world > 1:
            dist.all_reduce(total)
        clip_gradients(state.model, state.optimiser.clip, state.seeds is not None)
        for optimiser in state.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["share"]
            optimiser.step()
            optimiser.zero_grad()
        if worker.world > 1:
            for module in state.model.modules():
                if isinstance(module, ExpertBias):
                    dist.all_reduce(module.load)
        balance_experts(state.model, state.optimiser.balance_rate)
        if state.average is not None:
            move_average([*state.average.parameters()], [*state.model.parameters()], state.ema, state.step)
        state.losses[state.step] = total
        state.step += 1
    return rate


def _check_finite(state: TrainingState, steps: int) -> None:
    """Checks the last `steps` losses; those before were checked then."""
    first = max(0, state.step - steps)
    with state.timed():  # where the time of the GPU's work shows
        finite = state.losses[first : state.step].isfinite().cpu()
    if not finite.all():
        step = first + int(finite.view(len(finite), -1).all(1).int().argmin()) + 1
        raise CandidateFailed("diverged", f"the loss is not finite at step {step:,}; a lower lr may help")


@torch.no_grad()
def move_average(averages: list[Tensor], current: list[Tensor], decay: float, updates: int) -> None:
    """Updates an exponential moving average whose decay starts low.

    After n updates the decay is min(decay, (1 + n) / (10 + n)), so that a training of a hundred steps is not averaged
    with its start values; the first one copies.
    """
    share = min(decay, (1 + updates) / (10 + updates)) if updates else 0.0
    torch._foreach_lerp_(averages, current, 1 - share)


def thinned(losses: Tensor, points: int) -> list[tuple[int, float]]:
    """Returns at most `points` pairs of a step and the mean loss since the pair before."""
    stride = max(1, math.ceil(len(losses) / points))
    ends = [min(start + stride, len(losses)) for start in range(0, len(losses), stride)]
    return [(end, losses[start:end].double().mean().item()) for start, end in pairwise([0, *ends])]


def save_tensors(tensors: Mapping[str, Tensor], path: Path, scalars: Scalars) -> None:
    """Writes a safetensors file atomically and durably, with `scalars` as JSON in its header.

    Raises:
        InfrastructureFailed: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"scalars": json.dumps(scalars)})
        with Path(temporary).open("rb") as file:
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except SafetensorError as error:  # raised for a full disk, too
        raise InfrastructureFailed(f"cannot write {path}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
