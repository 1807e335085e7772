"""Pre-training of members: next-token prediction on packed windows of text, in stages of growing length.

Start weights are random, grown from a smaller model's, or those of the training before; a teacher may add a
distillation term to the loss. Held-out text is scored in bits per byte, which does not depend on the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.core.family import PRETRAININGS
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingPhase, Worker
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import checkpoint_layout, load_model, save_weights
from nas.model.text.documents import read_sources
from nas.train.pretrain.data import MIN_HELD_OUT, StoredIds, Tokens, Vocabulary, open_tokens, tokenise
from nas.train.pretrain.grow import grow_checkpoint
from nas.train.pretrain.loss import Distilled, pretraining_loss
from nas.train.pretrain.member_training import START, MemberToTrain, TrainingPlan, TrainingRequest
from nas.train.pretrain.recipe import Part, Recipe, Settings, complete
from nas.train.release.model_tokenizer import read_member_tokenizer

ALL = "all"
_TOKENS_AT_ONCE = (4096, 32768)
"""Most tokens of a forward pass, on a CPU and on an accelerator; the gradients of a step's passes are accumulated."""
_LOGITS_AT_ONCE = 1 << 24
"""Most logits whose loss is computed together."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PretrainingRequest(TrainingRequest):
    """A requested pre-training.

    Args:
        corpus: files and folders of text.
        settings: of the recipe.
        teacher: checkpoint to distil from.
        start: checkpoint of a smaller model to grow from; None: the training before, or random weights.
        start_layout: its layout, if its header names none.
        only: which of the default stages are wanted, where the settings name none; None: both.
        alongside: text of all pre-trainings of a recipe, in order; what one holds out, the others do not train on.
    """

    kind: ClassVar[str] = "pretrain"

    corpus: tuple[Path, ...] = ()
    settings: Settings = field(default_factory=Settings)
    teacher: Path | None = None
    start: Path | None = None
    start_layout: Layout | None = None
    only: Part | None = None
    alongside: tuple[Path, ...] = ()

    @property
    def texts(self) -> tuple[Path, ...]:
        """The files and folders of all stages."""
        return (*self.corpus, *(Path(path) for stage in self.settings.stages or () for path in stage.corpus))

    def plan(self, member: MemberToTrain, log: Log) -> Pretraining:
        layout, continues = member.layout, bool(member.before) and self.start is None
        prior_tokens = sum(training.tokens for training in member.before if training.kind in PRETRAININGS)
        recipe, reasons = complete(self.settings, layout, only=self.only, prior_tokens=prior_tokens)
        for reason in reasons:
            log(f"{reason.what}: {reason.value} ({reason.reason})")
        vocabulary = vocabulary_of(member.tokenizer, layout, fim=recipe.fim is not None)
        stages = _tokenised(recipe, self.corpus, vocabulary, self.alongside)
        if self.teacher is not None:
            _check_teacher(self.teacher, layout, recipe)
        return Pretraining.of(
            member,
            recipe.seed,
            recipe=recipe,
            corpus=tuple(map(str, self.corpus)),
            sources=tuple(tuple((source.name, source.key) for source in sources) for sources in stages),
            teacher=_checkpoint(self.teacher),
            small=_checkpoint(self.start),
            small_layout=None if self.start is None else _unnamed_layout(self.start, self.start_layout),
            weights=member.weights() if continues else None,
        )


@dataclass(frozen=True)
class LongRequest(PretrainingRequest):
    """A requested stage of long sequences, after a pre-training (LFM2 report, section 3.2)."""

    kind: ClassVar[str] = "long"

    only: Part | None = "long"

    def check(self, stages: Collection[str]) -> None:
        super().check(stages)
        if not stages:
            raise InvalidInput("a stage `long` continues a training; none comes before", where=self.kind)


def _checkpoint(path: Path | None) -> Checkpoint | None:
    return None if path is None else Checkpoint(path.resolve(), sha256_of(path))


def _unnamed_layout(start: Path, option: Layout | None) -> str | None:
    """Returns the layout of start weights, which `option` names; None if their file names it.

    Raises:
        InvalidInput: the file names another layout than `option`, or neither names one.
    """
    try:
        named = checkpoint_layout(start)
    except InvalidInput:
        if option is None:
            raise
        return option.format()
    if option not in (None, named):
        raise InvalidInput(f"{start} holds weights of {named}", where="--from-layout")
    return None


class Pretraining(TrainingPlan):
    """Plan of a pre-training: the stages of a recipe, on text.

    Args:
        recipe: complete.
        corpus: as the user wrote it, for the record.
        sources: name of each source of each stage, and the key of its tokens.
        teacher: to distil from.
        small: weights of a smaller model to grow from.
        small_layout: of `small`, if its file names none.
        weights: to continue; with neither these nor `small`, start weights are random.
    """

    recipe: Recipe
    corpus: tuple[str, ...]
    sources: tuple[tuple[tuple[str, str], ...], ...]
    teacher: Checkpoint | None
    small: Checkpoint | None
    small_layout: str | None
    weights: Checkpoint | None

    def key_inputs(self) -> dict[str, Any]:
        return {
            # Without the paths of corpora, whose content is in the keys of the sources.
            "recipe": self.recipe.model_dump(mode="json", exclude={"stages": {"__all__": {"corpus"}}}),
            "corpus": [[key for _, key in sources] for sources in self.sources],
            "teacher": self.teacher and self.teacher.sha256,
            "start": self._begin if self.small is None else f"grown:{self.small.sha256}",
            "start_layout": self.small_layout,
        }

    def config(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "corpus": list(self.corpus),
            "tokenizer": self.tokenizer_sha256,
            "teacher": self.teacher and self.teacher.sha256,
        }

    @property
    def most_workers(self) -> int:
        return min(map(self.recipe.sequences, self.recipe.stages))

    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        if self.small is None:
            return None if self.weights is None else self.weights.path, self._begin
        small_layout = None if self.small_layout is None else Layout.parse(self.small_layout)
        model, growth = grow_checkpoint(self.small.path, small_layout, Layout.from_json(self.layout), self.seed)
        log(f"grown from {self.small.path}: {growth.describe()}")
        save_weights(model, folder / START)
        return folder / START, f"grown from {self.small.path.name}, {growth.describe()}"

    @property
    def _begin(self) -> str:
        return f"random:{self.seed}" if self.weights is None else self.weights.describe()

    def optimiser(self) -> Optimiser:
        recipe = self.recipe
        return Optimiser(recipe.weight_decay, recipe.clip, recipe.balance_rate, recipe.betas, recipe.eps)

    def phases(self, worker: Worker) -> list[TrainingPhase]:
        distilled = None
        if self.teacher is not None:
            teacher = load_model(self.teacher.path)
            settings = self.recipe.distillation
            distilled = Distilled(teacher.to(worker.device), settings.weight, settings.temperature, settings.k)
        return [
            _phase(self.recipe, number, [open_tokens(*source) for source in sources], distilled, worker)
            for number, sources in enumerate(self.sources)
        ]

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns bits per byte of the held-out text of each source, and of all."""
        sources = {key: open_tokens(name, key) for stage in self.sources for name, key in stage}.values()
        scored = [source for source in sources if source.held_out_bytes >= MIN_HELD_OUT]
        vocabulary = vocabulary_of(self.tokenizer, Layout.from_json(self.layout))

        def logits(tokens: Tensor) -> Tensor:
            batch: Tensor = model(tokens.to(worker.device))
            return batch[0]

        length = self.recipe.stages[0].length
        return bits_of(window_nats(logits, scored, vocabulary, length, worker.yield_hook), scored)


