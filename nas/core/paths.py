"""Folders of hilnas: state in `$NAS_HOME`, rebuildable ones in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from nas.core.errors import InvalidInput

SOCKET_NAME = 107
"""Bytes that the name of a Unix socket may have."""
_RAY = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def home() -> Path:
    """Returns the folder of the database, artifacts and checkpoints. `$NAS_HOME` overrides."""
    return _folder("NAS_HOME", platformdirs.user_data_dir).resolve()


def cache() -> Path:
    """Returns the folder of runtime builds, downloads and corpora. `$NAS_CACHE` overrides."""
    return _folder("NAS_CACHE", platformdirs.user_cache_dir).resolve()


def config() -> Path:
    """Returns the folder of the coordinators that are known. `$NAS_CONFIG` overrides."""
    return _folder("NAS_CONFIG", platformdirs.user_config_dir)


def expanded(text: str | Path, where: str) -> Path:
    """Returns a path whose `~` or `~user` is that home folder.

    Args:
        text: the path.
        where: flag or variable that it comes from.

    Raises:
        InvalidInput: there is no such user, or no home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidInput(f"{text}: there is no such home folder; give a path without '~'", where=where) from None


def require_short_sockets() -> None:
    """Checks that the names of Ray's sockets fit below the folder of temporary files.

    Raises:
        InvalidInput: they would be too long.
    """
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    excess = len(os.fsencode(folder)) + _RAY - SOCKET_NAME
    if excess > 0:
        text = (
            f"{folder} is {excess} bytes too long for Ray's sockets; set RAY_TMPDIR to a shorter folder, such as /tmp"
        )
        raise InvalidInput(text, where=f"${variable}")


def _folder(variable: str, usual: Callable[[str], str]) -> Path:
    if text := os.environ.get(variable):
        return expanded(text, f"${variable}")
    folder = usual("hilnas")
    if folder.startswith("~"):
        raise InvalidInput(f"this user has no home folder: set HOME, or {variable} to a folder", where=f"${variable}")
    return Path(folder)
