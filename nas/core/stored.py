"""Files and folders in the user's cache that are made once for equal inputs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import write_durably

_ABANDONED_S = 86400
"""A temporary folder in which nothing was written for this long is of a process that was killed."""


def stored(kind: str, version: int, inputs: Any, make: Callable[[], bytes], *, suffix: str = "") -> Path:
    """Returns the file `CACHE/kind/HASH` with the content of `make`, which is called only if the file does not exist.

    The file appears whole or not at all; of two processes that make it at the same time, the later one replaces an
    equal file.

    Args:
        kind: folder in the cache.
        version: of the code of `make`; raised when its result changes.
        inputs: everything else that the content depends on, as JSON values.
        make: returns the content.
        suffix: of the file's name, such as ".json".
    """
    path = _place(kind, version, inputs, suffix)
    if not path.is_file():
        content = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
    return path


def stored_folder(kind: str, version: int, inputs: Any, make: Callable[[Path], None]) -> Path:
    """Returns the folder `CACHE/kind/HASH` as `make` fills it, called only if the folder does not exist.

    `make` writes into an empty folder beside it, which is then synced and renamed: other processes see it whole or not
    at all, also after a power cut. Arguments are those of `stored`.
    """
    path = _place(kind, version, inputs, "")
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(path.parent)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary, "content")
            folder.mkdir()
            make(folder)
            for file in filter(Path.is_file, folder.rglob("*")):
                with file.open("rb") as content:
                    os.fsync(content.fileno())
            try:
                folder.rename(path)
            except OSError:
                if not path.is_dir():  # otherwise another process has made an equal one
                    raise
    return path


def _delete_abandoned(parent: Path) -> None:
    for temporary in parent.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):  # its process has just renamed or deleted it
            written = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
            if written < time.time() - _ABANDONED_S:
                shutil.rmtree(temporary)


def _place(kind: str, version: int, inputs: Any, suffix: str) -> Path:
    return paths.cache() / kind / f"{content_hash([version, inputs])}{suffix}"
