"""GGUF files of upstream's converter are imported with the same weights, and ours have the same keys and tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exhaustive import mostly_exhaustive
from gguf import GGUFReader
from safetensors.torch import load_file
from test_adapt_checkpoints import FAMILIES, save_theirs
from tokenizer_lab import FORMS, write_model_tokenizer
from upstream_converter import Converter

from nas.core.canonical import sha256_of
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.train.adapt.checkpoints import import_model
from nas.train.release.found_tokenizer import found_tokenizer
from nas.train.release.model_tokenizer import read_model_tokenizer

SAID_BY_GGUF = {
    "llama": {"rms_norm_eps": 1e-5},
    "llama-scaled": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **FAMILIES["llama-scaled"]["rope_parameters"],
            "rope_theta": 500000.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-linear": {"rms_norm_eps": 1e-5},
    "qwen2": {"rms_norm_eps": 1e-5},
    "qwen3": {"rms_norm_eps": 1e-5},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "rms_norm_eps": 1e-5},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "mixtral": {"rms_norm_eps": 1e-5},
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen3-moe": {"decoder_sparse_step": 1},
    "falcon_h1": {"rms_norm_eps": 1e-5, "mamba_d_head": 16, "head_dim": 16},
    "falcon_h1-normed": {
        "mamba_d_ssm": 128,
        "mamba_d_head": 16,
        "head_dim": 16,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    },
    "granite-hybrid": {
        **{f"{part}_multiplier": 1.0 for part in ("embedding", "residual")},
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
    },
    "qwen3.5": {"rope_parameters": {**FAMILIES["qwen3.5"]["rope_parameters"], "mrope_section": [11, 11, 10]}},
    "phi3-longrope": {"rms_norm_eps": 1e-5},
    "phi3-partial": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.75},
}
"""Settings that these architectures of llama.cpp fix, in place of those of the other tests; norms of 1e-5, as ours."""
TYPES = (
    "arcee",
    "exaone4",
    "falcon_h1",
    "falcon_h1-normed",
    "olmo2",
    "olmo3",
    "llama",
    "llama-scaled",
    "qwen3-linear",
    "qwen2",
    "qwen3",
    "smollm3",
    "glm4",
    "granite",
    "granite-hybrid",
    "granite-hybrid-moe",
    "lfm2",
    "lfm2-moe",
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3.5",
    "granite-moe",
    "phi3",
    "phi3-longrope",
)
WRITTEN = (
    *("llama", "llama-scaled", "qwen2", "qwen3", "qwen3-linear", "lfm2", "phi3-partial", "falcon_h1"),
    *("falcon_h1-normed", "qwen3.5", "smollm3", "granite-hybrid"),
)
"""Types whose files are compared with those of the converter."""
READ = ("arcee", "exaone4", "granite-moe", "lfm2-moe", "olmo3", "phi3", "qwen2")
"""Types whose file of upstream is read by default: one of each that llama.cpp orders or joins in a way of its own.

