"""A library of blocks that can replace those of a trained model, and what each replacement costs in quality.

Every alternative is trained alone against input and output of the block that it replaces, in the trained model (Puzzle,
Bercovich et al. 2024, section 3: blockwise local distillation), by the error |y' - y|^2 / |y|^2. Its score is the mean
Kullback-Leibler divergence over held-out text between the trained model and the trained model with this one block
replaced, in nats per token.

    FOLDER/blocks/KEY.safetensors     weights of a trained alternative, with its errors
    FOLDER/scores/KEY.json            score of an alternative
    FOLDER/training/KEY.safetensors   checkpoint of the trainings at one depth; removed when they are done

A key is the hash of all inputs: model, place, block, text, settings. So a library serves every device and budget, grows
when alternatives are added, and can be killed at any moment. While an adaptation runs, it holds a shared lock on
FOLDER/.use.lock, and nothing is removed. The alternatives of one depth are trained in one pass over the text; each has
its own gradients and optimiser state, so that it does not depend on the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from torch import Tensor, nn

from nas.adapt.alternatives import started
from nas.core.block import BLOCKS, Block
from nas.core.canonical import content_hash
from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.replacement import Part, Slot, block_name, slots_of
from nas.nn.base import MODULES, FeedForward, Mixer
from nas.nn.fit import Stage, TrainingCheckpoint, TrainingState, Worker, fit, save_tensors
from nas.nn.model import Model, ResidualLayer
from nas.nn.optimisers import Optimiser
from nas.nn.weights import checkpoint_layout, load_weights
from nas.pretrain.data import Tokens
from nas.pretrain.next_token import Packed, held_out_windows
from nas.pretrain.recipe import wsdc
from nas.release.files import sha256_of

LIBRARY_VERSION = 3
"""Part of keys: increase it with every change to this package after which the same inputs give other numbers."""
_LOCK_S = 4 * 3600.0
_USE = ".use.lock"
_USE_S = 600.0
_CHECKPOINT_S = 60.0
_ROWS, _LOGITS_AT_ONCE = 8, 1 << 25
"""Most windows of held-out text that are evaluated together, and most logits."""

Choice = Mapping[Slot, Block | None]


class LibrarySettings(BaseModel):
    """How alternatives are trained and scored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(1 << 18, ge=1, description="trained on by each alternative")
    length: int = Field(256, ge=8, description="tokens of a sequence")
    batch_tokens: int = Field(4096, ge=8)
    lr: float = Field(1e-3, gt=0)
    seed: int = Field(0, ge=0)
    score_tokens: int = Field(1 << 14, ge=8, description="of held-out text that scores are computed on")

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return max(1, self.batch_tokens // self.length)

    @property
    def steps(self) -> int:
        """Optimiser steps of an alternative."""
        return max(1, round(self.tokens / (self.sequences * self.length)))


@dataclass(frozen=True, eq=False)
class TrainedTeacher:
    """The trained model that blocks are replaced in."""

    model: Model
    sha256: str

    @staticmethod
    def load(checkpoint: Path, device: torch.device) -> TrainedTeacher:
        """Loads a checkpoint that names its layout.

        Raises:
            InvalidInput: the file is no such checkpoint.
            Unsupported: its layers cannot be replaced one by one.
        """
        layout = checkpoint_layout(checkpoint)
        slots_of(layout)
        model = Model(layout, None)
        load_weights(model, checkpoint)
        return TrainedTeacher(model.to(device).eval().requires_grad_(False), sha256_of(checkpoint))

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        return self.model.layout

    def layer(self, depth: int) -> ResidualLayer:
        """Returns the module of a layer."""
        layer = self.model.layers[str(depth)]
        assert isinstance(layer, ResidualLayer)
        return layer

    def before(self, tokens: Tensor, depth: int) -> Tensor:
        """Returns the residual stream in front of the layer at `depth`: ids [B, T] -> [B, T, D]."""
        x: Tensor = self.model.embed(tokens)
        return self.between(x, 0, depth)

    def between(self, x: Tensor, first: int, last: int) -> Tensor:
        """Runs the layers from `first` to in front of `last`."""
        for depth in range(first, last):
            layer = self.layer(depth)
            x, _ = layer(x, [None] * len(layer.mixers))
        return x

    def replaced(self, x: Tensor, depth: int, part: Part, block: nn.Module | None) -> Tensor:
        """Runs the layer at `depth` with another mixer or feed-forward, None: without it; or without the layer."""
        if part == "layer":
            return x
        layer = self.layer(depth)
        if layer.mixers:
            mixer = block if part == "mixer" else layer.mixers[0]
            if isinstance(mixer, Mixer):
                x = x + mixer(layer.mixer_norm(x))[0]
        ffn = block if part == "ffn" else layer.ffn
        return x + ffn(layer.ffn_norm(x)) if isinstance(ffn, FeedForward) else x

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits after the last layer: [B, T, D] -> [B, T, V]."""
        return self.model.logits(self.model.norm(x)).float()

    def inputs_and_outputs(self, tokens: Tensor, depth: int) -> dict[Part, tuple[Tensor, Tensor]]:
        """Returns normalised input and output, both [B, T, D], of the blocks of a layer."""
        layer, x = self.layer(depth), self.before(tokens, depth)
        found: dict[Part, tuple[Tensor, Tensor]] = {}
        if layer.mixers:
            h = layer.mixer_norm(x)
            y: Tensor = layer.mixers[0](h)[0]
            found["mixer"], x = (h, y), x + y
        if layer.ffn is not None:
            h = layer.ffn_norm(x)
            found["ffn"] = (h, layer.ffn(h))
        return found


class BlockRecord(BaseModel):
    """What training an alternative gave: its normalised error on held-out text, before and after."""

    model_config = ConfigDict(frozen=True)

    key: str
    error_start: float
    error: float


class Library:
    """The alternatives of one trained model.

    Args:
        folder: of the library; several models and processes may use one.
        teacher: the trained model.
        sources: text; alternatives are trained on its training parts and scored on its held-out ones.
        settings: of trainings and scores.
        worker: this process.

    Raises:
        InvalidInput: there is too little text to train on, or to score on.
    """

    def __init__(
        self,
        folder: Path,
        teacher: TrainedTeacher,
        sources: Sequence[Tokens],
        settings: LibrarySettings,
        worker: Worker,
    ) -> None:
        self.folder, self.teacher, self.settings, self.worker = folder, teacher, settings, worker
        self._packed = Packed("library", sources, settings.length, settings.sequences, settings.seed)
        self._text = [source.key for source in sources]
        self._windows = list(_held_out(sources, settings, teacher.layout.vocab))
        for name in ("blocks", "scores", "training"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def key(self, slot: Slot, block: Block) -> str:
        """Returns the key of a trained alternative."""
        settings = self.settings.model_dump(exclude={"score_tokens"})
        return content_hash(
            [LIBRARY_VERSION, self._place(slot, block), self._text, settings, BLOCKS.version(block.kind)]
        )

    def train(self, alternatives: Mapping[Slot, Sequence[Block | None]]) -> None:
        """Trains the alternatives that the library lacks, depth by depth.

        Raises:
            CandidateFailed: a loss is not finite.
            InfrastructureFailed: the disk is full, or another process trains the same for hours.
        """
        for slot, block in self._trained(alternatives):
            if (path := self.file(slot, block)).is_file():
                path.touch()  # `trim` removes the least recently used first
        for depth in range(self.teacher.layout.depth):
            wanted = [(slot, block) for slot, each in alternatives.items() if slot.depth == depth for block in each]
            trained = [(slot, block) for slot, block in wanted if block is not None]
            if all(self.file(slot, block).is_file() for slot, block in trained):
                continue
            lock = self.folder / f".{self.teacher.sha256[:16]}-{depth}.lock"
            with locked(lock, _LOCK_S, waiting=lambda: self.worker.log("another process trains these blocks")):
                self._train([each for each in trained if not self.file(*each).is_file()], depth)

    def in_use(self) -> AbstractContextManager[None]:
        """Returns a context in which no file of the library is removed by `trim`.

        Raises:
            InfrastructureFailed: files are being removed for minutes.
        """
        return locked(self.folder / _USE, _USE_S, shared=True)

    def missing_bytes(self, alternatives: Mapping[Slot, Sequence[Block | None]]) -> int:
        """Returns the disk space that `train` takes: untrained blocks, and the largest checkpoint of a depth.

        A checkpoint holds each weight with at most two moments, in float32, beside the one that it replaces.
        """
        sizes = [0] * self.teacher.layout.depth
        for slot, block in self._trained(alternatives):
            if not self.file(slot, block).is_file():
                with torch.device("meta"):
                    module = MODULES[block.kind](block, self.teacher.layout.d_model)
                sizes[slot.depth] += 4 * sum(tensor.numel() for tensor in module.state_dict().values())
        return sum(sizes) + 2 * 3 * max(sizes)

    def file(self, slot: Slot, block: Block) -> Path:
        """Returns the path of a trained alternative."""
        return self.folder / "blocks" / f"{self.key(slot, block)}.safetensors"

    def record(self, slot: Slot, block: Block) -> BlockRecord:
        """Returns the errors of a trained alternative."""
        path = self.file(slot, block)
        with safe_open(path, "pt") as file:
            scalars: dict[str, Any] = json.loads(file.metadata()["scalars"])
        return BlockRecord(key=path.stem, error_start=scalars["error_start"], error=scalars["error"])

    def weights(self, slot: Slot, block: Block) -> dict[str, Tensor]:
        """Returns the state dict of a trained alternative, on the CPU."""
        with safe_open(self.file(slot, block), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping

    def module(self, slot: Slot, block: Block) -> nn.Module:
        """Returns the module of a trained alternative, on the worker's device."""
        own = self._own(slot)
        module = MODULES[block.kind](block, own.d_model)
        module.load_state_dict(self.weights(slot, block))
        return module.to(self.worker.device).eval().requires_grad_(False)

    def scores(self, alternatives: Mapping[Slot, Sequence[Block | None]]) -> dict[tuple[Slot, Block | None], float]:
        """Returns the score of each alternative; those that are missing are computed, depth by depth."""
        for depth in range(self.teacher.layout.depth):
            pending = [
                (slot, block)
                for slot, blocks in alternatives.items()
                for block in blocks
                if slot.depth == depth and not self._score_path(slot, block).is_file()
            ]
            if pending:
                self._score(pending, depth)
        return {
            (slot, block): float(json.loads(self._score_path(slot, block).read_bytes())["kl"])
            for slot, blocks in alternatives.items()
            for block in blocks
        }

    @property
    def text(self) -> Tensor:
        """Held-out text that scores are computed on: ids [windows, length]."""
        return torch.cat(self._windows)

    def divergence(self, model: Model) -> float:
        """Returns the divergence of a whole model from the trained one, in nats per token, on the text of scores."""
        total = tokens = 0.0
        with torch.no_grad():
            for window in self._windows:
                ids = window.to(self.worker.device)
                known = self.teacher.logits(self.teacher.before(ids, self.teacher.layout.depth))
                total += divergence_of(distribution_of(known), model(ids).float())
                tokens += ids.numel()
        return total / tokens

    @staticmethod
    def _trained(alternatives: Mapping[Slot, Sequence[Block | None]]) -> Iterator[tuple[Slot, Block]]:
        return ((slot, block) for slot, blocks in alternatives.items() for block in blocks if block is not None)

    def _place(self, slot: Slot, block: Block | None) -> list[Any]:
        return [self.teacher.sha256, slot.depth, slot.part, block_name(block)]

    def _score_path(self, slot: Slot, block: Block | None) -> Path:
        trained = None if block is None else self.key(slot, block)
        own = [self.settings.length, self.settings.score_tokens]
        key = content_hash([LIBRARY_VERSION, self._place(slot, block), trained, self._text, own])
        return self.folder / "scores" / f"{key}.json"

    def _own(self, slot: Slot) -> Any:
        layer = self.teacher.layer(slot.depth)
        return layer.mixers[0] if slot.part == "mixer" else layer.ffn

    def _train(self, missing: Sequence[tuple[Slot, Block]], depth: int) -> None:
        if not missing:
            return
        settings, teacher, device = self.settings, self.teacher, self.worker.device
        keys = {self.key(slot, block): (slot, block) for slot, block in missing}
        parts = {key: slot.part for key, (slot, _) in keys.items()}
        with torch.no_grad():
            known = teacher.inputs_and_outputs(self._packed.batch(0)[0].to(device), depth)
        modules = {
            key: started(block, self._own(slot), known[slot.part][0], settings.seed, teacher.layout.depth)
            for key, (slot, block) in keys.items()
        }
        blocks = nn.ModuleDict(modules).to(device)
        before = self._errors(blocks, parts, depth)

        def loss(model: nn.ModuleDict, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                known = teacher.inputs_and_outputs(tokens, depth)
            errors = [error_of(module, *known[parts[key]]) for key, module in model.items()]
            return torch.stack(errors).sum()

        state = TrainingState(blocks, Optimiser(weight_decay=0.0, clip=float("inf"), balance_rate=0.0), settings.steps)
        stage = Stage(
            name=f"depth {depth}",
            steps=settings.steps,
            tokens=settings.sequences * settings.length,
            batches=lambda step: [(self._packed.batch(step)[0],)],
            loss=loss,
            rate=lambda step: settings.lr * wsdc(step, settings.steps, warmup=0.05, decay=0.5, final=0.1),
        )
        name = content_hash(sorted(keys))
        checkpoint = TrainingCheckpoint(
            self.folder / "training" / f"{name}.safetensors", {"key": name}, interval_s=_CHECKPOINT_S
        )
        fit(state, [stage], [checkpoint], self.worker, name=f"{len(keys)} blocks of depth {depth}")
        after = self._errors(blocks.eval(), parts, depth)
        for key, (slot, block) in keys.items():
            scalars = {"block": block_name(block), "part": slot.part, "depth": depth, "error_start": before[key]}
            save_tensors(modules[key].state_dict(), self.file(slot, block), scalars | {"error": after[key]})
        checkpoint.path.unlink(missing_ok=True)

    @torch.no_grad()
    def _errors(self, blocks: nn.ModuleDict, parts: Mapping[str, Part], depth: int) -> dict[str, float]:
        """Returns the error of each block on the held-out text."""
        found = dict.fromkeys(parts, 0.0)
        for window in self._windows:
            known = self.teacher.inputs_and_outputs(window.to(self.worker.device), depth)
            for key, part in parts.items():
                found[key] += float(error_of(blocks[key], *known[part])) / len(self._windows)
        return found

    @torch.no_grad()
    def _score(self, pending: Sequence[tuple[Slot, Block | None]], depth: int) -> None:
        teacher = self.teacher
        last = teacher.layout.depth
        modules = [None if block is None else self.module(slot, block) for slot, block in pending]
        totals, tokens = [0.0] * len(pending), 0
        for window in self._windows:
            self.worker.yield_hook()
            x = teacher.before(window.to(self.worker.device), depth)
            known = distribution_of(teacher.logits(teacher.between(x, depth, last)))
            for i, ((slot, _), module) in enumerate(zip(pending, modules, strict=True)):
                after = teacher.replaced(x, depth, slot.part, module)
                totals[i] += divergence_of(known, teacher.logits(teacher.between(after, depth + 1, last)))
            tokens += window.numel()
        for (slot, block), total in zip(pending, totals, strict=True):
            content = {"depth": depth, "part": slot.part, "block": block_name(block), "kl": total / tokens}
            write_durably(self._score_path(slot, block), json.dumps(content).encode())
        self.worker.log(f"depth {depth}: {len(pending)} alternatives scored")


def trim(folder: Path, limit_bytes: int) -> int:
    """Removes checkpoints and trained blocks of a library above `limit_bytes`, least recently used first.

    Nothing is removed while an adaptation runs. What was removed is trained again when it is needed, with the same
    result. Scores stay: they are small.

    Returns:
        The bytes removed.
    """
    removed = 0
    try:
        with locked(folder / _USE, 0.0):
            files = [path for part in ("training", "blocks") for path in (folder / part).glob("*.safetensors")]
            known = {path: path.stat() for path in files}
            excess = sum(each.st_size for each in known.values()) - limit_bytes
            for path in sorted(files, key=lambda each: known[each].st_mtime_ns):
                if removed >= excess:
                    break
                path.unlink()
                removed += known[path].st_size
    except InfrastructureFailed:  # locked
        return 0
    return removed


def _held_out(sources: Sequence[Tokens], settings: LibrarySettings, vocab: int) -> Iterator[Tensor]:
    """Yields ids [rows, length] of held-out text, `score_tokens` in all, evenly from the sources."""
    each = max(1, settings.score_tokens // settings.length // len(sources))
    windows = [
        inputs[0]
        for source in sources
        for inputs, _ in islice(held_out_windows(source.held_out, settings.length), each)
    ]
    whole = [window for window in windows if len(window) == settings.length]
    if not whole:
        count = sum(len(source.held_out) for source in sources)
        raise InvalidInput(
            f"{', '.join(source.name for source in sources)}: {count:,} tokens are held out, but scores take"
            f" {settings.length:,} in a row; give more text, or a larger `held_out` in --config",
            where="--corpus",
        )
    rows = max(1, min(_ROWS, _LOGITS_AT_ONCE // (settings.length * vocab)))
    for start in range(0, len(whole), rows):
        yield torch.stack(whole[start : start + rows])


def error_of(block: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    """Returns |block(h) - y|^2 / |y|^2."""
    out = block(h)
    found: Tensor = (out[0] if isinstance(block, Mixer) else out) - y
    return found.float().square().mean() / y.float().square().mean().clamp_min(1e-12)


def distribution_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log p and p of logits [B, T, V]: most of the work of a divergence, once for all alternatives."""
    log_p = logits.log_softmax(-1)
    return log_p, log_p.exp()


def divergence_of(known: tuple[Tensor, Tensor], other: Tensor) -> float:
    """Returns the sum over positions of KL(known || other), nats, of log p and p and of logits [B, T, V]."""
    log_p, p = known
    return float((p * (log_p - other.log_softmax(-1))).sum(dtype=torch.float64))
