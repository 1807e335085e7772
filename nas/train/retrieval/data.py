"""Data for retrieval: JSON lines, and folders of BEIR (Thakur et al. 2021).

JSON lines, one kind a file; other keys are ignored:

    {"query": "...", "positive": "...", "negatives": ["...", ...]}       contrastive; `negatives` may be left out
    {"query": "...", "documents": ["...", ...], "scores": [3.1, ...]}    with a teacher's scores

A folder of BEIR, whose lines may be compressed:

    corpus.jsonl          {"_id": "...", "title": "...", "text": "..."}
    queries.jsonl         {"_id": "...", "text": "..."}
    qrels/train.tsv       query, document and relevance, with tabs between them; the first line may have their names
    scores.jsonl          {"query_id": "...", "document_ids": ["...", ...], "scores": [3.1, ...]}: a teacher's, if any

What cannot be used is refused, named by file and line.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.train.posttrain.conversations import Line, raise_problems, read_placed_lines

CORPUS, QUERIES, SCORES = "corpus.jsonl", "queries.jsonl", "scores.jsonl"


class _Line(Line):
    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)


class StoredDocument(_Line):
    """A document of a collection."""

    id: str = Field(min_length=1, validation_alias=AliasChoices("_id", "id"))
    title: str | None = None
    text: str

    @property
    def content(self) -> str:
        """Title and text, as BEIR joins them."""
        return f"{self.title or ''} {self.text}".strip()


class Example(_Line):
    """A query with documents, the first of which answers it, or with documents that a teacher scored."""

    query: str = Field(min_length=1)
    documents: tuple[str, ...] = Field(min_length=1)
    scores: tuple[float, ...] = ()
    positive: bool = Field(False, strict=True, description="whether the first document is an answer")

    @model_validator(mode="before")
    @classmethod
    def _positive_first(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or not isinstance(fields.get("positive"), str):
            return fields
        negatives = fields.get("negatives") or []
        if "documents" in fields or not isinstance(negatives, list):
            raise ValueError("give `positive` with `negatives`, a list, or `documents` with `scores`")
        return {"query": fields.get("query"), "documents": [fields["positive"], *negatives], "positive": True}

    @model_validator(mode="after")
    def _scored(self) -> Example:
        if not self.positive and not self.scores:
            raise ValueError("needs `positive`, or `documents` with `scores`")
        if self.scores and len(self.scores) != len(self.documents):
            raise ValueError(f"{len(self.documents)} documents, but {len(self.scores)} scores")
        if self.scores and len(self.documents) < 2:
            raise ValueError("a teacher's scores need two documents or more: they are compared with each other")
        return self


class _ScoredIds(_Line):
    query_id: str
    document_ids: tuple[str, ...]
    scores: tuple[float, ...]


class Judgements(BaseModel):
    """Queries with the documents that answer them.

    Args:
        queries: id -> text.
        relevance: query -> document -> relevance, above 0.
    """

    model_config = ConfigDict(frozen=True)

    queries: Mapping[str, str]
    relevance: Mapping[str, Mapping[str, int]]


def read_examples(path: Path) -> list[Example]:
    """Reads a file of JSON lines, or the training part of a folder of BEIR.

    Raises:
        InvalidInput: a file is missing or has problems, named by line, or only some lines have scores.
    """
    if path.is_dir():
        return _examples_of(path)
    placed = read_placed_lines(_stored(path), Example)
    scored = bool(placed[0][1].scores)
    if other := next((place for place, example in placed if bool(example.scores) is not scored), None):
        raise InvalidInput("has lines with a teacher's scores and lines without: make two files of it", where=other)
    return [example for _, example in placed]


def read_documents(path: Path) -> dict[str, str]:
    """Reads a collection: id -> title and text, from JSON lines or a folder of BEIR; a text may be empty.

    Raises:
        InvalidInput: the file is missing or has problems, named by line, or two documents have one id.
    """
    return _by_id(path / CORPUS if path.is_dir() else path)


def read_judgements(folder: Path, split: str) -> Judgements:
    """Reads queries and judgements of a folder of BEIR.

    Args:
        folder: of BEIR.
        split: "train", "dev" or "test".

    Raises:
        InvalidInput: a file is missing or has problems, named by line, or a query is not there.
    """
    queries, path = _by_id(folder / QUERIES), folder / "qrels" / f"{split}.tsv"
    relevance: dict[str, dict[str, int]] = {}
    problems: list[str] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if not row:
                    continue
                try:
                    query, document, value = row
                    grade = int(value)
                    if queries[query] and grade > 0:
                        relevance.setdefault(query, {})[document] = grade
                except KeyError:
                    problems.append(f"{path}:{number}: {QUERIES} has no query {row[0]!r}")
                except ValueError:
                    if number > 1 or len(row) != 3:
                        problems.append(f"{path}:{number}: three columns with tabs: query, document, whole number")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise InvalidInput(f"cannot read it: {reason}", where=str(path)) from error
    raise_problems(problems)
    if not relevance:
        raise InvalidInput("judges no document as relevant", where=str(path))
    return Judgements(queries={query: queries[query] for query in relevance}, relevance=relevance)


def data_hashes(path: Path) -> list[str]:
    """Returns the SHA-256 of the files that `read_examples` or `read_documents` may read."""
    names = (CORPUS, QUERIES, SCORES, "qrels/train.tsv")
    files = map(_stored, [path / name for name in names] if path.is_dir() else [path])
    return [sha256_of(file) for file in files if file.is_file()]


def _stored(path: Path) -> Path:
    """Returns the path, or that of its compressed form where it alone is there."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _by_id(path: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for place, line in read_placed_lines(_stored(path), StoredDocument):
        if line.id in texts:
            raise InvalidInput(f"the id {line.id!r} is there twice", where=place)
        texts[line.id] = line.content
    return texts


def _examples_of(folder: Path) -> list[Example]:
    documents = read_documents(folder)
    if not _stored(folder / SCORES).exists():
        judged = read_judgements(folder, "train")
        pairs = [(query, document) for query, answers in judged.relevance.items() for document in answers]
        if absent := next((document for _, document in pairs if document not in documents), None):
            raise InvalidInput(f"{CORPUS} has no document {absent!r}", where=str(folder / "qrels" / "train.tsv"))
        return [
            Example(query=judged.queries[query], documents=(documents[name],), positive=True) for query, name in pairs
        ]
    queries = _by_id(folder / QUERIES)
    examples: list[Example] = []
    problems: list[str] = []
    for place, line in read_placed_lines(_stored(folder / SCORES), _ScoredIds):
        absent = next((name for name in line.document_ids if name not in documents), None)
        if line.query_id not in queries or absent is not None:
            file, name = (QUERIES, line.query_id) if line.query_id not in queries else (CORPUS, absent)
            problems.append(f"{place}: {file} has no {name!r}")
            continue
        texts = tuple(documents[name] for name in line.document_ids)
        try:
            examples.append(Example(query=queries[line.query_id], documents=texts, scores=line.scores))
        except ValidationError as error:
            problems.append(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    raise_problems(problems)
    return examples
