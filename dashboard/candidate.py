"""Pages of one candidate and of several side by side, each with its JSON twin."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Path, Query
from fastapi.templating import Jinja2Templates
from starlette.requests import Request
from starlette.responses import Response

from nas.core.units import show_count
from nas.dashboard import candidate_pictures
from nas.dashboard.pictures.scale import shown
from nas.dashboard.pictures.strip import hue, show_bytes
from nas.service.api_errors import documented
from nas.service.api_studies_models import StudyName
from nas.service.candidate_models import CandidateView
from nas.service.candidate_view import candidate_views
from nas.service.comparison import MOST, ComparisonView, comparison_view
from nas.service.forecasts import Forecasts, ForecastsView
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


def candidate_router(store: Store, templates: Jinja2Templates, access: Any) -> APIRouter:
    """The pages; none of them changes anything.

    Args:
        store: the database.
        templates: finds `base.html`, `candidate.html`, `compare.html` and `forecasts.html`.
        access: a dependency that lets readers in.
    """
    router = APIRouter(prefix="/studies/{name}", dependencies=[access], responses=documented(404))
    forecasts, fitting = Forecasts(store), anyio.Lock()

    async def foretold(name: str, number: int) -> ForecastsView:
        # Who waits for a fit waits here, and not in one of the few threads that answer everybody.
        async with fitting:
            return await off_loop(forecasts.of_trial, name, number)

    def page(request: Request, template: str, view: Any) -> Response:
        return templates.TemplateResponse(request, template, {"view": view, **SHOWN})

    # JSON first: '{number}' would take '3.json' too.
    @router.get("/trials/{number}.json", summary="Show a candidate")
    def candidate_json(name: StudyName, number: Number) -> CandidateView:
        return candidate_views(store, name, [number])[0]

    @router.get("/trials/{number}", include_in_schema=False)
    def candidate(request: Request, name: StudyName, number: Number) -> Response:
        return page(request, "candidate.html", candidate_views(store, name, [number])[0])

    @router.get("/trials/{number}/forecasts.json", summary="Show what a candidate's figures were foretold to be")
    async def forecasts_json(name: StudyName, number: Number) -> ForecastsView:
        return await foretold(name, number)

    @router.get("/trials/{number}/forecasts", include_in_schema=False)
    async def forecasts_part(request: Request, name: StudyName, number: Number) -> Response:
        return page(request, "forecasts.html", await foretold(name, number))

    @router.get("/compare.json", summary="Show several candidates side by side")
    def compare_json(name: StudyName, numbers: Numbers) -> ComparisonView:
        return comparison_view(store, name, numbers)

    @router.get("/compare", include_in_schema=False)
    def compare(request: Request, name: StudyName, numbers: Numbers) -> Response:
        return page(request, "compare.html", comparison_view(store, name, numbers))

    return router
