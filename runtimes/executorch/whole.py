"""A layout as one standard .pte, for release: ExecuTorch's own runtime runs it, with the operators of its LLM kernels.

The same program modules as in an artifact, one after another, on the same weights: state is in buffers of the
program, attention is ExecuTorch's own with RoPE in the graph, the embedding is in 8 bits, and every expert of a mixture
runs, masked down to the chosen ones. Lowering costs minutes at full size: it grows with the number of layers, since
nothing is lowered once for several. docs/how-to/releasing-a-model.md describes how an app calls the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.measure.runtimes.base import Checkpoint, Weights
from nas.measure.runtimes.executorch.chain import Attend, Cache, Chain, Method, Step, build_chain, require
from nas.measure.runtimes.executorch.contents import CheckpointContents, Contents, DrawnContents, decoded
from nas.measure.runtimes.executorch.kinds import KINDS
from nas.measure.runtimes.executorch.lowering import lowering, module_of, quantised, quiet, set_int4, state_shape
from nas.measure.runtimes.executorch.modules import Attention, ProgramModule
from nas.measure.runtimes.executorch.programs import CHUNK, Program
from nas.measure.runtimes.writing import hashed, replacing
from nas.model.nn.primitives import bounded

LEAST_CONTEXT = 16
_NEVER = -1e30
"""Added to scores by masks: less than any score, but finite, because infinity minus infinity is not a number."""


def write_whole_graph(layout: Layout, weights: Weights, context: int, destination: Path, quantisation: str) -> PlanFile:
    """Lowers the whole layout, for texts of at most `context` tokens, into the .pte `destination`.

    Raises:
        Unsupported: ExecuTorch does not carry the layout, or its own attention does not.
        InvalidInput: the checkpoint does not fit the layout.
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: the file cannot be written, or memory or disk run out.
    """
    require(layout)
    chain = build_chain(layout, quantisation)
    for step in chain.steps:
        if step.attend and (step.attend.sinks or step.attend.about.softcap):
            raise Unsupported(
                "a whole graph has neither attention sinks nor bounded scores: ExecuTorch's own attention has none;"
                " leave sink and softcap out"
            )
        if step.attend and step.attend.about.long:
            raise Unsupported("a whole graph has one table of positions: leave rope_long out")
    for kind in {block.kind for layer in layout.layers for block in layer.blocks}:
        if not KINDS[kind].stock:
            raise Unsupported(
                f"a whole graph has no {kind} blocks: only our runner has the operator that computes them"
            )
    if context < LEAST_CONTEXT:
        raise Unsupported(f"a context of {context} tokens is too short: {LEAST_CONTEXT} is the least")
    with _opened(weights) as contents:
        model = WholeGraph(layout, chain, contents, context)
    content = _lower(model, layout, context)
    with replacing(destination) as partial:
        return hashed([content], partial)


@contextlib.contextmanager
def _opened(weights: Weights) -> Iterator[Contents[bytes]]:
    if isinstance(weights, Checkpoint):
        with CheckpointContents(weights.verified()) as contents:
            yield contents
    else:
        yield DrawnContents(weights.seed)


Turn = tuple[float, int, tuple[float, ...]]


@dataclass(frozen=True)
class Moment:
    """Values that all steps of one call share.

    Args:
        at: position of the first token.
        begins: [1], whether that is the first of a text.
        turns: cosines and sines [1, S, 1, half of what turns] by RoPE base, numbers that turn, and divisors of angles.
        windows: rows to write [1, S] and masks [S, R] by window.
    """

    at: int
    begins: Tensor
    turns: dict[Turn, tuple[Tensor, Tensor]]
    windows: dict[int, tuple[Tensor, Tensor]]


class Rope(nn.Module):
    """Cosines and sines of RoPE: those of the runner, number for number."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, theta: float, turned: int, divisors: tuple[float, ...], context: int) -> None:
        super().__init__()
        half = turned // 2
        frequencies = (theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)
        frequencies /= np.array(divisors or (1.0,), np.float32)
        angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        self.register_buffer("cosines", torch.from_numpy(np.cos(angles).astype(np.float32)))
        self.register_buffer("sines", torch.from_numpy(np.sin(angles).astype(np.float32)))

    def forward(self, at: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cosines.narrow(0, at, length)[None, :, None], self.sines.narrow(0, at, length)[None, :, None]


class Window(nn.Module):
    """The rows that a token sees of a ring buffer.

    Row r of R holds the newest token whose position is r modulo R. A window of W tokens needs R = W - 1 + CHUNK rows:
    the first token of a chunk still sees W - 1 before it when the last has been written.
    """

    rows: Tensor
    steps: Tensor

    def __init__(self, window: int, rows: int) -> None:
        super().__init__()
        self.window, self.count = window, rows
        self.register_buffer("rows", torch.arange(rows))
        self.register_buffer("steps", torch.arange(CHUNK))

    def forward(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        positions = self.steps.narrow(0, 0, length) + position
        last = position + (length - 1)
        held = last - torch.remainder(last - self.rows, self.count)  # positions by row; negative: none yet
        ago = positions.unsqueeze(1) - held.unsqueeze(0)
        sees = torch.logical_and(torch.logical_and(ago >= 0, ago < self.window), held >= 0)
        return torch.remainder(positions, self.count).unsqueeze(0), torch.where(sees, 0.0, _NEVER)


class KeyValueCache(nn.Module):
    """Keys and values [1, R, KV, head_dim]; R tokens of context, or what `Window` says."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: Cache, context: int) -> None:
        super().__init__()
        self.window = cache.window if cache.window < context else 0
        self.count = min(context, self.window - 1 + CHUNK) if self.window else context
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.count, cache.kv_heads, cache.head_dim))

    def append(self, keys: Tensor, values: Tensor, moment: Moment) -> None:
        """Writes what a chunk adds, [1, S, KV, head_dim] each."""
        for new, rows in ((keys, self.keys), (values, self.values)):
            if self.window:
                torch.ops.llama.update_cache_with_indices(new, rows, 0, moment.windows[self.window][0])
            else:
                torch.ops.llama.update_cache(new, rows, moment.at)

    def attend(self, q: Tensor, moment: Moment) -> Tensor:
        """Maps q [1, S, H, head_dim] to the same shape."""
        mask = moment.windows[self.window][1] if self.window else None
        mixed: Tensor = torch.ops.llama.custom_sdpa(q, self.keys, self.values, moment.at, mask, 0.0, mask is None)
        return mixed


class StatefulStep(nn.Module):
    """A program whose states are in buffers."""

    def __init__(self, program: ProgramModule) -> None:
        super().__init__()
        self.count = len(program.program.states)
        for i in range(self.count):
            self.register_buffer(f"state{i}", torch.zeros(state_shape(program.program, i)))

    def before(self, moment: Moment) -> tuple[Tensor, ...]:
        """Returns the states before the chunk: zeros where a text begins."""
        states = (self.get_buffer(f"state{i}") for i in range(self.count))
        return tuple(torch.where(moment.begins, 0.0, state) for state in states)

    def keep(self, after: Sequence[Tensor]) -> None:
        """Writes the states after the chunk."""
        for i, new in enumerate(after):
            self.get_buffer(f"state{i}").copy_(new)


class PlainStep(StatefulStep):
    """A program without attention."""

    def __init__(self, program: ProgramModule) -> None:
        super().__init__(program)
        self.held = (program,)

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """Returns the residual stream after the step."""
        (program,) = self.held
        inputs = (x, residual)[: program.program.inputs]
        y: Tensor
        y, *after = program(*inputs, *self.before(moment))
        self.keep(after)
        return y


class AttentionStep(StatefulStep):
    """Attention over a cache in the graph."""

    def __init__(self, program: Attention, attend: Attend, cache: KeyValueCache) -> None:
        super().__init__(program)
        self.held = (program, cache)
        self.turn = _turn(attend, program.program)

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """Returns the residual stream after the step."""
        program, cache = self.held
        h, after = program.mixed_in(program.into(x), *(self.before(moment) or (None,)))
        self.keep(after)
        q = self._turned(program.heads(h, "q"), moment)
        if program.program.size("own"):
            cache.append(self._turned(program.heads(h, "k"), moment), program.heads(h, "v"), moment)
        mixed = cache.attend(q, moment)
        return program.output(residual, mixed.view(1, q.shape[1], q.shape[2] * q.shape[3]), h)

    def _turned(self, x: Tensor, moment: Moment) -> Tensor:
        if self.turn is None:
            return x
        cos, sin = moment.turns[self.turn]
        turned = self.turn[1]
        first, second = x[..., : turned // 2], x[..., turned // 2 : turned]
        rest = [x[..., turned:]] if turned < x.shape[-1] else []
        return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], -1)


class MixtureStep(nn.Module):
    """Every expert for every token; those that were not chosen have weight zero."""

    bias: Tensor

    def __init__(self, router: ProgramModule, experts: Sequence[ProgramModule], moe: Block, bias: Tensor) -> None:
        super().__init__()
        self.held, self.top_k = (router, *experts), moe.int("top_k")
        self.softmax, self.normed = bool(moe.get("softmax")), bool(moe.get("norm_topk"))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """Returns the residual stream after the step."""
        router, *experts = self.held
        h, logits = router(x)
        scores = torch.softmax(logits, -1) if self.softmax else torch.sigmoid(logits)
        chosen = torch.topk(scores + self.bias, self.top_k, -1).indices
        chosen_scores = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        weights = chosen_scores
        if self.normed:
            weights = chosen_scores / (chosen_scores.sum(-1, keepdim=True) + (0.0 if self.softmax else 1e-6))
        y = residual
        for e, expert in enumerate(experts):
            y = y + expert(h)[0] * weights.narrow(-1, e, 1)
        return y


class WholeGraph(nn.Module):
    """tokens [1, S], position [1] -> logits [1, V] of the last token.

    Args:
        layout: the layout.
        chain: of it.
        contents: the weights.
        context: most tokens that caches hold.
    """

    def __init__(self, layout: Layout, chain: Chain, contents: Contents[bytes], context: int) -> None:
        super().__init__()
        self.context, self.parallel = context, [step.parallel for step in chain.steps]
        self.embed = _embedding(layout, contents)
        methods = [_filled(method, contents) for method in chain.methods]
        caches = [KeyValueCache(cache, context) for cache in chain.caches]
        self.methods, self.caches = nn.ModuleList(methods), nn.ModuleList(caches)
        rows = {cache.window: cache.count for cache in caches if cache.window}
        self.lengths, self.windows = list(rows), nn.ModuleList(Window(*one) for one in rows.items())
        self.softcap = layout.softcap
        attends = [(step.attend, chain.methods[step.method].program) for step in chain.steps if step.attend]
        self.turns = list(dict.fromkeys(turn for attend in attends if (turn := _turn(*attend))))
        self.ropes = nn.ModuleList(Rope(*turn, context) for turn in self.turns)
        self.steps = nn.ModuleList(_step(step, chain, methods, caches, contents) for step in chain.steps)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        moment = self._moment(tokens.shape[1], position)
        x = before = self.embed(tokens)
        for step, parallel in zip(self.steps, self.parallel, strict=True):
            before = source = before if parallel else x
            x = step(source, x, moment)
        logits: Tensor = self.methods[-1](x.narrow(1, tokens.shape[1] - 1, 1))[0]
        return bounded(logits[:, 0], self.softcap)

    def _moment(self, length: int, position: Tensor) -> Moment:
        at: Any = position[0].item()
        for fits in (at >= 0, at + length <= self.context):
            torch._check(fits)  # type: ignore[no-untyped-call]
        turns = {turn: rope(at, length) for turn, rope in zip(self.turns, self.ropes, strict=True)}
        windows = {window: sees(position, length) for window, sees in zip(self.lengths, self.windows, strict=True)}
        return Moment(at, position == 0, turns, windows)


def _turn(attend: Attend, program: Program) -> Turn | None:
    about = attend.about
    return (about.theta, about.turned or program.size("head_dim"), about.divisors) if about.theta else None


def _step(
    step: Step, chain: Chain, methods: list[ProgramModule], caches: list[KeyValueCache], contents: Contents[bytes]
) -> nn.Module:
    method = methods[step.method]
    if step.moe is not None:
        experts = step.moe.int("experts")
        bias = contents.vector(f"{chain.methods[step.method].prefix}ffn.bias.weight", experts)
        return MixtureStep(method, methods[step.method + 1 : step.method + 1 + experts], step.moe, _floats(bias))
    if step.attend is not None:
        assert isinstance(method, Attention)
        return AttentionStep(method, step.attend, caches[step.attend.cache])
    return PlainStep(method)


def _filled(method: Method, contents: Contents[bytes]) -> ProgramModule:
    module = quantised(module_of(method.program))
    with torch.no_grad():
        for constant in method.program.constants:
            parts = contents.constant(method, constant)
            if constant.role == "int4":
                set_int4(module, constant.name, *decoded(parts, constant.shape, method.program.format))
            else:
                module.number(constant.name).copy_(_floats(parts[0]).view(constant.shape))
    return module


def _embedding(layout: Layout, contents: Contents[bytes]) -> nn.Embedding:
    with quiet():
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis

        embed = nn.Embedding(layout.vocab, layout.d_model, _weight=torch.zeros(layout.vocab, layout.d_model))
        config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        quantize_(nn.Sequential(embed), config, lambda part, name: isinstance(part, nn.Embedding))
    rows, scales = contents.embedding(layout.vocab, layout.d_model)
    with torch.no_grad():
        weight: Any = embed.weight
        weight.qdata.copy_(torch.frombuffer(bytearray(rows), dtype=torch.int8).view(weight.qdata.shape))
        weight.scale.copy_(_floats(scales).view(weight.scale.shape))
    return embed


def _floats(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, "<f4").copy())


def _lower(model: WholeGraph, layout: Layout, context: int) -> bytes:
    with quiet():
        import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401 - registers attention
        import executorch.kernels.quantized  # noqa: F401 - registers the 8-bit embedding
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.passes import MemoryPlanningPass

        length = torch.export.Dim("S", min=1, max=min(CHUNK, context))
        inputs = (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        with lowering("the whole graph"):
            exported = torch.export.export(model.eval(), inputs, dynamic_shapes=({1: length}, None), strict=False)
            edge = to_edge_transform_and_lower(
                {"forward": exported},
                partitioner={"forward": [XnnpackPartitioner()]},
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
                constant_methods=_constant_methods(layout, context),
            )
            lowered = edge.to_executorch(
                ExecutorchBackendConfig(
                    do_quant_fusion_and_const_prop=True,
                    memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                )
            )
        return bytes(lowered.buffer)


def _constant_methods(layout: Layout, context: int) -> dict[str, Any]:
    """Returns the file's metadata, under the names that ExecuTorch's own LLM runner asks for."""
    return {
        "get_vocab_size": layout.vocab,
        "get_max_seq_len": min(CHUNK, context),
        "get_max_context_len": context,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }
