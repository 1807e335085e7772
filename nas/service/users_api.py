"""The users' API: what people, their scripts and Prometheus talk to. Every operation needs an API token.

    GET  /v1/server                              what this is, and what the token may do
    GET  /v1/devices /v1/devices/{id}            POST /v1/devices/{id}/{drain|resume|quarantine|release|check|remove}
    GET  /v1/device-events?device=ID&after=ID&wait_s=20
    GET  /v1/agents                              POST /v1/agents/{name}/revoke
    GET  /v1/jobs
    GET  /v1/studies /v1/studies/{name}          POST /v1/studies   POST /v1/studies/{name}/{pause|run|stop}
    GET  /v1/studies/{name}/events?after=ID&wait_s=20
    GET  /metrics

Logs of events are also streams, for who accepts `text/event-stream` (`nas.service.following`).

Reading needs the role `read`, steering `operate`, removing and revoking `admin`. Lists come in pages of at most
`MAX_PAGE` entries. Orders may be repeated; submitting a study again under its name gives the one that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nas.service import metrics
from nas.service.agent_access import Access, guarded
from nas.service.api_access import TokenAccess, require
from nas.service.api_devices import agents_router, device_events_router, devices_router, jobs_router
from nas.service.api_errors import documented
from nas.service.api_models import ServerView
from nas.service.api_studies import studies_router
from nas.service.exposition import CONTENT_TYPE
from nas.service.following import Streams
from nas.service.submitted import SubmittedStudies
from nas.store import identity
from nas.store.rows import ApiToken, Role
from nas.store.store import Store

_METRICS_EXAMPLE = '# TYPE hilnas_jobs gauge\nhilnas_jobs{state="queued"} 12.0\n'
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"example": _METRICS_EXAMPLE}}},
    **documented(401, 403),
}


def router(
    store: Store, submitted: SubmittedStudies, revoked: Callable[[], None], closing: Callable[[], bool]
) -> APIRouter:
    """The operations, for an application of `nas.service.web.web_app`.

    Args:
        store: where everything is.
        submitted: runs the studies that are submitted.
        revoked: called when an agent's secret was taken away.
        closing: whether the coordinator is about to end, and streams with it.
    """
    access, streams = TokenAccess(store), Streams(closing)
    whole = APIRouter()
    whole.include_router(_metrics_router(store, access))
    for part in (
        _server_router(store, access),
        devices_router(store, access),
        device_events_router(store, access, streams),
        agents_router(store, access, revoked),
        jobs_router(store, access),
        studies_router(store, submitted, access, streams),
    ):
        whole.include_router(part, responses=documented(401, 403, 422, 503))
    return whole


def _server_router(store: Store, access: Access) -> APIRouter:
    router = APIRouter(tags=["server"], route_class=guarded(access))
    read = require(Role.READ)

    @router.get("/v1/server", summary="Show the coordinator and the caller's rights")
    def show_server(token: ApiToken = read) -> ServerView:
        authority = identity.authority(store)
        return ServerView(version=version("hilnas"), authority=authority, token=token.name, role=token.role)

    return router


def _metrics_router(store: Store, access: Access) -> APIRouter:
    router = APIRouter(tags=["server"], route_class=guarded(access))

    @router.get(
        "/metrics", summary="Metrics in Prometheus' text format", dependencies=[require(Role.READ)],
        response_class=Response, responses=_METRICS,
    )  # fmt: skip
    def show_metrics() -> Response:
        return Response(metrics.render(store), media_type=CONTENT_TYPE)

    return router
