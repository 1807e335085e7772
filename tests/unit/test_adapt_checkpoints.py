"""Models of transformers are imported with the same logits, and everything that a layout cannot say is refused."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import nas
from exhaustive import mostly_exhaustive
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from nas.core.errors import InvalidInput, Unsupported
from nas.core.published import named_layout
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights
from nas.train.adapt.checkpoints import import_model, read_model
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

ROPE = {"rope_type": "default", "rope_theta": 20000.0}
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": ROPE},
    "llama-scaled": {
        "model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3-linear": {
        "model_type": "qwen3", "head_dim": 32,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": 16},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-windows": {
        "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
    },
    "qwen2": {"model_type": "qwen2", "rope_parameters": ROPE, "tie_word_embeddings": True},
    "qwen2-windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1,
                "eos_token_id": 2},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.25,
        "attention_multiplier": 0.1, "logits_scaling": 4.0, "tie_word_embeddings": True,
    },
    "arcee": {"model_type": "arcee", "rope_parameters": ROPE},
    "arcee-yarn": {
        "model_type": "arcee", "head_dim": 16, "num_key_value_heads": 1, "max_position_embeddings": 1280,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 20.0, "original_max_position_embeddings": 64,
        },
    },
    "olmo3-yarn": {
        "model_type": "olmo3", "sliding_window": 8, "max_position_embeddings": 512, "rope_theta": 700.0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 32, "pad_token_id": 0},
    "helium": {"model_type": "helium", "head_dim": 16},
    "nemotron_h": {
        "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2,
        "embedding_multiplier": 5.6, "lm_head_multiplier": 0.4, "key_multiplier": 0.4, "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.31], "mlp_multipliers": [0.9, 0.2], "rms_norm_eps": 1e-4,
    },
    "falcon_h1-normed": {
        "model_type": "falcon_h1", "mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 16,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True,
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "phi3-partial": {
        "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_attention_heads": 2,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75},
    },
    "phi3-longrope": {
        "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_attention_heads": 2,
        "max_position_embeddings": 1024, "original_max_position_embeddings": 16, "rms_norm_eps": 1e-4,
        "rope_scaling": {
            "type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + i / 12 for i in range(12)],
            "long_factor": [1.5 + i * i / 4 for i in range(12)],
        },
        "partial_rotary_factor": 0.75,
    },
    "phi3-longrope-short": {
        "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_attention_heads": 2,
        "original_max_position_embeddings": 512,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0 + i for i in range(16)], "long_factor": [32.0] * 16, "factor": 4.0,
        },
    },
    "granite-hybrid": {
        "model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 16,
        "mamba_n_groups": 2, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "residual_multiplier": 0.2,
        "attention_multiplier": 0.05, "logits_scaling": 3.0, "tie_word_embeddings": True,
    },
    "gemma": {"model_type": "gemma", "head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 20, "rms_norm_eps": 1e-3,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        },
    },
    "vaultgemma": {"model_type": "vaultgemma", "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    "olmo": {"model_type": "olmo", "tie_word_embeddings": True},
    "olmo-untied": {"model_type": "olmo", "rope_parameters": ROPE},
    "olmo2": {"model_type": "olmo2", "rms_norm_eps": 1e-3},
    "olmo3": {
        "model_type": "olmo3", "sliding_window": 8, "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4": {
        "model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention"] * 3,
    },
    "exaone4-windows": {
        "model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True,
    },
    "glm": {"model_type": "glm", "head_dim": 32, "pad_token_id": 0},
    "glm-whole": {
        "model_type": "glm", "head_dim": 32, "attention_bias": False, "pad_token_id": 0,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
    },
    "glm4": {"model_type": "glm4", "head_dim": 32, "pad_token_id": 0, "rms_norm_eps": 1e-3},
    "granite-swa": {
        "model_type": "granite_swa", "sliding_window": 8, "layer_rope_theta": [20000.0, 0, 500.0],
        "embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.1, "logits_scaling": 4.0,
        "eos_token_id": 2, "bos_token_id": 1,
    },
    "mamba2": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2,
        "tie_word_embeddings": True,
    },
    "mamba": {"model_type": "mamba", "state_size": 8, "intermediate_size": 128, "layer_norm_epsilon": 1e-6},
    "mamba-untied": {
        "model_type": "mamba", "time_step_rank": 6, "expand": 3, "intermediate_size": 192, "conv_kernel": 3,
        "tie_word_embeddings": False,
    },
    "youtu": {
        "model_type": "youtu", "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
        "v_head_dim": 16, "rope_parameters": ROPE, "num_key_value_heads": 4,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 24, "rms_norm_eps": 1e-4, "rope_interleave": False, "n_group": 1,
        "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "lfm3": {
        "model_type": "lfm3", "head_dim": 32, "sliding_window": 8, "norm_eps": 1e-3, "pad_token_id": 0,
        "layer_types": ["conv", "full_attention", "sliding_attention"], "bos_token_id": 1, "eos_token_id": 2,
    },
    "lfm3-plain": {
        "model_type": "lfm3", "head_dim": 16, "use_sandwich_norm": False, "use_attention_gate": False,
        "layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6},
    "qwen2-moe": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    },
    "qwen2-moe-windows": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 8, "qkv_bias": False,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2,
    },
    "granite-moe": {
        "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 6.0,
        "residual_multiplier": 0.25, "attention_multiplier": 0.1, "logits_scaling": 4.0, "tie_word_embeddings": True,
    },
    "granite-moe-shared": {
        "model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 32,
        "shared_intermediate_size": 64, "residual_multiplier": 0.5,
    },
    "granite-moe-swa": {
        "model_type": "granitemoe_swa", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "sliding_window": 8, "layer_rope_theta": [20000.0, 0, 500.0], "residual_multiplier": 0.25,
        "attention_multiplier": 0.1,
    },
    "granite-hybrid-moe": {
        "model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64,
        "mamba_n_heads": 8, "mamba_d_state": 16, "rms_norm_eps": 1e-5, "residual_multiplier": 0.2,
        "attention_multiplier": 0.05,
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    "lfm2-yarn": {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention", "full_attention"], "block_multiple_of": 32,
        "rope_parameters": YARN,
    },
    "falcon_h1-yarn": {
        "model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "rope_parameters": YARN,
    },
    "granite-hybrid-yarn": {
        "model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 16,
        "rms_norm_eps": 1e-5, "position_embedding_type": "rope", "rope_parameters": YARN,
    },
    "lfm3-yarn": {
        "model_type": "lfm3", "head_dim": 32, "sliding_window": 8, "pad_token_id": 0,
        "layer_types": ["conv", "full_attention", "sliding_attention"], "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN},
    },
    "llama-yarn": {
        "model_type": "llama", "max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "qwen3.5-yarn": {
        "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "rope_parameters": {**YARN, "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]},
    },
    "smollm3-windows": {
        "model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": YARN,
    },
    "exaone4-unwindowed": {"model_type": "exaone4", "layer_types": ["full_attention"] * 3},
    "exaone4-yarn": {
        "model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": YARN,
    },
    "qwen3-unwindowed": {
        "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": None,
        "max_window_layers": 0,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip


def save_theirs(folder: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Any:
    """Saves a model of `config` with random weights in `folder` and returns it; no weight has a special value."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **config})).eval()
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=noise)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def ours_of(folder: Path, output: Path) -> Model:
    layout = import_model(folder, output).layout
    model = Model(layout, None).eval()
    load_weights(model, output)
    return model


