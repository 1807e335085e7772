"""The second file of a model that reads images or sound, encoder and connector as llama.cpp's mtmd reads it ("mmproj").

Keys, names and types are those of llama.cpp's own converter, for LFM2-VL and for LFM2-Audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf import GGUFType, GGUFWriter, LlamaFileType, VisionProjectorType

from nas.core.tower import KERNEL, POSITIONS, SUBSAMPLING, WAVES, ImageTower, SoundTower, Tower
from nas.measure.runtimes.llama_cpp.random_weights import random_recipe
from nas.measure.runtimes.llama_cpp.tensors import Tensor, Type
from nas.measure.runtimes.llama_cpp.writer import QUANTISATION_VERSION, header_bytes
from nas.measure.runtimes.writing import Written, replacing, write_drawn

POSITION_TABLE = "v.position_embd.weight"
_FULL = re.compile(r"position_embd|conv")
SOUND_TABLE = "a.position_embd.weight"
SOUND_ROWS = 6000
"""Positions of the longest sound that hilnas reads, half as many as features: mtmd reads no values of the table."""
_IMAGE_SIZE = 256
"""Which the converter writes for want of one: frames have any size."""
_NORM_EPS, _SOUND_EPS = 1e-6, 1e-5
_MEAN = _STD = (0.5, 0.5, 0.5)


def describe(
    writer: GGUFWriter,
    tower: ImageTower,
    d_model: int,
    *,
    half: bool,
    eps: float = _NORM_EPS,
    mean: tuple[float, ...] = _MEAN,
    std: tuple[float, ...] = _STD,
) -> None:
    """Adds the keys of a tower of images; a file limits no image's tokens.

    Args:
        writer: of the file, opened for the architecture "clip".
        tower: in the file.
        d_model: width of the language model.
        half: whether matrices are float16.
        eps: of the encoder's norms.
        mean: of pixels, for each colour.
        std: likewise.
    """
    _describe_file(writer, half=half)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(VisionProjectorType.LFM2)
    writer.add_vision_projection_dim(d_model)
    writer.add_vision_image_size(_IMAGE_SIZE)
    writer.add_vision_patch_size(tower.patch)
    writer.add_vision_embedding_length(tower.width)
    writer.add_vision_feed_forward_length(tower.ffn)
    writer.add_vision_block_count(tower.layers)
    writer.add_vision_head_count(tower.heads)
    writer.add_vision_attention_layernorm_eps(eps)
    writer.add_vision_projector_scale_factor(tower.factor)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_mean(list(mean))
    writer.add_vision_image_std(list(std))


def describe_sound(writer: GGUFWriter, tower: SoundTower, d_model: int, *, half: bool) -> None:
    """Adds the keys of a tower of sound, see `describe`."""
    _describe_file(writer, half=half)
    writer.add_clip_has_audio_encoder(True)
    writer.add_clip_projector_type(VisionProjectorType.LFM2A)
    writer.add_audio_projection_dim(d_model)
    writer.add_audio_embedding_length(tower.width)
    writer.add_audio_feed_forward_length(tower.ffn)
    writer.add_audio_block_count(tower.layers)
    writer.add_audio_head_count(tower.heads)
    writer.add_audio_num_mel_bins(tower.bands)
    writer.add_audio_attention_layernorm_eps(_SOUND_EPS)


def _describe_file(writer: GGUFWriter, *, half: bool) -> None:
    writer.add_type(GGUFType.MMPROJ)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if half else LlamaFileType.ALL_F32)
    writer.add_quantization_version(QUANTISATION_VERSION)


def is_matrix(tensor: str, shape: Sequence[int]) -> bool:
    """Returns whether a tensor is float16 in a file of half precision; others are float32 in every file."""
    return len(shape) > 1 and tensor.endswith(".weight") and not _FULL.search(tensor)


def write_random_projector(
    tower: Tower, d_model: int, seed: int, path: Path, *, half: bool = True, recipe: bool = False
) -> Written:
    """Writes a tower with random weights for a language model of width `d_model`, or its recipe.

    Raises:
        InfrastructureFailed: the file cannot be written.
    """
    stored = [(tensor, _type_of(tensor, half=half)) for tensor in tower_tensors(tower, d_model)]
    with replacing(path) as partial:
        writer = GGUFWriter(partial, "clip")
        if isinstance(tower, ImageTower):
            describe(writer, tower, d_model, half=half)
        elif isinstance(tower, SoundTower):
            describe_sound(writer, tower, d_model, half=half)
        return write_drawn(random_recipe(header_bytes(writer, partial, stored), stored, seed), partial, recipe=recipe)


def _type_of(tensor: Tensor, *, half: bool) -> Type:
    if tensor.name == SOUND_TABLE:
        return Type.Q4_0
    return Type.F16 if half and is_matrix(tensor.name, tensor.shape) else Type.F32


def tower_tensors(tower: Tower, d_model: int) -> Iterator[Tensor]:
    """Yields the tensors of a tower's file, in order."""
    if isinstance(tower, ImageTower):
        yield from _image_tensors(tower, d_model)
    elif isinstance(tower, SoundTower):
        yield from _sound_tensors(tower, d_model)


