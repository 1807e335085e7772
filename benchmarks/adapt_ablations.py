"""Starts and recipes of `python -m benchmarks.adapt ablations`: what trained attention gives to what replaces it.

A student is the benchmark's tiny teacher with another mixer in place of attention in every layer, as the pure models
of Zebra-Llama (Yang et al. 2025, figure 5) and of xLSTM distillation (appendix F.4). Each training is one line of
`RECORDED`; the seed draws weights and the order of the text. All trainings take the same tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lines import read_lines
from benchmarks.page import mean_and_deviation, table
from nas.core.block import Block
from nas.core.replacement import Slot
from nas.model.nn.base import BlockModule
from nas.model.nn.kinds import MODULES
from nas.model.nn.mixes import mix_of
from nas.model.nn.model import Model
from nas.model.nn.primitives import draw_weights
from nas.train.adapt.alternatives import started
from nas.train.adapt.library import SCHEDULE, Library, TrainedTeacher, error_of
from nas.train.pretrain.data import Tokens
from nas.train.pretrain.loss import Distilled, pretraining_loss
from nas.train.pretrain.next_token import Packed

RECORDED = Path(__file__).parent / "recorded/adapt-ablations.jsonl"
STUDENTS = {
    "latent attention": Block.parse("L6/48(nope_dim=8,rope_dim=8)", "mixer"),
    "Mamba-2": Block.parse("M16(expand=1,groups=6,heads=6)", "mixer"),
    "mLSTM": Block.parse("X6(key_dim=16)", "mixer"),
}
ARMS = (("random", "logits"), ("attention", "logits"), ("attention", "staged"), ("random", "staged"))
"""Start of the mixers, and recipe."""
SEEDS = 3
_LENGTH, _SEQUENCES, _STEPS, _ALIGNED = 128, 8, 64, 16
"""Tokens of a sequence, sequences of a step, steps, and those of them that align mixers alone where that is done."""
_ALIGNING_LR, _LR = 3e-3, 1e-3

Row = dict[str, Any]


def run(library: Library, sources: Sequence[Tokens], minutes: float) -> int:
    """Trains what `RECORDED` lacks, seed by seed, and returns the number of trainings that are still missing."""
    end = time.monotonic() + 60 * minutes
    teacher_hash = library.teacher.sha256
    done = {_key(row) for row in recorded() if row["teacher"] == teacher_hash}
    missing = [
        (kind, start, recipe, seed)
        for seed, (start, recipe), kind in itertools.product(range(SEEDS), ARMS, STUDENTS)
        if (kind, start, recipe, seed) not in done
    ]
    while missing and time.monotonic() < end:
        row = train(library, sources, *missing.pop(0))
        with RECORDED.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        library.worker.log(json.dumps(row))
    return len(missing)


def train(library: Library, sources: Sequence[Tokens], kind: str, start: str, recipe: str, seed: int) -> Row:
    """Returns divergences of a student from the teacher, in nats per token of held-out text."""
    began, teacher, block = time.monotonic(), library.teacher, STUDENTS[kind]
    packed = Packed("ablations", sources, _LENGTH, _SEQUENCES, seed)
    mixers = [_mixer(teacher, block, start, seed, depth, packed.batch(0)[0]) for depth in range(teacher.layout.depth)]
    aligned = _ALIGNED if recipe == "staged" else 0
    student = _assembled(teacher, block, mixers)
    first = library.divergence(student.eval())
    if aligned:
        blocks = nn.ModuleList(mixers)
        _descend(blocks, aligned, _ALIGNING_LR, lambda step: _alignment(teacher, blocks, packed.batch(step)[0]))
        student = _assembled(teacher, block, mixers)
    between = library.divergence(student.eval())
    distilled = Distilled(teacher.model, 0.9, 1.0, 64)

    def loss(step: int) -> Tensor:
        return pretraining_loss(student, *packed.batch(aligned + step), distilled) / (_LENGTH * _SEQUENCES)

    losses = _descend(student, _STEPS - aligned, _LR, loss)
    return {
        "teacher": teacher.sha256,
        "kind": kind,
        "block": block.format(),
        "start": start,
        "recipe": recipe,
        "seed": seed,
        "tokens": _STEPS * _SEQUENCES * _LENGTH,
        "aligned_tokens": aligned * _SEQUENCES * _LENGTH,
        "kl_start": first,
        "kl_aligned": between,
        "kl": library.divergence(student.eval()),
        "losses": [round(fmean(losses[i : i + 8]), 4) for i in range(0, len(losses), 8)],
        "seconds": round(time.monotonic() - began, 1),
    }


def recorded() -> list[Row]:
    """Returns all trainings, first to last."""
    return read_lines(RECORDED)


def table_of(rows: Sequence[Row]) -> str:
    """Returns a table of the last teacher's students: mean and standard deviation over the seeds."""
    rows = [row for row in rows if row["teacher"] == rows[-1]["teacher"]]
    lines = []
    for kind, (start, recipe) in itertools.product(STUDENTS, ARMS):
        group = [row for row in rows if _key(row)[:3] == (kind, start, recipe)]
        if group:
            names = ("kl_start", "kl_aligned", "kl") if recipe == "staged" else ("kl_start", "kl")
            spread = {name: mean_and_deviation([row[name] for row in group]) for name in names}
            cells = (spread["kl_start"], spread.get("kl_aligned", "-"), spread["kl"])
            lines.append([kind, start, recipe, *cells, len(group)])
    return table(["mixer", "start", "recipe", "at the start", "aligned", "at the end", "seeds"], lines)


def _key(row: Row) -> tuple[str, str, str, int]:
    return row["kind"], row["start"], row["recipe"], row["seed"]


@torch.no_grad()
def _mixer(teacher: TrainedTeacher, block: Block, start: str, seed: int, depth: int, ids: Tensor) -> BlockModule:
    layers, drawn = teacher.layout.depth, 1000 * seed + depth
    if start == "attention":
        attention = teacher.layer(depth).mixers[0]
        assert isinstance(attention, BlockModule)
        inputs, _ = teacher.inputs_and_outputs(teacher.before(ids, depth), depth)["mixer"]
        return started(block, attention, inputs, drawn, layers)
    module = MODULES[block.kind](block, teacher.layout.d_model)
    draw_weights(module, drawn, layers)
    return module


def _assembled(teacher: TrainedTeacher, block: Block, mixers: Sequence[BlockModule]) -> Model:
    slots = [Slot(depth, "mixer") for depth in range(teacher.layout.depth)]
    states = {slot: dict(mixer.state_dict()) for slot, mixer in zip(slots, mixers, strict=True)}
    return mix_of(teacher.model, dict.fromkeys(slots, block), states)


def _alignment(teacher: TrainedTeacher, mixers: nn.ModuleList, ids: Tensor) -> Tensor:
    """Returns the sum of the mixers' errors, each on the teacher's own inputs."""
    x: Tensor = teacher.model.embed(ids)
    errors = []
    for depth, mixer in enumerate(mixers):
        layer = teacher.layer(depth)
        with torch.no_grad():
            h = layer.mixer_norm(x)
            y: Tensor = layer.mixers[0](h)[0]
            x, _ = layer(x, [None])
        errors.append(error_of(mixer, h, y))
    return torch.stack(errors).sum()


def _descend(model: nn.Module, steps: int, rate: float, loss_of: Callable[[int], Tensor]) -> list[float]:
    """Trains `model` in place and returns the loss of each step."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * SCHEDULE.factor(step, steps)
        loss = loss_of(step)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        assert math.isfinite(losses[-1])
    return losses
