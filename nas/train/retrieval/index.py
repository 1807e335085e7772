"""Indexes of documents: their token vectors on disk, searched exactly (equation 7 of the LFM2 report).

    INDEX/request.json            what an unfinished index is of
    INDEX/vectors-00000.npy       vectors of some documents, float16 [tokens, width]
    INDEX/documents-00000.jsonl   id, number of vectors and text of each; written after their vectors
    INDEX/index.json              what the index is of, written last

An index that was interrupted resumes at its last whole part, with the same model and documents; it is not searched
before. A search reads all vectors, memory-mapped: no libraries of approximate indexes for token vectors install beside
the pinned torch (see docs/explanation/libraries.md).
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import InvalidInput
from nas.core.family import FamilyRecord, read_record, write_record
from nas.core.progress import Log, Progress
from nas.measure.runtimes.llama_cpp.gguf_file import is_gguf
from nas.train.posttrain.trained_folder import REQUEST, require_folder
from nas.train.release.shards import SINGLE, shard_files
from nas.train.release.tokenizer import json_bytes
from nas.train.retrieval.data import data_hashes, read_documents
from nas.train.retrieval.gguf import open_encoder
from nas.train.retrieval.release import DENSE, SETTINGS
from nas.train.retrieval.retriever import Encoder, Floats, exact_scores

INDEX_VERSION = 2
"""Part of keys: increase it with every change after which the same documents give other vectors."""
INDEX = "index.json"

_PART = 256
"""Documents of a part."""


class IndexRecord(FamilyRecord):
    """What an index is of.

    Args:
        key: hash of all its inputs.
        model: folder or GGUF file of the model.
        model_sha256: of its files that vectors depend on.
        documents: number of them.
        vectors: of all documents.
        cut: documents that have as many tokens as the model reads at most: the rest of them is not searched.
        width: of a vector.
    """

    key: str
    model: str
    model_sha256: str
    documents: int
    vectors: int
    cut: int
    width: int


class StoredText(FamilyRecord):
    """A document of an index, with its number of vectors."""

    id: str
    vectors: int
    text: str


class Hit(NamedTuple):
    """A document that a search returns."""

    score: float
    id: str
    text: str


def build_index(model: Path, sources: Sequence[Path], output: Path, log: Log) -> IndexRecord:
    """Writes the index of documents, or what is missing of it.

    Args:
        model: folder or GGUF file of a late-interaction model.
        sources: JSON lines and folders of BEIR, see `nas.train.retrieval.data`.
        output: folder of the index.
        log: takes one line at a time.

    Raises:
        InvalidInput: documents have problems, named by file and line, two have one id, or the folder holds something
            else.
        Unsupported: the model is not read.
        CandidateFailed: llama.cpp dies on a GGUF file.
        InfrastructureFailed: another process writes this index.
    """
    documents: dict[str, str] = {}
    for source in sources:
        more = read_documents(source)
        if twice := next(iter(documents.keys() & more.keys()), None):
            raise InvalidInput(f"an earlier source has a document {twice!r}, too", where=str(source))
        documents |= more
    digest = _model_hash(model)
    key = content_hash([INDEX_VERSION, digest, [name for source in sources for name in data_hashes(source)]])
    what = "the index of other documents or of another model"
    # A kill leaves parts of the request.
    require_folder(output, key, (output / INDEX, output / REQUEST), what, (".lock", f".{REQUEST}.*"))
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / ".lock"):
        if (record := read_record(output / INDEX, IndexRecord)) is not None:
            log(f"{output} holds the index of these documents already")
            return record
        for unfinished in output.glob(".*.*"):  # of a killed run
            unfinished.unlink()
        write_durably(output / REQUEST, json_bytes({"key": key}))
        encoder = open_encoder(model)
        stored = list(_parts(encoder, documents, output, log))
        record = IndexRecord(
            key=key,
            model=str(model.resolve()),
            model_sha256=digest,
            documents=len(documents),
            vectors=sum(text.vectors for text in stored),
            cut=sum(text.vectors == encoder.tokens.lengths[1] for text in stored),
            width=encoder.width,
        )
        write_record(output / INDEX, record)
        (output / REQUEST).unlink()
    return record


def _parts(encoder: Encoder, documents: dict[str, str], output: Path, log: Log) -> Iterator[StoredText]:
    """Yields all documents of an index, and writes the parts that are missing."""
    items, done, number = iter(documents.items()), 0, 0
    while part := list(islice(items, _PART)):
        vectors_path, texts_path = _paths(output, number)
        if not texts_path.is_file():
            vectors = encoder.documents([text for _, text in part])
            texts = [
                StoredText(id=name, vectors=len(rows), text=text)
                for (name, text), rows in zip(part, vectors, strict=True)
            ]
            content = io.BytesIO()
            np.save(content, np.concatenate(vectors).astype(np.float16))
            write_durably(vectors_path, content.getvalue())
            lines = "".join(f"{text.model_dump_json()}\n" for text in texts)
            write_durably(texts_path, lines.encode())
        yield from _texts(texts_path)
        done, number = done + len(part), number + 1
        log(Progress("indexing", done, len(documents)))


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"vectors-{number:05}.npy", folder / f"documents-{number:05}.jsonl"


def _texts(path: Path) -> list[StoredText]:
    try:
        return [StoredText.model_validate_json(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValidationError) as error:
        raise InvalidInput("is damaged: remove the index and build it again", where=str(path)) from error


def _model_hash(model: Path) -> str:
    if is_gguf(model):
        return sha256_of(model)
    names = ("config.json", SINGLE, f"{DENSE}/{SINGLE}", "tokenizer.json", "tokenizer_config.json", SETTINGS)
    files = [model / name for name in names]
    if model.is_dir() and not (model / SINGLE).is_file():
        files += shard_files(model)
    return content_hash([sha256_of(file) if file.is_file() else None for file in files])


class Index:
    """A finished index.

    Args:
        folder: of it.

    Raises:
        InvalidInput: it is none, not finished or damaged.
    """

    def __init__(self, folder: Path) -> None:
        record = read_record(folder / INDEX, IndexRecord)
        if record is None:
            why = (
                "is not finished: run the same `nas family index` again" if (folder / REQUEST).is_file() else "no index"
            )
            raise InvalidInput(why, where=str(folder))
        self.record = record
        self._parts: list[tuple[NDArray[np.float16], NDArray[np.int64], list[StoredText]]] = []
        count = 0
        while count < record.documents:
            vectors_path, texts_path = _paths(folder, len(self._parts))
            texts = _texts(texts_path)
            try:
                vectors = np.load(vectors_path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise InvalidInput(f"is damaged: {error}", where=str(vectors_path)) from error
            lengths = [text.vectors for text in texts]
            if not texts or vectors.shape != (sum(lengths), record.width):
                raise InvalidInput("is damaged: remove the index and build it again", where=str(vectors_path))
            self._parts.append((vectors, np.cumsum([0, *lengths[:-1]]), texts))
            count += len(texts)

    def search(self, queries: Sequence[Floats], most: int) -> list[list[Hit]]:
        """Returns the documents with the highest scores for each query, highest first.

        queries: vectors of each [Q, width].
        """
        best: list[list[Hit]] = [[] for _ in queries]
        for vectors, starts, texts in self._parts:
            rows = np.asarray(vectors, np.float32)
            for place, query in enumerate(queries):
                scores = exact_scores(query, rows, starts)
                order = np.argsort(-scores, kind="stable")[:most]
                hits = (Hit(float(scores[i]), texts[i].id, texts[i].text) for i in order)
                best[place] = heapq.nlargest(most, [*best[place], *hits], key=lambda hit: hit.score)
        return best


def open_index(folder: Path, model: Path | None = None) -> Callable[[Sequence[str], int], list[list[Hit]]]:
    """Returns the function that searches an index: of queries and a number, the best documents for each query.

    Args:
        folder: of the index.
        model: the model's folder or file, where it was moved; None: where it was.

    Raises:
        InvalidInput: the index is not finished or damaged, or the model is not the one that made it.
    """
    index = Index(folder)
    place = Path(index.record.model) if model is None else model
    if _model_hash(place) != index.record.model_sha256:
        raise InvalidInput("is not the model that made the index", where=str(place))
    encoder = open_encoder(place)
    return lambda queries, most: index.search(encoder.queries(queries), most)
