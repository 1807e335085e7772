"""What a training goes on from, and its checkpoint: one safetensors file, scalars as JSON in its header."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nas.core.errors import InfrastructureFailed
from nas.nn.model import Model
from nas.proxy.job import TrainJob, proxy_layout

_BETAS = (0.9, 0.95)


class TrainState:
    """Model, weight average, optimiser state and losses after `step` steps.

    Args:
        job: the training; its seed draws the start values.
        device: where it runs.
    """

    def __init__(self, job: TrainJob, device: torch.device) -> None:
        self.step = 0
        self.model = Model(proxy_layout(job), job.seed).to(device)
        self.average = AveragedModel(self.model, multi_avg_fn=moving_average(job.ema))
        self.average.eval()
        self.optimizer = _adamw(self.model, job)
        self.losses = torch.zeros(job.steps, device=device)

    def save(self, path: Path, scalars: dict[str, float | str]) -> None:
        """Writes the state and `scalars` atomically."""
        losses = self.losses[: self.step]
        save_atomically({**self._named(), "losses": losses}, path, {"step": self.step, **scalars})

    def restore(self, path: Path) -> dict[str, float | str]:
        """Takes over the state at `path`, in place, and returns the scalars that were saved with it.

        Raises:
            SafetensorError: the file is damaged.
        """
        with safe_open(path, "pt", device=str(self.losses.device)) as file:
            scalars: dict[str, float | str] = json.loads(file.metadata()["scalars"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.step = int(scalars["step"])
        self.losses[: self.step] = tensors["losses"]
        self.model.load_state_dict(_part(tensors, "model."))
        self.average.load_state_dict(_part(tensors, "average."))
        for name, parameter in self.model.named_parameters():
            if moments := _part(tensors, f"optimizer.{name}:"):
                self.optimizer.state[parameter] = dict(moments)
        return scalars

    def averaged_weights(self) -> dict[str, Tensor]:
        """State dict of the weight average, as `nas.nn.model.Model` loads it."""
        return dict(self.average.module.state_dict())

    def _named(self) -> dict[str, Tensor]:
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        named |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            named |= {f"optimizer.{name}:{key}": value for key, value in moments.items()}
        return named


def moving_average(decay: float) -> Callable[[Any, Any, Tensor | int], None]:
    """An update rule for `AveragedModel`: an exponential moving average whose decay starts low.

    After n updates the decay is min(decay, (1 + n) / (10 + n)), so that a training of a hundred steps is not averaged
    with its start values.
    """

    @torch.no_grad()
    def update(averages: list[Tensor], current: list[Tensor], updates: Tensor | int) -> None:
        n = int(updates)
        torch._foreach_lerp_(averages, current, 1 - min(decay, (1 + n) / (10 + n)))

    return update


def save_atomically(tensors: dict[str, Tensor], path: Path, scalars: dict[str, float | str]) -> None:
    """Writes a safetensors file that is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary, metadata={"scalars": json.dumps(scalars)})
        Path(temporary).replace(path)
    except SafetensorError as error:  # how the library tells a full disk
        raise InfrastructureFailed(f"cannot write {path}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _adamw(model: nn.Module, job: TrainJob) -> torch.optim.AdamW:
    """AdamW that decays matrices, not gains (Loshchilov and Hutter 2019)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.lr, betas=_BETAS, fused=True)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def thinned(losses: Tensor, points: int = 60) -> list[tuple[int, float]]:
    """(step, mean loss since the point before), at most `points` of them."""
    stride = math.ceil(len(losses) / points)
    ends = [min(start + stride, len(losses)) for start in range(0, len(losses), stride)]
    return [(end, losses[start:end].double().mean().item()) for start, end in pairwise([0, *ends])]
