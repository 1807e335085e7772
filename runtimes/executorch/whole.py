"""A layout as one standard .pte, for release: ExecuTorch's own runtime runs it, with the operators of its LLM kernels.

The same program modules as in an artifact, one after another, on the same weights: state lies in buffers of the
program, attention is ExecuTorch's own with RoPE in the graph, the embedding is in 8 bits, and every expert of a mixture
runs, masked down to the chosen ones. Lowering costs minutes at full size: it grows with the number of layers, since
nothing is lowered once for several. docs/releasing-a-model.md tells an app's developer how to call the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.errors import CandidateFailed, Unsupported
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.runtimes.base import Checkpoint, Weights
from nas.runtimes.executorch import support
from nas.runtimes.executorch.chain import Chain, Method, Step, build_chain
from nas.runtimes.executorch.checkpoint import CheckpointContents
from nas.runtimes.executorch.contents import Contents
from nas.runtimes.executorch.lowering import few_passes, module_of, quantised, quiet, set_int4
from nas.runtimes.executorch.modules import Attention, ProgramModule
from nas.runtimes.executorch.numbers import bfloat16_floats, unpack_int4
from nas.runtimes.executorch.programs import CHUNK, GROUP
from nas.runtimes.executorch.random_weights import DrawnContents
from nas.runtimes.executorch.whole_steps import (
    AttentionStep,
    KeyValueCache,
    MixtureStep,
    Moment,
    PlainStep,
    Rope,
    Window,
)
from nas.runtimes.writing import hashed, replacing

LEAST_CONTEXT = 16


def write_whole_graph(layout: Layout, weights: Weights, context: int, destination: Path) -> PlanFile:
    """Lowers the whole layout into `destination`.

    Args:
        layout: what to lower.
        weights: random or trained.
        context: most tokens of a text.
        destination: the .pte.

    Returns:
        Its hash and size.

    Raises:
        Unsupported: ExecuTorch does not carry the layout, or its own attention does not.
        InvalidInput: the checkpoint does not fit the layout.
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: the file cannot be written.
    """
    support.require(layout)
    chain = build_chain(layout)
    if any(step.attend and step.attend.sinks for step in chain.steps):
        raise Unsupported("a whole graph has no attention sinks: ExecuTorch's own attention has none; leave sink=1 out")
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
        with CheckpointContents(weights.path) as contents:
            yield contents
    else:
        yield DrawnContents(weights.seed)


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
        self.turns = list(dict.fromkeys(turn for step in chain.steps if (turn := _turn(step, chain))))
        self.ropes = nn.ModuleList(Rope(theta, head_dim, context) for theta, head_dim in self.turns)
        self.steps = nn.ModuleList(_step(step, chain, methods, caches, contents) for step in chain.steps)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """See the class."""
        moment = self._moment(tokens.shape[1], position)
        x = before = self.embed(tokens)
        for step, parallel in zip(self.steps, self.parallel, strict=True):
            before = source = before if parallel else x
            x = step(source, x, moment)
        logits: Tensor = self.methods[-1](x.narrow(1, tokens.shape[1] - 1, 1))[0]
        return logits[:, 0]

    def _moment(self, length: int, position: Tensor) -> Moment:
        at: Any = position[0].item()
        for fits in (at >= 0, at + length <= self.context):
            torch._check(fits)  # type: ignore[no-untyped-call]
        turns = {turn: rope(at, length) for turn, rope in zip(self.turns, self.ropes, strict=True)}
        seen = {window: sees(position, length) for window, sees in zip(self.lengths, self.windows, strict=True)}
        return Moment(at, position == 0, turns, seen)


def _turn(step: Step, chain: Chain) -> tuple[float, int] | None:
    if step.attend is None or not step.attend.theta:
        return None
    return step.attend.theta, chain.methods[step.method].program.size("head_dim")


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
                outputs, inputs = constant.shape
                scales = bfloat16_floats(parts[1]).reshape(outputs, inputs // GROUP)
                set_int4(module, constant.name, unpack_int4(parts[0]).reshape(constant.shape), scales)
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
        import executorch.extension.llm.custom_ops.custom_ops
        import executorch.kernels.quantized  # noqa: F401 - registers the 8-bit embedding
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.passes import MemoryPlanningPass

        length = torch.export.Dim("S", min=1, max=min(CHUNK, context))
        inputs = (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        try:
            with torch.no_grad(), few_passes():
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
        except (RuntimeError, ValueError, AssertionError, TypeError, KeyError) as error:
            raise CandidateFailed("export", f"ExecuTorch cannot lower the whole graph: {error}") from error
        return bytes(lowered.buffer)


def _constant_methods(layout: Layout, context: int) -> dict[str, Any]:
    """What the file says of itself, under the names that ExecuTorch's own LLM runner asks for."""
    return {
        "get_vocab_size": layout.vocab,
        "get_max_seq_len": min(CHUNK, context),
        "get_max_context_len": context,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }
