"""The list of devices, the page of one device with its drift and history, and the actions on it."""

from __future__ import annotations

import typing

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from nas.core.errors import InvalidInput
from nas.core.units import parse_duration
from nas.core.wire import DeviceId
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.serve.api.devices import (
    After,
    DeviceOrder,
    LabelRequest,
    Reason,
    ReserveRequest,
    device_detail,
    label_device,
    page_of_devices,
    reserve_device,
    retire_device,
    steer_device,
)
from nas.serve.api.submissions import SubmittedStudies
from nas.serve.dashboard.access import Form, PageAccess, back_from, valid_fields
from nas.serve.dashboard.pages import answer, page_route

PAGE = 50
"""Devices per page."""
_HISTORY = 100
"""Jobs and events of a device."""
_RUNS = 300
"""Reference runs of a build."""


def devices_router(store: Store, access: PageAccess, submitted: SubmittedStudies | None = None) -> APIRouter:
    """Returns the pages, each with its JSON twin, and an action for each order of the users' API."""
    router = APIRouter(prefix="/devices", route_class=page_route(access), include_in_schema=False)
    operate, administer = access.posted(Role.OPERATE), access.posted(Role.ADMIN)

    @router.get("")
    @router.get(".json")
    def list_devices(request: Request, after: After = "") -> Response:
        return answer("devices.html", request, page_of_devices(store, after=after, limit=PAGE, submitted=submitted))

    # The last decorator is the first route: '{id}' would take 'box.json', too.
    @router.get("/{id}")
    @router.get("/{id}.json")
    def show_device(request: Request, id: DeviceId) -> Response:
        view = device_detail(store, id, history=_HISTORY, runs=_RUNS, submitted=submitted)
        return answer("device.html", request, view, now=store.now())

    def steer(order: DeviceOrder) -> None:
        @router.post(f"/{{id}}/{order}")
        def give(id: DeviceId, form: Form = operate) -> Response:
            steer_device(store, id, order, _reason(form))
            return back_from(form, f"/devices/{id}")

    for order in typing.get_args(DeviceOrder):
        steer(order)

    @router.post("/{id}/label")
    def label(id: DeviceId, form: Form = operate) -> Response:
        label_device(store, id, _labels(form))
        return back_from(form, f"/devices/{id}")

    @router.post("/{id}/reserve")
    def reserve(request: Request, id: DeviceId, form: Form = operate) -> Response:
        reserve_device(store, id, _reservation(form), request.state.visitor.name or "a visitor")
        return back_from(form, f"/devices/{id}")

    @router.post("/{id}/remove")
    def remove_device(id: DeviceId, form: Form = administer) -> Response:
        retire_device(store, id)
        return back_from(form, f"/devices/{id}")

    return router


def _labels(form: Form) -> LabelRequest:
    tags = form.get("tags")
    with valid_fields():
        return LabelRequest(name=form.get("name"), note=form.get("note"), tags=None if tags is None else tags.split())


def _reservation(form: Form) -> ReserveRequest:
    """Returns the reservation of a form; without a duration it ends."""
    duration = form.get("duration", "").strip()
    with valid_fields(for_s="duration"):
        return ReserveRequest(
            for_s=parse_duration(duration) if duration else 0.0,
            reason=form.get("reason", ""),
            study=form.get("study", "").strip() or None,
        )


def _reason(form: Form) -> str:
    try:
        return Reason(reason=form.get("reason", "").strip()).reason
    except ValidationError as error:
        problem = f"at most 500 characters, on one line: {error.errors()[0]['msg']}"
        raise InvalidInput(problem, where="reason") from None
