"""`nas agent`: a host that serves its devices to a coordinator.

Such a host has neither database nor service: what needs them is imported by the command that runs elsewhere.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from nas.cli import agent_list
from nas.cli.database import DatabaseOption, open_store
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say
from nas.core.enrolment import Invitation
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.logs import configure_logs
from nas.devices.enrolment import enrol as exchange
from nas.devices.enrolment import read_enrolment
from nas.devices.host import end_on_signals, make_agent, own_attachments, served
from nas.devices.places import agent_cache, agent_home, host_lock_folder

app = command_app(help="Serve devices of this host to a coordinator.")
agent_list.register(app)


@app.command()
def token(
    url: Annotated[
        str | None, typer.Option("--url", help="Where agents reach it; default: where 'nas serve' last listened.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The only agent name that it is good for.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=7 * 24 * 60, help="How long it is good.")] = 15,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """On the coordinator: print a line that lets one host enrol, once."""
    from nas.service.enrolling import invite

    if url is not None and not url.startswith("https://"):
        raise InvalidInput(f"{url!r}: https://HOST:PORT is wanted", where="--url")
    with open_store(db, create=True) as store:
        home = store.artifacts.parent
        invitation = invite(store, home, url or _served_at(home), name, minutes * 60)
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
            "this host is not enrolled: get a line with 'nas agent token' at the coordinator, and give it to "
            "'nas agent enrol'"
        )
    attachments = own_attachments()
    if not attachments.turn.mine():
        raise InfrastructureFailed(
            f"another agent serves what is in {attachments.path}: that of a launch, of 'nas serve', or another "
            "'nas agent run'; end it first"
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


def _served_at(home: Path) -> str:
    from nas.service.serve import last_address

    known = last_address(home)
    if known is None:
        raise InvalidInput("'nas serve' never ran here; start it, or say with --url where agents will reach it")
    return known.url
