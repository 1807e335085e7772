"""A released model's GGUF files, with its tokenizer in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.quantisation import file_word
from nas.measure.runtimes.base import Release, ReleasePart, ReleaseRequest, StateDict, Weights
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.binding import FILE_TYPES, quantise_file
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED, supports
from nas.measure.runtimes.llama_cpp.writer import Released, write_gguf
from nas.measure.runtimes.writing import Written

FOLDER = "gguf"


def release(writer_version: str, request: ReleaseRequest) -> Release:
    """Returns one GGUF file for each requested quantisation."""
    support = supports(request.layout)
    if support.arch is None:
        return Release(f"none: {'; '.join(support.reasons)}")
    patched = support.verdict == "patched"
    inputs = [[writer_version, source.SHA256, patch_hashes() if patched else None], request.license]
    # The float16 file comes first: llama.cpp's quantiser reads it.
    quantisations = sorted(request.quantisations, key=lambda name: name != "f16")
    parts = tuple(
        ReleasePart(
            name.upper(), [*inputs, name, _file_name(request.name, name)], partial(_write, request, name), optional=True
        )
        for name in quantisations
    )
    loads = f"{support.arch} (patched build): {'; '.join(support.reasons)}" if patched else support.arch
    return Release(loads, parts)


def _file_name(name: str, quantisation: str) -> str:
    """Returns the path below the model's folder."""
    return f"{FOLDER}/{name}-{file_word(quantisation).upper()}.gguf"


def _write(request: ReleaseRequest, quantisation: str, state: StateDict) -> Iterator[MemberFile]:
    """Writes one file; llama.cpp's own quantiser makes those types that our writer has not, from float16.

    Raises:
        Unsupported: llama.cpp cannot hold the tokenizer.
        InvalidInput: the checkpoint's values are not finite.
        InfrastructureFailed: a build is missing, or the file cannot be written.
        CandidateFailed: llama.cpp's quantiser refuses the file.
    """
    name = _file_name(request.name, quantisation)
    path = request.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)

    released = Released(request.name, request.license, request.vocabulary(), request.context)
    half = request.folder / _file_name(request.name, "f16")
    written = write_file(
        request.layout, quantisation, state, path, released, half if "f16" in request.quantisations else None
    ).file
    yield MemberFile(path=name, kind="gguf", quantisation=quantisation, sha256=written.sha256, size=written.size)


def write_file(
    layout: Layout,
    quantisation: str,
    weights: Weights | StateDict,
    destination: Path,
    released: Released | None,
    half: Path | None = None,
) -> Written:
    """Writes one GGUF file; llama.cpp's own quantiser makes those types that our writer has not, from float16.

    Args:
        layout: of the model.
        quantisation: of the file.
        weights: of the model.
        destination: of the file.
        released: what the file has for others; None: token ids only.
        half: a float16 file of the same weights, if it is there; None: one is made for the time being.
    """
    if quantisation not in FILE_TYPES:
        return write_gguf(layout, quantisation, weights, destination, released=released)
    build = LLAMA_CPP.find_build(patched=supports(layout).arch == PATCHED)
    threads = len(os.sched_getaffinity(0))
    if half is not None and half.is_file():
        return Written(quantise_file(build, half, quantisation, destination, threads))
    scratch = destination.with_name(f"{destination.name}-f16.partial")
    try:
        write_gguf(layout, "f16", weights, scratch, released=released)
        return Written(quantise_file(build, scratch, quantisation, destination, threads))
    finally:
        scratch.unlink(missing_ok=True)
