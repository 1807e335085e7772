"""Logging in with an API token, and out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.dashboard.access import PageAccess, require_same_origin
from nas.dashboard.forms import read_form
from nas.dashboard.pages import is_local_path, page, page_route
from nas.dashboard.sessions import LASTS_S
from nas.service.off_loop import off_loop
from nas.store.rows import Role

_NEXT = "/studies"


def login_router(access: PageAccess) -> APIRouter:
    """The pages that strangers may see."""
    router = APIRouter(route_class=page_route(access, public=True), include_in_schema=False)
    rules, sessions = access.rules, access.sessions

    @router.get("/login")
    def show_login(request: Request, next: Annotated[str, Query(max_length=2000)] = _NEXT) -> Response:
        return page("login.html", request, next=next, problem=None)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        require_same_origin(request)
        form = await read_form(request)
        goal = form.get("next", _NEXT)
        secret = await off_loop(sessions.open, form.get("token", "").strip())
        if secret is None:
            problem = "That is no valid API token; 'nas token create NAME' makes one."
            return page("login.html", request, 403, next=goal, problem=problem)
        response = RedirectResponse(goal if is_local_path(goal) else _NEXT, 303)
        response.set_cookie(
            rules.cookie, secret, max_age=int(LASTS_S), httponly=True, secure=rules.secure, samesite="strict"
        )
        return response

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        form = await read_form(request)
        if request.state.visitor is not None:
            access.require_action(request.state.visitor, Role.READ, request, form)
            await off_loop(sessions.close, request.cookies.get(rules.cookie, ""))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(rules.cookie, httponly=True, secure=rules.secure, samesite="strict")
        return response

    return router
