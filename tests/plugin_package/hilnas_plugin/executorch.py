"""The same for ExecuTorch: programs without torch; their modules are in `hilnas_plugin.executorch_modules`."""

from __future__ import annotations

from nas.core.block import Block
from nas.measure.runtimes.executorch.kinds import ExecuTorchKind
from nas.measure.runtimes.executorch.programs import Constant, Program, norm_constants

_MODULES = "hilnas_plugin.executorch_modules"


def _s4d(block: Block, d_model: int) -> tuple[Program, ...]:
    states = block.int("state")
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        Constant("rate", (d_model, states), "decay", "mixers.{j}.A_log"),
        Constant("step", (d_model, 1), "bias", "mixers.{j}.dt_bias"),
        Constant("read", (d_model, states), "matrix", "mixers.{j}.C"),
        Constant("skip", (d_model,), "norm", "mixers.{j}.D"),
        Constant("one", (1,), "fill", value=1.0),
        Constant("gate", (d_model, d_model), "int4", "mixers.{j}.gate.weight"),
        Constant("out", (d_model, d_model), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model), ("state", states))
    return (Program("s4d", f"{_MODULES}:S4D", sizes, constants, ((d_model, states, 1),)),)


def _reglu(block: Block, d_model: int) -> tuple[Program, ...]:
    width = block.int("width")
    constants = (
        *norm_constants("norm", d_model, "ffn_norm.weight"),
        Constant("gate", (width, d_model), "int4", "ffn.gate.weight"),
        Constant("up", (width, d_model), "int4", "ffn.up.weight"),
        Constant("down", (d_model, width), "int4", "ffn.down.weight"),
    )
    sizes = (("d_model", d_model), ("width", width))
    return (Program("reglu", f"{_MODULES}:ReGLU", sizes, constants, inputs=1),)


S4D, REGLU = ExecuTorchKind(_s4d, stock=False), ExecuTorchKind(_reglu)
