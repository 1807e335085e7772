"""Programs as torch modules, written so that XNNPACK takes nearly all of each.

Arithmetic is that of `nas.model.nn`. State comes in and goes out: programs remember nothing, so a reset is zeros, a
shared layer is a second state, and every program may work in the same memory. RMSNorm is a product with a row of 1 /
width, because XNNPACK has no mean over the last dimension that it would take with a length that varies.

Attention calls operators that our runner implements, over a cache that is the runner's own. The artifact holds the
number of the cache, RoPE's arguments, window, sinks and bounds: so programs depend on no context length, and a cache
may be of any number format. Linear attention calls operators of the runner, too: it computes them token by token, with
less work than any chunked form. These operators are never computed in Python.

Raise `templates.PROGRAMS_VERSION` with every change here that changes the bytes of a lowered program.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.measure.runtimes.executorch.programs import CHUNK, Program

_LIBRARY: Any = torch.library.Library("hilnas", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.define("attend.out(Tensor q, Tensor k, Tensor v, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define("attend_shared(Tensor q) -> Tensor")
_LIBRARY.define("attend_shared.out(Tensor q, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define("attend_latent(Tensor q, Tensor latent, Tensor shared) -> Tensor")
_LIBRARY.define("attend_latent.out(Tensor q, Tensor latent, Tensor shared, *, Tensor(a!) out) -> Tensor(a!)")
_RECURRENCES = {
    "delta_rule": "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor memory, Tensor beta",
    "linear_attention": "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor memory",
}
for _name, _arguments in _RECURRENCES.items():
    _LIBRARY.define(f"{_name}({_arguments}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"{_name}.out({_arguments}, *, Tensor(a!) y, Tensor(b!) after) -> (Tensor(a!), Tensor(b!))")


Outputs = tuple[Tensor, ...]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Appends keys and values [1, S, KV, d] to the cache, attends: q [1, S, H, d] -> [1, S, H d]."""
    mixed: Tensor = torch.ops.hilnas.attend(q, k, v)
    return mixed


def attend_shared(q: Tensor) -> Tensor:
    """Returns the same over a cache that another layer has appended to."""
    mixed: Tensor = torch.ops.hilnas.attend_shared(q)
    return mixed


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, memory: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Runs `nas.model.nn.gdn.delta_rule` on q / sqrt(N).

    Args:
        q: [S, key heads, N].
        k: [S, key heads, N].
        v: [S, H, P].
        decay: what is kept of the memory [S, H, 1].
        memory: [H, N, P].
        beta: [S, H].

    Returns:
        y [S, H, P], and the memory after the last token.
    """
    y, after = torch.ops.hilnas.delta_rule(q, k, v, decay, memory, beta)
    return y, after


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same without a delta: values are added to the memory as they are; decay [S, H, 1] or [S, H, N]."""
    y, after = torch.ops.hilnas.linear_attention(q, k, v, decay, memory)
    return y, after


def attend_latent(q: Tensor, latent: Tensor, shared: Tensor) -> Tensor:
    """Appends latents [1, S, R] and shared keys [1, S, P] to the cache, attends: q [1, S, H, R + P] -> [1, S, H R]."""
    mixed: Tensor = torch.ops.hilnas.attend_latent(q, latent, shared)
    return mixed


def _latent_shape(q: Tensor, latent: Tensor, shared: Tensor) -> Tensor:
    return q.new_empty(1, q.shape[1], q.shape[2] * latent.shape[2])


def _shape(q: Tensor, *_: Tensor) -> Tensor:
    return q.new_empty(1, q.shape[1], q.shape[2] * q.shape[3])


def _out(*tensors: Tensor, out: Tensor) -> Tensor:
    return out


for _name, _meta in (("attend", _shape), ("attend_shared", _shape), ("attend_latent", _latent_shape)):
    _LIBRARY.impl(_name, _meta, "Meta")
    _LIBRARY.impl(f"{_name}.out", _out, "Meta")


def _shapes(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, memory: Tensor, beta: Tensor | None = None) -> Outputs:
    return torch.empty_like(v), torch.empty_like(memory)


def _outs(*tensors: Tensor, y: Tensor, after: Tensor) -> Outputs:
    return y, after


