"""`nas launch --server`: the study is submitted to a coordinator, which runs it; this command looks on."""

from __future__ import annotations

import typer

from nas.cli.follow import follow
from nas.cli.output import print_json, say
from nas.cli.remote import open_server
from nas.cli.study_view import print_agreement, print_front
from nas.cli.users_client import Json, UsersClient, part
from nas.core.errors import InvalidInput, NasError
from nas.service.launch import LaunchOptions


def launch_there(options: LaunchOptions, space: str, server: str, json: bool) -> None:
    """Submits a study, follows it to its end, and reports.

    Args:
        options: what `nas launch` was asked for.
        space: the space's YAML text.
        server: URL of the coordinator.
        json: whether the report is printed as JSON.

    Raises:
        NasError: the coordinator refuses it, or it failed there.
    """
    if options.ray_address is not None:
        raise InvalidInput("the coordinator's owner says where it computes", where="--ray-address")
    with open_server(server, options.db) as client:
        submit(client, options, space)
        state = follow(client, options.study)
        found = client.get(f"/v1/studies/{part(options.study)}")
    _report(found, state, client.url, json)


def submit(client: UsersClient, options: LaunchOptions, space: str) -> None:
    """Hands a study in, or has it go on with `--resume`. What was handed in before is followed again."""
    if options.resume:
        client.post(f"/v1/studies/{part(options.study)}/run")
        say(f"{client.url} goes on with study {options.study}")
        return
    wanted: dict[str, object] = {
        "study": options.study,
        "space": space,
        "trials": options.trials,
        "accept_noise": options.accept_noise,
    }
    if options.warm_start:  # which older coordinators do not know
        wanted["warm_start"] = list(options.warm_start)
    state = client.post("/v1/studies", wanted)["state"]
    say(f"study {options.study} is submitted to {client.url}: {state}")


def _report(found: Json, state: str, url: str, json: bool) -> None:
    if found["report"] is not None and json:
        print_json(found["report"])
    elif found["report"] is not None:
        print_front(found["report"])
        print_agreement(found["report"])
    study = found["study"]
    if state == "complete":
        say(f"next: nas study show {study} --server {url}        how it stands, and what it cost")
        return
    message = (found["submission"] or {}).get("message")
    if state == "stopped":
        say(f"stopped; go on with the same command and --study {study} --resume")
        raise typer.Exit(0 if found["desired_state"] == "stop" else 1)
    raise NasError(f"study {study} {state}: {message or 'its log on the coordinator says why'}")
