"""Models that hilnas found, for transformers: every block kind and a cache. Needs torch and transformers only.

A batch is one length: it takes no padding, because convolutions and Mamba-2 would read it as text.
"""

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

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        self.states = {
            place: tuple(part.index_select(0, beam_idx.to(part.device)) for part in state)
            for place, state in self.states.items()
        }


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


class ShortConv(nn.Module):
    """Gated short convolution."""

    def __init__(self, width, eps, kernel):
        super().__init__()
        self.in_proj = _linear(width, 3 * width)
        self.conv = Taps(width, kernel)
        self.out = _linear(width, width)

    def forward(self, x, state, past):
        gate_in, gate_out, value = self.in_proj(x).chunk(3, -1)
        gated = gate_in * value
        kept = self.conv.weight.shape[1] - 1
        before = state[0] if state else gated.new_zeros(len(x), kept, x.shape[-1])
        window = torch.cat([before, gated], 1)
        return self.out(gate_out * self.conv(window)), (window[:, window.shape[1] - kept :],)


class Attention(nn.Module):
    """Grouped-query attention, over all tokens or a window of them."""

    def __init__(self, width, eps, heads, kv_heads, head_dim, rope_theta, qk_norm, kv=None, window=None, sink=False):
        super().__init__()
        self.head_dim, self.theta, self.window, self.reads = head_dim, rope_theta, window, kv
        self.q = _linear(width, heads * head_dim)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        if kv is None:
            self.k, self.v = _linear(width, kv_heads * head_dim), _linear(width, kv_heads * head_dim)
            self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.o = _linear(heads * head_dim, width)
        self.sinks = Vector(heads) if sink else None

    def forward(self, x, state, past):
        q = self._turned(self._heads(self.q(x), self.q_norm), past)
        if self.reads is None:
            keys, values = self._turned(self._heads(self.k(x), self.k_norm), past), self._heads(self.v(x), None)
            if state:
                keys, values = torch.cat([state[0], keys], 2), torch.cat([state[1], values], 2)
        else:
            keys, values = state
        mixed = self._attend(q, keys, values)
        if self.window:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        return self.o(mixed.transpose(1, 2).flatten(2)), (keys, values)

    def _heads(self, x, norm):
        heads = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads if norm is None else norm(heads)

    def _turned(self, x, past):
        if not self.theta:
            return x
        half = self.head_dim // 2
        turns = self.theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        at = torch.arange(past, past + x.shape[2], dtype=torch.float32, device=x.device)
        cos, sin = (part.to(x.dtype) for part in (torch.outer(at, turns).cos(), torch.outer(at, turns).sin()))
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, q, keys, values):
        length, seen = q.shape[2], keys.shape[2]
        mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        if self.window:
            mask = mask.triu(seen - length - self.window + 1)
        if self.sinks is not None:  # one more key, of score zero, and the sink's logit through the mask
            hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            sinks = self.sinks.weight.to(q.dtype)[:, None, None].expand(-1, length, 1)
            mask = torch.cat([sinks, hidden.expand(len(sinks), -1, -1)], -1)
            keys, values = F.pad(keys, (0, 0, 1, 0)), F.pad(values, (0, 0, 1, 0))
        grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)


class Mamba2(nn.Module):
    """Selective state space with one decay per head (Dao and Gu 2024)."""

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

    def forward(self, x, state, past):
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
        y, memory = _scan(value * step[..., None], -step * self.A_log.float().exp(), b, c, memory)
        y = (y + value * self.D[:, None]).flatten(2).to(x.dtype)
        return self.out(self.norm(y * F.silu(gate))), (window[:, window.shape[1] - kept :], memory)


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


class SwiGLU(nn.Module):
    def __init__(self, d_model, width):
        super().__init__()
        self.gate, self.up, self.down = _linear(d_model, width), _linear(d_model, width), _linear(width, d_model)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, experts, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, outputs, inputs))


class Bias(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("weight", torch.zeros(width))


class Mixture(nn.Module):
    """SwiGLU experts, chosen by sigmoid score plus bias, weighted by normalised score."""

    def __init__(self, d_model, experts, top_k, width):
        super().__init__()
        self.top_k = top_k
        self.router, self.bias = _linear(d_model, experts), Bias(experts)
        self.gate, self.up = Experts(experts, d_model, width), Experts(experts, d_model, width)
        self.down = Experts(experts, width, d_model)

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
        return out.view(x.shape)


_MIXERS = {"conv": ShortConv, "gqa": Attention, "swa": Attention, "mamba2": Mamba2}
_FEED_FORWARDS = {"swiglu": SwiGLU, "moe": Mixture}


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


def _arguments(block):
    return {name: value for name, value in block.items() if name not in ("kind", "reads")}


class HilnasForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of `config.layers`."""

    config_class = HilnasConfig
    _no_split_modules = ("Layer",)

    def __init__(self, config):
        super().__init__(config)
        width, eps = config.hidden_size, config.norm_eps
        self.embed = nn.Embedding(config.vocab_size, width)
        own = {str(i): layer for i, layer in enumerate(config.layers) if layer.get("share") is None}
        self.layers = nn.ModuleDict({i: Layer(layer, width, eps) for i, layer in own.items()})
        self.norm = RMSNorm(width, eps)
        self.head = None if config.tie_word_embeddings else _linear(width, config.vocab_size)
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
        logits_to_keep=0,
        **kwargs,
    ):
        if attention_mask is not None and past_key_values is None and not bool(attention_mask.all()):
            raise ValueError("a batch is of one length: this model takes no padding")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = HilnasCache() if past_key_values is None else past_key_values
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.norm(self._layers(x, cache))
        x = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        logits = F.linear(x, self.embed.weight if self.head is None else self.head.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)

    def _layers(self, x, cache):
        past, after = cache.length, {}
        for depth, about in enumerate(self.config.layers):
            share = about.get("share")
            layer = self.layers[str(depth if share is None else share)]
            if layer.mixer_norm is not None:
                h = layer.mixer_norm(x)
                blocks = self.config.layers[depth if share is None else share]["mixers"]
                for place, (block, mixer) in enumerate(zip(blocks, layer.mixers, strict=True)):
                    source = block.get("reads")
                    state = after[tuple(source)] if source else cache.states.get((depth, place))
                    y, state = mixer(h, state, past)
                    x = x + y
                    if not source:
                        after[depth, place] = state
            if layer.ffn is not None:
                x = x + layer.ffn(layer.ffn_norm(x))
        cache.states, cache.length = after, past + x.shape[1]
        return x
