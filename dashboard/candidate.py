"""Pages of one candidate and of several side by side, each with its JSON twin."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from nas.core.units import show_count
from nas.dashboard import candidate_pictures
from nas.dashboard.access import PageAccess
from nas.dashboard.pages import answer, page_route
from nas.dashboard.pictures.scale import shown
from nas.dashboard.pictures.strip import hue, show_bytes
from nas.service.api_studies_models import StudyName
from nas.service.candidate_view import candidate_views
from nas.service.comparison import MOST, comparison_view
from nas.service.forecasts import Forecasts
from nas.service.off_loop import off_loop
from nas.store.store import Store

_LAST = 2**31 - 1
Number = Annotated[int, Path(ge=0, le=_LAST)]
Numbers = Annotated[list[Annotated[int, Query(ge=0, le=_LAST)]], Query(alias="trial", max_length=MOST)]

SHOWN: dict[str, Any] = {
    "count": show_count,
    "bytes": show_bytes,
    "shown": shown,
    "hue": hue,
    "pictures": candidate_pictures,
}
"""What the templates call."""


def candidate_router(store: Store, access: PageAccess) -> APIRouter:
    """The pages; none of them changes anything.

    Args:
        store: the database.
        access: tells visitors apart.
    """
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    forecasts, fitting = Forecasts(store), anyio.Lock()

    # The last decorator is the first route: '{number}' would take '3.json', too.
    @router.get("/trials/{number}")
    @router.get("/trials/{number}.json")
    def show_candidate(request: Request, name: StudyName, number: Number) -> Response:
        return answer("candidate.html", request, candidate_views(store, name, [number])[0], **SHOWN)

    @router.get("/trials/{number}/forecasts")
    @router.get("/trials/{number}/forecasts.json")
    async def show_forecasts(request: Request, name: StudyName, number: Number) -> Response:
        # Who waits for a fit waits here, and not in one of the few threads that answer everybody.
        async with fitting:
            view = await off_loop(forecasts.of_trial, name, number)
        return answer("forecasts.html", request, view, **SHOWN)

    @router.get("/compare")
    @router.get("/compare.json")
    def show_comparison(request: Request, name: StudyName, numbers: Numbers) -> Response:
        return answer("compare.html", request, comparison_view(store, name, numbers), **SHOWN)

    return router
