"""How long a device may stay in each state, and what ends it: the one table of the farm's time limits.

Times are the coordinator's; devices and agents keep deadlines of their own besides (docs/farm-health.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nas.core.plan import Round
from nas.core.protocol import Phase
from nas.store.rows import DeviceState


@dataclass(frozen=True, slots=True)
class Limit:
    """A time limit of a state.

    Args:
        seconds: how long; on top of what the job itself takes by its plan, where `per_job`.
        since: the state began, or the last word from its agent.
        per_job: whether the plan's own time is added: its cool-down, or the deadlines of all its processes.
        then: what follows.
    """

    seconds: float
    since: Literal["state", "word"]
    then: str
    per_job: bool = False


_TAKEN_BACK = "the lease is taken back and the job queued anew, as after any failure of the infrastructure"

LIMITS: Mapping[DeviceState, Limit] = {
    DeviceState.OFFLINE: Limit(86_400, "word", "good health is unknown when it comes back, and it is checked"),
    DeviceState.PREPARING: Limit(1_200, "state", _TAKEN_BACK),
    DeviceState.IDLE: Limit(60, "word", "it is offline"),
    DeviceState.LEASED: Limit(120, "state", _TAKEN_BACK, per_job=True),
    DeviceState.COOLING: Limit(60, "state", _TAKEN_BACK, per_job=True),
    DeviceState.DRAINING: Limit(600, "state", "measurements that wait for it fail, to be resumed later"),
}
"""Silence (no word for the time of `idle`) makes a device offline in every state but draining, which outlasts it."""

_STATES: Mapping[Phase, DeviceState] = {
    "preparing": DeviceState.PREPARING,
    "cooling": DeviceState.COOLING,
    "running": DeviceState.LEASED,
}


def state_of(phase: Phase) -> DeviceState:
    """What a device does while its job is in a phase."""
    return _STATES[phase]


def phase_limit_s(phase: Phase | None, round: Round) -> float:
    """How long a job may stay in a phase, in seconds; None: its agent has not said anything yet."""
    if phase is None:
        return sum(phase_limit_s(each, round) for each in _STATES)
    planned = {"preparing": 0.0, "cooling": round.cool_down_s, "running": _processes_s(round)}
    return LIMITS[state_of(phase)].seconds + planned[phase]


def _processes_s(round: Round) -> float:
    plans = (round.candidate, round.reference) if round.reference else (round.candidate,)
    return round.repetitions * sum(plan.deadline_s for plan in plans)
