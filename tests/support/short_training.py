"""Trains small models for a few seconds: unlike fresh weights, they do not generate endless repetitions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F

from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights

STOCK = {
    "lfm2": "d128 v256 ffn=swiglu:256 [C3 A4/2 C3 A4/1]",
    "lfm2moe": "d128 v256 ffn=moe:8x2:64 [C3+swiglu:256 A4/2 C3 A4/2]",
    "qwen3": "d128 v256 ffn=swiglu:256 [A4/2*3]",
    "llama": "d128 v256 ffn=swiglu:256 [A4/2(qk_norm=0)*3]",
}
"""Byte-level layouts of the stock architectures of llama.cpp, by their names there."""
_ROWS, _LENGTH, _RATE = 4, 48, 5e-3


def learned_checkpoint(layout: Layout, text: bytes, path: Path, steps: int = 80) -> Checkpoint:
    """Trains a byte-level model for `steps` steps on `text` and saves it at `path`; two seconds for one of `STOCK`."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model, generator = Model(layout, seed=0).train(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE)
    for _ in range(steps):
        starts = torch.randint(len(data) - _LENGTH - 1, (_ROWS,), generator=generator).tolist()
        rows = torch.stack([data[start : start + _LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    save_weights(model, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())
