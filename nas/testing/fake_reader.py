"""A reader of a device's files and commands from a table, for tests of probes and descriptions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase


class FakeReader:
    """A `nas.measure.devices.transports.base.Reader` of given files. Counts its exchanges in `exchanges`.

    Args:
        files: absolute path -> text, or the error that reading it gives; a test may change it.
        commands: command -> its output.
    """

    def __init__(self, files: Mapping[str, str | OSError], commands: Mapping[str, str] | None = None) -> None:
        self.files = dict(files)
        self.commands = dict(commands or {})
        self.exchanges = 0

    def read_text(self, path: str) -> str:
        answer = self._get(path)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def names(self, folder: str) -> list[str]:
        children = {path[len(folder) + 1 :].partition("/")[0] for path in self.files if path.startswith(f"{folder}/")}
        if not children:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return sorted(children)

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        self.exchanges += 1
        files = {path: self._get(path) for pattern in paths for path in self._matching(pattern)}
        return files | {command: self._output(command) for command in commands}

    def _matching(self, pattern: str) -> Iterator[str]:
        if "*" not in pattern and "?" not in pattern:
            yield pattern
            return
        parts = pattern.split("/")
        for path in sorted(self.files):
            segments = path.split("/")
            if len(segments) == len(parts) and all(map(fnmatchcase, segments, parts)):
                yield path

    def _get(self, path: str) -> str | OSError:
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.files.get(path, missing)

    def _output(self, command: str) -> str | OSError:
        return self.commands.get(command, FileNotFoundError(errno.ENOENT, "No such command", command))
