"""Late-interaction models: one vector for each token of a query or document, and MaxSim (LFM2 report, section 7.1).

    ColBERT(x) = Linear(Transformer(x))            (6), without bias; then each vector gets the norm 1
    S(q, d) = sum over i of max over j of q_i d_j  (7)

What the model reads, with the markers of PyLate (Chaffin and Sourty 2024):

    query      START "[Q] " text END END ...     32 tokens
    document   START "[D] " text                 at most 512 tokens

A longer text is cut. A query is filled up with END: this expansion of ColBERT (Khattab and Zaharia 2020) lets a query
search for more than its words. Tokens of the expansion are read as all others are, PyLate's
`attend_to_expansion_tokens`: without that, what a padded position computes would be another thing in each kind of
block. Blocks are causal, as in the report, or bidirectional, as in its successors; padding behind a document is hidden
from it in either case.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer, processors
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.primitives import Linear
from nas.train.release.tokenizer import BOS, END_OF_TEXT, Marks, MemberTokenizer

Floats = NDArray[np.float32]

QUERY, DOCUMENT = "[Q] ", "[D] "
"""Markers, one token each; PyLate's, with their blanks."""
WIDTH = 128
"""Width of a vector."""
LENGTHS = (32, 512)
"""Most tokens of a query and of a document."""

_TEXTS_AT_ONCE = 16


