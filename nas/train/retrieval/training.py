"""Training of late-interaction models (LFM2 report, section 7.2).

With a teacher's scores s of a query's n documents, both scaled per query to [0, 1]:

    loss = 1 / n sum over i of (s_i - S(q, d_i))^2      (8)

Without, cross-entropy of the document that answers the query among all documents of the step (in-batch negatives).

The result is a folder, see `nas.train.retrieval.release`. After an interruption the same call resumes, see
`nas.train.posttrain.trained_folder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.model.nn.maxsim import maxsim
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.sft import TrainingSettings
from nas.train.posttrain.start import StartModel, start_member, start_model
from nas.train.posttrain.trained_folder import FolderRecord, FolderTraining, split
from nas.train.pretrain.member_training import START
from nas.train.pretrain.recipe import Betas
from nas.train.release.shards import SINGLE
from nas.train.retrieval.data import Example, data_hashes, read_examples
from nas.train.retrieval.release import (
    DENSE,
    RECORD,
    is_bidirectional,
    is_retriever,
    projection_of,
    write_retriever,
)
from nas.train.retrieval.retriever import (
    LENGTHS,
    WIDTH,
    Retriever,
    TorchEncoder,
    exact_scores,
    extended,
    load_model,
    text_tokens,
)

TRAINER_VERSION = 1
"""Part of keys: increase it with every change after which the same training gives other numbers."""

_TOKENS_AT_ONCE = (8192, 65536)
"""Most tokens of documents of a pass with a teacher's scores, on the CPU and on a GPU."""
_MOST_HELD_OUT = 500


class RetrievalSettings(TrainingSettings):
    """Settings of a training; defaults are the LFM2 report's (7.2) but for the batch, which is 128 there."""

    epochs: float = Field(1, gt=0)
    batch: int = Field(32, ge=1, description="queries per step")
    documents: int = Field(8, ge=1, description="most documents of a query in a step")
    loss: Literal["mse", "kl"] = Field(
        "mse", description="with a teacher's scores: equation 8, or the divergence of their softmax, as in PyLate"
    )
    temperature: float = Field(1.0, gt=0, description="of scores, without a teacher's")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(0.01, ge=0)
    betas: Betas = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, exclude_if=lambda eps: eps == 1e-8)
    balance_rate: float = Field(0.0, ge=0, exclude_if=lambda rate: not rate, description="step of the experts' bias")
    width: int = Field(WIDTH, ge=1, le=4096, description="of token vectors")
    query_length: int = Field(LENGTHS[0], ge=4, description="tokens")
    document_length: int = Field(LENGTHS[1], ge=4, description="tokens")
    expansion: bool = Field(True, description="whether queries are filled up to their length")
    bidirectional: bool = Field(False, description="whether tokens see those behind them, too")


class RetrievalRecord(FolderRecord):
    """Record of a training.

    Args:
        settings: of the training.
        objective: "distillation" or "contrastive".
    """

    settings: RetrievalSettings
    objective: str


def train_retriever(
    model: str | tuple[str, str],
    data: Sequence[Path],
    settings: RetrievalSettings,
    output: Path,
    log: Log,
    checkpoint_s: float = 60.0,
) -> RetrievalRecord:
    """Trains a late-interaction model and writes its folder.

    Args:
        model: to start from: a name, see `start_model`, or family and size of a member.
        data: files and folders, see `nas.train.retrieval.data`; all with a teacher's scores or none.
        settings: of the training.
        output: folder of the result.
        log: takes one line at a time.
        checkpoint_s: least seconds between checkpoints.

    Raises:
        InvalidInput: data has problems, named by file and line, only some of it has a teacher's scores, too few queries
            are not held out, or the folder holds something else.
        UnknownName: no such family or size.
        Unsupported: no layout says the model.
        CandidateFailed: the loss is not finite.
    """
    examples = [example for path in data for example in read_examples(path)]
    start = start_model(model) if isinstance(model, str) else start_member(*model)
    hashes = [digest for path in data for digest in data_hashes(path)]
    earlier = [sha256_of(start.source / DENSE / SINGLE)] if is_retriever(start.source) else []
    # Python's values, not those of JSON mode, which would write the whole numbers of earlier keys as floats.
    chosen = settings.model_dump(exclude=None if settings.bidirectional else {"bidirectional"})
    inputs = [TRAINER_VERSION, [*start.hashes, *earlier], start.tokenizer.tokenizer.describe(), hashes, chosen]
    return _RetrievalTraining(examples, start, settings, output, inputs, checkpoint_s).run(log)


