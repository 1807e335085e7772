"""Trained weights to start from: as the first stage of a member, or for a model of another kind (`start_model`).

The first stage of a member is an adapted child, or a folder of transformers.

Its folder is the output of `nas adapt`, whose child is taken in float32, or one of transformers that `nas import`
reads. Its tokenizer, with the chat template beside it, is that of the stages that follow.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput
from nas.core.family import (
    FAMILY,
    TRAINING,
    Family,
    Member,
    MemberTraining,
    Source,
    check_new_name,
    family_folder,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes.llama_cpp.gguf_file import is_gguf
from nas.model.nn.fit import Worker
from nas.model.nn.weights import checkpoint_layout
from nas.train.adapt.adapt import CHILD, REQUEST
from nas.train.adapt.checkpoints import IMPORT_VERSION, import_model, model_files, read_model
from nas.train.pretrain.member_training import START, GivenWeights, MemberToTrain, TrainingRequest
from nas.train.release.files import find_member, tokenizer_of
from nas.train.release.found_tokenizer import FoundTokenizer, found_tokenizer
from nas.train.release.model_tokenizer import read_member_tokenizer
from nas.train.scaling.explain import pattern_in_words


@dataclass(frozen=True)
class Origin:
    """A trained model in a folder.

    Args:
        folder: that was named.
        layout: of the model.
        family: "adapted child", or transformers' name of the architecture.
        files: that hold it.
        tokenizer: its tokenizer.json.
    """

    folder: Path
    layout: Layout
    family: str
    files: tuple[Path, ...]
    tokenizer: Path

    def describe(self) -> str:
        """Returns it in words, with the beginning of the hash of its files, for records."""
        return f"{self.family} in {self.folder.resolve().name}, SHA-256 {content_hash(self.hashes)[:12]}"

    @cached_property
    def hashes(self) -> list[str]:
        """SHA-256 of its files."""
        return [sha256_of(path) for path in self.files]


def origin_of(folder: Path) -> Origin:
    """Returns the model in an output folder of `nas adapt`, or in a folder of transformers.

    Raises:
        InvalidInput: there is none, or the adaptation has not ended.
        Unsupported: no layout says the model.
    """
    if not folder.is_dir():
        raise InvalidInput("no such folder", where=str(folder))
    if not (folder / REQUEST).is_file():
        model = read_model(folder)
        return Origin(folder, model.layout, model.family, tuple(model_files(folder)), folder / "tokenizer.json")
    child, tokenizer = folder / CHILD, folder / "files" / "transformers" / "tokenizer.json"
    if not (child.is_file() and tokenizer.is_file()):
        raise InvalidInput("its adaptation has not ended: run the same `nas adapt` again", where=str(folder))
    return Origin(folder, checkpoint_layout(child), "adapted child", (child,), tokenizer)


def context_of(folder: Path) -> int | None:
    """Returns the tokens that the model in a folder is meant for; None: there is no model with its tokenizer."""
    with suppress(InvalidInput):
        return found_tokenizer(origin_of(folder).tokenizer).context
    return None


@dataclass(frozen=True)
class StartModel:
    """A trained model from which another kind of model is made.

    Args:
        described: in words.
        weights: its checkpoint; None: import `source`.
        source: folder of transformers, or GGUF file.
        hashes: of the files that hold it.
        tokenizer: its own.
    """

    described: str
    weights: Path | None
    source: Path
    hashes: list[str]
    tokenizer: FoundTokenizer

    def tensors(self, scratch: Path) -> Path:
        """Returns the checkpoint, which is written at `scratch` if there is none yet."""
        if self.weights is None:
            import_model(self.source, scratch)
            return scratch
        return self.weights


def start_model(name: str) -> StartModel:
    """Returns the model that a command names.

    Args:
        name: folder of transformers or of `nas adapt`, GGUF file, or FAMILY/SIZE of a trained member.

    Raises:
        InvalidInput: there is none, or it has no trained weights.
        UnknownName: no such family or size.
        Unsupported: no layout says the model, or its tokenizer is not read.
    """
    path = Path(name)
    if is_gguf(path):
        hashes = [sha256_of(file) for file in model_files(path)]
        return StartModel(f"{path.name}, SHA-256 {hashes[0][:12]}", None, path, hashes, found_tokenizer(path))
    if path.is_dir():
        origin = origin_of(path)
        child = path / CHILD if (path / REQUEST).is_file() else None
        return StartModel(origin.describe(), child, path, origin.hashes, found_tokenizer(origin.tokenizer))
    family, slash, size = name.partition("/")
    if not slash or "/" in size:
        raise InvalidInput("name a folder, a GGUF file, or FAMILY/SIZE of a member", where=name)
    return start_member(family, size)


def start_member(family: str, size: str) -> StartModel:
    """Returns a trained member; see `start_model` for what is raised."""
    folder, _, member = find_member(family, size)
    record = read_record(folder / TRAINING, MemberTraining)
    tokenizer = found_tokenizer(tokenizer_of(folder))
    history = () if record is None else record.history
    trained = MemberToTrain(folder, Layout.parse(member.layout), tokenizer.source, history)
    weights = trained.weights()
    described = f"{size} of {family}, SHA-256 {weights.sha256[:12]}"
    return StartModel(described, weights.path, folder, [weights.sha256], tokenizer)


def require_member(family: str, size: str, origin: Origin) -> None:
    """Checks that a member has the layout of a model; a family that does not exist gets this one member.

    Raises:
        UnknownName: the family has no such size.
        InvalidInput: the member has another layout, or no new family can have the name.
    """
    record, layout = family_folder(family) / FAMILY, origin.layout
    if not record.is_file():
        check_new_name(family)
        member = Member(
            size=size,
            layout=layout.format(),
            parameters=layout.params.total,
            active=layout.params.active,
            non_embedding=layout.params.non_embedding,
            decisions=(),
            tried=(),
        )
        created = Family(
            name=family,
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            seed=0,
            pattern=pattern_in_words(layout),
            sources=(Source(layout=layout.format()),),
            decisions=(),
            members=(member,),
            provenance={"hilnas": version("hilnas"), "started from": origin.describe()},
        )
        write_record(record, created)
    _, _, member = find_member(family, size)
    if Layout.parse(member.layout) != layout:
        raise InvalidInput(
            f"{origin.folder} holds {layout}, but {size} of {family} is {member.layout}; name another family, which is"
            " made with this layout",
            where="start",
        )


@dataclass(frozen=True, kw_only=True)
class StartRequest(TrainingRequest):
    """A requested start from weights that were trained elsewhere.

    Args:
        folder: of the model; see `origin_of`.
    """

    kind: ClassVar[str] = "start"

    folder: Path

    def check(self, stages: Collection[str]) -> None:
        super().check(stages)
        origin = origin_of(self.folder)
        path = self.tokenizer or origin.tokenizer
        tokenizer = read_member_tokenizer(path)
        if not tokenizer.fits(origin.layout.vocab):
            raise InvalidInput(
                f"has {tokenizer.size:,} tokens, but the embedding of {self.folder} {origin.layout.vocab:,} rows; name"
                " the tokenizer.json that the model was trained with",
                where=str(path),
            )

    def plan(self, member: MemberToTrain, log: Log) -> Start:
        origin = origin_of(self.folder)
        return Start.of(member, 0, folder=self.folder.resolve(), described=origin.describe(), hashes=origin.hashes)


class Start(GivenWeights):
    """Plan of a start."""

    folder: Path
    described: str
    hashes: list[str]

    def key_inputs(self) -> dict[str, Any]:
        return {"import": IMPORT_VERSION, "files": self.hashes}

    def config(self) -> dict[str, Any]:
        return {"files": self.hashes, "tokenizer": self.tokenizer_sha256}

    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        if (child := self.folder / CHILD).is_file():
            return child, self.described
        log(f"importing {self.folder}")
        import_model(self.folder, folder / START)
        return folder / START, self.described

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns none: nothing was trained."""
        return {}
