"""Training batches and evaluation groups of proxies.

The batch of a step depends on seed and step alone: layouts that are compared see the same data in the same order
(common random numbers), and a resumed training has no position in the data to restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Exhibit, MediaTask, RetrievalTask, Task, make_task
from nas.model.nn.maxsim import maxsim
from nas.model.nn.model import Model
from nas.model.text.bpe import encoded
from nas.model.text.corpus import Domain, open_corpus
from nas.search.proxy.job import PARTS, LibraryRun, LmRun, TaskRun, TrainJob

_EVAL_SEED = 2**32 - 1
_EVAL_EXAMPLES = 256
_EVAL_BATCH = 32

BYTE_GRAM = 6
"""Bytes of the n-grams that make a label recallable: about as much text as `TOKEN_GRAM`."""
TOKEN_GRAM = 2
"""Tokens of the n-grams that make a label recallable: Zoology's bigrams."""
LATE_FROM = 512
"""Shortest sequence whose last quarter is a part of its own."""
_LEAST_LABELS = 64
"""Fewest labels of recall and of the rest: with fewer the group is not divided."""
_COMMON_SHARE = 2.0**-14
"""Share of all n-grams of the training text from which on one is known without the window."""
_SAMPLE_PIECES = 16
_SAMPLE_LENGTH = 1 << 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Of the polynomial hash of an n-gram."""
_ROW = np.uint64(0xD1B54A32D192ED03)
"""Times the row's number, it makes equal n-grams of two rows differ."""

Pair = tuple[Tensor, Tensor]


class Data(Protocol):
    """Training batches and evaluation groups of a run."""

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns inputs and labels [B, T] of a step (from 0), int64, and what else the loss takes."""
        ...

    def groups(self) -> dict[str, Group]:
        """Returns the evaluation groups by name."""
        ...


class Part(NamedTuple):
    """Some labels of a group: where they are, bool [N, T], and the loss of a guess on them."""

    where: Tensor
    chance: float


@dataclass(frozen=True, eq=False)
class Group:
    """An evaluation group: a fixed set of examples, the same for every seed.

    Args:
        inputs: int64 [N, T], or [N, T, n] of a task that shows n symbols at once.
        labels: int64 [N, T], `nas.core.task.IGNORE` where none; of detokenizers spectra, float32 [N, T, bands], whose
            loss is the mean absolute error, and accuracy the share of numbers that are less than half a unit off.
        chance: loss of a guess, in `unit`s.
        unit: nats per unit of loss (ln 2 for bits).
        sizes: what each label counts, [V]: the bytes of a token; None: 1.
        parts: groups of their own within this one, scored in the same pass.
        query: tokens of a query at the beginning of each example of retrieval; 0: there are labels. Loss is then
            1 - nDCG@10, accuracy the share of queries for which the right document is first.
        media: at the beginning of each example; None: there is text alone.
    """

    inputs: Tensor
    labels: Tensor
    chance: float
    unit: float
    sizes: Tensor | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    query: int = 0
    media: Exhibit | None = None


class Score(NamedTuple):
    """`loss` in the group's unit for each label or byte, `accuracy` as a share of labels."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, group: Group, device: torch.device) -> dict[str, Score]:
    """Returns the means over all labels of `group` under the name "", and over those of each part."""
    if group.query:
        assert isinstance(model, Model), "layouts of retrieval tasks give vectors"
        return {"": _search(model, group, device)}
    if group.labels.is_floating_point():
        batches = torch.split(group.inputs, _EVAL_BATCH)
        errors = (torch.cat([spectra(model, codes.to(device)).cpu() for codes in batches]) - group.labels).abs()
        return {"": Score(float(errors.double().mean()) / group.unit, float((errors < 0.5).double().mean()))}
    nats, right = [], []
    for inputs, labels in zip(
        torch.split(group.inputs, _EVAL_BATCH), torch.split(group.labels, _EVAL_BATCH), strict=True
    ):
        logits, targets = logits_and_labels(model, inputs.to(device), labels.to(device), group.media)
        logits = logits.float()
        nats.append(F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none").double().cpu())
        right.append((logits.argmax(-1) == targets).cpu())
    front = 0 if group.media is None else group.media.amount
    loss, correct, labelled = torch.cat(nats), torch.cat(right), group.labels[:, front:] != IGNORE
    amount = torch.ones_like(loss) if group.sizes is None else group.sizes[group.labels].double()
    where = {"": labelled, **{name: part.where for name, part in group.parts.items()}}
    return {
        name: Score(float(loss[mask].sum() / amount[mask].sum()) / group.unit, float(correct[mask].double().mean()))
        for name, mask in where.items()
    }


def logits_and_labels(model: nn.Module, inputs: Tensor, labels: Tensor, media: Exhibit | None) -> tuple[Tensor, Tensor]:
    """Returns logits and labels of a batch, those of the text alone where something is before it.

    The n symbols of inputs [B, T, n] are embedded as their sum.
    """
    if inputs.dim() == 2 and media is None:
        return model(inputs), labels
    assert isinstance(model, Model), "what a task trains and scores is a layout's model"
    if media is None:
        return model(model.embed(inputs).sum(2)), labels
    numbers, tokens = inputs.tensor_split([media.amount], 1)
    return model.answers(numbers.view(-1, media.rows, media.columns), tokens), labels[:, media.amount :]


def spectra(model: nn.Module, codes: Tensor) -> Tensor:
    """Returns the spectra [B, T, bands] that a model makes of codes [B, T, n]."""
    assert isinstance(model, Model), "layouts of detokenizers have a projection"
    projected: Tensor = model.projection(model.features(model.embed(codes).sum(2)))
    return projected.float()


def _search(model: Model, group: Group, device: torch.device) -> Score:
    """Searches the documents of all examples for the query of each."""
    queries, documents = (
        torch.cat([model.vectors(tokens.to(device)) for tokens in torch.split(part, _EVAL_BATCH)])
        for part in (group.inputs[:, : group.query], group.inputs[:, group.query :])
    )
    text = torch.ones(documents.shape[:2], dtype=torch.bool, device=device)
    scores = torch.cat([maxsim(part, documents, text) for part in torch.split(queries, _EVAL_BATCH)]).cpu()
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)  # equal scores count as lost
    return Score(1 - float(gains(ranks).mean()), float((ranks == 1).double().mean()))


