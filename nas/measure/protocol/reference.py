"""The reference model of a runtime, which calibrates devices, checks their health and shows their drift.

Also the keys under which exports, measurements and equivalence checks are stored.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nas.core.canonical import content_hash, result_key
from nas.core.device import Device
from nas.core.layout import Layout
from nas.core.measurement import ReferenceTimes, Sample
from nas.core.plan import Plan, Runner
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.infra.store import artifacts, calibrations, results
from nas.infra.store.calibrations import CalibrationKey
from nas.infra.store.store import Store
from nas.measure.protocol.estimator import clock_of, reference_times, run_times
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.measure.runtimes.base import Artifact, RandomWeights, Runtime, projector_path

GATE_VERSION = 4
"""Version of the equivalence check. Raise it when the same logits may get another verdict."""

DEADLINE_S = 120.0
"""Of one run of the reference model."""

CHECK_RUNS = 3
"""Runs of the reference model in a health check, or before a known calibration is used."""

CALIBRATION_RUNS = 10
"""Runs of the reference model of which a calibration is the floor, unless they take very long."""

CALIBRATION_S = 90.0
"""Seconds of a calibration above which it is the floor of fewer runs, at least `CHECK_RUNS`."""


def export_key(layout: Layout, runtime: Runtime, quantisation: str, weights: str) -> str:
    """Returns the key of an artifact, whose bytes depend on nothing else."""
    return result_key(
        "export",
        layout=layout.to_json(),
        runtime=runtime.name,
        quantisation=quantisation,
        weights=weights,
        writer=runtime.writer_version,
        plugins=layout.plugin_versions,
    )


def measure_key(
    artifact: str,
    runner: Runner,
    device: str,
    workload: Workload,
    repetitions: int,
    protocol: MeasurementSettings,
    calibration: ReferenceTimes,
    replicate: int = 0,
    energy_counter: str | None = None,
    page_size: int | None = None,
) -> str:
    """Returns the key of a measurement.

    It depends on the deadline, which decides about a failure, not on the number of attempts. A higher `replicate`
    measures the same thing once more; `energy_counter` and `page_size` are the device's at that time. Times are checked
    against the reference model whatever kernel runs; peak memory is not, and it depends on the page size.
    """
    return result_key(
        "measure",
        artifact=artifact,
        runtime=runner.runtime,
        build=runner.build,
        device=device,
        workload=workload.key(),
        repetitions=repetitions,
        protocol=PROTOCOL_VERSION,
        deadline_s=protocol.deadline_s,
        calibration=[calibration.ttft_ms, calibration.decode_ms],
        replicate=replicate,
        energy_counter=energy_counter,
        page_size=page_size,
    )


def gate_key(artifact: str, build: str) -> str:
    """Returns the key of an equivalence check of one trained artifact on one build."""
    return result_key("gate", artifact=artifact, build=build, gate=GATE_VERSION)


def reference_layout(runtime: Runtime, weights: int | None) -> Layout:
    """Returns the reference model whose size is next to `weights`; None: the one of health checks.

    Other processes slow models of like size down alike.
    """
    layouts = runtime.reference_models()
    if weights is None:
        return layouts[0]
    return min(layouts, key=lambda layout: abs(math.log(layout.params.active / weights)))


def reference_model(
    store: Store, scratch: Path, runtime: Runtime, quantisation: str, weights: int | None = None
) -> Artifact:
    """Returns the exported reference model for models of so many weights, from the store if it is there.

    Raises:
        InfrastructureFailed: the disk is full.
    """
    layout, values = reference_layout(runtime, weights), RandomWeights()
    key = export_key(layout, runtime, quantisation, values.describe())
    row = results.get(store, key)
    if row is not None and "value" in row.payload:  # else a failure, such as of an imported study
        artifact = Artifact.model_validate(row.payload["value"])
        if artifacts.intact(store, artifact.stored.sha256):
            return artifact
    artifact = export_to_store(store, scratch, runtime, layout, quantisation, values)
    artifacts.pin(store, artifact.stored.sha256, f"reference:{runtime.name}")
    results.put(store, key, "export", {"value": artifact.model_dump(mode="json")})
    return artifact


def export_to_store(
    store: Store, scratch: Path, runtime: Runtime, layout: Layout, quantisation: str, weights: RandomWeights
) -> Artifact:
    """Exports a model, or its recipe, into the store.

    Raises:
        InfrastructureFailed: the disk is full.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        destination = Path(folder) / "model"
        artifact = runtime.export(layout, quantisation, weights, destination, recipe=True)
        for path, _ in zip((destination, projector_path(destination)), artifact.written, strict=False):
            artifacts.put_file(store, path)
    return artifact


def reference_plan(
    runtime: Runtime,
    runner: Runner,
    model: Artifact,
    device: Device,
    workload: Workload | None = None,
    deadline_s: float = DEADLINE_S,
) -> Plan:
    """Plans one run of the reference model alone; `workload` None: that of health checks."""
    return runtime.plan(model, runner, device.pinned(workload or runtime.reference_workload()), deadline_s)


def calibration_name(plan: Plan) -> str:
    """Returns the name of a calibration, which depends on runner, model, workload, threads, cores and protocol."""
    inputs = plan.model_dump(mode="json")["inputs"]
    conditions = {"build": plan.runner.build, "inputs": inputs, "args": plan.args, "threads": plan.threads}
    return content_hash(conditions | {"protocol": PROTOCOL_VERSION, "affinity": plan.affinity})


def known_calibration(store: Store, key: CalibrationKey) -> ReferenceTimes | None:
    """Returns the calibration of a device for one runtime and `calibration_name`; None where there is none."""
    row = calibrations.get(store, *key)
    return None if row is None else ReferenceTimes.model_validate(row.samples["times"])


def keep_calibration(
    store: Store, key: CalibrationKey, samples: Sequence[Sample], plan: Plan, *, disturbed: bool
) -> ReferenceTimes:
    """Stores what reference runs of a plan tell as the device's calibration, and returns it."""
    times = reference_times(samples, plan.threads, disturbed=disturbed)
    clock = clock_of(samples, plan.threads)
    stored = {
        "times": times.model_dump(),
        "clock": clock,
        "runs_ms": [run_times(sample, clock).run_ms for sample in samples],
        "build": plan.runner.build,
    }
    calibrations.put(store, *key, times.run_ms, stored)
    return times
