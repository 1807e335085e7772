"""Text of a byte-level model: a look at what a trained proxy has learned.

python -m nas.runtimes.llama_cpp.generate MODEL PROMPT.bin TOKENS TEMPERATURE SEED OUT.bin
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.runtimes.llama_cpp.binding import Session, run_module
from nas.runtimes.llama_cpp.builds import find_build
from nas.runtimes.llama_cpp.support import PATCHED

_BYTES = 256


def generate(model: Path, prompt: bytes, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """What a model whose tokens are bytes writes after `prompt`, on this machine's build.

    Args:
        model: the GGUF file.
        prompt: at least one byte.
        tokens: how many bytes to write.
        temperature: of sampling; 0 takes the likeliest byte each time.
        seed: of sampling.

    Raises:
        InvalidInput: no GGUF file, or its tokens are no bytes.
        InfrastructureFailed: no build at hand that runs it.
        CandidateFailed: llama.cpp died on the file (crash).
    """
    build = find_build(patched=_byte_level_architecture(model) == PATCHED)
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "prompt", Path(folder) / "text"
        given.write_bytes(prompt)
        run_module(build, __name__, model, [str(given), str(tokens), str(temperature), str(seed), str(out)])
        return out.read_bytes()


def _byte_level_architecture(model: Path) -> str:
    try:
        fields = GGUFReader(model).fields
        arch = str(fields["general.architecture"].contents())
        vocab = int(fields[f"{arch}.vocab_size"].contents())
    except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
        raise InvalidInput(
            f"no GGUF file with an architecture and a vocabulary size: {error}", where=str(model)
        ) from error
    if vocab != _BYTES:
        raise InvalidInput(f"tokens are no bytes: {vocab} of them, not {_BYTES}", where=str(model))
    return arch


def _main(model: str, prompt: str, tokens: str, temperature: str, seed: str, out: str) -> None:
    given = Path(prompt).read_bytes()
    session = Session(model, len(given) + int(tokens), len(given))
    rng = np.random.default_rng(int(seed))
    Path(out).write_bytes(bytes(_sample(session, given, int(tokens), float(temperature), rng)))


def _sample(
    session: Session, prompt: bytes, tokens: int, temperature: float, rng: np.random.Generator
) -> Iterator[int]:
    fed = list(prompt)
    for _ in range(tokens):
        logits = session.feed(fed)[-1].astype(np.float64)
        fed = [int(np.argmax(logits)) if temperature == 0 else _draw(logits / temperature, rng)]
        yield fed[0]


def _draw(logits: NDArray[np.float64], rng: np.random.Generator) -> int:
    """From softmax(logits): the greatest of them with Gumbel noise added."""
    return int(np.argmax(logits + rng.gumbel(size=logits.shape)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
