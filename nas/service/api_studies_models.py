"""What the users' API takes and answers about studies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nas.core.trial import EventKind
from nas.search_spaces.yaml_text import MAX_CHARACTERS
from nas.service.api_models import Time, with_example
from nas.service.submission import SubmissionState

StudyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

_SUBMISSION = {
    "submitted_by": "laptop", "submitted": 1763690000.0, "state": "running", "trials": 40, "accept_noise": False,
    "warm_start": [], "tries": 0, "not_before": 0.0, "exit_code": None, "message": None,
}  # fmt: skip
_STUDY = {
    "study": "phones", "space": "lfm2-demo", "state": "running", "desired_state": "run", "trials": 14,
    "created": 1763690002.0, "submission": _SUBMISSION,
}  # fmt: skip
_REPORT = {
    "study": "phones",
    "state": "running",
    "hypervolume": 0.137,
    "front": [],
    "...": "as of `nas study show`",
}
_EVENT = {"id": 211, "at": 1763690400.0, "trial": 12, "kind": "training", "payload": {"rung": 0}}


class SubmitRequest(BaseModel):
    """A study to be run: its name, and its search space as YAML text."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"study": "phones", "space": "v: 1\nname: lfm2-demo\n# ... as in docs/search-space.md", "trials": 40}
            ]
        },
    )

    study: StudyName
    space: str = Field(max_length=MAX_CHARACTERS)
    trials: int | None = Field(None, ge=1, le=1_000_000, description="layouts to try; default: as the space says")
    accept_noise: bool = Field(False, description="keep noisy measurements, marked and off the reported front")
    warm_start: tuple[StudyName, ...] = Field((), max_length=20, description="earlier studies to learn from first")


class SubmissionView(BaseModel):
    """What became of a submitted study's process."""

    model_config = with_example(**_SUBMISSION)

    submitted_by: str = Field(description="name of the API token")
    submitted: Time
    state: SubmissionState
    trials: int | None
    accept_noise: bool
    warm_start: tuple[str, ...]
    tries: int = Field(description="processes in a row that ended soon without finishing it")
    not_before: float = Field(description="when it is tried again, in seconds since the epoch")
    exit_code: int | None
    message: str | None = Field(description="why it ended or is tried again")


class StudyView(BaseModel):
    """A study. `state`: new, running, paused, stopped, complete or failed; queued before its process has begun."""

    model_config = with_example(**_STUDY)

    study: str
    space: str
    state: str
    desired_state: str
    trials: int = Field(description="trials so far, references included")
    created: Time
    submission: SubmissionView | None = Field(description="null where it was launched on the coordinator's host")


class StudyDetail(StudyView):
    """A study with its report, which is null before its process has begun."""

    model_config = with_example(**_STUDY, report=_REPORT)

    report: dict[str, Any] | None


class StudyPage(BaseModel):
    """Studies, oldest first; those that have not begun come last. `next`: what to give as `after`; null on the last."""

    model_config = with_example(studies=[_STUDY], next=None)

    studies: list[StudyView]
    next: str | None


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
