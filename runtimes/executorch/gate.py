"""The equivalence gate: does ExecuTorch, run by our runner, compute what the layout means?

A prompt fed in chunks and 32 decoded tokens run through an artifact; logits are compared with eager PyTorch that rounds
weights and activations as 8da4w does. Rounding activations turns noise of 1e-6 into percents, so two right programs
differ too: by how much, the oracle itself shows when its layers' inputs are disturbed by such noise. A right graph
differs from the oracle about as much.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.executorch.oracle import Logits, Oracle
from nas.runtimes.runner_logits import Feed, Machine, runner_logits

PROMPT, BATCH, STEPS = 95, 71, 32
"""A prompt in two uneven chunks, then steps: state crosses chunk borders and goes on token by token."""
FACTOR = 2.0
"""How much more than the disturbed oracle a graph may err."""
DISTURBANCES = 3
EXACT_CACHE = ("--kv", "f32")
"""Options of the runner: rounding the cache is no part of the graph."""


def run_gate(
    layout: Layout, model: Path, machine: Machine, oracle: Oracle, *, earlier: int = 0, seed: int = 0
) -> GateReport:
    """Runs the gate on an artifact.

    Args:
        layout: what the artifact claims to be.
        model: the artifact, or a whole-graph .pte.
        machine: what runs the runner.
        oracle: the layout on the same weights.
        earlier: a planted fault: tokens that are still in memory from an earlier text. 0 in earnest.
        seed: of the token ids.

    Raises:
        CandidateFailed: the runner died on the file, or refused it (crash, export).
        InfrastructureFailed: the runner could not work there.
    """
    feed = Feed(earlier + PROMPT, STEPS, BATCH, seed)
    ids = feed.ids(layout.vocab)[earlier:]
    with tempfile.TemporaryDirectory() as scratch:
        measured = runner_logits(machine, model, layout.vocab, feed, Path(scratch), EXACT_CACHE)
    exact = oracle.exact(ids)[-STEPS - 1 :]
    disturbed = [oracle.disturbed(ids, seed)[-STEPS - 1 :] for seed in range(DISTURBANCES)]
    routed = any(block.kind == "moe" for layer in layout.layers for block in layer.blocks)
    return compare(measured, exact, disturbed, routed=routed)


def compare(measured: Logits, oracle: Logits, disturbed: Sequence[Logits], *, routed: bool = False) -> GateReport:
    """The report on logits, all [T, V].

    Args:
        measured: the runner's.
        oracle: PyTorch's.
        disturbed: PyTorch's with noise, several times.
        routed: whether experts are chosen per token. Where two experts score alike, noise picks another one and that
            position is far off, here and there at different positions. So the worst position says nothing; the upper
            quartile does, as every fault moves all of them.
    """
    rank = 0.75 if routed else 1.0
    errors = relative_l2(measured, oracle)
    error = np.quantile(errors, rank, method="higher") if np.isfinite(errors).all() else np.inf
    floor = max(float(np.quantile(relative_l2(one, oracle), rank, method="higher")) for one in disturbed)
    return GateReport(tuple(errors.tolist()), float(error), FACTOR * floor)


def relative_l2(logits: Logits, oracle: Logits) -> NDArray[np.float64]:
    """Per position."""
    difference = np.linalg.norm(logits.astype(np.float64) - oracle, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(oracle.astype(np.float64), axis=-1)
    return errors
