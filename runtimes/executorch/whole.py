"""A layout as one standard .pte, for release: ExecuTorch's own runtime runs it, with the operators of its LLM kernels.

The same program modules as in an artifact, one after another: state lies in buffers of the program, attention is
`llama::update_cache` and `llama::custom_sdpa` with RoPE in the graph, the embedding is in 8 bits, and every expert of a
mixture runs, masked down to the chosen ones. Weights are those that an artifact would hold. Lowering costs minutes at
full size: it grows with the number of layers, since nothing is lowered once for several.

Methods: `forward(tokens [1, S], position [1]) -> logits [1, V]`, and the constants `get_vocab_size`, `get_max_seq_len`
(most tokens a call takes) and `get_max_context_len`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.errors import CandidateFailed, Unsupported
from nas.core.layout import Layout
from nas.runtimes.base import Checkpoint
from nas.runtimes.executorch import support
from nas.runtimes.executorch.chain import Attend, Cache, Chain, Method, Step, build_chain
from nas.runtimes.executorch.checkpoint import CheckpointContents
from nas.runtimes.executorch.lowering import few_passes, module_of, quantised, quiet, set_int4, state_shape
from nas.runtimes.executorch.modules import Attention, ProgramModule
from nas.runtimes.executorch.numbers import quantise_int4, quantise_rows
from nas.runtimes.executorch.programs import CHUNK


def write_whole_graph(layout: Layout, checkpoint: Checkpoint, context: int, destination: Path) -> None:
    """Lowers the whole layout into `destination`.

    Raises:
        Unsupported: ExecuTorch does not carry the layout, or its own attention does not.
        InvalidInput: the checkpoint does not fit the layout.
        CandidateFailed: ExecuTorch cannot lower it (export).
    """
    support.require(layout)
    chain = build_chain(layout)
    if any(cache.window for cache in chain.caches):
        raise Unsupported("a whole graph has no sliding windows: ExecuTorch's own attention sees all tokens")
    with CheckpointContents(checkpoint.path) as contents:
        model = WholeGraph(layout, chain, contents, context)
    destination.write_bytes(_lower(model, layout, context))


class WholeGraph(nn.Module):
    """tokens [1, S], position [1] -> logits [1, V] of the last token.

    Args:
        layout: the layout.
        chain: of it.
        contents: trained weights.
        context: most tokens that caches hold.
    """

    def __init__(self, layout: Layout, chain: Chain, contents: CheckpointContents, context: int) -> None:
        super().__init__()
        self.chain, self.context = chain, context
        self.embed = _embedding(layout, contents)
        self.methods = nn.ModuleList(_filled(method, contents) for method in chain.methods)
        self.steps = nn.ModuleList(self._step(step, contents) for step in chain.steps)
        self.caches = nn.ModuleList(KeyValueCache(cache, context) for cache in chain.caches)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """See the class."""
        length = tokens.shape[1]
        at = position[0].item()
        for fits in (at >= 0, at + length <= self.context):
            torch._check(fits)  # type: ignore[no-untyped-call]
        x = before = self.embed(tokens)
        for step, module in zip(self.chain.steps, self.steps, strict=True):
            source = before if step.parallel else x
            before = source
            x = module(self, source, x, at)
        logits: Tensor = self.methods[-1](x.narrow(1, length - 1, 1))[0]
        return logits[:, 0]

    def _step(self, step: Step, contents: CheckpointContents) -> nn.Module:
        method = self.chain.methods[step.method]
        if step.moe is not None:
            experts = step.moe.int("experts")
            bias = np.frombuffer(contents.vector(f"{method.prefix}ffn.bias.weight", experts), "<f4").copy()
            return MixtureStep(step, torch.from_numpy(bias))
        if step.attend is not None:
            return AttentionStep(step.method, step.attend, method.program.size("head_dim"), self.context)
        return PlainStep(step.method, [state_shape(method.program, i) for i in range(len(method.program.states))])


class PlainStep(nn.Module):
    """A program whose state lies in buffers."""

    def __init__(self, method: int, states: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.method, self.count = method, len(states)
        for i, shape in enumerate(states):
            self.register_buffer(f"state{i}", torch.zeros(shape))

    def forward(self, model: WholeGraph, x: Tensor, residual: Tensor, at: int) -> Tensor:
        """The residual stream after the step."""
        program = model.methods[self.method]
        if not self.count:
            y: Tensor = program(x)[0]
            return y
        states = [getattr(self, f"state{i}") for i in range(self.count)]
        y, *after = program(x, residual, *states)
        for state, new in zip(states, after, strict=True):
            state.copy_(new)
        return y


class KeyValueCache(nn.Module):
    """Keys and values [1, context, KV, head_dim]."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: Cache, context: int) -> None:
        super().__init__()
        shape = (1, context, cache.kv_heads, cache.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))


