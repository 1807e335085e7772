"""Functions of worker processes, one per stage of a trial, from spec to result, both JSON.

Failures are results, because exceptions lose their type between processes: {"failed": ...} is the candidate's,
{"infrastructure": ...} the infrastructure's. A training of several seeds has an outcome for each. Workers never touch
the database. Every spec has the folder of the host lock as `lock`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, Unsupported, is_out_of_memory
from nas.core.layout import Layout
from nas.measure.devices.host_lock import HostLock, SharedHold

_log = logging.getLogger("nas.work")

Spec = Mapping[str, Any]
Outcome = dict[str, Any]
"""{"value": ...} or {"failed": {reason, message}}, with "seconds"."""
Work = Callable[[Spec], Outcome]
"""A function that a worker process runs."""


class Share:
    """A shared hold of the host lock, and the time spent waiting for it."""

    def __init__(self, hold: SharedHold, waited_s: float) -> None:
        self._hold = hold
        self.waited_s = waited_s

    def yield_if_wanted(self) -> None:
        """Lets a waiting measurement run first."""
        self.waited_s += self._hold.yield_if_wanted()


def under_host_lock(function: Callable[[Spec, Share], dict[str, Any] | None]) -> Work:
    """Makes work of `function`, under the host lock; its reported seconds leave out the waiting."""

    @wraps(function)
    def run(spec: Spec) -> dict[str, Any]:
        wall, cpu, waited = time.perf_counter(), time.process_time(), 0.0
        try:
            with HostLock(Path(spec["lock"])).shared() as hold:
                share = Share(hold, time.perf_counter() - wall)
                try:
                    outcome: dict[str, Any] = {"value": function(spec, share)}
                finally:
                    waited = share.waited_s
        except CandidateFailed as error:
            outcome = failure(error)
        except (InfrastructureFailed, InvalidInput, OSError) as error:
            outcome = {"infrastructure": str(error)}
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            outcome = {"infrastructure": f"too little memory: {error}"}
        seconds = time.perf_counter() - wall - waited
        return outcome | {"seconds": seconds, "waited_s": waited, "cpu_seconds": time.process_time() - cpu}

    del run.__wrapped__  # Ray would check arguments against its signature
    return run


def failure(error: CandidateFailed) -> Outcome:
    """Returns a candidate's failure as the outcome of a stage."""
    return {"failed": {"reason": error.reason, "message": str(error)}}


@under_host_lock
def export(spec: Spec, share: Share) -> dict[str, Any]:
    """Exports an artifact, or its recipe: {layout, runtime, quantisation, weights, destination} -> Artifact."""
    from nas.measure.runtimes import RUNTIMES
    from nas.measure.runtimes.base import Checkpoint, RandomWeights

    weights = spec["weights"]
    source = (
        RandomWeights(weights["seed"]) if "seed" in weights else Checkpoint(Path(weights["path"]), weights["sha256"])
    )
    runtime, destination = RUNTIMES[spec["runtime"]], Path(spec["destination"])
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        layout = Layout.from_json(spec["layout"])
        artifact = runtime.export(layout, spec["quantisation"], source, destination, recipe=True)
    except Unsupported as error:
        raise CandidateFailed("export", str(error)) from error
    return artifact.model_dump(mode="json")


@under_host_lock
def train(spec: Spec, share: Share) -> dict[str, Any]:
    """Trains the seeds of a proxy, or evaluates a mix: {jobs, checkpoints, device?} -> {key of a job: its outcome}."""
    from nas.search.proxy.job import LibraryRun, TrainJob
    from nas.search.proxy.mixes import evaluate_mix
    from nas.search.proxy.train import train_seeds

    jobs = [TrainJob.model_validate(job) for job in spec["jobs"]]
    run = evaluate_mix if isinstance(jobs[0].run, LibraryRun) else train_seeds
    outcomes = run(
        jobs,
        yield_hook=share.yield_if_wanted,
        checkpoint_dir=Path(spec["checkpoints"]),
        device=spec.get("device", "auto"),
        log=_log.info,
    )
    return {
        job.key: failure(outcome)
        if isinstance(outcome, CandidateFailed)
        else {"value": outcome.model_dump(mode="json")}
        for job, outcome in zip(jobs, outcomes, strict=True)
    }


@under_host_lock
def check_equivalence(spec: Spec, share: Share) -> dict[str, Any]:
    """Compares a trained artifact with PyTorch.

    {layout, runtime, quantisation, weights, model, runner} -> GateReport
    """
    from nas.core.plan import Runner
    from nas.measure.runtimes import RUNTIMES
    from nas.measure.runtimes.base import Checkpoint

    weights = Checkpoint(Path(spec["weights"]["path"]), spec["weights"]["sha256"])
    report = RUNTIMES[spec["runtime"]].gate(
        Layout.from_json(spec["layout"]),
        spec["quantisation"],
        weights,
        Path(spec["model"]),
        Runner.model_validate(spec["runner"]),
    )
    report.require()
    return asdict(report)
