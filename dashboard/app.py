"""The dashboard: pages over the database, for an application of `nas.infra.web.server.web_app`."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import Annotated, NamedTuple

from fastapi import APIRouter, HTTPException, Query
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.core.errors import UnknownName
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.off_loop import off_loop
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.submissions import SubmittedStudies
from nas.serve.dashboard.access import (
    SESSION_S,
    AccessRules,
    PageAccess,
    Sessions,
    is_local_path,
    read_form,
    require_same_origin,
)
from nas.serve.dashboard.candidate_page import candidate_router
from nas.serve.dashboard.devices_page import devices_router
from nas.serve.dashboard.families_page import families_router
from nas.serve.dashboard.launch_page import launch_router
from nas.serve.dashboard.pages import GZIPPED, LEAST_COMPRESSED, LEVEL, page, page_route, takes_gzip
from nas.serve.dashboard.study_page import studies_router, study_actions_router, study_router

_START = "/studies"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


def dashboard_router(
    store: Store, rules: AccessRules, submitted: SubmittedStudies | None = None, snapshots: Snapshots | None = None
) -> APIRouter:
    """Returns all pages. A new page is a router and one line here.

    Routes are added as they are, here and to the application: `include_router` would analyse each endpoint twice again.

    Args:
        store: the database.
        rules: for access.
        submitted: runs launched studies; None if nobody may act, as `rules` must then say.
        snapshots: of the studies; None: new ones.
    """
    access, snapshots = PageAccess(rules, Sessions(store)), Snapshots(store) if snapshots is None else snapshots
    whole = APIRouter()
    for part in (
        assets_router(access),
        login_router(access),
        studies_router(store, snapshots, access, submitted),
        candidate_router(store, snapshots, access),
        devices_router(store, access, submitted),
        families_router(access),
        study_router(store, snapshots, access, submitted),
    ):
        whole.routes += part.routes
    if submitted is not None:
        whole.routes += launch_router(store, submitted, access).routes
        whole.routes += study_actions_router(submitted, access).routes
    whole.routes += not_found_router(access).routes  # last, for all other paths
    return whole


def login_router(access: PageAccess) -> APIRouter:
    """Returns the pages to log in with an API token, and the action that logs out."""
    router = APIRouter(route_class=page_route(access, public=True), include_in_schema=False)
    rules, sessions = access.rules, access.sessions

    @router.get("/login")
    def show_login(request: Request, next: Annotated[str, Query(max_length=2000)] = _START) -> Response:
        return page("login.html", request, next=next, problem=None)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        require_same_origin(request)
        form = await read_form(request)
        goal = form.get("next", _START)
        id = await off_loop(sessions.open, form.get("token", "").strip())
        if id is None:
            problem = "That is not a valid API token; 'nas token create NAME' makes one."
            return page("login.html", request, 403, next=goal, problem=problem)
        response = RedirectResponse(goal if is_local_path(goal) else _START, 303)
        response.set_cookie(
            rules.cookie, id, max_age=int(SESSION_S), httponly=True, secure=rules.secure, samesite="strict"
        )
        return response

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        require_same_origin(request)
        form = await read_form(request)
        if request.state.visitor is not None:
            access.require_action(request.state.visitor, Role.READ, request, form)
            sessions.close(request.cookies.get(rules.cookie, ""))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(rules.cookie, httponly=True, secure=rules.secure, samesite="strict")
        return response

    return router


class Asset(NamedTuple):
    """A script, style sheet or picture, as it is sent."""

    content: bytes
    compressed: bytes | None
    """With gzip; None for a small one."""
    tag: str
    type: str


def assets_router(access: PageAccess) -> APIRouter:
    """Returns scripts and style sheets, own and vendored; the same for everybody, because the login page needs them."""
    router = APIRouter(route_class=page_route(access, public=True, anonymous=True), include_in_schema=False)

    @router.get("/assets/{name:path}")
    async def show_asset(request: Request, name: str) -> Response:
        asset = _assets().get(name)
        if asset is None:
            raise UnknownName("asset", name[:64], _assets())
        # Revalidated each time, and answered with 304 if unchanged: a new version is seen at once.
        headers = {"ETag": asset.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == asset.tag:
            return Response(status_code=304, headers=headers)
        if asset.compressed is not None and takes_gzip(request):
            return Response(asset.compressed, headers=headers | GZIPPED, media_type=asset.type)
        return Response(asset.content, headers=headers, media_type=asset.type)

    return router


@cache
def _assets() -> dict[str, Asset]:
    """Returns name -> asset of the files in the folder, read and compressed once; no path leads to others."""
    folder, assets = files("nas.serve.dashboard") / "assets", {}
    for file in folder.iterdir():
        if file.name.endswith(tuple(_TYPES)):
            content = file.read_bytes()
            compressed = gzip.compress(content, LEVEL, mtime=0) if len(content) >= LEAST_COMPRESSED else None
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[file.name] = Asset(content, compressed, tag, _TYPES[file.name[file.name.rindex(".") :]])
    return assets


def not_found_router(access: PageAccess) -> APIRouter:
    """Returns the route that answers all other paths, except those of the API, with an error page."""
    router = APIRouter(route_class=page_route(access, public=True), include_in_schema=False)

    @router.get("/{path:outside_api}")
    def show_nothing(path: str) -> Response:
        raise HTTPException(404, f"there is no page /{path[:64]}")

    return router


class _OutsideApi(Convertor[str]):
    """A path that is not the API's, which answers itself; without a slash at its end, which is redirected."""

    regex = "(?!v1(?:/|$)|metrics$).*[^/]"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("outside_api", _OutsideApi())
