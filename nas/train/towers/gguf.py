"""Models that read images or sound as two GGUF files: the language model, and the tower as llama.cpp's mtmd reads it.

    tower.encoder.*      v.*, a.*
    tower.connector.*    mm.*

Names, keys and types of the second file, "mmproj", are those of llama.cpp's own converter for LFM2-VL and LFM2-Audio.
mtmd has sizes of LFM2-Audio's encoder built in. Others are written where changed weights make it compute them, and
refused where none do (`sound_problem`).
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import save_file

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.plan import PlanFile
from nas.core.tower import KERNEL, SUBSAMPLING, WAVES
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.llama_cpp.projector import SOUND_ROWS, describe, describe_sound, is_matrix
from nas.measure.runtimes.llama_cpp.release import write_file
from nas.measure.runtimes.llama_cpp.support import PATCHED, architecture
from nas.measure.runtimes.llama_cpp.writer import Released
from nas.measure.runtimes.writing import replacing
from nas.train.release.options import QUANTISATIONS
from nas.train.towers.modality import Modality
from nas.train.towers.model import Tower
from nas.train.towers.release import MultimodalModel, TowerFolder

if TYPE_CHECKING:  # packages of either are an extra
    from nas.train.towers.audio import AudioShape
    from nas.train.towers.images import FrameSettings
    from nas.train.towers.vision import VisionShape

PROJECTOR = "mmproj-{}"
"""Name of the tower's file, of that of the language model."""

_OF_IMAGES = {
    "encoder.embeddings.patch_embedding": "v.patch_embd",
    "encoder.embeddings.position_embedding": "v.position_embd",
    "layer_norm1": "v.blk.{}.ln1",
    "self_attn.q_proj": "v.blk.{}.attn_q",
    "self_attn.k_proj": "v.blk.{}.attn_k",
    "self_attn.v_proj": "v.blk.{}.attn_v",
    "self_attn.out_proj": "v.blk.{}.attn_out",
    "layer_norm2": "v.blk.{}.ln2",
    "mlp.fc1": "v.blk.{}.ffn_up",
    "mlp.fc2": "v.blk.{}.ffn_down",
    "encoder.post_layernorm": "v.post_ln",
    "connector.layer_norm": "mm.input_norm",
    "connector.linear_1": "mm.1",
    "connector.linear_2": "mm.2",
}
"""Modules of a tower of images, those of a layer without what is in front, and their names in files."""
_OF_SOUND = {
    **{f"encoder.subsampling.layers.{layer}": f"a.conv1d.{layer}" for layer in (0, 2, 3, 5, 6)},
    "encoder.subsampling.linear": "a.pre_encode.out",
    "norm_feed_forward1": "a.blk.{}.ffn_norm",
    "feed_forward1.linear1": "a.blk.{}.ffn_up",
    "feed_forward1.linear2": "a.blk.{}.ffn_down",
    "norm_self_att": "a.blk.{}.ln1",
    "self_attn": "a.blk.{}.pos",
    "self_attn.q_proj": "a.blk.{}.attn_q",
    "self_attn.k_proj": "a.blk.{}.attn_k",
    "self_attn.v_proj": "a.blk.{}.attn_v",
    "self_attn.o_proj": "a.blk.{}.attn_out",
    "self_attn.relative_k_proj": "a.blk.{}.linear_pos",
    "norm_conv": "a.blk.{}.norm_conv",
    "conv.pointwise_conv1": "a.blk.{}.conv_pw1",
    "conv.depthwise_conv": "a.blk.{}.conv_dw",
    "conv.norm": "a.blk.{}.conv_norm",
    "conv.pointwise_conv2": "a.blk.{}.conv_pw2",
    "norm_feed_forward2": "a.blk.{}.ffn_norm_1",
    "feed_forward2.linear1": "a.blk.{}.ffn_up_1",
    "feed_forward2.linear2": "a.blk.{}.ffn_down_1",
    "norm_out": "a.blk.{}.ln2",
    "connector.layer_norm": "mm.a.mlp.0",
    "connector.linear_1": "mm.a.mlp.1",
    "connector.linear_2": "mm.a.mlp.3",
}
"""The same of a tower of sound."""
_LAYER = re.compile(r"encoder\.(?:encoder\.)?layers\.(\d+)\.(.+)")
_FIXED = {"tile_size": 512, "min_tiles": 2, "max_tiles": 10, "max_pixels_tolerance": 2.0, "use_thumbnail": True}
"""Of the processor of images: mtmd reads no key of these."""
_BATCH_NORM_EPS = 1e-5

Values = NDArray[np.float32] | NDArray[np.int8]


