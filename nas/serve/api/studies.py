"""The users' API: studies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nas.core.errors import InvalidInput, UnknownName
from nas.core.trial import EventKind
from nas.infra.store import events, leases, studies, trials
from nas.infra.store import listings as pages
from nas.infra.store.listings import StudySummary
from nas.infra.store.rows import ApiToken, Role, StudyState
from nas.infra.store.store import Store, retried
from nas.infra.web import events as following
from nas.infra.web.errors import documented
from nas.infra.web.events import LAST_ID, Streams, wants_stream
from nas.infra.web.off_loop import off_loop
from nas.infra.web.server import max_body
from nas.measure.devices.attachments import Tag
from nas.measure.farm.agent_api import Access, guarded
from nas.search.analysis.archive import export_study
from nas.search.analysis.report import (
    Row,
    csv_parts,
    finite,
    measurements_table,
    parquet_bytes,
    study_report,
    study_table,
)
from nas.search.analysis.snapshot import Snapshots
from nas.search.spaces.yaml_text import MAX_CHARACTERS
from nas.search.study.estimate import Estimate
from nas.search.study.events import Marked, notes
from nas.serve.api.access import require
from nas.serve.api.submissions import Order, Submission, SubmissionState, SubmittedStudies, check_space, estimate_space
from nas.serve.api.types import (
    ONE_LINE,
    EventId,
    Limit,
    StudyName,
    Time,
    TrialNumber,
    Trials,
    Wait,
    shared,
    with_example,
)

_MAX_SUBMISSION = 8 << 20
"""Bytes of a submission: the longest space, also where its characters take several bytes."""
_SUBMISSION = {
    "submitted_by": "laptop",
    "submitted": 1763690000.0,
    "state": "running",
    "trials": 40,
    "warm_start": [],
    "tries": 0,
    "not_before": 0.0,
    "exit_code": None,
    "message": None,
}
_STUDY = {
    "study": "phones",
    "space": "lfm2-demo",
    "state": "running",
    "reason": None,
    "resume": None,
    "desired_state": "run",
    "trials": 14,
    "created": 1763690002.0,
    "submission": _SUBMISSION,
}
_REPORT = {"study": "phones", "state": "running", "hypervolume": 0.137, "front": [], "...": "as of `nas study show`"}
_EVENT = {"id": 211, "at": 1763690400.0, "trial": 12, "kind": "training", "payload": {"rung": 0}}


class SubmitRequest(BaseModel):
    """A study to be run: its name, and its search space as YAML text."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "study": "phones",
                    "space": "v: 1\nname: lfm2-demo\n# ... as in docs/reference/search-space.md",
                    "trials": 40,
                }
            ]
        },
    )

    study: StudyName
    space: str = Field(max_length=MAX_CHARACTERS)
    trials: Trials = None
    warm_start: tuple[StudyName, ...] = Field((), max_length=20, description="earlier studies to learn from first")


class MarkRequest(BaseModel):
    """What people write about a trial; only what is given changes, and an empty text or list removes it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"star": True, "tags": ["candidate"], "note": "try on the old phone"}]},
    )

    star: bool | None = None
    tags: list[Tag] | None = Field(None, max_length=20)
    note: str | None = Field(None, max_length=500, pattern=ONE_LINE)


class TrialMark(BaseModel):
    """What people wrote about a trial."""

    model_config = with_example(trial=12, star=True, tags=["candidate"], note="for old phones")

    trial: int
    star: bool
    tags: list[str]
    note: str


class SubmissionView(BaseModel):
    """The state of a submitted study's process."""

    model_config = with_example(**_SUBMISSION)

    submitted_by: str = Field(description="name of the API token")
    submitted: Time
    state: SubmissionState
    trials: int | None
    warm_start: tuple[str, ...]
    tries: int = Field(description="processes in a row that ended soon without finishing it")
    not_before: float = Field(description="when it is retried, in seconds since the epoch")
    exit_code: int | None
    message: str | None = Field(description="why it ended or is retried")


