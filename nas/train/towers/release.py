"""Folders of models with towers; those of images are of transformers' Lfm2Vl where a stock class holds the layout.

    config.json, generation_config.json, model.safetensors    for AutoModelForImageTextToText
    processor_config.json                                     how files become inputs, for AutoProcessor
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    codec/                                                    of a model that speaks, see `nas.train.towers.codec`
    vision.json, audio.json                                   what it was trained of and how, written last

    tower.encoder.*       model.vision_tower.*, model.audio_tower.*
    tower.connector.*     model.multi_modal_projector.*
    head.*                model.speech_head.*
    backbone.*            model.language_model.*, under transformers' names; an output head is lm_head

Another layout keeps our names under model.language_model. Such a model, and every one that reads sound, for which
transformers has no class, is of a type of ours that hilnas alone reads. Weights are float32. `TowerFolder` reads such
folders, of others, too, without running their code; `nas chat`, `nas adapt` and `nas import` read their language model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Purpose
from nas.model.nn.model import Model
from nas.model.nn.transformers import each_of_transformers, transformers_config
from nas.train.adapt.checkpoints import LANGUAGE_MODEL, import_model
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.release.huggingface import own_config, write_float32
from nas.train.release.model_tokenizer import CONFIG, GENERATION, MODEL, TEMPLATE, ModelTokenizer, read_model_tokenizer
from nas.train.release.shards import SINGLE, Shards, read_json
from nas.train.release.tokenizer import MemberTokenizer, json_bytes
from nas.train.towers.modality import Modality, Processor, Shape, checked
from nas.train.towers.model import Tower, TowerModel
from nas.train.towers.speech import SPEECH_TOKENS, SpeechHead, SpeechShape, SpeechTokens

PROCESSOR = "processor_config.json"
CONNECTOR = "model.multi_modal_projector."
SPEECH_HEAD = "model.speech_head."
CODEC = "codec"
"""Folder in that of a model that speaks."""

_OLD_PROCESSOR = "preprocessor_config.json"
_LANGUAGE_MODELS = ("lfm2", "lfm2_moe", "llama", "qwen2", "qwen3", "arcee", "hilnas")
"""Types whose embeddings are added to those of a tower as they are looked up: no factor, no mean that is subtracted."""
_PURPOSES: tuple[Purpose, ...] = ("bos", "pad")
_TEMPLATE = """{%- set plain = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is string or not message.content -%}
{%- set plain.messages = plain.messages + [message] -%}
{%- else -%}
{%- set text = namespace(all="") -%}
{%- for part in message.content -%}
{%- set text.all = text.all + ("MARKER" if part.type == "KIND" else part.text) -%}
{%- endfor -%}
{%- set plain.messages = plain.messages + [dict(message, content=text.all)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
"""
"""In front of a chat template: contents in parts become text."""


@dataclass(frozen=True)
class MultimodalModel:
    """A model with a tower with all that reads and writes for it.

    Args:
        modality: of the tower.
        model: with the tower.
        shape: of the tower.
        tokenizer: with the tokens of the modality.
        processor: how files become inputs.
        context: tokens that the model is meant for.
    """

    modality: Modality
    model: TowerModel
    shape: Shape
    tokenizer: ModelTokenizer
    processor: Processor
    context: int


def modality_of(folder: Path) -> Modality | None:
    """Returns what the tower of a model in a folder of transformers reads; None: there is none.

    Packages of towers are extras: those of other towers are not needed.
    """
    kind = read_json(folder / MODEL).get("model_type") if (folder / MODEL).is_file() else None
    if kind in ("hilnas_vl", "lfm2_vl"):
        from nas.train.towers.vision import VISION

        return VISION
    if kind == "hilnas_audio":
        from nas.train.towers.audio import AUDIO

        return AUDIO
    return None


def tower_tokenizer(
    tokenizer: MemberTokenizer, context: int, modality: Modality, speech: bool = False
) -> ModelTokenizer:
    """Returns a model's tokenizer with the tokens of a modality, and a chat template that takes contents in parts.

    Args:
        tokenizer: of the model.
        context: of the model.
        modality: of its tower.
        speech: whether it also gets the tokens of models that speak.

    Raises:
        InvalidInput: it has no chat template.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidInput(f"the tokenizer has no chat template, in which {modality.noun}s would be asked about")
    changed = Tokenizer.from_buffer(tokenizer.content)
    tokens = (*modality.tokens, *(SPEECH_TOKENS if speech else ()))
    changed.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    carried = dict(tokenizer.files(context))
    carried |= dict(tokenizer.beside) if isinstance(tokenizer, ModelTokenizer) else {}
    del carried["tokenizer.json"]
    carried |= {MODEL: json_bytes({}), GENERATION: json_bytes(_generation_config(tokenizer))}
    about = json.loads(carried[CONFIG])
    carried[CONFIG] = json_bytes({name: value for name, value in about.items() if name != "chat_template"})
    parts = _TEMPLATE.replace("MARKER", modality.marker).replace("KIND", modality.kind)
    carried[TEMPLATE] = (template if modality.marker in template else parts + template).encode()
    return ModelTokenizer(changed.to_str().encode(), carried)


def speech_tokens(tokenizer: ModelTokenizer, where: str) -> SpeechTokens:
    """Returns the ids of the tokens of models that speak.

    Raises:
        InvalidInput: the tokenizer lacks a token of models that speak.
    """
    ids = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    if missing := [token for token in SPEECH_TOKENS if token not in ids]:
        raise InvalidInput(f"its tokenizer has no token {missing[0]}", where=where)
    return SpeechTokens(*(ids[token] for token in SPEECH_TOKENS))


def with_head(model: TowerModel, layout: Layout, shape: SpeechShape, tokenizer: ModelTokenizer, seed: int) -> None:
    """Gives a model a new head, and its language model rows for the tokens of speech, the mean of the others."""
    state = model.backbone.state_dict()
    grown = replace(layout, vocab=max(layout.vocab, tokenizer.size))
    model.backbone = Model(grown, None)
    model.backbone.load_state_dict(_with_rows(state, grown.vocab))
    model.head = SpeechHead(shape, layout.d_model, speech_tokens(tokenizer, "tokenizer.json"))
    model.head.draw(seed, state["embed.weight"])


def _with_rows(tensors: Mapping[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """Returns a checkpoint with `vocab` rows of embedding and head; new ones are the mean of the others."""
    state = dict(tensors)
    for name in {"embed.weight", "head.weight"} & state.keys():
        rows = state[name]
        state[name] = torch.cat([rows, rows.mean(0, keepdim=True).expand(vocab - len(rows), -1)])
    return state


def _generation_config(tokenizer: MemberTokenizer) -> dict[str, Any]:
    """Returns generation_config.json."""
    ids = tokenizer.ids()
    named = {f"{name}_token_id": ids[name] for name in _PURPOSES if name in ids}
    return {**named, "eos_token_id": list(tokenizer.ends)}


def with_tower(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    tokenizer: ModelTokenizer,
    tower: Tower,
    placeholder: str,
    seed: int,
) -> TowerModel:
    """Returns a language model with a tower; the rows of new tokens are the mean of the others.

    Args:
        tensors: checkpoint of the language model.
        layout: of it.
        tokenizer: with the tokens of the tower's modality.
        tower: its connector is drawn anew.
        placeholder: token that stands for one of its embeddings.
        seed: of the connector.
    """
    extended = replace(layout, vocab=max(layout.vocab, tokenizer.size))
    state = _with_rows(tensors, extended.vocab)
    tower.connector.draw(seed, state["embed.weight"])
    model = TowerModel(extended, tower, tokenizer.tokenizer.get_vocab(with_added_tokens=True)[placeholder])
    model.backbone.load_state_dict(state)
    return model


def write_multimodal_model(folder: Path, whole: MultimodalModel) -> None:
    """Writes a model's folder, each file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_float32(folder / SINGLE, dict(_their_tensors(whole)))
    files: dict[str, bytes] = {
        **dict(whole.tokenizer.files(whole.context)),
        MODEL: json_bytes(_config(whole)),
        GENERATION: json_bytes(_generation_config(whole.tokenizer)),
        PROCESSOR: json_bytes(whole.processor.config()),
    }
    for name, content in files.items():
        write_durably(folder / name, content)


def _text_config(layout: Layout) -> tuple[dict[str, Any], bool]:
    """Returns config.json of the language model, and whether a stock class of transformers holds it."""
    try:
        return transformers_config(layout), True
    except Unsupported:
        return {name: value for name, value in own_config(layout).items() if name != "auto_map"}, False


def _config(whole: MultimodalModel) -> dict[str, Any]:
    layout, modality = whole.model.backbone.layout, whole.modality
    text, stock = _text_config(layout)
    private = modality.own_type, modality.own_type.title().replace("_", "")
    model_type, architecture = modality.stock if stock and modality.stock else private
    ends = {"eos_token_id": whole.tokenizer.ends[0]}
    common = {
        **_generation_config(whole.tokenizer),
        **ends,
        "dtype": "float32",
        "max_position_embeddings": whole.context,
    }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**text, **common},
        f"{modality.name}_config": {
            "model_type": modality.shape.encoder_type,
            "dtype": "float32",
            **whole.shape.encoder(),
        },
        f"{modality.kind}_token_id": whole.model.placeholder,
        "projector_hidden_act": "gelu",
        **whole.shape.connector(),
        **({} if whole.model.head is None else {"speech_config": whole.model.head.shape.model_dump()}),
        "tie_word_embeddings": layout.tied,
        **common,
    }


def _their_tensors(whole: MultimodalModel) -> Iterator[tuple[str, Tensor]]:
    tower, head = whole.model.tower, whole.model.head
    parts = [(tower.encoder, _tower_prefix(whole.modality)), (tower.connector, CONNECTOR)]
    for part, prefix in (*parts, *([] if head is None else [(head, SPEECH_HEAD)])):
        yield from ((prefix + name, tensor) for name, tensor in _weights(part).items())
    layout, state = whole.model.backbone.layout, whole.model.backbone.state_dict()
    if not _text_config(layout)[1]:
        yield from ((LANGUAGE_MODEL + name, tensor) for name, tensor in state.items())
        return
    for name, tensor in each_of_transformers(layout, state):
        yield (LANGUAGE_MODEL + name.removeprefix("model.") if name.startswith("model.") else name), tensor


def _tower_prefix(modality: Modality) -> str:
    return f"model.{modality.name}_tower."


def _weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns tensors of a module without counters, such as the batches that a BatchNorm has seen."""
    return {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


@dataclass(frozen=True)
class TowerFolder:
    """A folder of a model with a tower, without its weights.

    Args:
        folder: of the model.
        modality: of the tower.
        shape: of the tower.
        placeholder: id of the token that stands for one embedding of the tower.
        tokenizer: with the tokens of the modality.
        processor: how files become inputs.
        context: tokens that the model is meant for.
        speech: shape of the head with which it speaks; None: it does not.
    """

    folder: Path
    modality: Modality
    shape: Shape
    placeholder: int
    tokenizer: ModelTokenizer
    processor: Processor
    context: int
    speech: SpeechShape | None = None

    @classmethod
    def read(cls, folder: Path, modality: Modality) -> Self:
        """Reads the folder's configuration; no code of it is run.

        Raises:
            InvalidInput: a file is missing or damaged.
            Unsupported: the tower is another one.
        """
        where = str(folder / MODEL)
        if not folder.is_dir() or modality_of(folder) != modality:
            raise InvalidInput(
                f"no model of {modality.noun}s and text: `nas family {modality.name}` writes such a folder",
                where=str(folder),
            )
        config = read_json(folder / MODEL)
        shape = _shape_of(config, config.get(f"{modality.name}_config"), modality, where)
        about = folder / (PROCESSOR if (folder / PROCESSOR).is_file() else _OLD_PROCESSOR)
        processor = modality.processor.of(read_json(about), str(about))
        if any(getattr(processor, name) != value for name, value in shape.processor().items()):
            raise InvalidInput(f"{modality.noun}s are processed for another tower", where=str(folder / PROCESSOR))
        tokenizer = read_model_tokenizer(folder / "tokenizer.json")
        if not isinstance(tokenizer, ModelTokenizer):
            raise InvalidInput(f"has no {CONFIG}", where=str(folder))
        ids = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        if missing := [token for token in modality.tokens if token not in ids]:
            raise InvalidInput(f"its tokenizer has no token {missing[0]}", where=str(folder))
        placeholder, name = ids[modality.marker], f"{modality.kind}_token_id"
        if config.get(name) != placeholder:
            raise InvalidInput(f"{name} is not the tokenizer's {modality.marker}, {placeholder}", where=where)
        context = FoundTokenizer(tokenizer, folder).context
        spoken = config.get("speech_config")
        speech = checked(SpeechShape, spoken, where) if isinstance(spoken, dict) else None
        return cls(folder, modality, shape, placeholder, tokenizer, processor, context, speech)

    def open(self) -> MultimodalModel:
        """Reads the model.

        Raises:
            InvalidInput: the weights are damaged, or do not fit the configuration.
            Unsupported: no layout says the language model.
        """
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = Path(scratch) / "weights.safetensors"
            language = import_model(self.folder, checkpoint)
            layout, state = language.layout, load_file(checkpoint)
        if language.family not in _LANGUAGE_MODELS:
            raise Unsupported(f"{language.family} behind an encoder is not read", where=str(self.folder))
        if self.tokenizer.size > layout.vocab:
            raise InvalidInput(f"has more tokens than the embedding's {layout.vocab:,} rows", where=str(self.folder))
        shards = Shards(self.folder)
        with torch.device("meta"):  # a configuration may ask for more memory than there is
            tower = self.shape.tower(layout.d_model)
        check_part(tower.encoder, shards, _encoder_prefix(shards, self.modality))
        check_part(tower.connector, shards, CONNECTOR)
        tower = self.shape.tower(layout.d_model)
        load_encoder(tower, self.folder, self.modality)
        load_part(tower.connector, shards, CONNECTOR)
        # The language model's epsilon is part of its embedding's scale, see `nas.train.adapt.configuration`.
        factor: Any = language.factors.get("embed.weight", 1.0)
        for tensor in tower.connector.linear_2.state_dict().values():
            tensor.mul_(factor)
        model = TowerModel(layout, tower, self.placeholder)
        model.backbone.load_state_dict(state)
        if self.speech is not None:
            tokens = speech_tokens(self.tokenizer, str(self.folder))
            with torch.device("meta"):
                check_part(SpeechHead(self.speech, layout.d_model, tokens), shards, SPEECH_HEAD)
            model.head = SpeechHead(self.speech, layout.d_model, tokens)
            load_part(model.head, shards, SPEECH_HEAD)
            with torch.no_grad():
                model.head.embed.weight.mul_(factor)
        return MultimodalModel(self.modality, model, self.shape, self.tokenizer, self.processor, self.context)


def load_encoder(tower: Tower, folder: Path, modality: Modality) -> None:
    """Fills a tower's encoder with that of a folder of such an encoder, or of a model with one.

    Raises:
        InvalidInput: it is damaged, or of another shape.
    """
    shards = Shards(folder)
    load_part(tower.encoder, shards, _encoder_prefix(shards, modality))


def encoder_shape(folder: Path, connector: Shape, modality: Modality) -> Shape:
    """Returns the shape of the encoder in a folder of one or of a model with one, with another's connector.

    Raises:
        InvalidInput: there is no readable configuration, or the weights do not fit it.
        Unsupported: it is another encoder.
    """
    config = read_json(folder / MODEL)
    encoder = config.get(f"{modality.name}_config", config.get("encoder_config", config))
    shape, shards = _shape_of(connector.connector(), encoder, modality, str(folder / MODEL)), Shards(folder)
    with torch.device("meta"):
        check_part(shape.tower(1).encoder, shards, _encoder_prefix(shards, modality))
    return shape


def _shape_of(config: Mapping[str, Any], encoder: Any, modality: Modality, where: str) -> Shape:
    encoder = encoder if isinstance(encoder, dict) else {"model_type": None}
    if problem := modality.shape.problem(encoder):
        raise Unsupported(problem, where=where)
    if config.get("projector_hidden_act", "gelu") != "gelu":
        raise Unsupported("its encoder or connector has another activation", where=where)
    outside = {name: config[name] for name in modality.shape.apart & config.keys()}
    return checked(modality.shape, {**encoder, **outside}, where)


def _encoder_prefix(shards: Shards, modality: Modality) -> str:
    """Returns what is in front of the names of an encoder's tensors: files of encoders have several forms."""
    last = modality.shape.last
    prefixes = (name.removesuffix(last) for name in shards.names if name.endswith(last))
    return next(prefixes, _tower_prefix(modality))


def check_part(module: torch.nn.Module, shards: Shards, prefix: str) -> None:
    """Checks names and shapes of a module's tensors, which are stored with that prefix."""
    names = set(shards.names)
    for name, tensor in _weights(module).items():
        if (stored := prefix + name) not in names:
            raise InvalidInput(f"lacks {stored}", where=str(shards.path))
        if shards.shape(stored) != tuple(tensor.shape):
            shape = list(shards.shape(stored))
            raise InvalidInput(f"{stored} has shape {shape}, not {list(tensor.shape)}", where=str(shards.path))


def load_part(module: torch.nn.Module, shards: Shards, prefix: str) -> None:
    """Fills a module with the tensors of that prefix."""
    check_part(module, shards, prefix)
    for name, tensor in _weights(module).items():
        values = shards.tensor(prefix + name)
        if not values.isfinite().all():
            raise InvalidInput(f"{prefix}{name} holds NaN or infinity", where=str(shards.path))
        tensor.copy_(values)