for _name in _RECURRENCES:
    _LIBRARY.impl(_name, _shapes, "Meta")
    _LIBRARY.impl(f"{_name}.out", _outs, "Meta")


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenates [1, S, N] along N, in as many rounds as it takes: XNNPACK joins at most five tensors at once."""
    while len(parts) > 1:
        rounds = [parts[at : at + 5] for at in range(0, len(parts), 5)]
        parts = [torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0] for pieces in rounds]
    return parts[0]


class ProgramModule(nn.Module):
    """A program with constants to be filled: `nn.Linear` for those in 4 bits, parameters for the others."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.behind = program, dict(program.sizes).get("behind", 0)
        for constant in program.constants:
            if constant.role == "int4":
                outputs, inputs = constant.shape
                self.add_module(constant.name, nn.Linear(inputs, outputs, bias=False))
            else:
                self.register_parameter(constant.name, nn.Parameter(torch.empty(constant.shape), requires_grad=False))

    def number(self, name: str) -> Tensor:
        """Returns a float32 constant."""
        constant: Tensor = getattr(self, name)
        return constant

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Returns the product of `x` with a 4-bit constant."""
        y: Tensor = getattr(self, name)(x)
        return y

    def inverse_rms(self, x: Tensor, name: str) -> Tensor:
        """Returns 1 / sqrt(mean(x^2) + eps) over the last dimension."""
        return torch.rsqrt(F.linear(x * x, self.number(f"{name}_mean"), self.number(f"{name}_eps")))

    def norm(self, x: Tensor, name: str = "norm") -> Tensor:
        """Returns RMSNorm over the last dimension."""
        return x * self.inverse_rms(x, name) * self.number(f"{name}_weight")

    def unit_length(self, x: Tensor) -> Tensor:
        """Scales the last dimension to length 1."""
        return x * torch.rsqrt(F.linear(x * x, self.number("length_ones"), self.number("length_eps")))

    def into(self, x: Tensor) -> Tensor:
        """Returns what a block reads: norm(x), or x where its only norm is behind it."""
        return x if self.behind == 1 else self.norm(x)

    def onto(self, residual: Tensor, y: Tensor) -> Tensor:
        """Returns the stream after a block: residual + y, or residual + norm(y)."""
        return residual + (self.norm(y, "behind") if self.behind else y)

    def convolve(self, window: Tensor, length: int) -> Tensor:
        """Convolves causally by channel, [1, K - 1 + S, C] -> [1, S, C]; tap i meets the input K - 1 - i tokens ago."""
        taps = [self.number(one.name) for one in self.program.constants if one.role == "taps"]
        y = window.narrow(1, 0, length) * taps[0]
        for shift, tap in enumerate(taps[1:], 1):
            y = y + window.narrow(1, shift, length) * tap
        return y

    def convolved(self, h: Tensor, past: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Outputs]:
        """Maps [1, S, C] -> [1, S, C] by the convolution, if there is one.

        Args:
            h: its input.
            past: window before the chunk; the memory where there is no convolution.
            memory: what the heads remember; None: there is no convolution.

        Returns:
            The output, the memory, and the window with the chunk behind it, if there is one; its end is the next one.
        """
        if memory is None:
            return h, past, ()
        window = torch.cat([past, h], 1)
        return self.convolve(window, h.shape[1]), memory, (window,)

    def ends(self, windows: Outputs, past: Tensor, length: int) -> Outputs:
        """Returns the ends of windows of `convolved` with a chunk of `length` tokens."""
        return tuple(window.narrow(1, length, past.shape[1]) for window in windows)

    def swiglu(self, h: Tensor) -> Tensor:
        """Returns W_down (silu(W_gate h) * W_up h)."""
        return self.linear("down", F.silu(self.linear("gate", h)) * self.linear("up", h))


class Conv(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, D] -> residual + mixer(norm(x)), window."""

    def forward(self, x: Tensor, residual: Tensor, past: Tensor) -> Outputs:
        h, length = self.into(x), x.shape[1]
        window = torch.cat([past, self.linear("gate_in", h) * self.linear("value", h)], 1)
        y = self.onto(residual, self.linear("out", self.linear("gate_out", h) * self.convolve(window, length)))
        return y, window.narrow(1, length, past.shape[1])


