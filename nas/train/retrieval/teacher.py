"""Scores of documents for queries by a teacher on disk, as data for distillation (LFM2 report, section 7.2).

A teacher is a folder of transformers with a sequence classifier of one output: a cross-encoder, which reads query and
document as a pair, or a reward model, whose chat template gets the query as a question and the document as its answer.
Or it is a language model, as of `nas.train.posttrain.start`, whose score is the mean logarithm of the chance of the
query's tokens behind the document (query likelihood: Ponte and Croft 1998; Sachan et al. 2022, "UPR").

Of each example the documents are its own, filled up with the first ones that an index returns for its query, or with
some of other examples. Lines are written as they are computed, so an interrupted command continues.
"""

from __future__ import annotations

import json
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nas.core.canonical import content_hash
from nas.core.durable import locked, write_durably
from nas.core.errors import CandidateFailed, InvalidInput
from nas.core.progress import Log, Progress
from nas.model.nn.weights import load_model
from nas.train.posttrain.reward_model import SequenceClassifier, folder_sha256
from nas.train.posttrain.start import StartModel, start_model
from nas.train.release.shards import read_json
from nas.train.retrieval.data import Example, data_hashes, read_examples
from nas.train.retrieval.index import open_index

SCORES_VERSION = 2
"""Part of keys: increase it with every change after which the same teacher gives other scores."""

_MOST_TOKENS = 512
_BETWEEN = "\n\n"
_INDEXED_AT_ONCE = 64


class Teacher(ABC):
    """Scores documents for a query."""

    @abstractmethod
    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        """Returns the score of each document; higher is better."""


