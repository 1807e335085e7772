"""Byte-level byte-pair encoding: its training, and the tokens of a corpus, encoded once and mapped into memory.

    $NAS_CACHE/bpe/KEY   tokens of all domains, as `nas.model.text.corpus.packed_domains` writes them

Bits per byte stay the unit: `Domain.sizes` has the bytes that a token stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from nas.core import paths
from nas.core.durable import locked
from nas.core.stored import stored
from nas.model.text.corpus import Corpus, Domain, Ids, map_domains, packed_domains

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

BPE_VERSION = 2
"""Part of keys: increase it with every change after which the same corpus gives other ids."""
BYTES = 256

_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before bytes are merged: llama.cpp's `lfm2`."""
_LEAST_COUNT = 2
"""Minimum occurrences of a pair that becomes a token."""
_TRAINED_ON = 1 << 22
"""Bytes of each domain that a vocabulary is trained on, evenly spread over its training part."""
_PIECE = 1 << 16
"""Bytes of a piece that is encoded by itself."""
_PIECES_AT_ONCE = 64
_DEADLINE_S = 3600.0


def train_bpe(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Trains a tokenizer; the same texts give the same one.

    Args:
        texts: to train on.
        vocab: most tokens: special ones, 256 bytes, and merges of pairs that occur at least twice.
        special: the first tokens.
    """
    from tokenizers import models, trainers

    tokenizer = assembled(models.BPE(ignore_merges=True))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=_LEAST_COUNT,
        special_tokens=list(special),
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def assembled(model: models.BPE) -> Tokenizer:
    """Returns a tokenizer of `model` with the pre-tokenizer and decoder of all our tokenizers."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """Returns the letters that represent bytes, by byte (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(BYTES)]


def encoded(corpus: Corpus, vocab: int) -> dict[str, Domain]:
    """Returns the domains of `corpus` in `vocab` tokens, from the cache if they are there.

    Raises:
        InfrastructureFailed: another process has been encoding it for an hour.
    """
    lock = paths.cache() / "bpe" / f"{corpus.hash}-{vocab}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, _DEADLINE_S):
        path = stored("bpe", BPE_VERSION, [corpus.hash, vocab], lambda: packed_domains(_encoded(corpus, vocab)))
    return map_domains(path)


def _encoded(corpus: Corpus, vocab: int) -> dict[str, Domain]:
    texts = (text for domain in corpus.domains.values() for text in _texts(domain.train, _TRAINED_ON))
    tokenizer = train_bpe(texts, vocab)
    sizes = np.zeros(vocab, np.int64)
    for token, number in tokenizer.get_vocab().items():
        sizes[number] = len(token)  # one letter of the byte-level alphabet for each byte
    return {
        name: Domain(_encode(tokenizer, domain.train), _encode(tokenizer, domain.heldout), sizes)
        for name, domain in corpus.domains.items()
    }


def _encode(tokenizer: Tokenizer, part: Ids) -> Ids:
    texts, ids = _texts(part, part.size), []
    while batch := list(islice(texts, _PIECES_AT_ONCE)):
        ids += [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(batch)]
    return np.concatenate(ids)


def _texts(part: Ids, size: int) -> Iterator[str]:
    """Yields pieces of `part`, about `size` bytes of it in all and evenly spread; a cut character is left out."""
    pieces = -(-part.size // _PIECE)
    step = max(1, pieces * _PIECE // max(size, 1))
    for piece in range(0, pieces, step):
        yield part[piece * _PIECE : (piece + 1) * _PIECE].tobytes().decode(errors="ignore")