class _RetrievalTraining(FolderTraining[RetrievalSettings, RetrievalRecord]):
    record = RetrievalRecord
    file = RECORD
    phase = "retrieval"

    def __init__(
        self,
        examples: Sequence[Example],
        start: StartModel,
        settings: RetrievalSettings,
        output: Path,
        inputs: Sequence[Any],
        checkpoint_s: float,
    ) -> None:
        super().__init__(output, settings, inputs, checkpoint_s)
        self.scored = bool(examples[0].scores)
        if any(bool(example.scores) is not self.scored for example in examples):
            raise InvalidInput("all data needs a teacher's scores, or none", where="--data")
        if self.scored and settings.documents < 2:
            raise InvalidInput("a teacher's scores need two documents or more in a step", where="documents")
        self.examples, held_out = split(examples, settings.held_out, lambda example: content_hash(example.query))
        self._held_out = held_out[:_MOST_HELD_OUT]
        if len(self.examples) < (1 if self.scored else 2):
            raise InvalidInput(f"{len(self.examples)} examples are too few to train on", where="--data")
        self._start = start
        lengths = (settings.query_length, settings.document_length)
        self.tokenizer = text_tokens(start.tokenizer.tokenizer, lengths, settings.expansion)
        self.steps = settings.steps(len(self.examples))
        self.tokens = settings.batch * sum(lengths)
        """Most tokens of a step, with one document a query."""
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        self._answers: dict[str, set[str]] = {}
        for example in examples if not self.scored else ():
            self._answers.setdefault(example.query, set()).add(example.documents[0])

    def start(self, folder: Path) -> Retriever:
        self.worker.log(f"{len(self.examples):,} examples")
        path = self._start.tensors(folder / START)
        layout = extended(checkpoint_layout(path), self.tokenizer.rows)
        both_ways = self.settings.bidirectional
        retriever = Retriever(layout, self.settings.width, self.settings.seed, bidirectional=both_ways)
        earlier = is_retriever(self._start.source)
        if earlier and is_bidirectional(self._start.source) is not both_ways:
            raise InvalidInput(f"is {str(not both_ways).lower()} in the model to start from", where="bidirectional")
        load_model(retriever, load_file(path), () if earlier else self.tokenizer.markers)
        if earlier:
            weight = projection_of(self._start.source, layout.d_model)
            if len(weight) != self.settings.width:
                raise InvalidInput(f"is {len(weight)} in the model to start from", where="width")
            retriever.projection.load_state_dict({"weight": weight})
        return retriever

    def write(self, model: Retriever) -> dict[str, Any]:
        write_retriever(self.output, model, self.tokenizer, self._start.tokenizer.context)
        return {
            "source": self._start.described,
            "layout": model.model.layout.format(),
            "settings": self.settings,
            "examples": len(self.examples),
            "objective": "distillation" if self.scored else "contrastive",
        }

    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """Returns the passes of a step, each of queries, documents, which of them are compared, and targets."""
        size = self.settings.batch
        batch = [self._drawn(number) for number in range(step * size, (step + 1) * size)]
        if not self.scored:
            return [self._contrastive_pass(batch)]
        tokens = self.tokenizer.documents([text for example in batch for text in example.documents]).tokens.shape[1]
        most = self.worker.most_tokens(*_TOKENS_AT_ONCE) // (tokens * self.settings.documents)
        return [self._scored_pass(batch[first : first + max(1, most)]) for first in range(0, size, max(1, most))]

    def loss(self, model: Retriever, *tensors: Tensor) -> Tensor:
        queries, query_text, documents, text, compared, targets = tensors
        queries, documents = model(queries, query_text), model(documents, text)
        if self.scored:
            rows = documents.new_zeros(*compared.shape, *documents.shape[1:])
            rows[compared] = documents
            texts = text.new_ones(*compared.shape, text.shape[1])
            texts[compared] = text
            losses = distillation(maxsim(queries, rows, texts), targets, compared, self.settings.loss)
        else:
            scores = maxsim(queries, documents, text) / self.settings.temperature
            losses = F.cross_entropy(scores.masked_fill(~compared, -torch.inf), targets, reduction="none")
        return losses.sum() / self.settings.batch

    def scores(self, model: Retriever) -> dict[str, float]:
        """Returns how well held-out queries find their best documents among all documents of held-out queries.

        As in training, other answers to a query are not compared with its document.
        """
        if not self._held_out:
            return {}
        texts = list(dict.fromkeys(text for example in self._held_out for text in example.documents))
        places = {text: place for place, text in enumerate(texts)}
        with self.precision():
            encoder = TorchEncoder(model, self.tokenizer)
            queries, vectors = encoder.queries([one.query for one in self._held_out]), encoder.documents(texts)
        starts, joined = np.cumsum([0, *map(len, vectors[:-1])]), np.concatenate(vectors)
        ranks = []
        for example, query in zip(self._held_out, queries, strict=True):
            scores = exact_scores(query, joined, starts)
            best = example.documents[int(np.argmax(example.scores)) if self.scored else 0]
            before = scores >= scores[places[best]]  # equal scores count as lost
            right = {best, *self._answers.get(example.query, ())}
            before[[places[text] for text in right if text in places]] = False
            ranks.append(1 + int(before.sum()))
        return {
            "queries": len(queries),
            "documents": len(texts),
            "MRR": float(np.mean([1 / rank for rank in ranks])),
            "recall@1": float(np.mean([rank == 1 for rank in ranks])),
            "recall@10": float(np.mean([rank <= 10 for rank in ranks])),
        }

    def _drawn(self, number: int) -> Example:
        """Returns the example that is read as number `number`, with as many documents as a step reads."""
        epoch, place = divmod(number, len(self.examples))
        if self._order[0] != epoch:
            rng = np.random.default_rng([self.settings.seed, epoch])
            self._order = epoch, rng.permutation(len(self.examples))
        example: Example = self.examples[self._order[1][place]]
        if len(example.documents) <= self.settings.documents:
            return example
        first = 0 if self.scored else 1  # an answer is read in any case
        rng = np.random.default_rng([self.settings.seed, number, 1])
        drawn = first + rng.permutation(len(example.documents) - first)[: self.settings.documents - first]
        chosen = [*range(first), *map(int, drawn)]
        documents = tuple(example.documents[index] for index in chosen)
        scores = tuple(example.scores[index] for index in chosen) if self.scored else ()
        return example.model_copy(update={"documents": documents, "scores": scores})

    def _scored_pass(self, batch: Sequence[Example]) -> tuple[Tensor, ...]:
        shape = len(batch), max(len(example.documents) for example in batch)
        compared, targets = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        for row, example in enumerate(batch):
            compared[row, : len(example.documents)] = True
            targets[row, : len(example.documents)] = torch.tensor(example.scores)
        texts = [text for example in batch for text in example.documents]
        queries, documents = self.tokenizer.queries([one.query for one in batch]), self.tokenizer.documents(texts)
        return *queries, *documents, compared, targets

    def _contrastive_pass(self, batch: Sequence[Example]) -> tuple[Tensor, ...]:
        """Returns a pass in which other answers to a query are not compared with the one that is to be found."""
        texts = list(dict.fromkeys(text for example in batch for text in example.documents))
        targets = [texts.index(example.documents[0]) for example in batch]
        compared = torch.tensor([[text not in self._answers[example.query] for text in texts] for example in batch])
        compared[range(len(batch)), targets] = True
        queries, documents = self.tokenizer.queries([one.query for one in batch]), self.tokenizer.documents(texts)
        return *queries, *documents, compared, torch.tensor(targets)


def distillation(scores: Tensor, targets: Tensor, compared: Tensor, loss: Literal["mse", "kl"]) -> Tensor:
    """Returns the loss of each query, [B]: equation 8, or the divergence of softmax(scores) from softmax(targets).

    Both kinds of scores are scaled to [0, 1] over the documents of a query, as PyLate does.

    Args:
        scores: of the model, [B, N].
        targets: a teacher's, [B, N].
        compared: which are there, [B, N].
        loss: which of them.
    """
    scores, targets = _scaled(scores, compared), _scaled(targets, compared)
    if loss == "mse":
        return (targets - scores).square().masked_fill(~compared, 0).sum(1) / compared.sum(1)
    logs, target_logs = (
        values.masked_fill(~compared, -1e9).log_softmax(1).masked_fill(~compared, 0) for values in (scores, targets)
    )
    return F.kl_div(logs, target_logs, reduction="none", log_target=True).masked_fill(~compared, 0).sum(1)


def _scaled(scores: Tensor, compared: Tensor) -> Tensor:
    low = scores.masked_fill(~compared, torch.inf).amin(1, keepdim=True)
    high = scores.masked_fill(~compared, -torch.inf).amax(1, keepdim=True)
    return (scores - low) / (high - low + 1e-8)
