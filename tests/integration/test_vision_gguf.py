"""GGUF files of models that read images: llama.cpp's converter writes the same ones, and mtmd computes the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from upstream_converter import convert, unpack_converter
from vision_lab import FRAMES, SHAPE, question, write_image, write_model

from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import find_compiler
from nas.train.towers.gguf import write_gguf_model

PATCH = {"patch_size": 16, "num_hidden_layers": 3}
"""The converter knows no other patches, and no model of fewer layers than the connector has numbers."""
OF_FOLDERS = {"general.name", "general.size_label", "general.basename", "general.quantization_version"}


ENCODE = """
import ctypes
import sys
import numpy as np
import llama_cpp
from llama_cpp import mtmd_cpp as mtmd

model, projector, least, most, width, output, *pictures = sys.argv[1:]
text_model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
settings = mtmd.mtmd_context_params_default()
settings.use_gpu, settings.warmup, settings.n_threads = False, False, 2
settings.image_min_tokens, settings.image_max_tokens = int(least), int(most)
context = mtmd.mtmd_init_from_file(projector.encode(), text_model, settings)
text = mtmd.mtmd_default_marker() + b"What?"
results = {}
for number, picture in enumerate(pictures):
    pixels = np.load(picture)
    flat = np.ascontiguousarray(pixels).ravel()
    data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], data)
    chunks = mtmd.mtmd_input_chunks_init()
    request = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(request), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1) == 0
    tokens, rows = [], []
    for place in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, place)
        count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            size = ctypes.c_size_t()
            tokens += list(mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))[:count])
        else:
            assert mtmd.mtmd_encode_chunk(context, chunk) == 0
            embeddings = mtmd.mtmd_get_output_embd(context)[: count * int(width)]
            rows.append(np.array(embeddings, np.float32).reshape(count, -1))
            tokens += [-1] * count
    results[f"tokens{number}"], results[f"rows{number}"] = np.array(tokens), np.concatenate(rows)
np.savez(output, **results)
"""
SOURCES = ("clip", "mtmd", "mtmd-audio", "mtmd-image", "models/*")
SIZES = {"exact": (96, 64), "larger": (300, 200)}
"""Of a narrow picture, such as 40 x 400, mtmd makes another number of tokens; docs/how-to/vision.md says so."""


def build_mtmd(tree: Path, libraries: Path, folder: Path) -> Path:
    """Compiles libmtmd.so against the libraries of a build, in minutes; what reads files and video is left out."""
    folder.mkdir()
    for library in libraries.glob("*.so"):
        (folder / library.name).symlink_to(library)
    (package,) = importlib.util.find_spec("llama_cpp").submodule_search_locations
    helpers = dict.fromkeys(re.findall(r'"(mtmd_helper_\w+)"', (Path(package) / "mtmd_cpp.py").read_text()))
    (folder / "helpers.cpp").write_text("".join(f'extern "C" void {name}() {{}}\n' for name in helpers))
    sources = [path for part in SOURCES for path in sorted((tree / "tools/mtmd").glob(f"{part}.cpp"))]
    sources.append(folder / "helpers.cpp")
    flags = ["-std=c++17", "-O1", "-fPIC", "-w", "-DLLAMA_SHARED", "-DLLAMA_BUILD", "-DGGML_SHARED"]
    parts = ("include", "ggml/include", "tools/mtmd", "vendor")
    flags += ["-DGGML_BACKEND_SHARED", *(f"-I{tree / part}" for part in parts)]
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    for unit, target in zip(sources, objects, strict=True):
        subprocess.run([find_compiler().cxx, *flags, "-c", unit, "-o", target], check=True, timeout=300)
    links = ["-lllama", "-lggml", "-lggml-cpu", "-lggml-base", "-lpthread", "-Wl,-rpath,$ORIGIN"]
    argv = [find_compiler().cxx, "-shared", "-o", folder / "libmtmd.so", *objects, f"-L{folder}", *links]
    subprocess.run(argv, check=True, timeout=300)
    return folder


@pytest.mark.exhaustive
def test_mtmd_computes_the_same_embeddings(tmp_path: Path, llama_build: Build) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 16, "tile_size": 512, "max_image_tokens": 32})
    whole = write_model(tmp_path / "model", shape=SHAPE.model_copy(update=PATCH), frames=frames)
    files = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    write_gguf_model(tmp_path / "model", VISION, "f32", *files, "seeing")
    mtmd = build_mtmd(source.unpack(source.fetch(print), tmp_path / "source"), llama_build.folder, tmp_path / "mtmd")
    pictures = []
    for name, (width, height) in SIZES.items():
        write_image(tmp_path / f"{name}.png", width, height)
        np.save(tmp_path / f"{name}.npy", np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")))
        pictures.append(tmp_path / f"{name}.npy")
    limits = (frames.min_image_tokens, frames.max_image_tokens, whole.model.backbone.layout.d_model)
    argv = [sys.executable, "-c", ENCODE, *files, *map(str, limits), tmp_path / "rows.npz", *pictures]
    variables = {name: str(mtmd) for name in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LD_LIBRARY_PATH")}
    subprocess.run(argv, env=os.environ | variables, check=True, timeout=300)
    theirs = np.load(tmp_path / "rows.npz")
    for number, name in enumerate(SIZES):
        ids, inputs = question(whole, [tmp_path / f"{name}.png"], "<image>What?")
        rows = whole.model.tower(*inputs).numpy()
        tokens = [-1 if token == whole.model.placeholder else token for token in ids]
        assert theirs[f"tokens{number}"].tolist() == tokens, name
        np.testing.assert_allclose(theirs[f"rows{number}"], rows, atol=1e-3, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_files_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    frames = FRAMES.model_copy(update={"encoder_patch_size": 16, "tile_size": 512})
    write_model(tmp_path / "model", shape=SHAPE.model_copy(update=PATCH), frames=frames)
    ours, theirs = (tmp_path / f"{name}.gguf" for name in ("ours", "theirs"))
    write_gguf_model(tmp_path / "model", VISION, kind, ours, tmp_path / "mmproj-ours.gguf", "seeing")
    _as_published(tmp_path / "model")
    converter = unpack_converter(tmp_path / "converter")
    convert(converter, tmp_path / "model", theirs, kind, pre="qwen2")
    convert(converter, tmp_path / "model", tmp_path / "mmproj-theirs.gguf", kind, mmproj=True)
    for name in ("{}.gguf", "mmproj-{}.gguf"):
        mine, other = (GgufFile.read(tmp_path / name.format(one)) for one in ("ours", "theirs"))
        assert mine.tensors.keys() == other.tensors.keys()
        for tensor, stored in other.tensors.items():
            assert (stored.kind, stored.shape) == (mine.tensors[tensor].kind, mine.tensors[tensor].shape), tensor
            np.testing.assert_array_equal(mine.values(tensor), other.values(tensor), err_msg=tensor)
        if name.startswith("mmproj"):
            assert mine.fields.keys() ^ other.fields.keys() <= OF_FOLDERS
            for key in mine.fields.keys() & other.fields.keys() - OF_FOLDERS:
                assert mine.fields[key] == other.fields[key], key


def _as_published(folder: Path) -> None:
    """Renames the encoder's tensors to the names of published models, which the converter knows."""
    weights = folder / "model.safetensors"
    prefix = "model.vision_tower."
    tensors = {name.replace(prefix, f"{prefix}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Lfm2VlForConditionalGeneration"]
