"""The equivalence gate: checks that ExecuTorch, run by our runner, computes what the layout means.

A prompt fed in chunks and 32 decoded tokens run through an artifact; logits are compared with eager PyTorch that rounds
weights and activations as the file's quantisation does. Rounding activations turns noise of 1e-6 into percents, so two
right programs differ too: by how much, the oracle itself shows when its layers' inputs are disturbed by such noise, and
when of every product's activations the one nearest to a tie is rounded the other way. In a small model a few such ties
make all the difference, and noise may meet none of them. A right graph differs from the oracle about as much.

PyTorch's side rounds the checkpoint again and reads nothing of the artifact, so one with tensors in wrong places
differs.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nas.core.block import Block
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, GateReport
from nas.measure.runtimes.executorch.chain import QUANTISATIONS, Method, build_chain
from nas.measure.runtimes.executorch.contents import CheckpointContents, dequantise, quantise, quantise_rows
from nas.measure.runtimes.executorch.kinds import KINDS, programs_of
from nas.measure.runtimes.executorch.programs import Constant
from nas.measure.runtimes.runner import Feed, Machine, relative_l2, runner_logits
from nas.model.nn.layer import ResidualLayer
from nas.model.nn.model import Model

PROMPT = 95
"""Tokens of the prompt."""
BATCH = 71
"""Tokens of a call: the prompt takes two uneven ones, so state crosses their border."""
STEPS = 32
"""Tokens that are decoded one by one after it."""
FACTOR = 2.0
"""Greatest error of a graph, in errors of the disturbed oracle."""
DISTURBANCES = 3
EXACT_CACHE = ("--kv", "f32")
"""Options of the runner: rounding the cache is no part of the graph."""
Logits = NDArray[np.float32]
Rounding = Callable[[Tensor], Tensor]

NOISE = 1e-6
"""Relative, at the input of each layer: about what sums in another order make."""


def run_gate(
    layout: Layout, model: Path, machine: Machine, oracle: Oracle, *, earlier: int = 0, seed: int = 0
) -> GateReport:
    """Runs the gate on an artifact, or on a whole-graph .pte, with an oracle on the same weights.

    As a planted fault, `earlier` tokens are still in memory from an earlier text: 0 in earnest.

    Raises:
        CandidateFailed: the runner died on the file, or refused it (crash, export).
        InfrastructureFailed: the runner could not work there.
    """
    feed = Feed(earlier + PROMPT, STEPS, BATCH, seed)
    ids = feed.ids(layout.vocab)[earlier:]
    with tempfile.TemporaryDirectory() as scratch:
        measured = runner_logits(machine, model, layout.vocab, feed, Path(scratch), EXACT_CACHE)
    return judge(measured, oracle, layout, ids)


def judge(measured: Logits, oracle: Oracle, layout: Layout, ids: NDArray[np.int64]) -> GateReport:
    """Returns the report on the logits [T, V] that ran a layout gave at the last `STEPS` + 1 positions of `ids`."""
    exact = oracle.exact(ids)[-STEPS - 1 :]
    disturbed = [oracle.disturbed(ids, seed)[-STEPS - 1 :] for seed in range(DISTURBANCES)]
    ties = oracle.with_ties_turned(ids)[-STEPS - 1 :]
    routed = any(KINDS[block.kind].mixture for layer in layout.layers for block in layer.blocks)
    return compare(measured, exact, disturbed, ties, routed=routed)


def compare(
    measured: Logits, oracle: Logits, disturbed: Sequence[Logits], ties: Logits, *, routed: bool = False
) -> GateReport:
    """Returns the report on logits, all [T, V].

    Args:
        measured: the runner's.
        oracle: PyTorch's.
        disturbed: PyTorch's with noise, several times.
        ties: PyTorch's with a number of every product rounded the other way.
        routed: whether experts are chosen per token. Where two experts score alike, noise picks another one and that
            position is far off, here and there at different positions. So the worst position says nothing; the upper
            quartile does, as every fault moves all of them.
    """
    rank = 0.75 if routed else 1.0
    errors = relative_l2(measured, oracle)
    error = np.quantile(errors, rank, method="higher") if np.isfinite(errors).all() else np.inf
    noise, turned = (
        max(float(np.quantile(relative_l2(one, oracle), rank, method="higher")) for one in ones)
        for ones in (disturbed, [ties])
    )
    return GateReport(tuple(errors.tolist()), float(error), max(FACTOR * noise, turned))


class Oracle:
    """A layout with a checkpoint's weights as a quantisation stores them.

    Args:
        layout: what to compute.
        checkpoint: the trained weights.
        quantisation: of the file.

    Attributes:
        model: computes in float32 with the dequantised weights.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
    """

    def __init__(self, layout: Layout, checkpoint: Checkpoint, quantisation: str = QUANTISATIONS[0]) -> None:
        # The head has the table's values in 4 bits, the embedding has them in 8: two tensors.
        self.model = Model(dataclasses.replace(layout, tied=False), seed=None).eval()
        self._state = self.model.state_dict()
        self._rounded_rows: dict[int, int] = {}
        with CheckpointContents(checkpoint.verified()) as contents, torch.no_grad():
            for method in build_chain(layout, quantisation).methods:
                for constant in method.program.constants:
                    if constant.role != "fill":
                        self._fill(method, constant, contents.trained(method, constant))
            for name, tensor in self._state.items():
                if name.endswith(("sinks.weight", "ffn.bias.weight", "rope_short.weight", "rope_long.weight")):
                    tensor.copy_(_floats(contents.vector(name, len(tensor))))
            rows, scales = quantise_rows(contents.table(layout.vocab, layout.d_model))
            self._state["embed.weight"].copy_(torch.from_numpy(rows.astype(np.float32) * scales[:, None]))

    def exact(self, ids: NDArray[np.int64]) -> Logits:
        """Logits [T, V]."""
        return self._logits(ids, round_per_token)

    def with_ties_turned(self, ids: NDArray[np.int64]) -> Logits:
        """Logits [T, V] with, in each product, the activation nearest to a rounding tie rounded the other way."""
        return self._logits(ids, partial(round_per_token, turn_tie=True))

    def _logits(self, ids: NDArray[np.int64], rounding: Rounding) -> Logits:
        with torch.no_grad(), RoundedActivations(self._rounded_rows, rounding):
            logits: Logits = self.model(torch.from_numpy(ids)[None])[0].numpy()
        return logits

    def disturbed(self, ids: NDArray[np.int64], seed: int = 0) -> Logits:
        """Logits [T, V] with noise at the input of each layer, which rounding to 8 bits then makes large."""
        rng = torch.Generator().manual_seed(seed)

        def disturb(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *rest = args
            return (x * (1 + NOISE * torch.randn(x.shape, generator=rng)), *rest)

        hooks = [
            part.register_forward_pre_hook(disturb) for part in self.model.modules() if isinstance(part, ResidualLayer)
        ]
        try:
            return self.exact(ids)
        finally:
            for hook in hooks:
                hook.remove()

    def _fill(self, method: Method, constant: Constant, values: NDArray[np.float32]) -> None:
        name = method.tensor(constant)
        target = self._state["head.weight" if method.program.kind == "head" and constant.role == "int4" else name]
        if constant.role == "int4":
            values = dequantise(*quantise(values, method.program.format))
        if method.expert is not None:
            target[method.expert].copy_(torch.from_numpy(values))
        elif constant.rows is not None:
            target[slice(*constant.rows)].copy_(torch.from_numpy(values))
        elif constant.column is not None:
            target[:, constant.column].copy_(torch.from_numpy(values))
        else:
            target.copy_(torch.from_numpy(values).reshape(target.shape))
        if constant.role == "int4":
            until = constant.rows[1] if constant.rows else constant.shape[0]
            pointer = target.untyped_storage().data_ptr()
            self._rounded_rows[pointer] = max(until, self._rounded_rows.get(pointer, 0))


def rounded_block(layout: Layout, block: Block, quantisation: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a block of `layout` with the values that a file of one of `FORMATS` has."""
    rounded = {name: tensor.detach().float().cpu().clone() for name, tensor in weights.items()}
    for program in programs_of(block, layout.d_model, layout.norms):
        form = program.stored_as(quantisation).format
        for constant in (constant for constant in program.constants if constant.role == "int4"):
            name = constant.source.partition(".")[2].removeprefix("{j}.")
            whole = rounded[name]
            part = whole[slice(*constant.rows)] if constant.rows else whole
            for matrix in part if part.dim() == 3 else (part,):  # of each expert
                matrix.copy_(torch.from_numpy(dequantise(*quantise(matrix.numpy(), form))))
    return rounded


