"""The form that launches a study, its problems, and the page of a submitted study that has not begun."""

from __future__ import annotations

import re
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nas.core.block import BLOCKS
from nas.core.errors import InvalidInput, NasError, UnknownName
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.infra.store import studies
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.errors import Conflict, answer_to
from nas.infra.web.server import max_body
from nas.measure.farm.farm import LOCAL, known_devices
from nas.search.proposers import Sampler
from nas.search.spaces import list_spaces, space_text, space_yaml
from nas.search.study.check import support_filter
from nas.search.study.estimate import Estimate
from nas.search.study.events import stored_space
from nas.serve.api.studies import EstimateRequest, SubmissionView, SubmitRequest
from nas.serve.api.submissions import FILE, SubmittedStudies, check_space, estimate_space
from nas.serve.api.types import StudyName
from nas.serve.dashboard.access import Form, PageAccess
from nas.serve.dashboard.pages import answer, page, page_route

_MAX_FORM = 4 << 20
"""Bytes of the form: enough for the longest space, unless most characters take several bytes."""

FieldName = Literal["study", "space", "trials", "warm_start", ""]

_LOCATION = re.compile(rf"{re.escape(FILE)}(?::(\d+))?: (.+)")
_QUOTED = 200
_DRAWN = 32
"""Layouts that a preview draws from a space."""
_DRAW_S = 2.0
"""Seconds after which it draws no more; the check before it searches as long for a first layout."""
_SAMPLES = 4
"""Layouts that a preview shows."""
_NAME_RULE = "use up to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"


class Problem(BaseModel):
    """A reason why a study cannot be submitted."""

    field: FieldName = Field(description="the field; empty: the whole form")
    line: int | None = Field(None, description="of the space, counted from 1")
    text: str
    quoted: str | None = Field(None, description="that line")


class LaunchForm(BaseModel):
    """The fields as typed."""

    study: str = ""
    space: str = Field("", description="YAML text")
    trials: str = ""
    warm_start: str = Field("", description="names, between spaces or commas")

    @classmethod
    def of(cls, posted: Form) -> LaunchForm:
        """Reads a posted form. A file replaces the text; browsers send an empty one if none was chosen."""
        space = posted.get("file") or posted.get("space", "")
        return cls(
            study=posted.get("study", "").strip(),
            space=space.replace("\r\n", "\n"),
            trials=posted.get("trials", "").strip(),
            warm_start=posted.get("warm_start", "").strip(),
        )

    def request(self) -> SubmitRequest:
        """Returns the request to the users' API.

        Raises:
            ValidationError: it is not valid.
        """
        return SubmitRequest.model_validate(
            {
                "study": self.study,
                "space": self.space,
                "trials": self.trials or None,
                "warm_start": tuple(re.split(r"[\s,]+", self.warm_start)) if self.warm_start else (),
            }
        )


class Sample(BaseModel):
    """A random layout of a space."""

    layout: str
    total: int = Field(description="weights")
    active: int = Field(description="weights used for a token")


class SpacePreview(BaseModel):
    """What a valid search space holds, from random layouts that its runtimes carry."""

    kinds: list[tuple[str, str]] = Field(description="kinds of blocks and what they are, mixers first")
    mixers: int = Field(description="how many of `kinds` are mixers; the others are feed-forwards")
    drawn: int = Field(description="layouts that the range is of")
    total: tuple[int, int] = Field(description="least and most weights of a layout")
    samples: list[Sample]


class LaunchView(BaseModel):
    """The form, and the choices for it."""

    spaces: dict[str, str] = Field(description="packaged search spaces: name -> description")
    devices: list[str] = Field(description="devices that a space can name")
    packaged: str = Field(description="name of the packaged space that is shown; empty: none")
    form: LaunchForm
    problems: list[Problem]
    checked: bool = Field(False, description="whether the space was only checked, not launched")
    preview: SpacePreview | None = Field(None, description="of a space that was checked and is valid")
    time: Estimate | None = Field(None, description="how long a study of the checked space takes")


class SubmittedView(BaseModel):
    """A submitted study."""

    study: str
    space: str
    begun: bool = Field(description="whether it has a page of its own")
    submission: SubmissionView


