"""`nas agent`: enrol and run the agent of a device host; list and revoke agents.

A device host has no database packages, so coordinator-side commands import them when they run.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, open_store
from nas.cli.output import JsonFlag, LogJsonFlag, print_json, print_table, say, when
from nas.cli.remote import ServerOption, open_fleet
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.logs import configure_logs
from nas.core.trust import Invitation
from nas.measure.devices.agent.agent import end_on_signals, make_agent, served
from nas.measure.devices.agent.trust import enrol as exchange
from nas.measure.devices.agent.trust import read_enrolment
from nas.measure.devices.attachments import agent_cache, agent_home, own_attachments
from nas.measure.devices.host_lock import host_lock_folder

log = logging.getLogger(__name__)
app = command_app(help="Run and manage device agents.")


@app.command("list")
def list_agents(server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List agents, their access and the devices they serve."""
    with open_fleet(server, db) as fleet:
        agents = fleet.agents()
    if json:
        print_json(agents)
        return
    rows = [
        [agent["name"], agent["access"], when(agent["last_seen"]), " ".join(agent["devices"])]
        for agent in agents["agents"]
    ]
    print_table(("agent", "access", "last seen", "devices"), rows)


@app.command()
def revoke(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Agent name.")],
    server: ServerOption = None,
    db: DatabaseOption = None,
) -> None:
    """Revoke the secret of an agent immediately. It can enrol again with a new token."""
    with open_fleet(server, db) as fleet:
        fleet.revoke(agent)
    say(f"{agent}: revoked")


@app.command()
def token(
    url: Annotated[
        str | None,
        typer.Option("--url", help="URL at which agents reach the coordinator. Default: that of the last 'nas serve'."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Restrict the token to this agent name.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=7 * 24 * 60, help="Token lifetime.")] = 15,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """On the coordinator: print a one-time enrolment line for a device host."""
    from nas.measure.farm.enrolment import invite
    from nas.serve.client import server_url

    address = None if url is None else server_url(url, "--url")
    with open_store(db, create=True) as store:
        home = store.artifacts.parent
        invitation = invite(store, home, address or _served_at(home), name, minutes * 60)
    if json:
        print_json({"line": invitation.format(), "url": invitation.url, "good_for_s": minutes * 60})
        return
    typer.echo(invitation.format())
    say(f"valid once, for {minutes:g} minutes, at {invitation.url}; on the device host: nas agent enrol LINE")


@app.command()
def enrol(
    line: Annotated[str, typer.Argument(metavar="LINE", help="Line printed by 'nas agent token', or '-' for stdin.")],
    name: Annotated[str | None, typer.Option("--name", help="Agent name. Default: the host name.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier enrolment of this host.")] = False,
) -> None:
    """On a device host: enrol as an agent of the coordinator that issued the line."""
    text = typer.get_text_stream("stdin").readline() if line == "-" else line
    enrolment = exchange(Invitation.parse(text), name or platform.node(), agent_home(), replace=replace)
    say(f"enrolled as {enrolment.name} with {enrolment.url}; next: nas device add ADDRESS, and nas agent run")


@app.command()
def run(
    this_machine: Annotated[bool, typer.Option("--this-machine", help="Also serve this machine as a device.")] = False,
    log_json: LogJsonFlag = False,
) -> None:
    """Serve the attached devices (`nas device add`) to the coordinator.

    Unplugged devices go offline and reconnect automatically. Ctrl-C waits for running jobs; a second Ctrl-C aborts
    them. Results that could not be submitted are kept and submitted after the next start.
    """
    configure_logs(as_json=log_json)
    enrolment = read_enrolment(agent_home())
    if enrolment is None:
        raise InvalidInput(
            "this host is not enrolled: run 'nas agent token' on the coordinator, then 'nas agent enrol LINE' here"
        )
    attachments = own_attachments()
    if not attachments.serve_lock.acquire():
        raise InfrastructureFailed(
            f"the devices in {attachments.path} are served by a running 'nas launch', 'nas serve' or 'nas agent run'; "
            "stop it first"
        )
    client = enrolment.client()
    try:
        agent = make_agent(
            enrolment.name,
            client,
            served(attachments, this_machine=this_machine),
            cache=agent_cache(),
            lock=host_lock_folder(),
            state=agent_home(),
            key=enrolment.signing_key,
        )
        end_on_signals(agent)
        if not this_machine and not attachments.read():
            log.warning("no device is attached: 'nas device add' attaches one, --this-machine serves this one; waiting")
        agent.run()
    finally:
        client.close()


def _served_at(home: Path) -> str:
    from nas.serve.api.serve import last_address

    address = last_address(home)
    if address is None:
        raise InvalidInput("'nas serve' has not run here; start it, or give the coordinator's URL with --url")
    return address.url
