"""Logits of a GGUF file.

    python -m nas.runtimes.llama_cpp.logits MODEL TOKENS.npy CHUNKS OUT.npy

CHUNKS, such as "24,24,16,1,1", says how the tokens are fed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.runtimes.llama_cpp.binding import Session, run_module
from nas.runtimes.llama_cpp.builds import Build


def evaluate(
    build: Build, model: Path, tokens: Sequence[int], chunks: Sequence[int], scratch: Path
) -> NDArray[np.float32]:
    """Logits [T, V] of every position, fed chunk by chunk with memory kept between them.

    Args:
        build: whose libraries to use.
        model: the GGUF file.
        tokens: T ids.
        chunks: lengths that add up to T.
        scratch: folder for the files that the process reads and writes.

    Raises:
        CandidateFailed: the process died or hung on this model (crash).
    """
    assert sum(chunks) == len(tokens)
    ids, out = scratch / "tokens.npy", scratch / "logits.npy"
    np.save(ids, np.asarray(tokens, np.int32))
    run_module(build, __name__, model, [str(ids), ",".join(map(str, chunks)), str(out)])
    logits: NDArray[np.float32] = np.load(out, allow_pickle=False)
    return logits


def _main(model: str, tokens: str, chunks: str, out: str) -> None:
    ids, lengths = np.load(tokens, allow_pickle=False), [int(length) for length in chunks.split(",")]
    session = Session(model, len(ids), max(lengths))
    np.save(out, np.concatenate([session.feed(chunk.tolist()) for chunk in np.split(ids, np.cumsum(lengths)[:-1])]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
