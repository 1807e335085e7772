"""The list of studies, the page of one study with its downloads, and the actions on a study."""

from __future__ import annotations

import typing
from typing import Annotated

import anyio
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from nas.infra.store.listings import StudyFilter
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.off_loop import off_loop
from nas.search.analysis.report import axes_table, csv_parts
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.submissions import Order, SubmittedStudies
from nas.serve.api.types import EventId, StudyName
from nas.serve.dashboard.access import Form, PageAccess, back_from
from nas.serve.dashboard.pages import answer, page, page_route
from nas.serve.views.effects import MOST_FITTED_NOW, effects_view
from nas.serve.views.log import log_view
from nas.serve.views.study import front_file, points_json, studies_view, study_view
from nas.serve.views.trials import ROWS, trials_view

StudyId = Annotated[int | None, Query(ge=1, le=(1 << 53) - 1)]
Word = Annotated[str, Query(max_length=64)]
AxisKeys = Annotated[str, Query(max_length=4000)]


def studies_router(
    store: Store, snapshots: Snapshots, access: PageAccess, submitted: SubmittedStudies | None = None
) -> APIRouter:
    """Returns the list of all studies, including submitted ones that have not begun."""
    router = APIRouter(route_class=page_route(access), include_in_schema=False)

    @router.get("/")
    def show_start() -> Response:
        return RedirectResponse("/studies", 307)

    @router.get("/studies")
    @router.get("/studies.json")
    def list_studies(
        request: Request, before: StudyId = None, text: Word = "", space: Word = "", state: Word = ""
    ) -> Response:
        filter = StudyFilter(text.strip(), space.strip(), state.strip())
        return answer("studies.html", request, studies_view(store, snapshots, before, submitted, filter))

    return router


def study_router(
    store: Store, snapshots: Snapshots, access: PageAccess, submitted: SubmittedStudies | None = None
) -> APIRouter:
    """Returns the page of one study, its JSON twin, its data and its downloads.

    Args:
        store: the database.
        snapshots: of its studies.
        access: authenticates visitors.
        submitted: studies that the coordinator can resume, and whose output the log shows; None: no study.
    """
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    fitting = anyio.Lock()

    def is_submitted(name: str) -> bool:
        return submitted is not None and submitted.find_readable(name) is not None

    @router.get("/points")
    def show_points(name: StudyName, since: EventId = 0, axes: AxisKeys = "") -> Response:
        keys = [key for key in axes.split(",") if key]
        return Response(points_json(snapshots.get(name), since, keys), media_type="application/json")

    @router.get("/trials.csv")
    def export_trials(name: StudyName) -> Response:
        parts = csv_parts(*axes_table(snapshots.get(name)))
        return StreamingResponse(parts, headers=_download(f"{name}-trials.csv"), media_type="text/csv; charset=utf-8")

    @router.get("/trials")
    @router.get("/trials.json")
    def show_trials(request: Request, name: StudyName) -> Response:
        return answer("trials.html", request, trials_view(snapshots.get(name), request.query_params), rows=ROWS)

    @router.get("/log")
    @router.get("/log.json")
    def show_log(request: Request, name: StudyName) -> Response:
        printed = submitted.log_tail(name) if submitted is not None else None
        return answer("log.html", request, log_view(store, snapshots.get(name), printed))

    @router.get("/report")
    def export_report(name: StudyName) -> Response:
        from nas.serve.dashboard.study_report import study_report_html  # matplotlib takes a second to load

        content = study_report_html(store, snapshots.get(name))
        return Response(content, headers=_download(f"{name}-report.html"), media_type="text/html; charset=utf-8")

    @router.get("/front.json")
    def export_front(name: StudyName) -> Response:
        content = front_file(snapshots.get(name)).model_dump_json()
        return Response(content, headers=_download(f"{name}-front.json"), media_type="application/json")

    @router.get("/effects")
    @router.get("/effects/part")
    @router.get("/effects.json")
    async def show_effects(request: Request, name: StudyName) -> Response:
        # Waiting for a fit must not take one of the few threads that serve all requests.
        async with fitting:
            view = await off_loop(lambda: effects_view(store, snapshots.get(name), MOST_FITTED_NOW))
        part = request.url.path.endswith("/part")  # what the study's page loads into itself
        return answer("study_effects.html" if part else "effects.html", request, view, study=name)

    @router.get("/now")
    def show_now(request: Request, name: StudyName) -> Response:
        view = study_view(store, snapshots.get(name), {})
        return page("study_live.html", request, view=view, submitted=is_submitted(name))

    # The last decorator is the first route: '{name}' would take 'NAME.json', too.
    @router.get("")
    @router.get(".json")
    def show_study(request: Request, name: StudyName) -> Response:
        view = study_view(store, snapshots.get(name), request.query_params)
        return answer("study.html", request, view, submitted=is_submitted(name))

    return router


def study_actions_router(submitted: SubmittedStudies, access: PageAccess) -> APIRouter:
    """Returns an action for each order that the users' API has; `templates/study_actions.html` has their buttons."""
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    posted = access.posted(Role.OPERATE)

    def steer(order: Order) -> None:
        @router.post(f"/{order}")
        def give(name: StudyName, form: Form = posted) -> Response:
            submitted.steer(name, order)
            return back_from(form, f"/studies/{name}")

    for order in typing.get_args(Order):
        steer(order)

    return router


def _download(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
