"""`nas serve`: the coordinator as a network service, with the agents' API, the users' API and further routes."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import JSONResponse, Response

from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, NasError
from nas.infra.store import agents
from nas.infra.store.rows import ApiToken, Role
from nas.infra.store.store import Store
from nas.infra.web import metrics
from nas.infra.web.errors import documented
from nas.infra.web.events import Streams
from nas.infra.web.server import RequestLog, Server, listen_tcp, raise_file_limit, web_app
from nas.infra.web.tls import Certificates, OwnCertificate, Renewal, is_wildcard, names_of, url_of
from nas.measure.farm import agent_api, enrolment
from nas.measure.farm.agent_api import Access, SecretAccess, guarded
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.health import AnyDevice, HealthKeeper
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.access import TokenAccess, require
from nas.serve.api.devices import ServerView, agents_router, device_events_router, devices_router, jobs_router
from nas.serve.api.studies import estimates_router, studies_router
from nas.serve.api.submissions import LaunchProcess, SubmittedStudies
from nas.serve.api.webhook import Webhook

PORT = 7711
"""Of agents and the users' API."""
WEB_PORT = 7712
"""Of the pages."""
ADDRESS_FILE = "serve.json"
_METRICS_EXAMPLE = '# TYPE hilnas_jobs gauge\nhilnas_jobs{state="queued"} 12.0\n'
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"example": _METRICS_EXAMPLE}}},
    **documented(401, 403),
}


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nas serve`.

    Args:
        host: name or address of this machine to listen on; a wildcard listens on all.
        port: TCP port; 0 takes any that is free.
        names: more names and addresses under which agents and people reach this server.
        studies: how many submitted studies run at the same time.
        webhook: URL that is sent a message when a study ends or a device becomes bad; None for none.
        own_certificate: of a second port, for people; None: there is none.
        web_port: that port; 0 takes any that is free.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    names: tuple[str, ...] = ()
    studies: int = 2
    webhook: str | None = None
    own_certificate: OwnCertificate | None = None
    web_port: int = WEB_PORT


class Address(BaseModel):
    """Address of the last `nas serve` of a home; `web_url` is that for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    ca_sha256: str
    web_url: str = ""


@dataclass(frozen=True)
class Service:
    """A running coordinator.

    Args:
        url: for agents, and for people without `web_url`.
        web_url: of the port with the operator's certificate, for people; without that port the same as `url`.
    """

    store: Store
    farm: Farm
    home: Path
    certificates: Certificates
    url: str
    web_url: str
    studies: SubmittedStudies
    snapshots: Snapshots


@contextlib.contextmanager
def serving(
    store: Store, options: ServeOptions, more: Callable[[Service], APIRouter] | None = None
) -> Iterator[Service]:
    """Runs the coordinator while the context is open. On exit, requests are answered first; long polls return at once.

    Args:
        store: the database.
        options: how to serve.
        more: returns further routes, such as the dashboard's.

    Raises:
        InvalidInput: a name is neither a host name nor an address, the webhook's URL is not allowed, or the operator's
            certificate cannot be used.
        InfrastructureFailed: a port is taken, or another `nas serve` runs on this home.
    """
    home = store.artifacts.parent
    home.mkdir(parents=True, exist_ok=True)
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_only_one(home))
        listening = stack.enter_context(contextlib.closing(listen_tcp(options.host, options.port)))
        certificates = Certificates(home, store.clock)
        url = web_url = url_of(listening, options.host, options.names)
        bound = str(listening.getsockname()[0])
        named = bound if is_wildcard(bound) else options.host  # "0" and "::0" are wildcards, too
        renewals = [Renewal(lambda: certificates.context(names_of(named, options.names)))]
        if options.own_certificate is not None:
            renewals.append(Renewal(options.own_certificate.context))
            web = stack.enter_context(contextlib.closing(listen_tcp(options.host, options.web_port)))
            host = options.own_certificate.host()
            web_url = url_of(web, options.host, [host] if host else options.names)
        hook = Webhook(store, options.webhook, home, web_url) if options.webhook else contextlib.nullcontext()
        # Opening the farm extends every lease to its full time before the first agent can connect.
        farm = stack.enter_context(open_farm(store, serves_others=True))
        snapshots = stack.enter_context(Snapshots(store))
        studies = SubmittedStudies(store, home, LaunchProcess(store, home), at_once=options.studies)
        service = Service(store, farm, home, certificates, url, web_url, studies, snapshots)
        health = HealthKeeper(store, farm.notifier.notify, AnyDevice(store, farm.runners, home / "work").plan)
        servers = [Server(make_service_app(service, more), listening, renewals[0].context)]
        if options.own_certificate is not None:
            servers.append(Server(make_service_app(service, more, for_agents=False), web, renewals[1].context))
        for running in (studies, *servers, *renewals, health, hook):
            stack.enter_context(running)
        address = Address(url=url, ca_sha256=certificates.ca_sha256, web_url=web_url)
        write_durably(home / ADDRESS_FILE, address.model_dump_json().encode())
        stack.callback(farm.notifier.close)
        yield service


def make_service_app(
    service: Service, more: Callable[[Service], APIRouter] | None = None, *, for_agents: bool = True
) -> FastAPI:
    """Returns the application of `nas serve`. A new API is a router and one line here.

    Args:
        service: the coordinator.
        more: returns further routes.
        for_agents: with the agents' API; without it an agent's secret that is revoked here is accepted for
            `SecretAccess.FRESH_S` elsewhere.
    """
    store, farm = service.store, service.farm
    access = SecretAccess(store)
    app = web_app()
    app.add_middleware(RequestLog)
    app.include_router(probes_router(store, lambda: farm.notifier.closed))
    if for_agents:
        app.include_router(enrolment.router(store, service.home, service.certificates, access.forget))
        app.include_router(agent_api.router(store, farm.find_file, farm.notifier, farm.runners.signed, access))
    app.include_router(
        users_router(store, service.studies, access.forget, lambda: farm.notifier.closed, service.snapshots)
    )
    if more is not None:
        app.router.routes += more(service).routes
    return app


def users_router(
    store: Store,
    submitted: SubmittedStudies,
    revoked: Callable[[], None],
    closing: Callable[[], bool],
    snapshots: Snapshots,
) -> APIRouter:
    """Returns the operations, for an application of `nas.infra.web.server.web_app`.

    Args:
        store: the database.
        submitted: runs the studies that are submitted.
        revoked: called after an agent's secret was revoked.
        closing: whether the coordinator is about to stop, and streams with it.
        snapshots: of the studies.
    """
    access, streams = TokenAccess(store), Streams(closing)
    whole = APIRouter()
    whole.include_router(_metrics_router(store, access))
    for part in (
        _server_router(store, access),
        devices_router(store, access, submitted),
        device_events_router(store, access, streams),
        agents_router(store, access, revoked),
        jobs_router(store, access),
        studies_router(store, submitted, access, streams, snapshots),
        estimates_router(store, access),
    ):
        whole.include_router(part, responses=documented(401, 403, 422, 503))
    return whole


def last_address(home: Path) -> Address | None:
    """Returns where `nas serve` listens, or listened last; None if it never ran."""
    try:
        return Address.model_validate_json((home / ADDRESS_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _server_router(store: Store, access: Access) -> APIRouter:
    router = APIRouter(tags=["server"], route_class=guarded(access))
    read = require(Role.READ)

    @router.get("/v1/server", summary="Show the coordinator and the caller's rights")
    def show_server(token: ApiToken = read) -> ServerView:
        authority = agents.authority(store)
        return ServerView(version=version("hilnas"), authority=authority, token=token.name, role=token.role)

    return router


def _metrics_router(store: Store, access: Access) -> APIRouter:
    router = APIRouter(tags=["server"], route_class=guarded(access))

    @router.get(
        "/metrics",
        summary="Metrics in Prometheus' text format",
        dependencies=[require(Role.READ)],
        response_class=Response,
        responses=_METRICS,
    )
    def show_metrics() -> Response:
        return Response(metrics.render(store), media_type=metrics.CONTENT_TYPE)

    return router


LEAST_FREE_BYTES = 100_000_000
"""Free space below which the coordinator is not ready."""


def probes_router(store: Store, closing: Callable[[], bool]) -> APIRouter:
    """Returns what load balancers and Kubernetes ask without a token: whether to restart, and whether to send requests.

    Args:
        store: the database, which readiness reads.
        closing: whether the coordinator is about to stop.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/healthz")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    def ready() -> JSONResponse:
        problems = list(_problems(store, closing))
        body = {"status": "not ready" if problems else "ready", "problems": problems}
        return JSONResponse(body, 503 if problems else 200)

    return router


def _problems(store: Store, closing: Callable[[], bool]) -> Iterator[str]:
    """Yields why requests would fail; no path and no message, as anybody may read it."""
    if closing():
        yield "stopping"
    try:
        agents.authority(store)
    except NasError:
        yield "database"
    try:
        free = shutil.disk_usage(store.artifacts.parent).free
    except OSError:
        free = 0
    if free < LEAST_FREE_BYTES:
        yield "disk"


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    with (home / "serve.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            address = last_address(home)
            raise InfrastructureFailed(f"'nas serve' runs already{f' at {address.url}' if address else ''}") from None
        yield