def vocabulary_of(tokenizer: Path, layout: Layout, *, fim: bool = False) -> Vocabulary:
    """Returns the tokenizer of a member for text; see `Vocabulary`."""
    return Vocabulary(tokenizer, layout.vocab, fim=fim, marks=read_member_tokenizer(tokenizer).marks)


class Packed:
    """Batches by step number. Each epoch reads every window once, in its own order and from its own offset.

    A batch depends on seed and step alone: a resumed training has no position in the data to restore, and trainings of
    other layouts read the same sequences in the same order.

    There are no document masks: short convolutions and state-space mixers keep their state over the end of a document,
    and no runtime's kernel resets it there, so attention is not masked either. Marks around each document separate it
    from the next.

    Args:
        name: of the stage.
        sources: their training parts are read.
        length: inputs per sequence, T.
        sequences: of a step, B.
        seed: of orders and offsets.

    Raises:
        InvalidInput: all sources together do not fill a sequence.
    """

    def __init__(self, name: str, sources: Sequence[Tokens], length: int, sequences: int, seed: int) -> None:
        self._parts = [source.train for source in sources]
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])])
        self.name, self.length, self.sequences, self._seed = name, length, sequences, seed
        self.tokens = int(self._starts[-1])
        self.windows = (self.tokens - 1) // length
        if self.windows < 1:
            raise InvalidInput(
                f"{', '.join(source.name for source in sources)}: {self.tokens:,} tokens to train on, but a sequence of"
                f" stage {name!r} takes {length + 1:,}; give more text, or a smaller length in the configuration",
                where="--corpus",
            )
        self._epoch, self._order, self._offset = -1, np.zeros(0, np.int64), 0

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Pair:
        """Returns inputs and labels of a step (from 0) for worker `rank` of `world`, int64 [<= B / world, T]."""
        first = step * self.sequences
        windows = [self._window(number) for number in range(first + rank, first + self.sequences, world)]
        tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, number: int) -> NDArray[np.integer]:
        epoch, index = divmod(number, self.windows)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = generator.permutation(self.windows)
            self._offset = int(generator.integers(self.tokens - self.windows * self.length))
            self._epoch = epoch
        return self._read(self._offset + int(self._order[index]) * self.length)

    def _read(self, start: int) -> NDArray[np.integer]:
        """Returns `length` + 1 ids from `start` on, across the ends of sources."""
        end = start + self.length + 1
        pieces = [
            part[max(0, start - base) : max(0, end - base)]
            for part, base in zip(self._parts, self._starts, strict=False)
        ]
        return np.concatenate([piece for piece in pieces if len(piece)])


