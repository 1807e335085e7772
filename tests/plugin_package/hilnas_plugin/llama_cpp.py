"""The same for llama.cpp: the tensors of a file; what computes them is in s4d.patch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nas.core.block import Block
from nas.measure.runtimes.llama_cpp.kinds import GgufKind, Part, argument


def _s4d(block: Block, d_model: int) -> Iterator[Part]:
    states = block.int("state")
    yield Part("ssm_a", (d_model, states), "A_log", "decay")
    yield Part("ssm_x.weight", (d_model, states), "C", "conv")
    yield Part("ssm_dt.bias", (d_model,), "dt_bias", "bias")
    yield Part("ssm_d", (d_model,), "D", "norm")
    yield Part("attn_gate.weight", (d_model, d_model), "gate.weight")
    yield Part("ssm_out.weight", (d_model, d_model), "out.weight")


S4D = GgufKind(
    _s4d,
    (("ssm.state_size", argument("state")),),
    not_stock="S4D layers are in no stock architecture",
    patch=Path(__file__).with_name("s4d.patch"),
)
