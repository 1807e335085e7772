"""Models that read images as two GGUF files: the language model, and the tower as llama.cpp's mtmd reads it ("mmproj").

    tower.encoder.*      v.*
    tower.connector.*    mm.*

Names and keys are those of llama.cpp's own converter for LFM2-VL. Tensors of one dimension and the positions are in
float32; other tensors in float16, or in float32 in files of that type.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import save_file

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.plan import PlanFile
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.llama_cpp.projector import POSITION_TABLE, describe
from nas.measure.runtimes.llama_cpp.release import write_file
from nas.measure.runtimes.llama_cpp.support import PATCHED, architecture
from nas.measure.runtimes.llama_cpp.writer import Released
from nas.measure.runtimes.writing import replacing
from nas.train.release.options import QUANTISATIONS
from nas.train.towers.images import FrameSettings
from nas.train.towers.model import Tower
from nas.train.towers.release import MultimodalModel, TowerFolder
from nas.train.towers.vision import VISION, VisionShape

PROJECTOR = "mmproj-{}"
"""Name of the tower's file, of that of the language model."""

_NAMES = {
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
"""Modules of a tower, those of a layer without what is in front, and their names in files."""
_LAYER = re.compile(r"encoder\.encoder\.layers\.(\d+)\.(.+)")
_FIXED = {"tile_size": 512, "min_tiles": 2, "max_tiles": 10, "max_pixels_tolerance": 2.0, "use_thumbnail": True}
"""Of the processor: mtmd reads no key of these."""


class GgufPair(NamedTuple):
    """A model's files: language model and tower, and how it processes images."""

    model: PlanFile
    projector: PlanFile
    frames: FrameSettings


def write_gguf_model(folder: Path, quantisation: str, output: Path, projector: Path, name: str) -> GgufPair:
    """Writes a model that reads images as two GGUF files.

    Args:
        folder: of the model.
        quantisation: of the language model.
        output: file of the language model.
        projector: file of the tower.
        name: of the model, which the files have.

    Raises:
        InvalidInput: the folder is no such model, or damaged.
        UnknownName: no such quantisation.
        Unsupported: llama.cpp carries the layout or the tokenizer in no build that reads images.
        InfrastructureFailed: a build is missing, or a file cannot be written.
    """
    if quantisation not in QUANTISATIONS:
        raise UnknownName("quantisation", quantisation, QUANTISATIONS)
    whole = TowerFolder.read(folder, VISION).open()
    layout = whole.model.backbone.layout
    if (arch := architecture(layout)) == PATCHED:
        raise Unsupported(f"llama.cpp reads images in front of its own architectures alone, not of {arch}: {layout}")
    vocabulary = whole.tokenizer.vocabulary(layout.vocab)
    beside = write_projector(whole, projector, name, half=quantisation != "f32")
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights.safetensors"
        save_file(whole.model.backbone.state_dict(), weights)
        with CheckpointFile(weights) as state:
            released = Released(name, None, vocabulary, whole.context)
            written = write_file(layout, quantisation, state, output, released).file
    assert isinstance(whole.processor, FrameSettings)
    return GgufPair(written, beside, whole.processor)


def differences(frames: FrameSettings) -> list[str]:
    """Returns how mtmd processes images in another way than in training; numbers of tokens are options there."""
    if not frames.do_image_splitting:
        return ["large images are cut into tiles"]
    settings = frames.model_dump()
    return [f"{name} is {value:g}, not {settings[name]:g}" for name, value in _FIXED.items() if settings[name] != value]


def write_projector(whole: MultimodalModel, path: Path, name: str, *, half: bool) -> PlanFile:
    """Writes the file of a model's tower.

    Args:
        whole: the model.
        path: of the file.
        name: of the model, which the file has.
        half: whether matrices are float16.

    Raises:
        InvalidInput: a weight is not finite, or too large for float16.
        InfrastructureFailed: the file cannot be written.
    """
    shape, frames = whole.shape, whole.processor
    assert isinstance(shape, VisionShape) and isinstance(frames, FrameSettings)
    with replacing(path) as partial, closing(GGUFWriter(partial, "clip")) as writer:
        writer.add_name(name)
        d_model, eps = whole.model.backbone.layout.d_model, shape.layer_norm_eps
        describe(writer, shape.layout(), d_model, half=half, eps=eps, mean=frames.image_mean, std=frames.image_std)
        for tensor, values in projector_tensors(whole.model.tower, shape.patch_size).items():
            narrow = half and values.ndim > 1 and tensor != POSITION_TABLE
            with np.errstate(over="ignore"):
                stored = values.astype(np.float16) if narrow else values
            if not np.isfinite(stored).all():
                raise InvalidInput(f"{tensor} holds values that float{16 if narrow else 32} does not")
            writer.add_tensor(tensor, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return PlanFile(sha256=sha256_of(path), size=path.stat().st_size)


def projector_tensors(tower: Tower, patch: int) -> dict[str, NDArray[np.float32]]:
    """Returns a tower's tensors under their names in a file; the patch's map is a convolution, [F, 3, patch, patch]."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tower.state_dict().items():
        module, _, kind = name.rpartition(".")
        layer = _LAYER.fullmatch(module)
        stored = _NAMES[layer[2]].format(layer[1]) if layer else _NAMES[module]
        values = tensor.detach().cpu().numpy()
        if name == "encoder.embeddings.patch_embedding.weight":
            values = np.ascontiguousarray(values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2))
        tensors[f"{stored}.{kind}"] = values
    for stored in ("mm.1", "mm.2"):  # mtmd reads no connector without biases
        tensors.setdefault(f"{stored}.bias", np.zeros(len(tensors[f"{stored}.weight"]), np.float32))
    return tensors
