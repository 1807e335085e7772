"""What is told of one study: the model behind its page and its JSON."""

from __future__ import annotations

from pydantic import BaseModel, Field

from nas.service.live_axes import AxisView
from nas.service.live_points import FrontEntry, ReferenceEntry
from nas.service.live_structure import ShareView
from nas.service.place_agreement import PlaceAgreement
from nas.service.studies_view import Moment, ReadingView
from nas.service.study_state import PageState


class VolumeView(BaseModel):
    """The hypervolume of the front."""

    value: float
    low: float | None = Field(description="lower end of the 95 % interval; null where too many are on the front")
    high: float | None


class CornerView(BaseModel):
    """The reference point on one objective: only what is better counts."""

    objective: str
    value: float
    unit: str
    direction: str
    coordinate: float


class EndingView(BaseModel):
    """Why no more layouts are proposed."""

    rule: str
    message: str


class GainView(BaseModel):
    """What the last proposal was expected to add."""

    hypervolume: float = Field(description="upper bound, of the whole batch that it was part of")
    batch: int
    share: float | None = Field(description="of the hypervolume that was reached then")


class ActiveTrial(BaseModel):
    """A trial that has not ended."""

    trial: int
    state: str
    rung: int | None
    origin: str
    operator: str | None
    since: float = Field(description="when it came into its state, in seconds since the epoch")
    layout: str


class ActiveJob(BaseModel):
    """A measurement that waits for its device, or runs there."""

    trial: int | None
    device: str
    state: str
    since: float
    attempts: int


class QueueView(BaseModel):
    """What is under way."""

    trials: list[ActiveTrial]
    further: int = Field(description="trials that have not ended and are not in `trials`")
    jobs: list[ActiveJob]


class RankedView(FrontEntry):
    """A place in the ranked list."""

    place: int | None = Field(description="by hypervolume contribution, from 1; null for what is tied only")


class StudyView(BaseModel):
    """A study as its page has it; its trials come from `points`."""

    name: str
    space: str
    state: str
    desired_state: str
    over: bool = Field(description="no orchestrator is expected to go on")
    created: float
    seed: int
    version: str
    revision: int
    wanted: int | None = Field(description="trials to be, references not counted; null where it was never launched")
    proposed: int
    ended: int
    states: dict[str, int] = Field(description="state -> trials, references not counted")
    device_seconds: float = Field(description="of the study's own measurements")
    hypervolume: VolumeView | None = Field(description="null until the reference point is fixed")
    corner: list[CornerView] = Field(description="the reference point")
    course: list[Moment] = Field(description="of the hypervolume; the last moment is always among them")
    ending: EndingView | None
    expected_gain: GainView | None
    axes: list[AxisView]
    places: list[str]
    page: PageState
    queue: QueueView
    front: int = Field(description="trials on it")
    ranked: list[RankedView] = Field(description="the best of the front, then what is tied with it")
    references: list[ReferenceEntry]
    blocks: list[ShareView] | None = Field(description="null: the layouts of a large study were not read yet")
    reading: ReadingView | None = Field(description="how many layouts have been read, while they are")
    agreement: list[PlaceAgreement]
