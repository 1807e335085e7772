"""Files of llama.cpp's types made from one GGUF file, and what each loses: `nas compare --types`.

Files are kept in the user's cache by the content of their source, divergences as those of `nas quantise`. Those that
no process uses are removed above a limit, least recently used first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from nas.core import paths
from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, UnknownName
from nas.core.progress import Log, Progress
from nas.core.workload import Workload
from nas.measure.protocol.file_choice import Bits, Loss
from nas.measure.runtimes.llama_cpp.binding import MIXTURES, quantise_file
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.train.adapt.quantise import (
    DIVERGENCES,
    IMPORTANCE,
    KL,
    SOURCE,
    Quantiser,
    QuantiseRequest,
    Score,
    require_source,
)

_WAIT_S = 3600.0
"""For another process that makes the same file."""
MOST_BYTES = 20_000_000_000
"""Of files in the cache."""
_USE = "use"
"""In the folder of a file: locked while a process uses the file."""


def types_of(text: str, valid: Collection[str] = MIXTURES) -> list[str]:
    """Returns `valid` names of llama.cpp's types from a list with commas.

    Raises:
        UnknownName: there is no such type.
    """
    names = list(dict.fromkeys(text.lower().replace(" ", "").split(",")))
    for name in names:
        if name not in valid:
            raise UnknownName("type", name, valid)
    return names


def trim(limit_bytes: int) -> int:
    """Removes files that no process uses, least recently used first, until all take at most `limit_bytes`.

    Importance matrices count as well: of those, runs use copies.

    What was removed is made again when it is needed, with the same content.

    Returns:
        The bytes removed.
    """
    files: dict[Path, os.stat_result] = {}
    matrices = (paths.cache() / DIVERGENCES).glob(f"*{IMPORTANCE}*")
    for path in (*_folder().glob("*/*.*"), *matrices):  # also what killed processes left
        with suppress(FileNotFoundError):
            files[path] = path.stat()
    excess, removed = sum(status.st_size for status in files.values()) - limit_bytes, 0
    for path, status in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
        if removed >= excess:
            break
        with suppress(InfrastructureFailed), locked(path.with_name(_USE), 0.0):  # not where it is used
            path.unlink(missing_ok=True)
            removed += status.st_size
    return removed


class MadeTypes:
    """Files made from one source; a context, in which no other process removes them.

    Args:
        source: a GGUF file with tokenizer.
        types: names of `MIXTURES`.
        text: that predictions are compared on; empty: they are not.
        importance_from: text of the importance matrix; empty: none is used.
        windows: of 256 tokens, spread over this text; an odd number counts as one less.
        folder: for files meanwhile: the source's predictions.
        log: takes one line at a time.

    Raises:
        InvalidInput: the source cannot be quantised.
    """

    def __init__(
        self,
        source: Path,
        types: Sequence[str],
        text: str,
        importance_from: str,
        windows: int,
        folder: Path,
        log: Log,
    ) -> None:
        require_source(source, log)
        self._source, self._types, self._text, self._log = source, types, text, log
        self._build = LLAMA_CPP.build(log=log, tools=bool(importance_from))
        self._threads = len(os.sched_getaffinity(0))
        self._request = QuantiseRequest(
            source=source,
            chosen_on="",
            reported_on=text,
            importance_from=importance_from,
            limits=(),
            kl=None,
            minimise=KL,
            types=(),
            parts=1,
            windows=windows // 2,
            device="local",
            workload=Workload(prompt=16, gen=1),
            repetitions=1,
            threads=self._threads,
        )
        self._quantiser = Quantiser(self._request, self._build, folder, log)
        self._used = ExitStack()

    def __enter__(self) -> Self:
        """Says that its files are used."""
        for path, name in self.files.items():
            if name != SOURCE:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._used.enter_context(locked(path.with_name(_USE), shared=True))
                with suppress(FileNotFoundError):
                    os.utime(path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Lets other processes remove its files, which are the last ones to be removed."""
        self._used.close()
        trim(MOST_BYTES)

    @cached_property
    def files(self) -> Mapping[Path, str]:
        """File -> its type, `SOURCE` first. Some are not there: see `make`."""
        stem = re.sub("[-.](F16|BF16|F32)$", "", self._source.stem, flags=re.IGNORECASE)
        made_of = [sha256_of(self._source), self._build.runner.build, self._request.importance_from]
        folders = {name: _folder() / content_hash([*made_of, name]) for name in self._types}
        others = {folder / f"{stem}-{name.upper()}.gguf": name for name, folder in folders.items()}
        return {self._source: SOURCE, **others}

    def make(self) -> dict[Path, str]:
        """Makes the files that are not in the cache; returns why some could not be made.

        Raises:
            InvalidInput: a text is too short.
            CandidateFailed: there is no importance matrix of the source.
            InfrastructureFailed: a file cannot be written, or memory or time does not suffice.
        """
        if self._text:
            self._score(self._source)  # before files are made, as it finds that the text is too short
        failed = {}
        for number, (path, name) in enumerate(self.files.items()):
            self._log(Progress("files of types", number, len(self.files), name))
            if name == SOURCE or path.is_file():
                continue
            with locked(path.parent / "lock", _WAIT_S):
                for leftover in path.parent.glob("*.partial"):
                    leftover.unlink()
                if path.is_file():
                    continue
                matrix = self._quantiser.importance
                try:
                    quantise_file(self._build, self._source, name, path, self._threads, importance=matrix)
                except CandidateFailed as error:
                    failed[path] = f"llama.cpp makes no {name} of it: {error}"
        self._log(Progress("files of types", len(self.files), len(self.files)))
        return failed

    def bits(self, file: Path) -> Bits:
        """Returns bits per byte and the loss of one of `files`."""
        if not self._text:
            return Bits()
        try:
            score = self._score(file)
        except CandidateFailed as error:
            return Bits(reason=str(error), failed=True)
        kl, half = score.kl
        return Bits(score.bits_per_byte, loss=Loss(kl, half, score.bits_per_byte / self._reference.bits_per_byte - 1))

    @cached_property
    def _reference(self) -> Score:
        return self._score(self._source)

    def _score(self, file: Path) -> Score:
        self._log(f"comparing {file.name} with the source")
        name = self.files[file]
        return self._quantiser.score(name, file, importance=name != SOURCE)


def _folder() -> Path:
    return paths.cache() / "quantised"


def require_one(files: Sequence[Path]) -> Path:
    """Returns the source.

    Raises:
        InvalidInput: there are more files, or it is no GGUF file.
    """
    if len(files) > 1 or files[0].suffix.lower() != ".gguf":
        raise InvalidInput("types are made from one GGUF file: name it alone", where="--types")
    return files[0]
