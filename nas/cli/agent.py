"""`nas agent`: a host that serves its devices to a coordinator."""

from __future__ import annotations

import platform
import socket
from typing import Annotated

import typer

from nas.cli.database import DatabaseOption, open_store
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say
from nas.core import paths
from nas.core.enrolment import Invitation
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.logs import configure_logs
from nas.devices.enrolment import enrol as exchange
from nas.devices.enrolment import read_enrolment
from nas.devices.host import end_on_signals, make_agent, own_attachments, served
from nas.devices.places import agent_cache, agent_home, host_lock_folder

app = command_app(help="Serve devices of this host to a coordinator.")

_DEFAULT_PORT = 7711


@app.command()
def token(
    url: Annotated[
        str | None, typer.Option("--url", help="Where agents reach the coordinator; default: this host, port 7711.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The only agent name that it is good for.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=7 * 24 * 60, help="How long it is good.")] = 15,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """On the coordinator: print a line that lets one host enrol, once."""
    # Hosts of devices have neither database nor service.
    from nas.service.enrolling import invite

    with open_store(db) as store:
        where = url or f"https://{socket.getfqdn()}:{_DEFAULT_PORT}"
        invitation = invite(store, paths.home(), where, name, minutes * 60)
    if json:
        print_json({"line": invitation.format(), "url": invitation.url, "good_for_s": minutes * 60})
        return
    typer.echo(invitation.format())
    say(f"For {invitation.url}, good once within {minutes:g} minutes. On the other host: nas agent enrol LINE")


@app.command()
def enrol(
    line: Annotated[str, typer.Argument(metavar="LINE", help="What 'nas agent token' printed, or '-' for stdin.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of this agent; default: this host's.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Give up an earlier enrolment of this host.")] = False,
) -> None:
    """On the host of the devices: become an agent of the coordinator that the line is from."""
    text = typer.get_text_stream("stdin").readline() if line == "-" else line
    kept = exchange(Invitation.parse(text), name or platform.node(), agent_home(), replace=replace)
    say(f"enrolled as {kept.name} with {kept.url}; next: nas device add ADDRESS, and nas agent run")


@app.command()
def run(
    this_machine: Annotated[bool, typer.Option("--this-machine", help="Serve this machine as a device, too.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
) -> None:
    """Serve the attached devices (`nas device add`) to the coordinator.

    A device that is unplugged goes offline and comes back by itself. Ctrl-C lets running jobs finish; a second one ends
    them. What is finished and not yet handed in is handed in after the next start.
    """
    configure_logs(as_json=log_json)
    enrolment = read_enrolment(agent_home())
    if enrolment is None:
        raise InvalidInput(
            "this host is not enrolled: get a line with 'nas agent token' at the coordinator, then 'nas agent enrol LINE'"
        )
    attachments = own_attachments()
    if not attachments.turn.mine():
        raise InfrastructureFailed(
            f"another agent of this home serves {attachments.path}: a launch, nas serve, or another 'nas agent run'. End "
            "it, or give this one a $NAS_HOME of its own"
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
        agent.run()
    finally:
        client.close()
