"""Models that hilnas found, for transformers: every block kind and a cache. Needs torch and transformers only.

Padding, on either side, is hidden from the text: inputs of mixers are zero there, scans skip it, attention does not
see it, and positions count the tokens of the text. So each row of a padded batch gets what it gets alone.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_hilnas import HilnasConfig

_CHUNK = 64


class HilnasCache:
    """State per depth and mixer: keys and values, or what a convolution still sees and what a scan remembers.

    A mixer that reads another layer's cache has none of its own.
    """

    is_compileable = False

    def __init__(self):
        self.length = 0
        self.states = {}
        self.real = None  # [B, length]: which tokens are text; None: all

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        self.states = {
            place: tuple(part.index_select(0, beam_idx.to(part.device)) for part in state)
            for place, state in self.states.items()
        }
        if self.real is not None:
            self.real = self.real.index_select(0, beam_idx.to(self.real.device))


class Padding(NamedTuple):
    """Which tokens of a padded batch are text, and their positions in it: [B, past + T], with those in the cache."""

    real: torch.Tensor
    at: torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, width, eps, groups=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x):
        parts = x.float().unflatten(-1, (self.groups, -1))
        normed = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2).to(x.dtype) * self.weight


class Taps(nn.Module):
    """Depthwise causal convolution; the input carries the K - 1 rows before the chunk."""

    def __init__(self, channels, kernel, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x):
        return F.conv1d(x.mT, self.weight[:, None], self.bias, groups=len(self.weight)).mT


class Vector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


def _linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def _last_rows(window, count, padding):
    """The last `count` rows of `window` [B, count + T, C] that are not followed by text."""
    length = window.shape[1] - count
    if padding is None:
        return window[:, length:]
    steps = torch.arange(1, length + 1, device=window.device)
    ends = (padding.real[:, -length:] * steps).amax(1)
    rows = ends[:, None] + torch.arange(count, device=window.device)
    return window.gather(1, rows[..., None].expand(-1, -1, window.shape[2]))


class ShortConv(nn.Module):
    """Gated short convolution."""

    takes_padding = True

    def __init__(self, width, eps, kernel):
        super().__init__()
        self.in_proj = _linear(width, 3 * width)
        self.conv = Taps(width, kernel)
        self.out = _linear(width, width)

    def forward(self, x, state, past, padding=None):
        gate_in, gate_out, value = self.in_proj(x).chunk(3, -1)
        gated = gate_in * value
        kept = self.conv.weight.shape[1] - 1
        before = state[0] if state else gated.new_zeros(len(x), kept, x.shape[-1])
        window = torch.cat([before, gated], 1)
        return self.out(gate_out * self.conv(window)), (_last_rows(window, kept, padding),)


class Attention(nn.Module):
    """Grouped-query attention, over all tokens or a window of them."""

    takes_padding = True

    def __init__(
        self, width, eps, heads, kv_heads, head_dim, rope_theta, qk_norm, canon=0, kv=None, window=None, sink=False
    ):
        super().__init__()
        self.canon = Taps(width, canon) if canon else None
        self.head_dim, self.theta, self.window, self.reads = head_dim, rope_theta, window, kv
        self.q = _linear(width, heads * head_dim)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        if kv is None:
            self.k, self.v = _linear(width, kv_heads * head_dim), _linear(width, kv_heads * head_dim)
            self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.o = _linear(heads * head_dim, width)
        self.sinks = Vector(heads) if sink else None

    def forward(self, x, state, past, padding=None):
        at = torch.arange(past, past + x.shape[1], device=x.device)
        if padding is not None:
            at = padding.at[:, None, -x.shape[1] :]
        x, last = (x, ()) if self.canon is None else self._mixed_in(x, state, padding)
        q = self._turned(self._heads(self.q(x), self.q_norm), at)
        if self.reads is None:
            keys, values = self._turned(self._heads(self.k(x), self.k_norm), at), self._heads(self.v(x), None)
            if state:
                keys, values = torch.cat([state[0], keys], 2), torch.cat([state[1], values], 2)
        else:
            keys, values = state[:2]
        mixed = self._attend(q, keys, values, padding)
        if self.window and padding is None:  # padding may lie between tokens of one window
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        return self.o(mixed.transpose(1, 2).flatten(2)), (keys, values, *last)

    def _mixed_in(self, x, state, padding):
        """Adds the convolution to its input."""
        kept = self.canon.weight.shape[1] - 1
        before = state[2] if state else x.new_zeros(len(x), kept, x.shape[-1])
        window = torch.cat([before, x], 1)
        return x + self.canon(window), (_last_rows(window, kept, padding),)

    def _heads(self, x, norm):
        heads = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads if norm is None else norm(heads)

    def _turned(self, x, at):
        """`at`: positions, [T] or [B, 1, T]."""
        if not self.theta:
            return x
        half = x.shape[-1] // 2
        turns = self.theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = at[..., None].float() * turns
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, q, keys, values, padding):
        mask = self._mask(q.shape[2], keys.shape[2], padding, q.device)
        if self.sinks is not None:  # one more key, of score zero, and the sink's logit through the mask
            hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            hidden = hidden.expand(-1, q.shape[1], -1, -1)
            sinks = self.sinks.weight.to(q.dtype)[:, None, None].expand(*hidden.shape[:3], 1)
            mask = torch.cat([sinks, hidden], -1)
            keys, values = F.pad(keys, (0, 0, 1, 0)), F.pad(values, (0, 0, 1, 0))
        grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)

    def _mask(self, length, seen, padding, device):
        """Which of `seen` keys each of the last `length` tokens sees: [1 or B, 1, length, seen]."""
        ones = torch.ones(1, 1, length, seen, dtype=torch.bool, device=device)
        past = seen - length
        mask = ones.tril(past)
        if padding is None:
            return mask.triu(past - self.window + 1) if self.window else mask
        mask = mask & padding.real[:, None, None, -seen:]
        if self.window:
            at = padding.at[:, None, -seen:]
            mask = mask & (at[..., -length:, None] - at[..., None, :] < self.window)
        return mask | ones.tril(past).triu(past)  # a token sees itself: without any key padding would be no number


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2): the cache holds a latent and a shared key per token."""

    def __init__(self, width, eps, heads, latent, head_dim, nope_dim, rope_dim, rope_theta, query=0):
        nn.Module.__init__(self)
        self.sizes, self.split = (heads, latent, head_dim), (nope_dim, rope_dim)
        self.theta, self.window, self.sinks = rope_theta, None, None
        asked = heads * (nope_dim + rope_dim)
        if query:
            self.q_down, self.q_norm = _linear(width, query), RMSNorm(query, eps)
            self.q_up = _linear(query, asked)
        else:
            self.q = _linear(width, asked)
        self.compressed = bool(query)
        self.kv_down, self.kv_norm = _linear(width, latent + rope_dim), RMSNorm(latent, eps)
        self.k_up, self.v_up = _linear(nope_dim, heads * latent), _linear(latent, heads * head_dim)
        self.o = _linear(heads * head_dim, width)

    def forward(self, x, state, past, padding=None):
        heads, latent, value = self.sizes
        at = torch.arange(past, past + x.shape[1], device=x.device)
        if padding is not None:
            at = padding.at[:, None, -x.shape[1] :]
        latents, shared = self.kv_down(x).split([latent, self.split[1]], -1)
        latents, shared = self.kv_norm(latents), self._turned(shared[:, None], at)[:, 0]
        if state:
            latents, shared = torch.cat([state[0], latents], 1), torch.cat([state[1], shared], 1)
        asked = self.q_up(self.q_norm(self.q_down(x))) if self.compressed else self.q(x)
        nope, rope = asked.unflatten(-1, (heads, -1)).transpose(1, 2).split(self.split, -1)
        # Maps of keys and values are absorbed: latents are keys and values of all heads.
        nope = torch.einsum("bhtn,hrn->bhtr", nope, self.k_up.weight.view(heads, latent, -1))
        # Attention divides by the root of the size of its keys, which is not that of the heads.
        root = ((latent + self.split[1]) / sum(self.split)) ** 0.5
        q = torch.cat([nope, self._turned(rope, at)], -1) * root
        keys = torch.cat([latents, shared], -1)[:, None]
        mixed = self._attend(q, keys, latents[:, None], padding)
        out = torch.einsum("bhtr,hvr->bthv", mixed, self.v_up.weight.view(heads, value, latent))
        return self.o(out.flatten(2)), (latents, shared)