def launch_router(store: Store, submitted: SubmittedStudies, access: PageAccess) -> APIRouter:
    """Returns the form, its action, and the page of a submitted study until the study has its own.

    Args:
        store: has the devices.
        submitted: runs submitted studies.
        access: authenticates visitors.
    """
    router = APIRouter(route_class=page_route(access), include_in_schema=False)
    posted = access.posted(Role.OPERATE)

    def view(form: LaunchForm, problems: list[Problem], packaged: str = "", **checked: Any) -> LaunchView:
        devices = [LOCAL, *known_devices(store, ())]
        return LaunchView(spaces=_spaces(), devices=devices, packaged=packaged, form=form, problems=problems, **checked)

    @router.get("/launch")
    @router.get("/launch.json")
    def show_form(
        request: Request,
        space: Annotated[str, Query(max_length=64)] = "",
        like: Annotated[str, Query(max_length=64)] = "",
    ) -> Response:
        text = space_yaml(stored_space(studies.get(store, like))) if like else _text(space)
        return answer("launch.html", request, view(LaunchForm(space=text), [], space))

    @router.post("/launch")
    @max_body(_MAX_FORM)
    def launch(request: Request, sent: Form = posted) -> Response:
        form, by = LaunchForm.of(sent), request.state.visitor.name
        try:
            order = form.request()
            submitted.submit(order.study, order.space, trials=order.trials, warm_start=order.warm_start, by=by)
        except (NasError, ValidationError) as error:
            status = answer_to(request, error).status_code if isinstance(error, NasError) else 422
            return page("launch.html", request, status, view=view(form, problems_of(error, form)))
        has_begun = submitted.row(order.study) is not None
        return RedirectResponse(f"/{'studies' if has_begun else 'submissions'}/{order.study}", 303)

    @router.post("/launch/check")
    @max_body(_MAX_FORM)
    def check(request: Request, sent: Form = posted) -> Response:
        form, problems, preview, expected = LaunchForm.of(sent), list[Problem](), None, None
        try:
            order = EstimateRequest.model_validate({"space": form.space, "trials": form.trials or None})
            space = check_space(store, order.space, _DRAW_S)
            preview = preview_of(space)
            expected = estimate_space(store, space, order.trials)
        except (NasError, ValidationError) as error:
            problems = problems_of(error, form)
        return page("launch.html", request, view=view(form, problems, checked=True, preview=preview, time=expected))

    # The last decorator is the first route: '{name}' would take 'mine.json', too.
    @router.get("/submissions/{name}")
    @router.get("/submissions/{name}.json")
    def show_submission(request: Request, name: StudyName) -> Response:
        submission = submitted.find(name)
        if submission is None:
            raise UnknownName("submitted study", name, [waiting.study for waiting in submitted.not_begun()])
        found_view = SubmittedView(
            study=name,
            space=submission.space,
            begun=submitted.row(name) is not None,
            submission=SubmissionView.model_validate(submission),
        )
        return answer("submission.html", request, found_view)

    return router


def preview_of(space: SearchSpace) -> SpacePreview:
    """Returns what a checked space holds.

    Raises:
        InvalidInput: no layout of it was found.
    """
    sampler, rng, drawn = Sampler(space, support_filter(space)), np.random.default_rng(0), list[Layout]()
    until = time.monotonic() + _DRAW_S
    while len(drawn) < _DRAWN and not (drawn and time.monotonic() > until):
        try:
            drawn.append(sampler.draw(rng, until))
        except InvalidInput:
            if not drawn:
                raise
            break
    total = [layout.params.total for layout in drawn]
    different = {layout.id: layout for layout in drawn}.values()
    return SpacePreview(
        kinds=[(block.kind, BLOCKS[block.kind].doc) for block in space.mixers + space.ffn],
        mixers=len(space.mixers),
        drawn=len(drawn),
        total=(min(total), max(total)),
        samples=[
            Sample(layout=layout.format(), total=layout.params.total, active=layout.params.active)
            for layout in list(different)[:_SAMPLES]
        ],
    )


@cache
def _spaces() -> dict[str, str]:
    return list_spaces()


def _text(space: str) -> str:
    """Returns the text of a packaged space; other names are never read from files."""
    if not space:
        return ""
    if space not in _spaces():
        raise UnknownName("search space", space, _spaces())
    return space_text(Path(str(files("nas.search.spaces"))) / f"{space}.yaml")


def problems_of(error: ValidationError | NasError, form: LaunchForm) -> list[Problem]:
    """Returns the problems of a refused form, each at its field, those of the space at their lines."""
    if isinstance(error, ValidationError):
        return [
            Problem(
                field=_field(str(detail["loc"][0]) if detail["loc"] else ""),
                text=_NAME_RULE if detail["type"] == "string_pattern_mismatch" else detail["msg"],
            )
            for detail in error.errors(include_url=False)
        ]
    if isinstance(error, Conflict):
        return [Problem(field="study", text=str(error))]
    return [_of_line(line, form) for line in str(error).splitlines()]


def _of_line(message: str, form: LaunchForm) -> Problem:
    match = _LOCATION.fullmatch(message)
    if match is None:
        name, separator, text = message.partition(": ")
        return Problem(field=_field(name), text=text if separator and _field(name) else message)
    number = int(match[1]) if match[1] else None
    return Problem(field="space", line=number, text=match[2], quoted=_quoted(form.space, number, match[2]))


def _quoted(space: str, number: int | None, problem: str) -> str | None:
    """Returns the wrong line; None if something is missing."""
    lines = space.split("\n")
    if number is None or number > len(lines) or problem.endswith("is missing"):
        return None
    return lines[number - 1].strip()[:_QUOTED] or None


def _field(name: str) -> FieldName:
    return next((field for field in get_args(FieldName) if field == name), "")
