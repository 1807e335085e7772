"""Measures every layout on every target of this machine, one repetition a round, through the code that studies use."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lines import read_lines
from benchmarks.runs import say
from nas.core.canonical import content_hash
from nas.core.device import Device
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.measurement import Measurement, ReferenceTimes
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.workload import Workload
from nas.infra.store.store import Store
from nas.measure.devices.agent.connection import find
from nas.measure.devices.attachments import Attachment, agent_cache, open_transport, own_attachments
from nas.measure.devices.describe import ISA_FEATURES
from nas.measure.farm.farm import LOCAL, Farm, open_farm, this_machine
from nas.measure.protocol.calibration import (
    DEPLOY_SEED,
    Calibrator,
    MeasurementTarget,
    SavedCalibration,
)
from nas.measure.protocol.reference import export_to_store
from nas.measure.protocol.rounds import Subject, measure
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

RUNTIME_SPACES = {
    "llama.cpp": RuntimeSpace(name="llama.cpp", quantisation="q4_0", build="any"),
    "executorch": RuntimeSpace(name="executorch", quantisation="8da4w"),
}
FIGURES = ("ttft", "decode_p50", "peak_rss")
_PROTOCOL = MeasurementSettings(deadline_s=120.0)


@dataclass(frozen=True)
class Target:
    """A device of this machine with a runtime and a number of threads.

    Args:
        name: unique; the last part is the number of threads.
        device: `local`, or its level of x86-64.
        runtime: key of `RUNTIME_SPACES`.
        threads: of each process.
        repeats: name of the target whose builds and threads are the same: their difference is noise.
    """

    name: str
    device: str
    runtime: str
    threads: int
    repeats: str = ""


def workload(threads: int) -> Workload:
    """Returns the request that is measured."""
    return Workload(prompt=128, gen=32, threads=threads)


def targets_of(machine: Device) -> list[Target]:
    """Returns the targets that a machine has: llama.cpp at each level of x86-64, and ExecuTorch; one and two threads.

    The machine itself is a target where its llama.cpp build is none of the levels', else a repetition with one thread.
    Builds are made where they are missing.
    """
    levels = [name for name, features in ISA_FEATURES.items() if set(features) <= set(machine.cpu_features)]
    variants = {name: LLAMA_CPP.variant_for(machine.target, ISA_FEATURES[name]).name for name in levels}
    native = LLAMA_CPP.variant_for(machine.target, machine.cpu_features).name
    for variant in {*variants.values(), native}:
        LLAMA_CPP.build(log=say, patched=True, variant=variant)
    EXECUTORCH.build(log=say)
    same = next((name for name, variant in variants.items() if variant == native), None)
    targets = []
    for threads in (1, 2):
        for level in levels:
            short = level.removeprefix("x86-64-")
            targets.append(Target(f"llama.cpp {short} {threads}", f"{LOCAL}:{level}", "llama.cpp", threads))
        if same is None:
            targets.append(Target(f"llama.cpp native {threads}", LOCAL, "llama.cpp", threads))
        elif threads == 1:
            repeats = f"llama.cpp {same.removeprefix('x86-64-')} 1"
            targets.append(Target(f"{repeats} again", LOCAL, "llama.cpp", 1, repeats))
        targets.append(Target(f"ExecuTorch {threads}", LOCAL, "executorch", threads))
    return targets


class Bench:
    """This machine's targets, calibrated, and a folder that keeps everything.

    Args:
        farm: serves the devices.
        folder: keeps calibrations and measurements.
    """

    def __init__(self, farm: Farm, folder: Path) -> None:
        self._farm, self._folder = farm, folder
        self.ready: dict[str, MeasurementTarget] = {}

    async def prepare(self, targets: Sequence[Target]) -> None:
        """Calibrates targets, or takes the calibrations that the folder keeps: its figures then compare.

        Raises:
            StudyChanged: a build or the device changed since.
        """
        for target in targets:
            path = self._folder / f"calibration-{target.name.replace(' ', '-')}.json"
            saved = None
            if path.exists():
                record = json.loads(path.read_text())
                times = {name: ReferenceTimes.model_validate(row) for name, row in record["times"].items()}
                saved = SavedCalibration(record["build"], times, record["conditions"])
            load = workload(target.threads)
            calibrator = Calibrator(
                self._farm, self._farm.jobs(None), _PROTOCOL, self._folder / "work", say, {"request": load}, 38_000_000
            )
            prepared = calibrator.prepare(_device_name(target.device), RUNTIME_SPACES[target.runtime])
            ready = await calibrator.calibrated(prepared, saved)
            self.ready[target.name] = ready
            if saved is None:
                (reference,) = ready.references.values()
                note = {
                    "build": ready.runner.build,
                    "times": {"request": reference.calibration.model_dump(mode="json")},
                    "conditions": prepared.conditions,
                }
                write_durably(path, json.dumps(note).encode())

    async def measure(self, target: Target, artifact: Artifact) -> Measurement:
        """Measures one repetition."""
        ready = self.ready[target.name]
        ((load, reference),) = ready.references.items()
        subject = Subject(artifact, ready.runtime, ready.runner, ready.device, load)
        key = content_hash({"targets": artifact.sha256, "at": time.time(), "on": target.name})
        return await measure(subject, reference, self._farm.jobs(None), key, None, 1, _PROTOCOL)


def run(folder: Path, layouts: Sequence[Layout], rounds: int, minutes: float) -> None:
    """Measures what the folder lacks; begins no measurement after `minutes`. It may be killed at any moment.

    Layouts of a round come in an order of their own, and a layout's targets as well, so that no drift of the machine
    falls on one of them. A measurement is one line of measurements.jsonl.
    """
    folder = folder.resolve()
    (folder / "home").mkdir(parents=True, exist_ok=True)
    os.environ["NAS_HOME"] = str(folder / "home")
    targets = targets_of(this_machine())
    for address in sorted({target.device for target in targets} - {LOCAL}):
        attach(address)
    store = Store.open(None)
    try:
        artifacts = _exported(folder, layouts, store)
        write_durably(folder / "targets.json", json.dumps([vars(target) for target in targets]).encode())
        ends = time.monotonic() + 60 * minutes
        with open_farm(store) as farm:
            asyncio.run(_run(Bench(farm, folder), targets, artifacts, rounds, ends, folder))
    finally:
        store.close()


async def _run(
    bench: Bench,
    targets: Sequence[Target],
    artifacts: Mapping[tuple[int, str], Artifact],
    rounds: int,
    ends: float,
    folder: Path,
) -> None:
    done = {(row["layout"], row["target"], row["round"]) for row in read_rows(folder)}
    if time.monotonic() < ends:
        await bench.prepare(targets)
    todo = [place for place in _order(len(artifacts) // len(RUNTIME_SPACES), targets, rounds)]
    missing = [(layout, target, number) for layout, target, number in todo if (layout, target.name, number) not in done]
    say(f"{len(todo)} measurements, {len(missing)} missing")
    start = time.monotonic()
    with (folder / "measurements.jsonl").open("a") as file:
        for count, (layout, target, number) in enumerate(missing):
            if time.monotonic() > ends:
                say(f"time is up: {len(missing) - count} measurements are missing")
                return
            measurement = await bench.measure(target, artifacts[layout, target.runtime])
            file.write(json.dumps(_row(layout, target, number, measurement)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if count % 50 == 49:
                pace = (time.monotonic() - start) / (count + 1)
                say(f"{count + 1} measured, {pace:.2f} s each, {pace * (len(missing) - count - 1) / 60:.0f} min to go")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the measurements of a folder."""
    return read_lines(folder / "measurements.jsonl")


