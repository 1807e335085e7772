"""The equivalence gate: does llama.cpp compute what the layout means?

A prompt fed in chunks and 32 decoded tokens run through a GGUF file; the logits of every position are compared with a
PyTorch oracle on the same dequantised weights. What separates rounding from a wrong graph is a simulation: the oracle
with its activations rounded as llama.cpp rounds them. A correct graph errs about as much as the simulation does.

Experts are chosen from scores, and where two score alike, rounding picks another one. So both PyTorch models follow the
choices that llama.cpp made, which leaves rounding alone between the logits; and each choice is held against the scores:
it may pass over a better expert by no more than rounding moves scores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.experts import Choices
from nas.runtimes.llama_cpp.layers import feed_forwards
from nas.runtimes.llama_cpp.logits import evaluate

Logits = NDArray[np.float32]

PROMPT_CHUNKS = (71, 24)
"""A prompt in uneven chunks: state crosses their border, and 64 tokens at once take another kernel."""
STEPS = 32
CHUNKS = PROMPT_CHUNKS + (1,) * STEPS
FACTOR = 2.0
"""How much more than the simulation a graph may err."""
LEAST = 1e-5
"""What sums in another order explain where the simulation rounds nothing: float32 weights without attention."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What PyTorch computed.

    Args:
        logits: [T, V].
        scores: of each mixture of experts, in the order of depth: what is chosen by, [T, experts].
    """

    logits: Logits
    scores: tuple[Logits, ...] = ()


Forward = Callable[[NDArray[np.int64], Choices], Computed]
"""Token ids [T] and the experts to follow -> what a model computes."""


def compare(measured: Logits, oracle: Logits, simulated: Logits) -> GateReport:
    """The report on logits, all [T, V].

    The limit is one number over all positions, not one for each: the simulation rounds by the same rule as llama.cpp
    but sums in another order, so their errors at one position are two draws from one distribution.

    Args:
        measured: llama.cpp's.
        oracle: PyTorch's.
        simulated: PyTorch's with rounded activations.
    """
    errors = _relative_l2(measured, oracle)
    explained = max(float(_relative_l2(simulated, oracle).max()), LEAST)
    error = float(errors.max()) if np.isfinite(errors).all() else np.inf
    return GateReport(tuple(errors.tolist()), error, FACTOR * explained)


def judge_choices(choices: Choices, exact: Sequence[Logits], rounded: Sequence[Logits]) -> str:
    """What is wrong with the experts that were chosen; empty: nothing.

    Args:
        choices: llama.cpp's.
        exact: the oracle's scores where it follows them, one array [T, experts] per mixture, in the order of depth.
        rounded: the simulation's.
    """
    for depth, scores, moved in zip(sorted(choices), exact, rounded, strict=True):
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, choices[depth], True, axis=-1)
        passed_over = np.where(chosen, -np.inf, scores).max(-1) - np.where(chosen, scores, np.inf).min(-1)
        # Both scores of a pair may have moved.
        explained = 2 * FACTOR * max(float(np.abs(moved - scores).max()), LEAST)
        if wrong := int((passed_over > explained).sum()):
            return (
                f"layer {depth} chose other experts at {wrong} of {len(scores)} positions, passing over scores "
                f"better by up to {passed_over.max():.2g}; rounding explains {explained:.2g}"
            )
    return ""


def run_gate(
    layout: Layout,
    model: Path,
    build: Build,
    oracle: Forward,
    simulated: Forward,
    *,
    earlier: int = 0,
    seed: int = 0,
) -> GateReport:
    """Runs the gate on a GGUF file.

    Args:
        layout: what the file claims to be.
        model: the file.
        build: whose libraries compute the logits; for this machine.
        oracle: the layout on dequantised weights.
        simulated: the same with rounded activations; both from `nas.runtimes.llama_cpp.oracle`.
        earlier: a planted fault: tokens that are still in memory from an earlier text. 0 in earnest.
        seed: of the token ids.

    Raises:
        CandidateFailed: llama.cpp died on the file (crash).
    """
    ids = np.random.default_rng(seed).integers(0, layout.vocab, earlier + sum(CHUNKS))
    chunks = ((earlier,) if earlier else ()) + CHUNKS
    with tempfile.TemporaryDirectory() as scratch:
        found = evaluate(build, model, ids.tolist(), chunks, Path(scratch), watch=True)
    experts = {depth: chosen[earlier:] for depth, chosen in found.experts.items()}
    routed = {depth: block.int("top_k") for depth, block in enumerate(feed_forwards(layout)) if block.kind == "moe"}
    top_k = {depth: chosen.shape[-1] for depth, chosen in experts.items()}
    if top_k != routed:
        return GateReport((), np.inf, 0.0, f"experts per token by layer are {top_k}, the layout says {routed}")
    text = ids[earlier:]
    exact, rounded = oracle(text, experts), simulated(text, experts)
    report = compare(found.logits[earlier:], exact.logits, rounded.logits)
    return replace(report, note=judge_choices(experts, exact.scores, rounded.scores))


def _relative_l2(logits: Logits, oracle: Logits) -> NDArray[np.float64]:
    difference = np.linalg.norm(logits.astype(np.float64) - oracle, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(oracle.astype(np.float64), axis=-1)
    return errors
