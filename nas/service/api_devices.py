"""The users' API: devices, agents and jobs."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from nas.core.protocol import AgentName, DeviceId
from nas.service import fleet, following
from nas.service.agent_access import Access, guarded
from nas.service.api_access import require
from nas.service.api_errors import documented
from nas.service.api_models import (
    AgentPage,
    AgentView,
    DeviceDetail,
    DeviceEventPage,
    DevicePage,
    DeviceView,
    EventId,
    JobPage,
    Limit,
    Reason,
    Wait,
)
from nas.service.api_studies_models import StudyName
from nas.service.following import Streams, next_page, wants_stream
from nas.service.off_loop import off_loop
from nas.store.rows import JobState, Role
from nas.store.store import Store

After = Annotated[str, Query(max_length=160, description="`next` of the page before")]

_SUMMARIES: dict[fleet.DeviceOrder, str] = {
    "drain": "Let a device finish its job and take no other",
    "resume": "End a drain",
    "quarantine": "Keep a device from all work",
    "release": "Take a device back from quarantine, bad health or removal",
    "check": "Have a device pass a health check anew",
}


def devices_router(store: Store, access: Access) -> APIRouter:
    """Looking at devices and steering them."""
    router = APIRouter(prefix="/v1/devices", tags=["devices"], route_class=guarded(access))
    read, operate, admin = (require(role) for role in (Role.READ, Role.OPERATE, Role.ADMIN))

    @router.get("", summary="List devices", dependencies=[read])
    def list_devices(after: After = "", limit: Limit = 100) -> DevicePage:
        return fleet.list_devices(store, after=after, limit=limit)

    @router.get("/{id}", summary="Show a device", dependencies=[read], responses=documented(404))
    def show_device(id: DeviceId) -> DeviceDetail:
        return fleet.show_device(store, id)

    def steer(order: fleet.DeviceOrder) -> None:
        @router.post(
            f"/{{id}}/{order}", summary=_SUMMARIES[order], operation_id=f"{order}_device", dependencies=[operate],
            responses=documented(404),
        )  # fmt: skip
        def give(id: DeviceId, why: Reason | None = None) -> DeviceView:
            return fleet.order(store, id, order, why.reason if why else "")

    for order in typing.get_args(fleet.DeviceOrder):
        steer(order)

    @router.post("/{id}/remove", summary="Retire a device", dependencies=[admin], responses=documented(404))
    def remove_device(id: DeviceId) -> DeviceView:
        return fleet.remove_device(store, id)

    return router


def device_events_router(store: Store, access: Access, streams: Streams) -> APIRouter:
    """Following what happens to devices."""
    router = APIRouter(prefix="/v1/device-events", tags=["devices"], route_class=guarded(access))

    @router.get(
        "", summary="Follow what happens to devices", dependencies=[require(Role.READ)],
        response_model=DeviceEventPage, responses=following.DOCUMENTED | documented(404, 429),
    )  # fmt: skip
    async def follow_devices(
        http: Request, device: DeviceId | None = None, after: EventId = 0, limit: Limit = 100, wait_s: Wait = 0.0
    ) -> DeviceEventPage | Response:
        async def look(after: int) -> DeviceEventPage:
            return await off_loop(fleet.device_events, store, after=after, limit=limit, device=device)

        if wants_stream(http):
            return await streams.open(http, look, after)
        return await next_page(look, after, wait_s)

    return router


def agents_router(store: Store, access: Access, revoked: Callable[[], None]) -> APIRouter:
    """Looking at agents and revoking them; `revoked` is called when one was."""
    router = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=guarded(access))

    @router.get("", summary="List agents", dependencies=[require(Role.READ)])
    def list_agents(after: After = "", limit: Limit = 100) -> AgentPage:
        return fleet.list_agents(store, after=after, limit=limit)

    @router.post(
        "/{name}/revoke", summary="Take an agent's secret away", dependencies=[require(Role.ADMIN)],
        responses=documented(404),
    )  # fmt: skip
    def revoke_agent(name: AgentName) -> AgentView:
        view = fleet.revoke_agent(store, name)
        revoked()
        return view

    return router


def jobs_router(store: Store, access: Access) -> APIRouter:
    """Looking at jobs."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=guarded(access))

    @router.get("", summary="List jobs, newest first", dependencies=[require(Role.READ)])
    def list_jobs(
        after: After | None = None,
        limit: Limit = 100,
        state: JobState | None = None,
        device: DeviceId | None = None,
        study: StudyName | None = None,
    ) -> JobPage:
        return fleet.list_jobs(store, after=after, limit=limit, state=state, device=device, study=study)

    return router
