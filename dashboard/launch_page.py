"""Launching studies on the coordinator, and what became of those that have not begun."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.core.errors import NasError, UnknownName
from nas.dashboard.access import PageAccess
from nas.dashboard.actions import Form, posted_by
from nas.dashboard.launch_form import LaunchForm, Problem, problems_of
from nas.dashboard.pages import answer, page, page_route
from nas.search_spaces import list_spaces, space_text
from nas.service.api_errors import answer_to
from nas.service.api_studies_models import StudyName, SubmissionView
from nas.service.device_names import LOCAL
from nas.service.submitted import SubmittedStudies
from nas.store import devices
from nas.store.rows import Role
from nas.store.store import Store

_MAX_FORM = 4 << 20
"""Bytes of the form: room for the longest space, where it is not all in characters of many bytes."""


class LaunchView(BaseModel):
    """What a study can be made of."""

    spaces: dict[str, str] = Field(description="packaged search spaces: name -> what it is for")
    devices: list[str] = Field(description="what a space can name as its devices")
    form: LaunchForm
    problems: list[Problem]


class SubmittedView(BaseModel):
    """A submitted study."""

    study: str
    space: str
    begun: bool = Field(description="whether it has a page of its own")
    submission: SubmissionView


def launch_router(store: Store, submitted: SubmittedStudies, access: PageAccess) -> APIRouter:
    """The form, its action, and the page of a submitted study, which stands in until the study has one.

    Args:
        store: knows the devices.
        submitted: takes the studies.
        access: tells visitors apart.
    """
    router = APIRouter(route_class=page_route(access), include_in_schema=False)
    posted = posted_by(access, Role.OPERATE, _MAX_FORM)

    def view(form: LaunchForm, problems: list[Problem]) -> LaunchView:
        known = [LOCAL, *(row.id for row in devices.all(store))]
        return LaunchView(spaces=_spaces(), devices=known, form=form, problems=problems)

    @router.get("/launch")
    @router.get("/launch.json")
    def show_form(request: Request, space: Annotated[str, Query(max_length=64)] = "") -> Response:
        return answer("launch.html", request, view(LaunchForm(space=_text(space)), []))

    @router.post("/launch")
    def launch(request: Request, sent: Form = posted) -> Response:
        form, by = LaunchForm.of(sent), request.state.visitor.name
        try:
            wanted = form.request()
            submitted.submit(
                wanted.study, wanted.space, trials=wanted.trials, accept_noise=wanted.accept_noise,
                warm_start=wanted.warm_start, by=by,
            )  # fmt: skip
        except (NasError, ValidationError) as error:
            status = answer_to(request, error).status_code if isinstance(error, NasError) else 422
            return page("launch.html", request, status, view=view(form, problems_of(error, form)))
        begun = submitted.row(wanted.study) is not None
        return RedirectResponse(f"/{'studies' if begun else 'submissions'}/{wanted.study}", 303)

    # The last decorator is the first route: '{name}' would take 'mine.json', too.
    @router.get("/submissions/{name}")
    @router.get("/submissions/{name}.json")
    def show_submission(request: Request, name: StudyName) -> Response:
        found = submitted.find(name)
        if found is None:
            raise UnknownName("submitted study", name, [each.study for each in submitted.not_begun()])
        told = SubmittedView(
            study=name, space=found.space, begun=submitted.row(name) is not None,
            submission=SubmissionView.model_validate(found),
        )  # fmt: skip
        return answer("submission.html", request, told)

    return router


@cache
def _spaces() -> dict[str, str]:
    return list_spaces()


def _text(space: str) -> str:
    """The text of a packaged space; a name that is none of theirs is never looked for among files."""
    if not space:
        return ""
    if space not in _spaces():
        raise UnknownName("search space", space, _spaces())
    return space_text(f"{space}.yaml")