class GgufPair(NamedTuple):
    """A model's files: language model and tower; and the model."""

    model: PlanFile
    projector: PlanFile
    whole: MultimodalModel


def write_gguf_model(
    folder: Path, modality: Modality, quantisation: str, output: Path, projector: Path, name: str
) -> GgufPair:
    """Writes a model that reads images or sound as two GGUF files; a head that speaks and its codec are left out.

    Args:
        folder: of the model.
        modality: of its tower.
        quantisation: of the language model.
        output: file of the language model.
        projector: file of the tower.
        name: of the model, which the files have.

    Raises:
        InvalidInput: the folder is no such model, or damaged.
        UnknownName: no such quantisation.
        Unsupported: llama.cpp carries the layout, the tokenizer or the tower in no build that reads such files.
        InfrastructureFailed: a build is missing, or a file cannot be written.
    """
    if quantisation not in QUANTISATIONS:
        raise UnknownName("quantisation", quantisation, QUANTISATIONS)
    whole = TowerFolder.read(folder, modality).open()
    layout = whole.model.backbone.layout
    if (arch := architecture(layout)) == PATCHED:
        raise Unsupported(
            f"llama.cpp reads {modality.noun}s in front of its own architectures alone, not of {arch}: {layout}"
        )
    vocabulary = whole.tokenizer.vocabulary(layout.vocab)
    beside = write_projector(whole, projector, name, half=quantisation != "f32")
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights.safetensors"
        save_file(whole.model.backbone.state_dict(), weights)
        with CheckpointFile(weights) as state:
            released = Released(name, None, vocabulary, whole.context)
            written = write_file(layout, quantisation, state, output, released).file
    return GgufPair(written, beside, whole)


def differences(whole: MultimodalModel) -> list[str]:
    """Returns what llama.cpp does in another way than hilnas; numbers of an image's tokens are options there."""
    if whole.modality.name != "vision":
        return [] if whole.model.head is None else ["answers are text alone: it has no head that speaks"]
    frames = cast("FrameSettings", whole.processor)
    if not frames.do_image_splitting:
        return ["large images are cut into tiles, which they were not in training"]
    settings = frames.model_dump()
    return [
        f"{name} of images is {value:g}, not {settings[name]:g} as in training"
        for name, value in _FIXED.items()
        if settings[name] != value
    ]


def question(whole: MultimodalModel, model: Path, projector: Path) -> list[str]:
    """Returns the command with which llama.cpp's own program answers a question."""
    kind = whole.modality.kind
    command = ["llama-mtmd-cli", "-m", str(model), "--mmproj", str(projector), f"--{kind}", kind.upper()]
    command += ["-p", "QUESTION"]
    if whole.modality.name == "vision":
        frames = cast("FrameSettings", whole.processor)
        for name, tokens in (("min", frames.min_image_tokens), ("max", frames.max_image_tokens)):
            command += [f"--image-{name}-tokens", str(tokens)]
    return command