class Attention(ProgramModule):
    """x, residual [1, S, D] -> residual + mixer(norm(x)); keys and values are the runner's.

    With a convolution in front also its window [1, K - 1, D], in and out.
    """

    def forward(self, x: Tensor, residual: Tensor, past: Tensor | None = None) -> Outputs:
        h, after = self.mixed_in(self.into(x), past)
        if self.program.size("own"):
            mixed = attend(self.heads(h, "q"), self.heads(h, "k"), self.heads(h, "v"))
        else:
            mixed = attend_shared(self.heads(h, "q"))
        return (self.output(residual, mixed, h), *after)

    def output(self, residual: Tensor, mixed: Tensor, h: Tensor) -> Tensor:
        """Returns the stream after the mixer, of what attention read [1, S, H d] and the mixer's input."""
        if "gate_wide" in dict(self.program.sizes):
            mixed = mixed * torch.sigmoid(self.linear("gate", h))
        elif "gate" in dict(self.program.sizes):
            gates = torch.sigmoid(F.linear(h, self.number("gate"))).unsqueeze(3)
            heads = mixed.view(1, h.shape[1], self.program.size("heads"), self.program.size("head_dim"))
            mixed = (heads * gates).view(mixed.shape)
        return self.onto(residual, self.linear("o", mixed))

    def mixed_in(self, h: Tensor, past: Tensor | None) -> tuple[Tensor, Outputs]:
        """Returns the input with the convolution added, if there is one, and its window after the chunk."""
        if past is None:
            return h, ()
        window, length = torch.cat([past, h], 1), h.shape[1]
        return h + self.convolve(window, length), (window.narrow(1, length, past.shape[1]),)

    def heads(self, h: Tensor, name: str) -> Tensor:
        """Maps [1, S, D] -> [1, S, heads, head_dim]."""
        heads = self.program.size("heads" if name == "q" else "kv_heads")
        rows = self.linear(name, h)
        if "bias" in dict(self.program.sizes):
            rows = rows + self.number(f"{name}_bias")
        normed, wide = self.program.size("norm") and name != "v", "wide" in dict(self.program.sizes)
        rows = self.norm(rows, f"{name}_norm") if normed and wide else rows
        split = rows.view(1, h.shape[1], heads, self.program.size("head_dim"))
        return self.norm(split, f"{name}_norm") if normed and not wide else split


class LatentAttention(ProgramModule):
    """x, residual [1, S, D] -> residual + mixer(norm(x)), absorbed; latents and shared keys are the runner's."""

    def forward(self, x: Tensor, residual: Tensor) -> Outputs:
        h, size = self.into(x), self.program.size
        kv = self.linear("kv_down", h)
        latent = self.norm(kv.narrow(2, 0, size("latent")), "kv_norm")
        mixed = attend_latent(self.queries(h), latent, kv.narrow(2, size("latent"), size("rope_dim")))
        heads = mixed.view(1, h.shape[1], size("heads"), size("latent"))
        values = [self.linear(f"v_up{head}", heads.select(2, head)) for head in range(size("heads"))]
        return (self.onto(residual, self.linear("o", joined(values))),)

    def queries(self, h: Tensor) -> Tensor:
        """Maps [1, S, D] -> [1, S, heads, R + P], in the space of latents, for scores over sqrt(R + P)."""
        size = self.program.size
        if size("query"):
            queries = self.linear("q_up", self.norm(self.linear("q_down", h), "q_norm"))
        else:
            queries = self.linear("q", h)
        nope, rope, heads = size("nope_dim"), size("rope_dim"), size("heads")
        queries = queries.view(1, h.shape[1], heads, nope + rope)
        mapped = [self.linear(f"k_up{head}", queries.select(2, head).narrow(2, 0, nope)) for head in range(heads)]
        latent = joined(mapped).view(1, h.shape[1], heads, size("latent"))
        scale = math.sqrt((size("latent") + rope) / (nope + rope))
        return torch.cat([latent, queries.narrow(3, nope, rope)], 3) * scale