def random_ids(vocab: int = 288) -> torch.Tensor:
    return torch.randint(3, vocab, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_model_comes_in_and_goes_out_with_the_same_logits(name: str, tmp_path: Path) -> None:
    upstream = save_theirs(tmp_path / "in", FAMILIES[name])
    model = ours_of(tmp_path / "in", tmp_path / "weights.safetensors")
    ids = random_ids()
    expected = upstream(ids).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.05, "too flat to tell models apart"
    before, state = model.prefill(ids[:, :17])
    cached = [before, model.prefill(ids[:, 17:-1], state)[0]]
    torch.testing.assert_close(torch.cat(cached, 1), expected[:, :-1], rtol=0, atol=1e-4)

    options = FileOptions(gguf=(), dtype="float32", name="out")
    write_files(tmp_path / "out", model.layout, _checkpoint(tmp_path / "weights.safetensors"), options, lambda _: None)
    back = ours_of(tmp_path / "out/transformers", tmp_path / "back.safetensors")
    assert back.layout == model.layout
    torch.testing.assert_close(back(ids), expected, rtol=0, atol=1e-4)
    # The code is ours: layouts that no stock class holds come with it.
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out/transformers", dtype=torch.float32, local_files_only=True, trust_remote_code=True
    ).eval()
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-4)


