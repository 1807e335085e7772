"""Entry point of `nas`: global options, and what an error looks like.

Exit codes: 0 ok, 1 failed, 2 usage, 3 invalid configuration or input, 4 transient infrastructure, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from nas.cli.lazy import LazyGroup
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.logs import without_passwords
from nas.core.visible import visible

DEBUG = "NAS_DEBUG"

app = typer.Typer(
    name="nas",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("hilnas"))
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks; ${DEBUG}=1 does the same.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Hardware-in-the-loop architecture search for on-device language models.

    Data goes to stdout; progress and messages go to stderr. Commands that read take --json. Exit codes: 0 ok, 1
    failed, 2 usage, 3 invalid configuration or input, 4 transient infrastructure (a retry can help), 130 interrupted.
    """
    if debug:
        os.environ[DEBUG] = "1"  # so that child processes show theirs too


def main() -> None:
    """Runs the command line; an expected error is one message on stderr and an exit code."""
    try:
        app(prog_name="nas")
    except NasError as error:
        _fail(error, error.exit_code)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        _fail(error, InvalidInput.exit_code)  # a path that was given
    except OSError as error:
        _fail(error, InfrastructureFailed.exit_code)


def _fail(error: Exception, code: int) -> None:
    if os.environ.get(DEBUG):
        raise error
    message = visible(without_passwords(str(error)), keep="\n\t")
    # Several problems in a file are told as `file:line: message`, a line each, as editors read them.
    typer.echo(message if "\n" in message else f"nas: {message}", err=True)
    sys.exit(code)
