"""The same for ExecuTorch: programs without torch; their modules are in `hilnas_plugin.executorch_modules`."""

from __future__ import annotations

from nas.core.block import Block
from nas.runtimes.executorch.kinds import ExecuTorchKind
from nas.runtimes.executorch.programs import Constant, Program, norm_constants

_MODULES = "hilnas_plugin.executorch_modules"


def _sqrelu(block: Block, d_model: int) -> tuple[Program, ...]:
    width = block.int("width")
    constants = (
        *norm_constants("norm", d_model, "ffn_norm.weight"),
        Constant("up", (width, d_model), "int4", "ffn.up.weight"),
        Constant("down", (d_model, width), "int4", "ffn.down.weight"),
    )
    sizes = (("d_model", d_model), ("width", width))
    return (Program("sqrelu", f"{_MODULES}:SquaredReLU", sizes, constants, inputs=1),)


def _decay(block: Block, d_model: int) -> tuple[Program, ...]:
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        Constant("value", (d_model, d_model), "int4", "mixers.{j}.value.weight"),
        Constant("out", (d_model, d_model), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model),)
    return (Program("decay", f"{_MODULES}:DecayingSum", sizes, constants, ((1, d_model),)),)


SQRELU, DECAY = ExecuTorchKind(_sqrelu), ExecuTorchKind(_decay)