def gains(ranks: Tensor) -> Tensor:
    """Returns nDCG@10 of queries with one right document, by its rank from 1 (Järvelin and Kekäläinen 2002)."""
    return torch.where(ranks <= 10, 1 / torch.log2(1 + ranks.double()), 0.0)


def score_groups(model: nn.Module, groups: Mapping[str, Group], device: torch.device) -> dict[str, tuple[Score, float]]:
    """Returns score and chance of every group, and of every part as GROUP.PART."""
    scores = {}
    for group_name, group in groups.items():
        chances = {"": group.chance, **{name: part.chance for name, part in group.parts.items()}}
        for name, score in evaluate(model, group, device).items():
            scores[f"{group_name}.{name}" if name else group_name] = score, chances[name]
    return scores


def open_data(job: TrainJob) -> Data:
    """Opens the data of `job`.

    Raises:
        InfrastructureFailed: this host has another corpus than the job names.
        InvalidInput: a domain of the corpus is shorter than a sequence.
    """
    match job.run:
        case LmRun() as run:
            corpus = open_corpus(run.corpus)
            domains = corpus.domains if run.bpe is None else encoded(corpus, run.bpe)
            if short := [name for name, domain in domains.items() if domain.train.size <= run.length]:
                text = f"too little text to train on for sequences of {run.length:,}: {', '.join(short)}"
                raise InvalidInput(text, where="corpus")
            return LmData(domains, job.batch, run.length, run.eval_bytes, job.seed)
        case TaskRun() as run:
            return TaskData(run.task, make_task(run.task, run.settings), job.batch, job.seed)
        case LibraryRun():
            raise AssertionError("nothing is trained; see `nas.search.proxy.mixes`")


