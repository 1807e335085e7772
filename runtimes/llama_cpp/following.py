"""A PyTorch model whose experts are chosen for it.

Where two experts score alike, rounding picks another one and all that follows differs. Held to the same choices, two
computations differ by rounding alone; whether the choices were right is then a question of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FollowedExperts(TorchFunctionMode):
    """Inside it, `nas.nn.moe` sends tokens to the experts given, whatever their scores.

    Args:
        choices: expert numbers [T, top_k] of each mixture, in the order of depth.

    Attributes:
        scores: what each mixture would have chosen by, [T, experts]: score and bias.
    """

    def __init__(self, choices: Sequence[Tensor]) -> None:
        super().__init__()
        self._choices = iter(choices)
        self.scores: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers `topk` with the next choice, passes every other call on."""
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, chosen = args[0], next(self._choices)
        self.scores.append(scores)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
