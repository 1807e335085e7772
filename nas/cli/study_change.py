"""The commands of `nas study` that change something: pause, stop, delete, export, import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import say
from nas.core.errors import InvalidInput
from nas.store import studies
from nas.store.rows import DesiredState
from nas.store.study_export import export_study
from nas.store.study_import import import_study


def register(app: typer.Typer) -> None:
    """Adds the commands to `nas study`."""
    app.command()(pause)
    app.command()(stop)
    app.command()(delete)
    app.command("export")(export)
    app.command("import")(import_)


def pause(study: StudyArgument, db: DatabaseOption = None) -> None:
    """Tell a running study to pause: what runs is finished, nothing new begins. `nas launch --resume` goes on."""
    _tell(study, "pause", db)


def stop(study: StudyArgument, db: DatabaseOption = None) -> None:
    """Tell a running study to stop as soon as it can. `nas launch --resume` goes on; no finished stage is repeated."""
    _tell(study, "stop", db)


def delete(
    study: StudyArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    db: DatabaseOption = None,
) -> None:
    """Delete a study with its trials. Results that other studies may reuse stay until `nas gc`."""
    with open_store(db) as store:
        found = studies.get(store, study)
        if not yes:
            typer.confirm(f"delete study {study!r}?", abort=True, err=True)
        studies.delete(store, found.id)
    say(f"{study}: deleted")


def export(
    study: StudyArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON lines).")],
    db: DatabaseOption = None,
) -> None:
    """Write a study with all trials, events and results to a file."""
    with open_store(db) as store:
        found = studies.get(store, study)
        partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                lines = export_study(store, found.id, file)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    say(f"{output}: {lines} lines")


def import_(
    file: Annotated[Path, typer.Argument(help="What `nas study export` wrote.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the study here, if not its old one.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let every study here reuse its results. Only for files of your own.")
    ] = False,
    db: DatabaseOption = None,
) -> None:
    """Read a study from a file; it is paused."""
    try:
        source = file.open(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from error
    with source, open_store(db, create=True) as store:
        study = import_study(store, source, name=name, trust_results=trust)
    say(f"{study.name}: imported")


def _tell(study: str, desired: DesiredState, db: str | None) -> None:
    with open_store(db) as store:
        studies.set_desired_state(store, studies.get(store, study).id, desired)
    say(f"{study}: told to {desired}")
