"""Logits of a GGUF file through llama-cpp-python, as a process of its own.

    python -m nas.runtimes.llama_cpp.logits MODEL TOKENS.npy CHUNKS OUT.npy

CHUNKS, such as "24,24,16,1,1", says how the tokens are fed. A process of its own, because the library that the binding
loads is chosen by the environment before its first import, and because a crash of the model must stay a result.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.process import stream

_DEADLINE_S = 600.0
_KEPT = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR")


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
    spec = ",".join(map(str, chunks))
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["LLAMA_CPP_LIB_PATH"] = str(build.folder)
    code, tail = stream(
        [sys.executable, "-m", "nas.runtimes.llama_cpp.logits", str(model), str(ids), spec, str(out)],
        deadline_s=_DEADLINE_S,
        env=environment,
    )
    if code != 0:
        raise CandidateFailed("crash", f"llama.cpp died on {model.name} (exit code {code}):\n{tail}")
    logits: NDArray[np.float32] = np.load(out, allow_pickle=False)
    return logits


def _main(model: str, tokens: str, chunks: str, out: str) -> None:
    ids = np.load(tokens, allow_pickle=False)
    np.save(out, _logits(model, ids, [int(length) for length in chunks.split(",")]))


def _logits(path: str, ids: NDArray[np.int32], chunks: list[int]) -> NDArray[np.float32]:
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"the model file was refused: {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = -(-len(ids) // 256) * 256
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("no context for this model")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = np.empty((len(ids), vocab), np.float32)
    batch = llama_cpp.llama_batch_init(max(chunks), 0, 1)
    position = 0
    for length in chunks:
        _fill(batch, ids[position : position + length], position)
        if status := llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode returned {status}")
        for i in range(length):
            row = llama_cpp.llama_get_logits_ith(context, i)
            rows[position + i] = np.ctypeslib.as_array(row, shape=(vocab,))
        position += length
    return rows


def _fill(batch: object, ids: NDArray[np.int32], position: int) -> None:
    """Writes one sequence's next tokens into a llama_batch, asking for the logits of each."""
    b: ctypes.Structure = batch  # type: ignore[assignment]
    b.n_tokens = len(ids)
    for i, token in enumerate(ids):
        b.token[i] = int(token)
        b.pos[i] = position + i
        b.n_seq_id[i] = 1
        b.seq_id[i][0] = 0
        b.logits[i] = 1


if __name__ == "__main__":
    _main(*sys.argv[1:])
