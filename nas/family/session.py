"""One worker's part of a training. Workers are numbered; each takes its share of every step's sequences.

A training can be killed at any moment: it goes on from the last checkpoint and ends with the same weights. On a CPU
that holds bit for bit; on a GPU, whose kernels add in any order, up to rounding, and so it does where it goes on with
another number of workers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nas.core.errors import CandidateFailed
from nas.family.held_out import bits_per_byte
from nas.family.objective import Distilled, pretraining_loss
from nas.family.packing import Packed, Pair
from nas.family.recipe import Recipe, Stage
from nas.family.tokens import Tokens
from nas.family.training_state import TrainingState
from nas.family.vocabulary import Vocabulary
from nas.nn.model import Model
from nas.nn.moe import ExpertBias, balance_experts

CHECKPOINT = "checkpoint.safetensors"
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}
"""Of a forward pass: enough to keep the processor busy; a step's other tokens are added up from further passes."""
_PAUSE_SAVES = 20
"""Least time between checkpoints, in what writing one takes: that of a billion weights holds 12 GB."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """What is trained on and scored.

    Args:
        stages: sources of each stage, in its order.
        scored: sources whose held-out text is scored.
        vocabulary: of all of them.
    """

    stages: Sequence[Sequence[Tokens]]
    scored: Sequence[Tokens]
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Worker:
    """Who this process is among the workers of a training.

    Args:
        rank: its number, from 0.
        world: number of workers.
        device: its own.
        yield_hook: called before each pass; may block (the host lock waits there).
        log: takes one line at a time; called by worker 0 alone.
    """

    rank: int
    world: int
    device: torch.device
    yield_hook: Callable[[], object]
    log: Log


class Session:
    """A training in this process: from its checkpoint, where there is one, to its end.

    Args:
        model: with start values; moved to the worker's device.
        recipe: what is done.
        data: with what.
        key: of the training.
        folder: holds its checkpoint.
        worker: this process.
        teacher: None: no distillation.
    """

    def __init__(
        self, model: Model, recipe: Recipe, data: Data, key: str, folder: Path, worker: Worker,
        teacher: Model | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.data, self.key, self.folder, self.worker = recipe, data, key, folder, worker
        self._plan = [(stage, recipe.steps(stage)) for stage in recipe.stages]
        self.steps = sum(steps for _, steps in self._plan)
        self.state = TrainingState(model.to(worker.device), recipe, self.steps)
        distilled = None
        if teacher is not None:
            how = recipe.distillation
            distilled = Distilled(teacher.to(worker.device).eval(), how.weight, how.temperature, how.k)
        self._loss: nn.Module = _Loss(model, distilled)
        self._restore()
        if worker.world > 1:
            # Buffers are the experts' loads, which each worker counts, and biases, which stay equal by themselves.
            self._loss = DistributedDataParallel(self._loss, broadcast_buffers=False)

    def run(self, checkpoint_s: float = 60.0, log_s: float = 10.0) -> None:
        """Trains the steps that are left; saves now and then and at the end.

        Args:
            checkpoint_s: least seconds between checkpoints, see `pause_s`.
            log_s: least seconds between lines of progress.

        Raises:
            CandidateFailed: the loss is no longer finite.
        """
        state, began = self.state, 0
        state.model.train()
        self._log(f"training {self.key[:12]} from step {state.step:,} to {self.steps:,}")
        saved = said = time.monotonic()
        pause = checkpoint_s
        for number, (stage, steps) in enumerate(self._plan):
            batches = packed(self.recipe, number, self.data.stages[number])
            while state.step < began + steps:
                loss, rate = self._step(stage, batches, state.step - began, steps)
                if self._due(saved, pause):
                    pause = pause_s(checkpoint_s, self._save())
                    saved = time.monotonic()
                if time.monotonic() - said > log_s or state.step == began + steps:
                    self._log(f"{stage.name}: step {state.step:,} of {self.steps:,}, loss {loss:.3f}, lr {rate:.2e}")
                    said = time.monotonic()
            began += steps
        self._save()

    def held_out(self) -> dict[str, float]:
        """Bits per byte of the held-out text; see `nas.family.held_out`."""
        model = self.state.model.eval()

        @torch.no_grad()
        def logits(tokens: Tensor) -> Tensor:
            with self._precision():
                whole: Tensor = model(tokens.to(self.worker.device))
            return whole[0]

        length = self.recipe.stages[0].length
        return bits_per_byte(logits, self.data.scored, self.data.vocabulary, length, self.worker.yield_hook)

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(steps * self.recipe.sequences(stage) * stage.length for stage, steps in self._plan)

    def _step(self, stage: Stage, batches: Packed, step: int, steps: int) -> tuple[float, float]:
        """One optimiser step; its mean loss per token and its learning rate."""
        self._pause()
        began, state = time.monotonic(), self.state
        pair = batches.batch(step, self.worker.rank, self.worker.world)
        loss = self._gradients(pair, self.recipe.sequences(stage) * stage.length)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.recipe.clip)
        rate = self.recipe.lr * stage.schedule.factor(step, steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.optimizer.step()
        state.optimizer.zero_grad()
        self._balance()
        mean = float(loss)
        if not math.isfinite(mean):
            raise CandidateFailed("diverged", f"the loss is not finite at step {state.step + 1:,}; a lower lr may help")
        state.losses[state.step] = mean
        state.step += 1
        state.seconds += time.monotonic() - began
        return mean, rate

    def _gradients(self, pair: Pair, tokens: int) -> Tensor:
        """Adds up gradients of the step's mean loss, and returns that mean over all workers."""
        rows = max(1, _TOKENS_AT_ONCE[self.worker.device.type] // pair[0].shape[1])
        parts = list(zip(*(torch.split(tensor, rows) for tensor in pair), strict=True))
        total = torch.zeros((), device=self.worker.device)
        for number, (inputs, labels) in enumerate(parts):
            if self.worker.world == 1:
                self.worker.yield_hook()
            with self._sync(number == len(parts) - 1):
                with self._precision():
                    loss = self._loss(inputs.to(self.worker.device), labels.to(self.worker.device)) / tokens
                torch.autograd.backward(loss * self.worker.world)  # DDP averages where a sum is wanted
            total += loss.detach()
        if self.worker.world > 1:
            dist.all_reduce(total)
        return total

    def _sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """DDP exchanges gradients in a step's last pass only."""
        if last or not isinstance(self._loss, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._loss.no_sync()

    def _pause(self) -> None:
        """Lets measurements go first where there are several workers: together, between steps.

        Else one would wait with its share of the machine for another that has given up its own.
        """
        if self.worker.world > 1:
            if self.worker.rank == 0:
                self.worker.yield_hook()
            dist.barrier()

    def _balance(self) -> None:
        if self.worker.world > 1:
            for module in self.state.model.modules():
                if isinstance(module, ExpertBias):
                    dist.all_reduce(module.load)
        balance_experts(self.state.model, self.recipe.balance_rate)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        """bfloat16 on GPUs, with float32 weights (report, section 4.2.2); float32 on CPUs, where it is no slower."""
        if self.worker.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def _restore(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            self.state.restore(path, self.key)
        except SafetensorError as error:
            self._log(f"{path} is damaged, training from the start: {error}")

    def _due(self, saved: float, every_s: float) -> bool:
        return self.worker.rank == 0 and time.monotonic() - saved >= every_s

    def _save(self) -> float:
        """The seconds that it took."""
        began = time.monotonic()
        if self.worker.rank == 0:
            self.state.save(self.folder / CHECKPOINT, self.key)
        return time.monotonic() - began

    def _log(self, line: str) -> None:
        if self.worker.rank == 0:
            self.worker.log(line)


def pause_s(least: float, saving: float) -> float:
    """Seconds to the next checkpoint, where the last one took `saving` seconds; a `least` of 0: after every step."""
    return max(least, _PAUSE_SAVES * saving) if least else 0.0


def packed(recipe: Recipe, number: int, sources: Sequence[Tokens]) -> Packed:
    """The batches of stage `number`.

    Raises:
        InvalidInput: the sources do not fill a sequence.
    """
    stage = recipe.stages[number]
    return Packed(stage.name, sources, stage.length, recipe.sequences(stage), recipe.seed * 1000 + number)


class _Loss(nn.Module):
    """The objective as a module's forward pass, which is what DDP wraps."""

    def __init__(self, model: Model, distilled: Distilled | None) -> None:
        super().__init__()
        self.model = model
        self._distilled = distilled  # a tuple, so that the teacher's weights are none of this module's

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return pretraining_loss(self.model, inputs, labels, self._distilled)
