"""The command line's side of the users' API."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote

import httpx

from nas.core.certificates import certificate_fault
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError

Json = dict[str, Any]

_TIMEOUT_S = 30.0
_PAGE = 500


def part(name: str) -> str:
    """A name as one part of a path, whatever it holds."""
    return quote(name, safe="")


class Refused(NasError):
    """The server does not let this user do what was asked for, or this user does not believe that it is the server."""


class UsersClient:
    """Talks to one coordinator, for as long as the context is open.

    Every method raises `InfrastructureFailed` where it cannot be reached or is in trouble, `Refused` where the token
    is not good (enough), and `InvalidInput` where what was asked for makes no sense there.

    Args:
        url: `https://host:port`.
        token: API token.
        ca_pem: the certificate authority that the coordinator's certificate must be of.
        transport: of the HTTP client; tests give one.
    """

    def __init__(self, url: str, token: str, ca_pem: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {token}"}
        self._believed = ssl.create_default_context(cadata=ca_pem)
        self._http = httpx.Client(
            base_url=url, headers=headers, verify=self._believed, timeout=_TIMEOUT_S, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: str | float) -> Json:
        """The answer to a GET."""
        wait_s = float(params.get("wait_s", 0.0))
        return self._ask("GET", path, params=params, timeout=_TIMEOUT_S + wait_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """The answer to a POST."""
        return self._ask("POST", path, json=body)

    def whole(self, path: str, key: str) -> Json:
        """`{key: [...]}` of all the pages of a list."""
        return {key: list(self._pages(path, key))}

    def _pages(self, path: str, key: str) -> Iterator[Json]:
        after: dict[str, str | float] = {}
        while True:
            page = self.get(path, limit=_PAGE, **after)
            yield from page[key]
            if page["next"] is None:
                return
            after = {"after": page["next"]}

    def _ask(self, method: str, path: str, **request: Any) -> Json:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            fault = certificate_fault(error, self.url, self._believed)
            if fault is not None and fault.lasting:
                raise Refused(str(fault)) from error
            raise InfrastructureFailed(str(fault or f"{self.url}: {error or type(error).__name__}")) from error
        if answer.is_success:
            found: Json = answer.json()
            return found
        raise self._error(answer)

    def _error(self, answer: httpx.Response) -> NasError:
        try:
            body = answer.json()
            kind, message = str(body["kind"]), str(body["error"])
        except (ValueError, KeyError, TypeError):
            return InfrastructureFailed(f"{self.url}: {answer.status_code}, and not in the words of a coordinator")
        if kind in ("infrastructure", "internal"):
            request = f" (request {body.get('request_id')})" if kind == "internal" else ""
            return InfrastructureFailed(f"{self.url}: {message}{request}")
        if kind in ("unauthenticated", "forbidden"):
            return Refused(f"{self.url}: {message}")
        return InvalidInput(message)