def _sound_tensors(tower: SoundTower, d_model: int) -> Iterator[Tensor]:
    width, channels = tower.width, tower.channels
    for layer, inputs, kernel in ((0, 1, 3), (2, 1, 3), (3, channels, 1), (5, 1, 3), (6, channels, 1)):
        yield Tensor(f"a.conv1d.{layer}.weight", (channels, inputs, kernel, kernel))
        yield Tensor(f"a.conv1d.{layer}.bias", (channels, 1, 1), "bias")
    yield from _mapped("a.pre_encode.out", width, channels * tower.bands // SUBSAMPLING)
    for layer in range(tower.layers):
        block = f"a.blk.{layer}"
        for norm in ("ffn_norm", "ln1", "norm_conv", "conv_norm", "ffn_norm_1", "ln2"):
            yield from _norm(f"{block}.{norm}", width)
        for which in ("", "_1"):
            yield from _mapped(f"{block}.ffn_up{which}", tower.ffn, width)
            yield from _mapped(f"{block}.ffn_down{which}", width, tower.ffn)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from _mapped(f"{block}.{name}", width, width)
        yield Tensor(f"{block}.linear_pos.weight", (width, WAVES))
        for name in ("pos_bias_u", "pos_bias_v"):
            yield Tensor(f"{block}.{name}", (tower.heads, width // tower.heads), "bias")
        yield from _mapped(f"{block}.conv_pw1", 2 * width, width)
        yield from _mapped(f"{block}.conv_dw", width, KERNEL)
        yield from _mapped(f"{block}.conv_pw2", width, width)
    yield from _norm("mm.a.mlp.0", width)
    yield from _mapped("mm.a.mlp.1", tower.connector, width)
    yield from _mapped("mm.a.mlp.3", d_model, tower.connector)
    yield Tensor(SOUND_TABLE, (SOUND_ROWS, d_model))


def _image_tensors(tower: ImageTower, d_model: int) -> Iterator[Tensor]:
    width = tower.width
    yield from _mapped("v.patch_embd", width, 3, tower.patch, tower.patch)
    yield Tensor(POSITION_TABLE, (POSITIONS, width))
    for layer in range(tower.layers):
        block = f"v.blk.{layer}"
        yield from _norm(f"{block}.ln1", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from _mapped(f"{block}.{name}", width, width)
        yield from _norm(f"{block}.ln2", width)
        yield from _mapped(f"{block}.ffn_up", tower.ffn, width)
        yield from _mapped(f"{block}.ffn_down", width, tower.ffn)
    yield from _norm("v.post_ln", width)
    inputs = width * tower.factor**2
    yield from _norm("mm.input_norm", inputs)
    yield from _mapped("mm.1", tower.connector, inputs)
    yield from _mapped("mm.2", d_model, tower.connector)


def _mapped(name: str, *shape: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", shape)
    yield Tensor(f"{name}.bias", shape[:1], "bias")


def _norm(name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm")
    yield Tensor(f"{name}.bias", (width,), "bias")
