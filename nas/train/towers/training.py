"""Training of models with towers in three stages (LFM2 report, sections 5.2 and 6.3), each a command and a folder.

    connector    the connector alone, between a frozen encoder and a frozen language model
    mid          everything, with conversations without files among the others
    joint        everything, at a lower rate

Defaults of each stage are the modality's, see `TowerSettings.stages`.

The loss is the cross-entropy of answers, each token of a step alike; a frame of a spoken answer counts as one token,
with the weighted mean over its codes (section 6.3). A model gets a head that speaks with `codec`. After an interruption
the same call resumes, see `nas.train.posttrain.trained_folder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny, model_validator
from safetensors.torch import load_file
from torch import Tensor

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput, UnknownName
from nas.core.progress import Log
from nas.core.task import IGNORE
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_placed_lines
from nas.train.posttrain.objective import answer_features, chunked_nats, token_nats
from nas.train.posttrain.sft import Mixture, TrainingSettings, padded, passes_of
from nas.train.posttrain.start import StartModel, start_model
from nas.train.posttrain.trained_folder import FolderRecord, FolderTraining, split
from nas.train.pretrain.member_training import START
from nas.train.release.model_tokenizer import ModelTokenizer
from nas.train.release.shards import shard_files
from nas.train.towers.codec import Codec, copy_codec, read_codec
from nas.train.towers.data import METADATA, MediaLine, read_media_lines
from nas.train.towers.detokenizer import SPEECH_RATE, Codebooks
from nas.train.towers.modality import MediaFile, Modality, Processor, Shape, checked
from nas.train.towers.model import TowerModel
from nas.train.towers.release import (
    CODEC,
    MultimodalModel,
    TowerFolder,
    encoder_shape,
    load_encoder,
    modality_of,
    speech_tokens,
    tower_tokenizer,
    with_head,
    with_tower,
    write_multimodal_model,
)
from nas.train.towers.speech import SpeechShape, SpeechTokens, woven

TRAINER_VERSION = 3
"""Part of keys: increase it with every change after which the same training gives other numbers."""

Stage = Literal["connector", "mid", "joint"]

_TOKENS_AT_ONCE = (2048, 32768)
"""Most tokens of a pass, on the CPU and on a GPU."""
_MOST_HELD_OUT = 500


class TowerSettings(TrainingSettings):
    """Settings of a stage."""

    stage: Stage
    epochs: float = Field(1, gt=0, description="of the conversations about files")
    batch: int = Field(16, ge=1, description="conversations per step")
    encoder: float = Field(1.0, ge=0, description="rate of the encoder as a share of `lr`; 0: it is frozen")
    connector: float = Field(1.0, ge=0, description="rate of the connector")
    backbone: float = Field(1.0, ge=0, description="rate of the language model")
    text: float = Field(0.3, ge=0, lt=1, description="share of conversations without files")
    text_first: float | None = Field(None, ge=0, le=1, description="the same at the first step; none: `text`")
    text_steps: float = Field(0.05, ge=0, le=1, description="share of the steps after which it is `text`")
    context: int = Field(2048, ge=16, description="most tokens of a conversation; longer ones are left out")
    tower: SerializeAsAny[Shape] = Field(description="shape, where the model to start from has no tower")

    modality: ClassVar[Modality]
    stages: ClassVar[dict[Stage, dict[str, Any]]]
    """Defaults that differ between stages."""

    @model_validator(mode="before")
    @classmethod
    def _of_stage(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return next((defaults for stage, defaults in cls.stages.items() if stage == fields.get("stage")), {}) | fields

    @model_validator(mode="after")
    def _trains(self) -> TowerSettings:
        if not (self.encoder or self.connector or self.backbone):
            raise ValueError("every part is frozen")
        if self.text and not self.backbone:
            raise ValueError("text trains the language model alone, which is frozen: set `text` to 0")
        return self

    def optimiser(self) -> Optimiser:
        parts = {"tower.encoder": self.encoder, "tower.connector": self.connector, "backbone": self.backbone}
        return Optimiser(self.weight_decay, self.clip, self.balance_rate, self.betas, self.eps, parts=parts)

    def text_shares(self, steps: int) -> NDArray[np.float64]:
        """Returns the share of conversations without files of each step."""
        falling = max(1.0, self.text_steps * steps)
        done = np.minimum(np.arange(steps) / falling, 1.0) if self.text_steps else np.ones(steps)
        first = self.text if self.text_first is None else self.text_first
        return first + (self.text - first) * done if self.text else np.zeros(steps)

    def spoken(self, codebooks: Codebooks) -> SpeechShape:
        """Returns the shape of a new head for a codec.

        Raises:
            InvalidInput: it does not fit the codec, or models of the modality do not speak.
        """
        raise InvalidInput(f"models that read {self.modality.noun}s do not speak", where="--codec")

    def processor(self, before: Processor) -> Processor:
        """Returns how files are processed, where they were processed as `before` says."""
        return before

    @classmethod
    def of_stage(cls, stage: str | None) -> Self:
        """Returns the default settings of a stage.

        Raises:
            UnknownName: there is no such stage.
        """
        if stage not in cls.stages:
            raise UnknownName("stage", str(stage), cls.stages, where="--stage")
        return cls.model_validate({"stage": stage})


class TowerRecord(FolderRecord):
    """Record of a stage.

    Args:
        settings: of the stage.
        texts: conversations without files that were trained on; `examples` are those about files.
        left_out: conversations that were longer than the context.
    """

    settings: dict[str, Any]
    texts: int
    left_out: int


class Data(NamedTuple):
    """Files of a stage.

    Args:
        media: files and folders of conversations about images or sound.
        texts: files of conversations without.
        evaluate: as `media`, but only scored.
    """

    media: Sequence[Path]
    texts: Sequence[Path] = ()
    evaluate: Sequence[Path] = ()


def train_tower(
    name: str,
    data: Data,
    settings: TowerSettings,
    output: Path,
    log: Log,
    encoder: Path | None = None,
    checkpoint_s: float = 60.0,
    codec: Path | None = None,
    mimi: Path | None = None,
) -> TowerRecord:
    """Trains a stage and writes the model's folder.

    Args:
        name: of the model to start from: a folder of a model with such a tower, or see `start_model`.
        data: to train on.
        settings: of the stage; their class says the modality.
        output: folder of the result.
        log: takes one line at a time.
        encoder: folder of an encoder, or of a model with a tower, whose encoder is taken; None: one with random
            weights, where the model to start from has none.
        checkpoint_s: least seconds between checkpoints.
        codec: folder of a codec, with which the model gets a head that speaks; None: that of the model to start from.
        mimi: folder of Mimi, for a codec with its codes.

    Raises:
        InvalidInput: data or their files have problems, named by file and line, or the folder holds something else.
        UnknownName: no such family or size.
        Unsupported: no layout says the model, or the tower is another one.
        CandidateFailed: the loss is not finite.
    """
    start = _Start.of(name, settings, encoder, codec, mimi)
    return _TowerTraining(start, _Examples.read(data, start, settings), settings, output, checkpoint_s).run(log)


class _Start(NamedTuple):
    """What a stage starts from: a model with a tower, or a language model."""

    described: str
    inputs: list[Any]
    folder: TowerFolder | None
    text: StartModel | None
    encoder: Path | None
    shape: Shape
    chat: ChatTokenizer
    processor: Processor
    tokenizer: ModelTokenizer
    speech: _Speech | None

    @classmethod
    def of(
        cls, name: str, settings: TowerSettings, encoder: Path | None, codec: Path | None, mimi: Path | None
    ) -> _Start:
        folder, modality = Path(name), settings.modality
        encoders = [] if encoder is None else [sha256_of(file) for file in shard_files(encoder)]
        shape = settings.tower if encoder is None else encoder_shape(encoder, settings.tower, modality)
        place: TowerFolder | None = None
        text: StartModel | None = None
        if folder.is_dir() and modality_of(folder) == modality:
            place = TowerFolder.read(folder, modality)
            codec = folder / CODEC if place.speech is not None and codec is None else codec
            hashes = [sha256_of(file) for file in shard_files(folder)]
            tokenizer, processor = place.tokenizer, place.processor
            if codec is not None:
                tokenizer = tower_tokenizer(tokenizer, place.context, modality, speech=True)
            described = f"{folder.resolve().name}, SHA-256 {hashes[0][:12]}"
        else:
            text = start_model(name)
            tokenizer = tower_tokenizer(text.tokenizer.tokenizer, text.tokenizer.context, modality, codec is not None)
            hashes, described = text.hashes, text.described
            processor = checked(modality.processor, shape.processor(), "tower")
        speech = None if codec is None else _Speech.of(codec, mimi, settings, place)
        shapes = [processor.model_dump(mode="json"), (shape if place is None else place.shape).model_dump(mode="json")]
        inputs = [hashes, encoders, tokenizer.describe(), shapes, *([] if speech is None else [speech.hashes])]
        chat = ChatTokenizer(tokenizer, name)
        return cls(
            described, inputs, place, text, encoder, shape, chat, settings.processor(processor), tokenizer, speech
        )

    def open(self, settings: TowerSettings, scratch: Path) -> MultimodalModel:
        """Returns the model to train."""
        whole = self._opened(settings, scratch)
        if self.speech is not None and whole.model.head is None:
            layout = whole.model.backbone.layout
            with_head(whole.model, layout, self.speech.shape, self.tokenizer, settings.seed)
        return replace(whole, tokenizer=self.tokenizer)

    def _opened(self, settings: TowerSettings, scratch: Path) -> MultimodalModel:
        modality = settings.modality
        if self.folder is not None:
            whole = self.folder.open()
            if self.encoder is not None:
                load_encoder(whole.model.tower, self.encoder, modality)
            return replace(whole, processor=self.processor)
        assert self.text is not None
        path, context = self.text.tensors(scratch), self.text.tokenizer.context
        layout, tokenizer = checkpoint_layout(path), self.tokenizer
        tower = self.shape.tower(layout.d_model, settings.seed)
        if self.encoder is not None:
            load_encoder(tower, self.encoder, modality)
        model = with_tower(load_file(path), layout, tokenizer, tower, modality.marker, settings.seed)
        return MultimodalModel(modality, model, self.shape, tokenizer, self.processor, context)


class _Speech(NamedTuple):
    """What makes answers sound: a codec and its folder, the shape of the head, and hashes of the weights."""

    folder: Path
    codec: Codec
    shape: SpeechShape
    hashes: list[str]

    @classmethod
    def of(cls, folder: Path, mimi: Path | None, settings: TowerSettings, place: TowerFolder | None) -> _Speech:
        codec = read_codec(folder, mimi)
        shape = settings.spoken(codec.shape) if place is None or place.speech is None else place.speech
        if shape.books != codec.shape.books:
            raise InvalidInput("the model speaks codes of another codec", where=str(folder))
        files = [file for path in (folder, mimi) if path is not None for file in shard_files(path)]
        return cls(folder, codec, shape, [sha256_of(file) for file in files])

    def spoken(self, example: _Example, line: MediaLine, samples: Tensor, tokens: SpeechTokens) -> _Example:
        """Returns a conversation with frames of codes in its last answer, woven into the text."""
        if not example.answers[-1]:
            raise InvalidInput("the answer with speech has weight 0", where=line.place)
        frames = self.codec.codes(samples[None])[0]
        codes = F.pad(frames, (0, 0, 0, 1), value=self.shape.entries)
        first = int(np.flatnonzero(~example.answers)[-1]) + 1
        answer = woven(line.conversation.mode, tokens, example.ids[first:-1].tolist(), len(codes))
        ids = np.concatenate([example.ids[:first], np.asarray(answer, np.int32), example.ids[-1:]])
        answers = np.concatenate([example.answers[:first], np.ones(len(ids) - first, np.bool_)])
        return _Example(ids, answers, example.files, codes.numpy())


class _Example(NamedTuple):
    """A conversation as ids [T], which are answers [T], its files, and frames [F, Q] of its answer."""

    ids: NDArray[np.int32]
    answers: NDArray[np.bool_]
    files: tuple[MediaFile, ...]
    codes: NDArray[np.int64] | None = None

    @property
    def inputs(self) -> NDArray[np.int64]:
        return self.ids[:-1].astype(np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.where(self.answers[1:], self.ids[1:], IGNORE).astype(np.int64)


class _Examples(NamedTuple):
    """All conversations of a stage."""

    media: list[_Example]
    texts: list[_Example]
    held_out: list[_Example]
    held_out_texts: list[_Example]
    left_out: int
    inputs: list[Any]

    @classmethod
    def read(cls, data: Data, start: _Start, settings: TowerSettings) -> _Examples:
        lines, scored = (
            [line for path in paths for line in read_media_lines(path, start.chat, settings.modality)]
            for paths in (data.media, data.evaluate)
        )
        places = ((path, read_placed_lines(path, Conversation, start.chat.special)) for path in data.texts)
        talks = [line for path, placed in places for _, line in start.chat.placed(placed)]
        encoder = _Encoder(start)
        examples = [(line, encoder.line(line)) for line in lines]
        texts = [(talk, encoder.example(talk)) for talk in talks]
        short = [(line, one) for line, one in examples if len(one.ids) <= settings.context]
        short_texts = [(talk, one) for talk, one in texts if len(one.ids) <= settings.context]
        trained, held_out = split(
            short, settings.held_out, lambda pair: content_hash([file.sha256 for file in pair[0].all_files])
        )
        trained_texts, held_out_texts = split(
            short_texts, settings.held_out, lambda pair: content_hash(pair[0].model_dump(mode="json"))
        )
        media = [one for _, one in trained]
        left_out = len(examples) - len(short) + len(texts) - len(short_texts)
        noun = settings.modality.noun
        if not media:
            raise InvalidInput(
                f"of {len(examples):,} conversations about {noun}s, {len(short):,} fit {settings.context:,} tokens, and"
                " all of these are held out",
                where="--data",
            )
        if data.texts and not settings.text:
            raise InvalidInput("the share of text is 0: set `text`, or give no --text", where="--text")
        if settings.text and not trained_texts:
            raise InvalidInput(f"a share of {settings.text:g} of text needs --text; or set it to 0", where="text")
        inputs = [[sha256_of(path / METADATA if path.is_dir() else path) for path in paths] for paths in data]
        files = sorted({file.sha256 for line in (*lines, *scored) for file in line.all_files})
        return cls(
            media,
            [one for _, one in trained_texts],
            [*(one for _, one in held_out[:_MOST_HELD_OUT]), *map(encoder.line, scored)],
            [one for _, one in held_out_texts[:_MOST_HELD_OUT]],
            left_out,
            [inputs, files],
        )


class _Encoder:
    """Encodes conversations, equal ones once: of many files the same is asked, and rendering takes milliseconds."""

    def __init__(self, start: _Start) -> None:
        self._start = start
        self._encoded: dict[str, tuple[NDArray[np.int32], NDArray[np.bool_]]] = {}

    def example(self, conversation: Conversation, files: tuple[MediaFile, ...] = ()) -> _Example:
        """Returns a conversation as ids."""
        key = content_hash(conversation.model_dump(mode="json"))
        if key not in self._encoded:
            self._encoded[key] = self._start.chat.conversation(conversation)
        return _Example(*self._encoded[key], files)

    def line(self, line: MediaLine) -> _Example:
        """Returns a conversation about files as ids."""
        try:
            example = self.example(line.expanded(self._start.processor), line.files)
            if line.speech is None:
                return example
            if (speech := self._start.speech) is None:
                raise InvalidInput("has speech: name a codec with --codec")
            tokens = speech_tokens(self._start.tokenizer, line.place)
            return speech.spoken(example, line, self._start.processor.samples(line.speech, SPEECH_RATE), tokens)
        except InvalidInput as error:
            raise InvalidInput(error.message, where=line.place) from error


class _TowerTraining(FolderTraining[TowerSettings, TowerRecord]):
    record = TowerRecord

    def __init__(
        self, start: _Start, examples: _Examples, settings: TowerSettings, output: Path, checkpoint_s: float
    ) -> None:
        inputs = [TRAINER_VERSION, start.inputs, examples.inputs, settings.model_dump(mode="json")]
        super().__init__(output, settings, inputs, checkpoint_s)
        self._start, self._examples = start, examples
        self.file, self.phase = settings.modality.record, settings.stage
        self.steps = max(1, round(settings.epochs * len(examples.media) / settings.batch / (1 - settings.text)))
        self.tokens = round(settings.batch * float(np.mean([len(one.ids) for one in examples.media])))
        ends = np.floor(np.cumsum(settings.text_shares(self.steps) * settings.batch) + 1e-9).astype(int)
        self._texts = np.concatenate([[0], ends])
        """Texts that were read before each step."""
        self._media = np.arange(self.steps + 1) * settings.batch - self._texts
        self._orders = [
            Mixture(np.zeros(len(kind), np.int64), None, settings.seed) if kind else None
            for kind in (examples.media, examples.texts)
        ]

    def start(self, folder: Path) -> TowerModel:
        examples, noun = self._examples, self.settings.modality.noun
        counts = f"{len(examples.media):,} conversations about {noun}s, {len(examples.texts):,} without"
        self.worker.log(f"{counts}, {examples.left_out:,} left out")
        self._whole = self._start.open(self.settings, folder / START)
        return self._whole.model

    def write(self, model: TowerModel) -> dict[str, Any]:
        write_multimodal_model(self.output, self._whole)
        if self._start.speech is not None:
            copy_codec(self._start.speech.folder, self.output / CODEC)
        return {
            "source": self._start.described,
            "layout": model.backbone.layout.format(),
            "settings": self.settings.model_dump(mode="json"),
            "examples": len(self._examples.media),
            "texts": len(self._examples.texts),
            "left_out": self._examples.left_out,
        }

    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """Returns the passes of a step: tokens, labels, answer tokens of the step, codes, and the tower's inputs."""
        drawn = []
        kinds = (self._examples.media, self._examples.texts)
        for examples, order, reads in zip(kinds, self._orders, (self._media, self._texts), strict=True):
            if order is not None:
                drawn += [examples[order[number]] for number in range(reads[step], reads[step + 1])]
        counted = torch.tensor(sum(int(one.answers[1:].sum()) for one in drawn))
        most = self.worker.most_tokens(*_TOKENS_AT_ONCE)
        return [
            self._pass([drawn[place] for place in places], counted)
            for places in passes_of([len(one.ids) for one in drawn], most)
        ]

    def _pass(self, examples: Sequence[_Example], counted: Tensor) -> tuple[Tensor, ...]:
        inputs = self._whole.processor.inputs([file for one in examples for file in one.files])
        tokens = padded([one.inputs for one in examples], self._start.chat.pad)
        labels = padded([one.labels for one in examples], IGNORE)
        frames = [torch.from_numpy(one.codes) for one in examples if one.codes is not None]
        codes = torch.cat(frames) if frames else torch.zeros(0, 1, dtype=torch.int64)
        return tokens, labels, counted, codes, *inputs

    def loss(self, model: TowerModel, *tensors: Tensor) -> Tensor:
        tokens, labels, counted, codes, *inputs = tensors
        features = answer_features(model.backbone, model.embeddings(tokens, *inputs, codes=codes), labels)
        targets = labels[labels != IGNORE]
        text = _is_text(model, targets)
        nats = token_nats(model.backbone, features[text], targets[text]).sum()
        if model.head is not None and len(codes):
            nats = nats + chunked_nats(model.head.nats, model.head.embed.weight.shape[0], features[~text], codes).sum()
        return nats / counted

    def scores(self, model: TowerModel) -> dict[str, float]:
        """Returns loss and exact answers of held-out conversations about files, and the loss of those without.

        An answer is exact where each of its tokens is the likeliest after those before it: what greedy decoding gives.
        """
        scores: dict[str, float] = {}
        if examples := self._examples.held_out:
            scores |= {"conversations": len(examples), **self._scored(model, examples)}
        if examples := self._examples.held_out_texts:
            scores |= {"texts": len(examples), "loss of texts": self._scored(model, examples)["loss"]}
        return scores

    @torch.no_grad()
    def _scored(self, model: TowerModel, examples: Sequence[_Example]) -> dict[str, float]:
        """Returns nats per answer token, the share of exact answers, and where there are frames, their loss."""
        nats, count, exact, sound, frames = 0.0, 0, 0, 0.0, 0
        for places in passes_of([len(one.ids) for one in examples], self.worker.most_tokens(*_TOKENS_AT_ONCE)):
            self.worker.yield_hook()
            tensors = self._pass([examples[place] for place in places], torch.tensor(1))
            tokens, labels, _, codes, *inputs = (tensor.to(self.worker.device) for tensor in tensors)
            features = model.backbone.features(model.embeddings(tokens, *inputs, codes=codes))
            answers = (labels != IGNORE) & _is_text(model, labels)
            logits = model.backbone.logits(features[answers])
            if model.head is not None and len(codes):
                sound += float(model.head.nats(features[labels == model.head.tokens.frame], codes).sum())
                frames += len(codes)
            nats += float(F.cross_entropy(logits.float(), labels[answers], reduction="sum"))
            count += len(logits)
            wrong = answers.nonzero()[:, 0][logits.argmax(-1) != labels[answers]]
            exact += len(places) - len(set(wrong.tolist()))
        scores = {"loss": nats / count, "exact answers": exact / len(examples)}
        return scores | ({"loss of codes": sound / frames} if frames else {})


def _is_text(model: TowerModel, targets: Tensor) -> Tensor:
    """Returns which ids stand for no frame of codes."""
    return targets != model.head.tokens.frame if model.head is not None else torch.ones_like(targets, dtype=torch.bool)
