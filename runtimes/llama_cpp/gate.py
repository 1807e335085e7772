"""The equivalence gate: does llama.cpp compute what the layout means?

A prompt fed in chunks and 32 decoded tokens run through a GGUF file; the logits of every position are compared with a
PyTorch oracle on the same dequantised weights. What separates rounding from a wrong graph is a simulation: the oracle
with its activations rounded as llama.cpp rounds them. A correct graph errs about as much as the simulation does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.logits import evaluate

Logits = NDArray[np.float32]
Forward = Callable[[NDArray[np.int64]], Logits]
"""Token ids [T] -> logits [T, V]."""

CHUNKS = (71, 24) + (1,) * 32
"""A prompt in uneven chunks, then steps: state crosses chunk borders, and 64 tokens at once take another kernel."""
FACTOR = 2.0
"""How much more than the simulation a graph may err."""
LEAST = 1e-5
"""What sums in another order explain where the simulation rounds nothing: float32 weights without attention."""


def compare(measured: Logits, oracle: Logits, simulated: Logits, *, routed: bool = False) -> GateReport:
    """The report on logits, all [T, V].

    The limit is one number over all positions, not one for each: the simulation rounds by the same rule as llama.cpp
    but sums in another order, so their errors at one position are two draws from one distribution.

    Args:
        measured: llama.cpp's.
        oracle: PyTorch's.
        simulated: PyTorch's with rounded activations.
        routed: whether experts are chosen per token. Where two experts score alike, rounding picks another one and that
            position is far off, in llama.cpp and in the simulation at different positions. So the worst position says
            nothing; the upper quartile does, as every fault moves the second chunk and the steps, almost half of all.
    """
    errors = _relative_l2(measured, oracle)
    rank = 0.75 if routed else 1.0
    explained = max(np.quantile(_relative_l2(simulated, oracle), rank, method="higher"), LEAST)
    error = np.quantile(errors, rank, method="higher") if np.isfinite(errors).all() else np.inf
    return GateReport(tuple(errors.tolist()), float(error), FACTOR * float(explained))


def run_gate(
    layout: Layout, model: Path, build: Build, oracle: Forward, simulated: Forward, *, seed: int = 0
) -> GateReport:
    """Runs the gate on a GGUF file.

    Args:
        layout: what the file claims to be.
        model: the file.
        build: whose libraries compute the logits.
        oracle: the layout on dequantised weights.
        simulated: the same with rounded activations; both from `nas.runtimes.llama_cpp.oracle`.
        seed: of the token ids.

    Raises:
        CandidateFailed: llama.cpp died on the file (crash).
    """
    ids = np.random.default_rng(seed).integers(0, layout.vocab, sum(CHUNKS))
    with tempfile.TemporaryDirectory() as scratch:
        measured = evaluate(build, model, ids.tolist(), CHUNKS, Path(scratch))
    routed = any(block.kind == "moe" for layer in layout.layers for block in layer.blocks)
    return compare(measured, oracle(ids), simulated(ids), routed=routed)


def _relative_l2(logits: Logits, oracle: Logits) -> NDArray[np.float64]:
    difference = np.linalg.norm(logits.astype(np.float64) - oracle, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(oracle.astype(np.float64), axis=-1)
    return errors