def held_out_windows(tokens: StoredIds, length: int) -> Iterator[Pair]:
    """Yields inputs and labels [1, <= length] that cover `tokens`: every id but the first is a label exactly once."""
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(np.asarray(tokens[start : start + length + 1], np.int64))[None]
        yield window[:, :-1], window[:, 1:]


def packed_phase(
    text: Packed,
    steps: int,
    rate: Callable[[int], float],
    distilled: Distilled | None,
    worker: Worker,
    at_once: tuple[int, int] = _TOKENS_AT_ONCE,
) -> TrainingPhase:
    """Returns the training on a packed text.

    Args:
        text: to train on.
        steps: of the optimiser.
        rate: step, from 0 -> learning rate.
        distilled: the teacher; None: there is none.
        worker: that trains.
        at_once: most tokens of a forward pass, on a CPU and on an accelerator.
    """
    tokens, rows = text.sequences * text.length, max(1, worker.most_tokens(*at_once) // text.length)

    def passes(step: int) -> list[tuple[Tensor, ...]]:
        inputs, labels = text.batch(step, worker.rank, worker.world)
        return list(zip(torch.split(inputs, rows), torch.split(labels, rows), strict=True))

    def loss(model: Model, inputs: Tensor, labels: Tensor) -> Tensor:
        return pretraining_loss(model, inputs, labels, distilled) / tokens

    return TrainingPhase(text.name, steps, tokens, passes, loss, rate)


def _phase(
    recipe: Recipe, number: int, sources: Sequence[Tokens], distilled: Distilled | None, worker: Worker
) -> TrainingPhase:
    stage, text = recipe.stages[number], _packed(recipe, number, sources)
    steps = recipe.steps(stage)
    return packed_phase(text, steps, lambda step: recipe.lr * stage.schedule.factor(step, steps), distilled, worker)


def _packed(recipe: Recipe, number: int, sources: Sequence[Tokens]) -> Packed:
    """Returns the batches of stage `number`; raises InvalidInput where the sources do not fill a sequence."""
    stage = recipe.stages[number]
    return Packed(stage.name, sources, stage.length, recipe.sequences(stage), recipe.seed * 1000 + number)


def _tokenised(
    recipe: Recipe, corpus: Sequence[Path], vocabulary: Vocabulary, alongside: Sequence[Path]
) -> list[list[Tokens]]:
    """Returns the sources of every stage. All paths are split together: no stage trains on held-out text of another."""
    paths = [[Path(path) for path in stage.corpus] or list(corpus) for stage in recipe.stages]
    by_place: dict[Path, Path] = {}
    for path in (*alongside, *(path for stage in paths for path in stage)):
        by_place.setdefault(path.resolve(), path)  # stages may name one folder in two ways
    sources = zip(by_place, read_sources(list(by_place.values()), recipe.held_out), strict=True)
    trained = {path.resolve() for stage in paths for path in stage}
    tokens = {
        path: tokenise(source, vocabulary, recipe.fim, recipe.seed, recipe.eval_bytes)
        for path, source in sources
        if path in trained
    }
    stages = [[tokens[path.resolve()] for path in stage] for stage in paths]
    for number, stage_tokens in enumerate(stages):
        _packed(recipe, number, stage_tokens)  # raises now if a stage lacks text, not after the earlier stages
    return stages


def _check_teacher(teacher: Path, layout: Layout, recipe: Recipe) -> None:
    vocab = checkpoint_layout(teacher).vocab
    if vocab != layout.vocab:
        raise InvalidInput(
            f"{teacher} has a vocabulary of {vocab:,}, the member one of {layout.vocab:,}: its predictions are of other"
            " tokens",
            where="--teacher",
        )
    if recipe.distillation.k >= vocab:
        raise InvalidInput(f"distillation.k is {recipe.distillation.k}, of a vocabulary of {vocab:,}", where="--config")


def bits_of(nats: Mapping[str, Sequence[float]], sources: Sequence[Tokens]) -> dict[str, float]:
    """Returns source -> bits per byte of its held-out text, and `ALL` -> those of all together, from `window_nats`.

    Without sources there are no scores.
    """
    if not sources:
        return {}
    bits = {source.name: sum(nats[source.name]) / math.log(2) / source.held_out_bytes for source in sources}
    whole = sum(map(sum, nats.values())) / math.log(2) / sum(source.held_out_bytes for source in sources)
    return bits | {ALL: whole}


def window_nats(
    logits: Callable[[Tensor], Tensor],
    sources: Sequence[Tokens],
    vocabulary: Vocabulary,
    length: int,
    yield_hook: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Returns source -> nats of each window of its held-out text.

    Windows of `length` tokens are independent. Predictions of the marks between documents are not counted, as the marks
    are not part of the text.

    Args:
        logits: the model: ids [1, T] -> logits [T, V].
        sources: to score.
        vocabulary: its marks are left out.
        length: of a window.
        yield_hook: called before each window; may block.
    """
    nats: dict[str, list[float]] = {}
    for source in sources:
        nats[source.name] = []
        for inputs, labels in held_out_windows(source.held_out, length):
            yield_hook()
            nats[source.name].append(_nats(logits(inputs), labels[0], vocabulary.special))
    return nats


def _nats(logits: Tensor, labels: Tensor, marks: tuple[int, ...]) -> float:
    labels = labels.to(logits.device)
    text = ~torch.isin(labels, torch.tensor(marks, device=labels.device))
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    total = 0.0
    parts = (torch.split(tensor, rows) for tensor in (logits, labels, text))
    for part, label, counted in zip(*parts, strict=True):
        loss = F.cross_entropy(part.float(), label, reduction="none").double()
        total += float(loss[counted].sum())
    return total