class Mamba2(nn.Module):
    """Selective state space with one decay per head (Dao and Gu 2024)."""

    takes_padding = True

    def __init__(self, width, eps, state, heads, groups, expand, conv):
        super().__init__()
        self.inner, self.size, self.groups = expand * width, state, groups
        mixed = self.inner + 2 * groups * state
        self.widths = [self.inner, mixed, heads]
        self.in_proj = _linear(width, sum(self.widths))
        self.conv = Taps(mixed, conv, bias=True)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.zeros(heads))
        self.norm = RMSNorm(self.inner, eps, groups)
        self.out = _linear(self.inner, width)

    def forward(self, x, state, past, padding=None):
        gate, mixed, step = self.in_proj(x).split(self.widths, -1)
        kept, heads = self.conv.weight.shape[1] - 1, self.widths[2]
        before, memory = state or (
            mixed.new_zeros(len(x), kept, mixed.shape[-1]),
            torch.zeros(len(x), heads, self.inner // heads, self.size, device=x.device),
        )
        window = torch.cat([before, mixed], 1)
        shared = self.groups * self.size
        value, b, c = F.silu(self.conv(window)).float().split([self.inner, shared, shared], -1)
        value = value.unflatten(-1, (heads, -1))
        b, c = (part.unflatten(-1, (self.groups, -1)).repeat_interleave(heads // self.groups, 2) for part in (b, c))
        step = F.softplus(step.float() + self.dt_bias)
        if padding is not None:  # a step of no length: nothing decays, nothing is added
            step = step * padding.real[:, -x.shape[1] :, None]
        y, memory = _scan(value * step[..., None], -step * self.A_log.float().exp(), b, c, memory)
        y = (y + value * self.D[:, None]).flatten(2).to(x.dtype)
        return self.out(self.norm(y * F.silu(gate))), (_last_rows(window, kept, padding), memory)


def _scan(u, log_decay, b, c, memory):
    """memory <- exp(log_decay) memory + u b^T, y = memory c; [B, T, H, ...], in chunks of masked attention."""
    out = []
    chunks = (x.transpose(1, 2).split(_CHUNK, 2) for x in (u, log_decay, b, c))
    for u, log_decay, b, c in zip(*chunks, strict=True):
        total = log_decay.cumsum(-1)
        later = torch.ones(u.shape[2], u.shape[2], dtype=torch.bool, device=u.device).triu(1)
        spans = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        within = (c @ b.mT * spans) @ u
        across = (c @ memory.mT) * total.exp()[..., None]
        left = (total[..., -1:] - total).exp()[..., None]
        memory = total[..., -1].exp()[..., None, None] * memory + (u * left).mT @ b
        out.append((within + across).transpose(1, 2))
    return torch.cat(out, 1), memory


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule (Yang, Kautz and Hatamizadeh 2024)."""

    takes_padding = True

    def __init__(self, width, eps, heads, key_heads, head_dim, conv):
        super().__init__()
        self.heads, self.size = heads, head_dim
        self.widths = [key_heads * head_dim, key_heads * head_dim, heads * head_dim]
        self.qkv = _linear(width, sum(self.widths))
        self.conv = Taps(sum(self.widths), conv)
        self.beta, self.step_size = _linear(width, heads), _linear(width, heads)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.gate = _linear(width, heads * head_dim)
        self.norm = RMSNorm(head_dim, eps)
        self.out = _linear(heads * head_dim, width)

    def forward(self, x, state, past, padding=None):
        mixed = self.qkv(x)
        kept = self.conv.weight.shape[1] - 1
        before, memory = state or (
            mixed.new_zeros(len(x), kept, mixed.shape[-1]),
            torch.zeros(len(x), self.heads, self.size, self.size, device=x.device),
        )
        window = torch.cat([before, mixed], 1)
        parts = F.silu(self.conv(window)).float().split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        q, k = (_unit_length(part).repeat(1, 1, self.heads // part.shape[2], 1) for part in (q, k))
        log_decay = -F.softplus(self.step_size(x).float() + self.dt_bias) * self.A_log.float().exp()
        beta = self.beta(x).float().sigmoid()
        if padding is not None:  # nothing decays, nothing is replaced
            real = padding.real[:, -x.shape[1] :, None]
            log_decay, beta = log_decay * real, beta * real
        y, memory = _delta_rule(q * self.size**-0.5, k, v, log_decay, beta, memory)
        gated = self.norm(y.to(x.dtype)) * F.silu(self.gate(x).unflatten(-1, (-1, self.size)))
        return self.out(gated.flatten(2)), (_last_rows(window, kept, padding), memory)


class GatedLinearAttention(nn.Module):
    """Linear attention in which each key has a decay of its own (Yang et al. 2023)."""

    takes_padding = True

    def __init__(self, width, eps, heads, head_dim, rank):
        super().__init__()
        self.heads, self.size = heads, head_dim
        inner = heads * head_dim
        self.qkv = _linear(width, 3 * inner)
        self.decay_down, self.decay_up = _linear(width, rank), _linear(rank, inner)
        self.decay_bias = nn.Parameter(torch.zeros(inner))
        self.gate = _linear(width, inner)
        self.norm = RMSNorm(head_dim, eps)
        self.out = _linear(inner, width)

    def forward(self, x, state, past, padding=None):
        q, k, v = (part.float().unflatten(-1, (-1, self.size)) for part in self.qkv(x).chunk(3, -1))
        decay = self.decay_up(self.decay_down(x)).float() + self.decay_bias
        log_decay = F.logsigmoid(decay) / 16
        if padding is not None:  # nothing decays; the keys of zeros add nothing
            log_decay = log_decay * padding.real[:, -x.shape[1] :, None]
        memory = state[0] if state else torch.zeros(len(x), self.heads, self.size, self.size, device=x.device)
        y, memory = _gated_scan(q * self.size**-0.5, k, v, log_decay.unflatten(-1, (-1, self.size)), memory)
        gated = self.norm(y.to(x.dtype)) * F.silu(self.gate(x).unflatten(-1, (-1, self.size)))
        return self.out(gated.flatten(2)), (memory,)


class MatrixLSTM(nn.Module):
    """mLSTM: linear attention with exponential input gates, divided by the read of the keys' sum (Beck et al. 2024)."""

    takes_padding = True

    def __init__(self, width, eps, heads, head_dim, key_dim):
        super().__init__()
        self.heads, self.size, self.keys, self.eps = heads, head_dim, key_dim, eps
        self.widths = [heads * key_dim, heads * key_dim, heads * head_dim]
        self.qkv = _linear(width, sum(self.widths))
        self.gates = _linear(width, 2 * heads)
        self.gate_bias = nn.Parameter(torch.zeros(2 * heads))
        self.gate = _linear(width, heads * head_dim)
        self.norm_weight = nn.Parameter(torch.ones(heads * head_dim))
        self.out = _linear(heads * head_dim, width)

    def forward(self, x, state, past, padding=None):
        parts = self.qkv(x).float().split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        incoming, kept = (15 * torch.tanh((self.gates(x).float() + self.gate_bias) / 15)).chunk(2, -1)
        incoming, log_decay = incoming.exp(), F.logsigmoid(kept)
        if padding is not None:  # nothing decays, nothing comes in
            real = padding.real[:, -x.shape[1] :, None]
            incoming, log_decay = incoming * real, log_decay * real
        memory = state[0] if state else torch.zeros(len(x), self.heads, self.size + 1, self.keys, device=x.device)
        values = F.pad(v, (0, 1), value=1.0) * incoming[..., None]
        y, memory = _scan(values, log_decay, k, q * self.keys**-0.5, memory)
        y = F.layer_norm(y[..., :-1] / y[..., -1:].abs().clamp(min=1.0), (self.size,), eps=self.eps)
        return self.out((y.flatten(2) * self.norm_weight).to(x.dtype) * self.gate(x).sigmoid()), (memory,)


def _gated_scan(q, k, v, log_decay, memory):
    """memory <- exp(log_decay)[:, None] memory + k v^T; y = memory^T q; [B, T, H, ...], in short chunks."""
    out = []
    chunks = (x.transpose(1, 2).split(_CHUNK // 4, 2) for x in (q, k, v, log_decay))
    for q, k, v, log_decay in zip(*chunks, strict=True):
        total = log_decay.cumsum(-2)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        spans = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
        within = (q[..., :, None, :] * k[..., None, :, :] * spans).sum(-1) @ v
        out.append(((q * total.exp()) @ memory + within).transpose(1, 2))
        left = k * (total[..., -1:, :] - total).exp()
        memory = total[..., -1, :].exp()[..., None] * memory + left.mT @ v
    return torch.cat(out, 1), memory


def _unit_length(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta_rule(q, k, v, log_decay, beta, memory):
    """memory <- exp(log_decay) memory; memory <- memory + beta k (v - memory^T k)^T; y = memory^T q.

    [B, T, H, ...], in chunks: what their tokens write is the solution of a triangular system.
    """
    out = []
    chunks = (x.transpose(1, 2).split(_CHUNK, 2) for x in (q, k, v, log_decay, beta))
    for q, k, v, log_decay, beta in zip(*chunks, strict=True):
        total = log_decay.cumsum(-1)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        spans = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        written, since = k * beta[..., None], total.exp()[..., None]
        new = v * beta[..., None] - (written * since) @ memory
        new = torch.linalg.solve_triangular((written @ k.mT) * spans, new, upper=False, unitriangular=True)
        out.append(((q * since) @ memory + (q @ k.mT * spans) @ new).transpose(1, 2))
        left = k * (total[..., -1:] - total).exp()[..., None]
        memory = total[..., -1].exp()[..., None, None] * memory + left.mT @ new
    return torch.cat(out, 1), memory


class SwiGLU(nn.Module):
    def __init__(self, d_model, width):
        super().__init__()
        self.gate, self.up, self.down = _linear(d_model, width), _linear(d_model, width), _linear(width, d_model)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SquaredReLU(nn.Module):
    def __init__(self, d_model, width):
        super().__init__()
        self.up, self.down = _linear(d_model, width), _linear(width, d_model)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    def __init__(self, experts, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs, inputs))


class Bias(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("weight", torch.zeros(width))


class Mixture(nn.Module):
    """SwiGLU experts, chosen by sigmoid score plus bias, weighted by normalised score; shared ones are added."""

    def __init__(self, d_model, experts, top_k, width, shared=0):
        super().__init__()
        self.top_k = top_k
        self.router, self.bias = _linear(d_model, experts), Bias(experts)
        self.gate, self.up = Experts(experts, d_model, width), Experts(experts, d_model, width)
        self.down = Experts(experts, width, d_model)
        self.shared = SwiGLU(d_model, shared * width) if shared else None

    def forward(self, x):
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float().sigmoid()
        chosen = (scores + self.bias.weight).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        weights = (weights / (weights.sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = tokens[token]
            hidden = F.silu(F.linear(part, self.gate.weight[expert])) * F.linear(part, self.up.weight[expert])
            out.index_add_(0, token, F.linear(hidden, self.down.weight[expert]) * weights[token, place, None])
        out = out.view(x.shape)
        return out if self.shared is None else out + self.shared(x)


_MIXERS = {
    "conv": ShortConv,
    "gqa": Attention,
    "swa": Attention,
    "mla": LatentAttention,
    "mamba2": Mamba2,
    "gdn": GatedDeltaNet,
    "gla": GatedLinearAttention,
    "mlstm": MatrixLSTM,
}
_FEED_FORWARDS = {"swiglu": SwiGLU, "relu2": SquaredReLU, "moe": Mixture}


class Layer(nn.Module):
    """x + sum of mixers(norm(x)), then x + ffn(norm(x)); either half may be missing."""

    def __init__(self, layer, width, eps):
        super().__init__()
        blocks = layer.get("mixers", [])
        self.mixer_norm = RMSNorm(width, eps) if blocks else None
        self.mixers = nn.ModuleList(_MIXERS[block["kind"]](width, eps, **_arguments(block)) for block in blocks)
        ffn = layer.get("ffn")
        self.ffn_norm = RMSNorm(width, eps) if ffn else None
        self.ffn = _FEED_FORWARDS[ffn["kind"]](width, **_arguments(ffn)) if ffn else None

    def forward(self, x, states, past, padding):
        """Maps x and the state of each mixer to those afterwards."""
        after = []
        if self.mixer_norm is not None:
            h = self.mixer_norm(x)
            if padding is not None:
                h = h.masked_fill(~padding.real[:, -x.shape[1] :, None], 0)
            for mixer, state in zip(self.mixers, states, strict=True):
                masked = padding is not None and getattr(mixer, "takes_padding", False)
                y, state = mixer(h, state, past, *((padding,) if masked else ()))
                x = x + y
                after.append(state)
        if self.ffn is not None:
            x = x + self.ffn(self.ffn_norm(x))
        return x, after


def _arguments(block):
    return {name: value for name, value in block.items() if name not in ("kind", "reads")}


class HilnasForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of `config.layers`."""

    config_class = HilnasConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ("Layer",)

    def __init__(self, config):
        super().__init__(config)
        width, eps = config.hidden_size, config.norm_eps
        self.embed = nn.Embedding(config.vocab_size, width)
        own = {str(i): layer for i, layer in enumerate(config.layers) if layer.get("share") is None}
        self.layers = nn.ModuleDict({i: Layer(layer, width, eps) for i, layer in own.items()})
        self.norm = RMSNorm(width, eps)
        self.head = None if config.tie_word_embeddings else _linear(width, config.vocab_size)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Returns logits and, where asked for, the loss, the cache and the hidden states.

        Args:
            attention_mask: [B, T], or with the tokens in the cache [B, past + T]; 0 is padding, on either side.
            output_hidden_states: also return the embeddings and the output of each layer, of the last one after the
                final norm.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        cache = HilnasCache() if past_key_values is None else past_key_values
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        padding = self._padding(attention_mask, cache, x)
        passed = [] if output_hidden_states else None
        x = self.norm(self._layers(x, cache, padding, use_cache or past_key_values is not None, passed))
        hidden_states = None if passed is None else (*passed, x)
        x = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        logits = F.linear(x, self.embed.weight if self.head is None else self.head.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache else None, hidden_states=hidden_states
        )
        return output.to_tuple() if return_dict is False else output

    def _padding(self, attention_mask, cache, x):
        """Adds the mask of `x` to that of the cache; None: no token is padding."""
        batch, length = x.shape[:2]
        new = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[1] < length:
                raise ValueError(f"attention_mask must be [batch, tokens], not {list(attention_mask.shape)}")
            new = attention_mask[:, -length:].bool()
        if cache.real is None:
            if bool(new.all()):
                return None
            cache.real = new.new_ones(batch, cache.length)
        cache.real = torch.cat([cache.real, new], 1)
        at = cache.real.cumsum(1) - 1
        if bool((new[:, 1:] & ~new[:, :-1] & (at[:, -length:][:, 1:] > 0)).any()):
            raise ValueError("padding must come before or after a text, or after a part of it that the cache holds")
        return Padding(cache.real, at)

    def _layers(self, x, cache, padding, keep, passed):
        """Returns the output of the last layer.

        Args:
            keep: whether the cache is used afterwards.
            passed: gets the input of each layer; None: not wanted.
        """
        past, length, after = cache.length, x.shape[1], {}
        checkpointing = self.gradient_checkpointing and self.training
        read = {tuple(block["reads"]) for _, blocks in self._blocks() for block in blocks if "reads" in block}
        for depth, (owner, blocks) in enumerate(self._blocks()):
            if passed is not None:
                passed.append(x)
            layer, places = self.layers[owner], [(depth, place) for place in range(len(blocks))]
            states = [
                after[tuple(block["reads"])] if "reads" in block else cache.states.get(place)
                for place, block in zip(places, blocks, strict=True)
            ]
            # A cache that one layer hands to another is no input of a checkpoint, and would get no gradient.
            if checkpointing and not any(states) and not read.intersection(places):
                x = self._gradient_checkpointing_func(partial(_output, layer, states, past, padding), x)
                continue
            x, states = layer(x, states, past, padding)
            for place, block, state in zip(places, blocks, states, strict=True):
                if "reads" not in block and (keep or place in read):
                    after[place] = state
        cache.states, cache.length = after, past + length
        return x

    def _blocks(self):
        """Yields, for each depth, the key of the layer whose weights run there, and its mixers."""
        for depth, layer in enumerate(self.config.layers):
            owner = depth if layer.get("share") is None else layer["share"]
            yield str(owner), self.config.layers[owner].get("mixers", [])


def _output(layer, states, past, padding, x):
    return layer(x, states, past, padding)[0]
