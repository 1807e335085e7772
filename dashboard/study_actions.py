"""Telling studies to pause, go on and stop."""

from __future__ import annotations

import typing

from fastapi import APIRouter
from starlette.responses import Response

from nas.dashboard.access import PageAccess
from nas.dashboard.actions import Form, back_from, posted_by
from nas.dashboard.pages import page_route
from nas.service.api_studies_models import StudyName
from nas.service.submitted import Order, SubmittedStudies
from nas.store.rows import Role


def study_actions_router(submitted: SubmittedStudies, access: PageAccess) -> APIRouter:
    """An action for each order that the users' API has; `templates/study_actions.html` has their buttons."""
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    posted = posted_by(access, Role.OPERATE)

    def steer(order: Order) -> None:
        @router.post(f"/{order}")
        def tell(name: StudyName, form: Form = posted) -> Response:
            submitted.tell(name, order)
            return back_from(form, f"/studies/{name}")

    for order in typing.get_args(Order):
        steer(order)

    return router
