"""The page of one study with its JSON twin, and what can be taken away from there."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nas.dashboard import study_pictures
from nas.dashboard.access import PageAccess
from nas.dashboard.pages import answer, page, page_route, part
from nas.dashboard.pictures.scale import shown
from nas.dashboard.pictures.sparkline import sparkline
from nas.dashboard.pictures.strip import hue
from nas.dashboard.shared_parts import SharedParts
from nas.service.api_models import EventId
from nas.service.api_studies_models import StudyName
from nas.service.comparison import FEWEST, MOST
from nas.service.live_points import points_json
from nas.service.live_studies import LiveStudies
from nas.service.study_cloud import first_panel
from nas.service.study_models import StudyView
from nas.service.study_tables import front_file, trials_csv
from nas.service.study_view import StudyViews
from nas.store.store import Store

AxisKeys = Annotated[str, Query(max_length=4000)]

SHOWN: dict[str, Any] = {
    "shown": shown,
    "hue": hue,
    "sparkline": sparkline,
    "pictures": study_pictures,
    "fewest": FEWEST,
    "most": MOST,
}
"""What the template calls."""


def study_router(store: Store, live: LiveStudies, access: PageAccess) -> APIRouter:
    """The page; nothing here changes anything.

    Args:
        store: the database.
        live: the studies in memory.
        access: tells visitors apart.
    """
    router = APIRouter(prefix="/studies/{name}", route_class=page_route(access), include_in_schema=False)
    views, parts = StudyViews(store, live), SharedParts()

    def shared(template: str, view: StudyView) -> Markup:
        # The queue is another object in each view that was found anew, and the same in its copies.
        return parts.part((view.name, template), view.queue, lambda: part(template, view=view, **SHOWN))

    def first(view: StudyView) -> Markup:
        def render() -> Markup:
            return study_pictures.panel(view, first_panel(live.get(view.name), view.page))

        return parts.part((view.name, view.page.model_dump_json(exclude={"pick"})), view.queue, render)

    @router.get("/points")
    def show_points(name: StudyName, since: EventId = 0, axes: AxisKeys = "") -> Response:
        keys = [key for key in axes.split(",") if key]
        return Response(points_json(live.get(name), since, keys), media_type="application/json")

    @router.get("/trials.csv")
    def export_trials(name: StudyName) -> Response:
        lines = trials_csv(store, live.get(name))
        return StreamingResponse(lines, headers=_download(f"{name}-trials.csv"), media_type="text/csv; charset=utf-8")

    @router.get("/front.json")
    def export_front(name: StudyName) -> Response:
        content = front_file(live.get(name)).model_dump_json()
        return Response(content, headers=_download(f"{name}-front.json"), media_type="application/json")

    @router.get("/now")
    def show_now(request: Request, name: StudyName) -> Response:
        return page("study_live.html", request, view=views.view(name, {}, whole=False), shared=shared, **SHOWN)

    @router.get("/blocks")
    def show_blocks(request: Request, name: StudyName) -> Response:
        return page("study_blocks.html", request, view=views.view(name, {}, whole=False), **SHOWN)

    # The last decorator is the first route: '{name}' would take 'NAME.json', too.
    @router.get("")
    @router.get(".json")
    def show_study(request: Request, name: StudyName) -> Response:
        view = views.view(name, request.query_params, whole=request.url.path.endswith(".json"))
        return answer("study.html", request, view, shared=shared, first=first, **SHOWN)

    return router


def _download(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
