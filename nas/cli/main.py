"""Entry point of `nas`: global options and error handling.

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
from nas.core.logs import visible, without_passwords

DEBUG = "NAS_DEBUG"

app = typer.Typer(
    name="nas",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(version("hilnas"))
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks; same as ${DEBUG}=1.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hardware-in-the-loop architecture search for on-device language models.

    Data goes to stdout; progress and messages go to stderr. Commands that read accept --json. Exit codes: 0 ok, 1
    failed, 2 usage, 3 invalid configuration or input, 4 transient infrastructure (retryable), 130 interrupted.
    """
    if debug:
        os.environ[DEBUG] = "1"  # child processes inherit it


def main() -> None:
    """Runs the command line; expected errors become one message on stderr and an exit code."""
    try:
        app(prog_name="nas")
    except NasError as error:
        _fail(error, error.exit_code)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        _fail(error, InvalidInput.exit_code)  # a path given by the user
    except OSError as error:
        _fail(error, InfrastructureFailed.exit_code)


def _fail(error: Exception, code: int) -> None:
    if os.environ.get(DEBUG):
        raise error
    message = visible(without_passwords(str(error)), keep="\n\t")
    # Several problems in one file: one `file:line: message` per line, the format that editors parse.
    typer.echo(message if "\n" in message else f"nas: {message}", err=True)
    sys.exit(code)