class StudyStatus(BaseModel):
    """A study.

    `state`: new, running, paused, stopped, complete or failed; interrupted if its process is gone; queued before its
    process has begun.
    """

    model_config = with_example(**_STUDY)

    study: str
    space: str
    state: str
    reason: str | None = Field(None, description="why it failed or was interrupted")
    resume: str | None = Field(None, description="the command that continues it where it was launched")
    desired_state: str
    trials: int = Field(description="trials so far, references included")
    created: Time
    submission: SubmissionView | None = Field(description="null where it was launched on the coordinator's host")
    problem: str | None = Field(None, description="why nothing more of it can be shown")


class StudyDetail(StudyStatus):
    """A study with its report, which is null before its process has begun."""

    model_config = with_example(**_STUDY, report=_REPORT)

    report: dict[str, Any] | None


class StudyPage(BaseModel):
    """Studies, oldest first; those that have not begun come last. `next`: what to give as `after`; null on the last."""

    model_config = with_example(studies=[_STUDY], next=None)

    studies: list[StudyStatus]
    next: str | None


class TableView(BaseModel):
    """A table: the names of its columns, and its rows as objects, in which what is unknown is null or left out."""

    model_config = with_example(study="phones", columns=["trial", "state"], rows=[{"trial": 0, "state": "complete"}])

    study: str
    columns: list[str]
    rows: list[Row]


class EventView(BaseModel):
    """One entry of a study's log: a step of a trial, or something of the study as a whole (`trial` null)."""

    model_config = with_example(**_EVENT)

    id: int
    at: Time
    trial: int | None
    kind: EventKind
    payload: dict[str, Any]


class EventPage(BaseModel):
    """Events, oldest first. Ask again with `after` = `last`; no more are due once `ended`."""

    model_config = with_example(events=[_EVENT], last=211, state="running", ended=False)

    events: list[EventView]
    last: int
    state: str
    ended: bool


TableFormat = Annotated[
    Literal["json", "csv", "parquet"], Query(description="json: `columns`, and `rows` as objects; else a file")
]
_FILES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/csv": {"example": "trial,state\n0,complete\n"},
            "application/vnd.apache.parquet": {"example": "PAR1..."},
        }
    }
}
_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
}
_PART = 1 << 16
_DRAW_S = 5.0
"""Seconds after which a space of which no layout was found is refused."""
_OVER = (StudyState.COMPLETE, StudyState.STOPPED, StudyState.FAILED)


class EstimateRequest(BaseModel):
    """A study that may be submitted."""

    model_config = with_example(space="v: 1\nname: ...", trials=None)

    space: str = Field(max_length=MAX_CHARACTERS, description="YAML text of the search space")
    trials: Trials = None


def estimates_router(store: Store, access: Access) -> APIRouter:
    """Returns the operation that estimates how long a study takes."""
    router = APIRouter(prefix="/v1/estimates", tags=["studies"], route_class=guarded(access))

    @router.post("", summary="Estimate how long a study takes here", dependencies=[require(Role.READ)])
    @max_body(_MAX_SUBMISSION)
    def estimate(request: EstimateRequest) -> Estimate:
        return estimate_space(store, check_space(store, request.space, _DRAW_S), request.trials)

    return router


