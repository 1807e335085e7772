"""Who may see the pages, and who may act on them.

- On a loopback address without TLS (`nas launch --open`): everybody who reaches it may look, nobody may act. The
  request must name a loopback host, so that no page of another site can read it under a name of its own (DNS
  rebinding).
- Behind a proxy that logs people in: whom its header names, if the connection comes from an address that is configured.
- Else: who has posted an API token, by a session cookie; as far as the token's role goes.

An action is a POST from one of our own pages: its origin is ours, and its form holds the visitor's form token.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.requests import Request

from nas.dashboard.sessions import Sessions
from nas.service.off_loop import off_loop
from nas.store.rows import Role

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
FORM_TOKEN = "form_token"
LONGEST_NAME = 128

_RANK = {Role.READ: 0, Role.OPERATE: 1, Role.ADMIN: 2}


@dataclass(frozen=True)
class AccessRules:
    """How visitors are told apart.

    Args:
        open_hosts: hosts under which everybody may look; none: nobody may who has not shown who it is.
        secure: the pages are served over TLS.
        proxies: addresses of proxies whose header is believed; none: nobody's is.
        proxy_header: in which they name the user.
        proxy_roles: user -> role; others that a proxy names may look.
    """

    open_hosts: frozenset[str] = frozenset()
    secure: bool = True
    proxies: frozenset[str] = frozenset()
    proxy_header: str = "X-Forwarded-User"
    proxy_roles: Mapping[str, Role] = field(default_factory=dict)

    @property
    def cookie(self) -> str:
        """The session cookie's name; under TLS one that no other host can set."""
        return "__Host-hilnas" if self.secure else "hilnas"


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks at a page.

    Args:
        name: to be shown; None for a visitor who need not say who it is.
        role: what they may do.
        form_token: what their forms must hold.
        by_session: whether they can log out.
    """

    name: str | None
    role: Role
    form_token: str
    by_session: bool = False

    @property
    def may_operate(self) -> bool:
        """Whether they may steer studies and devices."""
        return self.may(Role.OPERATE)

    @property
    def may_administer(self) -> bool:
        """Whether they may remove devices, too."""
        return self.may(Role.ADMIN)

    def may(self, needed: Role) -> bool:
        """Whether their role goes as far as `needed`."""
        return _RANK[self.role] >= _RANK[needed]


class PageAccess:
    """Tells visitors apart, as `rules` say."""

    def __init__(self, rules: AccessRules, sessions: Sessions) -> None:
        self.rules, self.sessions = rules, sessions

    async def visitor(self, request: Request) -> Visitor | None:
        """Who asks; None for who has to log in first.

        Raises:
            HTTPException: 421, the request names a host that is none of ours.
        """
        rules = self.rules
        if rules.open_hosts:
            self.require_host(request)
            return self._visitor(None, Role.READ, "open")
        peer = request.client.host if request.client else None
        if peer in rules.proxies and (user := request.headers.get(rules.proxy_header, "")[:LONGEST_NAME]):
            return self._visitor(user, rules.proxy_roles.get(user, Role.READ), f"proxy {user}")
        secret = request.cookies.get(rules.cookie, "")
        token = await off_loop(self.sessions.who, secret) if secret else None
        return None if token is None else self._visitor(token.name, token.role, f"session {secret}")

    def require_host(self, request: Request) -> None:
        """Raises `HTTPException` (421) where only some hosts are ours, and the request names another one."""
        hosts = self.rules.open_hosts
        if hosts and _host(request) not in hosts:
            raise HTTPException(421, f"this is {' or '.join(sorted(hosts))}, whatever name led here")

    def require_action(self, visitor: Visitor, needed: Role, request: Request, form: Mapping[str, str]) -> None:
        """Refuses an action (403) that was not asked for on one of our pages by somebody whose role allows it."""
        if not visitor.may(needed):
            raise HTTPException(403, f"this needs role {needed}; {visitor.name or 'who looks only'} has {visitor.role}")
        require_same_origin(request)
        if not hmac.compare_digest(form.get(FORM_TOKEN, "").encode(), visitor.form_token.encode()):
            raise HTTPException(403, "this form is not of your present session; load the page again")

    def _visitor(self, name: str | None, role: Role, bound_to: str) -> Visitor:
        return Visitor(name, role, self.sessions.form_token(bound_to), by_session=bound_to.startswith("session "))


def require_same_origin(request: Request) -> None:
    """Raises `HTTPException` (403) for a POST that a page of another site may have made."""
    origin = request.headers.get("Origin")
    if origin is None:
        ours = request.headers.get("Sec-Fetch-Site") == "same-origin"
    else:
        ours = urlsplit(origin).netloc.lower() == request.headers.get("Host", "").lower() != ""
    if not ours:
        raise HTTPException(403, "this was not sent by a page of this server")


def _host(request: Request) -> str:
    named = request.headers.get("Host", "").lower()
    return named if named.endswith("]") else named.rpartition(":")[0] or named