class ClassifierTeacher(Teacher):
    """A cross-encoder, or a reward model where its tokenizer has a chat template.

    Args:
        folder: of it.

    Raises:
        InvalidInput: it holds no such model, or transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer, self._model, self._most = SequenceClassifier.read(folder, str(folder), "judge")

    @torch.inference_mode()
    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        return [float(self._model(**self._encoded(query, document)).logits[0, 0]) for document in documents]

    def _encoded(self, query: str, document: str) -> Any:
        limits = {"truncation": True, "max_length": int(min(self._most, _MOST_TOKENS)), "return_tensors": "pt"}
        if not self._tokenizer.chat_template:
            return self._tokenizer(query, document, **limits)
        messages = [{"role": "user", "content": query}, {"role": "assistant", "content": document}]
        return self._tokenizer.apply_chat_template(messages, sanitize_control_tokens=True, return_dict=True, **limits)


class LanguageTeacher(Teacher):
    """A language model.

    Args:
        start: the model.
    """

    def __init__(self, start: StartModel) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path = start.tensors(Path(scratch) / "weights.safetensors")
            model = load_model(path)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device)
        self._tokenizer, marks = start.tokenizer.tokenizer.tokenizer, start.tokenizer.tokenizer.marks
        self._tokenizer.encode_special_tokens = True
        self._start = [] if marks is None else [marks.start]

    @torch.inference_mode()
    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        sought = self._ids(query) or self._ids(" ")
        room = max(1, _MOST_TOKENS - len(sought))
        before = [[*self._start, *self._ids(document)[:room], *self._ids(_BETWEEN)] for document in documents]
        length = max(map(len, before)) + len(sought)
        tokens = torch.zeros(len(before), length, dtype=torch.long)
        text = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ids in enumerate(before):
            tokens[row, : len(ids) + len(sought)] = torch.tensor([*ids, *sought])
            text[row, : len(ids) + len(sought)] = True
        features = self._model.packed_features(tokens.to(self._device), text.to(self._device))
        ends = text.sum(1).cumsum(0)
        # The feature of each token foretells the next one.
        rows = torch.stack([features[end - len(sought) - 1 : end - 1] for end in ends.tolist()])
        logs = self._model.logits(rows).float().log_softmax(-1)
        target = torch.tensor(sought, device=self._device).expand(len(before), -1)
        means: list[float] = logs.gather(-1, target[..., None])[..., 0].mean(1).tolist()
        return means

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def write_scores(
    teacher: str,
    data: Sequence[Path],
    output: Path,
    log: Log,
    *,
    documents: int = 8,
    index: Path | None = None,
    seed: int = 0,
) -> int:
    """Writes the examples of data with a teacher's scores, as JSON lines; returns how many.

    Args:
        teacher: folder of a classifier, or name of a language model, see `start_model`.
        data: files and folders with answers to queries, see `nas.train.retrieval.data`.
        output: file of JSON lines; `output.part` holds what an interrupted call has written.
        log: takes one line at a time.
        documents: of a query.
        index: an index, whose documents fill up those of an example; None: those of other examples do.
        seed: of the others.

    Raises:
        InvalidInput: data has problems, named by file and line, or the teacher or the index is none.
        UnknownName: no such family or size.
        Unsupported: no layout says the model.
        CandidateFailed: a score is not finite.
    """
    examples = [example for path in data for example in read_examples(path)]
    if any(example.scores for example in examples):
        raise InvalidInput("has a teacher's scores already", where="--data")
    folder = Path(teacher)
    classifies = folder.is_dir() and _is_classifier(folder)
    start = None if classifies else start_model(teacher)
    hashes = [folder_sha256(folder)] if start is None else start.hashes
    inputs = [digest for path in data for digest in data_hashes(path)]
    indexed = None if index is None else read_json(index / "index.json").get("key")
    key = content_hash([SCORES_VERSION, hashes, inputs, documents, indexed, seed])
    part = output.with_name(f"{output.name}.part")
    with locked(output.with_name(f".{output.name}.lock")):
        done = _done(part, key)
        scorer = ClassifierTeacher(folder) if start is None else LanguageTeacher(start)
        with part.open("a", encoding="utf-8") as file:
            if not part.stat().st_size:
                file.write(json.dumps({"key": key}) + "\n")
            rows = _filled(examples, done, documents, index, seed)
            for number, (example, texts) in enumerate(rows, done + 1):
                scores = scorer.scores(example.query, texts)
                if not all(map(math.isfinite, scores)):
                    raise CandidateFailed("not_finite", f"{teacher}: a score of {example.query[:80]!r} is not finite")
                line = {"query": example.query, "documents": texts, "scores": [round(score, 6) for score in scores]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                log(Progress("scoring", number, len(examples)))
        write_durably(output, part.read_bytes().partition(b"\n")[2])
        part.unlink()
    return len(examples)


def _is_classifier(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    names = read_json(folder / "config.json").get("architectures") or [""]
    return str(names[0]).endswith("ForSequenceClassification")


def _done(part: Path, key: str) -> int:
    """Returns how many whole lines an interrupted call has written; those of another call are removed."""
    lines = part.read_bytes().splitlines(keepends=True) if part.is_file() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole or json.loads(whole[0]).get("key") != key:
        part.unlink(missing_ok=True)
        return 0
    write_durably(part, b"".join(whole))
    return len(whole) - 1


def _filled(
    examples: Sequence[Example], done: int, count: int, index: Path | None, seed: int
) -> Iterator[tuple[Example, list[str]]]:
    """Yields each example from number `done` on, with its documents and others up to `count`, each once; two at least.

    Raises:
        InvalidInput: there is one document in all.
    """
    search = None if index is None else open_index(index)
    for first in range(done, len(examples), _INDEXED_AT_ONCE):
        batch = examples[first : first + _INDEXED_AT_ONCE]
        if search is None:
            more = [_others(examples, number, count, seed) for number in range(first, first + len(batch))]
        else:
            hits = search([example.query for example in batch], count)
            more = [[hit.text for hit in best] for best in hits]
        for example, texts in zip(batch, more, strict=True):
            chosen = list(dict.fromkeys([*example.documents, *texts]))[: max(count, len(example.documents))]
            if len(chosen) < 2:
                other = next((one.documents[0] for one in examples if one.documents[0] not in chosen), None)
                if other is None:
                    raise InvalidInput("has one document in all, and scores are compared with others", where="--data")
                chosen.append(other)
            yield example, chosen


def _others(examples: Sequence[Example], number: int, count: int, seed: int) -> list[str]:
    rng = np.random.default_rng([seed, number])
    return [examples[place].documents[0] for place in rng.integers(0, len(examples), count)]
