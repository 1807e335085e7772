"""`nas server`: the coordinators that this user may talk to."""

from __future__ import annotations

import hashlib
import ssl
import sys
from typing import Annotated

import httpx
import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, print_table, say
from nas.cli.servers_file import KnownServer, forget_server, keep_server, known_servers, server_url, servers_file
from nas.cli.users_client import UsersClient
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.protocol import CA_PATH

_TIMEOUT_S = 15.0
_LONGEST_CA = 64 << 10

app = command_app(help="Make coordinators known, for --server.")

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="https://host:port.")]


@app.command()
def add(
    url: UrlArgument,
    token: Annotated[
        str, typer.Option("--token", help="API token of 'nas token create'; '-' asks for it or reads it from stdin.")
    ] = "-",
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="SHA256", help="Of its CA, as 'nas serve' prints it; default: ask."),
    ] = None,
) -> None:
    """Pin a coordinator's certificate authority by its fingerprint, and keep a token for it."""
    url = server_url(url)
    pem = _fetch_ca(url)
    found = _fingerprint(pem)
    if fingerprint is None:
        _ask_for_trust(url, found)
    elif _plain(fingerprint) != found:
        raise InvalidInput(f"{url} has another certificate authority: {found}", where="--fingerprint")
    secret = _read_token() if token == "-" else token
    with UsersClient(url, secret, pem) as client:
        server = client.get("/v1/server")
    keep_server(url, KnownServer(ca_pem=pem, token=secret))
    say(f"{url}: hilnas {server['version']}; token {server['token']!r} has role {server['role']}")
    say(f"kept in {servers_file()}; use it with --server {url} or NAS_SERVER={url}")


@app.command("list")
def list_servers(json: JsonFlag = False) -> None:
    """List the coordinators that are known."""
    rows = [{"url": url, "fingerprint": _fingerprint(server.ca_pem)} for url, server in known_servers().items()]
    if json:
        print_json({"servers": rows})
    else:
        print_table(("url", "fingerprint"), [[row["url"], row["fingerprint"]] for row in rows])


@app.command()
def remove(url: UrlArgument) -> None:
    """Forget a coordinator and its token."""
    forget_server(server_url(url))
    say(f"{url}: forgotten")


def _fetch_ca(url: str) -> str:
    """The coordinator's CA, from a connection that proves nothing yet: its fingerprint has to."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        answer = httpx.get(f"{url}{CA_PATH}", verify=context, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise InfrastructureFailed(f"{url}: {error or type(error).__name__}") from error
    if answer.status_code != 200 or len(answer.content) > _LONGEST_CA:
        raise InvalidInput(f"{url} is no coordinator: it gives no certificate authority ({answer.status_code})")
    return answer.text


def _fingerprint(pem: str) -> str:
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    except ValueError:
        raise InvalidInput("what should be a certificate authority is no certificate") from None


def _plain(fingerprint: str) -> str:
    return fingerprint.lower().removeprefix("sha256:").replace(":", "").replace(" ", "")


def _ask_for_trust(url: str, fingerprint: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput("nobody is there to compare fingerprints; give the one that 'nas serve' prints",
                           where="--fingerprint")  # fmt: skip
    say(f"{url} has a certificate authority with the SHA-256 fingerprint\n  {fingerprint}")
    typer.confirm("is that what 'nas serve' printed?", abort=True, err=True)


def _read_token() -> str:
    token = typer.prompt("token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise InvalidInput("no token was given", where="--token")
    return str(token.strip())