def attach(address: str) -> None:
    """Attaches this machine as one of a level of x86-64, as `nas device add local --isa` does."""
    with closing(open_transport(address, agent_cache())) as transport:
        device = find(Attachment(address=address), transport).device
    own_attachments().add(Attachment(address=address, id=device.id))


def _device_name(address: str) -> str:
    if address == LOCAL:
        return LOCAL
    id = next(entry.id for entry in own_attachments().read() if entry.address == address)
    assert id is not None, "`attach` writes it"
    return id


def _exported(folder: Path, layouts: Sequence[Layout], store: Store) -> dict[tuple[int, str], Artifact]:
    """Exports what the folder lacks. ExecuTorch lowers each shape of a block once, some seconds each."""
    path = folder / "artifacts.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    artifacts: dict[tuple[int, str], Artifact] = {}
    for index, layout in enumerate(layouts):
        for name, spec in RUNTIME_SPACES.items():
            key = f"{name} {layout.id}"
            if key not in records:
                say(f"exporting {index + 1} of {len(layouts)} for {name}")
                artifact = export_to_store(
                    store, folder / "work", RUNTIMES[name], layout, spec.quantisation, RandomWeights(DEPLOY_SEED)
                )
                records[key] = artifact.model_dump(mode="json")
                write_durably(path, json.dumps(records).encode())
            artifacts[index, name] = Artifact.model_validate(records[key])
    return artifacts


def _order(layouts: int, targets: Sequence[Target], rounds: int) -> Iterator[tuple[int, Target, int]]:
    for number in range(rounds):
        rng = random.Random(number)
        for layout in rng.sample(range(layouts), layouts):
            for target in rng.sample(list(targets), len(targets)):
                yield layout, target, number


def _row(layout: int, target: Target, number: int, measurement: Measurement) -> dict[str, Any]:
    figures = {name: measurement.figures[name].value for name in FIGURES}
    return {
        "layout": layout,
        "target": target.name,
        "round": number,
        **{name: None if value is None else float(f"{value:.6g}") for name, value in figures.items()},
        "foreign_cpu": measurement.foreign_cpu and round(measurement.foreign_cpu, 3),
        "drift": measurement.drift and round(measurement.drift, 4),
        "seconds": round(measurement.wall_s, 3),
    }
