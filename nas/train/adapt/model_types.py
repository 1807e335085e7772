"""Types of decoders that transformers has, with what no layout says of those that are not read.

The reasons are checked against the modeling files of the pinned transformers; values of a configuration (biases that
are switched on, scaled positions) are refused where they are read, see `nas.train.adapt.configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_LAYER_NORM = "LayerNorm, which subtracts the mean and adds a bias, in place of RMSNorm"
_PLAIN_LAYER_NORM = "LayerNorm with weights, which subtracts the mean, in place of RMSNorm"
_UNGATED = "feed-forwards without a gate"
_BESIDE = "mixer and feed-forward beside each other in a layer"
_BIASES = "biases on every projection"
_FFN_BIASES = "biases on feed-forwards and head"
_LEARNED = "learned positions"


class ModelType(NamedTuple):
    """A type.

    Args:
        example: a released model of it, a small one if there is one.
        missing: what no layout says of any model of the type; (): it is read.
    """

    example: str
    missing: tuple[str, ...] = ()


MODEL_TYPES: Mapping[str, ModelType] = {
    "arcee": ModelType("AFM-4.5B"),
    "biogpt": ModelType("BioGPT (347M)", (_LEARNED, _LAYER_NORM, _UNGATED, _BIASES)),
    "bitnet": ModelType(
        "BitNet b1.58 2B",
        ("norms inside attention and feed-forwards", "a gate of squared ReLU", "weights of 1.58 bits"),
    ),
    "bloom": ModelType("BLOOM 560M", ("positions as biases of scores (ALiBi)", _LAYER_NORM, _UNGATED, _BIASES)),
    "blt": ModelType("BLT 1B", ("patches of bytes", "several models in one")),
    "codegen": ModelType("CodeGen 350M", (_LAYER_NORM, _UNGATED, _BESIDE, _FFN_BIASES)),
    "cohere": ModelType("Aya 23 8B", (_PLAIN_LAYER_NORM, _BESIDE)),
    "cohere2": ModelType("Tiny Aya (3.3B)", (_PLAIN_LAYER_NORM, _BESIDE)),
    "ctrl": ModelType("CTRL (1.6B)", ("positions of sines added to the embedding", _LAYER_NORM, _UNGATED, _BIASES)),
    "deepseek_v3": ModelType("Moonlight 16B-A3B"),
    "diffllama": ModelType("DiffLlama 0.3B", ("differential attention",)),
    "doge": ModelType("Doge 320M", ("masks that the values choose", "weights on the residual stream")),
    "ernie4_5": ModelType("ERNIE 4.5 0.3B"),
    "exaone4": ModelType("EXAONE 4.0 1.2B"),
    "falcon": ModelType("Falcon-RW 1B", (_LAYER_NORM, _UNGATED)),
    "falcon_h1": ModelType("Falcon-H1 0.5B"),
    "gemma": ModelType("Gemma 2B"),
    "gemma2": ModelType("Gemma 2 2B"),
    "gemma3": ModelType("Gemma 3 4B"),
    "gemma3_text": ModelType("Gemma 3 1B, 270M"),
    "gemma3n": ModelType(
        "Gemma 3n E2B", ("images and sound", "several residual streams (AltUp)", "embeddings per layer")
    ),
    "gemma3n_text": ModelType("Gemma 3n E2B", ("several residual streams (AltUp)", "embeddings per layer")),
    "gemma4": ModelType("Gemma 4 E2B", ("images", "embeddings per layer", "heads of several sizes")),
    "gemma4_text": ModelType("Gemma 4 E2B", ("embeddings per layer", "heads of several sizes")),
    "glm": ModelType("GLM-Edge 1.5B"),
    "glm4": ModelType("GLM-4-0414 9B"),
    "gpt2": ModelType("GPT-2 (124M)", (_LEARNED, _LAYER_NORM, _UNGATED, _BIASES)),
    "gpt_bigcode": ModelType("SantaCoder (1.1B)", (_LEARNED, _LAYER_NORM, _UNGATED, _BIASES)),
    "gpt_neo": ModelType("GPT-Neo 125M", (_LEARNED, _LAYER_NORM, _UNGATED, "biases on the output of attention")),
    "gpt_neox": ModelType("Pythia 70M", (_LAYER_NORM, _UNGATED, _BESIDE, _BIASES)),
    "gpt_neox_japanese": ModelType("GPT-NeoX Japanese 2.7B", (_LAYER_NORM, _UNGATED, "a bias on the last attention")),
    "gptj": ModelType("GPT-J 6B", (_LAYER_NORM, _UNGATED, _BESIDE, _FFN_BIASES)),
    "granite": ModelType("Granite 3.3 2B"),
    "granite_swa": ModelType("Granite Swash 2B"),
    "granitemoe": ModelType("Granite 3.1 1B-A400M"),
    "granitemoe_swa": ModelType("Granite Swash 3B-A600M"),
    "granitemoehybrid": ModelType("Granite 4.0 Micro, H 350M, H Tiny"),
    "granitemoeshared": ModelType("Granite 3 with shared experts"),
    "helium": ModelType("Helium 1 2B"),
    "hrm_text": ModelType("HRM-Text 1B", ("stacks of layers that run several times in turns",)),
    "hunyuan_v1_dense": ModelType("Hunyuan 0.5B", ("QK-norm behind RoPE",)),
    "jamba": ModelType("Jamba Reasoning 3B", ("norms of step sizes, B and C in Mamba",)),
    "lfm2": ModelType("LFM2.5 350M"),
    "lfm2_moe": ModelType("LFM2 8B-A1B"),
    "lfm3": ModelType("LFM3 1.7B"),
    "llama": ModelType("Llama 3.2 1B, SmolLM2"),
    "mamba": ModelType("Mamba 130M"),
    "mamba2": ModelType("Mamba-2 130M"),
    "minicpm3": ModelType("MiniCPM3 4B", ("RoPE of type 'longrope' in latent attention",)),
    "ministral3": ModelType("Ministral 3 3B", ("queries multiplied by a function of their position",)),
    "mistral": ModelType("Danube 1.8B"),
    "mixtral": ModelType("Mixtral 8x7B"),
    "modernbert-decoder": ModelType("Ettin decoder 17M", (_PLAIN_LAYER_NORM, "a norm behind the embedding")),
    "nanochat": ModelType("nanochat d32", ("QK-norm behind RoPE", "a norm behind the embedding")),
    "nemotron": ModelType("Minitron 4B", (_LAYER_NORM,)),
    "nemotron_h": ModelType("Nemotron 3 Nano 4B"),
    "olmo": ModelType("OLMo 1B"),
    "olmo2": ModelType("OLMo 2 1B"),
    "olmo3": ModelType("Olmo 3 7B"),
    "olmoe": ModelType("OLMoE 1B-7B"),
    "openai-gpt": ModelType("GPT (117M)", (_LEARNED, _LAYER_NORM, _UNGATED, _BIASES)),
    "opt": ModelType("OPT 125M", (_LEARNED, _LAYER_NORM, _UNGATED, _BIASES)),
    "phi": ModelType("Phi-2 (2.7B)", (_LAYER_NORM, _UNGATED, _BESIDE, _BIASES)),
    "phi3": ModelType("Phi-3-mini 4K (3.8B)"),
    "phimoe": ModelType(
        "Phi-tiny-MoE (3.8B)", (_LAYER_NORM, "experts that are chosen with jitter between two softmaxes")
    ),
    "qwen2": ModelType("Qwen2.5 0.5B"),
    "qwen2_moe": ModelType("Qwen1.5-MoE A2.7B"),
    "qwen3": ModelType("Qwen3 0.6B"),
    "qwen3_5": ModelType("Qwen3.5 0.8B"),
    "qwen3_5_text": ModelType("Qwen3.5 0.8B, its text part"),
    "qwen3_moe": ModelType("Qwen3 30B-A3B"),
    "recurrent_gemma": ModelType("RecurrentGemma 2B", ("gated linear recurrences (RG-LRU)",)),
    "rwkv": ModelType("RWKV-4 169M", ("the mixers of RWKV",)),
    "smollm3": ModelType("SmolLM3 3B"),
    "stablelm": ModelType("StableLM 2 1.6B", (_LAYER_NORM,)),
    "starcoder2": ModelType("StarCoder2 3B", (_LAYER_NORM, _UNGATED)),
    "vaultgemma": ModelType("VaultGemma 1B"),
    "xglm": ModelType("XGLM 564M", ("positions of sines added to the embedding", _LAYER_NORM, _UNGATED, _BIASES)),
    "youtu": ModelType("Youtu-LLM 2B"),
    "zamba2": ModelType("Zamba2 1.2B", ("layers shared with adapters of their own",)),
}
"""transformers' `model_type` -> what it is."""
