"""The equivalence gate: does ExecuTorch, run by our runner, compute what the layout means?

A prompt fed in chunks and 32 decoded tokens run through an artifact; logits are compared with eager PyTorch that rounds
weights and activations as 8da4w does. Rounding activations turns noise of 1e-6 into percents, so two right programs
differ too: by how much, the oracle itself shows when its layers' inputs are disturbed by such noise. A right graph
differs from the oracle about as much.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.executorch.oracle import Logits, Oracle

PROMPT, CHUNK, STEPS = 95, 71, 32
"""A prompt in two uneven chunks, then steps: state crosses chunk borders and goes on token by token."""
FACTOR = 2.0
"""How much more than the disturbed oracle a graph may err."""
DISTURBANCES = 3
_DEADLINE_S = 600.0


def run_gate(
    layout: Layout, model: Path, runner: Path, oracle: Oracle, *, seed: int = 0, before: tuple[str, ...] = ()
) -> GateReport:
    """Runs the gate on an artifact.

    Args:
        layout: what the artifact claims to be.
        model: the artifact, or a whole-graph .pte.
        runner: the program that computes the logits.
        oracle: the layout on the same weights.
        seed: of the token ids.
        before: what to put before the runner, such as an emulator.

    Raises:
        CandidateFailed: the runner died on the file (crash).
    """
    ids = token_ids(seed, PROMPT + STEPS, layout.vocab)
    measured = runner_logits(model, runner, layout.vocab, seed=seed, before=before)
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


def runner_logits(
    model: Path, runner: Path, vocab: int, *, seed: int = 0, before: tuple[str, ...] = (), kv: str = "f32"
) -> Logits:
    """Logits [1 + STEPS, V] of the prompt's last token and of each step.

    Raises:
        CandidateFailed: the runner died on the file (crash).
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits"
        sizes = {"prompt": PROMPT, "chunk": CHUNK, "gen": STEPS, "seed": seed, "kv": kv, "logits": out}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        argv = [*before, str(runner), "--model", str(model), *options]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CandidateFailed("crash", f"no logits within {_DEADLINE_S:.0f} s") from error
        if done.returncode != 0:
            raise CandidateFailed("crash", f"no logits (exit code {done.returncode}): {done.stdout[-400:]}")
        return np.fromfile(out, "<f4").reshape(1 + STEPS, vocab)


def token_ids(seed: int, count: int, vocab: int) -> NDArray[np.int64]:
    """The ids that the runner feeds: splitmix64 (Steele, Lea, Flood 2014) modulo `vocab`."""
    state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab)).astype(np.int64)


def relative_l2(logits: Logits, oracle: Logits) -> NDArray[np.float64]:
    """Per position."""
    difference = np.linalg.norm(logits.astype(np.float64) - oracle, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(oracle.astype(np.float64), axis=-1)
    return errors
