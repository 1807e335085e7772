"""Pages of one candidate and of a comparison of several, each with its JSON twin."""

from __future__ import annotations

from typing import Annotated

import anyio
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from nas.analysis.snapshot import Snapshots
from nas.api.types import StudyName
from nas.dashboard.access import PageAccess
from nas.dashboard.pages import answer, page_route
from nas.store.store import Store
from nas.views.candidate import MOST, Forecasts, candidate_views, comparison_view
from nas.web.off_loop import off_loop

_LAST = 2**31 - 1
Number = Annotated[int, Path(ge=0, le=_LAST)]
Numbers = Annotated[list[Annotated[int, Query(ge=0, le=_LAST)]], Query(alias="trial", max_length=MOST)]
_NONE: list[int] = []


def candidate_router(store: Store, snapshots: Snapshots, access: PageAccess) -> APIRouter:
    """Returns the pages.

    Args:
        store: the database.
        snapshots: of its studies.
        access: authenticates visitors.
    """
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    forecasts, fitting = Forecasts(snapshots), anyio.Lock()

    # The last decorator is the first route: '{number}' would take '3.json', too.
    @router.get("/trials/{number}")
    @router.get("/trials/{number}.json")
    def show_candidate(request: Request, name: StudyName, number: Number) -> Response:
        return answer("candidate.html", request, candidate_views(store, snapshots.get(name), [number])[0])

    @router.get("/trials/{number}/forecasts")
    @router.get("/trials/{number}/forecasts.json")
    async def show_forecasts(request: Request, name: StudyName, number: Number) -> Response:
        # Waiting for a fit must not take one of the few threads that serve all requests.
        async with fitting:
            view = await off_loop(forecasts.of_trial, name, number)
        return answer("forecasts.html", request, view)

    @router.get("/compare")
    @router.get("/compare.json")
    def show_comparison(request: Request, name: StudyName, numbers: Numbers = _NONE) -> Response:
        return answer("compare.html", request, comparison_view(store, snapshots.get(name), numbers))

    return router
