"""The dashboard: pages over the database, for an application of `nas.service.web.web_app`."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

from nas.dashboard.access import AccessRules, PageAccess
from nas.dashboard.asset_files import assets_router
from nas.dashboard.candidate import candidate_router
from nas.dashboard.devices_page import devices_router
from nas.dashboard.families_page import families_router
from nas.dashboard.launch_page import launch_router
from nas.dashboard.login import login_router
from nas.dashboard.pages import page_route
from nas.dashboard.sessions import Sessions
from nas.dashboard.studies_page import studies_router
from nas.dashboard.study_actions import study_actions_router
from nas.dashboard.study_page import study_router
from nas.service.live_studies import LiveStudies
from nas.service.submitted import SubmittedStudies
from nas.store.store import Store


def dashboard_router(
    store: Store, rules: AccessRules, submitted: SubmittedStudies | None = None, live: LiveStudies | None = None
) -> APIRouter:  # fmt: skip
    """All pages. A new page is a router, and a line here.

    Args:
        store: what they show.
        rules: who may see them.
        submitted: runs the studies that people launch; None where nobody may act, as `rules` must say, too.
        live: the studies in memory; None: there are none yet.
    """
    access, live = PageAccess(rules, Sessions(store)), LiveStudies(store) if live is None else live
    whole = APIRouter()
    for part in (
        assets_router(access),
        login_router(access),
        studies_router(store, live, access, submitted),
        candidate_router(store, access),
        devices_router(store, access),
        families_router(access),
        study_router(store, live, access),
    ):
        whole.include_router(part)
    if submitted is not None:
        whole.include_router(launch_router(store, submitted, access))
        whole.include_router(study_actions_router(submitted, access))
    whole.include_router(_nowhere(access))  # the last, for paths that no other has
    return whole


def _nowhere(access: PageAccess) -> APIRouter:
    """Tells people in a page, and not in JSON, that there is none."""
    router = APIRouter(route_class=page_route(access), include_in_schema=False)

    @router.get("/studies/{rest:path}")
    def show_nothing(rest: str) -> Response:
        raise HTTPException(404, "there is no such page")

    return router
