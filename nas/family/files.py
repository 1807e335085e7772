"""The files of a member: what stock transformers, stock llama.cpp and stock ExecuTorch load.

    MEMBER/transformers/     config, weights, tokeniser, chat template, and code of ours where no stock class will do
    MEMBER/gguf/             NAME-Q4_0.gguf ..., with the tokeniser in each
    MEMBER/executorch/       NAME-8da4w.pte, where asked for
    MEMBER/README.md         the model card
    MEMBER/files.json        what was written, last

Every file has a key, the hash of all that it is made from. What is there under its key and has its hash is kept, so a
second run does nothing, and one that was killed goes on (`nas.family.file_ledger`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.core.errors import Unsupported
from nas.core.family import TRAINING, MemberFile, MemberFiles
from nas.core.layout import Layout
from nas.family import gguf_files, transformers_folder
from nas.family.card import card, card_key, write_card
from nas.family.file_ledger import FileLedger
from nas.family.file_options import FileOptions
from nas.family.member_weights import checkpoint_of, open_weights
from nas.family.tokenizer import MemberTokenizer, byte_tokenizer, read_tokenizer, require_fit
from nas.runtimes.base import RandomWeights, Weights
from nas.runtimes.checkpoint_file import StateDict
from nas.runtimes.executorch.runtime import EXECUTORCH
from nas.runtimes.llama_cpp import source
from nas.runtimes.llama_cpp.patches import patch_hashes
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP

Log = Callable[[str], None]

FILES_VERSION = 1
"""Raise it with every change of this package that changes the bytes of a file."""
PTE_QUANTISATION = "8da4w"

_LOCK_S = 4 * 3600.0


@dataclass(frozen=True)
class _Part:
    """Files that are written together.

    Args:
        name: for the log.
        inputs: all that their bytes follow from.
        write: writes them.
    """

    name: str
    inputs: Any
    write: Callable[[StateDict], Iterable[MemberFile]]


@dataclass(frozen=True)
class _Member:
    folder: Path
    name: str
    layout: Layout
    weights: Weights
    tokenizer: MemberTokenizer
    options: FileOptions

    @property
    def dtype(self) -> torch.dtype:
        """What matrices are released in."""
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        return dtype

    @property
    def model(self) -> dict[str, Any]:
        """What the bytes of every model file follow from."""
        return {
            "v": FILES_VERSION,
            "layout": self.layout.to_json(),
            "weights": self.weights.describe(),
            "dtype": self.options.dtype,
            "tokenizer": self.tokenizer.describe(),
            "context": self.options.context,
        }


def write_files(folder: Path, layout: Layout, weights: Weights, options: FileOptions, log: Log) -> MemberFiles:
    """Writes what of a member's files is not there yet, and removes what an earlier run wrote and this one does not.

    Args:
        folder: the member's own.
        layout: what it is.
        weights: random or trained; all files hold the same ones.
        options: what to write.
        log: gets a line at a time.

    Returns:
        What is there now, as files.json has it.

    Raises:
        InvalidInput: the tokeniser does not match the layout's vocabulary, the checkpoint not its weights, or an option
            cannot be used.
        InfrastructureFailed: a build or package is missing, the disk is full, or another process writes these files.
        CandidateFailed: a runtime's tools cannot write the file (export, crash).
    """
    member = _member(folder, layout, weights, options)
    with _alone(folder, log):
        return _brought_about(member, log)


def write_random_files(
    folder: Path, layout: Layout, weights: RandomWeights, options: FileOptions, log: Log
) -> MemberFiles | None:
    """As `write_files`, but leaves a member that was trained as it is; None then."""
    member = _member(folder, layout, weights, options)
    with _alone(folder, log):
        if (folder / TRAINING).exists():
            log(f"{folder.name}: it was trained; its files stay as they are")
            return None
        return _brought_about(member, log)


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
    tokenizer = read_tokenizer(options.tokenizer)
    require_fit(tokenizer, layout, str(options.tokenizer))
    return tokenizer


def _plan(member: _Member) -> tuple[dict[str, str], list[_Part]]:
    """What loads the member, and the parts to write."""
    parts: list[_Part] = []
    loads = {
        "transformers": _transformers(member, parts),
        "llama.cpp": _llama_cpp(member, parts),
        "executorch": _executorch(member, parts),
    }
    return loads, parts


def _transformers(member: _Member, parts: list[_Part]) -> str:
    target = transformers_folder.target_of(member.layout)
    code = {name: hashlib.sha256(content).hexdigest() for name, content in transformers_folder.code_files()}

    def write(state: StateDict) -> Iterator[MemberFile]:
        return transformers_folder.write_transformers(
            member.folder, member.layout, state, member.tokenizer, member.options
        )

    if member.options.transformers:
        inputs = [member.model, dict(target.config), member.options.shard_bytes, code if target.why_own else None]
        parts.append(_Part("transformers", inputs, write))
    return f"{target.name} with trust_remote_code: {target.why_own}" if target.why_own else target.name


def _llama_cpp(member: _Member, parts: list[_Part]) -> str:
    support = LLAMA_CPP.supports(member.layout)
    if support.arch is None:
        return f"none: {'; '.join(support.reasons)}"

    def write(quantisation: str, state: StateDict) -> Iterator[MemberFile]:
        yield gguf_files.write_gguf_file(
            member.folder,
            member.name,
            quantisation,
            member.layout,
            state,
            member.tokenizer,
            member.options,
        )

    build = [LLAMA_CPP.writer_version, source.SHA256, patch_hashes() if support.verdict == "patched" else None]
    # The float16 file comes first: llama.cpp's quantiser reads it.
    for quantisation in sorted(member.options.gguf, key=lambda name: name != "f16"):
        inputs = [member.model, build, quantisation, gguf_files.file_name(member.name, quantisation)]
        parts.append(_Part(quantisation.upper(), inputs, partial(write, quantisation)))
    if support.verdict == "patched":
        return f"{support.arch} (patched build): {'; '.join(support.reasons)}"
    return support.arch


def _executorch(member: _Member, parts: list[_Part]) -> str:
    context = member.options.pte_context
    if context is None:
        return "none: not asked for"
    support = EXECUTORCH.supports(member.layout)
    if not support:
        return f"none: {'; '.join(support.reasons)}"
    name = f"executorch/{member.name}-{PTE_QUANTISATION}.pte"

    def write(_: StateDict) -> Iterator[MemberFile]:
        path, scratch = member.folder / name, member.folder / "weights.partial"
        path.parent.mkdir(exist_ok=True)
        with checkpoint_of(member.layout, member.weights, member.dtype, scratch) as checkpoint:
            made = EXECUTORCH.export_whole(member.layout, PTE_QUANTISATION, checkpoint, context, path)
        yield MemberFile(path=name, kind="pte", quantisation=PTE_QUANTISATION, sha256=made.sha256, size=made.size)

    parts.append(_Part(".pte", [member.model, EXECUTORCH.writer_version, context, name], write))
    return f"standard .pte for texts of {context:,} tokens"


def _brought_about(member: _Member, log: Log) -> MemberFiles:
    loads, parts = _plan(member)
    _remove_partial(member.folder)
    ledger = FileLedger(member.folder)
    record = MemberFiles(
        layout=member.layout.format(),
        weights=member.weights.describe(),
        loads=loads,
        files=(),
        context=member.options.context,
        pte_context=member.options.pte_context,
    )
    record = _with_card(member, _with_parts(member, parts, record, ledger, log), ledger)
    ledger.close(record)
    return record


def _with_parts(member: _Member, parts: list[_Part], record: MemberFiles, ledger: FileLedger, log: Log) -> MemberFiles:
    with open_weights(member.layout, member.weights, member.dtype) as state:
        ledger.save(record)
        for part in parts:
            key = content_hash(part.inputs)
            files = ledger.kept(key)
            if not files:
                ledger.open()
                log(f"{member.name}: writing {part.name}")
                try:
                    files = tuple(file.model_copy(update={"key": key}) for file in part.write(state))
                except Unsupported as error:
                    record = _without(record, part, error)
                    continue
            record = record.model_copy(update={"files": record.files + files})
            ledger.save(record)
    return record


def _with_card(member: _Member, record: MemberFiles, ledger: FileLedger) -> MemberFiles:
    text = card(member.name, member.layout, record, member.options)
    files = ledger.kept(card_key(text))
    if not files:
        ledger.open()
        files = (write_card(member.folder, text),)
    return record.model_copy(update={"files": record.files + files})


def _without(record: MemberFiles, part: _Part, error: Unsupported) -> MemberFiles:
    """A whole program may lack what artifacts have; the rest of the member is none the worse."""
    if part.name != ".pte":
        raise error
    return record.model_copy(update={"loads": {**record.loads, "executorch": f"none: {error.message}"}})


def _remove_partial(folder: Path) -> None:
    """What a killed run left half written."""
    for path in folder.rglob("*.partial"):
        path.unlink()
