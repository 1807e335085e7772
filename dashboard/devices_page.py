"""The devices: all of them, each with its drift and history, and what operators may do to them."""

from __future__ import annotations

import typing

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from nas.core.errors import InvalidInput
from nas.core.protocol import DeviceId
from nas.dashboard.access import PageAccess
from nas.dashboard.actions import Form, back_from, posted_by
from nas.dashboard.pages import answer, page_route
from nas.dashboard.pictures.drift import drift_chart
from nas.service import fleet
from nas.service.api_devices import After
from nas.service.api_models import Reason
from nas.store.rows import Role
from nas.store.store import Store

PAGE = 50
"""Devices at once."""
_HISTORY, _RUNS = 100, 300


def devices_router(store: Store, access: PageAccess) -> APIRouter:
    """The pages, each with its JSON twin, and an action for each order that the users' API has."""
    router = APIRouter(prefix="/devices", route_class=page_route(access), include_in_schema=False)
    operate, administer = posted_by(access, Role.OPERATE), posted_by(access, Role.ADMIN)

    @router.get("")
    @router.get(".json")
    def list_devices(request: Request, after: After = "") -> Response:
        return answer("devices.html", request, fleet.list_devices(store, after=after, limit=PAGE))

    # The last decorator is the first route: '{id}' would take 'box.json', too.
    @router.get("/{id}")
    @router.get("/{id}.json")
    def show_device(request: Request, id: DeviceId) -> Response:
        view = fleet.show_device(store, id, history=_HISTORY, runs=_RUNS)
        return answer("device.html", request, view, now=store.now(), drift_chart=drift_chart)

    def steer(order: fleet.DeviceOrder) -> None:
        @router.post(f"/{{id}}/{order}")
        def give(id: DeviceId, form: Form = operate) -> Response:
            fleet.order(store, id, order, _reason(form))
            return back_from(form, f"/devices/{id}")

    for order in typing.get_args(fleet.DeviceOrder):
        steer(order)

    @router.post("/{id}/remove")
    def remove_device(id: DeviceId, form: Form = administer) -> Response:
        fleet.remove_device(store, id)
        return back_from(form, f"/devices/{id}")

    return router


def _reason(form: Form) -> str:
    try:
        return Reason(reason=form.get("reason", "").strip()).reason
    except ValidationError as error:
        problem = f"at most 500 characters, on one line: {error.errors()[0]['msg']}"
        raise InvalidInput(problem, where="reason") from None
