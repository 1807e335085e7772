"""Training of models of images and text in three stages (LFM2 report, section 5.2), each a command and a folder.

    connector    the connector alone, between a frozen encoder and a frozen language model
    mid          everything, at rates of 5:5:1 for language model, connector and encoder; no tiles; the share of text
                 falls from 1 to 0.3 over the first twentieth of the steps
    joint        everything, with tiles

The loss is the cross-entropy of answers, each token of a step alike. After an interruption the same call resumes, see
`nas.train.posttrain.trained_folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors.torch import load_file
from torch import Tensor

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput, UnknownName
from nas.core.task import IGNORE
from nas.model.nn.fit import Log, TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, precision_of, thinned
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_placed_lines
from nas.train.posttrain.objective import answer_nats
from nas.train.posttrain.sft import Mixture, TrainingSettings, padded, passes_of
from nas.train.posttrain.start import StartModel, start_model
from nas.train.posttrain.trained_folder import FolderRecord, trained_once
from nas.train.pretrain.member_training import CHECKPOINT, START
from nas.train.release.shards import SINGLE, shard_files
from nas.train.towers.data import METADATA, PicturedConversation, read_image_conversations
from nas.train.towers.images import FrameSettings, Picture, checked
from nas.train.towers.model import TowerModel
from nas.train.towers.release import (
    RECORD,
    VisionFolder,
    VisionModel,
    encoder_shape,
    has_towers,
    image_tokenizer,
    load_encoder,
    with_tower,
    write_vision_model,
)
from nas.train.towers.vision import VisionShape, VisionTower, stacked

TRAINER_VERSION = 1
"""Part of keys: increase it with every change after which the same training gives other numbers."""

Stage = Literal["connector", "mid", "joint"]

_TOKENS_AT_ONCE = (2048, 32768)
"""Most tokens of a pass, on the CPU and on a GPU."""
_MOST_HELD_OUT = 500
_CURVE_POINTS = 200
_SMALL_RATE = 0.2
STAGES: dict[Stage, dict[str, Any]] = {
    "connector": {"lr": 1e-3, "encoder": 0.0, "backbone": 0.0, "text": 0.0, "tiles": 1},
    "mid": {"lr": 1e-4, "encoder": _SMALL_RATE, "weight_decay": 1e-6, "text_first": 1.0, "tiles": 1},
    "joint": {"lr": 3e-5, "encoder": _SMALL_RATE, "tiles": 10, "context": 8192},
}
"""Defaults of each stage. The report has the rates' ratio, the weight decay and the shares of text; it does not publish
the rates themselves, nor their ratio in the last stage."""


class VisionSettings(TrainingSettings):
    """Settings of a stage; see `STAGES` for defaults that differ between stages."""

    stage: Stage
    epochs: float = Field(1, gt=0, description="of the conversations about images")
    batch: int = Field(16, ge=1, description="conversations per step")
    encoder: float = Field(1.0, ge=0, description="rate of the encoder as a share of `lr`; 0: it is frozen")
    connector: float = Field(1.0, ge=0, description="rate of the connector")
    backbone: float = Field(1.0, ge=0, description="rate of the language model")
    text: float = Field(0.3, ge=0, lt=1, description="share of conversations without images")
    text_first: float | None = Field(None, ge=0, le=1, description="the same at the first step; none: `text`")
    text_steps: float = Field(0.05, ge=0, le=1, description="share of the steps after which it is `text`")
    tiles: int = Field(1, ge=1, le=10, description="most tiles of an image; 1: none")
    image_tokens: tuple[int, int] | None = Field(
        None, description="fewest and most tokens of a frame; none: as before, or 64 and 256"
    )
    context: int = Field(2048, ge=16, description="most tokens of a conversation; longer ones are left out")
    tower: VisionShape = Field(VisionShape(), description="shape, where the model to start from has no tower")
    held_out: float = Field(0.02, ge=0, lt=0.5, description="share of conversations that are only scored")

    @model_validator(mode="before")
    @classmethod
    def _of_stage(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return next((defaults for stage, defaults in STAGES.items() if stage == fields.get("stage")), {}) | fields

    @model_validator(mode="after")
    def _trains(self) -> VisionSettings:
        if not (self.encoder or self.connector or self.backbone):
            raise ValueError("every part is frozen")
        if self.text and not self.backbone:
            raise ValueError("text trains the language model alone, which is frozen: set `text` to 0")
        if self.bad_lines == "skip":
            raise ValueError("bad_lines: conversations about images that cannot be used are refused")
        return self

    def optimiser(self) -> Optimiser:
        parts = {"tower.encoder": self.encoder, "tower.connector": self.connector, "backbone": self.backbone}
        return Optimiser(self.weight_decay, self.clip, self.balance_rate, self.betas, self.eps, parts=parts)

    def text_shares(self, steps: int) -> NDArray[np.float64]:
        """Returns the share of conversations without images of each step."""
        falling = max(1.0, self.text_steps * steps)
        done = np.minimum(np.arange(steps) / falling, 1.0) if self.text_steps else np.ones(steps)
        first = self.text if self.text_first is None else self.text_first
        return first + (self.text - first) * done if self.text else np.zeros(steps)

    def frames(self, before: FrameSettings) -> FrameSettings:
        """Returns how images are cut, where they were cut as `before` says."""
        most = {"do_image_splitting": self.tiles > 1, "max_tiles": max(self.tiles, before.min_tiles)}
        tokens = dict(zip(("min_image_tokens", "max_image_tokens"), self.image_tokens or (), strict=False))
        return checked(FrameSettings, before.model_dump() | most | tokens, "image_tokens")


def stage_settings(stage: str | None) -> VisionSettings:
    """Returns the default settings of a stage.

    Raises:
        UnknownName: there is no such stage.
    """
    if stage not in STAGES:
        raise UnknownName("stage", str(stage), STAGES, where="--stage")
    return VisionSettings.model_validate({"stage": stage})


class VisionRecord(FolderRecord):
    """Record of a stage.

    Args:
        source: what it started from.
        layout: of the language model.
        settings: of the training.
        examples: conversations about images that were trained on.
        texts: conversations without images that were trained on.
        left_out: that were longer than the context.
        steps: of the optimiser.
        curve: steps and mean losses.
        before: scores on held-out conversations before the training, by name.
        after: the same after it.
        seconds: of all steps.
        device: that trained.
        hilnas: version.
    """

    source: str
    layout: str
    settings: VisionSettings
    examples: int
    texts: int
    left_out: int
    steps: int
    curve: tuple[tuple[int, float], ...]
    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    device: str
    hilnas: str


class Data(NamedTuple):
    """Files of a stage.

    Args:
        images: files and folders of conversations about images.
        texts: files of conversations without.
        evaluate: files and folders of conversations about images that are only scored.
    """

    images: Sequence[Path]
    texts: Sequence[Path] = ()
    evaluate: Sequence[Path] = ()


def train_vision(
    name: str,
    data: Data,
    settings: VisionSettings,
    output: Path,
    log: Log,
    encoder: Path | None = None,
    checkpoint_s: float = 60.0,
) -> VisionRecord:
    """Trains a stage and writes the model's folder.

    Args:
        name: of the model to start from: a folder of a model of images and text, or see `start_model`.
        data: to train on.
        settings: of the stage.
        output: folder of the result.
        log: takes one line at a time.
        encoder: folder of SigLIP2, or of a model with a tower, whose encoder is taken; None: one with random weights,
            where the model to start from has none.
        checkpoint_s: least seconds between checkpoints.

    Raises:
        InvalidInput: data or images have problems, named by file and line, or the folder holds something else.
        UnknownName: no such family or size.
        Unsupported: no layout says the model, or the tower is another one.
        CandidateFailed: the loss is not finite.
    """
    start = _Start.of(name, settings, encoder)
    examples = _Examples.read(data, start, settings)
    key = content_hash([TRAINER_VERSION, start.inputs, examples.inputs, settings.model_dump(mode="json")])

    def trained(folder: Path, worker: Worker) -> VisionRecord:
        return _trained(key, start, examples, settings, output, folder, worker, checkpoint_s)

    return trained_once(output, key, output / RECORD, VisionRecord, trained, log)


class _Start(NamedTuple):
    """What a stage starts from: a model with a tower, or a language model."""

    described: str
    inputs: list[Any]
    folder: VisionFolder | None
    text: StartModel | None
    encoder: Path | None
    shape: VisionShape
    chat: ChatTokenizer
    frames: FrameSettings

    @classmethod
    def of(cls, name: str, settings: VisionSettings, encoder: Path | None) -> _Start:
        folder = Path(name)
        encoders = [] if encoder is None else [sha256_of(file) for file in shard_files(encoder)]
        shape = settings.tower if encoder is None else encoder_shape(encoder, settings.tower)
        if folder.is_dir() and has_towers(folder):
            vision = VisionFolder.read(folder)
            hashes = [sha256_of(file) for file in shard_files(folder)]
            tokenizer, frames, text = vision.tokenizer, vision.frames, None
            described, place = f"{folder.resolve().name}, SHA-256 {hashes[0][:12]}", vision
        else:
            text = start_model(name)
            tokenizer = image_tokenizer(text.tokenizer.tokenizer, text.tokenizer.context)
            hashes, described, place = text.hashes, text.described, None
            sides = {"encoder_patch_size": shape.patch_size, "downsample_factor": shape.downsample_factor}
            frames = checked(FrameSettings, sides, "tower")
        inputs = [hashes, encoders, tokenizer.describe()]
        chat = ChatTokenizer(tokenizer, name)
        return cls(described, inputs, place, text, encoder, shape, chat, settings.frames(frames))

    def open(self, settings: VisionSettings, scratch: Path) -> VisionModel:
        """Returns the model to train."""
        if self.folder is not None:
            vision = self.folder.open()
            if self.encoder is not None:
                assert isinstance(vision.model.tower, VisionTower)
                load_encoder(vision.model.tower, self.encoder)
            return VisionModel(vision.model, vision.tokenizer, self.frames, vision.context)
        assert self.text is not None
        path, context = self.text.tensors(scratch), self.text.tokenizer.context
        layout, tokenizer = checkpoint_layout(path), image_tokenizer(self.text.tokenizer.tokenizer, context)
        tower = VisionTower(self.shape, layout.d_model, settings.seed)
        if self.encoder is not None:
            load_encoder(tower, self.encoder)
        model = with_tower(load_file(path), layout, tokenizer, tower, settings.seed)
        return VisionModel(model, tokenizer, self.frames, context)


class _Example(NamedTuple):
    """A conversation as ids [T], which are answers [T], and its images."""

    ids: NDArray[np.int32]
    answers: NDArray[np.bool_]
    pictures: tuple[Picture, ...]

    @property
    def inputs(self) -> NDArray[np.int64]:
        return self.ids[:-1].astype(np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.where(self.answers[1:], self.ids[1:], IGNORE).astype(np.int64)


class _Examples(NamedTuple):
    """All conversations of a stage."""

    images: list[_Example]
    texts: list[_Example]
    held_out: list[_Example]
    held_out_texts: list[_Example]
    left_out: int
    inputs: list[Any]

    @classmethod
    def read(cls, data: Data, start: _Start, settings: VisionSettings) -> _Examples:
        lines, scored = (
            [line for path in paths for line in read_image_conversations(path, start.chat)]
            for paths in (data.images, data.evaluate)
        )
        places = ((path, read_placed_lines(path, Conversation, start.chat.special)) for path in data.texts)
        talks = [line for path, placed in places for _, line in start.chat.placed(placed)]
        encoder = _Encoder(start)
        examples = [(line, encoder.pictured(line)) for line in lines]
        texts = [(talk, encoder.example(talk)) for talk in talks]
        short = [(line, one) for line, one in examples if len(one.ids) <= settings.context]
        short_texts = [(talk, one) for talk, one in texts if len(one.ids) <= settings.context]
        images, held_out = _split(short, settings.held_out, _hashes)
        trained_texts, held_out_texts = _split(
            short_texts, settings.held_out, lambda talk: talk.model_dump(mode="json")
        )
        held_out += [encoder.pictured(line) for line in scored]
        left_out = len(examples) - len(short) + len(texts) - len(short_texts)
        if not images:
            raise InvalidInput(
                f"of {len(examples):,} conversations about images, {len(short):,} fit {settings.context:,} tokens, and"
                " all of these are held out",
                where="--data",
            )
        if data.texts and not settings.text:
            raise InvalidInput("the share of text is 0: set `text`, or give no --text", where="--text")
        if settings.text and not trained_texts:
            raise InvalidInput(f"a share of {settings.text:g} of text needs --text; or set it to 0", where="text")
        inputs = [[sha256_of(path / METADATA if path.is_dir() else path) for path in paths] for paths in data]
        pictures = sorted({picture.sha256 for line in (*lines, *scored) for picture in line.pictures})
        return cls(images, trained_texts, held_out, held_out_texts, left_out, [inputs, pictures])


AnySource = TypeVar("AnySource")


class _Encoder:
    """Encodes conversations, equal ones once: of many images the same is asked, and rendering takes milliseconds."""

    def __init__(self, start: _Start) -> None:
        self._start = start
        self._encoded: dict[str, tuple[NDArray[np.int32], NDArray[np.bool_]]] = {}

    def example(self, conversation: Conversation, pictures: tuple[Picture, ...] = ()) -> _Example:
        """Returns a conversation as ids."""
        key = content_hash(conversation.model_dump(mode="json"))
        if key not in self._encoded:
            self._encoded[key] = self._start.chat.conversation(conversation)
        return _Example(*self._encoded[key], pictures)

    def pictured(self, line: PicturedConversation) -> _Example:
        """Returns a conversation about images as ids."""
        try:
            return self.example(line.expanded(self._start.frames), line.pictures)
        except InvalidInput as error:
            raise InvalidInput(error.message, where=line.place) from error


def _hashes(line: PicturedConversation) -> list[str]:
    return [picture.sha256 for picture in line.pictures]


def _split(
    examples: Sequence[tuple[AnySource, _Example]], share: float, identity: Callable[[AnySource], object]
) -> tuple[list[_Example], list[_Example]]:
    """Returns examples to train on, and those that are held out, by the hash of what `identity` returns."""
    parts: tuple[list[_Example], list[_Example]] = ([], [])
    for source, example in examples:
        parts[int(content_hash(identity(source))[:8], 16) < share * 2**32].append(example)
    return parts[0], parts[1][:_MOST_HELD_OUT]


def _trained(
    key: str,
    start: _Start,
    examples: _Examples,
    settings: VisionSettings,
    output: Path,
    folder: Path,
    worker: Worker,
    checkpoint_s: float,
) -> VisionRecord:
    vision = start.open(settings, folder / START)
    model = vision.model.to(worker.device)
    steps = _Steps(examples, vision, settings, worker, start.chat.pad)
    before = steps.scores(model)
    counts = f"{len(examples.images):,} conversations about images, {len(examples.texts):,} without"
    worker.log(f"{counts}, {examples.left_out:,} left out; held out, before: {_described(before)}")
    state = TrainingState(model, settings.optimiser(), steps.count)
    rate = partial(settings.rate, steps=steps.count)
    phase = TrainingPhase(settings.stage, steps.count, steps.tokens, steps.passes, steps.loss, rate)
    checkpoint = TrainingCheckpoint(folder / CHECKPOINT, {"key": key}, checkpoint_s)
    precision = partial(precision_of, worker.device, "bfloat16" if worker.device.type == "cuda" else "float32")
    fit(state, [phase], [checkpoint], worker, name=output.name, precision=precision)
    after = steps.scores(model.eval())
    worker.log(f"held out: {_described(after)}")
    write_vision_model(output, vision)
    return VisionRecord(
        key=key,
        weights=sha256_of(output / SINGLE),
        source=start.described,
        layout=model.backbone.layout.format(),
        settings=settings,
        examples=len(examples.images),
        texts=len(examples.texts),
        left_out=examples.left_out,
        steps=state.steps,
        curve=tuple(thinned(state.losses, _CURVE_POINTS)),
        before=before,
        after=after,
        seconds=state.seconds,
        device=worker.describe(),
        hilnas=version("hilnas"),
    )


class _Steps:
    """Batches, loss and scores of a stage."""

    def __init__(
        self, examples: _Examples, vision: VisionModel, settings: VisionSettings, worker: Worker, pad: int
    ) -> None:
        self._examples, self._frames, self._worker, self._pad = examples, vision.frames, worker, pad
        self.count = max(1, round(settings.epochs * len(examples.images) / settings.batch / (1 - settings.text)))
        self.tokens = round(settings.batch * float(np.mean([len(one.ids) for one in examples.images])))
        """Tokens of a step, about."""
        ends = np.floor(np.cumsum(settings.text_shares(self.count) * settings.batch) + 1e-9).astype(int)
        self._texts = np.concatenate([[0], ends])
        """Texts that were read before each step."""
        self._images = np.arange(self.count + 1) * settings.batch - self._texts
        self._orders = [
            Mixture(np.zeros(len(kind), np.int64), None, settings.seed) if kind else None
            for kind in (examples.images, examples.texts)
        ]

    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """Returns the passes of a step: tokens, labels, answer tokens of the step, and frames as `stacked` has them."""
        drawn = []
        kinds = (self._examples.images, self._examples.texts)
        for examples, order, reads in zip(kinds, self._orders, (self._images, self._texts), strict=True):
            if order is not None:
                drawn += [examples[order[number]] for number in range(reads[step], reads[step + 1])]
        counted = torch.tensor(sum(int(one.answers[1:].sum()) for one in drawn))
        most = self._worker.most_tokens(*_TOKENS_AT_ONCE)
        return [
            self._pass([drawn[place] for place in places], counted)
            for places in passes_of([len(one.ids) for one in drawn], most)
        ]

    def _pass(self, examples: Sequence[_Example], counted: Tensor) -> tuple[Tensor, ...]:
        frames = [frame for one in examples for picture in one.pictures for frame in picture.frames(self._frames)]
        tokens, labels = padded([one.inputs for one in examples], self._pad), [one.labels for one in examples]
        return tokens, padded(labels, IGNORE), counted, *stacked(frames, self._frames.encoder_patch_size)

    def loss(self, model: TowerModel, tokens: Tensor, labels: Tensor, counted: Tensor, *inputs: Tensor) -> Tensor:
        """Returns the share of a pass in the loss of its step."""
        nats, _ = answer_nats(model.backbone, model.embeddings(tokens, *inputs), labels)
        return nats.sum() / counted

    def scores(self, model: TowerModel) -> dict[str, float]:
        """Returns loss and exact answers of held-out conversations about images, and the loss of those without.

        An answer is exact where each of its tokens is the likeliest after those before it: what greedy decoding gives.
        """
        scores: dict[str, float] = {}
        if examples := self._examples.held_out:
            loss, exact = self._scored(model, examples)
            scores |= {"conversations": len(examples), "loss": loss, "exact answers": exact}
        if examples := self._examples.held_out_texts:
            loss, _ = self._scored(model, examples)
            scores |= {"texts": len(examples), "loss of texts": loss}
        return scores

    @torch.no_grad()
    def _scored(self, model: TowerModel, examples: Sequence[_Example]) -> tuple[float, float]:
        """Returns nats per answer token, and the share of exact answers."""
        nats, count, exact = 0.0, 0, 0
        for places in passes_of([len(one.ids) for one in examples], self._worker.most_tokens(*_TOKENS_AT_ONCE)):
            self._worker.yield_hook()
            tensors = self._pass([examples[place] for place in places], torch.tensor(1))
            tokens, labels, _, *inputs = (tensor.to(self._worker.device) for tensor in tensors)
            answers = labels != IGNORE
            logits = model.backbone.logits(model.backbone.features(model.embeddings(tokens, *inputs))[answers])
            nats += float(F.cross_entropy(logits.float(), labels[answers], reduction="sum"))
            count += len(logits)
            wrong = answers.nonzero()[:, 0][logits.argmax(-1) != labels[answers]]
            exact += len(places) - len(set(wrong.tolist()))
        return nats / count, exact / len(examples)


def _described(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items()) or "none"
