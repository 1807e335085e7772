"""A library of blocks that can replace those of a trained model, and what each replacement costs in quality.

Every alternative is trained alone against input and output of the block that it replaces, in the trained model (Puzzle,
Bercovich et al. 2024, section 3: blockwise local distillation), by the error |y' - y|^2 / |y|^2. Its score is the mean
Kullback-Leibler divergence over held-out text between the trained model and the trained model with this one block
replaced, in nats per token; apart from that, the same over answers in generated text (`nas.train.adapt.text`). What two
replacements cost beyond the sum of their scores is the term of the pair.

    FOLDER/blocks/KEY.safetensors     weights of a trained alternative, with its errors
    FOLDER/scores/KEY.json            score of an alternative, or of two replacements together
    FOLDER/diverged/KEY.json          an alternative whose training diverged; it is left out
    FOLDER/training/KEY.safetensors   checkpoint of the trainings at one depth; removed when they are done

A key is the hash of all inputs: model, slot, block, text, settings. So a library serves every device and budget, grows
when alternatives are added, and can be killed at any moment. While an adaptation runs, it holds a shared lock on
FOLDER/.use.lock, and nothing is removed. The alternatives of one depth are trained in one pass over the text; each has
its own gradients and optimiser state, so that it does not depend on the others, one that diverges among them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nas.core.block import BLOCKS, Block
from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.progress import Progress
from nas.core.replacement import TEXT_GROUP, Alternative, Part, Slot, Stored, block_name, block_of, lender_of, slots_of
from nas.core.strict import StrictKeys
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import BlockRoundingRuntime
from nas.model.nn.base import BlockModule, FeedForward, Mixer, State
from nas.model.nn.fit import (
    Precision,
    TrainingCheckpoint,
    TrainingPhase,
    TrainingState,
    Worker,
    fit,
    precision_of,
    save_tensors,
)
from nas.model.nn.gqa import GroupedQueryAttention
from nas.model.nn.kinds import MODULES
from nas.model.nn.layer import ResidualLayer
from nas.model.nn.mixes import Predictions, ScoredText, compared, mix_of
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import checkpoint_layout, load_model
from nas.train.adapt.alternatives import started
from nas.train.adapt.text import selection_text
from nas.train.pretrain.data import Tokens
from nas.train.pretrain.next_token import Packed
from nas.train.pretrain.recipe import Schedule

LIBRARY_VERSION = 9
"""Part of keys: increase it with every change to this package after which the same inputs give other numbers."""
_LOCK_S = 4 * 3600.0
"""Longest wait for another process that trains the same blocks."""
_USE = ".use.lock"
_USE_S = 600.0
"""Longest wait for a process that removes files."""
_CHECKPOINT_S = 60.0
"""Least time between two checkpoints."""
SCHEDULE = Schedule(warmup=0.05, decay=0.5, final=0.1)
"""Learning rate of a block, and of a child that is healed."""
STREAM_BYTES = 1 << 31
"""Most memory of the residual streams that trainings, or scores, keep from one depth to the next."""
_SIGNIFICANT = 2.0
"""Standard errors above which the term of a pair is no noise."""
_ERROR_TOKENS = 1 << 12
"""Most tokens of held-out text that the error of a block is computed on."""
_LEAST_WINDOWS = 8
"""Fewest windows that a score is computed on, of those that there are."""

Choice = Mapping[Slot, Alternative]
Replacement = tuple[Slot, Alternative]
Pair = tuple[Replacement, Replacement]


class LibrarySettings(StrictKeys):
    """How alternatives are trained and scored."""

    tokens: int = Field(1 << 18, ge=1, description="trained on by each alternative")
    length: int = Field(256, ge=8, description="tokens of a sequence")
    batch_tokens: int = Field(4096, ge=8)
    lr: float = Field(1e-3, gt=0)
    precision: Precision = Field(
        "float32", description="of matrix products in training and scores; start values and errors need float32"
    )
    seed: int = Field(0, ge=0)
    score_tokens: int = Field(1 << 14, ge=8, description="of held-out text that scores are computed on, at most")
    score_length: int | None = Field(
        None,
        ge=8,
        description="tokens of a window of it; none: as many as the device's workload has, but at most 2,048",
    )
    score_error: float = Field(
        0.1, ge=0, description="relative standard error of a score that is enough; 0: scores take all of the text"
    )
    recall_tokens: int = Field(
        1 << 12,
        ge=0,
        description="of generated text, on whose answers scores of recall are computed; 0: there are none",
    )

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return max(1, self.batch_tokens // self.length)

    @property
    def steps(self) -> int:
        """Optimiser steps of an alternative."""
        return max(1, round(self.tokens / (self.sequences * self.length)))

    @property
    def window(self) -> int:
        """Tokens of a window of the text of scores; those of a sequence where nothing is named."""
        return self.score_length or self.length


class Stream(NamedTuple):
    """The residual stream in front of a layer.

    Args:
        x: [B, T, D].
        cache: keys and values of the nearest `gqa` block below, each [B, kv_heads, T, head_dim]; None: there is none.
    """

    x: Tensor
    cache: State | None = None

    def to(self, device: torch.device) -> Stream:
        """Returns it on a device."""
        return Stream(self.x.to(device), self.cache and tuple(tensor.to(device) for tensor in self.cache))

    @staticmethod
    def numbers(layout: Layout) -> int:
        """Returns the most numbers of a token."""
        blocks = [layer.mixer.resolve(layout.d_model) for layer in layout.layers if layer.mixer is not None]
        caches = [2 * block.int("kv_heads") * block.int("head_dim") for block in blocks if block.kind == "gqa"]
        return layout.d_model + max(caches, default=0)


@dataclass(frozen=True, eq=False)
class TrainedTeacher:
    """The trained model that blocks are replaced in.

    Args:
        model: on the device of trainings.
        checkpoint: its file.
        sha256: of the file.
    """

    model: Model
    checkpoint: Path
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
        return TrainedTeacher(load_model(checkpoint, layout).to(device), checkpoint, sha256_of(checkpoint))

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        return self.model.layout

    def layer(self, depth: int) -> ResidualLayer:
        """Returns the module of a layer."""
        layer = self.model.layers[str(depth)]
        assert isinstance(layer, ResidualLayer)
        return layer

    def block(self, slot: Slot) -> BlockModule:
        """Returns the module of a mixer or a feed-forward."""
        layer = self.layer(slot.depth)
        module = layer.mixers[0] if slot.part == "mixer" else layer.ffn
        assert isinstance(module, BlockModule)
        return module

    def before(self, tokens: Tensor, depth: int) -> Stream:
        """Returns the residual stream in front of the layer at `depth`, for ids [B, T]."""
        return self.between(Stream(self.model.embed(tokens)), 0, depth)

    def between(self, stream: Stream, first: int, last: int) -> Stream:
        """Runs the layers from `first` to in front of `last`."""
        for depth in range(first, last):
            layer = self.layer(depth)
            x, after = layer(stream.x, [None] * len(layer.mixers))
            stream = Stream(x, after[0][:2] if layer.mixers and is_lender(layer.mixers[0]) else stream.cache)
        return stream

    def replaced(self, stream: Stream, depth: int, part: Part, block: nn.Module | None) -> Stream:
        """Runs the layer at `depth` with another mixer or feed-forward, None: without it; or without the layer."""
        if part == "layer":
            return stream
        layer, (x, cache) = self.layer(depth), stream
        if layer.mixers:
            mixer = block if part == "mixer" else layer.mixers[0]
            if isinstance(mixer, Mixer):
                y, after = mixer(layer.mixer_norm(x), cache if is_reader(mixer) else None)
                # Readers above were trained on keys and values of the trained model, not on those of a replacement.
                is_trained = part != "mixer" and is_lender(mixer)
                x, cache = x + layer.mixer_out_norm(y), after[:2] if is_trained else cache
        ffn = block if part == "ffn" else layer.ffn
        return Stream(x + layer.ffn_out_norm(ffn(layer.ffn_norm(x))) if isinstance(ffn, FeedForward) else x, cache)

    def logits(self, stream: Stream) -> Tensor:
        """Returns the logits [B, T, V] after the last layer."""
        return self.model.logits(self.model.norm(stream.x)).float()

    def inputs_and_outputs(self, stream: Stream, depth: int) -> dict[Part, tuple[Tensor, Tensor]]:
        """Returns normalised input and output of the blocks of a layer, from the stream in front: all [B, T, D]."""
        layer, x = self.layer(depth), stream.x
        pairs: dict[Part, tuple[Tensor, Tensor]] = {}
        if layer.mixers:
            h = layer.mixer_norm(x)
            y: Tensor = layer.mixers[0](h)[0]
            pairs["mixer"], x = (h, y), x + layer.mixer_out_norm(y)
        if layer.ffn is not None:
            h = layer.ffn_norm(x)
            pairs["ffn"] = (h, layer.ffn(h))
        return pairs


class _Streams:
    """Residual streams of batches of a text; kept from one layer to the next while memory lasts.

    Those that are not kept, and all after a kill, are computed from the embedding, with the same result.

    Args:
        teacher: the trained model.
        last: the largest depth that `before` is called with; streams in front of it are not kept.
    """

    def __init__(self, teacher: TrainedTeacher, last: int) -> None:
        self._teacher, self._last = teacher, last
        self._stored: dict[int, tuple[int, Stream]] = {}
        self._ends: dict[int, Stream] = {}
        self._free_bytes = STREAM_BYTES

    def before(self, step: int, tokens: Tensor, depth: int) -> Stream:
        """Returns the stream in front of the layer at `depth`, which is never less than in the call before.

        Args:
            step: number of the batch.
            tokens: its ids [B, T].
            depth: of the layer.
        """
        if step in self._stored:
            at, stream = self._stored[step]
            stream = self._teacher.between(stream.to(tokens.device), at, depth)
        else:
            stream = self._teacher.before(tokens, depth)
            if depth == self._last or not self._fits(tokens):
                return stream
        self._stored[step] = depth, stream.to(torch.device("cpu"))
        return stream

    def behind(self, step: int, tokens: Tensor) -> Stream:
        """Returns the stream behind the last layer of the model."""
        if step in self._ends:
            return self._ends[step].to(tokens.device)
        stream = self._teacher.before(tokens, self._teacher.layout.depth)
        if self._fits(tokens):
            self._ends[step] = stream.to(torch.device("cpu"))
        return stream

    def _fits(self, tokens: Tensor) -> bool:
        """Returns whether there is memory for one more stream, which is then reserved."""
        size = 4 * Stream.numbers(self._teacher.layout) * tokens.numel()
        if size > self._free_bytes:
            return False
        self._free_bytes -= size
        return True


class BlockRecord(BaseModel):
    """What training an alternative gave: its normalised error on held-out text, before and after."""

    model_config = ConfigDict(frozen=True)

    key: str
    error_start: float
    error: float


@dataclass(frozen=True)
class Score:
    """What replacements cost, in nats per token.

    Args:
        kl: group of positions (`nas.core.replacement.TEXT_GROUP` and others) -> mean divergence.
        windows: mean divergence of each window of held-out text.
    """

    kl: Mapping[str, float]
    windows: tuple[float, ...]

    @property
    def text(self) -> float:
        """The mean over held-out text."""
        return self.kl[TEXT_GROUP]

    def beyond(self, one: Score, other: Score) -> Score:
        """Returns what two replacements of this score cost beyond the sum of their own scores.

        All three are of the same windows (`LibrarySettings.score_error` is 0).
        """
        kl = {group: value - one.kl[group] - other.kl[group] for group, value in self.kl.items()}
        windows = zip(self.windows, one.windows, other.windows, strict=True)
        return Score(kl, tuple(both - a - b for both, a, b in windows))

    @property
    def is_significant(self) -> bool:
        """Whether the mean over windows differs from 0 by more than twice its standard error."""
        return abs(fmean(self.windows)) > _SIGNIFICANT * standard_error(self.windows)


class Library:
    """The alternatives of one trained model.

    Args:
        folder: of the library; several models and processes may use one.
        teacher: the trained model.
        sources: text; alternatives are trained on its training parts and scored on half of its held-out ones.
        settings: of trainings and scores.
        worker: this process.
        recall: text with answers, for scores of recall; None: there are none.
        rounding: rounds blocks that are stored in a quantisation; None: there are none.

    Attributes:
        selection: held-out text that scores are computed on and choices are made by.
        text: the same, and that of recall.
        text_keys: of the sources.
        parallel: depths that are trained at the same time, at most.

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
        recall: ScoredText | None = None,
        rounding: BlockRoundingRuntime | None = None,
    ) -> None:
        self.folder, self.teacher, self.settings, self.worker = folder, teacher, settings, worker
        self.rounding = rounding
        self._packed = Packed("library", sources, settings.length, settings.sequences, settings.seed)
        self.text_keys = [source.key for source in sources]
        self.selection = selection_text(sources, settings.window, settings.score_tokens)
        self._error_text = selection_text(sources, settings.length, max(settings.length, _ERROR_TOKENS))
        self.text = self.selection if recall is None else self.selection.with_windows_of(recall)
        self.parallel = 1

    def key(self, slot: Slot, block: Block) -> str:
        """Returns the key of a trained alternative."""
        settings = self.settings.model_dump(exclude={"recall_tokens", "score_tokens", "score_length", "score_error"})
        replaced = self._identity(slot, block)
        return content_hash([LIBRARY_VERSION, replaced, self.text_keys, settings, BLOCKS.version(block.kind)])

    def train(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> dict[Slot, tuple[Alternative, ...]]:
        """Trains the blocks that the library lacks, depth by depth.

        Returns:
            The alternatives without those whose training diverged.

        Raises:
            InfrastructureFailed: the disk is full, or another process trains the same for hours.
        """
        for slot, block in self._trained(alternatives):
            if self.is_trained(slot, block):
                self.file(slot, block).touch()  # `trim` removes the least recently used first
        streams = _Streams(self.teacher, max((slot.depth for slot in alternatives), default=0))
        blocks: dict[int, list[tuple[Slot, Block]]] = {}
        for slot, block in self._trained(alternatives):
            blocks.setdefault(slot.depth, []).append((slot, block))
        missing = {depth: pairs for depth, pairs in blocks.items() if not all(self.is_done(*pair) for pair in pairs)}
        for number, (depth, pairs) in enumerate(sorted(missing.items())):
            self.worker.log(Progress("layers with trained blocks", number, len(missing)))
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self.folder / f".{self.teacher.sha256[:16]}-{depth}.lock"
            with locked(lock, _LOCK_S, waiting=lambda: self.worker.log("another process trains these blocks")):
                pending = [pair for pair in pairs if not self.is_done(*pair)]
                # After a kill while blocks were stored, there is a checkpoint of all of them.
                self._train(pairs if pending and self._checkpoint(pairs).path.is_file() else pending, depth, streams)
        if missing:
            self.worker.log(Progress("layers with trained blocks", len(missing), len(missing)))
        return {
            slot: tuple(alternative for alternative in listed if self.is_ready(slot, alternative))
            for slot, listed in alternatives.items()
        }

    def is_ready(self, slot: Slot, alternative: Alternative) -> bool:
        """Returns whether there is nothing to train of an alternative any more."""
        block = self.trainable(slot, alternative)
        return block is None or self.is_trained(slot, block)

    def trainable(self, slot: Slot, alternative: Alternative) -> Block | None:
        """Returns the block of an alternative that is trained; None: it is the model's own, or there is no block."""
        block = block_of(alternative)
        is_original = isinstance(alternative, Stored) and block == slot.block(self.teacher.layout)
        return None if is_original else block

    def is_trained(self, slot: Slot, block: Block) -> bool:
        """Returns whether an alternative is trained; a damaged file is removed."""
        path = self.file(slot, block)
        try:
            with safe_open(path, "pt"):  # compares the header with the file's size
                return True
        except FileNotFoundError:
            return False
        except SafetensorError as error:
            self.worker.log(f"{path} is damaged and removed: {error}")
            path.unlink(missing_ok=True)
            return False

    def is_done(self, slot: Slot, block: Block) -> bool:
        """Returns whether an alternative need not be trained: it is, or its training diverged."""
        return self._diverged(slot, block).is_file() or self.is_trained(slot, block)

    def in_use(self) -> AbstractContextManager[None]:
        """Returns a context in which no file of the library is removed by `trim`.

        Raises:
            InfrastructureFailed: files are being removed for minutes.
        """
        return locked(self.folder / _USE, _USE_S, shared=True)

    def missing_bytes(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> int:
        """Returns the disk space that `train` takes: untrained blocks, and the largest checkpoints of depths.

        A checkpoint holds each weight with at most two moments, in float32, beside the one that it replaces.
        """
        sizes = [0] * self.teacher.layout.depth
        for slot, block in self._trained(alternatives):
            if not self.is_done(slot, block):
                with torch.device("meta"):
                    module = MODULES[block.kind](block, self.teacher.layout.d_model)
                sizes[slot.depth] += 4 * sum(tensor.numel() for tensor in module.state_dict().values())
        return sum(sizes) + 2 * 3 * sum(sorted(sizes)[-self.parallel :])

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

    def module(self, slot: Slot, alternative: Alternative) -> nn.Module | None:
        """Returns the module of an alternative with the weights that its file has, on the worker's device."""
        block, layout = block_of(alternative), self.teacher.layout
        if block is None:
            return None
        is_original = self.trainable(slot, alternative) is None
        weights = self.teacher.block(slot).state_dict() if is_original else self.weights(slot, block)
        if isinstance(alternative, Stored):
            assert self.rounding is not None, "only a request with a runtime that rounds has such alternatives"
            weights = self.rounding.rounded_block(layout, block, alternative.quantisation, weights)
        module = MODULES[block.kind](block, layout.d_model)
        module.load_state_dict(weights)
        return module.to(self.worker.device).eval().requires_grad_(False)

    def scores(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> dict[Replacement, Score]:
        """Returns the score of each alternative; those that are missing are computed, depth by depth."""
        replacements = [(slot, block) for slot, blocks in alternatives.items() for block in blocks]
        scores = self._scored([(replacement,) for replacement in replacements])
        return {replacement: scores[replacement,] for replacement in replacements}

    def pair_terms(self, pairs: Sequence[Pair]) -> dict[Pair, Score]:
        """Returns what each pair of replacements in different layers costs beyond the sum of their scores."""
        singles: dict[Slot, list[Alternative]] = {}
        for slot, block in dict.fromkeys(chain.from_iterable(pairs)):
            singles.setdefault(slot, []).append(block)
        alone, together = self.scores(singles), self._scored(pairs)
        return {(one, other): together[one, other].beyond(alone[one], alone[other]) for one, other in pairs}

    def mix(self, choice: Choice) -> Model:
        """Returns the trained model with the blocks of `choice`, not rounded, before healing."""
        trained = {slot: self.trainable(slot, alternative) for slot, alternative in choice.items()}
        changed = {slot: trained[slot] for slot, alternative in choice.items() if trained[slot] or alternative is None}
        blocks = {slot: self.weights(slot, block) for slot, block in changed.items() if block is not None}
        return mix_of(self.teacher.model, changed, blocks)

    def divergence(self, model: Model) -> float:
        """Returns the divergence of a whole model from the trained one, in nats per token, on the text of scores."""
        kl = compared(self.teacher.model, model, self.selection, self.worker.yield_hook).kl
        return self.selection.means(kl)[TEXT_GROUP]

    def _diverged(self, slot: Slot, block: Block) -> Path:
        return self.folder / "diverged" / f"{self.key(slot, block)}.json"

    def _trained(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> Iterator[tuple[Slot, Block]]:
        """Yields the blocks that are trained, each once."""
        blocks = ((slot, self.trainable(slot, one)) for slot, listed in alternatives.items() for one in listed)
        return ((slot, block) for slot, block in dict.fromkeys(blocks) if block is not None)

    def _identity(self, slot: Slot, alternative: Alternative) -> list[Any]:
        return [self.teacher.sha256, slot.depth, slot.part, block_name(alternative)]

    def _score_path(self, replaced: Sequence[Replacement]) -> Path:
        blocks = []
        for slot, alternative in replaced:
            trained = self.trainable(slot, alternative)
            key = self.settings.precision if trained is None else self.key(slot, trained)
            blocks.append([*self._identity(slot, alternative), key])
            if isinstance(alternative, Stored) and self.rounding is not None:
                blocks[-1] += [self.rounding.name, self.rounding.writer_version]
        key = content_hash([LIBRARY_VERSION, blocks, self.text.sha256, self.settings.score_error])
        return self.folder / "scores" / f"{key}.json"

    def _train(self, missing: Sequence[tuple[Slot, Block]], depth: int, streams: _Streams) -> None:
        if not missing:
            return
        settings, teacher, device = self.settings, self.teacher, self.worker.device
        keys = {self.key(slot, block): (slot, block) for slot, block in missing}
        parts = {key: slot.part for key, (slot, _) in keys.items()}
        with torch.no_grad():
            first = teacher.before(self._packed.batch(0)[0].to(device), depth)
            pairs = teacher.inputs_and_outputs(first, depth)
        modules = {
            key: started(block, teacher.block(slot), pairs[slot.part][0], settings.seed, teacher.layout.depth)
            for key, (slot, block) in keys.items()
        }
        blocks = nn.ModuleDict(modules).to(device)
        before = self._errors(blocks, parts, depth)

        def loss(model: nn.ModuleDict, tokens: Tensor, step: Tensor) -> Tensor:
            with torch.no_grad():
                before = streams.before(int(step), tokens, depth)
                pairs = teacher.inputs_and_outputs(before, depth)
            errors = torch.stack([error_of(module, *pairs[parts[key]], before.cache) for key, module in model.items()])
            return torch.where(errors.isfinite(), errors, 0.0).sum()  # a block that diverges ends alone

        state = TrainingState(blocks, Optimiser(weight_decay=0.0, clip=float("inf"), balance_rate=0.0), settings.steps)
        phase = TrainingPhase(
            name=f"depth {depth}",
            steps=settings.steps,
            tokens=settings.sequences * settings.length,
            batches=lambda step: [(self._packed.batch(step)[0], torch.tensor(step))],
            loss=loss,
            rate=lambda step: settings.lr * SCHEDULE.factor(step, settings.steps),
        )
        checkpoint = self._checkpoint(missing)
        try:
            fit(
                state,
                [phase],
                [checkpoint],
                self.worker,
                name=f"{len(keys)} blocks of depth {depth}",
                precision=lambda: precision_of(device, settings.precision),
            )
        except CandidateFailed:
            if state.step < state.steps:
                raise
            # All steps are done: weights of a block are not finite.
        after = self._errors(blocks.eval(), parts, depth)
        for key, (slot, block) in keys.items():
            if not all(tensor.isfinite().all() for tensor in (*modules[key].parameters(), torch.tensor(after[key]))):
                self._note_diverged(slot, block)
                continue
            scalars = {"block": block_name(block), "part": slot.part, "depth": depth, "error_start": before[key]}
            save_tensors(modules[key].state_dict(), self.file(slot, block), scalars | {"error": after[key]})
        checkpoint.path.unlink(missing_ok=True)

    def _checkpoint(self, blocks: Sequence[tuple[Slot, Block]]) -> TrainingCheckpoint:
        name = content_hash(sorted(self.key(slot, block) for slot, block in blocks))
        path = self.folder / "training" / f"{name}.safetensors"
        return TrainingCheckpoint(path, {"key": name}, interval_s=_CHECKPOINT_S)

    def _note_diverged(self, slot: Slot, block: Block) -> None:
        name = f"depth {slot.depth}: {block_name(block)} in place of the {slot.part}"
        self.worker.log(f"{name} diverged and is left out; a lower library.lr may help")
        path = self._diverged(slot, block)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, json.dumps({"diverged": name}).encode())

    @torch.no_grad()
    def _errors(self, blocks: nn.ModuleDict, parts: Mapping[str, Part], depth: int) -> dict[str, float]:
        """Returns the error of each block on the first windows of the held-out text."""
        errors = dict.fromkeys(parts, 0.0)
        for windows in self._error_text.passes(self.teacher.layout.vocab):
            before = self.teacher.before(windows.to(self.worker.device), depth)
            pairs = self.teacher.inputs_and_outputs(before, depth)
            share = len(windows) / len(self._error_text.ids)
            for key, part in parts.items():
                errors[key] += float(error_of(blocks[key], *pairs[part], before.cache)) * share
        return errors

    def _scored(self, replacements: Sequence[tuple[Replacement, ...]]) -> dict[tuple[Replacement, ...], Score]:
        """Returns the scores of sets of replacements, each in order of depth, in different layers.

        Those that are missing are computed, depth by depth of the first replacement.
        """
        missing: dict[int, list[tuple[Replacement, ...]]] = {}
        for replaced in replacements:
            if not self._score_path(replaced).is_file():
                missing.setdefault(replaced[0][0].depth, []).append(replaced)
        streams = _Streams(self.teacher, max(missing, default=0))
        for number, (depth, pending) in enumerate(sorted(missing.items())):
            self.worker.log(Progress("layers with scores", number, len(missing)))
            self._score(pending, depth, streams)
        if missing:
            self.worker.log(Progress("layers with scores", len(missing), len(missing)))
        contents = {replaced: json.loads(self._score_path(replaced).read_bytes()) for replaced in replacements}
        return {replaced: Score(content["kl"], tuple(content["windows"])) for replaced, content in contents.items()}

    @torch.no_grad()
    def _score(self, pending: Sequence[tuple[Replacement, ...]], depth: int, streams: _Streams) -> None:
        """Computes scores: each on windows of held-out text until its error is small, and on all windows of recall."""
        vocab, name = self.teacher.layout.vocab, f"scores of depth {depth}"
        used = dict.fromkeys(chain.from_iterable(pending))
        modules = {replacement: self.module(*replacement) for replacement in used}
        kl: dict[tuple[Replacement, ...], list[Tensor]] = {replaced: [] for replaced in pending}
        held_out, windows = len(self.selection.ids), len(self.text.ids)
        recall = self.text.rows(slice(held_out, None))

        def add(number: int, ids: Tensor, incomplete: Sequence[tuple[Replacement, ...]]) -> None:
            self.worker.yield_hook()
            tokens = ids.to(self.worker.device)
            before, end = streams.before(number, tokens, depth), streams.behind(number, tokens)
            for replaced, divergences in zip(
                incomplete, self._divergences(before, end, incomplete, depth, modules), strict=True
            ):
                kl[replaced].append(divergences)

        self.worker.log(Progress(name, 0, windows))
        incomplete, done = list(pending), 0
        for ids in self.selection.passes(vocab):
            add(done, ids, incomplete)
            done += len(ids)
            incomplete = [replaced for replaced in incomplete if not self._is_enough(kl[replaced])]
            if not incomplete:
                break
            self.worker.log(Progress(name, done, windows, f"{len(incomplete)} of {len(pending)} need more text"))
        done = held_out
        for ids in recall.passes(vocab):
            self.worker.log(Progress(name, done, windows))
            add(done, ids, pending)
            done += len(ids)
        self.worker.log(Progress(name, windows, windows))
        (self.folder / "scores").mkdir(parents=True, exist_ok=True)
        for replaced, parts in kl.items():
            values = torch.cat(parts)
            count = len(values) - len(recall.ids)
            text = self.text.rows(torch.cat([torch.arange(count), torch.arange(held_out, windows)]))
            content = {
                "replaced": [[slot.depth, slot.part, block_name(block)] for slot, block in replaced],
                "kl": text.means(values),
                "windows": values[:count].mean(-1, dtype=torch.float64).tolist(),
            }
            write_durably(self._score_path(replaced), json.dumps(content).encode())
        self.worker.log(f"depth {depth}: {len(pending)} scores computed")

    def _divergences(
        self,
        before: Stream,
        end: Stream,
        pending: Sequence[tuple[Replacement, ...]],
        depth: int,
        modules: Mapping[Replacement, nn.Module | None],
    ) -> Iterator[Tensor]:
        """Yields the divergences [B, T] of each set of replacements, the first at `depth`.

        In bfloat16, rounding alone makes a divergence from the model in float32. It is computed of the model itself,
        and subtracted.

        Args:
            before: the trained model's stream in front of the layer at `depth`.
            end: its stream behind the last layer.
            pending: the sets.
            depth: of a layer.
            modules: of each replacement.
        """
        teacher, last, precision = self.teacher, self.teacher.layout.depth, self.settings.precision
        trained = Predictions.of(teacher.logits(end))

        def divergence(replaced: Sequence[Replacement]) -> Tensor:
            stream, at = before, depth
            with precision_of(self.worker.device, precision):
                for slot, block in replaced:
                    stream = teacher.between(stream, at, slot.depth)
                    stream, at = teacher.replaced(stream, slot.depth, slot.part, modules[slot, block]), slot.depth + 1
                logits = teacher.logits(teacher.between(stream, at, last))
            return trained.divergence(logits)

        rounding = divergence(()) if precision == "bfloat16" else 0.0
        for replaced in pending:
            yield divergence(replaced) - rounding

    def _is_enough(self, parts: Sequence[Tensor]) -> bool:
        """Returns whether the error of the mean of divergences [B, T] is small; B is a number of windows."""
        windows = torch.cat(list(parts)).mean(-1, dtype=torch.float64).tolist()
        limit = self.settings.score_error * fmean(windows)
        return len(windows) >= _LEAST_WINDOWS and standard_error(windows) < limit


def rounding_runtime(name: str | None) -> BlockRoundingRuntime | None:
    """Returns a runtime that rounds blocks; None: there is nothing to round."""
    runtime = None if name is None else RUNTIMES[name]
    assert runtime is None or isinstance(runtime, BlockRoundingRuntime), "checked with the request"
    return runtime


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; infinite of less than two values, or where one is not finite."""
    is_known = len(values) > 1 and all(map(math.isfinite, values))
    return stdev(values) / math.sqrt(len(values)) if is_known else math.inf


def neighbouring_pairs(alternatives: Mapping[Slot, Sequence[Alternative]], most: int, seed: int) -> list[Pair]:
    """Returns pairs of replaced mixers in neighbouring layers: all of them, or `most` that are drawn.

    Mixers in two layers are where scores add up worst (docs/measured/adapting.md). No pair replaces a block whose keys
    and values the other one reads.
    """
    mixers = [slot for slot in alternatives if slot.part == "mixer"]
    pairs = [
        ((one, x), (other, y))
        for one, other in pairwise(mixers)
        for x in alternatives[one]
        for y in alternatives[other]
        if lender_of(y) != one
    ]
    return pairs if len(pairs) <= most else random.Random(seed).sample(pairs, most)


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
            # All files: also what processes left that were killed while they wrote one.
            files = [path for part in ("training", "blocks") for path in (folder / part).glob("*")]
            stats = {path: path.stat() for path in files}
            excess = sum(stat.st_size for stat in stats.values()) - limit_bytes
            for path, stat in sorted(stats.items(), key=lambda item: item[1].st_mtime_ns):
                if removed >= excess:
                    break
                path.unlink()
                removed += stat.st_size
    except InfrastructureFailed:  # locked
        return 0
    return removed


def is_lender(mixer: nn.Module) -> bool:
    """Returns whether a mixer has keys and values of its own that others may read."""
    return isinstance(mixer, GroupedQueryAttention) and mixer.owns_cache


def is_reader(mixer: nn.Module) -> bool:
    """Returns whether a mixer reads keys and values of another one."""
    return isinstance(mixer, GroupedQueryAttention) and not mixer.owns_cache


def error_of(block: nn.Module, h: Tensor, y: Tensor, cache: State | None = None) -> Tensor:
    """Returns |block(h) - y|^2 / |y|^2 in float32; h and y [B, T, D], `cache` of the mixer that this one reads."""
    out = block(h, cache if is_reader(block) else None)[0] if isinstance(block, Mixer) else block(h)
    difference: Tensor = out.float() - y.float()
    return difference.square().mean() / y.float().square().mean().clamp_min(1e-12)
