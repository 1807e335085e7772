"""What was read of a device at one moment, to be looked at as often as one likes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nas.devices.transports.base import Reader


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A `Tree` of the files that were asked for, and what commands printed.

    Args:
        asked: paths and commands.
        found: what `Reader.read_many` answered.
    """

    asked: tuple[str, ...]
    found: Mapping[str, str | OSError]

    @classmethod
    def take(cls, reader: Reader, paths: Sequence[str], commands: Sequence[str] = ()) -> Snapshot:
        """Reads in one exchange, in this order."""
        return cls((*paths, *commands), reader.read_many(paths, commands))

    def read_text(self, path: str) -> str:
        """See `Tree.read_text`; only what was asked for can be."""
        assert path in self.asked or any(fnmatchcase(path, asked) for asked in self.asked), f"{path} was not asked for"
        answer = self.found.get(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path))
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror, path)
        return answer

    def output(self, command: str) -> str:
        """What a command printed.

        Raises:
            OSError: there is no such command.
        """
        return self.read_text(command)

    def names(self, folder: str) -> list[str]:
        """See `Tree.names`: those names of which something was found."""
        inside = (path[len(folder) + 1 :] for path in self._there() if path.startswith(f"{folder}/"))
        found = sorted({name.partition("/")[0] for name in inside})
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return found

    def _there(self) -> list[str]:
        return [
            path
            for path, answer in self.found.items()
            if not (isinstance(answer, OSError) and answer.errno == errno.ENOENT)
        ]
