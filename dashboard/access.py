"""Access to the pages: authentication of visitors, their roles, and posted forms.

- On a loopback address without TLS (`nas launch --open`): everybody who can connect may read, nobody may act. The
  request must name a loopback host, which prevents DNS rebinding by other sites.
- Behind a proxy that authenticates users: the user named in its header, if the connection comes from a configured
  address. A request with two such headers is refused.
- A script that sends an API token as `Authorization: Bearer`: may read, whatever the token's role; it acts through
  the users' API.
- Otherwise: the holder of a session cookie, opened with an API token; with the token's role.

An action is a POST from one of our own pages: its origin is ours, and its form has the visitor's form token.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Message

from nas.core.errors import InvalidInput
from nas.infra.store import agents
from nas.infra.store.rows import ApiToken, Role
from nas.infra.store.store import Store
from nas.infra.web.connections import plain_ip
from nas.infra.web.off_loop import off_loop

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
FORM_TOKEN = "form_token"
LONGEST_NAME = 128
SESSION_S = 12 * 3600.0
"""Lifetime of a session."""

SESSIONS_OF_ONE = 32
"""Most open sessions of one API token; its oldest is closed first."""
_USUAL_PORT = ":443"
_MAX_FIELDS = 64
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")

Form = Mapping[str, str]
"""The fields of a posted form, by name."""


@dataclass(frozen=True)
class AccessRules:
    """Rules for the authentication of visitors.

    Args:
        open_hosts: hosts under which everybody may read; empty: visitors must authenticate.
        secure: the pages are served over TLS.
        proxies: networks of trusted proxies.
        proxy_header: header in which they name the user.
        proxy_roles: user -> role; other users of a proxy have role read.
    """

    open_hosts: frozenset[str] = frozenset()
    secure: bool = True
    proxies: Sequence[IPv4Network | IPv6Network] = ()
    proxy_header: str = "X-Forwarded-User"
    proxy_roles: Mapping[str, Role] = field(default_factory=dict)

    @property
    def cookie(self) -> str:
        """The session cookie's name; under TLS one that no other host can set."""
        return "__Host-hilnas" if self.secure else "hilnas"


@dataclass(frozen=True, slots=True)
class Visitor:
    """The visitor of a page.

    Args:
        name: displayed; None for an anonymous visitor.
        role: of the visitor.
        form_token: required in their forms.
        by_session: whether the visitor can log out.
    """

    name: str | None
    role: Role
    form_token: str
    by_session: bool = False

    @property
    def may_operate(self) -> bool:
        """Whether the visitor may control studies and devices."""
        return self.role.includes(Role.OPERATE)

    @property
    def may_administer(self) -> bool:
        """Whether the visitor may also remove devices."""
        return self.role.includes(Role.ADMIN)


@dataclass(frozen=True, slots=True)
class _Session:
    """An open session: its API token, the token's name, and its end."""

    secret: str
    name: str
    until: float


