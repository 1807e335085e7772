"""The reference model of a runtime, ready to run on a device: what calibrates it, checks it, and shows its drift."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.device import Device
from nas.core.plan import Plan, Runner
from nas.runtimes.base import Artifact, RandomWeights, Runtime
from nas.service.keys import export_key
from nas.store import artifacts, results
from nas.store.store import Store

DEADLINE_S = 120.0
CHECK_RUNS = 3
CALIBRATION_RUNS = 10


def reference_model(store: Store, scratch: Path, runtime: Runtime, quantisation: str) -> Artifact:
    """The exported reference model, from the store where it is there already.

    Raises:
        InfrastructureFailed: the disk is full.
    """
    layout, weights = runtime.reference_model(), RandomWeights()
    key = export_key(layout, runtime, quantisation, weights.describe())
    row = results.get(store, key)
    if row is not None:
        artifact = Artifact.model_validate(row.payload["value"])
        if artifacts.get(store, artifact.stored.sha256) is not None:
            return artifact
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        destination = Path(folder) / "reference"
        artifact = runtime.export(layout, quantisation, weights, destination, recipe=True)
        artifacts.put_file(store, destination)
    artifacts.pin(store, artifact.stored.sha256, f"reference:{runtime.name}")
    results.put(store, key, "export", {"value": artifact.model_dump(mode="json")})
    return artifact


def reference_plan(runtime: Runtime, runner: Runner, model: Artifact, device: Device) -> Plan:
    """One reference run, on the cores that the device measures on."""
    return runtime.plan(model, runner, device.pinned(runtime.reference_workload()), DEADLINE_S)


def calibration_name(plan: Plan) -> str:
    """What a calibration is kept under: another runner, model or workload is another one, and so are other cores."""
    named = {"build": plan.runner.build, "inputs": plan.model_dump(mode="json")["inputs"], "args": plan.args}
    return content_hash(named | ({"affinity": plan.affinity} if plan.affinity else {}))
