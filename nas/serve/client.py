"""A client of a coordinator for scripts and notebooks, which the command line uses too.

    from nas.serve.client import Server

    with Server("https://farm.example:7711") as server:
        trials = server.trials("phones")

`nas server add` stores how to verify the coordinator's certificate, and a token for this user.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import SplitResult, quote, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core import paths
from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.stats import interval
from nas.core.trust import certificate_fault, open_http

if TYPE_CHECKING:
    import pandas

Json = dict[str, Any]
Table = Literal["trials", "measurements"]

DEFAULT_PORT = 7711
_TIMEOUT_S = 30.0
_FILE_S = 600.0
"""Longest wait for the beginning of a file: the coordinator makes it then, and may have to read a large study first."""
_PAGE = 500
_FRAME = ["trial", "layout", "weights", "active", "p_front", "objective", "unit", "value", "low", "high"]


class Server:
    """Reads the studies of a coordinator; a context manager. Methods raise as those of `UsersClient`.

    Args:
        url: of the coordinator, which was added with `nas server add`; `$NAS_TOKEN` overrides the stored token.

    Raises:
        InvalidInput: the coordinator was not added.
    """

    def __init__(self, url: str) -> None:
        self.client = known_client(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def studies(self) -> list[Json]:
        """Returns all studies: name, space, state, number of trials."""
        return list(self.client.get_all("/v1/studies", "studies")["studies"])

    def study(self, name: str) -> Json:
        """Returns a study; `report` is that of `nas study show --json`, None before it has begun."""
        return self.client.get(f"/v1/studies/{part(name)}")

    def front(self, name: str, *, samples: bool = False) -> Front:
        """Returns the trials on the front, best first; `samples`: with every repetition of their measurements."""
        report = self.study(name)["report"]
        if not report:
            return Front([], [])
        rows = [
            row if samples else row | {"measurements": [_summary(measured) for measured in row["measurements"]]}
            for row in report["front"]
        ]
        return Front(rows, report["objectives"])

    def trials(self, name: str) -> list[Json]:
        """Returns all trials with their figures, one mapping each; `rank` is 0 on the front."""
        return list(self.client.get(f"/v1/studies/{part(name)}/trials")["rows"])

    def measurements(self, name: str) -> list[Json]:
        """Returns all measured figures, one mapping for each figure of a trial, workload, device and runtime."""
        return list(self.client.get(f"/v1/studies/{part(name)}/measurements")["rows"])

    def download(self, name: str, table: Table, format: Literal["csv", "parquet"]) -> bytes:
        """Returns a table as the contents of a file."""
        return self.client.get_bytes(f"/v1/studies/{part(name)}/{table}", format=format)


class Front(list[Json]):
    """Trials of a front, one mapping each, as in `nas study show --json`.

    Args:
        rows: the trials.
        objectives: of the study: name, unit, transform.
    """

    def __init__(self, rows: Iterable[Json], objectives: Sequence[Json]) -> None:
        super().__init__(rows)
        self._objectives = objectives

    def frame(self) -> pandas.DataFrame:
        """Returns a row for each trial and objective: its value and 95 % interval, null where not known.

        Raises:
            InvalidInput: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidInput("frame() needs pandas: pip install pandas") from None
        rows = [
            {
                "trial": row["trial"],
                "layout": row["layout"],
                "weights": row["params"]["total"],
                "active": row["params"]["active"],
                "p_front": row["p_front"],
                "objective": objective["name"],
                "unit": objective["unit"],
                **_interval(
                    row["objectives"][objective["name"]], row["value_sd"][objective["name"]], objective["transform"]
                ),
            }
            for row in self
            for objective in self._objectives
        ]
        return pandas.DataFrame(rows, columns=_FRAME)