def _checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _load(folder: Path) -> Any:
    """Loads a folder as users do, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


# By default one of each kind of tensors: plain, tied, fused, stacked experts, convolutions, means that are subtracted,
# constants. Names and factors of the others are read by the test above.
SHARDED = (
    "llama", "qwen3", "phi3", "mixtral", "qwen2-moe", "granite-moe", "lfm2-moe", "lfm2", "olmo", "gemma2", "granite",
    "falcon_h1", "nemotron_h", "qwen3.5",
)  # fmt: skip


@pytest.mark.parametrize("name", mostly_exhaustive(FAMILIES, *SHARDED))
@torch.no_grad()
def test_bfloat16_shards_are_read(name: str, tmp_path: Path) -> None:
    save_theirs(tmp_path / "in", FAMILIES[name], dtype=torch.bfloat16, shard="60KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    ids = random_ids()
    expected = _load(tmp_path / "in")(ids).logits
    model = ours_of(tmp_path / "in", tmp_path / "weights.safetensors")
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)


LARGE: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 4608,
}  # fmt: skip
"""The shape of LFM2-350M."""
LARGE_OF: dict[str, dict[str, Any]] = {
    "granite-hybrid": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4, "shared_intermediate_size": 4608,
        "mamba_n_heads": 32, "mamba_d_state": 128, "mamba_n_groups": 1,
    },
    "lfm2": {"layer_types": (["conv"] * 2 + ["full_attention"] + ["conv"]) * 4, "block_multiple_of": 256},
    "lfm2-moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 4, "moe_intermediate_size": 1024},
    "qwen3-windows": {"head_dim": 64, "max_window_layers": 8},
    "qwen3": {"head_dim": 64},
    "mistral": {"head_dim": 64},
}  # fmt: skip


@pytest.mark.exhaustive  # half a minute and 6 GB each; by default the tests above do the same with small models
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_models_of_350m_have_the_same_logits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = {**SIZES, **FAMILIES[name], **LARGE, **LARGE_OF.get(name, {})}
    upstream = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).eval()
    upstream.save_pretrained(tmp_path / "in")
    del upstream
    ids = torch.randint(3, 65536, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = _load(tmp_path / "in")(ids).logits
    model = ours_of(tmp_path / "in", tmp_path / "weights.safetensors")
    assert model.layout.params.total > 2.5e8
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changed", "messages"),
    [
        ("llama", {"attention_bias": True, "hidden_act": "gelu"}, ["biases (attention_bias)", "activation 'gelu'"]),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, ["RoPE of type 'dynamic'"]),
        (
            "arcee-yarn",
            {"rope_parameters": {**FAMILIES["arcee-yarn"]["rope_parameters"], "beta_fast": 16, "truncate": False}},
            ["other bounds [16, 1] than 32 and 1", "between pairs (truncate)"],
        ),
        (
            "llama-scaled",
            {"rope_parameters": {**FAMILIES["llama-scaled"]["rope_parameters"], "high_freq_factor": 8.0}},
            ["factors of low and high frequencies [1.0, 8.0]"],
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["sped up (factor 0.5)"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["RoPE on a part of each head"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantised (quantization_config)"]),
        ("llama", {"quantization": {"group_size": 64, "bits": 4}}, ["quantised (quantization)"]),
        ("llama", {"hidden_size": 72}, ["multiple of 32"]),
        ("phi3", {"rope_scaling": {"type": "dynamic"}}, ["RoPE of type 'dynamic'"]),
        ("lfm2", {"rope_parameters": {"rope_type": "longrope"}}, ["RoPE of type 'longrope'"]),
        ("ernie4_5", {"use_bias": True}, ["biases (use_bias)"]),
        ("falcon_h1", {"mamba_rms_norm": True}, ["its norm in front of the gate", "epsilon 0.0001"]),
        (
            "nemotron_h",
            {"layers_block_type": ["moe", 3, "x"], "mlp_hidden_act": "gelu"},
            ["experts of squared ReLU", "layers of type 3", "layers of type 'x'", "activation 'gelu'"],
        ),
        ("lfm2", {"conv_bias": True}, ["biases (conv_bias)"]),
        ("lfm2-moe", {"norm_topk_prob": False}, ["add up to one"]),
        (
            "granite-hybrid",
            {"num_local_experts": 8, "shared_intermediate_size": 100, "mamba_proj_bias": True},
            ["shared experts of width 100, no multiple", "mamba_proj_bias"],
        ),
        ("deepseek-v3", {"n_group": 2, "attention_bias": True}, ["groups of experts", "biases (attention_bias)"]),
        ("youtu", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ["scaled RoPE in latent attention"]),
        ("mamba", {"use_bias": True, "use_conv_bias": False}, ["biases (use_bias)", "without bias in its convolution"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clipped queries, keys and values"]),
        ("qwen3.5", {"linear_value_head_dim": 32}, ["keys of 16 and values of 32 numbers"]),
        ("granite-hybrid", {"rms_norm_eps": 1e-6}, ["epsilon 1e-06"]),
        ("lfm2", {"layer_types": ["a", "b", ["c"]]}, ["layers of type 'a'", "layers of type 'b'", "type ['c']"]),
        ("granite-hybrid", {"layer_types": [1, "b", "c"]}, ["layers of type 1", "layers of type 'b'"]),
        ("llama", {"model_type": ["llama"]}, ["['llama']; families that are read: arcee"]),
        ("llama", {"model_type": "nobodys"}, ["'nobodys'; families that are read: arcee"]),
    ],
)
def test_what_no_layout_says_is_listed(name: str, changed: dict[str, Any], messages: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **FAMILIES[name], **changed}))
    with pytest.raises(Unsupported) as caught:
        read_model(tmp_path)
    for message in messages:
        assert message in str(caught.value)


def test_llama_3_2_is_read(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = read_model(tmp_path).layout
    mixer = "A32/8(qk_norm=0,rope_factor=32,rope_theta=500000,rope_tokens=8192)"
    assert layout.format() == f"d2048 v128256 ffn=swiglu:8192 [{mixer}*16]"
    assert layout.params.total == 1_235_814_400


PUBLISHED: dict[str, tuple[dict[str, Any], str, int]] = {
    "Gemma 3 1B": (
        {
            "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "num_hidden_layers": 26,
            "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 6912,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000, "rope_local_base_freq": 10000,
            "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
        },
        "d1152 v262144 norms=both ffn=geglu:6912 [W4/1@512:256(rope_theta=10000)*5 A4/1:256",
        999_885_952,
    ),
    "Gemma 2 2B": (
        {
            "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "head_dim": 256,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 9216, "rms_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0,
            "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        "d2304 v256000 norms=both softcap=30 ffn=geglu:9216 [W8/4@4096:256(qk_norm=0,rope_theta=10000,softcap=50) A8/4",
        2_614_341_888,
    ),
    "OLMo 2 1B": (
        {
            "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 8192, "rms_norm_eps": 1e-6,
            "rope_theta": 500000, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu",
        },
        "d2048 v100352 untied norms=behind ffn=swiglu:8192 [A16/16(qk_norm_wide=1,rope_theta=500000)*16]",
        1_484_916_736,
    ),
    "Mamba 130M": (
        {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
         "intermediate_size": 1536, "time_step_rank": 48, "conv_kernel": 4, "layer_norm_epsilon": 1e-5},
        "d768 v50280 ffn=none [H*24]",
        129_135_360,
    ),
    "LFM3 1.7B": (
        {"model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 4},
        "d2048 v128000 norms=both ffn=swiglu:7680 [C7*2 A16/4(gate=1,rope_dim=64,rope_theta=1000) C7 W16/4@256(gate=1,",
        1_728_801_536,
    ),
}  # fmt: skip
"""Model -> its configuration as it was released, how its layout begins, and its weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_counts(name: str, tmp_path: Path) -> None:
    config, begins, weights = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = read_model(tmp_path).layout
    assert layout.format().startswith(begins)
    assert layout.params.total == weights