def write_projector(whole: MultimodalModel, path: Path, name: str, *, half: bool) -> PlanFile:
    """Writes the file of a model's tower.

    Args:
        whole: the model.
        path: of the file.
        name: of the model, which the file has.
        half: whether matrices are float16.

    Raises:
        InvalidInput: a weight is not finite, or too large for float16.
        Unsupported: mtmd computes another tower of sound.
        InfrastructureFailed: the file cannot be written.
    """
    prepared = {"vision": _images, "audio": _sound}[whole.modality.name]
    with replacing(path) as partial, closing(GGUFWriter(partial, "clip")) as writer:
        writer.add_name(name)
        for tensor, values in prepared(whole, writer, half=half).items():
            narrow = half and is_matrix(tensor, values.shape)
            with np.errstate(over="ignore"):
                stored = values.astype(np.float16) if narrow else values
            if not np.isfinite(stored).all():
                raise InvalidInput(f"{tensor} holds values that float{16 if narrow else 32} does not")
            writer.add_tensor(tensor, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return PlanFile(sha256=sha256_of(path), size=path.stat().st_size)


def _images(whole: MultimodalModel, writer: GGUFWriter, *, half: bool) -> Mapping[str, Values]:
    """Adds the keys of a tower of images, and returns its tensors."""
    shape, frames = cast("VisionShape", whole.shape), cast("FrameSettings", whole.processor)
    d_model, eps = whole.model.backbone.layout.d_model, shape.layer_norm_eps
    describe(writer, shape.layout(), d_model, half=half, eps=eps, mean=frames.image_mean, std=frames.image_std)
    return image_tensors(whole.model.tower, shape.patch_size)


def _sound(whole: MultimodalModel, writer: GGUFWriter, *, half: bool) -> Mapping[str, Values]:
    """The same of sound."""
    shape = cast("AudioShape", whole.shape)
    if problem := sound_problem(shape):
        raise Unsupported(f"llama.cpp computes no such encoder of sound: {problem}")
    describe_sound(writer, shape.layout(), whole.model.backbone.layout.d_model, half=half)
    return sound_tensors(whole.model.tower, shape)


def sound_problem(shape: AudioShape) -> str | None:
    """Returns why mtmd cannot compute a tower of sound."""
    if WAVES % shape.hidden_size:
        return f"hidden_size is {shape.hidden_size}; its positions are those of {WAVES} or a divisor of it"
    for name, value in (("conv_kernel_size", KERNEL), ("subsampling_factor", SUBSAMPLING)):
        if (size := getattr(shape, name)) != value:
            return f"{name} is {size}, and it has {value}"
    return None if shape.projector_use_layernorm else "its connector has a LayerNorm, and the model's has none"


def image_tensors(tower: Tower, patch: int) -> dict[str, NDArray[np.float32]]:
    """Returns a tower's tensors under their names in a file; the patch's map is a convolution, [F, 3, patch, patch]."""
    tensors = _named(tower, _OF_IMAGES)
    patches = tensors["v.patch_embd.weight"].reshape(-1, patch, patch, 3)
    tensors["v.patch_embd.weight"] = np.ascontiguousarray(patches.transpose(0, 3, 1, 2))
    for stored in ("mm.1", "mm.2"):  # mtmd reads no connector without biases
        tensors.setdefault(f"{stored}.bias", np.zeros(len(tensors[f"{stored}.weight"]), np.float32))
    return tensors


def sound_tensors(tower: Tower, shape: AudioShape) -> dict[str, Values]:
    """The same of a tower of sound.

    mtmd has no factor behind the subsampling, no BatchNorm but its factors and summands, and a bias everywhere; of its
    positions, sines and cosines of 256 frequencies, a narrower encoder has each second, fourth ... one. The table of
    positions, in LFM2-Audio that of the codes' embeddings, only tells the width of the language model and limits the
    length of sounds.
    """
    tensors = _named(tower, _OF_SOUND)
    for kind in ("weight", "bias"):
        tensors[f"a.pre_encode.out.{kind}"] = tensors[f"a.pre_encode.out.{kind}"] * np.float32(
            math.sqrt(shape.hidden_size) if shape.scale_input else 1
        )
    for name in [name for name in tensors if name.startswith("a.conv1d.") and name.endswith(".bias")]:
        tensors[name] = tensors[name][:, None, None]
    for layer in range(shape.num_hidden_layers):
        block = f"a.blk.{layer}"
        for name in ("pos_bias_u", "pos_bias_v"):
            tensors[f"{block}.{name}"] = tensors.pop(f"{block}.{name.replace('pos_', 'pos.')}")
        for name in ("conv_pw1", "conv_dw", "conv_pw2"):
            weight = tensors[f"{block}.{name}.weight"]
            tensors[f"{block}.{name}.weight"] = weight.reshape(len(weight), -1)
        mean, variance = (tensors.pop(f"{block}.conv_norm.running_{name}") for name in ("mean", "var"))
        factor = tensors[f"{block}.conv_norm.weight"] / np.sqrt(variance + np.float32(_BATCH_NORM_EPS))
        tensors[f"{block}.conv_norm.weight"] = factor
        tensors[f"{block}.conv_norm.bias"] = tensors[f"{block}.conv_norm.bias"] - mean * factor
        waves = np.zeros((shape.hidden_size, WAVES // 2, 2), np.float32)
        positions = tensors[f"{block}.linear_pos.weight"]
        waves[:, :: WAVES // shape.hidden_size] = positions.reshape(len(positions), -1, 2)
        tensors[f"{block}.linear_pos.weight"] = waves.reshape(len(positions), WAVES)
    for name in [name for name in tensors if name.endswith(".weight") and "linear_pos" not in name]:
        tensors.setdefault(f"{name.removesuffix('weight')}bias", np.zeros(len(tensors[name]), np.float32))
    table = np.zeros((SOUND_ROWS, len(tensors["mm.a.mlp.3.bias"])), np.int8)
    return {**tensors, "a.position_embd.weight": table}


def _named(tower: Tower, names: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
    """Returns a tower's tensors, without counts of batches, under their names in a file."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tower.state_dict().items():
        if tensor.ndim:
            module, _, kind = name.rpartition(".")
            layer = _LAYER.fullmatch(module)
            stored = names[layer[2]].format(layer[1]) if layer else names[module]
            tensors[f"{stored}.{kind}"] = tensor.detach().cpu().numpy()
    return tensors
