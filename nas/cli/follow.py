"""Streams the events of a study on a coordinator as lines, until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import typer

from nas.cli.options import INTERRUPTED
from nas.cli.output import say
from nas.core.errors import InfrastructureFailed
from nas.search.study.events import event_line
from nas.serve.client import UsersClient, part

_WAIT_S = 20.0
"""Seconds that the coordinator waits for an event before it answers."""
_PAUSE_S = 1.0
"""Seconds before the first retry; doubled with each."""
_LONGEST_PAUSE_S = 30.0
"""Seconds before a retry at most."""


def follow(client: UsersClient, study: str, after: int | None = None) -> str:
    """Prints the events of a study until it ends; returns its final state.

    Args:
        client: of the coordinator.
        study: name.
        after: id of the event to start after; None: from now.

    Retries while the coordinator cannot be reached. Ctrl-C exits and leaves the study running.
    """
    state = ""
    try:
        for page in _pages(client, study, after):
            for event in page["events"]:
                if line := event_line(event["trial"], event["kind"], event["payload"]):
                    say(line)
            if page["state"] != state:
                state = page["state"]
                say(f"study {study}: {state}")
    except KeyboardInterrupt:
        say(f"detached; study {study} keeps running")
        say(f"to follow it again: nas study follow {study} --server {client.url}")
        say(f"to stop it:         nas study stop {study} --server {client.url}")
        raise typer.Exit(INTERRUPTED) from None
    return state


def _pages(client: UsersClient, study: str, after: int | None) -> Iterator[dict[str, Any]]:
    pause_s = _PAUSE_S
    while True:
        try:
            start: dict[str, Any] = {"from_now": True} if after is None else {"after": after, "wait_s": _WAIT_S}
            page = client.get(f"/v1/studies/{part(study)}/events", **start)
        except InfrastructureFailed as error:
            say(f"{error}; retrying in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            continue
        pause_s, after = _PAUSE_S, page["last"]
        yield page
        if page["ended"]:
            return
