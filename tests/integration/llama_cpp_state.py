"""Saves the state of a sequence, restores it in a new context, and continues in both. A process of its own.

python llama_cpp_state.py MODEL OUT.npy
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from nas.measure.runtimes.llama_cpp.binding import Session

PROMPT, STEPS = 70, 12


def main(model: str, out: str) -> None:
    """Logits [2, STEPS, V]: of the sequence itself, and of the restored one."""
    first, second = Session(model, PROMPT + STEPS, PROMPT), Session(model, PROMPT + STEPS, PROMPT)
    lib = first._lib
    ids = np.random.default_rng(0).integers(0, first.vocab, PROMPT + STEPS).tolist()
    first.feed(ids[:PROMPT])
    size = lib.llama_state_get_size(first._context)
    state = (ctypes.c_uint8 * size)()
    assert lib.llama_state_get_data(first._context, state, size) == size
    assert lib.llama_state_set_data(second._context, state, size) == size
    second._fed = ids[:PROMPT]
    np.save(out, [[session.feed([id])[0] for id in ids[PROMPT:]] for session in (first, second)])


if __name__ == "__main__":
    main(*sys.argv[1:])
