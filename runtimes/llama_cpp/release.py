"""A released model's GGUF files, with its tokenizer in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from nas.core.family import MemberFile
from nas.core.plan import PlanFile
from nas.measure.runtimes.base import Release, ReleasePart, ReleaseRequest
from nas.measure.runtimes.checkpoint_file import StateDict
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.binding import FILE_TYPES, quantise_file
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED, Quantisation, supports
from nas.measure.runtimes.llama_cpp.writer import Released, write_gguf

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
    return f"{FOLDER}/{name}-{quantisation.upper()}.gguf"


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

    def write(quantisation: str, path: Path) -> PlanFile:
        released = Released(request.name, request.license, request.vocabulary(), request.context)
        return write_gguf(request.layout, cast(Quantisation, quantisation), state, path, released=released).file

    if quantisation not in FILE_TYPES:
        written = write(quantisation, path)
    else:
        build = LLAMA_CPP.find_build(patched=supports(request.layout).arch == PATCHED)
        with _half(request.folder / _file_name(request.name, "f16"), "f16" in request.quantisations) as (half, exists):
            if not exists:
                write("f16", half)
            written = quantise_file(build, half, quantisation, path, len(os.sched_getaffinity(0)))
    yield MemberFile(path=name, kind="gguf", quantisation=quantisation, sha256=written.sha256, size=written.size)


@contextmanager
def _half(path: Path, is_there: bool) -> Iterator[tuple[Path, bool]]:
    """Yields the path of the float16 file and whether it is written: a temporary path unless it was requested.

    A file of that name that was not asked for may be of other weights.
    """
    if is_there:
        yield path, True
        return
    scratch = path.with_name(f"{path.name}.partial")
    try:
        yield scratch, False
    finally:
        scratch.unlink(missing_ok=True)