def test_the_cache_of_lfm3_is_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["LFM3 1.7B"][0]))
    layout = read_model(tmp_path).layout
    assert layout == named_layout("LFM3-1.7B")
    assert layout.kv_bytes(131072) == pytest.approx(1.61e9, rel=0.01)


UNREAD = {
    "gpt2": ({}, {"learned positions", "LayerNorm", "without a gate", "biases on every"}),
    "stablelm": ({}, {"LayerNorm"}),
    "phi": (
        {},
        {"LayerNorm", "without a gate", "beside each other", "biases on every"},
    ),
}
"""Type -> values that differ from the defaults, and what is missing; each once."""


@pytest.mark.parametrize("kind", UNREAD)
def test_a_type_that_is_not_read_is_refused_with_what_it_has(kind: str, tmp_path: Path) -> None:
    changes, missing = UNREAD[kind]
    config = AutoConfig.for_model(kind).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=rf"no layout says models of type '{kind}'; missing: .*; families") as caught:
        read_model(tmp_path)
    listed = str(caught.value).split("missing: ")[1].split("; families")[0].split("; ")
    assert len(listed) == len(missing)
    for feature in missing:
        assert any(feature in one for one in listed), feature


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        (json.dumps({"model_type": "llama", "hidden_size": "64"}), "whole number"),
        (json.dumps({**SIZES, **FAMILIES["lfm2"], "layer_types": ["conv"]}), "list of 3"),
        (json.dumps({**SIZES, "model_type": "llama", "rms_norm_eps": 0}), "positive number"),
    ],
)
def test_a_damaged_configuration_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        read_model(tmp_path)


