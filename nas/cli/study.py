"""`nas study`: inspect, control, export and import studies."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli.follow import follow
from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, OutputOption, StudyArgument, YesOption, open_store, same_database
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.remote import ServerOption, open_server
from nas.cli.study_view import print_agreement, print_effects, print_front, report_fields
from nas.core.durable import output_file, write_output
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.logs import visible
from nas.core.trial import TrialState
from nas.core.units import show_figure, show_share
from nas.infra.store import listings as pages
from nas.infra.store import studies, trials
from nas.infra.store.rows import DesiredState, Trial
from nas.infra.store.studies import INTERRUPTED
from nas.search.analysis.archive import export_study, import_study, recorded_studies
from nas.search.analysis.hardware import ModelError, hardware_report
from nas.search.analysis.pipette import FORM_FACTORS, rank, read_results, results_bytes
from nas.search.analysis.record import read_study
from nas.search.analysis.report import csv_parts, finite, parquet_bytes, study_report, study_table
from nas.search.analysis.snapshot import Snapshots, StudySnapshot
from nas.search.proposers.hardware import TRUSTED
from nas.search.study.check import support_filter
from nas.search.study.events import all_events, stored_space
from nas.search.study.proposals import replay as replay_log
from nas.serve.client import Json, part
from nas.serve.views.effects import EffectsView, effects_view

_ALL_STUDIES = 1 << 20

app = command_app(help="List, show, control, export and import studies.")


class Format(StrEnum):
    """File formats of `nas study export`."""

    ARCHIVE = "archive"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    PIPETTE = "pipette"


@app.command("list")
def list_studies(
    text: Annotated[str, typer.Option("--text", help="Only studies whose name contains this text.")] = "",
    space: Annotated[str, typer.Option("--space", help="Only studies of this space.")] = "",
    state: Annotated[str, typer.Option("--state", help="Only studies in this state, such as running.")] = "",
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """List studies."""
    rows = _read_studies(server, db, pages.StudyFilter(text, space, state))
    if json:
        print_json({"studies": rows})
        return
    columns = ("study", "space", "state", "trials", "reason")
    print_table(columns, [[row.get(column) for column in columns] for row in rows])
    for row in rows:
        if row.get("problem"):
            say(f"{row['study']}: {row['problem']}")
        if row["state"] == INTERRUPTED:
            say(f"to continue {row['study']}: {row['resume']}{'' if server else same_database(db)}")


@app.command()
def show(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Show the state of a study and its Pareto front."""
    report = _read_report(study, server, db)
    if json:
        print_json(report)
        return
    print_fields(report_fields(report, "" if server else same_database(db)))
    typer.echo()
    print_front(report)
    print_agreement(report)


