"""Enrolment of agents: an invitation with a one-time token, which is exchanged for a secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from nas.core import wire as p
from nas.core.trust import Invitation
from nas.infra.store import agents
from nas.infra.store.store import Store
from nas.infra.web.off_loop import off_loop
from nas.infra.web.tls import Certificates
from nas.measure.farm.trust import open_key

_PEM = "application/x-pem-file"


def invite(store: Store, home: Path, url: str, name: str | None = None, ttl_s: float = agents.TOKEN_S) -> Invitation:
    """Makes the invitation that `nas agent token` prints, for the agent `name` or any; needs no running server."""
    ca_sha256 = Certificates(home, store.clock).ca_sha256
    return Invitation(url, ca_sha256, agents.issue_token(store, ttl_s, name=name))


def router(store: Store, home: Path, certificates: Certificates, forget: Callable[[], None]) -> APIRouter:
    """Makes the routes for agents that are not enrolled yet; `forget` is called when a secret was replaced."""
    routes = APIRouter(tags=["agents"])
    signing_key = open_key(home).public

    @routes.get(p.CA_PATH, response_class=Response, responses={200: {"content": {_PEM: {}}}})
    async def ca() -> Response:
        """Download the coordinator's CA certificate; the client must know its fingerprint from elsewhere."""
        return Response(certificates.ca_pem, media_type=_PEM)

    @routes.post(p.ENROL_PATH)
    async def enrol(request: p.EnrolRequest) -> p.EnrolReply:
        """Exchange a one-time token for an agent's secret."""
        secret = await off_loop(agents.enrol, store, request.token, request.agent)
        forget()
        authority = await off_loop(agents.authority, store)
        return p.EnrolReply(secret=secret, signing_key=signing_key, authority=authority)

    return routes
