"""View model of the newest lines of a study's log, those of `nas study follow`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from nas.infra.store import events
from nas.infra.store.store import Store
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.study.events import event_line

EVENTS = 500
"""Newest events that are read; some of them have no line."""


class LogLine(BaseModel):
    """One event."""

    id: int
    at: float = Field(description="seconds since the epoch")
    trial: int | None
    text: str


class LogView(BaseModel):
    """The end of the log, newest line first."""

    study: str
    state: str
    over: bool = Field(description="no orchestrator is expected to continue the study")
    lines: list[LogLine]
    earlier: bool = Field(description="whether the log began before these lines")
    printed: str | None = Field(description="the end of what its process printed; null if no coordinator runs it")


def log_view(store: Store, study: StudySnapshot, printed: str | None = None) -> LogView:
    """Returns the lines of the newest events of a study, and what its process printed (`SubmittedStudies.log_tail`)."""
    latest = events.latest(store, study.id, EVENTS)
    return LogView(
        study=study.name,
        state=study.state,
        over=study.over,
        lines=[
            LogLine(id=event.id, at=event.at, trial=event.trial, text=text)
            for event in reversed(latest)
            if (text := event_line(event.trial, event.kind, event.payload))
        ],
        earlier=len(latest) == EVENTS,
        printed=printed,
    )
