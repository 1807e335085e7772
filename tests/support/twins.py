"""Modules of transformers with the weights of ours: references for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from nas.model.nn.base import FeedForward, Mixer

_EPS = 1e-5


@dataclass(frozen=True)
class Twin:
    """A module of transformers; called, it maps x [B, T, D] -> [B, T, D] as ours does."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the module's output."""
        return self.call(x)


def twin_of(part: Mixer | FeedForward, d_model: int) -> Twin:
    """Returns transformers' module with the same weights.

    Args:
        part: of one of the kinds in `TWINS`; "swa" with sinks and without QK-norm, as gpt-oss has it, "moe" with shared
            experts, as DeepSeek-V3 has it.
        d_model: its width.
    """
    weights = {name: tensor.detach().clone() for name, tensor in part.state_dict().items()}
    return TWINS[part.block.kind](part, d_model, weights)


def _loaded(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict(weights)
    return module.eval().requires_grad_(False)


def _mamba2(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    block = mixer.block
    config = transformers.Mamba2Config(
        hidden_size=d_model, num_hidden_layers=1, expand=block.int("expand"), state_size=block.int("state"),
        num_heads=mixer.heads, head_dim=mixer.inner // mixer.heads, conv_kernel=block.int("conv"),
        n_groups=mixer.groups, chunk_size=32,
    )  # fmt: skip
    names = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "out.weight": "out_proj.weight"}
    weights = {names.get(name, name): tensor for name, tensor in weights.items()}
    weights["conv1d.weight"] = weights["conv1d.weight"][:, None]
    module = _loaded(Mamba2Mixer(config, layer_idx=0), weights)
    return Twin(module, module)


def _mamba(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    block = mixer.block
    config = transformers.MambaConfig(
        hidden_size=d_model, num_hidden_layers=1, expand=block.int("expand"), state_size=block.int("state"),
        conv_kernel=block.int("conv"), time_step_rank=block.int("rank"),
    )  # fmt: skip
    names = {
        "conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "out.weight": "out_proj.weight",
        "dt_bias": "dt_proj.bias",
    }  # fmt: skip
    weights = {names.get(name, name): tensor for name, tensor in weights.items()}
    weights["conv1d.weight"] = weights["conv1d.weight"][:, None]
    module = _loaded(MambaMixer(config, layer_idx=0), weights)
    return Twin(module, module)


def _gdn(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    """Its value heads that share a key are next to each other, and its projections are ordered by key head."""
    keys, size, per_key = mixer.block.int("key_heads"), mixer.size, mixer.heads // mixer.block.int("key_heads")
    config = transformers.Qwen3NextConfig(
        hidden_size=d_model, num_hidden_layers=1, linear_num_value_heads=mixer.heads, linear_num_key_heads=keys,
        linear_key_head_dim=size, linear_value_head_dim=size, linear_conv_kernel_dim=mixer.block.int("conv"),
        rms_norm_eps=_EPS, layer_types=["linear_attention"],
    )  # fmt: skip
    order = torch.arange(mixer.heads).view(per_key, keys).T  # [key head, which of its value heads]

    def by_head(rows: Tensor, heads: int) -> Tensor:
        return rows.view(heads, -1, *rows.shape[1:])

    def values(rows: Tensor) -> Tensor:
        return by_head(rows, mixer.heads)[order].flatten(1, 2)

    q, k, v = torch.split(weights["qkv.weight"], mixer.widths)
    conv_q, conv_k, conv_v = torch.split(weights["conv.weight"], mixer.widths)
    qkvz = [by_head(q, keys), by_head(k, keys), values(v), values(weights["gate.weight"])]
    ba = [values(weights["beta.weight"]), values(weights["step_size.weight"])]
    module = _loaded(
        Qwen3NextGatedDeltaNet(config, layer_idx=0),
        {
            "in_proj_qkvz.weight": torch.cat(qkvz, 1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat(ba, 1).flatten(0, 1),
            "conv1d.weight": torch.cat([conv_q, conv_k, values(conv_v).flatten(0, 1)])[:, None],
            "dt_bias": weights["dt_bias"][order].flatten(),
            "A_log": weights["A_log"][order].flatten(),
            "norm.weight": weights["norm.weight"],
            "out_proj.weight": values(weights["out.weight"].T).flatten(0, 1).T,
        },
    )
    return Twin(module, module)


def _mlstm(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    config = transformers.xLSTMConfig(
        hidden_size=d_model, num_heads=mixer.heads, num_hidden_layers=1, qk_dim_factor=mixer.keys / mixer.size,
        v_dim_factor=1.0, norm_eps=_EPS, gate_soft_cap=15.0, weight_mode="single", use_bias=False, mode="inference",
        chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native",
        step_kernel="native",
    )  # fmt: skip
    q, k, v = torch.split(weights["qkv.weight"], mixer.widths)
    (incoming, forget), (incoming_bias, forget_bias) = weights["gates.weight"].chunk(2), weights["gate_bias"].chunk(2)
    module = _loaded(
        xLSTMLayer(config),
        {
            "q.weight": q, "k.weight": k, "v.weight": v, "ogate_preact.weight": weights["gate.weight"],
            "igate_preact.weight": incoming, "igate_preact.bias": incoming_bias,
            "fgate_preact.weight": forget, "fgate_preact.bias": forget_bias,
            "multihead_norm.weight": weights["norm_weight"], "out_proj.weight": weights["out.weight"],
        },
    )  # fmt: skip
    return Twin(module, lambda x: module(x)[0])


def _swa(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    config = transformers.GptOssConfig(
        hidden_size=d_model, num_attention_heads=mixer.heads, num_key_value_heads=mixer.kv_heads,
        head_dim=mixer.head_dim, num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=mixer.window,
        attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": mixer.rope_theta},
        attn_implementation="eager",
    )  # fmt: skip
    module = _loaded(
        gpt_oss.GptOssAttention(config, layer_idx=0),
        {f"{name}_proj.weight": weights[f"{name}.weight"] for name in "qkvo"} | {"sinks": weights["sinks.weight"]},
    )

    def call(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        lag = positions[:, None] - positions
        mask = torch.where((lag >= 0) & (lag < mixer.window), 0.0, -torch.inf).expand(len(x), 1, -1, -1)
        y: Tensor = module(x, gpt_oss.GptOssRotaryEmbedding(config)(x, positions[None]), mask)[0]
        return y

    return Twin(module, call)


def _mla(mixer: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    """Its RoPE pairs neighbours, and its keys and values are one projection."""
    heads, latent, nope, rope, value, rank = (
        mixer.block.int(name) for name in ("heads", "latent", "nope_dim", "rope_dim", "head_dim", "query")
    )
    config = transformers.DeepseekV2Config(
        hidden_size=d_model, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=rank or None,
        kv_lora_rank=latent, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
        rope_theta=mixer.rope_theta, rms_norm_eps=_EPS, attn_implementation="eager",
    )  # fmt: skip
    pairs = torch.arange(rope).view(2, -1).T.flatten()  # number i of the first half comes next to i of the second
    queries = weights["q_up.weight" if rank else "q.weight"].view(heads, nope + rope, -1)
    queries = torch.cat([queries[:, :nope], queries[:, nope:][:, pairs]], 1).flatten(0, 1)
    down = torch.cat([weights["kv_down.weight"][:latent], weights["kv_down.weight"][latent:][pairs]])
    keys = weights["k_up.weight"].view(heads, latent, nope).transpose(1, 2)
    state = {
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_layernorm.weight": weights["kv_norm.weight"],
        "kv_b_proj.weight": torch.cat([keys, weights["v_up.weight"].view(heads, value, latent)], 1).flatten(0, 1),
        "o_proj.weight": weights["o.weight"],
    }
    if rank:
        state |= {
            "q_a_proj.weight": weights["q_down.weight"],
            "q_a_layernorm.weight": weights["q_norm.weight"],
            "q_b_proj.weight": queries,
        }
    else:
        state["q_proj.weight"] = queries
    module = _loaded(deepseek_v2.DeepseekV2Attention(config, layer_idx=0), state)
    for name, part in module.named_children():
        if name.endswith("_layernorm"):
            part.variance_epsilon = _EPS  # type: ignore[assignment]

    def call(x: Tensor) -> Tensor:
        length = x.shape[1]
        turns = deepseek_v2.DeepseekV2RotaryEmbedding(config)(x, torch.arange(length)[None])
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        y: Tensor = module(x, position_embeddings=turns, attention_mask=mask)[0]
        return y

    return Twin(module, call)


def _relu2(ffn: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    config = transformers.ArceeConfig(hidden_size=d_model, intermediate_size=ffn.block.int("width"))
    module = _loaded(ArceeMLP(config), {name.replace(".", "_proj."): tensor for name, tensor in weights.items()})
    return Twin(module, module)


def _moe(ffn: Any, d_model: int, weights: dict[str, Tensor]) -> Twin:
    """It divides weights by their sum, ours by that and 1e-6."""
    experts, top_k, width, shared = (ffn.block.int(name) for name in ("experts", "top_k", "width", "shared"))
    config = transformers.DeepseekV3Config(
        hidden_size=d_model, moe_intermediate_size=width, n_routed_experts=experts, num_experts_per_tok=top_k,
        n_shared_experts=shared, n_group=1, topk_group=1, routed_scaling_factor=1.0, experts_implementation="eager",
    )  # fmt: skip
    state = {f"shared_experts.{name}_proj.weight": weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")}
    state |= {
        "gate.weight": weights["router.weight"],
        "gate.e_score_correction_bias": weights["bias.weight"],
        "experts.gate_up_proj": torch.cat([weights["gate.weight"], weights["up.weight"]], 1),
        "experts.down_proj": weights["down.weight"],
    }
    module = _loaded(DeepseekV3MoE(config), state)
    return Twin(module, module)


TWINS: dict[str, Callable[[Any, int, dict[str, Tensor]], Twin]] = {
    "swa": _swa, "mla": _mla, "mamba": _mamba, "mamba2": _mamba2, "gdn": _gdn, "mlstm": _mlstm, "relu2": _relu2,
    "moe": _moe,
}  # fmt: skip
"""Kind -> what makes its twin."""
