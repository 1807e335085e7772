"""Writes the files of a member, which stock transformers, stock llama.cpp and stock ExecuTorch load.

    MEMBER/transformers/     config, weights, tokenizer, chat template, and our code where no stock class will do
    MEMBER/gguf/             NAME-Q4_0.gguf ..., with the tokenizer in each
    MEMBER/executorch/       NAME-8da4w.pte, on request
    MEMBER/README.md         the model card
    MEMBER/files.json        what was written, last

Every file has a key, the hash of all its inputs. A file with an unchanged key and content is kept, so a second run does
nothing, and a run after a kill resumes.

files.json exists only while the folder is complete: it is removed before the first file is replaced, and written last.
In between, files.partial.json lists the finished files and those of earlier runs: the run after a kill keeps the former
and removes those of the latter that it does not rewrite. `rewrite_card` replaces the card alone, while files.json is
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.family import (
    BENCHMARKS,
    EVALUATION,
    FILES,
    TRAINING,
    Family,
    Member,
    MemberEvaluation,
    MemberFile,
    MemberFiles,
    member_folder,
    read_family,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import RandomWeights, ReleasePart, ReleaseRequest, StateDict, Weights
from nas.train.release import huggingface
from nas.train.release.huggingface import checkpoint_of, open_weights
from nas.train.release.model_card import card, card_key, write_card
from nas.train.release.model_tokenizer import read_member_tokenizer
from nas.train.release.options import FileOptions, kept_options
from nas.train.release.tokenizer import MemberTokenizer, byte_tokenizer, require_fit

PARTIAL = "files.partial.json"
FILES_VERSION = 6
"""Increase it with every change to this package that changes the bytes of a file."""

_LOCK_S = 4 * 3600.0


def files_of(folder: Path) -> MemberFiles | None:
    """Returns the files of the last run in `folder`, complete or interrupted; None: none were written.

    Raises:
        InvalidInput: the record is damaged.
    """
    return read_record(folder / PARTIAL, MemberFiles) or read_record(folder / FILES, MemberFiles)


def find_member(family: str, size: str) -> tuple[Path, Family, Member]:
    """Returns folder, family and record of a member.

    Raises:
        UnknownName: no family of this name, or no such size in it.
        InvalidInput: its record is damaged.
    """
    record = read_family(family)
    members = {member.size: member for member in record.members}
    if size not in members:
        raise UnknownName(f"size of {family}", size, members, where="--size")
    return member_folder(family, size), record, members[size]


def tokenizer_of(member: Path) -> Path:
    """Returns the tokenizer.json that was written for the member in folder `member`.

    Raises:
        InvalidInput: none was written yet.
    """
    files = files_of(member)
    for file in files.files if files else ():
        path = (member / file.path).resolve()
        if file.kind == "tokenizer" and path.name == "tokenizer.json" and path.is_relative_to(member.resolve()):
            return path
    raise InvalidInput(f"{member.name} has no tokenizer yet: name a tokenizer.json", where="--tokenizer")


@dataclass(frozen=True)
class _Member:
    """A member whose files are written."""

    folder: Path
    name: str
    layout: Layout
    weights: Weights
    tokenizer: MemberTokenizer
    options: FileOptions

    @property
    def dtype(self) -> torch.dtype:
        """Type of the released matrices."""
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        return dtype

    @property
    def model(self) -> dict[str, Any]:
        """Inputs of every model file, for its key."""
        plugins = self.layout.plugin_versions
        return {
            "v": FILES_VERSION,
            **({"plugins": plugins} if plugins else {}),
            "layout": self.layout.to_json(),
            "weights": self.weights.describe(),
            "dtype": self.options.dtype,
            "tokenizer": self.tokenizer.describe(),
            "context": self.options.context,
        }


def write_files(folder: Path, layout: Layout, weights: Weights, options: FileOptions, log: Log) -> MemberFiles:
    """Writes a member's missing files, and removes those of earlier runs that it does not list.

    Returns:
        All files, as files.json lists them.

    Raises:
        InvalidInput: the tokenizer does not match the layout's vocabulary, the checkpoint does not match its weights,
            or an option cannot be used.
        InfrastructureFailed: a build or package is missing, the disk is full, or another process writes these files.
        CandidateFailed: a runtime's tools cannot write the file (export, crash).
    """
    member = _member(folder, layout, weights, options)
    with _alone(folder, log):
        return _written(member, log)


@dataclass(frozen=True)
class MemberFilesWriter:
    """Writes the files of a family's members, with random weights.

    Args:
        options: for all members; name, measurements, budget and provenance come from each member.
    """

    options: FileOptions

    def check(self, layout: Layout) -> None:
        """Checks that the tokenizer has the layout's vocabulary, before hours of measuring.

        Raises:
            InvalidInput: it has another one.
        """
        _tokenizer(layout, self.options)

    def write(self, folder: Path, family: Family, member: Member, log: Log) -> MemberFiles | None:
        """Writes the missing files of a member (see `write_files`); of a trained member none, and returns None."""
        options = self.options.of_member(family, member, family.seed)
        target = _member(folder, Layout.parse(member.layout), RandomWeights(family.seed), options)
        with _alone(folder, log):
            if (folder / TRAINING).exists():
                log(f"{folder.name}: it was trained; its files stay as they are")
                return None
            return _written(target, log)


@contextmanager
def _alone(folder: Path, log: Log) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".files.lock", _LOCK_S, waiting=lambda: log(f"{folder}: another process writes its files")):
        yield


def _member(folder: Path, layout: Layout, weights: Weights, options: FileOptions) -> _Member:
    return _Member(folder, options.checked_name(folder), layout, weights, _tokenizer(layout, options), options)


def _tokenizer(layout: Layout, options: FileOptions) -> MemberTokenizer:
    if options.tokenizer is None:
        return byte_tokenizer(layout.vocab)
    if isinstance(options.tokenizer, MemberTokenizer):
        return options.tokenizer
    tokenizer = read_member_tokenizer(options.tokenizer)
    require_fit(tokenizer, layout, str(options.tokenizer))
    return tokenizer


def _transformers(member: _Member) -> tuple[str, tuple[ReleasePart, ...]]:
    try:
        target = huggingface.target_of(member.layout)
    except Unsupported as error:
        if member.options.transformers:
            raise
        return f"none: {error.message}", ()
    loads = f"{target.name} with trust_remote_code: {target.why_own}" if target.why_own else target.name
    if not member.options.transformers:
        return loads, ()
    code = {name: hashlib.sha256(content).hexdigest() for name, content in target.code.items()}

    def write(state: StateDict) -> Iterator[MemberFile]:
        return huggingface.write_transformers(member.folder, member.layout, state, member.tokenizer, member.options)

    inputs = [dict(target.config), member.options.shard_bytes, code if target.why_own else None]
    return loads, (ReleasePart("transformers", inputs, write),)


def _of_runtime(member: _Member, name: str) -> tuple[str, tuple[ReleasePart, ...]]:
    requested = member.options.of_runtime(name)
    if requested is None:
        return "none: not asked for", ()
    quantisations, context = requested
    scratch = member.folder / "weights.partial"
    request = ReleaseRequest(
        folder=member.folder,
        name=member.name,
        layout=member.layout,
        quantisations=RUNTIMES[name].quantisations[:1] if quantisations is None else quantisations,
        context=context,
        vocabulary=lambda: member.tokenizer.vocabulary(member.layout.vocab),
        checkpoint=lambda: checkpoint_of(member.layout, member.weights, member.dtype, scratch),
        license=member.options.license,
    )
    released = RUNTIMES[name].release(request)
    return released.loads, released.parts


def _written(member: _Member, log: Log) -> MemberFiles:
    # Loader -> how it loads the member, and the parts to write for it.
    plan = {"transformers": _transformers(member), **{name: _of_runtime(member, name) for name in RUNTIMES}}
    for partial in member.folder.rglob("*.partial"):  # of a killed run
        partial.unlink()
    ledger = FileLedger(member.folder)
    record = MemberFiles(
        layout=member.layout.format(),
        weights=member.weights.describe(),
        loads={loader: loads for loader, (loads, _) in plan.items()},
        files=(),
        context=member.options.context,
        pte_context=member.options.pte_context,
        license=member.options.license,
    )
    parts = [(loader, part) for loader, (_, release_parts) in plan.items() for part in release_parts]
    record = _with_parts(member, parts, record, ledger, log)
    record = _with_card(member.folder, member.name, member.layout, member.options, record, ledger)
    ledger.close(record)
    return record


def _with_parts(
    member: _Member, parts: Sequence[tuple[str, ReleasePart]], record: MemberFiles, ledger: FileLedger, log: Log
) -> MemberFiles:
    with open_weights(member.layout, member.weights, member.dtype) as state:
        ledger.save(record)
        for loader, part in parts:
            key = content_hash([member.model, *part.inputs])
            files = ledger.intact_files(key)
            if not files:
                ledger.open()
                log(f"{member.name}: writing {part.name}")
                try:
                    files = tuple(file.model_copy(update={"key": key}) for file in part.write(state))
                except Unsupported as error:
                    if not part.optional:
                        raise
                    log(f"{member.name}: {part.name} is left out: {error.message}")
                    loads = {**record.loads, loader: f"none: {error.message}"}
                    record = record.model_copy(update={"loads": loads})
                    continue
            record = record.model_copy(update={"files": record.files + files})
            ledger.save(record)
    return record


def _with_card(
    folder: Path, name: str, layout: Layout, options: FileOptions, record: MemberFiles, ledger: FileLedger
) -> MemberFiles:
    text = _card(folder, name, layout, options, record)
    files = ledger.intact_files(card_key(text))
    if not files:
        ledger.open()
        files = (write_card(folder, text),)
    return record.model_copy(update={"files": record.files + files})


def _card(folder: Path, name: str, layout: Layout, options: FileOptions, others: MemberFiles) -> str:
    evaluations = {
        title: evaluation
        for title, record in (("Exact answers", EVALUATION), ("Benchmarks", BENCHMARKS))
        if (evaluation := read_record(folder / record, MemberEvaluation))
    }
    return card(name, layout, others, options, evaluations)


def rewrite_card(folder: Path, family: Family, member: Member, log: Log) -> None:
    """Replaces the model card of a trained member, then its entry in files.json, each atomically.

    The member's files stay listed at every moment. After a kill between the two, the entry is that of the earlier card
    until this or `write_files` runs again. Where files are missing, nothing is written: the run that completes them
    writes the card.
    """
    with _alone(folder, log):
        record = read_record(folder / FILES, MemberFiles)
        if record is None or (folder / PARTIAL).exists():
            return
        options = kept_options(record, None, None, None).of_member(family, member)
        others = record.model_copy(update={"files": tuple(file for file in record.files if file.kind != "card")})
        text = _card(folder, options.checked_name(folder), Layout.parse(member.layout), options, others)
        written = write_card(folder, text)
        write_record(folder / FILES, others.model_copy(update={"files": (*others.files, written)}))


class FileLedger:
    """The record of a run, which is the only one that writes into the folder.

    Args:
        folder: the member's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        record = files_of(folder)
        self._before = record.files if record else ()

    def intact_files(self, key: str) -> tuple[MemberFile, ...]:
        """Returns the files that an earlier run wrote under `key`; none if one of them is missing or damaged."""
        files = tuple(file for file in self._before if file.key == key)
        return files if all(_is_intact(self._folder, file) for file in files) else ()

    def open(self) -> None:
        """Marks the folder as incomplete; called before a file is replaced."""
        (self._folder / FILES).unlink(missing_ok=True)

    def save(self, record: MemberFiles) -> None:
        """Records the finished files, and those of earlier runs."""
        listed = (*record.files, *self._others(record.files))
        write_record(self._folder / PARTIAL, record.model_copy(update={"files": listed}))

    def close(self, record: MemberFiles) -> None:
        """Marks the folder as complete, and removes files of earlier runs that `record` does not list."""
        self.save(record)
        write_record(self._folder / FILES, record)
        for file in self._others(record.files):
            (self._folder / file.path).unlink(missing_ok=True)
        (self._folder / PARTIAL).unlink()

    def _others(self, done: Sequence[MemberFile]) -> Iterator[MemberFile]:
        """Yields earlier files that were not replaced.

        If only some of the files with one key were replaced, the others lose it: the set is incomplete.
        """
        paths, keys = {file.path for file in done}, {file.key for file in done}
        broken = {file.key for file in self._before if file.path in paths} - keys
        for file in self._before:
            if file.path not in paths:
                yield file.model_copy(update={"key": ""}) if file.key in broken else file


def _is_intact(folder: Path, file: MemberFile) -> bool:
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256
