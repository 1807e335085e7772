"""Time and memory of `nas adapt` on a model of LFM2-350M's shape: `python -m benchmarks.adapt large FOLDER`.

Weights and text are random. Each part of an adaptation is measured in a process of its own, a step or a few hundred
tokens of it, by processor time and peak memory; the whole is arithmetic, with the settings that `nas adapt` has unless
they are given. A part is one file of the folder: run again, it continues. Report: `RECORDED`.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.page import table
from benchmarks.runs import ended_or_killed, say
from nas.core.block import Block
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.core.replacement import Slot, slots_of
from nas.model.nn.fit import Worker
from nas.model.nn.kinds import MODULES
from nas.model.nn.mixes import Predictions, mix_of
from nas.model.nn.model import Model
from nas.model.nn.primitives import draw_weights
from nas.model.nn.transformers import to_transformers, transformers_config
from nas.train.adapt.alternatives import default_alternatives
from nas.train.adapt.checkpoints import import_model
from nas.train.adapt.healing import Healing, batches_of, heal
from nas.train.adapt.library import STREAM_BYTES, Library, LibrarySettings, Stream, TrainedTeacher
from nas.train.adapt.request import AdaptSettings
from nas.train.pretrain.data import Tokens

RECORDED = Path(__file__).parent / "recorded/adapt-large.json"
LAYOUT = Layout.parse(LFM2["LFM2-350M"])
_LENGTH, _BATCH, _PASS, _FEW = 256, 4096, 1024, 512
"""Tokens of a sequence, of a step of the library, of a step of the healing that is measured, and of evaluations."""
_CONV, _ATTENTION = 0, 2
"""Depths of the first layer of each kind."""
_DEADLINE_S = 3600.0

Figures = dict[str, float]


def run(folder: Path) -> None:
    """Measures what the folder lacks, and writes `RECORDED`."""
    context = multiprocessing.get_context("forkserver")
    for name in PARTS:
        if not (folder / f"{name}.json").is_file():
            say(f"measuring: {name}")
            ended_or_killed(context.Process(target=_measure, args=(name, folder)), math.inf, _DEADLINE_S)
    parts = {name: json.loads((folder / f"{name}.json").read_bytes()) for name in PARTS}
    settings = AdaptSettings()
    report = {
        "layout": LAYOUT.format(),
        "settings": settings.model_dump(),
        "parts": parts,
        "whole": whole(parts, settings),
    }
    write_durably(RECORDED, (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps(report["whole"]))


def whole(parts: dict[str, Figures], settings: AdaptSettings) -> Figures:
    """Returns processor hours of an adaptation's steps."""
    library, healing, depth = settings.library, settings.healing, LAYOUT.depth
    layer, head, compared = (parts["forward"][name] for name in ("layer_s", "head_s", "divergence_s"))
    attention = [layer.mixer is not None and layer.mixer.kind == "gqa" for layer in LAYOUT.layers]
    stored_share = min(1.0, STREAM_BYTES / (4 * Stream.numbers(LAYOUT) * library.tokens))
    passed = stored_share * (depth - 1) + (1 - stored_share) * sum(range(depth))
    in_front = library.batch_tokens * layer * passed
    steps = sum(parts["attention" if has_attention else "convolution"]["train_s"] for has_attention in attention)
    steps -= library.batch_tokens * layer * _ATTENTION * sum(attention)  # measured from the embedding on
    scored = depth * (depth * layer + head)  # of a token
    for slot in slots_of(LAYOUT):
        alternatives = default_alternatives(LAYOUT, slot, settings.window)
        scored += len(alternatives) * ((depth - slot.depth) * layer + head + compared)
    seconds = {
        "library": library.steps * (steps + in_front),
        "of that, layers in front of the blocks": library.steps * in_front,
        "scores": (library.score_tokens + library.recall_tokens) * scored,
        "assembling": parts["assembling"]["seconds"],
        "healing": healing.tokens * parts["healing"]["step_s"] / _PASS,
        "report": 3 * settings.report_tokens * (depth * layer + head),
    }
    return {name: value / 3600 for name, value in seconds.items()}


def table_of(report: Mapping[str, Any]) -> str:
    """Returns the tables of a report: parts, and the arithmetic of the whole."""
    parts, hours = report["parts"], report["whole"]
    rows = [
        [
            name,
            ", ".join(f"{key.removesuffix('_s')} {value:.3g} s" for key, value in figures.items() if key != "peak_mb"),
            f"{figures['peak_mb'] / 1000:.1f} GB",
        ]
        for name, figures in parts.items()
        if len(figures) > 1
    ]
    total = table(["whole", "processor hours"], [[name, f"{value:.2g}"] for name, value in hours.items()])
    return f"{table(['part', 'processor time', 'peak memory'], rows)}\n{total}"


