"""What worker processes do: one function per kind of stage, spec in, result out, both JSON.

A candidate's own failure is a result like any other ({"failed": ...}); the infrastructure's comes back as one, too
({"infrastructure": ...}), because exceptions lose their meaning between processes. Workers never touch the database.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.devices.hostlock import HostLock

_log = logging.getLogger("nas.work")

Spec = Mapping[str, Any]
Stage = Callable[[Spec], dict[str, Any]]


def _stage(function: Stage) -> Stage:
    @wraps(function)
    def run(spec: Spec) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            outcome: dict[str, Any] = {"value": function(spec)}
        except CandidateFailed as error:
            outcome = {"failed": {"reason": error.reason, "message": str(error)}}
        except (InfrastructureFailed, InvalidInput, OSError) as error:
            outcome = {"infrastructure": str(error)}
        return outcome | {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}

    return run


@_stage
def export(spec: Spec) -> dict[str, Any]:
    """Writes an artifact: {layout, runtime, quantisation, weights, destination, lock} -> Artifact."""
    from nas.runtimes import RUNTIMES
    from nas.runtimes.base import Checkpoint, RandomWeights

    weights = spec["weights"]
    source = (
        RandomWeights(weights["seed"]) if "seed" in weights else Checkpoint(Path(weights["path"]), weights["sha256"])
    )
    runtime, destination = RUNTIMES[spec["runtime"]], Path(spec["destination"])
    destination.parent.mkdir(parents=True, exist_ok=True)
    with HostLock(Path(spec["lock"])).shared():
        try:
            artifact = runtime.export(Layout.from_json(spec["layout"]), spec["quantisation"], source, destination)
        except Unsupported as error:
            raise CandidateFailed("export", str(error)) from error
    return artifact.model_dump(mode="json")


@_stage
def train(spec: Spec) -> dict[str, Any]:
    """Trains a proxy: {job, checkpoints, lock} -> TrainResult."""
    from nas.proxy.job import TrainJob
    from nas.proxy.train import train as run

    with HostLock(Path(spec["lock"])).shared() as hold:
        result = run(
            TrainJob.model_validate(spec["job"]),
            yield_hook=hold.yield_if_wanted,
            checkpoint_dir=Path(spec["checkpoints"]),
            log=_log.info,
        )
    return result.model_dump(mode="json")


@_stage
def gate(spec: Spec) -> dict[str, Any]:
    """Compares a trained artifact with PyTorch.

    {layout, runtime, quantisation, weights, model, runner, lock} -> GateReport
    """
    from nas.core.plan import Runner
    from nas.runtimes import RUNTIMES
    from nas.runtimes.base import Checkpoint

    weights = Checkpoint(Path(spec["weights"]["path"]), spec["weights"]["sha256"])
    with HostLock(Path(spec["lock"])).shared():
        report = RUNTIMES[spec["runtime"]].gate(
            Layout.from_json(spec["layout"]),
            spec["quantisation"],
            weights,
            Path(spec["model"]),
            Runner.model_validate(spec["runner"]),
        )
    report.require()
    return asdict(report)
