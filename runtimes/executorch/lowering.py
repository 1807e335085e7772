"""Lowers one program to a .pte whose constants are all outside it.

Private parts of ExecuTorch that this relies on, pinned by the version in pyproject.toml and guarded by a test that
names them:

- `XNNPACKPassManager.passes`: of the passes that XNNPACK runs on every delegate only those are kept that can match in
  these graphs. Each one traces the delegate again; without them lowering costs about half.
- `meta["custom"]["delegate_constant_tag"]` on a node: XNNPACK leaves that constant out of the program.
- inputs of an exported graph of parameters are called "p_...", those for buffers "b_...".
- XNNPACK names a constant by the SHA-256 of its bytes ("scale_" before it for scales), stores 4-bit weights as unsigned
  nibbles, the even column low, and group scales as bfloat16.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.measure.runtimes.executorch.modules import ProgramModule
from nas.measure.runtimes.executorch.programs import CHUNK, Program

KEPT_PASSES = ("ConvertToLinearPass", "DimOrderOpsRevertPass", "ChannelsLastTaggedReshapePass", "Conv1dUnsqueezePass")
TAG = "weights"


def lower(program: Program, module: ProgramModule) -> bytes:
    """Returns the .pte of a filled module.

    Raises:
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: this machine has too little memory or disk.
    """
    inputs, shapes = example_inputs(program)
    with quiet():
        return _lower(module.eval(), inputs, shapes, program.kind)


def example_inputs(program: Program) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Returns inputs to trace with, and their dimensions that vary."""
    d_model = program.size("d_model")
    if not program.chunked:
        return tuple(torch.zeros(1, 1, d_model) for _ in range(program.inputs)), None
    length = torch.export.Dim("S", min=1, max=CHUNK)
    x = tuple(torch.zeros(1, 8, d_model) for _ in range(program.inputs))
    states = tuple(torch.zeros(state_shape(program, i)) for i in range(len(program.states)))
    return (*x, *states), (*({1: length} for _ in x), *(None for _ in states))


def state_shape(program: Program, index: int) -> tuple[int, ...]:
    """Returns the shape of a state; windows have a batch dimension."""
    shape = program.states[index]
    return (1, *shape) if len(shape) == 2 else shape


def module_of(program: Program) -> ProgramModule:
    """Returns the module, its constants yet to be filled."""
    module, _, name = program.module.partition(":")
    instance: ProgramModule = getattr(importlib.import_module(module), name)(program)
    return instance


def quantised(module: ProgramModule) -> ProgramModule:
    """Converts the `nn.Linear`s of `module` to its program's format, in place, and returns it."""
    with quiet():
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup

        form, int4 = module.program.format, getattr(torch, "int4")  # noqa: B009 - torch's stubs do not know it
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4 if form.bits == 4 else torch.int8,
            weight_granularity=PerGroup(form.group) if form.group else PerAxis(0),
        )
        quantize_(module, config, lambda part, name: isinstance(part, nn.Linear))
    return module


@torch.no_grad()
def set_int4(module: ProgramModule, name: str, values: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    """Gives a quantised `nn.Linear` its weights [O, I] and scales [O, scales of a row]."""
    weight = getattr(module, name).weight
    weight.qdata.copy_(torch.from_numpy(values))
    weight.scale.copy_(torch.from_numpy(scales).view(weight.scale.shape))


def _lower(module: nn.Module, inputs: tuple[torch.Tensor, ...], shapes: Any, kind: str) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    with lowering(f"a {kind} program"):
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
        for node in exported.graph.nodes:
            node.meta.setdefault("custom", {})["delegate_constant_tag"] = TAG
        edge = to_edge_transform_and_lower(
            {"forward": exported},
            partitioner={"forward": [XnnpackPartitioner()]},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
        config = ExecutorchBackendConfig(memory_planning_pass=planning, external_constants=_outside)
        lowered = edge.to_executorch(config)
    return bytes(lowered.buffer)


def _outside(node: torch.fx.Node) -> str | None:
    """Returns the file that a constant goes to: parameters are outside the program, buffers (masks) in it."""
    return TAG if node.name.startswith("p_") else None


@contextlib.contextmanager
def lowering(what: str) -> Iterator[None]:
    """Lowers without gradients and by few passes; whatever goes wrong is an error of ours.

    Raises:
        InfrastructureFailed: this machine has too little memory or disk.
        CandidateFailed: it cannot be lowered (export).
    """
    try:
        with torch.no_grad(), few_passes():
            yield
    except (MemoryError, OSError) as error:
        raise InfrastructureFailed(f"this machine cannot lower {what}: {type(error).__name__}: {error}") from error
    except Exception as error:
        # Torch, torchao and ExecuTorch have dozens of error classes without a common one. Whichever it is, this program
        # cannot be had: that concerns the layouts with such a block, and must not end a search over others.
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        raise CandidateFailed("export", f"ExecuTorch cannot lower {what}: {message}") from error


@contextlib.contextmanager
def few_passes() -> Iterator[None]:
    """Restricts XNNPACK's pass manager to `KEPT_PASSES`."""
    from executorch.backends.xnnpack._passes import XNNPACKPassManager

    original = XNNPACKPassManager.__init__

    def start(self: Any, program: Any, passes: Any = None) -> None:
        original(self, program, passes)
        if not passes:
            self.passes = [one for one in self.passes if one.__name__ in KEPT_PASSES]

    XNNPACKPassManager.__init__ = start
    try:
        yield
    finally:
        XNNPACKPassManager.__init__ = original


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what ExecuTorch and torchao say about themselves; what goes wrong is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
