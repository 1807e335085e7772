"""The list of families, and the page of one family with its members, comparisons and files."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.requests import Request
from starlette.responses import Response

from nas.serve.dashboard.access import PageAccess
from nas.serve.dashboard.pages import answer, page_route
from nas.serve.views.family import families_view, family_page, kind_of, member_file


def families_router(access: PageAccess) -> APIRouter:
    """Returns the pages, each with its JSON twin, and the files that members' records list."""
    router = APIRouter(prefix="/families", route_class=page_route(access), include_in_schema=False)

    @router.get("")
    @router.get(".json")
    def list_families(request: Request) -> Response:
        return answer("families.html", request, families_view())

    # The last decorator is the first route: '{name}' would take 'NAME.json', too.
    @router.get("/{name}")
    @router.get("/{name}.json")
    def show_family(request: Request, name: str) -> Response:
        return answer("family.html", request, family_page(name), kind_of=kind_of)

    @router.get("/{name}/{size}/files/{path:path}")
    def fetch_file(name: str, size: str, path: str) -> Response:
        file, record = member_file(name, size, path)
        return FileResponse(
            file,
            filename=f"{name}-{size}-{file.name}",
            media_type="application/octet-stream",
            headers={"ETag": f'"{record.sha256}"'},
            stat_result=file.stat(),
        )

    return router
