"""`nas server`: manage the coordinators known to --server."""

from __future__ import annotations

import hashlib
import ssl
import sys
from typing import Annotated

import httpx
import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, print_table, say
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.trust import fetch_certificate, is_certificate_error, open_http, unverified
from nas.core.wire import CA_PATH
from nas.serve.client import (
    KnownServer,
    UsersClient,
    forget_server,
    keep_server,
    known_servers,
    server_url,
    servers_file,
)

_TIMEOUT_S = 15.0

app = command_app(help="Manage the coordinators known to --server.")

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="URL of the coordinator, https://HOST:PORT.")]


@app.command()
def add(
    url: UrlArgument,
    token: Annotated[
        str, typer.Option("--token", help="API token from 'nas token create'; '-': prompt, or read it from stdin.")
    ] = "-",
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="SHA256", help="CA fingerprint printed by 'nas serve'. Default: ask."),
    ] = None,
) -> None:
    """Add a coordinator: pin its certificate authority and store an API token.

    Nothing is pinned if this system already trusts the certificate ('nas serve --cert') and no --fingerprint is given.
    """
    url = server_url(url)
    pem = None if fingerprint is None and _trusted(url) else _pinned_ca(url, fingerprint)
    secret = _read_token() if token == "-" else token
    with UsersClient(url, secret, pem) as client:
        server = client.get("/v1/server")
    keep_server(url, KnownServer(ca_pem=pem, token=secret))
    say(f"{url}: hilnas {server['version']}; token {server['token']!r} has role {server['role']}")
    say(f"saved to {servers_file()}; use it with --server {url} or NAS_SERVER={url}")


@app.command("list")
def list_servers(json: JsonFlag = False) -> None:
    """List known coordinators."""
    rows = [
        {"url": url, "fingerprint": server.ca_pem and _fingerprint(server.ca_pem)}
        for url, server in known_servers().items()
    ]
    if json:
        print_json({"servers": rows})
    else:
        print_table(
            ("url", "fingerprint"), [[row["url"], row["fingerprint"] or "trusted by the system"] for row in rows]
        )


@app.command()
def remove(url: UrlArgument) -> None:
    """Remove a coordinator and its token."""
    forget_server(server_url(url))
    say(f"{url}: removed")


def _trusted(url: str) -> bool:
    """Returns whether the system's certificate authorities verify the server's certificate."""
    try:
        with open_http(url, verify=ssl.create_default_context(), timeout=_TIMEOUT_S) as http:
            http.head(url)
    except httpx.HTTPError as error:
        if is_certificate_error(error):
            return False
        raise InfrastructureFailed(f"{url}: {error or type(error).__name__}") from error
    return True


def _pinned_ca(url: str, fingerprint: str | None) -> str:
    """Returns the server's CA, after its fingerprint was compared by this function or a person."""
    pem = _fetch_ca(url)
    actual = _fingerprint(pem)
    if fingerprint is None:
        if not sys.stdin.isatty():
            raise InvalidInput("not a terminal; give the CA fingerprint printed by 'nas serve'", where="--fingerprint")
        say(f"SHA-256 fingerprint of the certificate authority of {url}:\n  {actual}")
        typer.confirm("Does it match the one printed by 'nas serve'?", abort=True, err=True)
    elif fingerprint.lower().removeprefix("sha256:").replace(":", "").replace(" ", "") != actual:
        raise InvalidInput(f"{url} has a different certificate authority: {actual}", where="--fingerprint")
    return pem


def _fetch_ca(url: str) -> str:
    """Fetches the CA over an unverified connection; its fingerprint must be checked."""
    with open_http(url, verify=unverified(), timeout=_TIMEOUT_S) as http:
        status, content = fetch_certificate(http, f"{url}{CA_PATH}")
    if status != httpx.codes.OK:
        raise InvalidInput(
            f"{url}: this system does not trust its certificate, and it has no certificate authority to pin (HTTP "
            f"{status}): it is no coordinator, or the port of 'nas serve --cert' with a certificate that "
            "is not valid here"
        )
    return content.decode(errors="replace")


def _fingerprint(pem: str) -> str:
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    except ValueError:
        raise InvalidInput("the certificate authority is not a valid certificate") from None


def _read_token() -> str:
    token = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise InvalidInput("no token given", where="--token")
    return str(token.strip())
