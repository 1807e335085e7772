"""llama-cpp-python, inside a process of its own.

The library that the binding loads is chosen by the environment before its first import, and a crash of a model must
stay a result. So what needs the binding is a module run by `run_module`, whose `_main` works through a `Session`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.process import stream

Watch = Callable[[int, bool, int | None], bool]
"""(tensor's address, whether it is only asked for, unused) -> wanted; see ggml/include/ggml-backend.h."""

_DEADLINE_S = 600.0
_KEPT = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR")
_LIBRARIES = "LLAMA_CPP_LIB_PATH"


def run_module(
    build: Build, module: str, model: Path, arguments: Sequence[str], *, deadline_s: float = _DEADLINE_S
) -> None:
    """Runs `python -m MODULE MODEL ARGUMENTS` on the libraries of `build`.

    Raises:
        CandidateFailed: the process died or hung on this model (crash).
    """
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment[_LIBRARIES] = str(build.folder)
    argv = [sys.executable, "-m", module, str(model), *arguments]
    code, tail = stream(argv, deadline_s=deadline_s, env=environment)
    if code != 0:
        raise CandidateFailed("crash", f"llama.cpp died on {model.name} (exit code {code}):\n{tail}")


def library_folder() -> Path:
    """Where the libraries of this process lie, which `run_module` started."""
    return Path(os.environ[_LIBRARIES])


class Session:
    """One sequence in a context of its own.

    Args:
        model: the GGUF file.
        length: tokens that the sequence will have at most.
        chunk: most tokens fed at once.
        watch: sees every node of the graph, as `ggml_backend_sched_eval_callback` does.

    Raises:
        SystemExit: llama.cpp refuses; the message goes to the process's stderr.
    """

    def __init__(self, model: str, length: int, chunk: int, watch: Watch | None = None) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        # What C calls must outlive this function.
        self._watch = llama_cpp.ggml_backend_sched_eval_callback(watch) if watch else None
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"the model file was refused: {model}")
        self.vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = llama_cpp.llama_init_from_model(self._model, self._parameters(length, chunk))
        if not self._context:
            raise SystemExit("no context for this model")
        self._batch: Any = llama_cpp.llama_batch_init(chunk, 0, 1)
        self._position = 0

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [T, V] of the next T tokens of the sequence."""
        self._fill(ids)
        if status := self._lib.llama_decode(self._context, self._batch):
            raise SystemExit(f"llama_decode returned {status}")
        self._position += len(ids)
        rows = [self._lib.llama_get_logits_ith(self._context, i) for i in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, shape=(self.vocab,)) for row in rows])

    def _parameters(self, length: int, chunk: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-length // 256) * 256
        params.n_ubatch = chunk
        params.n_threads = params.n_threads_batch = 1
        params.swa_full = False  # as the runner has it
        if self._watch:
            params.cb_eval = self._watch
        return params

    def _fill(self, ids: Sequence[int]) -> None:
        """Writes tokens into the llama_batch, asking for the logits of each."""
        self._batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            self._batch.token[i] = int(token)
            self._batch.pos[i] = self._position + i
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0
            self._batch.logits[i] = 1