class RoundedActivations(TorchFunctionMode):
    """Inside it, `F.linear` with quantised weights sees activations in 8 bits.

    Args:
        rows: storage pointer of a weight -> how many of its first rows are quantised; others read exact activations.
        rounding: of the activations.
    """

    def __init__(self, rows: Mapping[int, int], rounding: Rounding) -> None:
        super().__init__()
        self._rows, self._rounding = rows, rounding

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Rounds the activations of products, passes every other call on."""
        rounded = self._rows.get(args[1].untyped_storage().data_ptr(), 0) if func is F.linear else 0
        if not rounded:
            return func(*args, **(kwargs or {}))
        x, weight = args
        y = func(self._rounding(x), weight[:rounded])
        return torch.cat([y, func(x, weight[rounded:])], -1) if rounded < len(weight) else y


def round_per_token(x: Tensor, *, turn_tie: bool = False) -> Tensor:
    """Rounds x [..., N] to 8 bits with a scale and zero point per row, as XNNPACK's qd8 and torchao do per token.

    Args:
        x: the activations.
        turn_tie: round the number of each row that is nearest to a tie the other way.
    """
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    nearest = (x / scale).round()
    if turn_tie:
        rest = x / scale - nearest
        at = rest.abs().argmax(-1, keepdim=True)
        nearest = nearest.scatter_add(-1, at, rest.gather(-1, at).sign())
    steps = (nearest + zero).clamp(-128, 127)
    rounded: Tensor = (steps - zero) * scale
    return rounded


def _floats(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, "<f4").copy())
