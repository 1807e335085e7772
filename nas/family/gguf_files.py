"""A member's GGUF files, with its tokeniser in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.family.file_options import FileOptions
from nas.family.tokenizer import MemberTokenizer
from nas.runtimes.checkpoint_file import StateDict
from nas.runtimes.llama_cpp.builds import find_build
from nas.runtimes.llama_cpp.quantise import FILE_TYPES, quantise_file
from nas.runtimes.llama_cpp.support import PATCHED, Quantisation, supports
from nas.runtimes.llama_cpp.writer import write_gguf

FOLDER = "gguf"


def file_name(name: str, quantisation: str) -> str:
    """Path below the member's folder."""
    return f"{FOLDER}/{name}-{quantisation.upper()}.gguf"


def write_gguf_file(
    folder: Path,
    name: str,
    quantisation: str,
    layout: Layout,
    state: StateDict,
    tokenizer: MemberTokenizer,
    options: FileOptions,
) -> MemberFile:
    """Writes one file; llama.cpp's own quantiser makes those types that our writer has not, from float16.

    Where `options` ask for float16 as well, that file has to be written first.

    Raises:
        Unsupported: neither build of llama.cpp carries the layout.
        InvalidInput: the checkpoint's values are not finite.
        InfrastructureFailed: a build is missing, or the file cannot be written.
        CandidateFailed: llama.cpp's quantiser refuses the file.
    """
    path = folder / file_name(name, quantisation)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(quantisation: str, path: Path) -> PlanFile:
        known = cast(Quantisation, quantisation)
        vocabulary = tokenizer.vocabulary()
        return write_gguf(layout, known, state, path, vocabulary=vocabulary, context=options.context).file

    if quantisation not in FILE_TYPES:
        written = write(quantisation, path)
    else:
        build = find_build(patched=supports(layout).arch == PATCHED)
        with _half(folder / file_name(name, "f16"), "f16" in options.gguf) as (half, is_there):
            if not is_there:
                write("f16", half)
            written = quantise_file(build, half, quantisation, path, os.cpu_count() or 1)
    return MemberFile(
        path=file_name(name, quantisation),
        kind="gguf",
        quantisation=quantisation,
        sha256=written.sha256,
        size=written.size,
    )


@contextmanager
def _half(wanted: Path, is_there: bool) -> Iterator[tuple[Path, bool]]:
    """The float16 file, if it is one of those asked for, else a place for one that does not last.

    A file of that name that was not asked for may be of other weights.
    """
    if is_there:
        yield wanted, True
        return
    scratch = wanted.with_name(f"{wanted.name}.partial")
    try:
        yield scratch, False
    finally:
        scratch.unlink(missing_ok=True)
