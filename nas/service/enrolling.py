"""How an agent gets in: an invitation that a person carries, exchanged once for a secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from nas.core import protocol as p
from nas.core.enrolment import Invitation
from nas.service.off_loop import off_loop
from nas.service.signing import open_key
from nas.service.tls import Certificates
from nas.store import agents, identity
from nas.store.store import Store


def invite(store: Store, home: Path, url: str, name: str | None = None, ttl_s: float = agents.TOKEN_S) -> Invitation:
    """What `nas agent token` prints. Needs no running server.

    Args:
        store: the coordinator's.
        home: its folder of keys and certificates.
        url: under which the agent reaches the coordinator.
        name: of the agent that may enrol with it; None: any name that is new.
        ttl_s: seconds it is good for.

    Raises:
        InvalidInput: the name cannot be used.
    """
    ca_sha256 = Certificates(home, store.clock).ca_sha256
    return Invitation(url, ca_sha256, agents.issue_token(store, ttl_s, name=name))


def router(store: Store, home: Path, certificates: Certificates, forget: Callable[[], None]) -> APIRouter:
    """The routes of strangers.

    Args:
        store: where agents are.
        home: holds the key that signs runners.
        certificates: of this server.
        forget: called when a secret was replaced.
    """
    routes = APIRouter(tags=["agents"])
    signing_key = open_key(home).public

    @routes.get(p.CA_PATH, response_class=PlainTextResponse)
    async def ca() -> PlainTextResponse:
        """The coordinator's CA certificate; whoever asks must know its fingerprint from elsewhere."""
        return PlainTextResponse(certificates.ca_pem, media_type="application/x-pem-file")

    @routes.post(p.ENROL_PATH)
    async def enrol(request: p.EnrolRequest) -> p.EnrolReply:
        """Exchange a one-time token for an agent's secret."""
        secret = await off_loop(agents.enrol, store, request.token, request.agent)
        forget()
        authority = await off_loop(identity.authority, store)
        return p.EnrolReply(secret=secret, signing_key=signing_key, authority=authority)

    return routes