class AttentionStep(nn.Module):
    """Attention over a cache in the graph."""

    def __init__(self, method: int, attend: Attend, head_dim: int, context: int) -> None:
        super().__init__()
        self.method, self.attend = method, attend
        if attend.theta:
            cosines, sines = rope_table(attend.theta, head_dim, context)
            self.register_buffer("cosines", cosines)
            self.register_buffer("sines", sines)

    def forward(self, model: WholeGraph, x: Tensor, residual: Tensor, at: int) -> Tensor:
        """The residual stream after the step."""
        program, cache = model.methods[self.method], model.caches[self.attend.cache]
        assert isinstance(program, Attention) and isinstance(cache, KeyValueCache)
        h = program.norm(x)
        q = self._turned(program.heads(h, "q"), at)
        if program.program.size("own"):
            torch.ops.llama.update_cache(self._turned(program.heads(h, "k"), at), cache.keys, at)
            torch.ops.llama.update_cache(program.heads(h, "v"), cache.values, at)
        mixed = torch.ops.llama.custom_sdpa(q, cache.keys, cache.values, at, None, 0.0, True)
        return residual + program.linear("o", mixed.view(1, q.shape[1], q.shape[2] * q.shape[3]))

    def _turned(self, x: Tensor, at: int) -> Tensor:
        if not self.attend.theta:
            return x
        cos, sin = (
            table.narrow(0, at, x.shape[1])[None, :, None]
            for table in (self.get_buffer("cosines"), self.get_buffer("sines"))
        )
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MixtureStep(nn.Module):
    """Every expert for every token; those that were not chosen have weight zero."""

    def __init__(self, step: Step, bias: Tensor) -> None:
        super().__init__()
        assert step.moe is not None
        self.method, self.experts, self.top_k = step.method, step.moe.int("experts"), step.moe.int("top_k")
        self.register_buffer("bias", bias)

    def forward(self, model: WholeGraph, x: Tensor, residual: Tensor, at: int) -> Tensor:
        """The residual stream after the step."""
        h, logits = model.methods[self.method](x)
        scores = torch.sigmoid(logits)
        chosen = torch.topk(scores + self.get_buffer("bias"), self.top_k, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        weights = kept / (kept.sum(-1, keepdim=True) + 1e-6)
        y = residual
        for e in range(self.experts):
            y = y + model.methods[self.method + 1 + e](h)[0] * weights.narrow(-1, e, 1)
        return y


def rope_table(theta: float, head_dim: int, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, head_dim / 2]: those of the runner, number for number."""
    half = head_dim // 2
    frequencies = (theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)
    angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def _filled(method: Method, contents: CheckpointContents) -> ProgramModule:
    module = module_of(method.program)
    quantised(module)
    with torch.no_grad():
        for constant in method.program.constants:
            if constant.role == "int4":
                set_int4(module, constant.name, *quantise_int4(contents.floats(method, constant)))
            else:
                (content,) = contents.constant(method, constant)
                filled = np.frombuffer(content, "<f4").reshape(constant.shape).copy()
                getattr(module, constant.name).copy_(torch.from_numpy(filled))
    return module


def _embedding(layout: Layout, contents: CheckpointContents) -> nn.Embedding:
    with quiet():
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis

        embed = nn.Embedding(layout.vocab, layout.d_model)
        config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        holder = nn.Sequential(embed)
        quantize_(holder, config, lambda part, name: isinstance(part, nn.Embedding))
    rows, scales = quantise_rows(contents.table(layout.vocab, layout.d_model))
    with torch.no_grad():
        weight: Any = embed.weight
        weight.qdata.copy_(torch.from_numpy(rows))
        weight.scale.copy_(torch.from_numpy(scales).reshape(weight.scale.shape))
    return embed


def _lower(model: WholeGraph, layout: Layout, context: int) -> bytes:
    with quiet():
        import executorch.extension.llm.custom_ops.custom_ops
        import executorch.kernels.quantized  # noqa: F401 - registers the 8-bit embedding
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.passes import MemoryPlanningPass

        length = torch.export.Dim("S", min=1, max=CHUNK)
        inputs = (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        constants = {
            "get_vocab_size": layout.vocab,
            "get_max_seq_len": CHUNK,
            "get_max_context_len": context,
        }
        try:
            with torch.no_grad(), few_passes():
                exported = torch.export.export(model.eval(), inputs, dynamic_shapes=({1: length}, None), strict=False)
                edge = to_edge_transform_and_lower(
                    {"forward": exported},
                    partitioner={"forward": [XnnpackPartitioner()]},
                    compile_config=EdgeCompileConfig(_check_ir_validity=False),
                    constant_methods=constants,
                )
                lowered = edge.to_executorch(
                    ExecutorchBackendConfig(
                        do_quant_fusion_and_const_prop=True,
                        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                    )
                )
        except (RuntimeError, ValueError, AssertionError, TypeError, KeyError, NotImplementedError) as error:
            raise CandidateFailed("export", f"ExecuTorch cannot lower the whole graph: {error}") from error
        return bytes(lowered.buffer)
