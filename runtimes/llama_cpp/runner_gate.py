"""The equivalence gate through the runner, for machines whose libraries this one cannot load.

The runner tells the logits of the prompt's end and of each decoded token, but not which experts it chose. In F32 files
without attention nothing is rounded that choices depend on, so both sides choose alike. Otherwise a file is compared
with its choices settled: a copy whose biases let the same experts win for every token, others in every layer.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.llama_cpp.experts import Choices
from nas.runtimes.llama_cpp.gate import PROMPT_CHUNKS, STEPS, Forward, compare
from nas.runtimes.llama_cpp.layers import ATTENTION, feed_forwards, mixers, of_kind
from nas.runtimes.llama_cpp.support import Quantisation
from nas.runtimes.runner_logits import Feed, Machine, runner_logits

_WINS = 2.0
"""Scores lie between 0 and 1."""


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
) -> GateReport:
    """Runs the gate on a GGUF file.

    Args:
        layout: what the file claims to be.
        model: the file.
        machine: what runs the runner.
        oracle: the layout on dequantised weights.
        simulated: the same with rounded activations; both from `nas.runtimes.llama_cpp.oracle`.
        settled: whether to settle the choices of experts, see `rounds_choices`.
        earlier: a planted fault: tokens that are still in memory from an earlier text. 0 in earnest.
        seed: of the token ids.

    Raises:
        CandidateFailed: the runner died on the file.
        InfrastructureFailed: the runner could not work there.
    """
    feed = Feed(earlier + sum(PROMPT_CHUNKS), STEPS, max(PROMPT_CHUNKS), seed)
    ids = feed.ids(layout.vocab)[earlier:]
    experts = settled_experts(layout, len(ids)) if settled else {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        file = settle(model, experts, scratch / "settled.gguf") if experts else model
        measured = runner_logits(machine, file, layout.vocab, feed, scratch)
    first = sum(PROMPT_CHUNKS) - 1
    return compare(measured, oracle(ids, experts).logits[first:], simulated(ids, experts).logits[first:])


def rounds_choices(layout: Layout, quantisation: Quantisation) -> bool:
    """Whether rounding may change which experts are chosen; the cache of attention is float16 in every file."""
    return quantisation != "f32" or bool(of_kind(mixers(layout), *ATTENTION))


def settled_experts(layout: Layout, length: int) -> Choices:
    """The experts [length, top_k] that shall win in each mixture of `layout`."""
    choices = {}
    for depth, block in enumerate(feed_forwards(layout)):
        if block.kind == "moe":
            experts, top_k = block.int("experts"), block.int("top_k")
            winners = np.arange(depth * top_k, (depth + 1) * top_k) % experts
            choices[depth] = np.tile(winners, (length, 1))
    return choices


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
