"""The files that pages load: ours and vendored ones, in one folder, read once."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nas.core.errors import UnknownName
from nas.dashboard.access import PageAccess
from nas.dashboard.pages import page_route

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
# Asked for again each time, and answered with 304 where it is the same: a new version is seen at once.
_CACHED = "no-cache"


def assets_router(access: PageAccess) -> APIRouter:
    """The files, for everybody: the page to log in needs them, too."""
    router = APIRouter(route_class=page_route(access, public=True), include_in_schema=False)

    @router.get("/assets/{name:path}")
    def show_asset(request: Request, name: str) -> Response:
        content = _contents().get(name)
        if content is None:
            raise UnknownName("asset", name[:64], _contents())
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"ETag": tag, "Cache-Control": _CACHED}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[name[name.rindex(".") :]])

    return router


@cache
def _contents() -> dict[str, bytes]:
    """Name -> content. What is not in the folder cannot be asked for, whatever a path says."""
    folder = files("nas.dashboard") / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(tuple(_TYPES))}
