"""Entry point of `nas`: global options and error handling.

Exit codes: 0 ok, 1 failed, 2 usage, 3 invalid configuration or input, 4 transient infrastructure, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from nas.cli.lazy import LazyGroup, missing_package
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, is_out_of_memory
from nas.core.logs import visible, without_passwords

DEBUG = "NAS_DEBUG"
_SPINS = "1000"
"""Rounds that a thread of torch spins for work before it sleeps; see `_share_processor`."""
_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE}
_TRANSIENT |= {errno.ENOMEM, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of files after which a retry can help; others are of a path that the user gave."""

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
    """Find the language model that runs best on your device, and know how sure you are.

    \b
    You have          You run
    model files       nas compare a.gguf b.gguf --budget "decode_p50<=20ms"
    a trained model   nas adapt FOLDER -c texts/ -b "decode_p50<=20ms" -o child
    an idea           nas launch --space lfm2 --study first --open
    devices           nas serve, nas agent
    nothing yet       nas demo-data

    Data goes to stdout; progress and messages go to stderr. Commands that read accept --json. Exit codes: 0 ok, 1
    failed, 2 usage, 3 invalid configuration or input, 4 transient infrastructure (retryable), 130 interrupted.
    """  # noqa: D301 - a backspace keeps the lines of a paragraph
    if debug:
        os.environ[DEBUG] = "1"  # child processes inherit it


def main() -> None:
    """Runs the command line; expected errors become one message on stderr and an exit code."""
    _open_streams()
    _share_processor()
    with contextlib.suppress(ValueError):  # outside of the main thread
        # As Ctrl-C: what a command has started ends with it, also as the first process of a container.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _require_text()
        app(prog_name="nas")
    except NasError as error:
        _fail(error, error.exit_code)
    except ImportError as error:
        if (missing := missing_package(error)) is None:
            raise
        _fail(missing, missing.exit_code)
    except OSError as error:
        transient = error.filename is None or error.errno in _TRANSIENT
        _fail(error, InfrastructureFailed.exit_code if transient else InvalidInput.exit_code)
    except ValueError as error:  # of pydantic, which takes long to load, and of JSON
        if type(error).__name__ not in ("ValidationError", "JSONDecodeError", "UnicodeDecodeError"):
            raise
        text = "stored data cannot be read, because it is damaged or of another version: "
        _fail(InvalidInput(text + " ".join(str(error).split())[:500]), InvalidInput.exit_code)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            where = "the GPU" if type(error).__name__ == "OutOfMemoryError" else "this machine"
            first = str(error).partition("\n")[0]
            text = f"{where} has too little memory: {first} Settings of batches lower it."
            _fail(InfrastructureFailed(text), InfrastructureFailed.exit_code)
        elif not str(error).startswith("Symlink loop"):  # of pathlib before Python 3.13, for a link to itself
            raise
        else:
            _fail(error, InvalidInput.exit_code)


def _open_streams() -> None:
    """Opens the standard streams that the caller has closed, so that no file of ours gets their numbers.

    What the locale cannot encode is escaped; what it cannot decode is refused by whoever reads it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - in this order: 0, 1, 2
    # Layouts and tables have characters that some locales have not, and a message may be in another encoding.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it may be nobody's any more
                stream.reconfigure(errors=errors)


def _share_processor() -> None:
    """Lets the threads of torch sleep soon while they wait for each other, unless the user's variables say otherwise.

    GNU's OpenMP spins for milliseconds by default. Beside other processes, a thread spins while the one that it waits
    for has no processor, and small operations take many times as long (`python -m benchmarks.thread_waits`). It reads
    the variable when torch is loaded; processes on devices get an environment of their own.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def _require_text() -> None:
    """Checks that arguments and our variables are text in the locale's encoding.

    Raises:
        InvalidInput: one is not.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("NAS_")}
    for text in (*sys.argv[1:], *variables.values()):
        if any("\udc80" <= character <= "\udcff" for character in text):
            raise InvalidInput(f"{text!a} is not text in the encoding of the locale")


def _fail(error: Exception, code: int) -> None:
    if os.environ.get(DEBUG):
        raise error
    message = visible(without_passwords(str(error)), keep="\n\t")
    # Several problems in one file: one `file:line: message` per line, the format that editors parse.
    with contextlib.suppress(OSError):  # nothing can be told
        typer.echo(message if "\n" in message else f"nas: {message}", err=True)
    sys.exit(code)
