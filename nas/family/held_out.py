"""Bits per byte of held-out text: a measure that does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.family.packing import held_out_windows
from nas.family.tokens import Tokens
from nas.family.vocabulary import Vocabulary

ALL = "all"
_LOGITS_AT_ONCE = 1 << 24

Logits = Callable[[Tensor], Tensor]
"""Ids [1, T] -> logits [T, V]."""


def bits_per_byte(
    logits: Logits,
    sources: Sequence[Tokens],
    vocabulary: Vocabulary,
    length: int,
    before_each: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Source -> bits per byte of its held-out text, and `ALL` of them together.

    The text is read in windows of `length` tokens, each without the ones before. Predictions of the marks between
    documents are not counted, as the marks are no bytes of the text.

    Args:
        logits: the model.
        sources: what is scored.
        vocabulary: whose marks are left out.
        length: of a window.
        before_each: called before each window; may block.
    """
    nats = {source.name: 0.0 for source in sources}
    for source in sources:
        for inputs, labels in held_out_windows(source.held_out, length):
            before_each()
            nats[source.name] += _nats(logits(inputs), labels[0], (vocabulary.start, vocabulary.end))
    bits = {source.name: nats[source.name] / math.log(2) / source.held_out_bytes for source in sources}
    whole = sum(nats.values()) / math.log(2) / sum(source.held_out_bytes for source in sources)
    return bits | {ALL: whole}


def _nats(logits: Tensor, labels: Tensor, marks: tuple[int, ...]) -> float:
    labels = labels.to(logits.device)
    text = ~torch.isin(labels, torch.tensor(marks, device=labels.device))
    piece = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    total = 0.0
    parts = (torch.split(tensor, piece) for tensor in (logits, labels, text))
    for part, label, counted in zip(*parts, strict=True):
        loss = F.cross_entropy(part.float(), label, reduction="none").double()
        total += float(loss[counted].sum())
    return total
