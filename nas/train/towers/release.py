"""Folders of models with towers, those of transformers' Lfm2Vl where a stock class holds the layout.

    config.json, generation_config.json, model.safetensors    for AutoModelForImageTextToText
    processor_config.json                                     how images are cut, for AutoProcessor
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    vision.json                                               what it was trained of and how, written last

    tower.encoder.*       model.vision_tower.*
    tower.connector.*     model.multi_modal_projector.*
    backbone.*            model.language_model.*, under transformers' names; an output head is lm_head

Another layout keeps our names under model.language_model, and the type hilnas_vl: hilnas alone reads it. Weights are
float32. `VisionFolder` reads such folders, of others, too, without running their code; `nas chat`, `nas adapt` and
`nas import` read their language model.
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
from nas.model.nn.transformers import each_of_transformers, transformers_config
from nas.train.adapt.checkpoints import LANGUAGE_MODEL, WITH_TOWERS, import_model
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.release.huggingface import Planned, own_config, write_safetensors
from nas.train.release.model_tokenizer import CONFIG, GENERATION, MODEL, TEMPLATE, ModelTokenizer, read_model_tokenizer
from nas.train.release.shards import SINGLE, Shards, read_json
from nas.train.release.tokenizer import MemberTokenizer, json_bytes
from nas.train.towers.images import IMAGE, TOKENS, FrameSettings, checked
from nas.train.towers.model import TowerModel
from nas.train.towers.vision import ACTIVATION, VisionShape, VisionTower

RECORD = "vision.json"
PROCESSOR = "processor_config.json"
ENCODER, CONNECTOR = "model.vision_tower.", "model.multi_modal_projector."

_OLD_PROCESSOR = "preprocessor_config.json"
_MOST_BYTES = 1 << 20
_ENCODER_TYPE = "siglip2_vision_model"
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
{%- set text.all = text.all + ("<image>" if part.type == "image" else part.text) -%}
{%- endfor -%}
{%- set plain.messages = plain.messages + [dict(message, content=text.all)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
"""
"""In front of a chat template: contents in parts become text."""


@dataclass(frozen=True)
class VisionModel:
    """A model of images and text with all that reads and writes for it.

    Args:
        model: with a `VisionTower`.
        tokenizer: with the tokens of images.
        frames: how images are cut.
        context: tokens that the model is meant for.
    """

    model: TowerModel
    tokenizer: ModelTokenizer
    frames: FrameSettings
    context: int

    @property
    def shape(self) -> VisionShape:
        """Shape of the tower."""
        assert isinstance(self.model.tower, VisionTower)
        return self.model.tower.shape


def has_towers(folder: Path) -> bool:
    """Returns whether a folder of transformers holds a model with towers."""
    return (folder / MODEL).is_file() and read_json(folder / MODEL, _MOST_BYTES).get("model_type") in WITH_TOWERS


def image_tokenizer(tokenizer: MemberTokenizer, context: int) -> ModelTokenizer:
    """Returns a model's tokenizer with the tokens of images, and a chat template that takes contents in parts.

    Raises:
        InvalidInput: it has no chat template.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidInput("the tokenizer has no chat template, in which images would be asked about")
    changed = Tokenizer.from_buffer(tokenizer.content)
    changed.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    carried = dict(tokenizer.files(context))
    carried |= dict(tokenizer.beside) if isinstance(tokenizer, ModelTokenizer) else {}
    del carried["tokenizer.json"]
    carried |= {MODEL: json_bytes({}), GENERATION: json_bytes(_generation_config(tokenizer))}
    about = json.loads(carried[CONFIG])
    carried[CONFIG] = json_bytes({name: value for name, value in about.items() if name != "chat_template"})
    carried[TEMPLATE] = (template if IMAGE in template else _TEMPLATE + template).encode()
    return ModelTokenizer(changed.to_str().encode(), carried)


def _generation_config(tokenizer: MemberTokenizer) -> dict[str, Any]:
    """Returns generation_config.json."""
    ids = tokenizer.ids()
    named = {f"{name}_token_id": ids[name] for name in _PURPOSES if name in ids}
    return {**named, "eos_token_id": list(tokenizer.ends)}


def with_tower(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    tokenizer: ModelTokenizer,
    tower: VisionTower,
    seed: int,
) -> TowerModel:
    """Returns a language model with a tower; the rows of new tokens are the mean of the others.

    Args:
        tensors: checkpoint of the language model.
        layout: of it.
        tokenizer: with the tokens of images.
        tower: its connector is drawn anew.
        seed: of the connector.
    """
    extended = replace(layout, vocab=max(layout.vocab, tokenizer.size))
    state = dict(tensors)
    for name in {"embed.weight", "head.weight"} & state.keys():
        rows = state[name]
        state[name] = torch.cat([rows, rows.mean(0, keepdim=True).expand(extended.vocab - len(rows), -1)])
    tower.connector.draw(seed, state["embed.weight"])
    model = TowerModel(extended, tower, tokenizer.tokenizer.get_vocab(with_added_tokens=True)[IMAGE])
    model.backbone.load_state_dict(state)
    return model


def write_vision_model(folder: Path, vision: VisionModel) -> None:
    """Writes a model's folder, each file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_their_tensors(vision.model))
    planned = [Planned(name, tuple(tensor.shape), torch.float32) for name, tensor in tensors.items()]
    values = (tensor.detach().cpu() for tensor in tensors.values())
    write_safetensors(folder / SINGLE, planned, values, {"format": "pt"})
    files: dict[str, bytes] = {
        **dict(vision.tokenizer.files(vision.context)),
        MODEL: json_bytes(_config(vision)),
        GENERATION: json_bytes(_generation_config(vision.tokenizer)),
        PROCESSOR: json_bytes(_processor(vision.frames)),
    }
    for name, content in files.items():
        write_durably(folder / name, content)