class KnownServer(BaseModel):
    """Certificate authority and API token of a coordinator. Without an authority: those that the system trusts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_pem: str | None
    token: str = Field(repr=False)


class _Servers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    servers: dict[str, KnownServer] = {}


class Refused(NasError):
    """The server denied the request, or its certificate could not be verified."""


class UsersClient:
    """HTTP client of one coordinator; a context manager.

    All methods raise `InfrastructureFailed` if it is unreachable or fails, `Refused` if the token is invalid or lacks
    a role, and `InvalidInput` if the request is invalid.

    Args:
        url: `https://host:port`.
        token: API token.
        ca_pem: certificate authority that must have signed the certificate of the coordinator; None: one of those that
            the system trusts.
        transport: HTTP transport, for tests.
    """

    def __init__(
        self, url: str, token: str, ca_pem: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url
        if not (token.isascii() and token.isprintable()):
            raise InvalidInput("has characters that no API token has", where="--token or $NAS_TOKEN")
        headers = {"Authorization": f"Bearer {token}"}
        self._tls, self._pinned = ssl.create_default_context(cadata=ca_pem), ca_pem is not None
        self._http = open_http(
            url, base_url=url, headers=headers, verify=self._tls, timeout=_TIMEOUT_S, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def get(self, path: str, **params: str | float) -> Json:
        """Sends a GET request; returns the JSON response."""
        wait_s = float(params.get("wait_s", 0.0))
        return self._request("GET", path, params=params, timeout=_TIMEOUT_S + wait_s)

    def get_bytes(self, path: str, **params: str | float) -> bytes:
        """Sends a GET request; returns the body of the response."""
        timeout = httpx.Timeout(_TIMEOUT_S, read=_FILE_S)
        return self._answer("GET", path, params=params, timeout=timeout).content

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """Sends a POST request; returns the JSON response."""
        return self._request("POST", path, json=body)

    def get_all(self, path: str, key: str, **params: str) -> Json:
        """Reads all pages of a list; returns `{key: [...]}`."""
        return {key: list(self._pages(path, key, params))}

    def _pages(self, path: str, key: str, params: Mapping[str, str]) -> Iterator[Json]:
        after: dict[str, str | float] = {}
        while True:
            page = self.get(path, limit=_PAGE, **params, **after)
            yield from page[key]
            if page["next"] is None:
                return
            after = {"after": page["next"]}

    def _request(self, method: str, path: str, **request: Any) -> Json:
        answer = self._answer(method, path, **request)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise self._foreign(answer)
        return content

    def _answer(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            fault = certificate_fault(error, self.url, self._tls if self._pinned else None)
            if fault is not None and fault.lasting:
                raise Refused(str(fault)) from error
            raise InfrastructureFailed(str(fault or f"{self.url}: {error or type(error).__name__}")) from error
        if answer.is_success:
            return answer
        raise self._error(answer)

    def _error(self, answer: httpx.Response) -> NasError:
        try:
            body = answer.json()
            kind, message = str(body["kind"]), str(body["error"])
        except (ValueError, KeyError, TypeError):
            return self._foreign(answer)
        if kind in ("infrastructure", "internal"):
            request = f" (request {body.get('request_id')})" if kind == "internal" else ""
            return InfrastructureFailed(f"{self.url}: {message}{request}")
        if kind in ("unauthenticated", "forbidden"):
            return Refused(f"{self.url}: {message}")
        return InvalidInput(message)

    def _foreign(self, answer: httpx.Response) -> InfrastructureFailed:
        return InfrastructureFailed(f"{self.url}: HTTP {answer.status_code}, not a response of a coordinator")


def servers_file() -> Path:
    """Returns the path of the known servers, in `$NAS_CONFIG` or the user's configuration folder."""
    return paths.config() / "servers.json"


def known_servers() -> dict[str, KnownServer]:
    """Loads the known servers, by URL.

    Raises:
        InvalidInput: the file is damaged.
    """
    path = servers_file()
    try:
        return _Servers.model_validate_json(path.read_bytes()).servers
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InvalidInput(f"damaged ({problem}); remove it and add the servers again", where=str(path)) from None


def keep_server(url: str, server: KnownServer) -> None:
    """Adds or replaces a coordinator."""
    _change(lambda servers: servers | {url: server})


def forget_server(url: str) -> None:
    """Removes a coordinator.

    Raises:
        UnknownName: it is not known.
    """

    def without(servers: dict[str, KnownServer]) -> dict[str, KnownServer]:
        if url not in servers:
            raise UnknownName("server", url, servers)
        return {address: server for address, server in servers.items() if address != url}

    _change(without)


def server_url(text: str, where: str = "--server") -> str:
    """Normalises a URL or `host:port` to `https://host:port`; without a port, that of `nas serve`.

    Raises:
        InvalidInput: `text` is neither.
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        port = parts.port or DEFAULT_PORT
        (parts.hostname or "").encode("idna")  # as a look-up does
        httpx.URL(parts.geturl())  # which has rules of its own
    except (ValueError, httpx.InvalidURL):
        parts, port = SplitResult("", "", "", "", ""), 0
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise InvalidInput(f"{text!r} is not a server URL; use https://HOST:PORT", where=where)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"https://{host}:{port}"


def part(name: str) -> str:
    """Quotes a name for use as one segment of a URL path."""
    return quote(name, safe="")


def known_client(server: str) -> UsersClient:
    """Returns a client for a known coordinator; `$NAS_TOKEN` overrides the stored token.

    Raises:
        InvalidInput: the coordinator is not known.
    """
    url, servers = server_url(server), known_servers()
    if url not in servers:
        others = f"; known: {', '.join(servers)}" if servers else ""
        raise InvalidInput(f"{url} is not known here; run 'nas server add {url} --token -' first{others}")
    stored = servers[url]
    return UsersClient(url, os.environ.get("NAS_TOKEN", "").strip() or stored.token, stored.ca_pem)


def _summary(measurement: Json) -> Json:
    """Returns a measurement without the repetitions that its figures were computed from."""
    return {name: value for name, value in measurement.items() if name != "repetitions"}


def _interval(value: float | None, sd: float | None, transform: str) -> Json:
    """Returns a value with its 95 % interval; of a logarithmic objective, `sd` is relative."""
    if value is None or sd is None:
        return {"value": value, "low": None, "high": None}
    low, high = interval(value, sd, transform)
    return {"value": value, "low": low, "high": high}


def _change(change: Callable[[dict[str, KnownServer]], dict[str, KnownServer]]) -> None:
    path = servers_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        content = _Servers(servers=change(known_servers()))
        write_durably(path, content.model_dump_json(indent=1).encode())
