"""The commands of `nas study` that change something: pause, stop, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import say
from nas.store import studies
from nas.store.rows import DesiredState


def register(app: typer.Typer) -> None:
    """Adds the commands to `nas study`."""
    app.command()(pause)
    app.command()(stop)
    app.command()(delete)


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


def _tell(study: str, desired: DesiredState, db: str | None) -> None:
    with open_store(db) as store:
        studies.set_desired_state(store, studies.get(store, study).id, desired)
    say(f"{study}: told to {desired}")
