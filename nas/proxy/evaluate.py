"""Loss and accuracy of a model on an evaluation group."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nas.core.task import IGNORE
from nas.proxy.data import Group


class Score(NamedTuple):
    """`loss` in the group's unit, `accuracy` as a share, both per label."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, group: Group, device: torch.device) -> Score:
    """Mean over all labels of `group`; `model` maps ids [B, T] to logits [B, T, V]."""
    loss, right, labelled = 0.0, 0, 0
    for inputs, labels in group.batches():
        logits, wanted = model(inputs.to(device)).flatten(0, 1).float(), labels.to(device).flatten()
        loss += F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        labelled += int((wanted != IGNORE).sum())
    return Score(loss / labelled / group.unit, right / labelled)
