"""Runs `nas` in this process through its entry point."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from nas.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def nas(*args: str, stdin: str = "") -> Outcome:
    """Runs `nas ARGS`; returns its exit code and output."""
    assert args[:1] != ("gc",) or "--help" in args or "NAS_CACHE" in os.environ, (
        "it would remove files from the cache of whoever runs this"
    )
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["nas", *args]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())
