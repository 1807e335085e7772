"""A `tokenizers` file (tokenizer.json) as training uses it: plain text to ids, and the marks between documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nas.core.errors import InvalidInput, UnknownName
from nas.family.fim import Filled

START, END = "<|startoftext|>", "<|endoftext|>"
FIM_MARKS = ("<|fim_pre|>", "<|fim_suf|>", "<|fim_mid|>")
"""As LFM2's tokenizer names them."""

_PIECE, _AT_ONCE = 1 << 20, 16
"""Characters of a piece, and pieces that are encoded side by side: an encoding is many times larger than its ids."""

Ids = NDArray[np.int64]


class Vocabulary:
    """A tokenizer, checked against the vocabulary of a layout.

    Every document becomes START, its ids, END. Text that spells a special token is text: it never becomes one.

    Args:
        path: the tokenizer.json.
        rows: of the embedding table; a table may have more rows than there are tokens.
        fim: whether documents will be cut for fill-in-the-middle.

    Raises:
        InvalidInput: the file is no tokenizer, or it has more tokens than the table has rows.
        UnknownName: it lacks a special token that is needed.
    """

    def __init__(self, path: Path, rows: int, *, fim: bool = False) -> None:
        try:
            content = path.read_bytes()
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--tokenizer") from error
        except Exception as error:  # of no narrower class, whatever is wrong with the text
            raise InvalidInput(f"{path} is no tokenizer.json: {error}", where="--tokenizer") from None
        self.path, self.rows = path, rows
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.size > rows:
            raise InvalidInput(
                f"{path} has {self.size:,} tokens, but the member's vocabulary is {rows:,}: train a tokenizer of"
                " that size, or build the family for this vocabulary",
                where="--tokenizer",
            )
        self.start, self.end = self._mark(START), self._mark(END)
        self._fim = [self._mark(name) for name in FIM_MARKS] if fim else []

    def document(self, text: str) -> Ids:
        """START, the ids of `text`, END."""
        return np.concatenate([[self.start], self.encode(text), [self.end]])

    def filled(self, cut: Filled) -> Ids:
        """The document of a text that was cut for fill-in-the-middle (Bavarian et al. 2022, section 3.1 and 3.2).

        PSM: prefix mark, prefix, suffix mark, suffix, middle mark, middle. SPM, in the variant that shares its form
        with PSM: prefix mark, suffix mark, suffix, middle mark, prefix, middle.
        """
        prefix, middle, suffix = (self.encode(part) for part in (cut.prefix, cut.middle, cut.suffix))
        pre, suf, mid = ([mark] for mark in self._fim)
        parts = [pre, suf, suffix, mid, prefix, middle] if cut.suffix_first else [pre, prefix, suf, suffix, mid, middle]
        return np.concatenate([[self.start], *parts, [self.end]]).astype(np.int64)

    def encode(self, text: str) -> Ids:
        """Ids of `text`, without marks."""
        pieces, ids = _pieces(text), [np.zeros(0, np.int64)]
        while some := list(islice(pieces, _AT_ONCE)):
            encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.asarray(each.ids, np.int64) for each in encodings]
        return np.concatenate(ids)

    def check_lossless(self, text: str) -> None:
        """Bits per byte count the bytes of a text, so its ids must hold every one of them.

        Raises:
            InvalidInput: `text` does not come back.
        """
        for piece in _pieces(text):
            back = self._tokenizer.decode(self.encode(piece).tolist(), skip_special_tokens=False)
            if back != piece:
                place = next((i for i, (a, b) in enumerate(zip(piece, back, strict=False)) if a != b), len(back))
                raise InvalidInput(
                    f"{self.path} loses text: {piece[place : place + 20]!r} comes back as {back[place : place + 20]!r};"
                    " a byte-level tokenizer without normaliser keeps everything",
                    where="--tokenizer",
                )

    def _mark(self, name: str) -> int:
        number = self._tokenizer.token_to_id(name)
        if number is None:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise UnknownName(f"special token of {self.path}", name, special, where="--tokenizer")
        return int(number)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about a million characters that end with a line where one ends near."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
