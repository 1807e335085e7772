"""Logits of a GGUF file, and the experts that it chose.

    python -m nas.runtimes.llama_cpp.logits MODEL TOKENS.npy CHUNKS WATCH OUT.npz

CHUNKS, such as "24,24,16,1,1", says how the tokens are fed; WATCH is 1 or 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.runtimes.llama_cpp.binding import Session, library_folder, run_module
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.experts import Choices, ExpertWatch


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What llama.cpp computed.

    Args:
        logits: [T, V].
        experts: which ones it chose, by depth; empty where none were watched.
    """

    logits: NDArray[np.float32]
    experts: Choices


def evaluate(
    build: Build, model: Path, tokens: Sequence[int], chunks: Sequence[int], scratch: Path, *, watch: bool = False
) -> Evaluation:
    """Logits of every position, fed chunk by chunk with memory kept between them.

    Args:
        build: whose libraries to use.
        model: the GGUF file.
        tokens: T ids.
        chunks: lengths that add up to T.
        scratch: folder for the files that the process reads and writes.
        watch: whether to keep the choices of experts.

    Raises:
        CandidateFailed: the process died or hung on this model (crash).
    """
    assert sum(chunks) == len(tokens)
    ids, out = scratch / "tokens.npy", scratch / "logits.npz"
    np.save(ids, np.asarray(tokens, np.int32))
    run_module(build, __name__, model, [str(ids), ",".join(map(str, chunks)), str(int(watch)), str(out)])
    with np.load(out, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    return Evaluation(found.pop("logits"), {int(depth): chosen for depth, chosen in found.items()})


def _main(model: str, tokens: str, chunks: str, watch: str, out: str) -> None:
    ids, lengths = np.load(tokens, allow_pickle=False), [int(length) for length in chunks.split(",")]
    experts = ExpertWatch(library_folder())
    session = Session(model, len(ids), max(lengths), experts if watch == "1" else None)
    logits = np.concatenate([session.feed(chunk.tolist()) for chunk in np.split(ids, np.cumsum(lengths)[:-1])])
    choices = {str(depth): chosen for depth, chosen in experts.choices().items()}
    np.savez(out, allow_pickle=False, logits=logits, **choices)


if __name__ == "__main__":
    _main(*sys.argv[1:])