@app.command()
def front(
    study: StudyArgument,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FOLDER", help="Also write front.png and front.svg to this folder."),
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Also show the 95 % interval of each objective.")] = False,
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Show the reference models and the Pareto front of a study: what adds most hypervolume comes first."""
    report = _read_report(study, server, db)
    if picture is not None:
        from nas.search.analysis.plot import draw_front  # matplotlib takes a second to load

        for path in draw_front(report, picture):
            say(f"wrote {path}")
    if json:
        print_json({key: report[key] for key in ("study", "objectives", "hypervolume", "reference_point", "front")})
    else:
        print_front(report, wide=wide)


@app.command()
def report(
    study: StudyArgument,
    output: OutputOption,
    server: ServerOption = None,
    db: DatabaseOption = None,
) -> None:
    """Write a report of a study to send: one HTML file with the front, what won and how sure that is."""
    if server is not None:
        with open_server(server, db) as client:
            _write(output, client.get_bytes(f"/studies/{part(study)}/report"))
        return
    from nas.serve.dashboard.study_report import study_report_html  # matplotlib takes a second to load

    with open_store(db) as store:
        text = study_report_html(store, Snapshots(store).get(study))
    _write(output, text.encode())


@app.command("follow", no_args_is_help=True)
def follow_study(
    study: StudyArgument,
    server: ServerOption = None,
    after: Annotated[
        int | None, typer.Option("--after", min=0, help="Start after the event with this id.", show_default="now")
    ] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Print the events from the start.")] = False,
) -> None:
    """Stream the events of a study on a coordinator, from now until it ends.

    Ctrl-C detaches; the study keeps running.
    """
    if server is None:
        raise InvalidInput("only studies on a coordinator can be followed; give its URL", where="--server")
    with open_server(server) as client:
        follow(client, study, 0 if from_start and after is None else after)


@app.command("trials")
def list_trials(
    study: StudyArgument,
    state: Annotated[
        list[TrialState] | None, typer.Option("--state", help="Only trials in this state. Repeatable.")
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """List the trials of a study, including failed and pruned ones; --json has their figures."""
    if server is not None:
        with open_server(server, db) as client:
            rows = client.get(f"/v1/studies/{part(study)}/trials")["rows"]
        listed = [row for row in rows if not state or row["state"] in state]
    else:
        with open_store(db) as store:
            listed = [_trial_json(trial) for trial in trials.all(store, studies.get(store, study).id, states=state)]
            if json:
                figures = {row["trial"]: row for row in finite(study_table(StudySnapshot(read_study(store, study)))[1])}
                listed = [figures[row["trial"]] | row for row in listed]
    if json:
        print_json({"study": study, "trials": listed})
        return
    columns = ("trial", "state", "rung", "origin", "layout", "reason")
    print_table(columns, [[row[column] for column in columns] for row in listed])


@app.command()
def hardware(
    study: StudyArgument,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="STUDY", help="Earlier study whose models these start from; any device."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Parquet of Pipette: forecast the front on the devices in it."),
    ] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Show the errors of a study's hardware cost models; --json adds the predictions for each candidate.

    Errors are leave-one-out: each measured layout is predicted by a model that was fitted without it. With --results,
    models are fitted to what others measured of published models, and forecast the study's front there.
    """
    if results is not None:
        if start is not None:
            raise InvalidInput("cannot be combined with --results, which fits models of its own", where="--from")
        _elsewhere(study, results, db, json)
        return
    with open_store(db) as store:
        report = hardware_report(store, study, start)
    if json:
        print_json(report.model_dump(mode="json"))
        return
    columns = ("device", "runtime", "figure", "measured", "mean error", "worst", "inside 95 %", "Spearman", "from")
    print_table(columns, map(_model_row, report.models))


def _elsewhere(study: str, results: Path, db: str | None, as_json: bool) -> None:
    """Prints forecasts of a study's front on the devices of a table of Pipette."""
    from nas.train.compare.published import REFERENCES

    published = {name: model.layout for name, model in REFERENCES.items()}
    measured = read_results(results, {name: layout for name, layout in published.items() if layout is not None})
    with open_store(db) as store:
        snapshot = StudySnapshot(read_study(store, study))
        layouts = {row.trial: snapshot.record.records[row.trial].layout for row in snapshot.front}
    if not layouts:
        raise InvalidInput(f"study {study!r} has no front yet, whose layouts could be forecast", where="--results")
    rankings = rank(measured, [*layouts.values()])
    if as_json:
        rows = [
            {
                **ranking.place._asdict(),
                "models": ranking.models,
                "unit": ranking.unit,
                "mean_error": ranking.error,
                "forecasts": [
                    {"trial": trial, "value": value, "low": low, "high": high}
                    for trial, (value, low, high) in zip(layouts, ranking.forecasts, strict=False)
                ],
            }
            for ranking in rankings
        ]
        print_json({"study": study, "places": rows})
        return
    table = []
    for ranking in rankings:
        place, size = ranking.place, f"{ranking.place.prefill}+{ranking.place.decode}"
        where = [place.device, place.runtime, f"{place.metric} {size}", ranking.models]
        if ranking.error is None:
            table.append([*where, None, None, f"{TRUSTED} known models are needed"])
        for trial, (value, low, high) in sorted(zip(layouts, ranking.forecasts, strict=False), key=lambda row: row[1]):
            forecast = show_figure(value, low, high, ranking.unit)
            table.append([*where, show_share(ranking.error or 0.0), trial, forecast])
    print_table(("device", "runtime", "metric", "models", "mean error", "trial", "forecast"), table)


@app.command("effects")
def show_effects(
    study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False
) -> None:
    """Show what moves each objective: effects of knobs, and slices of the model that proposes layouts.

    A slice changes one knob in layouts of the front and nothing else.
    """
    if server is not None:
        with open_server(server, db) as client:
            view = EffectsView.model_validate(client.get(f"/studies/{part(study)}/effects.json"))
    else:
        with open_store(db) as store:
            view = effects_view(store, StudySnapshot(read_study(store, study)))
    if json:
        print_json(view.model_dump(mode="json"))
    else:
        print_effects(view)


@app.command()
def replay(study: StudyArgument, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Repeat the proposals of a study from its event log; exit code 1 if any differs."""
    with open_store(db) as store:
        row = studies.get(store, study)
        space = stored_space(row)
        recorded = trials.all(store, row.id)
        differences = replay_log(space, support_filter(space), recorded, all_events(store, row.id))
    proposed = sum(trial.origin != "reference" for trial in recorded)
    if json:
        print_json({"study": study, "proposals": proposed, "differences": differences})
    else:
        for line in differences:
            typer.echo(visible(line))
        say(f"{proposed - len(differences)} of {proposed} proposals are equal")
    if differences:
        raise typer.Exit(1)


@app.command()
def pause(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Pause a running study after its current jobs. Continue it with `nas launch --resume`."""
    _request(study, "pause", server, db)


@app.command()
def stop(study: StudyArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Stop a running study as soon as possible.

    `nas launch --resume` continues it without repeating finished stages.
    """
    _request(study, "stop", server, db)


@app.command()
def delete(study: StudyArgument, yes: YesOption = False, db: DatabaseOption = None) -> None:
    """Delete a study and its trials. Results that other studies may reuse are kept until `nas gc`."""
    with open_store(db) as store:
        row = studies.get(store, study)
        if not yes:
            typer.confirm(f"Delete study {study!r}?", abort=True, err=True)
        from nas.serve.api.submissions import SubmissionFolder  # FastAPI takes half a second to load

        studies.delete(store, row.id)
        # Else a coordinator of this home takes the study for one that has not begun, and may begin it again.
        SubmissionFolder(store.artifacts.parent / "studies" / study).forget()
    say(f"{study}: deleted")


@app.command("export")
def export(
    study: StudyArgument,
    output: OutputOption,
    format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="archive: the whole study, for `nas study import`; json: the report of `nas study show --json`; "
            "csv, parquet: one row per trial; pipette: measurements, as Parquet for Pipette. Default: by the ending of "
            "the file, otherwise archive.",
            show_default=False,
        ),
    ] = None,
    form_factor: Annotated[
        str | None,
        typer.Option("--form-factor", help=f"What the devices are, for pipette: {', '.join(FORM_FACTORS)}."),
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
) -> None:
    """Export a study to a file, as an archive, a report or a table of trials."""
    ending = output.suffix.lower().removeprefix(".")
    format = format or (Format(ending) if ending in list(Format) else Format.ARCHIVE)
    if form_factor is not None and format is not Format.PIPETTE:
        raise InvalidInput("applies only with --format pipette", where="--form-factor")
    if format is Format.PIPETTE:
        _write(output, _pipette(study, form_factor, server, db))
        return
    if format is Format.JSON:
        report = _read_report(study, server, db)
        _write(output, json.dumps(report, indent=1, allow_nan=False).encode() + b"\n")
        return
    if server is not None:
        with open_server(server, db) as client:
            if format is Format.ARCHIVE:
                content = client.get_bytes(f"/v1/studies/{part(study)}/archive")
            else:
                content = client.get_bytes(f"/v1/studies/{part(study)}/trials", format=format.value)
        _write(output, content)
        return
    with open_store(db) as store:
        if format is Format.ARCHIVE:
            id = studies.get(store, study).id
            with output_file(output) as scratch, scratch.open("wb") as file:
                export_study(store, id, file)
            say(f"wrote {output}")
            return
        table = study_table(StudySnapshot(read_study(store, study)))
    _write(output, parquet_bytes(*table) if format is Format.PARQUET else "".join(csv_parts(*table)).encode())


def _pipette(study: str, form_factor: str | None, server: str | None, db: str | None) -> bytes:
    if server is not None:
        raise InvalidInput("pipette reads the database: run it where that is, without --server", where="--format")
    if form_factor is None:
        raise InvalidInput(f"required with --format pipette: {', '.join(FORM_FACTORS)}", where="--form-factor")
    kind = next((name for name in FORM_FACTORS if name == form_factor), None)
    if kind is None:
        raise UnknownName("form factor", form_factor, FORM_FACTORS, where="--form-factor")
    with open_store(db) as store:
        return results_bytes(store, read_study(store, study), kind, version("hilnas"))


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|NAME",
            help="Archive written by `nas study export`, or name of a recorded study, such as lfm2.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Name for the imported study. Default: as exported.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Let it be resumed and others reuse its results. Only for archives you trust."),
    ] = False,
    db: DatabaseOption = None,
) -> None:
    """Import a study from an archive; --trust lets it be resumed."""
    recorded = recorded_studies()
    try:
        source = (file if file.exists() and not file.is_dir() else recorded.get(str(file), file)).open("rb")
    except OSError as error:
        names = f"; recorded studies: {', '.join(recorded)}" if isinstance(error, FileNotFoundError) else ""
        raise InvalidInput(f"cannot read {file}: {error.strerror}{names}") from error
    with source, open_store(db, create=True) as store:
        study = import_study(store, source, name=name, trust_results=trust)
    say(f"{study.name}: imported")


@app.command()
def mirror(
    study: StudyArgument,
    optuna: Annotated[
        str, typer.Option("--optuna", metavar="URL", help="Optuna storage URL, such as sqlite:///optuna.db.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the Optuna study. Default: the name of the study.")
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Copy the finished trials of a study to an Optuna storage, for optuna-dashboard. Repeat to copy new trials."""
    from nas.search.analysis.optuna_export import mirror as copy_trials  # Optuna takes a second to load

    with open_store(db) as store:
        done = copy_trials(store, study, optuna, name)
    copied = "1 trial" if done.added == 1 else f"{done.added} trials"
    say(f"{done.name}: {copied} copied to {done.url}, which has {done.trials}")
    if done.waiting:
        say(f"{done.waiting} complete ones get scores on fresh seeds: repeat the command once the study has ended")


def _read_studies(server: str | None, db: str | None, filter: pages.StudyFilter) -> list[Json]:
    """Lists the studies that match: study, space, state, reason, resume, desired_state, trials, created."""
    if server is not None:
        with open_server(server, db) as client:
            return list(client.get_all("/v1/studies", "studies", **asdict(filter))["studies"])
    with open_store(db) as store:
        return [
            {
                "study": study.name,
                "space": study.space,
                "state": study.condition.state,
                "reason": study.condition.reason,
                "resume": study.condition.resume,
                "desired_state": study.desired_state,
                "trials": study.trials,
                "created": study.created,
                **({"problem": study.problem} if study.problem else {}),
            }
            for study in pages.studies(store, limit=_ALL_STUDIES, matching=filter)
        ]


def _read_report(study: str, server: str | None, db: str | None) -> Json:
    """Reads the report of a study, as made by `nas.search.analysis.report`.

    Raises:
        UnknownName: no such study.
        InfrastructureFailed: the study was submitted and has not started.
    """
    if server is None:
        with open_store(db) as store:
            return study_report(store, study)
    with open_server(server, db) as client:
        answer = client.get(f"/v1/studies/{part(study)}")
    report: Json | None = answer["report"]
    if report is None:
        reason = (answer["submission"] or {}).get("message") or "not started yet"
        raise InfrastructureFailed(f"study {study!r} is {answer['state']}: {reason}")
    return report


def _request(study: str, desired: DesiredState, server: str | None, db: str | None) -> None:
    if server is not None:
        with open_server(server, db) as client:
            client.post(f"/v1/studies/{part(study)}/{desired}")
    else:
        with open_store(db) as store:
            studies.set_desired_state(store, studies.get(store, study).id, desired)
    say(f"{study}: {desired} requested")


def _write(output: Path, content: bytes) -> None:
    write_output(output, content)
    say(f"wrote {output}")


def _model_row(model: ModelError) -> list[object]:
    row = [model.device, model.runtime, f"{model.metric}@{model.workload}", model.measurements]
    if model.mape is None or model.worst is None or model.inside is None or model.correlation is None:
        return [*row, model.reason, *[None] * 4]
    rank = model.correlation.reason
    if (spearman := model.correlation.spearman) is not None:
        rank = f"{spearman.value:.2f} [{spearman.low:.2f}, {spearman.high:.2f}]"
    return [*row, *map(show_share, (model.mape, model.worst, model.inside)), rank, model.start]


def _trial_json(trial: Trial) -> dict[str, Any]:
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
