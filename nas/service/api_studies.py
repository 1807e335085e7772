"""The users' API: studies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from nas.core.errors import InvalidInput, UnknownName
from nas.service import following
from nas.service.agent_access import Access, guarded
from nas.service.api_access import require
from nas.service.api_errors import documented
from nas.service.api_models import EventId, Limit, Wait
from nas.service.api_studies_models import (
    EventPage,
    EventView,
    StudyDetail,
    StudyName,
    StudyPage,
    StudyView,
    SubmissionView,
    SubmitRequest,
)
from nas.service.following import Streams, next_page, wants_stream
from nas.service.off_loop import off_loop
from nas.service.report import study_report
from nas.service.submission import Submission, SubmissionState
from nas.service.submitted import Order, SubmittedStudies
from nas.store import events, pages
from nas.store.pages import StudySummary
from nas.store.rows import ApiToken, Role, StudyState
from nas.store.store import Store

_OVER = (StudyState.COMPLETE, StudyState.STOPPED, StudyState.FAILED)


def studies_router(store: Store, submitted: SubmittedStudies, access: Access, streams: Streams) -> APIRouter:
    """Submitting, watching and steering studies."""
    router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=guarded(access))
    read, operate = require(Role.READ), require(Role.OPERATE)

    @router.get("", summary="List studies", dependencies=[read])
    def list_studies(after: Annotated[str, Query(max_length=20)] = "0", limit: Limit = 100) -> StudyPage:
        rows = pages.studies(store, after=_study_id(after), limit=limit + 1)
        shown = [_begun(row, submitted.find(row.name)) for row in rows[:limit]]
        if len(rows) > limit:
            return StudyPage(studies=shown, next=str(rows[limit - 1].id))
        return StudyPage(studies=shown + [_queued(each) for each in submitted.not_begun()], next=None)

    @router.post("", summary="Submit a study", status_code=201, responses=documented(409))
    def submit(request: SubmitRequest, token: ApiToken = operate) -> StudyView:
        wanted = {"trials": request.trials, "accept_noise": request.accept_noise, "warm_start": request.warm_start}
        submitted.submit(request.study, request.space, by=token.name, **wanted)  # type: ignore[arg-type]
        return _view(store, submitted, request.study)

    @router.get("/{name}", summary="Show a study with its report", dependencies=[read], responses=documented(404))
    def show(name: StudyName) -> StudyDetail:
        view = _view(store, submitted, name)
        report = study_report(store, name) if submitted.row(name) is not None else None
        return StudyDetail(**dict(view), report=report)

    def steer(order: Order) -> None:
        summary = f"Tell a study to {order}"

        @router.post(
            f"/{{name}}/{order}", summary=summary, operation_id=f"{order}_study", dependencies=[operate],
            responses=documented(404, 409),
        )  # fmt: skip
        def tell(name: StudyName) -> StudyView:
            submitted.tell(name, order)
            return _view(store, submitted, name)

    for order in ("pause", "run", "stop"):
        steer(order)

    @router.get(
        "/{name}/events", summary="Follow a study's log", dependencies=[read], response_model=EventPage,
        responses=following.DOCUMENTED | documented(404, 429),
    )  # fmt: skip
    async def follow(
        name: StudyName, http: Request, after: EventId = 0, limit: Limit = 100, wait_s: Wait = 0.0
    ) -> EventPage | Response:
        async def look(after: int) -> EventPage:
            return await off_loop(_events, store, submitted, name, after, limit)

        if wants_stream(http):
            return await streams.open(http, look, after)
        return await next_page(look, after, wait_s)

    return router


def _study_id(after: str) -> int:
    if not after.isdecimal() or not after.isascii():
        raise InvalidInput("'after' is what the page before gave as 'next'", where="after")
    return min(int(after), (1 << 53) - 1)


def _view(store: Store, submitted: SubmittedStudies, name: str) -> StudyView:
    row, submission = submitted.row(name), submitted.find(name)
    if row is not None:
        return _begun(pages.summary(store, row), submission)
    if submission is None:
        known = {*(study.name for study in pages.studies(store, limit=1000)), *(s.study for s in submitted.not_begun())}
        raise UnknownName("study", name, known)
    return _queued(submission)


def _begun(row: StudySummary, submission: Submission | None) -> StudyView:
    return StudyView(
        study=row.name, space=row.space, state=row.state.value, desired_state=row.desired_state, trials=row.trials,
        created=row.created, submission=SubmissionView.model_validate(submission) if submission else None,
    )  # fmt: skip


def _queued(submission: Submission) -> StudyView:
    return StudyView(
        study=submission.study, space=submission.space, state="failed" if submission.ended else "queued",
        desired_state="stop" if submission.stop else "run", trials=0, created=submission.submitted,
        submission=SubmissionView.model_validate(submission),
    )  # fmt: skip


def _events(store: Store, submitted: SubmittedStudies, name: str, after: int, limit: int) -> EventPage:
    # The state first: what it says has ended has written its last event.
    view, row = _view(store, submitted, name), submitted.row(name)
    found = events.since(store, row.id, after, limit=limit) if row is not None else []
    shown = [EventView.model_validate(event) for event in found]
    last = found[-1].id if found else after
    return EventPage(events=shown, last=last, state=view.state, ended=_over(view) and len(found) < limit)


def _over(view: StudyView) -> bool:
    if view.submission is not None:
        return view.submission.state is SubmissionState.ENDED
    return view.state in _OVER
