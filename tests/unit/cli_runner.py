"""Runs `nas` in this process, as its entry point does."""

from __future__ import annotations

import contextlib
import io
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
    """The exit code and what was written by `nas ARGS`."""
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
