"""The second file of a model that reads images or sound, encoder and connector as llama.cpp's mtmd reads it ("mmproj").

Keys, names and types are those of llama.cpp's own converter, for LFM2-VL and for LFM2-Audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf import GGUFType, GGUFWriter, LlamaFileType, VisionProjectorType

from nas.core.tower import POSITIONS, Tower
from nas.measure.runtimes.llama_cpp.random_weights import random_recipe
from nas.measure.runtimes.llama_cpp.tensors import Tensor, Type
from nas.measure.runtimes.llama_cpp.writer import QUANTISATION_VERSION, header_bytes
from nas.measure.runtimes.writing import Written, replacing, write_drawn

POSITION_TABLE = "v.position_embd.weight"
_FULL = re.compile(r"position_embd|conv")
_IMAGE_SIZE = 256
"""Which the converter writes for want of one: frames have any size."""
_NORM_EPS, _SOUND_EPS = 1e-6, 1e-5
_MEAN = _STD = (0.5, 0.5, 0.5)


def describe(
    writer: GGUFWriter,
    tower: Tower,
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


def describe_sound(
    writer: GGUFWriter, d_model: int, *, width: int, layers: int, heads: int, ffn: int, bands: int, half: bool
) -> None:
    """Adds the keys of a tower of sound.

    Args:
        writer: of the file, opened for the architecture "clip".
        d_model: width of the language model.
        width: of the encoder.
        layers: of the encoder.
        heads: of its attention.
        ffn: width of its feed-forwards.
        bands: of the features.
        half: whether matrices are float16.
    """
    _describe_file(writer, half=half)
    writer.add_clip_has_audio_encoder(True)
    writer.add_clip_projector_type(VisionProjectorType.LFM2A)
    writer.add_audio_projection_dim(d_model)
    writer.add_audio_embedding_length(width)
    writer.add_audio_feed_forward_length(ffn)
    writer.add_audio_block_count(layers)
    writer.add_audio_head_count(heads)
    writer.add_audio_num_mel_bins(bands)
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
    stored = [
        (tensor, Type.F16 if half and is_matrix(tensor.name, tensor.shape) else Type.F32)
        for tensor in tower_tensors(tower, d_model)
    ]
    with replacing(path) as partial:
        writer = GGUFWriter(partial, "clip")
        describe(writer, tower, d_model, half=half)
        return write_drawn(random_recipe(header_bytes(writer, partial, stored), stored, seed), partial, recipe=recipe)


def tower_tensors(tower: Tower, d_model: int) -> Iterator[Tensor]:
    """Yields the tensors of a tower's file, in order."""
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
