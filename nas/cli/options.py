"""Arguments and options shared by several commands, and their parsing."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.logs import without_passwords
from nas.core.published import named_layout
from nas.core.workload import Workload

if TYPE_CHECKING:
    from nas.infra.store.store import Store

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_DATABASE_VARIABLE = "NAS_DB"

LayoutArgument = Annotated[
    str, typer.Argument(metavar="LAYOUT", help="Layout string, published name such as LFM2-350M, or '-' for stdin.")
]
ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="GGUF file, or folder with config.json and safetensors.")
]
RuntimeOption = Annotated[str, typer.Option("--runtime", "-r", help="Runtime name.")]
QuantisationOption = Annotated[
    str | None,
    typer.Option("--quantisation", "-q", help="Quantisation. Default: the runtime's first.", show_default=False),
]
DeviceOption = Annotated[
    str,
    typer.Option("--device", "-d", help="Device id, unique start of an id, or tag:NAME; local: this machine."),
]
ThreadsOption = Annotated[int, typer.Option("--threads", "-t", min=1, help="Number of compute threads.")]
ThreadCountsOption = Annotated[
    str, typer.Option("--threads", "-t", metavar="N,...", help="Numbers of compute threads.")
]
RepsOption = Annotated[int, typer.Option("--reps", min=2, help="Number of valid repetitions.")]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", "-b", metavar="METRIC<=LIMIT", help="Limit to keep, such as decode_p50<=20ms.", show_default=False
    ),
]
ContextOption = Annotated[int, typer.Option("--context", min=16, help="Context length in tokens.")]
PromptOption = Annotated[int, typer.Option("--prompt", "-p", help="Prompt length in tokens.")]
GenOption = Annotated[int, typer.Option("--gen", "-n", help="Tokens to generate per repetition.")]


def _date_of(text: str) -> str:
    try:
        return str(date.fromisoformat(text))
    except ValueError:
        raise InvalidInput(f"no date: {text!r}; dates are YYYY-MM-DD", where="--date") from None


TasksOption = Annotated[
    Path | None, typer.Option("--tasks", help="File of conversations with expected answers.", show_default=False)
]
BenchmarksOption = Annotated[
    Path | None, typer.Option("--benchmarks", help="Folder of data sets of public benchmarks, instead of --tasks.")
]
BenchmarkOption = Annotated[
    list[str] | None,
    typer.Option("--benchmark", help="Benchmark, such as gsm8k. Repeatable.", show_default="all with data"),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Maximum questions of each data set.", show_default="all")
]
DateOption = Annotated[
    str | None,
    typer.Option(
        "--date",
        metavar="YYYY-MM-DD",
        parser=_date_of,
        help="Date that chat templates show as today.",
        show_default="2025-01-01",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Random seed.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Output file.")]
FamilyArgument = Annotated[str, typer.Argument(help="Family name.", show_default=False)]
SizeOption = Annotated[str, typer.Option("--size", help="Size of the member, such as 350M.", show_default=False)]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, help="Number of processes. Default: one per GPU, at least one.", show_default=False
    ),
]
CheckpointOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-every", metavar="SECONDS", min=0, help="Least time between checkpoints; 0: after every step."
    ),
]
PriceOption = Annotated[
    float | None, typer.Option("--price-per-hour", min=0, help="Price of a GPU's hour, for --dry-run.")
]
SystemOption = Annotated[str, typer.Option("--system", help="System message.", show_default="none")]
ToolsOption = Annotated[Path | None, typer.Option("--tools", help="JSON list of tools that it may call.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0, max=10, help="Sampling temperature; 0: greedy.")
]
AnswerOption = Annotated[int, typer.Option("--tokens", min=1, help="Maximum tokens of an answer.")]
RewritePteOption = Annotated[
    bool | None,
    typer.Option("--pte/--no-pte", help="Also write a standard ExecuTorch program.", show_default="as before"),
]
StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Study name.")]
SpaceArgument = Annotated[str, typer.Argument(metavar="SPACE", help="Packaged space name or YAML file.")]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db", envvar=_DATABASE_VARIABLE, help="Database URL. Default: SQLite in $NAS_HOME.", show_default=False
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]


def read_layout(text: str, what: str = "published layout") -> Layout:
    """Parses a layout argument: a published name, a layout string, or '-' for the first line of stdin.

    `what` it can be beside a layout string is said in the message.
    """
    if text == "-":
        text = typer.get_text_stream("stdin").readline()
    return named_layout(text, what)


def path_of(text: str) -> Path | None:
    """Returns the path of a file or folder; None where there is none: a layout may be longer than names of files."""
    path = Path(text)
    try:
        return path if path.exists() else None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None


def numbers_of(text: str, flag: str) -> list[int]:
    """Parses a list of whole numbers, '512,1024'; repeated ones count once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise InvalidInput(f"whole numbers with commas between them, such as 512,1024, not {text!r}", where=flag)
    return list(dict.fromkeys(map(int, parts)))


def workload_of(**values: float | str) -> Workload:
    """Returns a workload from options of the same names.

    Raises:
        InvalidInput: a value is out of range; names its option.
    """
    try:
        return Workload.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = f"--{problem['loc'][0]}".replace("_", "-") if problem["loc"] else None
        raise InvalidInput(problem["msg"].removeprefix("Value error, "), where=flag) from None


def same_database(url: str | None) -> str:
    """Returns the ` --db URL` that a suggested command needs for this database; empty if it is the default."""
    if url is None or url == os.environ.get(_DATABASE_VARIABLE):
        return ""
    return f" --db {shlex.quote(without_passwords(url))}"


@contextmanager
def open_store(url: str | None, *, create: bool = False) -> Iterator[Store]:
    """Opens the database at `url`, or the default one, and closes it when the context ends."""
    from nas.infra.store.store import Store

    store = Store.open(url, create=create)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def open_store_if_any(url: str | None) -> Iterator[Store | None]:
    """Opens the database as `open_store` does; yields None where there is none yet."""
    with ExitStack() as stack:
        try:
            store = stack.enter_context(open_store(url))
        except InvalidInput:
            store = None
        yield store