def studies_router(
    store: Store, submitted: SubmittedStudies, access: Access, streams: Streams, snapshots: Snapshots
) -> APIRouter:
    """Returns the operations to submit, watch and control studies."""
    router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=guarded(access))
    read, operate = require(Role.READ), require(Role.OPERATE)

    @router.get("", summary="List studies", dependencies=[read])
    def list_studies(
        after: Annotated[str, Query(max_length=20)] = "0",
        limit: Limit = 100,
        text: Annotated[str, Query(max_length=64, description="a part of the name")] = "",
        space: Annotated[str, Query(max_length=64, description="name of the space")] = "",
        state: Annotated[str, Query(max_length=64, description="such as running or interrupted")] = "",
    ) -> StudyPage:
        filter = pages.StudyFilter(text, space, state)
        if not after.isdecimal() or not after.isascii():
            raise InvalidInput("'after' is what the page before gave as 'next'", where="after")
        rows = pages.studies(store, after=min(int(after), LAST_ID), limit=limit + 1, matching=filter)
        statuses = [_row_status(row, submitted.find_readable(row.name)) for row in rows[:limit]]
        if len(rows) > limit:
            return StudyPage(studies=statuses, next=str(rows[limit - 1].id))
        queued = [_queued(submission) for submission in submitted.not_begun()]
        waiting = [
            study
            for study in queued
            if text.lower() in study.study.lower() and space in ("", study.space) and state in ("", study.state)
        ]
        return StudyPage(studies=statuses + waiting, next=None)

    @router.post("", summary="Submit a study", status_code=201, responses=documented(409))
    @max_body(_MAX_SUBMISSION)
    def submit(request: SubmitRequest, token: ApiToken = operate) -> StudyStatus:
        study, space, trials, warm_start = request.study, request.space, request.trials, request.warm_start
        submitted.submit(study, space, trials=trials, warm_start=warm_start, by=token.name)
        return _view(store, submitted, request.study)

    @router.get("/{name}", summary="Show a study with its report", dependencies=[read], responses=documented(404))
    def show(name: StudyName) -> StudyDetail:
        view = _view(store, submitted, name)
        report = study_report(store, snapshots.get(name)) if submitted.row(name) is not None else None
        return StudyDetail(**dict(view), report=report)

    @router.get(
        "/{name}/trials",
        summary="List all trials with their figures",
        dependencies=[read],
        response_model=TableView,
        responses=_FILES | documented(404),
    )
    def show_trials(name: StudyName, format: TableFormat = "json") -> Response:
        return _table(name, "trials", study_table(snapshots.get(name)), format)

    @router.get(
        "/{name}/measurements",
        summary="List all measured figures",
        dependencies=[read],
        response_model=TableView,
        responses=_FILES | documented(404),
    )
    def show_measurements(name: StudyName, format: TableFormat = "json") -> Response:
        return _table(name, "measurements", measurements_table(snapshots.get(name)), format)

    @router.get(
        "/{name}/archive",
        summary="Export the whole study, for `nas study import`",
        dependencies=[read],
        responses=_ARCHIVE | documented(404),
        response_class=StreamingResponse,
    )
    def show_archive(name: StudyName) -> Response:
        with ExitStack() as unsent:
            file = unsent.enter_context(tempfile.TemporaryFile())
            export_study(store, studies.find_id(store, name), file)
            unsent.pop_all()  # the response closes it once it is sent
        file.seek(0)
        headers = {"Content-Disposition": f'attachment; filename="{name}.jsonl.gz"'}
        return StreamingResponse(_parts(file), headers=headers, media_type="application/gzip")

    @router.post(
        "/{name}/trials/{number}/mark",
        summary="Star, tag and note a trial",
        dependencies=[operate],
        responses=documented(404),
    )
    def mark(name: StudyName, number: TrialNumber, request: MarkRequest) -> TrialMark:
        return mark_trial(store, name, number, request)

    def steer(order: Order) -> None:
        summary = f"{order.capitalize()} a study"

        @router.post(
            f"/{{name}}/{order}",
            summary=summary,
            operation_id=f"{order}_study",
            dependencies=[operate],
            responses=documented(404, 409),
        )
        def give(name: StudyName) -> StudyStatus:
            submitted.steer(name, order)
            return _view(store, submitted, name)

    for order in ("pause", "run", "stop"):
        steer(order)

    @router.get(
        "/{name}/events",
        summary="Follow a study's log",
        dependencies=[read],
        response_model=EventPage,
        responses=following.DOCUMENTED | documented(404, 429),
    )
    async def follow(
        name: StudyName,
        http: Request,
        after: EventId = 0,
        limit: Limit = 100,
        wait_s: Wait = 0.0,
        from_now: Annotated[bool, Query(description="only events after the newest one; `after` is ignored")] = False,
    ) -> EventPage | Response:
        if from_now:
            after = await off_loop(_newest, store, submitted, name)

        async def fetch(after: int) -> EventPage:
            return await off_loop(_events, store, submitted, name, after, limit)

        if wants_stream(http):
            return await streams.open(http, fetch, after)
        return await streams.next_page(fetch, after, wait_s)

    return router


