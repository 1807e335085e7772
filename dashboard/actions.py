"""What visitors may have done from a page: forms that are posted, each guarded in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.dashboard.access import PageAccess
from nas.dashboard.forms import read_form
from nas.dashboard.pages import is_local_path
from nas.store.rows import Role

Form = Mapping[str, str]
"""The fields of a form, by name."""

_MAX_FORM = 1 << 20


def posted_by(access: PageAccess, needed: Role, most: int = _MAX_FORM) -> Any:
    """A dependency of an action's route: gives the posted form, after `PageAccess.require_action` let it pass.

    Args:
        access: tells visitors apart.
        needed: the role that the action takes.
        most: bytes of the form.
    """

    async def check(request: Request) -> Form:
        form = await read_form(request, most)
        access.require_action(request.state.visitor, needed, request, form)
        return form

    return Depends(check, use_cache=False)


def back_from(form: Form, otherwise: str) -> Response:
    """To the page that the form was on, which its field `next` names; else to that of the path `otherwise`."""
    goal = form.get("next", otherwise)
    return RedirectResponse(goal if is_local_path(goal) else otherwise, 303)