class Mamba2(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, C], if any, memory [G, N, P H / G] -> the same; see `nas.model.nn.ssd`.

    One chunk of the recurrence is masked attention. Where a later token would act on an earlier one its exponent is cut
    to zero before the mask takes it away, so that nothing overflows.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        # One more than a chunk: cut from all of itself, a constant would make a special case of the longest chunk.
        self.register_buffer("until_now", torch.ones(CHUNK + 1, CHUNK + 1).tril())
        inner = program.size("expand") * program.size("d_model")
        self.inner = dict(program.sizes).get("inner", inner)
        self.normed = hasattr(self, "out_norm_weight")

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        h, length = self.into(x), x.shape[1]
        mixed, memory, windows = self.convolved(self.linear("mixed", h), past, memory)
        value, b, c = self._split(F.silu(mixed + self.number("conv_bias") if windows else mixed), length)
        step = F.softplus(F.linear(h, self.number("step")) + self.number("dt_bias"))[0]  # [S, H]
        total = torch.cumsum(step * self.number("decay"), 0)
        y, after = self._recur(value * step.unsqueeze(2), total, b, c, memory)
        y = (y + value * self.number("skip")).reshape(1, length, self.inner)
        gated = y * F.silu(self.linear("gate", h))
        gated = self._grouped_norm(gated, length) if self.normed else gated
        out = self.onto(residual, self.linear("out", gated))
        return out, *self.ends(windows, past, x.shape[1]), after

    def _split(self, mixed: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [1, S, C] -> values [S, H, P], B and C [G, S, N]."""
        groups, state = self.program.size("groups"), self.program.size("state")
        value = mixed.narrow(2, 0, self.inner).view(length, self.program.size("heads"), -1)
        b, c = (
            mixed.narrow(2, self.inner + i * groups * state, groups * state).view(length, groups, state)
            for i in range(2)
        )
        return value, b.transpose(0, 1), c.transpose(0, 1)

    def _recur(self, u: Tensor, total: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Maps u [S, H, P], cumulated log decays [S, H] -> y [S, H, P] and the memory after the chunk."""
        length, heads, size = u.shape
        groups = b.shape[0]
        until_now = self.number("until_now").narrow(0, 0, length).narrow(1, 0, length)
        spans = total.t().unsqueeze(2) - total.t().unsqueeze(1)  # [H, S, S]
        scores = torch.bmm(c, b.transpose(1, 2)) * until_now  # [G, S, S]
        spread = scores.unsqueeze(1).expand(groups, heads // groups, length, length).reshape(heads, length, length)
        within = torch.bmm(torch.clamp(spans, max=0.0).exp() * spread, u.transpose(0, 1))  # [H, S, P]
        across = torch.bmm(c, memory).view(groups, length, heads // groups, size).transpose(0, 1)
        across = across.reshape(length, heads, size) * total.exp().unsqueeze(2)
        last = total.narrow(0, length - 1, 1)
        weighted = (u * (last - total).exp().unsqueeze(2)).view(length, groups, -1).transpose(0, 1)  # [G, S, H P / G]
        decay = last.exp().view(groups, 1, -1, 1).expand(groups, 1, heads // groups, size).reshape(groups, 1, -1)
        return within.transpose(0, 1) + across, memory * decay + torch.bmm(b.transpose(1, 2), weighted)

    def _grouped_norm(self, y: Tensor, length: int) -> Tensor:
        parts = y.view(1, length, self.program.size("groups"), -1)
        return (parts * self.inverse_rms(parts, "out_norm")).reshape(1, length, self.inner) * self.number(
            "out_norm_weight"
        )


class GatedDeltaNet(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, C], if any, memory [H, N, N] -> the same, by the runner."""

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        h, length, size = self.into(x), x.shape[1], self.program.size("head_dim")
        heads, keys = self.program.size("heads"), self.program.size("key_heads") * size
        mixed, memory, windows = self.convolved(self.linear("qkv", h), past, memory)
        mixed = F.silu(mixed)
        q, k = (self.unit_length(mixed.narrow(2, at, keys).view(length, keys // size, size)) for at in (0, keys))
        v = mixed.narrow(2, 2 * keys, heads * size).view(length, heads, size)
        step = F.softplus(F.linear(h, self.number("step_size")) + self.number("dt_bias"))
        decay = (step * self.number("decay")).exp().view(length, heads, 1)
        beta = torch.sigmoid(F.linear(h, self.number("beta"))).view(length, heads)
        y, after = delta_rule(q, k, v, decay, memory, beta)
        y = self.norm(y, "out_norm").view(1, length, heads * size)
        out = self.onto(residual, self.linear("out", y * F.silu(self.linear("gate", h))))
        return out, *self.ends(windows, past, x.shape[1]), after


class GatedLinearAttention(ProgramModule):
    """x, residual [1, S, D], memory [H, N, N] -> the same, by the runner."""

    def forward(self, x: Tensor, residual: Tensor, memory: Tensor) -> Outputs:
        h, shape = self.into(x), (x.shape[1], self.program.size("heads"), self.program.size("head_dim"))
        q, k, v = (self.linear(name, h).view(shape) for name in ("q", "k", "v"))
        decay = F.linear(F.linear(h, self.number("decay_down")), self.number("decay_up"))
        decay = torch.sigmoid(decay + self.number("decay_bias"))
        for _ in range(4):  # the 16th root
            decay = torch.sqrt(decay)
        y, after = linear_attention(q, k, v, decay.view(shape), memory)
        y = self.norm(y, "out_norm").view(1, x.shape[1], -1)
        return self.onto(residual, self.linear("out", y * F.silu(self.linear("gate", h)))), after


class MatrixLSTM(ProgramModule):
    """x, residual [1, S, D], memory [H, N, P + 1] -> the same; the recurrence is the runner's."""

    def forward(self, x: Tensor, residual: Tensor, memory: Tensor) -> Outputs:
        h, length = self.into(x), x.shape[1]
        heads, size = self.program.size("heads"), self.program.size("head_dim")
        q, k, v = (self.linear(name, h).view(length, heads, -1) for name in ("q", "k", "v"))
        incoming, forget = (
            torch.tanh((F.linear(h, self.number(name)) + self.number(f"{name}_bias")) * self.number("per_cap"))
            * self.number("cap")
            for name in ("incoming", "kept")
        )
        i = incoming.exp().view(length, heads, 1)
        values = torch.cat([v * i, i], 2)
        y, after = linear_attention(q, k, values, torch.sigmoid(forget).view(length, heads, 1), memory)
        y = y.narrow(2, 0, size) / torch.clamp(torch.abs(y.narrow(2, size, 1)), min=1.0)
        y = y - F.linear(y, self.number("out_norm_mean"))
        y = (y * self.inverse_rms(y, "out_norm")).view(1, length, heads * size) * self.number("out_norm_weight")
        return self.onto(residual, self.linear("out", y * torch.sigmoid(self.linear("gate", h)))), after


class LinearAttention(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, C], if any, memory [H, N, N + 1] -> the same, by the runner."""

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        h, shape = self.into(x), (x.shape[1], self.program.size("heads"), self.program.size("head_dim"))
        mixed, memory, windows = self.convolved(self.linear("qkv", h), past, memory)
        inner = shape[1] * shape[2]
        q, k, v = (mixed.narrow(2, i * inner, inner).view(shape) for i in range(3))
        one = torch.clamp(v.narrow(2, 0, 1), min=1.0, max=1.0)
        y, memory = linear_attention(self.positive(q), self.positive(k), torch.cat([v, one], 2), one, memory)
        # The runner divides queries by sqrt(N): what is read, and the sum, alike.
        y = y.narrow(2, 0, shape[2]) / torch.clamp(y.narrow(2, shape[2], 1), min=1e-6 / math.sqrt(shape[2]))
        out = self.onto(residual, self.linear("out", y.reshape(1, x.shape[1], inner)))
        return out, *self.ends(windows, past, x.shape[1]), memory

    def positive(self, x: Tensor) -> Tensor:
        """Returns elu(x) + 1."""
        return torch.clamp(x, min=0.0) + torch.clamp(x, max=0.0).exp()


class DeltaNet(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, C], if any, memory [H, N, N] -> the same, by the runner."""

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        h, shape = self.into(x), (x.shape[1], self.program.size("heads"), self.program.size("head_dim"))
        mixed, memory, windows = self.convolved(self.linear("qkv", h), past, memory)
        mixed, inner = F.silu(mixed), shape[1] * shape[2]
        q, k, v = (mixed.narrow(2, i * inner, inner).view(shape) for i in range(3))
        beta = torch.sigmoid(F.linear(h, self.number("beta"))).view(shape[:2])
        decay = torch.clamp(beta, min=1.0).view(*shape[:2], 1)  # none: beta is below 1
        y, memory = delta_rule(self.unit_length(q), self.unit_length(k), v, decay, memory, beta)
        y = self.norm(y, "out_norm").view(1, x.shape[1], inner)
        out = self.onto(residual, self.linear("out", y))
        return out, *self.ends(windows, past, x.shape[1]), memory


class Mamba(ProgramModule):
    """x, residual [1, S, D], window [1, K - 1, I], if any, memory [I, N, 1] -> the same.

    The recurrence is the runner's, with a channel as a head.
    """

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        h, length, states = self.into(x), x.shape[1], self.program.size("state")
        u, memory, windows = self.convolved(self.linear("value", h), past, memory)
        u = F.silu(u + self.number("conv_bias") if windows else u)
        step = F.softplus(F.linear(F.linear(u, self.number("low")), self.number("step")) + self.number("dt_bias"))
        decay = (step.view(length, -1, 1) * self.number("decay")).exp()
        b, c = (F.linear(u, self.number(name)).view(length, 1, states) for name in ("b", "c"))
        y, memory = linear_attention(c * math.sqrt(states), b, (step * u).view(length, -1, 1), decay, memory)
        y = y.view(1, length, -1) + u * self.number("skip")
        out = self.onto(residual, self.linear("out", y * F.silu(self.linear("gate", h))))
        return out, *self.ends(windows, past, x.shape[1]), memory


class StateSpace(ProgramModule):
    """Shared by S4 and S5: complex decays, for a runner whose recurrence has real ones.

    States are kept in a frame that turns with them: what a token finds is turned back by the angles since the chunk's
    begin, so that only the size of a decay is left to the recurrence; at the chunk's end the frame is turned forth.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        # One more than a chunk, as in Mamba2.
        self.register_buffer("tokens", torch.arange(1.0, CHUNK + 2).view(-1, 1, 1))

    def convolved_input(self, x: Tensor, past: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Outputs]:
        """Returns what enters the states [1, S, D], the memory, and the convolution's window, if there is one."""
        u, memory, windows = self.convolved(self.into(x), past, memory)
        return (F.silu(u) if windows else u), memory, windows

    def discrete(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns size and angle of exp(step a), and the parts of (exp(step a) - 1) / a, all of the rates' shape."""
        step, rate, frequency = F.softplus(self.number("dt_bias")), self.number("rate"), self.number("frequency")
        size, angle = (step * rate).exp(), step * frequency
        real, imag = size * torch.cos(angle), size * torch.sin(angle)
        less, square = real - self.number("one"), rate * rate + frequency * frequency
        write = (less * rate + imag * frequency) / square, (imag * rate - less * frequency) / square
        return size, angle, *write

    def output(self, residual: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Returns the stream, of what is read from the states and their input, both [1, S, D]."""
        g = F.gelu(y + u * self.number("skip"))
        return self.onto(residual, self.linear("out", g) * torch.sigmoid(self.linear("gate", g)))


def turned(real: Tensor, imag: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the parts of (real + i imag) (cos + i sin)."""
    return real * cos - imag * sin, real * sin + imag * cos


class S4(StateSpace):
    """x, residual [1, S, D], window [1, K - 1, D], if any, memory [D, 2N, 1] -> the same.

    A channel is a head of the runner's linear attention, whose keys are the parts of its states.
    """

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        length, states = x.shape[1], self.program.size("state")
        u, memory, windows = self.convolved_input(x, past, memory)
        value = u.view(length, -1, 1)
        size, angle, write, write_imag = self.discrete()
        if self.program.size("liquid"):
            real, imag = size * torch.cos(angle) + write * value, size * torch.sin(angle) + write_imag * value
            size, angle = torch.sqrt(real * real + imag * imag), torch.cumsum(torch.atan2(imag, real), 0)
        else:
            size, angle = size.unsqueeze(0).expand(length, -1, -1), self.number("tokens").narrow(0, 0, length) * angle
        cos, sin = torch.cos(angle), torch.sin(angle)  # [S, D, N]
        read = self.number("read") * (2 * math.sqrt(2 * states))
        read, read_imag = turned(read.narrow(1, 0, states), read.narrow(1, states, states), write, write_imag)
        read, read_imag = turned(read, read_imag, cos, sin)
        y, after = linear_attention(
            torch.cat([read, -read_imag], 2), torch.cat([cos, -sin], 2), value, torch.cat([size, size], 2), memory
        )
        last = (part.narrow(0, length - 1, 1).view(-1, states, 1) for part in (cos, sin))
        after = torch.cat(turned(after.narrow(1, 0, states), after.narrow(1, states, states), *last), 1)
        return self.output(residual, y.view(1, length, -1), u), *self.ends(windows, past, length), after


class S5(StateSpace):
    """x, residual [1, S, D], window [1, K - 1, D], if any, memory [P, 1, 2] -> the same.

    A state is a head of the runner's linear attention, whose value is its parts.
    """

    def forward(self, x: Tensor, residual: Tensor, past: Tensor, memory: Tensor | None = None) -> Outputs:
        length, states = x.shape[1], self.program.size("state")
        u, memory, windows = self.convolved_input(x, past, memory)
        size, angle, write, write_imag = self.discrete()  # [P, 1]
        entry = self.linear("write", u)
        real, imag = (entry.narrow(2, i * states, states).view(length, states, 1) for i in range(2))
        angles = self.number("tokens").narrow(0, 0, length) * angle  # [S, P, 1]
        cos, sin = torch.cos(angles), torch.sin(angles)
        value = torch.cat(turned(*turned(real, imag, write, write_imag), cos, -sin), 2)
        ones = self.number("one").view(1, 1, 1).expand(length, states, 1)
        y, after = linear_attention(ones, ones, value, size.unsqueeze(0).expand(length, states, 1), memory)
        y = torch.cat(turned(y.narrow(2, 0, 1), y.narrow(2, 1, 1), cos, sin), 2)  # [S, P, 2]
        last_cos, last_sin = (part.narrow(0, length - 1, 1).view(-1, 1, 1) for part in (cos, sin))
        after = torch.cat(turned(after.narrow(2, 0, 1), after.narrow(2, 1, 1), last_cos, last_sin), 2)
        y = self.linear("read", y.transpose(1, 2).reshape(1, length, 2 * states))
        return self.output(residual, y, u), *self.ends(windows, past, length), after


class SwiGLU(ProgramModule):
    """x [1, S, D] -> x + ffn(norm(x))."""

    def forward(self, x: Tensor) -> Outputs:
        return (self.onto(x, self.swiglu(self.into(x))),)


class GeGLU(ProgramModule):
    """x [1, S, D] -> x + ffn(norm(x))."""

    def forward(self, x: Tensor) -> Outputs:
        h = self.into(x)
        hidden = F.gelu(self.linear("gate", h), approximate="tanh") * self.linear("up", h)
        return (self.onto(x, self.linear("down", hidden)),)


class SquaredReLU(ProgramModule):
    """x [1, S, D] -> x + ffn(norm(x))."""

    def forward(self, x: Tensor) -> Outputs:
        hidden = F.relu(self.linear("up", self.into(x)))
        return (self.onto(x, self.linear("down", hidden * hidden)),)


class Shared(ProgramModule):
    """x, residual [1, S, D] -> residual + ffn(norm(x)), perhaps times a gate."""

    def forward(self, x: Tensor, residual: Tensor) -> Outputs:
        h = self.norm(x)
        y = self.swiglu(h)
        if "gate" in dict(self.program.sizes):
            y = y * torch.sigmoid(F.linear(h, self.number("own_gate")))
        return (residual + y,)


class Router(ProgramModule):
    """x [1, S, D] -> norm(x), the router's logits [1, S, E]."""

    def forward(self, x: Tensor) -> Outputs:
        h = self.norm(x)
        return h, F.linear(h, self.number("router"))


class Expert(ProgramModule):
    """h [1, S, D], already normalised -> the expert's output."""

    def forward(self, h: Tensor) -> Outputs:
        return (self.swiglu(h),)


class Head(ProgramModule):
    """x [1, 1, D] -> logits [1, 1, V]."""

    def forward(self, x: Tensor) -> Outputs:
        return (self.linear("head", self.norm(x)),)
