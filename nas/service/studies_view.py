"""The list of studies as people see it: progress, hypervolume and device time of each, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.trial import TERMINAL
from nas.service.live_reading import BeingRead
from nas.service.live_studies import LiveStudies
from nas.service.live_study import LiveStudy
from nas.service.submission import SubmissionState
from nas.service.submitted import SubmittedStudies
from nas.store import pages
from nas.store.pages import StudySummary
from nas.store.store import Store

PAGE = 20
"""Studies at once; no more than `LiveStudies` keeps, or each look would read them all again."""
_MOMENTS = 60


class Moment(NamedTuple):
    """Hypervolume after so many complete trials."""

    complete: int
    hypervolume: float


class ReadingView(BaseModel):
    """How far the reading of something large is."""

    done: int
    total: int


class StudyLine(BaseModel):
    """A study in the list."""

    name: str
    space: str
    state: str
    desired_state: str
    created: float = Field(description="seconds since the epoch")
    wanted: int | None = Field(description="trials to be, references not counted; null where it was never launched")
    proposed: int
    ended: int
    states: dict[str, int] = Field(description="state -> trials, references not counted")
    front: int = Field(description="trials on it")
    hypervolume: float | None = Field(description="null until the reference point is fixed")
    course: list[Moment] = Field(description="of the hypervolume; the last moment is always among them")
    device_seconds: float = Field(description="of the study's own measurements")
    problem: str | None = Field(None, description="why nothing but its name can be told")
    reading: ReadingView | None = Field(None, description="trials, while they are read: nothing else is known yet")


class WaitingLine(BaseModel):
    """A submitted study that has not begun, or ended before it did."""

    model_config = ConfigDict(from_attributes=True)

    study: str
    space: str
    submitted: float = Field(description="seconds since the epoch")
    submitted_by: str
    state: SubmissionState
    message: str | None


class StudiesView(BaseModel):
    """A page of the list."""

    studies: list[StudyLine]
    next: int | None = Field(description="`before` of the next page; null on the last one")
    waiting: list[WaitingLine] = Field(description="on the first page only")


def studies_view(
    store: Store, live: LiveStudies, before: int | None = None, submitted: SubmittedStudies | None = None
) -> StudiesView:  # fmt: skip
    """The newest studies, and what waits of those `submitted`; or those that are older than the study `before`."""
    rows = pages.latest_studies(store, limit=PAGE + 1, before=before)
    shown = rows[:PAGE]
    lines = [_line(row, live) for row in shown]
    waiting = submitted.not_begun() if submitted is not None and before is None else []
    return StudiesView(
        studies=[line for line in lines if line is not None],
        next=shown[-1].id if len(rows) > PAGE else None,
        waiting=[WaitingLine.model_validate(each) for each in waiting],
    )


def _line(row: StudySummary, live: LiveStudies) -> StudyLine | None:
    """None for a study that was deleted meanwhile."""
    try:
        return _told(row, live.get(row.name, patience_s=0.0))
    except UnknownName:
        return None
    except BeingRead as error:
        return _untold(row, reading=ReadingView(done=error.done, total=error.total))
    except InvalidInput as error:
        return _untold(row, problem=str(error))


def _untold(row: StudySummary, *, problem: str | None = None, reading: ReadingView | None = None) -> StudyLine:
    return StudyLine(
        name=row.name, space=row.space, state=row.state.value, desired_state=row.desired_state, created=row.created,
        wanted=None, proposed=0, ended=0, states={}, front=0, hypervolume=None, course=[], device_seconds=0.0,
        problem=problem, reading=reading,
    )  # fmt: skip


def _told(row: StudySummary, study: LiveStudy) -> StudyLine:
    with study.lock:
        states = study.table.states()
        return StudyLine(
            name=row.name,
            space=row.space,
            state=study.state.value,
            desired_state=row.desired_state,
            created=row.created,
            wanted=study.wanted,
            proposed=sum(states.values()),
            ended=sum(count for state, count in states.items() if state in TERMINAL),
            states=states,
            front=len(study.course.front),
            hypervolume=study.course.hypervolume,
            course=thinned([Moment(step.complete, step.hypervolume) for step in study.course.steps]),
            device_seconds=study.device_seconds.total,
        )


def thinned(course: Sequence[Moment]) -> list[Moment]:
    """Evenly many of the moments, with the last one among them."""
    every = -(-len(course) // _MOMENTS) or 1
    return [*course[::-1][::every]][::-1]
