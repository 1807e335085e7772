"""The commands of `nas study` that change something: pause, stop, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import say
from nas.cli.remote import ServerOption
from nas.cli.studies import tell_study
from nas.store import studies
from nas.store.rows import DesiredState


def register(app: typer.Typer) -> None:
    """Adds the commands to `nas study`."""
    app.command()(pause)
    app.command()(stop)
    app.command()(delete)


def pause(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Tell a running study to pause: what runs is finished, nothing new begins. `nas launch --resume` goes on."""
    _tell(study, "pause", server, db)


def stop(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Tell a running study to stop as soon as it can. `nas launch --resume` goes on; no finished stage is repeated."""
    _tell(study, "stop", server, db)


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


def _tell(study: str, desired: DesiredState, server: str | None, db: str | None) -> None:
    tell_study(study, desired, server, db)
    say(f"{study}: told to {desired}")
