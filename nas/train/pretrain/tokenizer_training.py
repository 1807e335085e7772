"""Trains byte-level BPE tokenizers on text files, or on the default corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.model.text.bpe import assembled, train_bpe
from nas.model.text.corpus import build_corpus
from nas.model.text.documents import read_sources, text_pieces
from nas.train.release.tokenizer import LEAST, SPECIAL, MemberTokenizer, filled_up, finished


def train_tokenizer(corpus: Sequence[Path], vocab: int, destination: Path, log: Log) -> MemberTokenizer:
    """Trains a tokenizer; the same text gives the same file.

    Args:
        corpus: files, folders and globs of text; none: the default corpus, without what it holds out.
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
    tokenizer = train_bpe(_texts(corpus), vocab, SPECIAL)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if len(ids) == LEAST < vocab:
        raise InvalidInput("no pair of bytes occurs twice: it needs more text", where="--corpus")
    if len(ids) < vocab:
        log(f"the corpus gives {len(ids):,} tokens; {vocab - len(ids):,} more are reserved to reach {vocab:,}")
        tokenizer = _with_reserved(tokenizer, vocab)
    trained = MemberTokenizer(finished(tokenizer, ids))
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_durably(destination, trained.content)
    return trained


def _with_reserved(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    ids = filled_up(tokenizer.get_vocab(with_added_tokens=True), vocab)
    larger = assembled(models.BPE(ids, merges, ignore_merges=True))
    larger.add_special_tokens(list(SPECIAL))
    return larger


def _texts(corpus: Sequence[Path]) -> Iterator[str]:
    """Yields pieces of the documents of a corpus, all of them; of the default corpus without what it holds out."""
    if corpus:
        sources = read_sources(corpus, held_out=0.0)
        texts = (document.train for source in sources for document in source.documents)
    else:
        domains = build_corpus("default", Path()).domains.values()
        texts = (domain.train.tobytes().decode() for domain in domains)
    for text in texts:
        yield from text_pieces(text)