def _measure(name: str, folder: Path) -> None:
    figures = PARTS[name](folder)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    write_durably(folder / f"{name}.json", json.dumps(figures | {"peak_mb": int(peak[1]) * 1024 / 1e6}).encode())


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _written(folder: Path) -> Figures:
    """Writes the model as transformers does, in bfloat16; its figures are not reported."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in Model(LAYOUT, seed=0).state_dict().items()}
    save_file(to_transformers(LAYOUT, state), model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(transformers_config(LAYOUT)))
    return {}


def _imported(folder: Path) -> Figures:
    return {"seconds": _seconds(lambda: import_model(folder / "model", folder / "teacher.safetensors"))}


@dataclass
class _Lab:
    teacher: TrainedTeacher
    sources: list[Tokens]
    library: Library


def _lab(folder: Path, score_tokens: int) -> _Lab:
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(LAYOUT.vocab, size=count, dtype=np.uint32) for count in (3 * _BATCH, _BATCH))
    sources = [Tokens("random", "random", train, held_out, 4 * _BATCH)]
    worker = Worker(torch.device("cpu"), say)
    teacher = TrainedTeacher.load(folder / "teacher.safetensors", worker.device)
    settings = LibrarySettings(tokens=_BATCH, length=_LENGTH, batch_tokens=_BATCH, score_tokens=score_tokens)
    return _Lab(teacher, sources, Library(folder / "library", teacher, sources, settings, worker))


@torch.no_grad()
def _forward(folder: Path) -> Figures:
    lab = _lab(folder, _FEW)
    ids = lab.library.text.ids
    teacher, stream = lab.teacher, lab.teacher.before(ids, 0)
    teacher.between(stream, 0, 1)
    layers = _seconds(lambda: teacher.between(stream, 0, LAYOUT.depth))
    head = _seconds(lambda: teacher.logits(stream))
    logits = teacher.logits(stream)
    targets = Predictions.of(logits)
    divergence = _seconds(lambda: targets.divergence(logits))
    tokens = ids.numel()
    return {
        "layer_s": layers / tokens / LAYOUT.depth,
        "head_s": head / tokens,
        "divergence_s": divergence / tokens,
    }


def _trained(folder: Path, depth: int) -> Figures:
    library = _lab(folder, _LENGTH).library
    slots = [slot for slot in slots_of(LAYOUT) if slot.depth == depth]
    alternatives = {slot: default_alternatives(LAYOUT, slot, AdaptSettings().window) for slot in slots}
    return {"train_s": _seconds(lambda: library.train(alternatives))}


def _scored(folder: Path) -> Figures:
    library = _lab(folder, 1 << 11).library  # several windows
    return {"score_s": _seconds(lambda: library.scores({Slot(LAYOUT.depth // 2, "mixer"): (None,)}))}


def _child(teacher: TrainedTeacher) -> Model:
    """Returns a child with half of the key-value heads and three quarters of the hidden units."""
    attention = Block.parse("A16/8", "mixer").canonical(LAYOUT.d_model)
    blocks = {"mixer": Block.parse("A16/4", "mixer"), "ffn": Block.parse("swiglu:3456", "ffn")}
    choice = {
        slot: blocks[slot.part] for slot in slots_of(LAYOUT) if slot.part == "ffn" or slot.block(LAYOUT) == attention
    }
    states = {}
    for slot, block in choice.items():
        module = MODULES[block.kind](block, LAYOUT.d_model)
        draw_weights(module, slot.depth, LAYOUT.depth)
        states[slot] = dict(module.state_dict())
    return mix_of(teacher.model, choice, states)


def _assembling(folder: Path) -> Figures:
    teacher = _lab(folder, _LENGTH).teacher

    return {"seconds": _seconds(lambda: _child(teacher))}


def _healing(folder: Path) -> Figures:
    lab = _lab(folder, _LENGTH)
    settings = Healing(tokens=_PASS, length=_LENGTH, batch_tokens=_PASS)
    heal(lambda: _child(lab.teacher), lab.library, batches_of(lab.sources, settings), settings, folder / "training")
    (trained,) = (folder / "training").glob("*.safetensors")
    with safe_open(trained, "pt") as file:
        return {"step_s": float(json.loads(file.metadata()["scalars"])["cpu_seconds"])}


PARTS: dict[str, Callable[[Path], Figures]] = {
    "writing": _written,
    "import": _imported,
    "forward": _forward,
    "convolution": lambda folder: _trained(folder, _CONV),
    "attention": lambda folder: _trained(folder, _ATTENTION),
    "score": _scored,
    "assembling": _assembling,
    "healing": _healing,
}
