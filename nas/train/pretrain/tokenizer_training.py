"""Trains byte-level BPE tokenizers on text files, or on the default corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, trainers

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.search.proxy.corpus import build_corpus
from nas.train.pretrain.data import text_files
from nas.train.release.tokenizer import LEAST, SPECIAL, MemberTokenizer, assembled, byte_letters, filled_up, finished

Log = Callable[[str], None]

_LEAST_COUNT = 2
"""Minimum occurrences of a pair that becomes a token."""
_PIECE = 1 << 20
"""Minimum characters of a piece of training text; texts are cut at the end of a line."""


def train_tokenizer(corpus: Sequence[Path], vocab: int, destination: Path, log: Log) -> MemberTokenizer:
    """Trains a tokenizer; the same text gives the same file.

    Args:
        corpus: UTF-8 files, and folders of them; none: the default corpus, without its held-out ends.
        vocab: tokens, special ones included; if the text gives fewer, the rest are reserved.
        destination: the tokenizer.json, written atomically.
        log: takes one line at a time.

    Raises:
        InvalidInput: too small a vocabulary, or no text in the corpus.
        InfrastructureFailed: the default corpus is requested and this Python lacks its library's source.
    """
    if vocab < LEAST:
        raise InvalidInput(
            f"{vocab} tokens are too few: {LEAST} hold all bytes and the special tokens", where="--vocab"
        )
    tokenizer = _trained(_texts(corpus) if corpus else _default_texts(), vocab)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if len(ids) == LEAST < vocab:
        raise InvalidInput("no pair of bytes occurs twice: it needs more text", where="--corpus")
    if len(ids) < vocab:
        log(f"the corpus gives {len(ids):,} tokens; {vocab - len(ids):,} more are reserved to reach {vocab:,}")
        tokenizer = _with_reserved(tokenizer, vocab)
    made = MemberTokenizer(finished(tokenizer, ids))
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_durably(destination, made.content)
    return made


def _trained(texts: Iterator[str], vocab: int) -> Tokenizer:
    tokenizer = assembled(models.BPE(ignore_merges=True))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=_LEAST_COUNT,
        special_tokens=list(SPECIAL),
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _with_reserved(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    ids = filled_up(tokenizer.get_vocab(with_added_tokens=True), vocab)
    larger = assembled(models.BPE(ids, merges, ignore_merges=True))
    larger.add_special_tokens(list(SPECIAL))
    return larger


def _default_texts() -> Iterator[str]:
    for domain in build_corpus("default", Path()).domains.values():
        # Training text may end within a character.
        yield from _pieces(domain.train.tobytes().decode(errors="ignore"))


def _texts(corpus: Sequence[Path]) -> Iterator[str]:
    for path in corpus:
        files = list(text_files(path))
        if not files:
            raise InvalidInput("a folder without files", where=str(path))
        for file in files:
            try:
                yield from _pieces(file.read_text("utf-8"))
            except OSError as error:
                raise InvalidInput(f"cannot read it: {error.strerror}", where=str(file)) from error
            except UnicodeDecodeError as error:
                raise InvalidInput(f"is not UTF-8 text (byte {error.start})", where=str(file)) from error


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
