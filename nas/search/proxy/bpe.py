"""Byte-pair tokens of a corpus: trained on its training part, encoded once per content, mapped into memory.

    $NAS_CACHE/corpora/bpe/KEY/tokenizer.json   of the library `tokenizers`
                               ids              tokens of all domains, uint16
                               index.json       where each domain's are, and the bytes of each token

Bits per byte stay the unit: `Domain.sizes` has the bytes that a token stands for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.search.proxy.corpus import Corpus, Domain, Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BPE_VERSION = 1
"""Part of keys: increase it with every change after which the same corpus gives other ids."""

_TRAINED_ON = 1 << 22
"""Bytes of each domain that the vocabulary is trained on, evenly spread over its training part."""
_PIECE = 1 << 16
_AT_ONCE = 64
_DEADLINE_S = 3600.0


def encoded(corpus: Corpus, vocab: int) -> dict[str, Domain]:
    """Returns the domains of `corpus` in tokens, from the cache if they are there.

    Args:
        corpus: of bytes.
        vocab: tokens, of which 256 are the bytes; some are unused where the text gives fewer.

    Raises:
        InfrastructureFailed: another process has been encoding it for an hour.
    """
    folder = paths.cache() / "corpora" / "bpe" / content_hash([BPE_VERSION, corpus.hash, vocab])
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), _DEADLINE_S):
            if not folder.is_dir():
                _write(folder, corpus, vocab)
    index = json.loads((folder / "index.json").read_text())
    sizes = np.array(index["sizes"], np.int64)
    ids = np.memmap(folder / "ids", np.uint16, "r")
    return {
        name: Domain(ids[first:middle], ids[middle:last], sizes)
        for name, (first, middle, last) in index["domains"].items()
    }


def _write(folder: Path, corpus: Corpus, vocab: int) -> None:
    """Writes the tokens of `corpus` to `folder`, atomically."""
    tokenizer = _trained(corpus.domains, vocab)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        partial = Path(scratch) / "tokens"
        partial.mkdir()
        places, at = {}, 0
        with (partial / "ids").open("wb") as file:
            for name, domain in corpus.domains.items():
                ends = [at]
                for part in (domain.train, domain.heldout):
                    for ids in _encode(tokenizer, part):
                        file.write(ids.tobytes())
                        at += ids.size
                    ends.append(at)
                places[name] = ends
        sizes = [0] * vocab
        for token, place in tokenizer.get_vocab().items():
            sizes[place] = len(token)  # one letter of the byte-level alphabet for each byte
        (partial / "index.json").write_text(json.dumps({"domains": places, "sizes": sizes}))
        tokenizer.save(str(partial / "tokenizer.json"))
        shutil.move(partial, folder)


def _trained(domains: Mapping[str, Domain], vocab: int) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for domain in domains.values() for text in _texts(domain.train, _TRAINED_ON))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, part: Ids) -> Iterator[Ids]:
    texts: list[str] = []
    for text in _texts(part, part.size):
        texts.append(text)
        if len(texts) == _AT_ONCE:
            yield from (np.array(each.ids, np.uint16) for each in tokenizer.encode_batch_fast(texts))
            texts = []
    yield from (np.array(each.ids, np.uint16) for each in tokenizer.encode_batch_fast(texts))


def _texts(part: Ids, size: int) -> Iterator[str]:
    """Yields pieces of `part`, about `size` bytes of it in all and evenly spread; a cut character is left out."""
    pieces = -(-part.size // _PIECE)
    every = max(1, pieces * _PIECE // max(size, 1))
    for piece in range(0, pieces, every):
        yield part[piece * _PIECE : (piece + 1) * _PIECE].tobytes().decode(errors="ignore")
