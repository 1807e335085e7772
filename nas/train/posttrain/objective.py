"""Losses on answers: cross-entropy, with dropout on embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nas.core.task import IGNORE
from nas.model.nn.model import Model

_LOGITS_AT_ONCE = 1 << 24
"""Most logits of a chunk, which are computed again in the backward pass; see `nas.train.pretrain.loss`."""


def answer_nats(model: Model, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy of each answer token in nats, [N], and the row of the batch that it is in, [N].

    Rows are packed up to their last answer tokens, see `PackedRows`; logits are computed for answer tokens alone.

    Args:
        model: to evaluate.
        inputs: ids [B, T], padded at the end, which no earlier position depends on.
        labels: next ids [B, T]; `IGNORE` where no answer is.
    """
    answers = labels != IGNORE
    return token_nats(model, answer_features(model, inputs, labels), labels[answers]), answers.nonzero()[:, 0]


def answer_features(model: Model, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the input of the output head for each answer token, [N, D]; see `answer_nats`."""
    needed = _needed(labels)
    return model.packed_features(inputs, needed)[(labels != IGNORE)[needed]]


def token_nats(model: Model, features: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy [N] of tokens [N], with the input of the output head for each, [N, D]."""
    return chunked_nats(partial(_nats, model), model.layout.vocab, features, targets)


def chunked_nats(nats: Callable[[Tensor, Tensor], Tensor], logits: int, features: Tensor, targets: Tensor) -> Tensor:
    """Returns cross-entropies [N] in chunks, each of which is computed again in the backward pass.

    Args:
        nats: (features, targets) of a chunk -> cross-entropies.
        logits: of each row.
        features: [N, D].
        targets: [N, ...].
    """
    rows = max(1, _LOGITS_AT_ONCE // logits)
    chunks = zip(torch.split(features, rows), torch.split(targets, rows), strict=True)
    return torch.cat([checkpoint(nats, *chunk, use_reentrant=False) for chunk in chunks])


def _needed(labels: Tensor) -> Tensor:
    """Returns which positions [B, T] stand at or before the last answer token of their row."""
    return (labels != IGNORE).flip(1).cumsum(1).flip(1) > 0


def _nats(model: Model, features: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(features).float(), labels, reduction="none")


@contextmanager
def dropped_embeddings(model: Model, share: float, labels: Tensor, seeds: Tensor) -> Iterator[None]:
    """Sets a random share of the values of token embeddings to zero and scales the others by 1 / (1 - share).

    The LFM2 report (4.2.2) drops 10 % of the embeddings' values in fine-tuning and nothing inside of the model. Which
    are dropped in a row depends on its seed alone, not on the other rows of its pass.

    Args:
        model: computes `answer_nats` of the labels within the context.
        share: from 0 (nothing is dropped) to below 1.
        labels: of the rows, [B, T].
        seeds: of the rows, [B].
    """
    if not share:
        yield
        return
    rows = list(zip(seeds.tolist(), _needed(labels).sum(1).tolist(), strict=True))

    def drop(module: Any, arguments: Any, embedded: Tensor) -> Tensor:
        size = embedded.shape[-1]
        values = [torch.rand(tokens, size, generator=torch.Generator().manual_seed(seed)) for seed, tokens in rows]
        retained = torch.cat(values).view(embedded.shape) >= share
        return embedded * (retained.to(embedded) / (1 - share))

    handle = model.embed.register_forward_hook(drop)
    try:
        yield
    finally:
        handle.remove()
