"""The table of types names every decoder of the pinned transformers, and what it says of them is true."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_fuzz import FAMILIES as FUZZED
from nas.train.adapt.checkpoints import FAMILIES
from nas.train.adapt.model_types import MODEL_TYPES

NOT_SMALL = frozenset(
    [
        "afmoe",
        "apertus",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "bamba",
        "beam",
        "cohere2_moe",
        "cpmant",
        "cwm",
        "dbrx",
        "deepseek_v2",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "falcon_mamba",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt-sw3",
        "gpt_oss",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jetmoe",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "ministral",
        "mpt",
        "olmo_hybrid",
        "persimmon",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "seed_oss",
        "solar_open",
        "xlstm",
        "zamba",
        "zaya",
    ]
)
"""Decoders of text without a released model below five billion weights of their own type."""
NO_DECODERS = frozenset(
    [
        "aria_text",
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "camembert",
        "cohere_compass_text",
        "data2vec-text",
        "dots3_note",
        "dots3_note_text",
        "electra",
        "emu3",
        "ernie",
        "fuyu",
        "gemma4_assistant",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "gemma4_unified_text",
        "git",
        "got_ocr2",
        "inkling2_text",
        "inkling_text",
        "llama4",
        "llama4_text",
        "marian",
        "mbart",
        "megatron-bert",
        "minimax_m3_vl_text",
        "mllama",
        "moshi",
        "moss_transcribe_diarize",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "pegasus",
        "phi4_multimodal",
        "plbart",
        "prophetnet",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "trocr",
        "whisper",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    ]
)
"""Encoders, halves of translators, and parts of models of images and sound, which transformers lists with decoders."""
EVIDENCE = {
    "LayerNorm, which subtracts": r"\bLayerNorm\(|F\.layer_norm\(",
    "LayerNorm with weights": r"hidden_states - mean|\bLayerNorm\(",
    "feed-forwards without a gate": r"(fc1|fc_in|dense_h_to_4h|c_fc|up_proj|point_wise_feed_forward_network)\b",
    "beside each other": r"mlp_output \+ attn_output|residual(?: \+ \w+){2}|(?:\w+ \+ ){2}residual|attn_output \+ feed",
    "biases on feed-forwards": r"fc_in = nn\.Linear\(\w+, \w+\)",
    "biases on every projection": r"bias=True|Conv1D\(|bias=(bias|config\.\w*bias\w*)|nn\.Linear\([^)=]*\)",
    "learned positions": r"(wpe|positions_embed|LearnedPositionalEmbedding)",
    "B and C in Mamba": r"b_layernorm\(",
    "latent attention": r"kv_lora_rank",
    "norms inside": r"ffn_sub_norm",
    "gate of squared ReLU": r"act_fn\(self\.gate_proj",
    "1.58 bits": r"BitNet",
    "ALiBi": r"build_alibi_tensor",
    "patches of bytes": r"patch_lengths",
    "several models in one": r"class BltGlobalTransformer",
    "sines": r"Sinusoidal|def positional_encoding",
    "groups of experts": r"n_group",
    "differential attention": r"lambda_q1",
    "masks that the values choose": r"dt_states",
    "weights on the residual stream": r"input_residual",
    "images and sound": r"audio_features",
    "images": r"image_features",
    "AltUp": r"AltUp",
    "embeddings per layer": r"embed_tokens_per_layer",
    "heads of several sizes": r"global_head_dim",
    "output of attention": r"out_proj = nn\.Linear\(self\.embed_dim, self\.embed_dim, bias=True\)",
    "last attention": r"use_bias=layer_number == config\.num_hidden_layers - 1",
    "in turns": r"H_cycles",
    "QK-norm behind RoPE": r"= apply_rotary_pos_emb\((?s:.{,200})(query_layernorm|q_norm)\(",
    "function of their position": r"get_llama_4_attn_scale",
    "behind the embedding": r"self\.norm\(hidden_states\)  # Additional norm|self\.norm\(self\.tok_embeddings",
    "jitter": r"jitter",
    "RG-LRU": r"class \w+Rglru",
    "RWKV": r"class RwkvSelfAttention",
    "adapters of their own": r"adapter",
}
"""Part of a reason -> what the modeling or configuration file of a type has for which it holds."""


def test_every_type_of_transformers_is_in_one_list() -> None:
    lists = [*MODEL_TYPES, *NOT_SMALL, *NO_DECODERS]
    assert sorted(lists) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_odd_configurations_of_every_type_that_is_read_are_tried() -> None:
    assert FUZZED.keys() == FAMILIES.keys()


def test_what_is_read_lacks_nothing() -> None:
    assert {name for name, kind in MODEL_TYPES.items() if not kind.missing} == FAMILIES.keys() - {"hilnas"}


@pytest.mark.parametrize("name", [name for name, kind in MODEL_TYPES.items() if kind.missing])
def test_transformers_has_what_a_refusal_says(name: str) -> None:
    spec, module = find_spec("transformers"), model_type_to_module_name(name)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "models" / module
    text = "".join((folder / f"{kind}_{module}.py").read_text() for kind in ("modeling", "configuration"))
    for reason in MODEL_TYPES[name].missing:
        pattern = next(pattern for part, pattern in EVIDENCE.items() if part in reason)
        assert re.search(pattern, text), reason
