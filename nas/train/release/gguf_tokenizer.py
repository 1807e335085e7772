"""The tokenizer and the chat templates in a GGUF file, as files of transformers.

They give the tokens that llama.cpp gives for the file. Two kinds are read: byte-level BPE, with the ways to split text
that `nas.train.release.model_tokenizer` knows; and the BPE of SentencePiece with scores and byte fallback ("llama").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from nas.core.errors import InvalidInput, NasError, Unsupported
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.train.release.model_tokenizer import (
    BLANK,
    CONFIG,
    GENERATION,
    MOST_CHARACTERS,
    TEMPLATE,
    ModelTokenizer,
    pre_tokenizer_of,
)
from nas.train.release.tokenizer import json_bytes

_PREFIX = "tokenizer.ggml."
_STARTS_TEXTS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Ways to split text with which llama.cpp begins every text with a token unless the file says otherwise."""
_PURPOSES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""GGUF's names -> transformers'."""
_USUAL = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids that llama.cpp takes for SentencePiece's where the file names none."""
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>",
    "<end_of_utterance>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
"""Special tokens at which llama.cpp ends an answer by their text."""


def tokenizer_of_gguf(file: GgufFile) -> ModelTokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises:
        Unsupported: it has none, or one that is not read.
        InvalidInput: its tokenizer is damaged.
    """
    where, kind = str(file.files[0]), file.header.tokenizer
    if kind not in ("gpt2", "llama"):
        what = "the file holds no tokenizer" if kind == "none" else f"its tokenizer is of the kind {kind!r}"
        raise Unsupported(f"{what}: byte-level BPE (gpt2) and SentencePiece's BPE (llama) are read", where=where)
    tokens, types = _texts(file, "tokens"), file.fields.get(f"{_PREFIX}token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [TokenType.NORMAL] * len(tokens)
    used = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    if len(used) < sum(one != TokenType.UNUSED for one in types):
        raise InvalidInput("its tokenizer names a token twice", where=where)
    usual = _USUAL if kind == "llama" else {}
    named = {purpose: _named(file, tokens, name, usual.get(name)) for name, purpose in _PURPOSES.items()}
    begin = named["bos"]
    try:
        if kind == "gpt2":
            tokenizer, starts = _byte_level(file, used)
        else:
            tokenizer, starts = _sentencepiece(file, used, types), True
        for i, token in enumerate(tokens):
            if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED):
                special = types[i] == TokenType.CONTROL
                added = AddedToken(token, normalized=False, special=special)
                (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
        if bool(file.fields.get(f"{_PREFIX}add_bos_token", starts)) and begin is not None:
            if begin not in used:
                raise InvalidInput(f"its tokenizer begins texts with {begin!r}, which is an unused token", where=where)
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin} $B:1",
                special_tokens=[(begin, used[begin])],
            )
    except NasError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise InvalidInput(f"its tokenizer is damaged: {error}", where=where) from error
    ends = [file.fields.get(f"{_PREFIX}{name}_token_id", usual.get(name)) for name in ("eos", "eot", "eom")]
    by_text = set(_ENDS) - ({"<|end|>"} if "<|return|>" in used else set())  # it ends parts of a harmony answer
    ends += [i for i, token in enumerate(tokens) if token in by_text and types[i] == TokenType.CONTROL]
    return ModelTokenizer(tokenizer.to_str().encode(), _beside(file, named, ends))


def _byte_level(file: GgufFile, used: Mapping[str, int]) -> tuple[Tokenizer, bool]:
    """Returns byte-level BPE, and whether texts begin with a token unless the file says otherwise."""
    name = str(file.fields.get(f"{_PREFIX}pre", "default"))
    splitting = pre_tokenizer_of(name)
    if splitting is None:
        raise Unsupported(f"how its tokenizer splits text is not known: {name}", where=str(file.files[0]))
    about, ignore_merges = splitting
    merges = []
    for merge in _texts(file, "merges", least=0):
        first, _, second = merge.partition(" ")
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(dict(used), merges, ignore_merges=ignore_merges))
    described = json.loads(tokenizer.to_str()) | {"pre_tokenizer": _with_offsets(about)}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _STARTS_TEXTS


def _with_offsets(about: Any) -> Any:
    """Returns a pre-tokenizer as `tokenizers` reads it."""
    if about["type"] == "Sequence":
        return about | {"pretokenizers": [_with_offsets(part) for part in about["pretokenizers"]]}
    return about | ({"trim_offsets": True} if about["type"] == "ByteLevel" else {})


def _sentencepiece(file: GgufFile, used: Mapping[str, int], types: Sequence[int]) -> Tokenizer:
    """Returns SentencePiece's BPE, which joins first what has the greatest score."""
    scores = file.fields.get(f"{_PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(types):
        raise ValueError("its tokens have no scores")
    joined = {token: scores[i] for token, i in used.items() if types[i] == TokenType.NORMAL}
    if max(map(len, joined), default=0) > MOST_CHARACTERS:
        raise ValueError(f"a token has more than {MOST_CHARACTERS:,} characters")
    pairs = (
        (-score, len(token[:at]), token[:at], token[at:])
        for token, score in joined.items()
        for at in range(1, len(token))
        if token[:at] in joined and token[at:] in joined
    )
    merges = [(first, second) for _, _, first, second in sorted(pairs)]
    unknown = next((token for token, i in used.items() if types[i] == TokenType.UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(dict(used), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(file.fields.get(f"{_PREFIX}add_space_prefix", True))
    changes = [normalizers.Prepend(BLANK)] * prefix + [normalizers.Replace(" ", BLANK)]
    tokenizer.normalizer = normalizers.Sequence(changes)
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _texts(file: GgufFile, name: str, least: int = 1) -> list[str]:
    values = file.fields.get(f"{_PREFIX}{name}", [])
    if not isinstance(values, list) or len(values) < least or not all(isinstance(value, str) for value in values):
        raise InvalidInput(f"its tokenizer has no {name}", where=str(file.files[0]))
    return values


def _named(file: GgufFile, tokens: Sequence[str], name: str, usual: int | None) -> str | None:
    """Returns the token that a key names; `usual`: its id where the key is missing."""
    value = file.fields.get(f"{_PREFIX}{name}_token_id", usual)
    is_token = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(tokens)
    return tokens[value] if is_token else None  # type: ignore[index]


def _beside(file: GgufFile, named: Mapping[str, str | None], ends: Sequence[Any]) -> dict[str, bytes]:
    fields = file.fields
    context = fields.get(f"{file.header.arch}.context_length")
    settings = {f"{name}_token": token for name, token in named.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    beside = {CONFIG: json_bytes(config | ({"model_max_length": context} if isinstance(context, int) else {}))}
    if ids := list(dict.fromkeys(end for end in ends if isinstance(end, int))):
        beside[GENERATION] = json_bytes({"eos_token_id": ids})
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        beside[TEMPLATE] = template.encode()
    names = fields.get("tokenizer.chat_templates", [])
    for name in names if isinstance(names, list) else []:
        text = fields.get(f"tokenizer.chat_template.{name}")
        if isinstance(text, str) and str(name).isidentifier():
            beside[f"additional_chat_templates/{name}.jinja"] = text.encode()
    return beside
