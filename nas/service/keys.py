"""Result keys: which inputs name a stage's result. Two stages with equal keys would do the same work."""

from __future__ import annotations

from typing import Any

from nas.core.canonical import result_key
from nas.core.layout import Layout
from nas.core.plan import Runner
from nas.core.space import Protocol
from nas.core.workload import Workload
from nas.runtimes.base import Runtime

PROTOCOL_VERSION = 1
"""Of the measurement protocol (design: warm-up, timing, interleaving). Raise it when figures change their meaning."""

GATE_VERSION = 2


def export_key(layout: Layout, runtime: Runtime, quantisation: str, weights: str) -> str:
    """An artifact: what is written depends on nothing else."""
    return result_key(
        "export", layout=layout.to_json(), runtime=runtime.name, quantisation=quantisation, weights=weights,
        writer=runtime.writer_version,
    )  # fmt: skip


def measure_key(
    artifact: str, runner: Runner, device: str, workload: Workload, repetitions: int, protocol: Protocol,
    calibration_ms: float, accept_noise: bool, replicate: int = 0, energy_counter: str | None = None,
) -> str:  # fmt: skip
    """A measurement.

    Of the protocol, what decides over a repetition or a failure counts; how often and when it is tried again does not.
    `replicate` rises when the same thing is to be measured once more; `energy_counter` is what the device had then.
    """
    extra: dict[str, Any] = {"accept_noise": True} if accept_noise else {}
    if energy_counter is not None:
        extra["energy_counter"] = energy_counter
    limits = {
        "drift": protocol.drift_limit, "foreign_cpu": protocol.foreign_cpu_limit, "deadline_s": protocol.deadline_s,
    }  # fmt: skip
    return result_key(
        "measure", artifact=artifact, runtime=runner.runtime, build=runner.build, device=device,
        workload=workload.key(), repetitions=repetitions, protocol=PROTOCOL_VERSION, limits=limits,
        calibration_ms=calibration_ms, replicate=replicate, **extra,
    )  # fmt: skip


def gate_key(artifact: str, build: str) -> str:
    """An equivalence check of one trained artifact on one build."""
    return result_key("gate", artifact=artifact, build=build, gate=GATE_VERSION)
