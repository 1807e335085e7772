"""How long a comparison will take, roughly, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from nas.family.contender import Contender
from nas.family.contest import Task
from nas.service.stage_work import Bench

_DECODED = 6.0
"""Time of a decoded token, in tokens of a prompt: weights are read for one token instead of hundreds."""
_LONG = 1.4
"""What attention adds at some thousand tokens, on average over kinds of models."""
_LOADED_PER_S = 3e8
"""Parameters that are drawn, read and rearranged in a second."""


def expected_seconds(contenders: Sequence[Contender], asked: Sequence[Task], bench: Bench) -> float:
    """Of all repetitions with their reference runs, none of which was done before.

    Time goes with active parameters times tokens, at the rate at which the device's reference model runs.
    """
    reference, workload = bench.runtime.reference_model(), bench.runtime.reference_workload()
    run_s = bench.reference.calibration_ms / 1e3
    work = reference.params.active * (workload.prompt + _DECODED * workload.gen)
    total = 0.0
    for contender in contenders:
        for task in asked:
            tokens = task.workload.prompt + _DECODED * task.workload.gen
            computed = _LONG * contender.active * tokens * run_s / work / task.workload.threads
            total += task.repetitions * (computed + contender.parameters / _LOADED_PER_S + run_s)
    return total
