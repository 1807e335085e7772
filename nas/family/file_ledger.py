"""What is on record of a member's files, while they are written and afterwards.

files.json is there exactly while the folder is whole: it goes before the first file is replaced and comes last. Between
the two, files.partial.json lists what is done and what was there before, so that the run after a kill keeps the one and
removes what it does not write of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from nas.core.family import FILES, MemberFile, MemberFiles, read_record, write_record

PARTIAL = "files.partial.json"


def files_of(folder: Path) -> MemberFiles | None:
    """The files of the member in `folder` as the last run left them, whole or interrupted; None: nothing was written.

    Raises:
        InvalidInput: the record is damaged.
    """
    return read_record(folder / PARTIAL, MemberFiles) or read_record(folder / FILES, MemberFiles)


class FileLedger:
    """The record of one run, which is the only one in this folder.

    Args:
        folder: the member's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = files_of(folder)
        self._before = found.files if found else ()

    def kept(self, key: str) -> tuple[MemberFile, ...]:
        """The files that an earlier run made under `key`; none where one of them is missing or damaged."""
        files = tuple(file for file in self._before if file.key == key)
        return files if all(_is_there(self._folder, file) for file in files) else ()

    def open(self) -> None:
        """Called before a file is replaced: from now on the folder is not whole."""
        (self._folder / FILES).unlink(missing_ok=True)

    def save(self, record: MemberFiles) -> None:
        """Notes what is done so far, and what else may lie in the folder."""
        listed = (*record.files, *self._others(record.files))
        write_record(self._folder / PARTIAL, record.model_copy(update={"files": listed}))

    def close(self, record: MemberFiles) -> None:
        """The folder is whole: it holds what `record` lists, and nothing else that an earlier run wrote."""
        self.save(record)
        write_record(self._folder / FILES, record)
        for file in self._others(record.files):
            (self._folder / file.path).unlink(missing_ok=True)
        (self._folder / PARTIAL).unlink()

    def _others(self, done: Sequence[MemberFile]) -> Iterator[MemberFile]:
        """What was there before and has not been replaced.

        Of files that were made together some may have been: the others lose their key, or they would pass for all.
        """
        paths, keys = {file.path for file in done}, {file.key for file in done}
        broken = {file.key for file in self._before if file.path in paths} - keys
        for file in self._before:
            if file.path not in paths:
                yield file.model_copy(update={"key": ""}) if file.key in broken else file


def _is_there(folder: Path, file: MemberFile) -> bool:
    path = folder / file.path
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
