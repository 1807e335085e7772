"""What a training goes on from: one safetensors file with weights, optimiser state and losses, scalars in its header.

There is no position in the data and no random state: batches follow from the step (`nas.family.packing`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from nas.family.recipe import Recipe
from nas.nn.model import Model
from nas.proxy.state import save_atomically


class TrainingState:
    """Model, optimiser and losses after `step` steps of all stages together.

    Args:
        model: with its start values, on the device where it is trained.
        recipe: of the training.
        steps: of all stages.
    """

    def __init__(self, model: Model, recipe: Recipe, steps: int) -> None:
        self.step = 0
        self.seconds = 0.0
        self.model = model
        self.optimizer = _adamw(model, recipe)
        self.losses = torch.zeros(steps)

    def save(self, path: Path, key: str) -> None:
        """Writes the state atomically."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}:{moment}": value for moment, value in moments.items()}
        tensors["losses"] = self.losses[: self.step]
        save_atomically(tensors, path, {"step": self.step, "seconds": self.seconds, "key": key})

    def restore(self, path: Path, key: str) -> None:
        """Takes over the state at `path`, in place.

        Raises:
            SafetensorError: the file is damaged.
        """
        device = next(self.model.parameters()).device
        with safe_open(path, "pt", device=str(device)) as file:
            scalars = json.loads(file.metadata()["scalars"])
            assert scalars["key"] == key, f"{path} is of another training"
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.step, self.seconds = int(scalars["step"]), float(scalars["seconds"])
        self.losses[: self.step] = tensors["losses"].cpu()
        self.model.load_state_dict(_part(tensors, "model."))
        for name, parameter in self.model.named_parameters():
            if moments := _part(tensors, f"optimizer.{name}:"):
                self.optimizer.state[parameter] = dict(moments)


def _adamw(model: Model, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices, not gains (Loshchilov and Hutter 2019)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
