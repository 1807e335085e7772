"""`nas study`: what searches have found, and what they are told to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli import study_change, study_export, study_hardware, study_mirror
from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.follow import follow
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.remote import ServerOption, open_server
from nas.cli.studies import read_report, read_studies
from nas.cli.study_view import print_agreement, print_front, report_fields
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.trial import TrialState
from nas.service.asking import replay as replay_log
from nas.service.launch import support_filter
from nas.service.ledger import all_events
from nas.service.stored_space import stored_space
from nas.store import studies, trials
from nas.store.rows import Trial

app = command_app(help="List, show, steer and exchange studies.")
study_change.register(app)
study_export.register(app)
study_mirror.register(app)
study_hardware.register(app)


@app.command("list")
def list_studies(server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List the studies of a database or a coordinator."""
    rows = read_studies(server, db)
    if json:
        print_json({"studies": rows})
        return
    columns = ("study", "space", "state", "trials")
    print_table(columns, [[row[column] for column in columns] for row in rows])


@app.command()
def show(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Show how a study stands, with its front."""
    report = read_report(study, server, db)
    if json:
        print_json(report)
        return
    print_fields(report_fields(report))
    typer.echo()
    print_front(report)
    print_agreement(report)


@app.command()
def front(
    study: StudyArgument,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FOLDER", help="Also write front.png and front.svg there.")
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Show a study's Pareto front, best first, below its references."""
    report = read_report(study, server, db)
    if picture is not None:
        from nas.service.picture import draw_front  # matplotlib takes a second to load

        for path in draw_front(report, picture):
            say(f"wrote {path}")
    if json:
        print_json({key: report[key] for key in ("study", "objectives", "hypervolume", "reference_point", "front")})
    else:
        print_front(report)


@app.command("follow", no_args_is_help=True)
def follow_study(
    study: StudyArgument,
    server: ServerOption = None,
    after: Annotated[int, typer.Option("--after", min=0, help="Begin behind the event of this id.")] = 0,
) -> None:
    """Say what a study on a coordinator does, until it has ended; Ctrl-C leaves it running."""
    if server is None:
        raise InvalidInput("a launch without a coordinator shows itself; give the coordinator", where="--server")
    with open_server(server) as client:
        follow(client, study, after)


@app.command("trials")
def list_trials(
    study: StudyArgument,
    state: Annotated[list[TrialState] | None, typer.Option("--state", help="Only these; may be given again.")] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """List a study's trials, whatever became of them."""
    with open_store(db) as store:
        found = [_as_json(trial) for trial in trials.all(store, studies.get(store, study).id, states=state)]
    if json:
        print_json({"study": study, "trials": found})
        return
    columns = ("trial", "state", "rung", "origin", "layout", "reason")
    print_table(columns, [[row[column] for column in columns] for row in found])


@app.command()
def replay(study: StudyArgument, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Ask the proposer again along the study's log, and fail where it would propose something else."""
    with open_store(db) as store:
        found = studies.get(store, study)
        space = stored_space(found)
        recorded = trials.all(store, found.id)
        differences = replay_log(space, support_filter(space), recorded, all_events(store, found.id))
    own = sum(trial.origin != "reference" for trial in recorded)
    if json:
        print_json({"study": study, "proposals": own, "differences": differences})
    else:
        for line in differences:
            typer.echo(line)
        say(f"{own - len(differences)} of {own} proposals are equal")
    if differences:
        raise typer.Exit(1)


def _as_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.status.state.value,
        "rung": trial.status.rung,
        "reason": trial.status.reason,
        "retryable": trial.status.retryable,
        "origin": trial.origin,
        "operator": trial.operator,
        "parents": list(trial.parents),
        "layout_id": trial.layout_id,
        "layout": Layout.from_json(trial.layout).format(),
        "created": trial.created,
        "updated": trial.updated,
    }
