"""What a file is that should be a model: downloads often leave something else under its name."""

from __future__ import annotations

from pathlib import Path

_BEGINNINGS = (
    (b"version https://git-lfs", "it is a pointer of git-lfs, not the file: run `git lfs pull` in its repository"),
    (b"<!doctype html", "it is a web page, not the file: download it again"),
    (b"<html", "it is a web page, not the file: download it again"),
)
_LONGEST = 64


def download_problem(path: Path, otherwise: str = "") -> str:
    """Returns what a file that cannot be read is instead, and what helps, for messages.

    Args:
        path: of the file.
        otherwise: what is said where the beginning of the file tells nothing.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(_LONGEST).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    except OSError as error:
        return error.strerror or otherwise
    if not beginning:
        return "it is empty: download it again"
    return next((problem for start, problem in _BEGINNINGS if beginning.startswith(start)), otherwise)