`llama-scaled` is another one, but its file is compared tensor by tensor below.
"""
COMPARED = ("llama-scaled", "lfm2", "phi3-partial", "falcon_h1", "qwen3.5")
"""Types whose files are compared by default; these are read, too."""
TEXT = "The year 2024: größer — don't! \t\n  def f(x):\r\n\n    return x<|im_end|>"
OF_TRANSFORMERS = {
    "general.basename",
    "general.finetune",
    "general.languages",
    "general.license",
    "general.name",
    "general.organization",
    "general.size_label",
    "general.tags",
    "general.type",
    "general.version",
}
"""What upstream's converter makes of a folder's name and model card, which a checkpoint has not."""
MORE = {
    "general.file_type": "always F32 here",
    "general.quantization_version": "ours writes it also where nothing is quantised",
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), "1: ours has multipliers in the weights"),
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "expert_shared_feed_forward_length"),
        "of hybrids without experts, not read",
    ),
    "attention.scale": "the usual one: ours has multipliers in the weights",
    "rope.dimension_count": "equals the size of a head, which loaders assume",
    "attention.key_length": "ours always writes the size of a head",
    "attention.value_length": "ours always writes the size of a head",
    "full_attention_interval": "of qwen35, not read beside the list of layers",
    "vocab_size": "follows from the tokens",
    "tokenizer.ggml.add_eos_token": "false is what loaders assume",
    "tokenizer.ggml.add_bos_token": "ours always writes it",
    "tokenizer.ggml.add_space_prefix": "of SentencePiece alone",
    "tokenizer.ggml.unknown_token_id": "never used by byte-level BPE",
    "attention.sliding_window": "of phi3, whose loader turns windows off",
    "rope.scaling.original_context_length": "of phi3, without a scaling that it belongs to",
    "expert_gating_func": "sigmoid is what the loader assumes",
}
"""Keys that only one of the two writes, and why that changes nothing."""


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    with Converter(tmp_path_factory.mktemp("converter")) as running:
        yield running


def model_with_tokenizer(folder: Path, name: str) -> Path:
    """Writes a model of the family `name` with a tokenizer, in a folder of transformers."""
    form = FORMS["qwen3"]
    if name == "glm4":  # of which the converter wants the token by name
        form = replace(form, special=[*form.special, "<|user|>"])
    path = write_model_tokenizer(folder, form, [TEXT], 280)
    config = {**FAMILIES[name], **SAID_BY_GGUF.get(name, {}), "vocab_size": 288, "eos_token_id": 282}
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "config.json"}
    save_theirs(folder, config)
    for file, content in before.items():
        (folder / file).write_bytes(content)
    assert path.is_file()
    if name.startswith("granite-hybrid"):  # as released: transformers 5 writes other words than the converter reads
        saved = (folder / "config.json").read_text()
        saved = saved.replace('"linear_attention"', '"mamba"').replace('"full_attention"', '"attention"')
        (folder / "config.json").write_text(saved)
    if name.startswith("phi3"):  # of which the converter knows SentencePiece and Phi-4's tokenizer
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder


@pytest.mark.parametrize("name", mostly_exhaustive(TYPES, *READ))
def test_a_gguf_file_is_its_folder(name: str, converter: Converter, tmp_path: Path) -> None:
    folder = model_with_tokenizer(tmp_path / "in", name)
    converter.convert(folder, tmp_path / "theirs.gguf", pre="qwen2")
    reference = import_model(folder, tmp_path / "folder.safetensors")
    read = import_model(tmp_path / "theirs.gguf", tmp_path / "gguf.safetensors")
    assert read.layout == reference.layout
    expected, actual = load_file(tmp_path / "folder.safetensors"), load_file(tmp_path / "gguf.safetensors")
    assert expected.keys() == actual.keys()
    for tensor in expected:
        assert torch.allclose(expected[tensor], actual[tensor], rtol=1e-6, atol=1e-7 * tensor.endswith("A_log")), tensor
    tokenizer = found_tokenizer(tmp_path / "theirs.gguf").tokenizer
    original = read_model_tokenizer(folder / "tokenizer.json")
    assert tokenizer.tokenizer.encode(TEXT).ids == original.tokenizer.encode(TEXT).ids
    assert tokenizer.chat_templates == original.chat_templates
    assert {*tokenizer.ends} >= {*original.ends} or name == "glm4", "of which the converter names the ends itself"


@pytest.mark.parametrize("name", mostly_exhaustive(WRITTEN, *COMPARED))
def test_our_files_equal_those_of_the_converter(name: str, converter: Converter, tmp_path: Path) -> None:
    folder = model_with_tokenizer(tmp_path / "in", name)
    converter.convert(folder, tmp_path / "theirs.gguf", pre="qwen2")
    weights, tokenizer = tmp_path / "w.safetensors", found_tokenizer(folder)
    layout = import_model(folder, weights).layout
    vocabulary = tokenizer.tokenizer.vocabulary(layout.vocab)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    LLAMA_CPP.export_trained(layout, "f32", checkpoint, tmp_path / "ours.gguf", "m", vocabulary, tokenizer.context)
    reference, candidate = GgufFile.read(tmp_path / "theirs.gguf"), GgufFile.read(tmp_path / "ours.gguf")
    arch = reference.header.arch
    assert candidate.header.arch == arch
    short = {key: key.removeprefix(f"{arch}.") for key in {*reference.fields, *candidate.fields}}
    one_sided = {short[key] for key in reference.fields.keys() ^ candidate.fields.keys()} - OF_TRANSFORMERS
    assert one_sided <= MORE.keys(), one_sided - MORE.keys()
    differing = {"general.name", "general.size_label", "general.file_type", f"{arch}.full_attention_interval"}
    if arch == "granitehybrid":  # without positions, any length is the converter's
        differing.add(f"{arch}.context_length")
    both = reference.fields.keys() & candidate.fields.keys() - differing
    for key in both:
        assert candidate.fields[key] == reference.fields[key], key
    assert reference.tensors.keys() == candidate.tensors.keys()
    for tensor, stored in reference.tensors.items():
        assert (stored.kind, stored.shape) == (candidate.tensors[tensor].kind, candidate.tensors[tensor].shape), tensor
        computed = tensor.endswith(("rope_freqs.weight", ".ssm_a", ".ssm_in.weight", ".attn_k.weight"))
        digits = 1e-6 if computed or arch == "qwen35" else 0.0  # in float32 there, or in another order
        np.testing.assert_allclose(candidate.values(tensor), reference.values(tensor), rtol=digits, err_msg=tensor)
    assert len(GGUFReader(tmp_path / "ours.gguf").tensors) == len(candidate.tensors)
    assert import_model(tmp_path / "ours.gguf", tmp_path / "again.safetensors").layout == layout
    again, before = load_file(tmp_path / "again.safetensors"), load_file(weights)
    for tensor, values in before.items():
        assert torch.allclose(again[tensor], values, rtol=1e-6, atol=1e-7 * tensor.endswith("A_log")), tensor
