"""Tiny tokenizers in the forms in which families of models have them, with the files of transformers beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as InTurn

TEXT = ["the cat sat on the mat; 12345 cats don't sit.", "def add(a, b):\n    return a + b\n", "größer als 2024 Meere"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_CONTRACTIONS, _REST = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(numbers: str) -> InTurn:
    pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_REST}"
    return InTurn([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_in_turn(*patterns: str) -> InTurn:
    splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return InTurn([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class Form:
    """One family's tokenizer."""

    pre: str
    pre_tokenizer: Any
    special: Sequence[str]
    settings: Mapping[str, Any]
    ignore_merges: bool = False
    nfc: bool = False
    first: bool = False
    starts: str | None = None
    added: Sequence[str] = ()
    template: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


FORMS = {
    "llama": Form(
        "llama-bpe", split_by(r"\p{N}{1,3}"), ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, ignore_merges=True, starts="<|begin_of_text|>",
        template="{{ bos_token }}{{ messages[0].content }}<|eot_id|>",
    ),
    "qwen3": Form(
        "qwen2", split_by(r"\p{N}"), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
        nfc=True, added=["<think>", "</think>"],
    ),
    "smollm3": Form(
        "llama-bpe", split_by(r"\p{N}{1,3}"), ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
        {"bos_token": None, "eos_token": "<|im_end|>"}, ignore_merges=True, template=CHATML,
    ),
    "granite3": Form(
        "smollm", InTurn([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        ["<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>"],
        {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}, first=True,
    ),
    "granite4": Form(
        "dbrx", split_by(r"\p{N}{1,3}"), ["<|end_of_text|>", "<|start_of_role|>"], {"eos_token": "<|end_of_text|>"},
    ),
    "deepseek": Form(
        "deepseek-v3", split_in_turn(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK),
        ["<eos>"], {"eos_token": "<eos>"},
    ),
    "default": Form(
        "default", split_in_turn(r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
        ["<eos>"], {"eos_token": "<eos>"},
    ),
    "gpt2": Form(
        "gpt-2", ByteLevel(add_prefix_space=False), ["<|endoftext|>"],
        {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}},
    ),
    "lfm2": Form(
        "llama-bpe", split_by(r"\p{N}{1,3}"), ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_end|>"],
        {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}, ignore_merges=True,
        first=True, starts="<|startoftext|>", template=CHATML,
    ),
}  # fmt: skip


def write_model_tokenizer(folder: Path, form: Form, texts: Sequence[str] = TEXT, vocab: int = 320) -> Path:
    """Writes the tokenizer's files of `vocab` tokens and a few added ones; returns the path of its tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = form.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=ByteLevel.alphabet(), show_progress=False,
        special_tokens=list(form.special) if form.first else [],
    )  # fmt: skip
    tokenizer.train_from_iterator(list(texts) * 20, trainer)
    about = json.loads(tokenizer.to_str())
    about["model"]["ignore_merges"] = form.ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(about))
    tokenizer.decoder = decoders.ByteLevel()
    if form.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(form.special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in form.added])
    start = tokenizer.token_to_id(form.starts) if form.starts else None
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{form.starts} $A", pair=f"{form.starts} $A {form.starts} $B:1",
            special_tokens=[(form.starts, start)],
        )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **form.settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if form.template:
        (folder / "chat_template.jinja").write_text(form.template)
    return folder / "tokenizer.json"


ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def with_template(template: str | None) -> Form:
    """Qwen3's form with another chat template."""
    return replace(FORMS["qwen3"], settings={**FORMS["qwen3"].settings, "chat_template": template})


QWEN3 = with_template(CHATML + ASK)


def write_qwen3(folder: Path, form: Form = QWEN3) -> Path:
    """Writes a random Qwen3 with a tokenizer, as `save_pretrained` does; returns the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=400, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_model_tokenizer(folder, form)
    return folder


def write_sentencepiece_form(folder: Path, prefix: bool = False) -> Path:
    """Writes a tokenizer as Gemma has it, or with `prefix` Llama 2: BPE of characters, with bytes for unknown ones.

    As transformers converts SentencePiece's scores, all pairs that make a token are merges, in the order of tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = Split(" ", "merged_with_previous")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXT * 20], trainer)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)
    about = json.loads(tokenizer.to_str())
    ids = {token: i for token, i in about["model"]["vocab"].items() if token not in pieces}
    pairs = [(i, at, token[:at], token[at:]) for token, i in ids.items() for at in range(1, len(token))]
    about["model"]["merges"] = [pair for _, _, *pair in sorted(pairs) if all(part in ids for part in pair)]
    about["added_tokens"] = [token for token in about["added_tokens"] if not token["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(about))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"
