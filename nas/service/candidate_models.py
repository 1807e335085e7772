"""What is told of one candidate: the model behind its page and its JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from nas.core.measurement import Figure
from nas.core.scoring import BudgetCheck, Place
from nas.core.workload import Workload
from nas.service.layout_view import LayoutView
from nas.service.trainings import Training


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class ObjectiveView(_Frozen):
    """One objective, beside the reference layouts'."""

    name: str
    metric: str
    unit: str
    """'x' for a ratio to the published reference over several places."""
    direction: str
    value: float | None
    coordinate: float | None
    sd: float | None
    """Of the coordinate."""
    rung: str | None
    """At which a quality was reached; qualities of different rungs do not compare."""
    references: dict[str, float | None]
    """Reference layout -> its value, at the same rung."""


class RepetitionView(_Frozen):
    """One repetition with every token's time, as it was read: not corrected for drift."""

    valid: bool
    reason: str | None
    """Why it does not count."""
    attempt: int
    ttft_ms: float | None
    token_ms: tuple[float, ...]
    drift: float | None
    """Reference run's time / its calibration - 1."""
    temperature_c: float | None
    temperature_unread: str | None
    """Why there is no temperature."""
    throttled: bool | None
    governor: str | None
    power_source: str | None


class PlaceView(_Frozen):
    """A measurement: one device, runtime and workload."""

    place: Place
    device_id: str
    workload: Workload
    build: str
    patched: bool
    artifact: str
    noisy: bool
    refused_share: float
    drift: float | None
    calibration_ms: float | None
    wall_s: float
    figures: dict[str, Figure]
    ratios: dict[str, float]
    """Figure -> itself / the published reference's there."""
    repetitions: tuple[RepetitionView, ...]

    @property
    def name(self) -> str:
        """Such as 'chat on laptop/llama.cpp'."""
        return f"{self.place.workload} on {self.place.device}/{self.place.runtime}"


class EvaluationView(_Frozen):
    """One evaluation group at one rung, on the scale on which the published reference has 1."""

    rung: str
    group: str
    """'' for the quality, the mean over groups."""
    value: float
    sd: float | None
    """Over seeds; only the quality has one."""
    references: dict[str, float | None]


class ArtifactView(_Frozen):
    """An exported file."""

    sha256: str
    size: int
    runtime: str
    quantisation: str
    arch: str
    patched: bool
    weights: str
    scale: str
    """'deploy' for the layout itself, 'proxy' for what was trained of it."""
    stored: str
    """SHA-256 of what the store keeps: the file, or the recipe that a runner makes it from."""
    recipe: bool
    kept: bool
    """Whether the store still has it."""


class AncestorView(_Frozen):
    """A trial that this one descends from."""

    trial: int
    generations: int
    """1: a parent."""
    layout: str
    layout_id: str
    state: str
    origin: str
    operator: str | None
    parents: tuple[int, ...]


class CommandView(_Frozen):
    """A command that does a part of this again."""

    what: str
    command: str
    beside: tuple[str, ...]
    """What the command cannot say and was otherwise: 'kv_type q8_0'."""


class CandidateView(_Frozen):
    """All that is on record of one candidate."""

    study: str
    trial: int
    name: str
    """'trial 12', or the reference layout's name."""
    state: str
    rung: int | None
    reason: str | None
    origin: str
    operator: str | None
    record: dict[str, Any]
    """What the proposer kept beside the layout."""
    created: float
    updated: float
    noisy: bool
    layout: LayoutView
    objectives: tuple[ObjectiveView, ...]
    budgets: tuple[BudgetCheck, ...]
    places: tuple[PlaceView, ...]
    evaluations: tuple[EvaluationView, ...]
    trainings: tuple[Training, ...]
    artifacts: tuple[ArtifactView, ...]
    ancestors: tuple[AncestorView, ...]
    commands: tuple[CommandView, ...]