class LmData:
    """Random windows of the training part; all domains are equally likely, whatever their size.

    Each domain's group has parts (`nas.search.proxy.job.PARTS`). Recall: labels that complete an n-gram which occurred
    before in the same sequence, the hits of associative recall of Arora et al. 2023 ("Zoology", section 3.2), unless
    training text has it so often that it is known by heart. Rest: all others. Late: the last quarter of a long
    sequence. The chance level of a part is the loss on its labels of the guess that the whole group's chance stands
    for: the distribution of the domain's held-out ids.
    """

    def __init__(self, domains: Mapping[str, Domain], batch: int, length: int, eval_bytes: int, seed: int) -> None:
        self._domains = domains
        self._batch, self._length = batch, length
        self._eval_bytes, self._seed = eval_bytes, seed

    def batch(self, step: int) -> Pair:
        generator = np.random.default_rng([self._seed, step])
        domains = list(self._domains.values())
        chosen = generator.integers(len(domains), size=self._batch)
        position = generator.random(self._batch)
        windows = []
        for index, share in zip(chosen, position, strict=True):
            text = domains[index].train
            start = int(share * (text.size - self._length))
            windows.append(text[start : start + self._length + 1])
        return _next_id(np.stack(windows))

    def groups(self) -> dict[str, Group]:
        return {f"lm/{name}": self._group(domain) for name, domain in self._domains.items()}

    def _group(self, domain: Domain) -> Group:
        """Returns windows that are spread evenly over the held-out part."""
        ids = min(round(self._eval_bytes / domain.bytes_per_id), domain.heldout.size - 1)
        count = max(1, ids // self._length)
        starts = np.linspace(0, domain.heldout.size - self._length - 1, count).astype(int)
        windows = np.stack([domain.heldout[start : start + self._length + 1] for start in starts])
        inputs, labels = _next_id(windows)
        sizes = None if (domain.sizes == 1).all() else torch.from_numpy(domain.sizes)
        return Group(inputs, labels, domain.unigram_entropy, float(np.log(2)), sizes, self._parts(domain, windows))

    def _parts(self, domain: Domain, windows: NDArray[np.integer[Any]]) -> dict[str, Part]:
        recalled = recallable(windows, domain.train, BYTE_GRAM if (domain.sizes == 1).all() else TOKEN_GRAM)
        late = np.zeros_like(recalled)
        if self._length >= LATE_FROM:
            late[:, -(self._length // 4) :] = True
        parts = dict(zip(PARTS, (recalled, ~recalled, late), strict=True))
        if min(recalled.sum(), (~recalled).sum()) < _LEAST_LABELS:
            parts = {"late": late}
        labels = windows[:, 1:]
        bits, size = domain.surprise[labels], domain.sizes[labels]
        return {
            name: Part(torch.from_numpy(where), float(bits[where].sum() / size[where].sum()))
            for name, where in parts.items()
            if where.any()
        }


def recallable(windows: NDArray[np.integer[Any]], train: NDArray[np.integer[Any]], n: int) -> NDArray[np.bool_]:
    """Returns which labels of windows [N, T + 1] complete an n-gram that occurred before in the same window, [N, T].

    N-grams that make up more than 1 in 16,384 of the training text, of which a part is counted, are none: a model
    knows them without the window.

    Args:
        windows: ids.
        train: ids of the training text.
        n: `BYTE_GRAM` for bytes, `TOKEN_GRAM` for tokens.
    """
    recalled = np.zeros((len(windows), windows.shape[1] - 1), bool)
    if windows.shape[1] <= n:
        return recalled
    codes = _grams(windows, n)
    rows = np.arange(len(windows), dtype=np.uint64)[:, None] * _ROW
    first = np.zeros(codes.size, bool)
    first[np.unique((codes ^ rows).ravel(), return_index=True)[1]] = True
    again = ~first.reshape(codes.shape)
    repeated = np.unique(codes[again])
    if repeated.size:
        grams = _grams(_sample(train), n).ravel()
        index = np.minimum(repeated.searchsorted(grams), repeated.size - 1)
        counts = np.bincount(index[repeated[index] == grams], minlength=repeated.size)
        is_rare = counts <= grams.size * _COMMON_SHARE
        again &= is_rare[repeated.searchsorted(codes).clip(0, repeated.size - 1)]
    recalled[:, n - 2 :] = again
    return recalled


def _grams(ids: NDArray[np.integer[Any]], n: int) -> NDArray[np.uint64]:
    """Returns a code of every n-gram along the last axis, [..., T] -> [..., T - n + 1]; equal ones have equal codes."""
    wide, length = ids.astype(np.uint64), ids.shape[-1] - n + 1
    codes = np.zeros((*ids.shape[:-1], length), np.uint64)
    for place in range(n):
        codes = codes * _FACTOR + wide[..., place : place + length] + np.uint64(1)
    return codes


def _sample(ids: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Returns pieces that are spread evenly over `ids`, [pieces, length]."""
    pieces = min(_SAMPLE_PIECES, max(1, ids.size // _SAMPLE_LENGTH))
    length = min(_SAMPLE_LENGTH, ids.size)
    starts = np.linspace(0, ids.size - length, pieces).astype(int)
    return np.stack([ids[start : start + length] for start in starts])


class TaskData:
    """New examples at every step; the evaluation set has its own seed."""

    def __init__(self, name: str, task: Task, batch: int, seed: int) -> None:
        self._name, self._task, self._batch, self._seed = name, task, batch, seed

    def batch(self, step: int) -> Pair:
        return self._draw(np.random.default_rng([self._seed, step]), self._batch)

    def groups(self) -> dict[str, Group]:
        inputs, labels = self._draw(np.random.default_rng(_EVAL_SEED), _EVAL_EXAMPLES)
        if isinstance(self._task, RetrievalTask):
            chance = 1 - float(gains(torch.arange(1, len(inputs) + 1)).mean())
            return {f"task/{self._name}": Group(inputs, labels, chance, unit=1.0, query=self._task.query)}
        media = self._task.media if isinstance(self._task, MediaTask) else None
        return {f"task/{self._name}": Group(inputs, labels, chance=self._task.chance_nats, unit=1.0, media=media)}

    def _draw(self, generator: np.random.Generator, size: int) -> Pair:
        inputs, labels = self._task.batch(generator, size)
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def _next_id(windows: NDArray[np.integer[Any]]) -> Pair:
    """Splits windows [N, T + 1] into inputs and next ids, [N, T] each."""
    text = torch.from_numpy(windows.astype(np.int64))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