@retried
def mark_trial(store: Store, study: str, number: int, request: MarkRequest) -> TrialMark:
    """Sets the marks of a trial that are given, and returns all of them.

    Raises:
        UnknownName: no such study, or no such trial.
    """
    id = studies.find_id(store, study)
    trials.get(store, id, number)
    with store.write() as connection:
        leases.lock_study(connection, id)  # marks of two visitors at once are both kept
        before = [mark for mark in notes(events.notes(store, id, Marked.what), Marked) if mark.trial == number]
        old = before[-1] if before else Marked(number, star=False, tags=(), text="")
        new = Marked(
            number,
            star=old.star if request.star is None else request.star,
            tags=old.tags if request.tags is None else tuple(dict.fromkeys(request.tags)),
            text=old.text if request.note is None else request.note.strip(),
        )
        if new != old:
            events.append(store, id, new.to_json())
    return TrialMark(trial=number, star=new.star, tags=list(new.tags), note=new.text)


def _table(study: str, what: str, table: tuple[list[str], list[Row]], format: TableFormat) -> Response:
    """Returns a table as JSON, or as a file to download."""
    columns, rows = table
    if format == "json":
        return JSONResponse({"study": study, "columns": columns, "rows": finite(rows)})
    headers = {"Content-Disposition": f'attachment; filename="{study}-{what}.{format}"'}
    if format == "csv":
        return StreamingResponse(csv_parts(columns, rows), headers=headers, media_type="text/csv; charset=utf-8")
    return Response(parquet_bytes(columns, rows), headers=headers, media_type="application/vnd.apache.parquet")


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the contents of a file, which is then closed."""
    with file:
        while part := file.read(_PART):
            yield part


def _view(store: Store, submitted: SubmittedStudies, name: str) -> StudyStatus:
    row, submission = submitted.row(name), submitted.find(name)
    if row is not None:
        return _row_status(pages.summary(store, row), submission)
    if submission is None:
        names = {*(study.name for study in pages.studies(store, limit=1000)), *(s.study for s in submitted.not_begun())}
        raise UnknownName("study", name, names)
    return _queued(submission)


def _row_status(row: StudySummary, submission: Submission | None) -> StudyStatus:
    return StudyStatus(
        study=row.name,
        submission=SubmissionView.model_validate(submission) if submission else None,
        **shared(StudyStatus, row) | asdict(row.condition),
    )


def _queued(submission: Submission) -> StudyStatus:
    end = "stopped" if submission.stop else "failed"
    return StudyStatus(
        study=submission.study,
        space=submission.space,
        state=end if submission.has_ended else "queued",
        desired_state="stop" if submission.stop else "run",
        trials=0,
        created=submission.submitted,
        submission=SubmissionView.model_validate(submission),
    )


def _events(store: Store, submitted: SubmittedStudies, name: str, after: int, limit: int) -> EventPage:
    # The state first: what it says has ended has written its last event.
    view, row = _view(store, submitted, name), submitted.row(name)
    new = events.since(store, row.id, after, limit=limit) if row is not None else []
    entries = [EventView.model_validate(event) for event in new]
    last = new[-1].id if new else after
    over = view.state in _OVER
    if view.submission is not None:
        # One that ended may have been resumed where it was launched.
        resumed = row is not None and leases.holder(store, row.id) is not None
        over = view.submission.state is SubmissionState.ENDED and not resumed
    return EventPage(events=entries, last=last, state=view.state, ended=over and len(new) < limit)


def _newest(store: Store, submitted: SubmittedStudies, name: str) -> int:
    row = submitted.row(name)
    return 0 if row is None else events.newest(store, row.id)
