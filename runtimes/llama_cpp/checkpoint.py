"""A state dict of `nas.nn.model`, as the tensors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.runtimes.checkpoint_file import StateDict
from nas.runtimes.llama_cpp.builds import find_build
from nas.runtimes.llama_cpp.ggml import Quantiser
from nas.runtimes.llama_cpp.tensors import Tensor, stored_bytes

_NAMES = {
    "attn_norm": "mixer_norm.weight",
    "attn_q": "mixers.0.q.weight",
    "attn_k": "mixers.0.k.weight",
    "attn_v": "mixers.0.v.weight",
    "attn_output": "mixers.0.o.weight",
    "attn_q_norm": "mixers.0.q_norm.weight",
    "attn_k_norm": "mixers.0.k_norm.weight",
    "attn_sinks": "mixers.0.sinks.weight",
    "shortconv.conv": "mixers.0.conv.weight",
    "shortconv.in_proj": "mixers.0.in_proj.weight",
    "shortconv.out_proj": "mixers.0.out.weight",
    "ssm_in": "mixers.0.in_proj.weight",
    "ssm_conv1d": "mixers.0.conv.weight",
    "ssm_conv1d.bias": "mixers.0.conv.bias",
    "ssm_dt.bias": "mixers.0.dt_bias",
    "ssm_a": "mixers.0.A_log",
    "ssm_d": "mixers.0.D",
    "ssm_norm": "mixers.0.norm.weight",
    "ssm_out": "mixers.0.out.weight",
    "ffn_norm": "ffn_norm.weight",
    "ffn_gate": "ffn.gate.weight",
    "ffn_up": "ffn.up.weight",
    "ffn_down": "ffn.down.weight",
    "ffn_gate_inp": "ffn.router.weight",
    "exp_probs_b.bias": "ffn.bias.weight",
    "ffn_gate_exps": "ffn.gate.weight",
    "ffn_up_exps": "ffn.up.weight",
    "ffn_down_exps": "ffn.down.weight",
    "token_embd": "embed.weight",
    "token_embd_norm": "norm.weight",
    "output_norm": "norm.weight",
    "output": "head.weight",
}
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


def state_dict_name(tensor: Tensor) -> str:
    """What `nas.nn.model` calls the tensor."""
    prefix = "" if tensor.layer is None else f"layers.{tensor.layer}."
    return prefix + _NAMES[tensor.part]


def state_dict_shape(tensor: Tensor) -> tuple[int, ...]:
    """Its shape there; GGUF gives some vectors of Mamba-2 two dimensions."""
    return (math.prod(tensor.shape),) if tensor.part in ("ssm_a", "ssm_d", "ssm_norm") else tensor.shape


class CheckpointTensors:
    """Contents for tensors, from a state dict.

    Args:
        state: an open checkpoint, most often.
    """

    def __init__(self, state: StateDict) -> None:
        self._state = state
        self._quantiser: Quantiser | None = None

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Refuses a checkpoint of another layout before anything is written.

        Raises:
            InvalidInput: a tensor is missing, left over, or of another shape.
        """
        wanted = {state_dict_name(tensor): state_dict_shape(tensor) for tensor in tensors}
        if difference := sorted(self._state.names ^ wanted.keys()):
            state = "lacks" if difference[0] in wanted else "has, but the layout has not,"
            raise InvalidInput(f"checkpoint {state} {difference[0]}", where=self._state.place)
        for name, shape in wanted.items():
            if (found := self._state.shape(name)) != shape:
                raise InvalidInput(f"{name} has shape {found}, the layout needs {shape}", where=self._state.place)

    def data(self, tensor: Tensor, storage: GGMLQuantizationType) -> NDArray[np.uint8]:
        """The bytes of `tensor`, shape [stored bytes].

        Raises:
            InvalidInput: values that are no float16 or float32, or not finite.
        """
        values = self._state.floats(state_dict_name(tensor))
        if tensor.role == "decay":
            values = -np.exp(values)  # GGUF stores A, the state dict its logarithm
        if storage in _PLAIN:
            return np.ascontiguousarray(values, _PLAIN[storage]).reshape(-1).view(np.uint8)
        self._quantiser = self._quantiser or Quantiser(find_build(patched=None).folder)
        return self._quantiser.quantise(values, storage, stored_bytes(tensor.shape, storage))
