"""The equivalence gate: checks that llama.cpp computes what the layout means.

A prompt fed in chunks and 32 decoded tokens run through a GGUF file; the logits of every position are compared with a
PyTorch oracle on the same dequantised weights. What separates rounding from a wrong graph is a simulation: the oracle
with its activations rounded as llama.cpp rounds them. A correct graph errs about as much as the simulation does.

Experts are chosen from scores, and where two score alike, rounding picks another one. So both PyTorch models follow the
choices that llama.cpp made, which leaves rounding alone between the logits; and each choice is held against the scores:
it may pass over a better expert by no more than rounding moves scores.

Machines whose libraries this one cannot load are checked through the runner, which reports the logits of the prompt's
end and of each decoded token, but not which experts it chose. In F32 files without attention nothing is rounded that
choices depend on, so both sides choose alike. Otherwise a file is compared with its choices settled: a copy whose
biases let the same experts win for every token, others in every layer.

The text is random, and for one in some hundreds (with attention next to the embedding) rounding alone exceeds the
limit; a wrong graph exceeds it for every text. So a candidate fails only if it fails with several: `first_passed`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from nas.core.block import Block
from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import GateReport
from nas.measure.runtimes.llama_cpp.binding import Choices, evaluate
from nas.measure.runtimes.llama_cpp.kinds import CACHED, feed_forwards_by_layer, mixers, of_kind
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.runner import Feed, Machine, relative_l2, runner_logits

Logits = NDArray[np.float32]

PROMPT_CHUNKS = (71, 24)
"""A prompt in uneven chunks: state crosses their border, and 64 tokens at once take another kernel."""
STEPS = 32
CHUNKS = PROMPT_CHUNKS + (1,) * STEPS
FACTOR = 2.0
"""Greatest error of a graph, in errors of the simulation."""
_WINS = 2.0
"""A bias: scores are between 0 and 1."""
TEXTS = 3
"""That a wrong graph must fail with."""
LEAST = 1e-5
"""Relative error of sums in another order, for float32 weights without attention: the simulation rounds nothing."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Logits and router scores from PyTorch.

    Args:
        logits: [T, V].
        scores: of each mixture of experts, in the order of depth: what is chosen by, [T, experts].
    """

    logits: Logits
    scores: tuple[Logits, ...] = ()


Forward = Callable[[NDArray[np.int64], Choices], Computed]
"""Token ids [T] and the experts to follow -> what a model computes."""


def compare(measured: Logits, oracle: Logits, simulated: Logits) -> GateReport:
    """Returns the report on logits [T, V] of llama.cpp, of PyTorch, and of PyTorch with rounded activations.

    The limit is one number over all positions, not one for each: the simulation rounds by the same rule as llama.cpp
    but sums in another order, so their errors at one position are two draws from one distribution.
    """
    errors = relative_l2(measured, oracle)
    explained = max(float(relative_l2(simulated, oracle).max()), LEAST)
    error = float(errors.max()) if np.isfinite(errors).all() else np.inf
    return GateReport(tuple(errors.tolist()), error, FACTOR * explained)


def judge_choices(choices: Choices, exact: Sequence[Logits], rounded: Sequence[Logits]) -> str:
    """Checks the experts that were chosen; returns what is wrong, empty: nothing.

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