def test_a_biased_model_without_a_flag_is_refused_by_its_tensors(tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["llama"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=r"q_proj\.bias"):
        import_model(tmp_path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_missing_or_misshapen_tensor_is_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["llama"])
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"lacks model\.norm\.weight"):
        import_model(tmp_path, tmp_path / "out.safetensors")
    save_file({**tensors, "model.norm.weight": norm[:32].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="shape"):
        import_model(tmp_path, tmp_path / "out.safetensors")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **FAMILIES["llama"]}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InvalidInput, match="never read"):
        import_model(tmp_path, tmp_path / "out.safetensors")


def test_an_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **FAMILIES["llama"]}))
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"'\.\./other\.safetensors'"):
        import_model(tmp_path, tmp_path / "out.safetensors")


def test_the_command_prints_the_layout(tmp_path: Path) -> None:
    save_theirs(tmp_path / "in", FAMILIES["qwen3"])
    result = nas("import", str(tmp_path / "in"), "-o", str(tmp_path / "out.safetensors"), "--json")
    report = json.loads(result.out)
    assert report["family"] == "qwen3"
    assert report["layout"] == "d64 v288 ffn=swiglu:96 [A4/2:32(rope_theta=10000)*3]"


def changed_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def changed_config(folder: Path, *without: str, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in without} | values
    (folder / "config.json").write_text(json.dumps(config))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_equal_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {HEAD: tensors[EMBEDDING]}


def with_head_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = tensors.pop(EMBEDDING)
    return tensors | {HEAD: head}


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


