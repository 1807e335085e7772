"""The list of studies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.dashboard.access import PageAccess
from nas.dashboard.pages import answer, page_route
from nas.dashboard.pictures.sparkline import sparkline
from nas.service.live_studies import LiveStudies
from nas.service.studies_view import studies_view
from nas.service.submitted import SubmittedStudies
from nas.store.store import Store

StudyId = Annotated[int | None, Query(ge=1, le=(1 << 53) - 1)]


def studies_router(
    store: Store, live: LiveStudies, access: PageAccess, submitted: SubmittedStudies | None = None
) -> APIRouter:  # fmt: skip
    """The pages about all studies, also about those that were `submitted` and have not begun."""
    router = APIRouter(route_class=page_route(access), include_in_schema=False)

    @router.get("/")
    def show_start() -> Response:
        return RedirectResponse("/studies", 307)

    @router.get("/studies")
    @router.get("/studies.json")
    def list_studies(request: Request, before: StudyId = None) -> Response:
        return answer("studies.html", request, studies_view(store, live, before, submitted), sparkline=sparkline)

    return router