class Sessions:
    """Sessions of one process, by the random id in the visitor's cookie; lost at a restart.

    They are stored on the server, because a signed cookie alone would stay valid after a logout.

    Args:
        store: has the API tokens; read at every request, so that a revoked token ends its sessions at once.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._open: dict[str, _Session] = {}

    def open(self, token: str) -> str | None:
        """Opens a session and returns its id; None if the API token is not valid."""
        valid = agents.authenticate_api_token(self.store, token)
        if valid is None:
            return None
        id = secrets.token_urlsafe(32)
        with self._lock:
            self._open[id] = _Session(token, valid.name, self.store.now() + SESSION_S)
            of_token = [other for other, session in self._open.items() if session.name == valid.name]
            for other in of_token[:-SESSIONS_OF_ONE]:
                del self._open[other]
        return id

    def token(self, id: str) -> ApiToken | None:
        """Returns the API token of a session; None if the session has ended."""
        session = self._open.get(id)
        valid = session is not None and self.store.now() < session.until
        token = agents.authenticate_api_token(self.store, session.secret) if session and valid else None
        if token is None:
            self.close(id)
        return token

    def close(self, id: str) -> None:
        """Ends a session, if it is open."""
        with self._lock:
            self._open.pop(id, None)

    def form_token(self, bound_to: str) -> str:
        """Returns the token that proves that a form was made by one of our pages for this visitor."""
        return hmac.new(self._key, bound_to.encode(), "sha256").hexdigest()


class PageAccess:
    """Authenticates visitors by `rules`."""

    def __init__(self, rules: AccessRules, sessions: Sessions) -> None:
        self.rules, self.sessions = rules, sessions

    async def visitor(self, request: Request) -> Visitor | None:
        """Returns the visitor; None if a login is needed.

        Raises:
            HTTPException: 421, the request names another host; 400, its proxy named two users.
        """
        rules = self.rules
        if rules.open_hosts:
            self.require_host(request)
            return self._visitor(None, Role.READ, "open")
        if self._by_proxy(request) and (users := request.headers.getlist(rules.proxy_header)):
            if len(users) > 1:
                # One of them may be the visitor's own, which the proxy should have removed.
                raise HTTPException(400, f"the proxy sent {rules.proxy_header} more than once: it must replace it")
            # Starlette decodes headers as Latin-1; names come as UTF-8.
            if user := users[0].encode("latin-1").decode(errors="backslashreplace")[:LONGEST_NAME]:
                return self._visitor(user, rules.proxy_roles.get(user, Role.READ), f"proxy {user}")
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            held = await off_loop(agents.authenticate_api_token, self.sessions.store, secret)
            return None if held is None else self._visitor(held.name, Role.READ, f"token {held.name}")
        id = request.cookies.get(rules.cookie, "")
        token = await off_loop(self.sessions.token, id) if id else None
        return None if token is None else self._visitor(token.name, token.role, f"session {id}")

    def require_host(self, request: Request) -> None:
        """Raises `HTTPException` (421) if hosts are restricted and the request names another one."""
        hosts = self.rules.open_hosts
        if hosts and _host(request) not in hosts:
            raise HTTPException(421, f"this server answers only as {' or '.join(sorted(hosts))}")

    def require_action(self, visitor: Visitor, needed: Role, request: Request, form: Form) -> None:
        """Raises `HTTPException` (403) unless one of our pages posts the form for a visitor with the needed role."""
        if not visitor.role.includes(needed):
            raise HTTPException(403, f"this needs role {needed}; {visitor.name or 'a reader'} has {visitor.role}")
        require_same_origin(request)
        if not hmac.compare_digest(form.get(FORM_TOKEN, "").encode(), visitor.form_token.encode()):
            raise HTTPException(403, "this form belongs to another session; load the page again")

    def posted(self, needed: Role) -> Any:
        """Returns a dependency of an action's route: the posted form, if `require_action` allows it."""

        async def check(request: Request) -> Form:
            form = await read_form(request)
            self.require_action(request.state.visitor, needed, request, form)
            return form

        return Depends(check, use_cache=False)

    def _by_proxy(self, request: Request) -> bool:
        if not self.rules.proxies or request.client is None:
            return False
        peer = plain_ip(request.client.host)
        return any(peer in network for network in self.rules.proxies)

    def _visitor(self, name: str | None, role: Role, bound_to: str) -> Visitor:
        return Visitor(name, role, self.sessions.form_token(bound_to), by_session=bound_to.startswith("session "))


def require_same_origin(request: Request) -> None:
    """Raises `HTTPException` (403) for a POST that a page of another site may have made."""
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "").lower()
    if origin is None:
        if request.headers.get("Sec-Fetch-Site") != "same-origin":
            raise HTTPException(403, "this request was not sent by a page of this server")
        return
    try:
        page = urlsplit(origin).netloc.lower()
    except ValueError:
        page = ""
    # Browsers leave the usual port out; some proxies write it.
    if not page or page != host.removesuffix(_USUAL_PORT if origin.startswith("https:") else ""):
        raise HTTPException(
            403,
            f"this request is of a page of {origin[:LONGEST_NAME]}, and this server was addressed as "
            f"{host[:LONGEST_NAME] or 'nothing'}: if there is a proxy between, it must keep the header Host",
        )


async def read_form(request: Request) -> Form:
    """Reads a posted form of UTF-8 text. A file is read as text; of fields with one name, the first counts.

    Raises:
        HTTPException: 413, 415 or 422: it is not a form of our pages.
    """
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in _FORMS:
        raise HTTPException(415, f"send a form ({_FORMS[0]} or {_FORMS[1]})")
    body = await request.body()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    try:
        body.decode()
        async with Request(request.scope, receive).form(
            max_files=1, max_fields=_MAX_FIELDS, max_part_size=len(body)
        ) as form:
            return {name: await _text(value) for name, value in reversed(form.multi_items())}
    except (UnicodeDecodeError, HTTPException):
        raise HTTPException(422, "this is not a form of UTF-8 text") from None


async def _text(value: UploadFile | str) -> str:
    return value if isinstance(value, str) else (await value.read()).decode("utf-8-sig")


@contextmanager
def valid_fields(**fields: str) -> Iterator[None]:
    """Raises `InvalidInput` with the name of the form's field where a request that is made of a form is not valid.

    Args:
        fields: name in the request -> name in the form, where they differ.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InvalidInput(first["msg"], where=fields.get(name, name)) from None


def back_from(form: Form, otherwise: str) -> Response:
    """Redirects to the form's page, named in its field `next`; else to the path `otherwise`."""
    goal = form.get("next", otherwise)
    return RedirectResponse(goal if is_local_path(goal) else otherwise, 303)


def is_local_path(path: str) -> bool:
    """Returns whether a path is on this server."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _host(request: Request) -> str:
    named = request.headers.get("Host", "").lower()
    return named if named.endswith("]") else named.rpartition(":")[0] or named
