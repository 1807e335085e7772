"""The tokenizer part of a GGUF file: a byte-level BPE vocabulary with its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gguf import GGUFWriter, Keys, TokenType

Purpose = Literal["bos", "eos", "eot", "pad", "fim_pre", "fim_suf", "fim_mid"]
PRE_TOKENIZER = "lfm2"
"""llama.cpp's name of a regular expression that splits text before BPE, and of asking the vocabulary for whole words
first: `LLAMA_VOCAB_PRE_TYPE_LLAMA3` of src/llama-vocab.cpp."""

_NO_MERGE = "<|never|> <|merged|>"
"""The loader wants a list of merges, and gguf-py writes none that is empty: these two are never made of bytes."""


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp needs for turning text into tokens.

    Args:
        tokens: by id; bytes are written as GPT-2's letters for them.
        special: those that text in a prompt never becomes by itself.
        unused: those that stand for nothing.
        merges: of BPE, first to last, "LEFT RIGHT".
        ids: purpose -> id of a special token.
        chat_template: Jinja; None: the model has no special tokens to write one with.
    """

    tokens: tuple[str, ...]
    special: frozenset[int]
    unused: frozenset[int]
    merges: tuple[str, ...]
    ids: Mapping[Purpose, int]
    chat_template: str | None


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Describes `vocabulary`; every text begins with its beginning-of-sequence token where there is one."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([_type(i, vocabulary) for i in range(len(vocabulary.tokens))])
    writer.add_token_merges(list(vocabulary.merges) or [_NO_MERGE])
    writer.add_add_bos_token("bos" in vocabulary.ids)
    writer.add_add_eos_token(False)
    for purpose, token in vocabulary.ids.items():
        writer.add_uint32(_KEYS[purpose], token)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


_KEYS: Mapping[Purpose, str] = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "eot": Keys.Tokenizer.EOT_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "fim_pre": Keys.Tokenizer.FIM_PRE_ID,
    "fim_suf": Keys.Tokenizer.FIM_SUF_ID,
    "fim_mid": Keys.Tokenizer.FIM_MID_ID,
}


def _type(token: int, vocabulary: Vocabulary) -> TokenType:
    if token in vocabulary.special:
        return TokenType.CONTROL
    return TokenType.UNUSED if token in vocabulary.unused else TokenType.NORMAL
