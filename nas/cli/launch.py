"""`nas launch`: run a search on this host or on a coordinator, with live progress and a final report."""

from __future__ import annotations

import datetime
import os
import re
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli import preflight
from nas.cli.follow import follow
from nas.cli.lazy import command_app
from nas.cli.live import LiveProgress
from nas.cli.options import INTERRUPTED, DatabaseOption, YesOption, open_store, open_store_if_any, same_database
from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.cli.remote import ServerOption, open_server
from nas.cli.space import installed_here, plan_fields
from nas.cli.study_view import print_agreement, print_front, say_result
from nas.core import paths
from nas.core.errors import InvalidInput, NasError
from nas.core.space import SearchSpace
from nas.core.trial import TERMINAL
from nas.infra.store import events, studies
from nas.infra.store.rows import StudyState
from nas.measure.devices.attachments import own_attachments
from nas.measure.farm.farm import LOCAL, find_name, known_devices, this_machine
from nas.search.analysis.report import study_report
from nas.search.spaces import base_of, load_space, space_key, space_text
from nas.search.study.check import installed, missing_builds, support_filter
from nas.search.study.estimate import Estimate, estimate
from nas.search.study.events import Launched, event_line, notes, stored_space
from nas.search.study.launch import launch
from nas.search.study.opened import LaunchOptions
from nas.serve.client import Json, UsersClient, part

app = command_app()