def _text_config(layout: Layout) -> tuple[dict[str, Any], bool]:
    """Returns config.json of the language model, and whether a stock class of transformers holds it."""
    try:
        return transformers_config(layout), True
    except Unsupported:
        return {name: value for name, value in own_config(layout).items() if name != "auto_map"}, False


def _config(vision: VisionModel) -> dict[str, Any]:
    layout, shape = vision.model.backbone.layout, vision.shape
    text, stock = _text_config(layout)
    ends = {"eos_token_id": vision.tokenizer.ends[0]}
    common = {
        **_generation_config(vision.tokenizer),
        **ends,
        "dtype": "float32",
        "max_position_embeddings": vision.context,
    }
    return {
        "architectures": ["Lfm2VlForConditionalGeneration" if stock else "HilnasVl"],
        "model_type": WITH_TOWERS[0 if stock else 1],
        "text_config": {**text, **common},
        "vision_config": {"model_type": _ENCODER_TYPE, "dtype": "float32", **shape.encoder()},
        "image_token_id": vision.model.placeholder,
        "downsample_factor": shape.downsample_factor,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": shape.projector_hidden_size,
        "projector_bias": shape.projector_bias,
        "projector_use_layernorm": shape.projector_use_layernorm,
        "tie_word_embeddings": layout.tied,
        **common,
    }


def _processor(frames: FrameSettings) -> dict[str, Any]:
    """Returns processor_config.json."""
    return {
        "processor_class": "Lfm2VlProcessor",
        "image_processor": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "return_row_col_info": True,
            **frames.model_dump(),
        },
    }


def _their_tensors(model: TowerModel) -> Iterator[tuple[str, Tensor]]:
    for part, prefix in ((model.tower.encoder, ENCODER), (model.tower.connector, CONNECTOR)):
        yield from ((prefix + name, tensor) for name, tensor in part.state_dict().items())
    layout, state = model.backbone.layout, model.backbone.state_dict()
    if not _text_config(layout)[1]:
        yield from ((LANGUAGE_MODEL + name, tensor) for name, tensor in state.items())
        return
    for name, tensor in each_of_transformers(layout, state):
        yield (LANGUAGE_MODEL + name.removeprefix("model.") if name.startswith("model.") else name), tensor


