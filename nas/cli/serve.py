"""`nas serve`: run the coordinator."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, open_store
from nas.cli.output import LogJsonFlag, print_fields, say
from nas.core.errors import InvalidInput, UnknownName
from nas.core.logs import configure_logs
from nas.infra.store.rows import Role
from nas.infra.web.connections import plain_ip
from nas.infra.web.tls import OwnCertificate
from nas.measure.runtimes import RUNTIMES
from nas.serve.api.serve import PORT, WEB_PORT, ServeOptions, serving
from nas.serve.api.webhook import checked_url
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router

app = command_app()


@app.command()
def serve(
    host: Annotated[
        str, typer.Option("--host", help="Name or address to listen on; 0.0.0.0 or ::: all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="TCP port; 0: any free port.")] = PORT,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="Additional host name or address for the certificate. Repeatable."),
    ] = None,
    studies: Annotated[int, typer.Option("--studies", min=1, help="Maximum concurrent submitted studies.")] = 2,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            help="Trust X-Forwarded-User from a proxy at this IP address or network (read-only). Repeatable.",
        ),
    ] = None,
    proxy_role: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy-role",
            metavar="USER=ROLE",
            help="Role of a user authenticated by --proxy: read, operate or admin. Repeatable.",
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            metavar="URL",
            envvar="NAS_WEBHOOK",
            help="URL to send JSON to when a study ends or a device becomes bad: https, or http to loopback.",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option("--cert", metavar="FILE", help="Certificate chain (PEM) of your own for people's browsers."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Key (PEM) of --cert, without a password.")
    ] = None,
    web_port: Annotated[
        int, typer.Option("--web-port", min=0, max=65535, help="TCP port with --cert, for people; 0: any free port.")
    ] = WEB_PORT,
    log_json: LogJsonFlag = False,
    db: DatabaseOption = None,
) -> None:
    """Run the coordinator: dashboard, API and remote device agents, over TLS.

    Users log in at the printed URL with an API token.

    Without --host only this machine can connect. Agents connect to the first --name. Ctrl-C or SIGTERM shuts down
    gracefully: agents finish their jobs and submit results when the coordinator is back; submitted studies keep
    running.

    With --cert and --key people use a second port, whose certificate their browsers already trust; agents keep using
    the first one. Both files are read again every hour.
    """
    configure_logs(as_json=log_json)
    stop = _stop_on_signals()
    if (cert is None) != (key is None):
        raise InvalidInput("give both the certificate and its key", where="--cert, --key")
    certificate = OwnCertificate(cert, key) if cert and key else None
    options = ServeOptions(
        host, port, tuple(name or ()), studies, webhook and checked_url(webhook), certificate, web_port
    )
    rules = AccessRules(secure=True, proxies=proxy_networks(proxy or ()), proxy_roles=proxy_roles(proxy_role or ()))
    if proxy_role and not proxy:
        raise InvalidInput("requires --proxy, the address of the proxy", where="--proxy-role")
    with (
        open_store(db, create=True) as store,
        serving(
            store, options, lambda service: dashboard_router(store, rules, service.studies, service.snapshots)
        ) as service,
    ):
        pages = [("web", service.web_url)] if certificate else []
        print_fields([("url", service.url), *pages, ("ca", service.certificates.ca_sha256)])
        if not any(RUNTIMES[runtime].builds() for runtime in RUNTIMES):
            say("no runtime is built here, so nothing can be measured: run 'nas runtime build llama.cpp'")
        say(f"the dashboard is at {service.web_url}; log in with an API token")
        say("to add a device host: run 'nas agent token' here, then 'nas agent enrol LINE' there")
        say(
            f"to add a user: run 'nas token create NAME' here, then 'nas server add {service.web_url}' on their machine"
        )
        service.snapshots.warm()
        stop.wait()
        say("stopping")


def proxy_networks(texts: Sequence[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parses IP addresses and networks of proxies.

    Raises:
        InvalidInput: a text is neither, or the network is everybody.
    """
    networks = []
    for text in texts:
        try:
            network = ip_network(text if "/" in text else plain_ip(text))
        except ValueError:
            valid = "an IP address such as 10.0.0.5, or a network such as 10.0.0.0/24"
            raise InvalidInput(f"{text!r} is not {valid}", where="--proxy") from None
        if network.prefixlen == 0:
            raise InvalidInput(f"{text!r} trusts everybody; name the proxy", where="--proxy")
        networks.append(network)
    return tuple(networks)


def proxy_roles(settings: Sequence[str]) -> dict[str, Role]:
    """Parses roles such as 'ann=admin'; returns user -> role. User names may contain '='.

    Raises:
        InvalidInput: a text is malformed, or a user has two roles.
    """
    roles: dict[str, Role] = {}
    for text in settings:
        user, equals, role = text.rpartition("=")
        if not equals or not user:
            raise InvalidInput(f"{text!r} is not USER=ROLE, such as ann=operate", where="--proxy-role")
        if role not in {*Role}:
            raise UnknownName("role", role, [role.value for role in Role], where="--proxy-role")
        if user in roles:
            raise InvalidInput(f"{user!r} already has role {roles[user]}", where="--proxy-role")
        roles[user] = Role(role)
    return roles


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
