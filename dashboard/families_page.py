"""The families: all of them, each with its members, comparisons and files."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.requests import Request
from starlette.responses import Response

from nas.core.units import show_count
from nas.dashboard import family_pictures
from nas.dashboard.access import PageAccess
from nas.dashboard.pages import answer, page_route
from nas.dashboard.pictures.scale import shown
from nas.dashboard.pictures.strip import show_bytes
from nas.service.family_pages import families_view, family_page, kind_of, member_file

SHOWN: dict[str, Any] = {
    "count": show_count,
    "bytes": show_bytes,
    "shown": shown,
    "pictures": family_pictures,
    "kind_of": kind_of,
}
"""What the templates call."""


def families_router(access: PageAccess) -> APIRouter:
    """The pages, each with its JSON twin, and the files that members' records list; nothing here changes anything."""
    router = APIRouter(prefix="/families", route_class=page_route(access), include_in_schema=False)

    @router.get("")
    @router.get(".json")
    def list_families(request: Request) -> Response:
        return answer("families.html", request, families_view(), **SHOWN)

    # The last decorator is the first route: '{name}' would take 'NAME.json', too.
    @router.get("/{name}")
    @router.get("/{name}.json")
    def show_family(request: Request, name: str) -> Response:
        return answer("family.html", request, family_page(name), **SHOWN)

    @router.get("/{name}/{size}/files/{path:path}")
    def fetch_file(name: str, size: str, path: str) -> Response:
        found, record = member_file(name, size, path)
        return FileResponse(
            found,
            filename=f"{name}-{size}-{found.name}",
            media_type="application/octet-stream",
            headers={"ETag": f'"{record.sha256}"'},
            stat_result=found.stat(),
        )

    return router