@dataclass(frozen=True)
class VisionFolder:
    """A folder of a model of images and text, without its weights.

    Args:
        folder: of the model.
        shape: of the tower.
        placeholder: id of the token that stands for one embedding of an image.
        tokenizer: with the tokens of images.
        frames: how images are cut.
        context: tokens that the model is meant for.
    """

    folder: Path
    shape: VisionShape
    placeholder: int
    tokenizer: ModelTokenizer
    frames: FrameSettings
    context: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the folder's configuration; no code of it is run.

        Raises:
            InvalidInput: a file is missing or damaged.
            Unsupported: the tower is another one.
        """
        where = str(folder / MODEL)
        if not folder.is_dir() or not has_towers(folder):
            raise InvalidInput(
                "no model of images and text: `nas family vision` writes such a folder", where=str(folder)
            )
        config = read_json(folder / MODEL, _MOST_BYTES)
        shape, frames = _shape_of(config, where), _frames_of(folder)
        if (shape.patch_size, shape.downsample_factor) != (frames.encoder_patch_size, frames.downsample_factor):
            raise InvalidInput("images are cut for another tower", where=str(folder / PROCESSOR))
        tokenizer = read_model_tokenizer(folder / "tokenizer.json")
        if not isinstance(tokenizer, ModelTokenizer):
            raise InvalidInput(f"has no {CONFIG}", where=str(folder))
        ids = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        if missing := [token for token in TOKENS if token not in ids]:
            raise InvalidInput(f"its tokenizer has no token {missing[0]}", where=str(folder))
        placeholder = ids[IMAGE]
        if config.get("image_token_id") != placeholder:
            raise InvalidInput(f"image_token_id is not the tokenizer's {IMAGE}, {placeholder}", where=where)
        context = FoundTokenizer(tokenizer, folder).context
        return cls(folder, shape, placeholder, tokenizer, frames, context)

    def open(self) -> VisionModel:
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
            tower = VisionTower(self.shape, layout.d_model)
        _check(tower.encoder, shards, _encoder_prefix(shards))
        _check(tower.connector, shards, CONNECTOR)
        tower = VisionTower(self.shape, layout.d_model)
        load_encoder(tower, self.folder)
        _load(tower.connector, shards, CONNECTOR)
        # The language model's epsilon is part of its embedding's scale, see `nas.train.adapt.checkpoints`.
        for tensor in tower.connector.linear_2.state_dict().values():
            tensor.mul_(language.factors.get("embed.weight", 1.0))
        model = TowerModel(layout, tower, self.placeholder)
        model.backbone.load_state_dict(state)
        return VisionModel(model, self.tokenizer, self.frames, self.context)


def load_encoder(tower: VisionTower, folder: Path) -> None:
    """Fills a tower's encoder with that of a folder of SigLIP2, or of a model with towers.

    Raises:
        InvalidInput: it is damaged, or of another shape.
    """
    shards = Shards(folder)
    _load(tower.encoder, shards, _encoder_prefix(shards))


def encoder_shape(folder: Path, connector: VisionShape) -> VisionShape:
    """Returns the shape of the encoder in a folder of SigLIP2 or of a model with towers, with another's connector.

    Raises:
        InvalidInput: there is no readable configuration, or the weights do not fit it.
        Unsupported: it is another encoder.
    """
    config = read_json(folder / MODEL, _MOST_BYTES)
    vision = config.get("vision_config", config)
    apart = connector.model_dump(include=VisionShape.model_fields.keys() - connector.encoder().keys())
    shape, shards = _shape_of({**apart, "vision_config": vision}, str(folder / MODEL)), Shards(folder)
    with torch.device("meta"):
        _check(VisionTower(shape, 1).encoder, shards, _encoder_prefix(shards))
    return shape


def _shape_of(config: Mapping[str, Any], where: str) -> VisionShape:
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or vision.get("model_type", _ENCODER_TYPE) not in (_ENCODER_TYPE, "siglip2"):
        raise Unsupported("its encoder is no SigLIP2", where=where)
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION or config.get("projector_hidden_act", "gelu") != "gelu":
        raise Unsupported("its encoder or connector has another activation", where=where)
    if vision.get("num_channels", 3) != 3:
        raise Unsupported("its encoder reads other channels than red, green and blue", where=where)
    values = {**vision, **{name: value for name, value in config.items() if name != "vision_config"}}
    return checked(VisionShape, values, where)


def _frames_of(folder: Path) -> FrameSettings:
    path = folder / PROCESSOR
    settings = read_json(path if path.is_file() else folder / _OLD_PROCESSOR, _MOST_BYTES)
    settings = settings.get("image_processor", settings)
    if not isinstance(settings, dict) or settings.get("resample", 2) != 2:
        raise Unsupported("images are scaled in another way than bilinear", where=str(path))
    if settings.get("rescale_factor", 1 / 255) != 1 / 255 or not settings.get("do_normalize", True):
        raise Unsupported("pixels are scaled in another way", where=str(path))
    return checked(FrameSettings, settings, str(path))


def _encoder_prefix(shards: Shards) -> str:
    """Returns what is in front of the names of an encoder's tensors: files of SigLIP2 have several forms."""
    last = "post_layernorm.weight"
    return next((name.removesuffix(last) for name in shards.names if name.endswith(last)), ENCODER)


def _check(module: torch.nn.Module, shards: Shards, prefix: str) -> None:
    """Checks names and shapes of a module's tensors, which are stored with that prefix."""
    names = set(shards.names)
    for name, tensor in module.state_dict().items():
        if (stored := prefix + name) not in names:
            raise InvalidInput(f"lacks {stored}", where=str(shards.path))
        if shards.shape(stored) != tuple(tensor.shape):
            shape = list(shards.shape(stored))
            raise InvalidInput(f"{stored} has shape {shape}, not {list(tensor.shape)}", where=str(shards.path))


def _load(module: torch.nn.Module, shards: Shards, prefix: str) -> None:
    """Fills a module with the tensors of that prefix."""
    _check(module, shards, prefix)
    for name, tensor in module.state_dict().items():
        values = shards.tensor(prefix + name)
        if not values.isfinite().all():
            raise InvalidInput(f"{prefix}{name} holds NaN or infinity", where=str(shards.path))
        tensor.copy_(values)
