"""The likeliest tokens after a prompt: what two builds must agree on for the same file.

python -m nas.runtimes.llama_cpp.greedy MODEL PROMPT.npy TOKENS OUT.npy
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nas.runtimes.llama_cpp.binding import Session, run_module
from nas.runtimes.llama_cpp.builds import Build


def greedy_tokens(build: Build, model: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """Each time the likeliest token, fed back.

    Args:
        build: whose libraries to use.
        model: the GGUF file.
        prompt: at least one id.
        tokens: how many to decode.

    Raises:
        CandidateFailed: the process died or hung on this model (crash).
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "prompt.npy", Path(folder) / "tokens.npy"
        np.save(given, np.asarray(prompt, np.int32))
        run_module(build, __name__, model, [str(given), str(tokens), str(out)])
        chosen: list[int] = np.load(out, allow_pickle=False).tolist()
    return chosen


def _main(model: str, prompt: str, tokens: str, out: str) -> None:
    given: list[int] = np.load(prompt, allow_pickle=False).tolist()
    session = Session(model, len(given) + int(tokens), len(given))
    np.save(out, np.fromiter(_likeliest(session, given, int(tokens)), np.int32))


def _likeliest(session: Session, prompt: list[int], tokens: int) -> Iterator[int]:
    fed = prompt
    for _ in range(tokens):
        fed = [int(session.feed(fed)[-1].argmax())]
        yield fed[0]


if __name__ == "__main__":
    _main(*sys.argv[1:])