HEADS: dict[str, tuple[bool, Any]] = {
    "another head, though tied": (False, lambda tensors: tensors),
    "an equal head": (True, with_equal_head),
    "the head alone": (True, with_head_alone),
    "saved without the head": (True, without_prefix),
    "saved without the prefix, with the head": (False, without_prefix),
}
"""Name -> whether the model was saved as tied, and what was done to its tensors; the configuration says tied."""


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("family", ["llama", "lfm2"])
@torch.no_grad()
def test_heads_are_tied_where_transformers_ties_them(family: str, name: str, tmp_path: Path) -> None:
    tied, change = HEADS[name]
    save_theirs(tmp_path, {**FAMILIES[family], "tie_word_embeddings": tied})
    changed_tensors(tmp_path, change)
    changed_config(tmp_path, tie_word_embeddings=True)
    model = ours_of(tmp_path, tmp_path / "weights.safetensors")
    assert model.layout == read_model(tmp_path).layout and model.layout.tied is tied
    torch.testing.assert_close(model(random_ids()), _load(tmp_path)(random_ids()).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind", "prefix"),
    [
        ("qwen3.5", {"model_type": "qwen3_5", "tie_word_embeddings": True}, "model.language_model."),
        ("gemma3", {"model_type": "gemma3"}, "model.language_model."),
        ("gemma3", {"model_type": "gemma3"}, "language_model.model."),
    ],
)
def test_the_text_part_of_a_model_with_images_is_read(
    family: str, kind: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    save_theirs(tmp_path, FAMILIES[family])
    import_model(tmp_path, tmp_path / "text.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**kind, "text_config": text, "vision_config": {}}))
    others = {"model.visual.patch_embed.proj.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    changed_tensors(
        tmp_path, lambda tensors: others | {name.replace("model.", prefix, 1): t for name, t in tensors.items()}
    )
    assert "encoder of images" in import_model(tmp_path, tmp_path / "part.safetensors").left_out
    assert (tmp_path / "part.safetensors").read_bytes() == (tmp_path / "text.safetensors").read_bytes()


WITHOUT_KEY_HEADS = {"deepseek_v3", "mamba", "mamba2", "youtu"}
"""Types of models whose layouts have no heads of keys and values."""
KINDS = sorted({str(config["model_type"]) for config in FAMILIES.values()} - WITHOUT_KEY_HEADS)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_heads_of_keys_are_those_of_the_class(kind: str, tmp_path: Path) -> None:
    usual = getattr(CONFIG_MAPPING[kind], "num_key_value_heads", None)
    config = next(config for config in FAMILIES.values() if config["model_type"] == kind)
    sizes = {**SIZES, **config, "num_attention_heads": 2 * (usual or 2), "head_dim": 16}
    del sizes["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    blocks = [block for layer in read_model(tmp_path).layout.layers for block in layer.mixers]
    heads = {block.int("kv_heads") for block in blocks if block.kind in ("gqa", "swa")}
    assert heads == {usual or 4}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["qwen3.5"])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.norm.weight": torch.ones(SIZES["hidden_size"])}, tmp_path / "model.safetensors")
    import_model(tmp_path, tmp_path / "weights.safetensors")


def test_what_files_of_gemma_3_leave_out_are_defaults_of_transformers(tmp_path: Path) -> None:
    released = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # fmt: skip
    config = {"model_type": "gemma3", "text_config": released, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    upstream = AutoConfig.from_pretrained(tmp_path, local_files_only=True).text_config
    layout = read_model(tmp_path).layout
    attention = layout.layers[5].mixers[0].resolve(layout.d_model)
    assert (layout.vocab, layout.depth, layout.tied) == (upstream.vocab_size, upstream.num_hidden_layers, True)
    shape = (attention.int("heads"), attention.int("kv_heads"), attention.int("head_dim"), attention.get("rope_factor"))
    assert shape == (upstream.num_attention_heads, upstream.num_key_value_heads, upstream.head_dim, 8)
    assert [layer.mixers[0].kind == "swa" for layer in layout.layers] == [
        kind == "sliding_attention" for kind in upstream.layer_types
    ]


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, {**FAMILIES["llama"], "tie_word_embeddings": True})
    changed_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(InvalidInput, match=r"lacks lm_head\.weight; if the embedding is the head, set tie_word"):
        import_model(tmp_path, tmp_path / "out.safetensors")


ROPES: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "default", "rope_theta": 20000.0}},
    {"rope_scaling": {"type": "default", "rope_theta": 20000.0}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "default", "rope_theta": 20000.0}, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 20000.0},
    {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 7.0}, "rope_theta": 20000.0},
    {"rope_theta": 20000},
    {},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_the_base_of_rope_is_the_one_that_transformers_takes(rope: dict[str, Any], tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "llama", **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path, local_files_only=True).rope_parameters["rope_theta"]
    mixer = read_model(tmp_path).layout.layers[0].mixers[0]
    assert mixer.get("rope_theta") == expected


