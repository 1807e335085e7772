"""Pages of one candidate and of a comparison of several, each with its JSON twin."""

from __future__ import annotations

from typing import Annotated

import anyio
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.off_loop import off_loop
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.studies import MarkRequest, mark_trial
from nas.serve.api.types import StudyName, TrialNumber
from nas.serve.dashboard.access import Form, PageAccess, back_from, valid_fields
from nas.serve.dashboard.pages import answer, page, page_route
from nas.serve.views.candidate import Forecasts, candidate_views, card_view, comparison_view

_COMPARED = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[0-9]{1,9}$"
"""NUMBER, or STUDY/NUMBER."""
Compared = Annotated[list[Annotated[str, Query(pattern=_COMPARED)]], Query(alias="trial")]
_NONE: list[str] = []


def candidate_router(store: Store, snapshots: Snapshots, access: PageAccess) -> APIRouter:
    """Returns the pages, and the action that marks a trial.

    Args:
        store: the database.
        snapshots: of its studies.
        access: authenticates visitors.
    """
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    operate = access.posted(Role.OPERATE)
    forecasts, fitting = Forecasts(snapshots), anyio.Lock()

    # The last decorator is the first route: '{number}' would take '3.json', too.
    @router.get("/trials/{number}")
    @router.get("/trials/{number}.json")
    def show_candidate(request: Request, name: StudyName, number: TrialNumber) -> Response:
        return answer("candidate.html", request, candidate_views(store, snapshots.get(name), [number])[0])

    @router.get("/trials/{number}/card")
    def show_card(request: Request, name: StudyName, number: TrialNumber) -> Response:
        return page("card.html", request, view=card_view(snapshots.get(name), number))

    @router.get("/trials/{number}/forecasts")
    @router.get("/trials/{number}/forecasts.json")
    async def show_forecasts(request: Request, name: StudyName, number: TrialNumber) -> Response:
        # Waiting for a fit must not take one of the few threads that serve all requests.
        async with fitting:
            view = await off_loop(forecasts.of_trial, name, number)
        return answer("forecasts.html", request, view)

    @router.post("/trials/{number}/mark")
    def mark(name: StudyName, number: TrialNumber, form: Form = operate) -> Response:
        with valid_fields():
            request = MarkRequest(star="star" in form, tags=form.get("tags", "").split(), note=form.get("note", ""))
        mark_trial(store, name, number, request)
        return back_from(form, f"/studies/{name}/trials/{number}")

    @router.get("/compare")
    @router.get("/compare.json")
    def show_comparison(request: Request, name: StudyName, compared: Compared = _NONE) -> Response:
        named = [name.rpartition("/") for name in compared]
        numbers = [int(number) for study, _, number in named if study in ("", name)]
        others = [(snapshots.get(study), int(number)) for study, _, number in named if study not in ("", name)]
        view = comparison_view(store, snapshots.get(name), numbers, others)
        return answer("compare.html", request, view)

    return router
