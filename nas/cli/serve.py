"""`nas serve`: the coordinator for agents on other hosts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from nas.cli.database import DatabaseOption, open_store
from nas.cli.lazy import command_app
from nas.cli.output import LogJsonFlag, print_fields, say
from nas.core.errors import InvalidInput, UnknownName
from nas.core.logs import configure_logs
from nas.dashboard.access import AccessRules
from nas.dashboard.app import dashboard_router
from nas.service.live_studies import LiveStudies
from nas.service.serve import PORT, ServeOptions, serving
from nas.store.rows import Role

app = command_app()


@app.command()
def serve(
    host: Annotated[
        str, typer.Option("--host", help="Listen on this name or address; 0.0.0.0 or :: listens on all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="TCP port; 0 takes any that is free.")] = PORT,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="A further name or address of this server, for its certificate; may be repeated."),
    ] = None,
    studies: Annotated[int, typer.Option("--studies", min=1, help="Submitted studies that run side by side.")] = 2,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            help="Let in, to look, whom a proxy at this address names in X-Forwarded-User; may be repeated.",
        ),
    ] = None,
    proxy_role: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy-role",
            metavar="USER=ROLE",
            help="What somebody whom the proxy names may do: read, operate or admin; may be repeated.",
        ),
    ] = None,
    log_json: LogJsonFlag = False,
    db: DatabaseOption = None,
) -> None:
    """Serve device agents of other hosts, and people, over TLS, until it is told to stop.

    People log in at the printed URL with an API token, and see the studies.

    Without --host only this machine can connect. The first --name is what agents are told to connect to. Ctrl-C or
    SIGTERM lets requests end; agents finish what they run, and hand it in when the coordinator is back. Studies go
    on as well.
    """
    configure_logs(as_json=log_json)
    stop = _stop_on_signals()
    options = ServeOptions(host, port, tuple(name or ()), studies)
    rules = AccessRules(secure=True, proxies=frozenset(proxy or ()), proxy_roles=proxy_roles(proxy_role or ()))
    if proxy_role and not proxy:
        raise InvalidInput("whose header gives roles? Name the proxy's address with --proxy", where="--proxy-role")
    with (
        open_store(db, create=True) as store,
        LiveStudies(store) as live,
        serving(store, options, lambda service: dashboard_router(store, rules, service.studies, live)) as service,
    ):
        print_fields([("url", service.url), ("ca", service.certificates.ca_sha256)])
        say("enrol an agent: run 'nas agent token' here, and 'nas agent enrol LINE' on its host")
        say(f"let somebody in: run 'nas token create NAME' here, and 'nas server add {service.url}' on their machine")
        live.warm()
        stop.wait()
        say("stopping")


def proxy_roles(given: Sequence[str]) -> dict[str, Role]:
    """User -> role, of texts such as 'ann=admin'; a user's name may hold '='.

    Raises:
        InvalidInput: one is no such text, or names somebody a second time.
    """
    roles: dict[str, Role] = {}
    for text in given:
        user, equals, role = text.rpartition("=")
        if not equals or not user:
            raise InvalidInput(f"write USER=ROLE, such as ann=operate, not {text!r}", where="--proxy-role")
        if role not in {*Role}:
            raise UnknownName("role", role, [each.value for each in Role], where="--proxy-role")
        if user in roles:
            raise InvalidInput(f"{user!r} has a role already, {roles[user]}", where="--proxy-role")
        roles[user] = Role(role)
    return roles


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