class Retriever(nn.Module):
    """A layout with a projection of its last features to token vectors.

    Args:
        layout: of the model; its output head is not used.
        width: of the vectors.
        seed: of the start values; None: weights are left as allocated.
        bidirectional: whether tokens see those behind them, too: attention without a causal mask, convolutions with the
            token in their middle.

    Raises:
        Unsupported: bidirectional, but a block reads one way only.
    """

    def __init__(
        self, layout: Layout, width: int = WIDTH, seed: int | None = None, *, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.model, self.bidirectional = Model(layout, seed), bidirectional
        if bidirectional:
            self.model.read_both_ways()
        self.projection = Linear(layout.d_model, width)
        if seed is not None:
            self.projection.draw(torch.Generator().manual_seed(seed), layout.depth)

    def forward(self, tokens: Tensor, text: Tensor) -> Tensor:
        """Returns vectors of norm 1 in float32, [B, T, width], and zeros at padding.

        tokens: ids [B, T], padded at the end; text: [B, T], false at padding.
        """
        vectors = F.normalize(self.projection(self.model.packed_features(tokens, text)).float(), dim=-1)
        return vectors.new_zeros(*text.shape, vectors.shape[-1]).masked_scatter(text[..., None], vectors)


def exact_scores(query: Floats, vectors: Floats, starts: NDArray[np.int64]) -> Floats:
    """Returns the scores of documents for a query by equation 7, [N].

    Args:
        query: vectors [Q, width].
        vectors: of all documents, one after another [tokens, width].
        starts: first vector of each document [N].
    """
    scores: Floats = np.maximum.reduceat(query @ vectors.T, starts, axis=1).sum(0)
    return scores


class Batch(NamedTuple):
    """Token ids [B, T], and which of them are text."""

    tokens: Tensor
    text: Tensor


@dataclass(frozen=True)
class TextTokens:
    """Tokens of queries and documents.

    Args:
        content: tokenizer.json with the markers, which puts one token in front of a text.
        end: fills up queries, and documents of a batch.
        lengths: most tokens of a query and of a document.
        expansion: whether queries are filled up.
    """

    content: bytes
    end: str
    lengths: tuple[int, int] = LENGTHS
    expansion: bool = True

    @cached_property
    def rows(self) -> int:
        """Fewest rows of an embedding that has one for each token."""
        return 1 + max(self._query.get_vocab(with_added_tokens=True).values())

    @cached_property
    def markers(self) -> tuple[int, int]:
        """Ids of the markers."""
        ids = self._query.get_vocab(with_added_tokens=True)
        return ids[QUERY], ids[DOCUMENT]

    @cached_property
    def _end(self) -> int:
        return self._query.get_vocab(with_added_tokens=True)[self.end]

    def queries(self, texts: Sequence[str]) -> Batch:
        """Returns the tokens of queries."""
        return self._batch(self._query.encode_batch([QUERY + text for text in texts]), self.expansion)

    def documents(self, texts: Sequence[str]) -> Batch:
        """Returns the tokens of documents."""
        return self._batch(self._document.encode_batch([DOCUMENT + text for text in texts]), False)

    @cached_property
    def _query(self) -> Tokenizer:
        return self._cut(self.lengths[0])

    @cached_property
    def _document(self) -> Tokenizer:
        return self._cut(self.lengths[1])

    def _cut(self, length: int) -> Tokenizer:
        tokenizer = Tokenizer.from_buffer(self.content)
        tokenizer.no_padding()
        tokenizer.enable_truncation(length)
        return tokenizer

    def _batch(self, encodings: Sequence[Encoding], expansion: bool) -> Batch:
        length = self.lengths[0] if expansion else max(len(encoding.ids) for encoding in encodings)
        tokens = torch.full((len(encodings), length), self._end)
        text = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, encoding in enumerate(encodings):
            tokens[row, : len(encoding.ids)] = torch.tensor(encoding.ids)
            text[row, : length if expansion else len(encoding.ids)] = True
        return Batch(tokens, text)


def text_tokens(tokenizer: MemberTokenizer, lengths: tuple[int, int] = LENGTHS, expansion: bool = True) -> TextTokens:
    """Returns the tokens of texts for a model's tokenizer, with the markers added to it.

    Raises:
        InvalidInput: no token of the tokenizer begins or ends a text.
    """
    marks = tokenizer.marks
    if marks is None:
        if BOS not in tokenizer.special:
            raise InvalidInput(f"the tokenizer has no {BOS}: train one with `nas family tokenizer`")
        marks = Marks(tokenizer.special[BOS], tokenizer.special[END_OF_TEXT])
    about: dict[str, Any] = json.loads(tokenizer.content)
    changed = Tokenizer.from_str(json.dumps(about | {"post_processor": None, "truncation": None, "padding": None}))
    changed.add_special_tokens([AddedToken(marker, normalized=False) for marker in (QUERY, DOCUMENT)])
    start, end = (str(changed.id_to_token(token)) for token in marks)
    changed.post_processor = processors.TemplateProcessing(single=[start, "$A"], special_tokens=[(start, marks.start)])
    return TextTokens(changed.to_str().encode(), end, lengths, expansion)


class Encoder(ABC):
    """Computes the vectors of texts.

    Args:
        tokens: of the texts.
        width: of a vector.
    """

    def __init__(self, tokens: TextTokens, width: int) -> None:
        self.tokens, self.width = tokens, width

    def queries(self, texts: Sequence[str]) -> list[Floats]:
        """Returns the vectors of queries, [Q, width] each."""
        return self.vectors(self.tokens.queries(texts))

    def documents(self, texts: Sequence[str]) -> list[Floats]:
        """Returns the vectors of documents, [T, width] each; T is 2 for an empty one."""
        return self.vectors(self.tokens.documents(texts))

    @abstractmethod
    def vectors(self, batch: Batch) -> list[Floats]:
        """Returns the vectors of a batch's texts, of norm 1, without padding."""


class TorchEncoder(Encoder):
    """Computes vectors with torch, where the model's weights are.

    Args:
        retriever: the model.
        tokens: of the texts.
    """

    def __init__(self, retriever: Retriever, tokens: TextTokens) -> None:
        super().__init__(tokens, retriever.projection.out_features)
        self._retriever = retriever

    @torch.no_grad()
    def vectors(self, batch: Batch) -> list[Floats]:
        device, lengths = self._retriever.projection.weight.device, batch.text.sum(1)
        order, vectors = lengths.argsort(stable=True), dict[int, Floats]()
        for first in range(0, len(order), _TEXTS_AT_ONCE):
            places = order[first : first + _TEXTS_AT_ONCE]
            most = int(lengths[places].max())
            tokens, text = batch.tokens[places, :most], batch.text[places, :most]
            rows = self._retriever(tokens.to(device), text.to(device)).cpu()
            vectors |= {int(place): row[mask].numpy() for place, row, mask in zip(places, rows, text, strict=True)}
        return [vectors[place] for place in range(len(lengths))]


def extended(layout: Layout, rows: int) -> Layout:
    """Returns the layout with at least `rows` embedding rows and without an output head of its own."""
    return replace(layout, vocab=max(layout.vocab, rows), tied=True)


@torch.no_grad()
def load_model(retriever: Retriever, tensors: dict[str, Tensor], markers: Sequence[int]) -> None:
    """Fills the model of a retriever with weights of the layout that it extends.

    Further rows of the embedding, and those of `markers`, get the mean of the others.
    """
    rows, table = tensors["embed.weight"], retriever.model.embed.weight
    mean = rows.mean(0)
    embedding = mean.repeat(len(table), 1)
    embedding[: len(rows)] = rows
    embedding[list(markers)] = mean
    weights = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    retriever.model.load_state_dict(weights | {"embed.weight": embedding})
