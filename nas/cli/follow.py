"""A study on a coordinator, followed from here: what it logs, as lines, until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import typer

from nas.cli.output import say
from nas.cli.users_client import Json, UsersClient, part
from nas.core.errors import InfrastructureFailed

INTERRUPTED = 130
_WAIT_S = 20.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def follow(client: UsersClient, study: str, after: int = 0) -> str:
    """Says what a study does until it has ended; gives the state it ended in.

    A coordinator that cannot be reached is waited for. Ctrl-C leaves the study running, and this command.
    """
    state = ""
    try:
        for page in _pages(client, study, after):
            for event in page["events"]:
                if line := event_line(event):
                    say(line)
            if page["state"] != state:
                state = page["state"]
                say(f"study {study}: {state}")
    except KeyboardInterrupt:
        say(f"detached; {study} goes on. Come back: nas study follow {study} --server {client.url}")
        say(f"                              or end it: nas study stop {study} --server {client.url}")
        raise typer.Exit(INTERRUPTED) from None
    return state


def event_line(event: Json) -> str | None:
    """An event as a line; None for what tells people nothing."""
    trial, kind, payload = event["trial"], event["kind"], event["payload"]
    who = "study" if trial is None else f"trial {trial}"
    if kind in ("study", "progress"):
        message = payload.get("message")
        return f"{who}: {payload.get('what')}: {message}" if message else None
    details = [f"rung {payload['rung']}"] if "rung" in payload else []
    details += [str(payload["reason"])] if payload.get("reason") else []
    return f"{who}: {kind} ({', '.join(details)})" if details else f"{who}: {kind}"


def _pages(client: UsersClient, study: str, after: int) -> Iterator[dict[str, Any]]:
    pause_s = _PAUSE_S
    while True:
        try:
            page = client.get(f"/v1/studies/{part(study)}/events", after=after, wait_s=_WAIT_S)
        except InfrastructureFailed as error:
            say(f"{error}; next try in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            continue
        pause_s, after = _PAUSE_S, page["last"]
        yield page
        if page["ended"]:
            return