@app.command("launch", no_args_is_help=True)
def command(
    space: Annotated[
        str | None,
        typer.Option("--space", help="Packaged space name or YAML file. Optional with --resume, except with --server."),
    ] = None,
    study: Annotated[str | None, typer.Option("--study", help="Study name. Default: space name and time.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", "-n", min=1, help="Number of trials, excluding references. Default: that of the space."
        ),
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Address of a Ray cluster.")] = None,
    train_gpus: Annotated[
        float | None,
        typer.Option("--train-gpus", min=0, help="GPUs per training on the cluster. Default: an even share."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option("--workers", min=1, help="Maximum concurrent local trainings.", show_default="all usable cores"),
    ] = len(os.sched_getaffinity(0)),
    resume: Annotated[bool, typer.Option("--resume", help="Resume --study without repeating finished stages.")] = False,
    warm_start: Annotated[
        list[str] | None,
        typer.Option("--warm-start", metavar="STUDY", help="Warm-start from this earlier study. Repeatable."),
    ] = None,
    open_pages: Annotated[
        bool, typer.Option("--open", help="Open the dashboard in a browser while the study runs on this host.")
    ] = False,
    yes: YesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and exit.")] = False,
    json: JsonFlag = False,
) -> None:
    """Search an architecture space and report its Pareto front.

    Layouts are proposed, exported and measured on the devices of the space; those within budget are trained as small
    proxies. Ctrl-C stops cleanly; --resume continues, also after a crash. With --server the study is submitted to a
    coordinator and followed; Ctrl-C then leaves it running.
    """
    if resume and study is None:
        raise InvalidInput("required with --resume; 'nas study list' lists studies", where="--study")
    if train_gpus is not None and ray_address is None:
        raise InvalidInput("requires --ray-address", where="--train-gpus")
    if space is None and (study is None or not resume or server is not None):
        problem = "required, except to resume a study of this machine; 'nas space list' lists packaged spaces"
        raise InvalidInput(problem, where="--space")
    name = space or ""
    # A coordinator checks what is submitted to it; a resumed study continues with the settings that it began with.
    checks = None
    if server is not None:
        checks = installed(None) if dry_run and not resume else None
    elif not resume:
        checks = installed_here(db, base_of(name))
    options = LaunchOptions(
        space=_stored_space(study or "", db) if space is None else load_space(space, checks),
        study=study or _usual_name(Path(name).stem),
        trials=trials,
        base=base_of(name),
        db=db,
        ray_address=ray_address,
        train_gpus=train_gpus,
        resume=resume,
        workers=workers,
        warm_start=tuple(warm_start or ()),
    )
    if open_pages and server is not None:
        raise InvalidInput("cannot be combined with --server, which has its own dashboard", where="--open")
    if server is not None and not dry_run:
        _launch_remotely(options, name, server, json)
        return
    if resume:
        support_filter(options.space)
    missing = missing_builds(options.space) if server is None else []
    if dry_run:
        for message in missing:
            say(message)
        if server is None and not resume:
            _require_free(options)
        if server is None and resume:
            options = replace(options, trials=trials or _earlier_trials(options))
        _show_plan(options, json, name, server)
        return
    if missing:
        raise InvalidInput("\n".join(missing))
    if sys.stdin.isatty() and not (yes or resume or json):
        _show_plan(options, json)
        typer.confirm("Start?", default=True, abort=True, err=True)
    with _dashboard(options.db) if open_pages else nullcontext():
        state = _run(options)
    _report(options, state, json)


def _require_free(options: LaunchOptions) -> None:
    """Checks that a new study can have its name."""
    studies.check_new_name(options.study)
    try:
        with open_store(options.db) as store:
            studies.get(store, options.study)
    except InvalidInput:  # no such study, or no database yet
        return
    raise studies.duplicate_study(options.study)


def _earlier_trials(options: LaunchOptions) -> int | None:
    """Returns how many layouts a study was to try when it was last launched; None: it never was."""
    with open_store(options.db) as store:
        launched = notes(events.notes(store, studies.find_id(store, options.study), Launched.what), Launched)
    return launched[-1].trials if launched else None


def _usual_name(stem: str) -> str:
    """Returns the name of a study of a space's file: its stem, with what names may not have replaced, and the time."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:40] or "study"
    return f"{word}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _show_plan(options: LaunchOptions, json: bool, space_name: str = "", server: str | None = None) -> None:
    """Prints the plan of a study and how long it takes, here or on a coordinator."""
    space, trials = options.space, _trials(options)
    time_needed = _estimate(options) if server is None else _estimate_there(options, space_name, server)
    busy = _load(options) if server is None else None
    if json:
        plan = {"study": options.study, "space": space.name, "key": space_key(space), "trials": trials}
        load = None if busy is None else {"cores": busy.cores, "of": busy.of, "processes": dict(busy.processes)}
        print_json(plan | {"estimate": time_needed.model_dump(mode="json"), "load": load})
        return
    time_fields = [
        ("time", time_needed.text),
        ("based on", "; ".join(time_needed.based_on)),
        ("depends on", "; ".join(time_needed.depends_on)),
    ]
    load_fields = [] if busy is None else [("now", _in_the_way(busy))]
    plan_of_space = plan_fields(space, trials)
    print_fields([("study", options.study), ("trials", trials), *plan_of_space, *time_fields, *load_fields])


def _load(options: LaunchOptions) -> preflight.Load | None:
    """Returns what this machine is busy with; None where the study does not measure on it."""
    return preflight.load() if LOCAL in options.space.devices else None


def _in_the_way(load: preflight.Load) -> str:
    return f"{load.text}: intervals will be wider" if load.busy else load.text


def _estimate(options: LaunchOptions) -> Estimate:
    with open_store_if_any(options.db) as store:
        registered = known_devices(store, own_attachments().read())
        ids = {LOCAL: this_machine().id}
        ids |= {name: find_name(name, registered) for name in options.space.devices if name != LOCAL}
        return estimate(store, options.space, _trials(options), ids, options.workers)


def _estimate_there(options: LaunchOptions, space: str, server: str) -> Estimate:
    with open_server(server, options.db) as client, _named(space):
        answer = client.post("/v1/estimates", {"space": space_text(space), "trials": options.trials})
    return Estimate.model_validate(answer)


@contextmanager
def _named(space: str) -> Iterator[None]:
    """Puts the name of the user's file into what a coordinator, which does not know it, says of the space."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(re.sub(r"^space\.yaml(?=:)", lambda _: space, str(error), flags=re.MULTILINE)) from error


def _trials(options: LaunchOptions) -> int:
    return options.trials or options.space.search.trials


@contextmanager
def _dashboard(db: str | None) -> Iterator[None]:
    """Serves the dashboard and opens it in a browser."""
    from nas.serve.dashboard.local_server import dashboard_here  # FastAPI takes half a second to load

    with open_store(db, create=True) as store, dashboard_here(store) as url:
        say(f"dashboard: {url}")
        webbrowser.open(url)
        yield


def _run(options: LaunchOptions) -> StudyState:
    verb = "resuming" if options.resume else "starting"
    say(f"{verb} study {options.study} of space {options.space.name}")
    if (load := _load(options)) is not None:
        say(_in_the_way(load))
    live = LiveProgress(options.study, options.db, None if options.ray_address else options.workers)

    def on_event(trial: int | None, what: str, payload: Mapping[str, Any]) -> None:
        live.notice()
        if trial is not None and what in TERMINAL:
            say(event_line(trial, what, payload) or "")

    try:
        with live:
            return launch(options, on_event, say)
    except KeyboardInterrupt:  # before or after the search, which handles it itself
        say(f"interrupted; to resume: nas launch --study {options.study} --resume{same_database(options.db)}")
        raise typer.Exit(INTERRUPTED) from None


def _stored_space(study: str, db: str | None) -> SearchSpace:
    with open_store(db) as store:
        return stored_space(studies.get(store, study))


def _report(options: LaunchOptions, state: StudyState, json: bool) -> None:
    """Prints the report, the paths of its plots and the next commands."""
    from nas.search.analysis.plot import draw_front  # matplotlib takes a second to load

    with open_store(options.db) as store:
        report = study_report(store, options.study)
        stop_requested = studies.get(store, options.study).desired_state == "stop"
    _print_report(report, json)
    png, svg = draw_front(report, paths.home() / "studies" / options.study)
    say(f"plots: {png}, {svg}")
    database = same_database(options.db)
    if state is StudyState.STOPPED:
        say(f"stopped; to resume: nas launch --study {options.study} --resume{database}")
        if not stop_requested:
            raise typer.Exit(INTERRUPTED)
    else:
        say(f"next: nas study show {options.study}{database}        state, Pareto front and cost")
        say(f"      nas study show {options.study} --json{database}   all measurements")


def _print_report(report: Json, json: bool) -> None:
    if json:
        print_json(report)
    else:
        print_front(report)
        print_agreement(report)
    say_result(report)


def _launch_remotely(options: LaunchOptions, space: str, server: str, json: bool) -> None:
    """Submits a study to a coordinator, follows it until it ends, and prints its report."""
    if options.ray_address is not None:
        raise InvalidInput(
            "cannot be combined with --server: the coordinator is configured with its cluster", where="--ray-address"
        )
    with open_server(server, options.db) as client:
        _submit(client, options, space)
        state = follow(client, options.study, None if options.resume else 0)
        answer = client.get(f"/v1/studies/{part(options.study)}")
    _print_remote_report(answer, state, client.url, json)


def _submit(client: UsersClient, options: LaunchOptions, space: str) -> None:
    """Submits a study, or resumes it with `--resume`. Submitting the same study again is idempotent."""
    if options.resume:
        client.post(f"/v1/studies/{part(options.study)}/run")
        say(f"study {options.study} is resumed on {client.url}, with trials as it was submitted")
        return
    request = {
        "study": options.study,
        "space": space_text(space),
        "trials": options.trials,
        "warm_start": list(options.warm_start),
    }
    with _named(space):
        state = client.post("/v1/studies", request)["state"]
    say(f"study {options.study} is submitted to {client.url}: {state}")


def _print_remote_report(answer: Json, state: str, url: str, json: bool) -> None:
    if answer["report"] is not None:
        _print_report(answer["report"], json)
    study = answer["study"]
    if state == "complete":
        say(f"next: nas study show {study} --server {url}        state, Pareto front and cost")
        return
    message = (answer["submission"] or {}).get("message")
    if state == "stopped":
        say(f"stopped; to resume, repeat the command with --study {study} --resume")
        raise typer.Exit(0 if answer["desired_state"] == "stop" else 1)
    raise NasError(f"study {study} {state}: {message or 'see its log on the coordinator'}")
