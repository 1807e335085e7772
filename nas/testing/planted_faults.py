"""Faults that an equivalence gate must detect, as edits of exported layouts and weights, for any runtime.

A file is exported with the fault and compared with the layout and the weights without it. `checkpoint` draws weights
that make every fault visible.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights

State = dict[str, Tensor]
"""A state dict of `nas.model.nn.model`, to be edited in place."""

Edit = Callable[[State], None]


def unchanged(state: State) -> None:
    """Changes nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake of an exporter, a graph or a runner.

    Args:
        name: shown in test ids.
        weights: edits the exported weights.
        layout: a part of the exported layout's text, and its replacement.
        earlier: tokens of an earlier text that the runner forgets to clear from its memory.
        choice_only: whether it changes only which experts are chosen.
    """

    name: str
    weights: Edit = unchanged
    layout: tuple[str, str] = ("", "")
    earlier: int = 0
    choice_only: bool = False

    def exported(self, right: Layout) -> Layout:
        """Returns the layout that is exported in place of `right`."""
        return Layout.parse(right.format().replace(*self.layout)) if self.layout[0] else right


RIGHT = Fault("none")


def checkpoint(layout: Layout, path: Path, edit: Edit = unchanged) -> Checkpoint:
    """Writes fresh weights to `path`; norms and biases differ from one and zero, so that a missing one is visible.

    A tensor's values depend on its name and shape alone, so layouts that differ in one block share all other weights.
    """
    model = Model(layout, seed=1)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, weight in state.items():
        key = name[name.index(".rope_") :] if ".rope_" in name else name  # of all layers the same, as files have it
        drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
        if "norm" in name or name.endswith(".D"):
            weight.copy_(0.5 + drawn)
        elif name.endswith(("conv.bias", ".q.bias", ".k.bias", ".v.bias", "dt_bias", "decay_bias", "gate_bias")):
            weight.add_(2 * drawn - 1)
        elif name.endswith("sinks.weight"):  # against the scores of a whole window
            weight.add_(2 * drawn + 1)
        elif ".rope_" in name:
            weight.add_(4 * drawn)
        elif name.endswith("A_log"):  # slower decays: an earlier text is still remembered behind the prompt
            weight.sub_(2)
            if f"{name.removesuffix('A_log')}A_imag" in state:  # of S4 and S5, whose rates all start alike
                weight.add_(3 * drawn)
        elif name.endswith("ffn.bias.weight"):  # added to scores between 0 and 1
            weight.add_(0.6 * drawn - 0.3)
    edit(state)
    save_weights(model, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


PLANTED = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A8/4 C3 A8/4 C5]")
"""A layout for `FAULTS`."""
PLANTED_MOE = Layout.parse("d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]")
"""A layout for `MOE_FAULTS`."""
PLANTED_WINDOWS = Layout.parse("d256 v512 ffn=swiglu:512 [C3 W4/2@8(sink=1) C5 W4/2@8(sink=1)]")
"""A layout for `WINDOW_FAULTS`."""
PLANTED_MAMBA2 = Layout.parse("d256 v512 ffn=swiglu:512 [M16*3]")
"""A layout for `MAMBA2_FAULTS`."""
PLANTED_GDN = Layout.parse("d256 v512 ffn=swiglu:512 [D8/4 D8/4]")
"""A layout for `GDN_FAULTS`: no attention, which would see a stale text, too."""
PLANTED_GLA = Layout.parse("d256 v512 ffn=swiglu:512 [G8 G8]")
"""A layout for `GLA_FAULTS`."""
PLANTED_MLSTM = Layout.parse("d256 v512 ffn=swiglu:512 [X4 X4]")
"""A layout for `MLSTM_FAULTS`."""
PLANTED_SUMS = Layout.parse("d256 v512 ffn=swiglu:512 [K8(conv=4) N8 N8(conv=0)]")
"""A layout for `SUM_FAULTS`."""
PLANTED_MAMBA = Layout.parse("d256 v512 ffn=swiglu:512 [H H(conv=0)]")
"""A layout for `MAMBA_FAULTS`."""
PLANTED_STATES = Layout.parse("d256 v512 ffn=swiglu:512 [S8(conv=4) S4(liquid=1) V64(conv=4)]")
"""A layout for `STATE_FAULTS`."""
PLANTED_PARTS = Layout.parse("d256 v512 ffn=moe:8x2:64(shared=2) [A8/4(canon=4)+relu2:512 C3 W4/2@32(canon=3)]")
"""A layout for `PART_FAULTS`."""
PLANTED_LATENT = Layout.parse("d256 v512 ffn=relu2:512 [L4/64 L4/64(query=96)]")
"""A layout for `LATENT_FAULTS`."""
PLANTED_LAYERS = Layout.parse("d256 v512 ffn=swiglu:512 [A8/4 A8/4 A8/4(kv=1) C3&A8/4 ^1 -]")
"""A layout for `LAYER_FAULTS`."""
EVERY_KIND = Layout.parse(
    "d256 v512 ffn=moe:8x2:64"
    " [M16 A4/2 C3+swiglu:512 W4/2@32(sink=1)+moe:8x4:96(shared=1) D8/4 G8+relu2:512 X4 L4/64 A8/8(qk_norm=0)]"
)
"""A layout with every kind of block."""
PLANTED_BIASES = Layout.parse("d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0,qkv_bias=1)*2]")
"""A layout for `BIAS_FAULTS`."""
PLANTED_SCALING = Layout.parse("d256 v512 ffn=swiglu:512 [A4/2(qk_norm=0,rope_factor=8,rope_tokens=32)*2]")
"""A layout for `SCALING_FAULTS`."""
PLANTED_YARN = Layout.parse(
    "d256 v512 ffn=swiglu:512 [A4/2(qk_norm=0,rope_factor=8,rope_theta=500,rope_tokens=64,rope_yarn=1)*2]"
)
"""A layout for `YARN_FAULTS`."""
PLANTED_LINEAR = Layout.parse("d256 v512 ffn=swiglu:512 [A4/2(rope_factor=4)*2]")
"""A layout for `LINEAR_FAULTS`."""
PLANTED_PARTIAL = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2(rope_dim=16) C3 A4/2(rope_dim=16)]")
"""A layout for `PARTIAL_FAULTS`."""
PLANTED_GEMMA = Layout.parse(
    "d256 v512 norms=both softcap=3 ffn=geglu:512"
    " [W4/2@8:64(qk_norm=0,rope_theta=10000,softcap=2) A4/2:64(qk_norm=0,rope_theta=10000,softcap=2)]"
)
"""A layout for `GEMMA_FAULTS`."""
_WINDOW_FIRST = "W4/2@8:32(rope_theta=100) A4/2:32(rope_factor=8,rope_theta=5000)"
_WINDOW_LAST = "A4/2:32(rope_factor=8,rope_theta=5000) W4/2@8:32(rope_theta=100)"
PLANTED_GEMMA_3 = Layout.parse(f"d256 v512 norms=both ffn=geglu:512 [{_WINDOW_FIRST}]")
"""A layout for `GEMMA_3_FAULTS`."""
PLANTED_BEHIND = Layout.parse("d256 v512 untied norms=behind ffn=swiglu:512 [A8/4(qk_norm_wide=1)*2]")
"""A layout for `BEHIND_FAULTS`."""
PLANTED_LFM3 = Layout.parse(
    "d256 v512 norms=both ffn=swiglu:512 [C7 W8/4@8(gate=1,rope_theta=10000) A8/4(gate=1,rope_dim=16,rope_theta=1000)]"
)
"""A layout for `LFM3_FAULTS`."""
PLANTED_SOFTMAX = Layout.parse("d256 v512 ffn=moe:8x2:64(softmax=1) [C3+swiglu:512 A4/2 C3 A4/2]")
"""A layout for `SOFTMAX_FAULTS`."""
PLANTED_SHARES = Layout.parse(
    "d256 v512 ffn=moe:8x2:64(norm_topk=0,shared=1,shared_gate=1,softmax=1) [C3+swiglu:512 A4/2 C3 A4/2]"
)
"""A layout for `SHARE_FAULTS`."""
PLANTED_QWEN = Layout.parse(
    "d256 v512 ffn=swiglu:512 [D8/4(norm_eps=0.01) A8/4(gate=1,gate_wide=1,rope_dim=8,rope_factor=4)]"
)
"""A layout for `QWEN_FAULTS`."""
PLANTED_QWEN_STOCK = Layout.parse(
    "d256 v512 ffn=swiglu:512 [D8/4(norm_eps=1e-06) A8/4:64(gate=1,gate_wide=1,rope_dim=16,rope_theta=100)]"
)
"""A layout for `QWEN_STOCK_FAULTS`."""
PLANTED_LONG = Layout.parse("d256 v512 ffn=swiglu:512 [A4/2(qk_norm=0,rope_dim=32,rope_long=64)*2]")
"""A layout for `LONG_FAULTS`."""
_NO_POSITIONS = "A4/2(qk_norm=0,rope_theta=100)*3 A4/2(qk_norm=0,rope_theta=0)"
PLANTED_SMOLLM3 = Layout.parse(f"d256 v512 ffn=swiglu:512 [{_NO_POSITIONS}]")
"""A layout for `SMOLLM3_FAULTS`."""
PLANTED_GRANITE = Layout.parse("d256 v512 ffn=swiglu:512 [M16(groups=2) A8/4(qk_norm=0,rope_theta=0)]")
"""A layout for `GRANITE_FAULTS`."""
PLANTED_FALCON = Layout.parse("d256 v512 ffn=swiglu:512 [M16(heads=6,inner=192,norm=0)&A8/4(qk_norm=0)]")
"""A layout for `FALCON_FAULTS`."""
PLANTED_BESIDE = Layout.parse(
    "d256 v512 norms=behind softcap=3 ffn=geglu:512"
    " [C3 A8/4(qk_norm_wide=1,qkv_bias=1,rope_factor=8,rope_tokens=32,softcap=0.5)*2]"
)
"""A layout for `BESIDE_FAULTS`."""
PLANTED_CHOICE = Layout.parse("d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 C3 M16 C3]")
"""A layout for those of `choice_only`: no attention, whose cache is rounded even where weights are float32."""
_HEAD = 32


def _shift_kv_heads(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("mixers.0.k.weight", "mixers.0.v.weight")):
            weight.copy_(weight.roll(_HEAD, 0))


def _forget_qk_norm_weights(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(1.0)


def _swap_layers(state: State) -> None:
    for name, first in state.items():
        if name.startswith("layers.0."):
            third = state[name.replace("layers.0.", "layers.2.")]
            copy = third.clone()
            third.copy_(first)
            first.copy_(copy)


def _permute_experts(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("ffn.gate.weight", "ffn.up.weight", "ffn.down.weight")) and weight.ndim == 3:
            weight.copy_(weight.roll(1, 0))


def _drop_router_bias(state: State) -> None:
    for name, weight in state.items():
        if name.endswith("ffn.bias.weight"):
            weight.zero_()


def _shift_router(state: State) -> None:
    for name, weight in state.items():
        if name.endswith("ffn.router.weight"):
            weight.copy_(weight.roll(1, 0))


def _swap_gate_and_up(state: State) -> None:
    for name, gate in state.items():
        if name.endswith("ffn.gate.weight") and gate.ndim == 3:
            up = state[name.replace("gate", "up")]
            copy = up.clone()
            up.copy_(gate)
            gate.copy_(copy)


def _roll(ending: str, places: int, dim: int = 0) -> Edit:
    """Returns an edit that moves the rows, or columns, of every tensor whose name ends so."""

    def edit(state: State) -> None:
        for name, weight in state.items():
            if name.endswith(ending):
                weight.copy_(weight.roll(places, dim))

    return edit


def _fill(ending: str, value: float) -> Edit:
    """Returns an edit that fills every tensor whose name ends so."""

    def edit(state: State) -> None:
        for name, weight in state.items():
            if name.endswith(ending):
                weight.fill_(value)

    return edit


def _lessen_gains(state: State) -> None:
    for name, weight in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight", "mixer_norm.weight")):
            weight.sub_(1.0)


def _swap_b_and_c(state: State) -> None:
    """B and C change places in the projection and the convolution."""
    for name, weight in state.items():
        if "mixers.0" in name and name.removesuffix(".weight").endswith(("in_proj", "conv", "conv.bias")):
            end = -8 if "in_proj" in name else None  # the step sizes of 8 heads
            b_and_c = weight[-32 + (end or 0) : end]
            b_and_c.copy_(b_and_c.roll(16, 0))


def _swap_b_and_c_of_channels(state: State) -> None:
    for name, weight in state.items():
        if name.endswith("x_proj.weight"):
            weight[-32:] = weight[-32:].roll(16, 0)


def _swap_parts(state: State) -> None:
    """Of what states of S4 and S5 are read with."""
    for name, weight in state.items():
        if name.endswith((".C", ".C.weight")):
            weight.copy_(weight.roll(weight.shape[-1] // 2, -1))


def _forget_shared_experts(state: State) -> None:
    for name, weight in state.items():
        if "ffn.shared.down" in name:
            weight.zero_()


def _swap_shared_gate_and_up(state: State) -> None:
    for name, gate in state.items():
        if name.endswith("ffn.shared.gate.weight"):
            up = state[name.replace("gate", "up")]
            copy = up.clone()
            up.copy_(gate)
            gate.copy_(copy)


def _turn_relu_over(state: State) -> None:
    """What ReLU lets pass and what it cuts change places."""
    for name, weight in state.items():
        if "layers.0.ffn.up" in name:
            weight.neg_()


def _forget_shared_key(state: State) -> None:
    for name, weight in state.items():
        if name.endswith("kv_down.weight"):
            weight[64:] = 0.0


FAULTS = (
    Fault("RoPE base", layout=("A8/4", "A8/4(rope_theta=10000)")),
    Fault("KV-head map", _shift_kv_heads),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("QK-norm missing", layout=("A8/4", "A8/4(qk_norm=0)")),
    Fault("QK-norm without its weights", _forget_qk_norm_weights),
    Fault("layers swapped", _swap_layers),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED`: two convolutions of one shape, QK-norm, several KV heads of 32 numbers."""

