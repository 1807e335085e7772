"""`nas study export` and `import`: a study as a file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import say
from nas.core.errors import InvalidInput
from nas.service.report import study_report
from nas.service.table import study_table
from nas.store import studies
from nas.store.store import Store
from nas.store.study_export import export_study
from nas.store.study_import import import_study


class Format(StrEnum):
    """What a study is written as."""

    ARCHIVE = "archive"
    JSON = "json"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Adds the commands to `nas study`."""
    app.command("export")(export)
    app.command("import")(import_)


def export(
    study: StudyArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            "-f",
            help="archive: everything, as JSON lines that `import` reads; json: the report of `show`; csv: all trials.",
        ),
    ] = Format.ARCHIVE,
    db: DatabaseOption = None,
) -> None:
    """Write a study to a file: whole, as its report, or as a table of all trials."""
    write: dict[Format, Callable[[Store, str, TextIO], None]] = {
        Format.ARCHIVE: _archive,
        Format.JSON: _json,
        Format.CSV: _csv,
    }
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    with open_store(db) as store:
        try:
            with partial.open("w", encoding="utf-8", newline="") as file:
                write[format](store, study, file)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    say(f"wrote {output}")


def import_(
    file: Annotated[Path, typer.Argument(help="What `nas study export` wrote as an archive.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the study here, if not its old one.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let every study here reuse its results. Only for files of your own.")
    ] = False,
    db: DatabaseOption = None,
) -> None:
    """Read a study from an archive; it is paused."""
    try:
        source = file.open(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from error
    with source, open_store(db, create=True) as store:
        study = import_study(store, source, name=name, trust_results=trust)
    say(f"{study.name}: imported")


def _archive(store: Store, study: str, file: TextIO) -> None:
    export_study(store, studies.get(store, study).id, file)


def _json(store: Store, study: str, file: TextIO) -> None:
    json.dump(study_report(store, study), file, indent=1, allow_nan=False)
    file.write("\n")


def _csv(store: Store, study: str, file: TextIO) -> None:
    columns, rows = study_table(store, study)
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
