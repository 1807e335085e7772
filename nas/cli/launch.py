"""`nas launch`: a search from beginning to end."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli.database import DatabaseOption, open_store, same_database
from nas.cli.launch_there import launch_there
from nas.cli.lazy import command_app
from nas.cli.live import live_display
from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.cli.remote import ServerOption
from nas.cli.space_view import plan_fields
from nas.cli.study_view import print_agreement, print_front
from nas.core import paths
from nas.core.errors import InvalidInput
from nas.search_spaces import load_space, space_key, space_text
from nas.service.launch import LaunchOptions, launch, support_filter
from nas.service.report import study_report
from nas.store import studies
from nas.store.rows import StudyState

INTERRUPTED = 130

app = command_app()


@app.command("launch", no_args_is_help=True)
def command(
    space: Annotated[str, typer.Option("--space", help="Name of a packaged space, or a YAML file.")],
    study: Annotated[str | None, typer.Option("--study", help="Name of the study; default: space and time.")] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", "-n", min=1, help="Layouts to try, references not counted; default: the space's."),
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Compute on this Ray cluster.")] = None,
    train_gpus: Annotated[
        float | None,
        typer.Option("--train-gpus", min=0, help="GPUs that one training takes there; default: an even share."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Trainings side by side here.", show_default="all cores")
    ] = os.cpu_count() or 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --study; finished stages are not repeated.")
    ] = False,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Keep noisy measurements, marked and off the reported front.")
    ] = False,
    warm_start: Annotated[
        list[str] | None,
        typer.Option("--warm-start", metavar="STUDY", help="Learn from this earlier study first; may be given again."),
    ] = None,
    open_pages: Annotated[
        bool, typer.Option("--open", help="Show the study in a browser while it runs; on this machine only.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before starting.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    json: JsonFlag = False,
) -> None:
    """Search a space and report its Pareto front.

    Layouts are proposed, exported, measured on the space's devices, and trained in small if they keep the budgets.
    Ctrl-C stops cleanly; --resume goes on, also after a crash. With --server the study is submitted to a coordinator
    and followed from here; Ctrl-C leaves it running there.
    """
    if resume and study is None:
        raise InvalidInput("--resume needs the name of the study", where="--study")
    if train_gpus is not None and ray_address is None:
        raise InvalidInput("says what trainings take on a cluster; give --ray-address, too", where="--train-gpus")
    options = LaunchOptions(
        space=load_space(space),
        study=study or f"{Path(space).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}",
        trials=trials,
        base=Path(space).parent if Path(space).is_file() else Path(),
        db=db,
        ray_address=ray_address,
        train_gpus=train_gpus,
        resume=resume,
        accept_noise=accept_noise,
        workers=workers,
        warm_start=tuple(warm_start or ()),
    )
    if open_pages and server is not None:
        raise InvalidInput("the server has the study's pages; leave it out with --server", where="--open")
    if server is not None and not dry_run:
        launch_there(options, space_text(space), server, json)
        return
    support_filter(options.space)
    if dry_run:
        _show_plan(options, json)
        return
    if sys.stdin.isatty() and not (yes or resume or json):
        _show_plan(options, json)
        typer.confirm("start?", default=True, abort=True, err=True)
    with _pages(options.db) if open_pages else contextlib.nullcontext():
        state = _run(options)
    _report(options, space, state, json)


@contextlib.contextmanager
def _pages(db: str | None) -> Iterator[None]:
    """Serves the dashboard, and opens a browser where there is one."""
    from nas.dashboard.here import dashboard_here  # FastAPI takes half a second to load

    with open_store(db, create=True) as store, dashboard_here(store) as url:
        say(f"dashboard: {url}")
        webbrowser.open(url)
        yield


def _trials(options: LaunchOptions) -> int:
    return options.trials or options.space.search.trials


def _show_plan(options: LaunchOptions, json: bool) -> None:
    if json:
        space = options.space
        print_json({"study": options.study, "space": space.name, "key": space_key(space), "trials": _trials(options)})
    else:
        print_fields(
            [("study", options.study), ("trials", _trials(options)), *plan_fields(options.space, _trials(options))]
        )


def _run(options: LaunchOptions) -> StudyState:
    verb = "going on with" if options.resume else "starting"
    say(f"{verb} study {options.study} of space {options.space.name}")

    def tell(trial: int | None, what: str, payload: Mapping[str, Any]) -> None:
        if what == "failed":
            who = "study" if trial is None else f"trial {trial}"
            say(f"{who}: {what}: {payload.get('message') or payload.get('reason') or 'no reason given'}")

    try:
        with live_display() as update:
            return launch(options, update, tell, say)
    except KeyboardInterrupt:  # before or after the search itself, which stops by itself
        say(f"interrupted; go on with the same command and --study {options.study} --resume")
        raise typer.Exit(INTERRUPTED) from None


def _report(options: LaunchOptions, space: str, state: StudyState, json: bool) -> None:
    """What was found, where the picture is, and what to do next."""
    from nas.service.picture import draw_front  # matplotlib takes a second to load

    with open_store(options.db) as store:
        report = study_report(store, options.study)
        told_to_stop = studies.get(store, options.study).desired_state == "stop"
    if json:
        print_json(report)
    else:
        print_front(report)
        print_agreement(report)
    png, svg = draw_front(report, paths.home() / "studies" / options.study)
    say(f"picture: {png}, {svg}")
    database = same_database(options.db)
    if state is StudyState.STOPPED:
        say(f"stopped; go on with: nas launch --space {space} --study {options.study} --resume{database}")
        if not told_to_stop:
            raise typer.Exit(INTERRUPTED)
    else:
        say(f"next: nas study show {options.study}{database}        how it stands, and what it cost")
        say(f"      nas study show {options.study} --json{database}   everything that was measured")