def first_passed(check: Callable[[int], GateReport]) -> GateReport:
    """Returns the report of the first of `TEXTS` texts (seeds) that passes, or else that of the first."""
    first = check(0)
    if first.passed:
        return first
    return next((report for report in map(check, range(1, TEXTS)) if report.passed), first)


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
        simulated: the same with rounded activations; both from `nas.measure.runtimes.llama_cpp.oracle`.
        earlier: a planted fault: tokens that are still in memory from an earlier text. 0 in earnest.
        seed: of the token ids.

    Raises:
        CandidateFailed: llama.cpp died on the file (crash).
    """
    ids = np.random.default_rng(seed).integers(0, layout.vocab, earlier + sum(CHUNKS))
    chunks = ((earlier,) if earlier else ()) + CHUNKS
    with tempfile.TemporaryDirectory() as scratch:
        computed = evaluate(build, model, ids.tolist(), chunks, Path(scratch), watch=True)
    experts = {depth: chosen[earlier:] for depth, chosen in computed.experts.items()}
    routed = {depth: block.int("top_k") for depth, block in _mixtures(layout)}
    top_k = {depth: chosen.shape[-1] for depth, chosen in experts.items()}
    if top_k != routed:
        return GateReport((), np.inf, 0.0, f"experts per token by layer are {top_k}, the layout says {routed}")
    text = ids[earlier:]
    exact, rounded = oracle(text, experts), simulated(text, experts)
    report = compare(computed.logits[earlier:], exact.logits, rounded.logits)
    return replace(report, note=judge_choices(experts, exact.scores, rounded.scores))


def run_runner_gate(
    layout: Layout,
    model: Path,
    machine: Machine,
    oracle: Forward,
    simulated: Forward,
    *,
    settled: bool,
    earlier: int = 0,
    seed: int = 0,
    options: Sequence[str] = (),
) -> GateReport:
    """Runs the gate on a GGUF file with the logits of a runner on `machine`; arguments are those of `run_gate`.

    `settled`: whether to settle the choices of experts, see `rounds_choices`; `options` are more of the runner's.

    Raises:
        CandidateFailed: the runner died on the file.
        InfrastructureFailed: the runner could not work there.
    """
    feed = Feed(earlier + sum(PROMPT_CHUNKS), STEPS, max(PROMPT_CHUNKS), seed)
    ids = feed.ids(layout.vocab)[earlier:]
    experts = settled_experts(layout, len(ids)) if settled else {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        stored = {depth: chosen for depth, chosen in experts.items() if layout.layers[depth].share is None}
        file = settle(model, stored, scratch / "settled.gguf") if stored else model
        measured = runner_logits(machine, file, layout.vocab, feed, scratch, options)
    first = sum(PROMPT_CHUNKS) - 1
    return compare(measured, oracle(ids, experts).logits[first:], simulated(ids, experts).logits[first:])


def rounds_choices(layout: Layout, quantisation: str) -> bool:
    """Returns whether rounding may change which experts are chosen; the cache of attention is float16 in every file."""
    return quantisation != "f32" or bool(of_kind(mixers(layout), *CACHED))


def settled_experts(layout: Layout, length: int) -> Choices:
    """Returns the experts [length, top_k] that are made to win in each mixture of `layout`."""
    choices = {}
    for depth, block in _mixtures(layout):
        experts, top_k, share = block.int("experts"), block.int("top_k"), layout.layers[depth].share
        weights = depth if share is None else share
        winners = np.arange(weights * top_k, (weights + 1) * top_k) % experts
        choices[depth] = np.tile(winners, (length, 1))
    return choices


def _mixtures(layout: Layout) -> list[tuple[int, Block]]:
    layers = enumerate(feed_forwards_by_layer(layout))
    return [(depth, block) for depth, blocks in layers for block in of_kind(blocks, "moe")]


def settle(model: Path, experts: Choices, destination: Path) -> Path:
    """Copies a GGUF file to `destination` with biases that let `experts` win.

    Raises:
        CandidateFailed: it is no GGUF file, or one without these mixtures (export).
    """
    shutil.copyfile(model, destination)
    try:
        reader = GGUFReader(destination, "r+")
        by_name = {tensor.name: tensor.data for tensor in reader.tensors}
        biases = {depth: by_name[f"blk.{depth}.exp_probs_b.bias"] for depth in experts}
    except (ValueError, KeyError, IndexError) as error:
        raise CandidateFailed("export", f"{model.name} holds no such mixtures of experts: {error}") from error
    for depth, bias in biases.items():
        bias[:] = 0
        bias[experts[depth][0]] = _WINS
    reader.data.flush()
    return destination