def test_constants_that_make_weights_infinite_are_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["granite"])
    changed_config(tmp_path, embedding_multiplier=1e300)
    with pytest.raises(InvalidInput, match=r"embed_tokens.weight becomes infinite: constants .* multiply it by inf"):
        import_model(tmp_path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    changed_config(tmp_path, rms_norm_eps=1e-90)
    with pytest.raises(Unsupported, match="norms of epsilon 1e-90"):
        import_model(tmp_path, tmp_path / "out.safetensors")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 26906\n"
HTML = b"<!DOCTYPE html><html><head><title>429 Too Many Requests</title></head></html>"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("content", "problem"), [(LFS, "git lfs pull"), (HTML, "a web page"), (b"", "it is empty"), (None, "incomplete")]
)
def test_what_a_download_left_is_named(name: str, content: bytes | None, problem: str, tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["llama"])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-60] if content is None else content)
    if content is None and name == "config.json":
        problem = "no JSON"
    with pytest.raises(InvalidInput, match=problem) as caught:
        import_model(tmp_path, tmp_path / "out.safetensors")
    assert str(tmp_path / name) in str(caught.value)


def test_folders_of_something_else_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"holds an adapter \(PEFT\).*merge_and_unload"):
        read_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidInput, match=r"model\.gguf: not a GGUF file"):
        read_model(tmp_path / "model.gguf")
    with pytest.raises(InvalidInput, match="no such file: name a folder of transformers"):
        read_model(tmp_path / "nothing")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, FAMILIES["llama"], shard="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    stale = load_file(shards[0])
    save_file(load_file(shards[-1]) | {name: -tensor for name, tensor in stale.items()}, shards[-1])
    with pytest.raises(InvalidInput, match=rf"{shards[-1].name}: holds .*, as {shards[0].name} does"):
        import_model(tmp_path, tmp_path / "out.safetensors")


def odd_configurations() -> list[dict[str, Any]]:
    """Returns configurations in which one value is replaced by each of many odd ones."""
    values: list[Any] = [
        None, True, False, 0, -1, 1, 3, 2**31, 10**12, 10**30, 1e308, 1e-308, 0.5, "", "x", "Infinity", [], [1],
        ["conv"] * 2, [["conv"]], [{}, None], {}, {"a": 1}, {"rope_type": "linear"}, {"rope_theta": None},
        {"rope_theta": "x"}, {"rope_type": None}, {"x": {}}, "a" * 1000, float("nan"),
    ]  # fmt: skip
    odd = []
    layer = {"mixers": [{"kind": "conv", "kernel": 3}], "ffn": {"kind": "swiglu", "width": 96}}
    hilnas = {"model_type": "hilnas", **SIZES, "layers": [layer, {"share": 0}], "norm_eps": 1e-5}
    for base in [hilnas, *({**SIZES, **family} for family in FAMILIES.values())]:
        more = dict.fromkeys(("rope_theta", "rope_scaling", "tie_word_embeddings", "quantization_config", "head_dim"))
        for key in {**more, "hidden_act": "silu", "rms_norm_eps": 1e-6, **base}:
            odd += [base | {key: value} for value in values]
    for value in values:
        odd += [hilnas | {"layers": [layer | {part: value}, {"share": 0}]} for part in ("mixers", "ffn", "share")]
        block = {"kind": "conv", "kernel": value}
        layers = [value], [{"mixers": [{"kind": value}]}], [{"mixers": [block], "ffn": block}], [{"mixers": [value]}]
        odd += [hilnas | {"layers": list(one)} for one in layers]
    return odd


ALL_ODD = odd_configurations()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.exhaustive), 37], ids=["all", "some"])
def test_odd_configurations_are_read_or_refused(step: int, tmp_path: Path) -> None:
    assert len(ALL_ODD) > 4000
    begin = time.process_time()
    for config in ALL_ODD[::step]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            read_model(tmp_path)
        except InvalidInput as error:
            assert 0 < len(str(error)) < 3000, config
        except Exception as error:
            raise AssertionError(config) from error
    assert time.process_time() - begin < 60