MOE_FAULTS = (
    Fault("experts permuted", _permute_experts),
    Fault("router bias dropped", _drop_router_bias, choice_only=True),
    Fault("router rows shifted", _shift_router),
    Fault("one expert too many", layout=("moe:8x2", "moe:8x3")),
    Fault("gate and up of experts swapped", _swap_gate_and_up),
)
"""For layouts like `PLANTED_MOE`."""

WINDOW_FAULTS = (
    Fault("another window", layout=("W4/2@8(sink=1)", "W4/2@12(sink=1)")),
    Fault("no window", layout=("W4/2@8(sink=1)", "A4/2")),
    Fault("sinks missing", layout=("W4/2@8(sink=1)", "W4/2@8")),
    Fault("RoPE base", layout=("W4/2@8(sink=1)", "W4/2@8(rope_theta=10000,sink=1)")),
)
"""For layouts like `PLANTED_WINDOWS`: two convolutions, two windows of 8 tokens with sinks."""

MAMBA2_FAULTS = (
    Fault("decays of other heads", _roll("A_log", 1)),
    Fault("B and C swapped", _swap_b_and_c),
    Fault("step bias missing", _fill("dt_bias", 0.0)),
    Fault("skip missing", _fill(".D", 0.0)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("norm without its weights", _fill("mixers.0.norm.weight", 1.0)),
    Fault("layers swapped", _swap_layers),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_MAMBA2`: eight heads, 16 numbers of state, one group, layers 0 and 2 alike."""

GDN_FAULTS = (
    Fault("decays of other heads", _roll("A_log", 1)),
    Fault("step bias missing", _fill("dt_bias", 0.0)),
    Fault("beta of other heads", _roll("beta.weight", 1)),
    Fault("beta always one half", _fill("beta.weight", 0.0)),
    Fault("queries and keys of other heads", _roll("qkv.weight", _HEAD)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("norm without its weights", _fill("mixers.0.norm.weight", 1.0)),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_GDN`."""

GLA_FAULTS = (
    Fault("decays of other keys", _roll("decay_up.weight", 1)),
    Fault("decay bias missing", _fill("decay_bias", 0.0)),
    Fault("decays of a constant", _fill("decay_down.weight", 0.0)),
    Fault("queries and keys of other heads", _roll("qkv.weight", _HEAD)),
    Fault("norm without its weights", _fill("mixers.0.norm.weight", 1.0)),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_GLA`."""

MLSTM_FAULTS = (
    Fault("gates of other heads", _roll("gates.weight", 1)),
    Fault("gate bias missing", _fill("gate_bias", 0.0)),
    Fault("queries and keys of other heads", _roll("qkv.weight", _HEAD)),
    Fault("norm without its weights", _fill("norm_weight", 1.0)),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_MLSTM`."""

SUM_FAULTS = (
    Fault("queries and keys of other heads", _roll("qkv.weight", _HEAD)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("beta of other heads", _roll("beta.weight", 1)),
    Fault("beta always one half", _fill("beta.weight", 0.0)),
    Fault("norm without its weights", _fill("mixers.0.norm.weight", 1.0)),
    Fault("sums in place of corrections", layout=("N8(conv=0)", "K8")),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_SUMS`: linear attention and DeltaNet, eight heads of 32 numbers."""

MAMBA_FAULTS = (
    Fault("decays of other states", _roll("A_log", 1, dim=1)),
    Fault("B and C swapped", _swap_b_and_c_of_channels),
    Fault("step bias missing", _fill("dt_bias", 0.0)),
    Fault("step sizes of a constant", _fill("dt_proj.weight", 0.0)),
    Fault("skip missing", _fill(".D", 0.0)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_MAMBA`: 16 numbers of state."""

STATE_FAULTS = (
    Fault("oscillations of other states", _roll("A_imag", 1, dim=-1)),
    Fault("decays of other states", _roll("A_log", 1, dim=-1)),
    Fault("no oscillations", _fill("A_imag", 0.0)),
    Fault("real and imaginary parts swapped", _swap_parts),
    Fault("step sizes of a constant", _fill("dt_bias", -3.0)),
    Fault("skip missing", _fill(".D", 0.0)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
    Fault("inputs that leave the decays alone", layout=("S4(liquid=1)", "S4")),
    Fault("stale state", earlier=40),
)
"""For layouts like `PLANTED_STATES`: S4, Liquid-S4 and S5."""

LAYER_FAULTS = (
    Fault("cache of another layer", layout=("kv=1", "kv=0")),
    Fault("weights of another layer", layout=("^1", "^0")),
    Fault("weights used once", layout=("^1", "C3")),
    Fault("convolution of parallel mixers missing", layout=("C3&A8/4", "A8/4")),
    Fault("attention of parallel mixers missing", layout=("C3&A8/4", "C3")),
    Fault("stale caches", earlier=40),
)
"""For layouts like `PLANTED_LAYERS`: shared caches and weights, parallel mixers, a layer without a mixer."""

LATENT_FAULTS = (
    Fault(
        "RoPE base",
        layout=("L4/64 L4/64(query=96)", "L4/64(rope_theta=100) L4/64(query=96,rope_theta=100)"),
    ),
    Fault("key maps of other heads", _roll("k_up.weight", 64)),
    Fault("value maps of other heads", _roll("v_up.weight", 64)),
    Fault("norm of latents without its weights", _fill("kv_norm.weight", 1.0)),
    Fault("norm of queries without its weights", _fill("q_norm.weight", 1.0)),
    Fault("key with positions missing", _forget_shared_key),
    Fault("stale latents", earlier=40),
)
"""For layouts like `PLANTED_LATENT`: four heads of 64 numbers over latents of 64, queries compressed in layer 1."""

PART_FAULTS = (
    Fault("convolution in front of attention missing", layout=("A8/4(canon=4)", "A8/4")),
    Fault("its taps shifted by one", _roll("canon.weight", 1, dim=1)),
    Fault("its window kept from an earlier text", earlier=40),
    Fault("shared experts forgotten", _forget_shared_experts),
    Fault("gate and up of shared experts swapped", _swap_shared_gate_and_up),
    Fault("ReLU of the wrong sign", _turn_relu_over),
)
"""For layouts like `PLANTED_PARTS`: Canon, shared experts, and squared ReLU in layer 0."""

BIAS_FAULTS = (
    Fault("biases of queries missing", _fill(".q.bias", 0.0)),
    Fault("biases of values of other heads", _roll(".v.bias", _HEAD)),
    Fault("biases of values missing", _fill(".v.bias", 0.0)),
)
"""For layouts like `PLANTED_BIASES`: biases on queries, keys and values, without QK-norm."""

SCALING_FAULTS = (
    Fault("scaling missing", layout=("rope_factor=8,rope_tokens=32", "rope_theta=1000000")),
    Fault("all pairs slowed", layout=("rope_factor=8,rope_tokens=32", "rope_factor=8")),
    Fault("another length before scaling", layout=("rope_tokens=32", "rope_tokens=64")),
)
"""For layouts like `PLANTED_SCALING`: RoPE as in Llama 3.1, of a length within that of the gate's texts."""

YARN_FAULTS = (
    Fault("scaled as Llama 3.1", layout=(",rope_yarn=1", "")),
    Fault("another length", layout=("rope_tokens=64", "rope_tokens=256")),
    Fault("all pairs slowed", layout=("rope_tokens=64,rope_yarn=1", "rope_tokens=0")),
)
"""For layouts like `PLANTED_YARN`: pairs slowed by their numbers."""
LINEAR_FAULTS = (
    Fault("scaling missing", layout=("(rope_factor=4)", "")),
    Fault("another factor", layout=("rope_factor=4", "rope_factor=2")),
)
"""For layouts like `PLANTED_LINEAR`: all of RoPE's angles divided by one number."""

PARTIAL_FAULTS = (
    Fault("whole heads turned", layout=("(rope_dim=16)", "")),
    Fault("another part turned", layout=("rope_dim=16", "rope_dim=32")),
)
"""For layouts like `PLANTED_PARTIAL`: RoPE on the first numbers of a head."""

GEMMA_FAULTS = (
    Fault("scores unbounded", layout=(",softcap=2)", ",softcap=1000000)")),
    Fault("logits unbounded", layout=(" softcap=3", " softcap=1000000")),
    Fault("norms behind the mixers left out", _fill("mixer_out_norm.weight", 1.0)),
    Fault("norms behind the feed-forwards left out", _fill("ffn_out_norm.weight", 1.0)),
    Fault("another window", layout=("@8", "@16")),
)
"""For layouts like `PLANTED_GEMMA`: bounds, and norms on both sides."""
GEMMA_3_FAULTS = (
    Fault("one base for all layers", layout=("rope_theta=100)", "rope_theta=5000)")),
    Fault("unscaled positions", layout=("rope_factor=8,", "")),
    Fault("QK-norm left out", _forget_qk_norm_weights),
    Fault("windows in other layers", layout=(_WINDOW_FIRST, _WINDOW_LAST)),
)
"""For layouts like `PLANTED_GEMMA_3`: positions that depend on the kind of layer."""
BEHIND_FAULTS = (
    Fault("QK-norm one head at a time", layout=("qk_norm_wide=1", "qk_norm=1")),
    Fault("gains of heads in another order", _roll("q_norm.weight", _HEAD)),
    Fault("norms behind left out", _fill("out_norm.weight", 1.0)),
)
"""For layouts like `PLANTED_BEHIND`: norms behind blocks alone, QK-norm over all heads."""
LFM3_FAULTS = (
    Fault("gates missing", layout=("gate=1,", "")),
    Fault("gates of other heads", _roll("mixers.0.gate.weight", 1)),
    Fault("whole heads turned", layout=(",rope_dim=16", "")),
    Fault("norms behind the mixers left out", _fill("mixer_out_norm.weight", 1.0)),
    Fault("convolution shifted by one", _roll("conv.weight", 1, dim=1)),
)
"""For layouts like `PLANTED_LFM3`: gates on heads, norms on both sides, RoPE on half a head."""
BESIDE_FAULTS = (
    Fault("SiLU in place of GELU", layout=("geglu", "swiglu")),
    Fault("logits unbounded", layout=(" softcap=3", " softcap=1000000")),
    Fault("biases of values of other heads", _roll(".v.bias", _HEAD)),
    Fault("norms behind left out", _fill("out_norm.weight", 1.0)),
)
"""For layouts like `PLANTED_BESIDE`: arguments of attention and of the model next to a convolution."""
LONG_FAULTS = (
    Fault("divisors of short texts", layout=("rope_long=64", "rope_long=65536")),
    Fault("divisors of other pairs", _roll("rope_long.weight", 1)),
)
"""For layouts like `PLANTED_LONG`: RoPE's angles divided by numbers of the file, in texts beyond a length by others."""
SMOLLM3_FAULTS = (
    Fault("positions in every layer", layout=("rope_theta=0)", "rope_theta=100)")),
    Fault("another base", layout=("rope_theta=100)", "rope_theta=5000)")),
)
"""For layouts like `PLANTED_SMOLLM3`: every fourth layer without positions."""
GRANITE_FAULTS = (
    Fault("positions of attention", layout=("rope_theta=0", "rope_theta=100")),
    Fault("skip missing", _fill(".D", 0.0)),
)
"""For layouts like `PLANTED_GRANITE`: Mamba-2 and attention without positions in turns, as stock llama.cpp has them."""
FALCON_FAULTS = (
    Fault("attention missing", layout=("&A8/4(qk_norm=0)", "")),
    Fault("a norm behind the gate", layout=(",norm=0", "")),
    Fault("skip missing", _fill(".D", 0.0)),
)
"""For layouts like `PLANTED_FALCON`: Mamba-2 beside attention, narrower than the model and without a norm."""
QWEN_FAULTS = (
    Fault("gates of other numbers", _roll("gate.weight", 1)),
    Fault("another epsilon", layout=("norm_eps=0.01", "norm_eps=0.0001")),
    Fault("unscaled positions", layout=(",rope_factor=4", "")),
)
"""For layouts like `PLANTED_QWEN`: gates of numbers, scaled RoPE on a part of a head, Gated DeltaNet's own epsilon."""
QWEN_STOCK_FAULTS = (
    Fault("gates of other numbers", _roll("mixers.0.gate.weight", 1)),
    Fault("another part turned", layout=("rope_dim=16", "rope_dim=8")),
    Fault("keys replaced at the rates of other heads", _roll("beta.weight", 1)),
    Fault("gains without their 1", _lessen_gains),
)
"""For layouts like `PLANTED_QWEN_STOCK`, Qwen3.5 as stock llama.cpp has it."""
SOFTMAX_FAULTS = (
    Fault("sigmoids in place of the softmax", layout=("(softmax=1)", "")),
    Fault("router rows shifted", _shift_router),
)
"""For layouts like `PLANTED_SOFTMAX`: experts as in Mixtral and Qwen3-MoE."""
SHARE_FAULTS = (
    Fault("weights divided by their sum", layout=("norm_topk=0,", "")),
    Fault("gate of shared experts missing", layout=("shared_gate=1,", "")),
)
"""For layouts like `PLANTED_SHARES`: experts as in Qwen2-MoE."""

PLANTS = (
    (PLANTED, FAULTS),
    (PLANTED_MOE, MOE_FAULTS),
    (PLANTED_WINDOWS, WINDOW_FAULTS),
    (PLANTED_MAMBA2, MAMBA2_FAULTS),
    (PLANTED_GDN, GDN_FAULTS),
    (PLANTED_GLA, GLA_FAULTS),
    (PLANTED_MLSTM, MLSTM_FAULTS),
    (PLANTED_SUMS, SUM_FAULTS),
    (PLANTED_MAMBA, MAMBA_FAULTS),
    (PLANTED_STATES, STATE_FAULTS),
    (PLANTED_LATENT, LATENT_FAULTS),
    (PLANTED_PARTS, PART_FAULTS),
    (PLANTED_LAYERS, LAYER_FAULTS),
    (PLANTED_BIASES, BIAS_FAULTS),
    (PLANTED_SMOLLM3, SMOLLM3_FAULTS),
    (PLANTED_GRANITE, GRANITE_FAULTS),
    (PLANTED_SCALING, SCALING_FAULTS),
    (PLANTED_YARN, YARN_FAULTS),
    (PLANTED_LINEAR, LINEAR_FAULTS),
    (PLANTED_PARTIAL, PARTIAL_FAULTS),
    (PLANTED_GEMMA, GEMMA_FAULTS),
    (PLANTED_GEMMA_3, GEMMA_3_FAULTS),
    (PLANTED_BEHIND, BEHIND_FAULTS),
    (PLANTED_LFM3, LFM3_FAULTS),
    (PLANTED_QWEN, QWEN_FAULTS),
    (PLANTED_QWEN_STOCK, QWEN_STOCK_FAULTS),
    (PLANTED_SOFTMAX, SOFTMAX_FAULTS),
    (PLANTED_SHARES, SHARE_FAULTS),
    (PLANTED_BESIDE, BESIDE_FAULTS),
    (PLANTED_LONG, LONG_FAULTS),
    (PLANTED_FALCON, FALCON_FAULTS),
)
"""Every layout with its faults."""
