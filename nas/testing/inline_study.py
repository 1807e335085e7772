"""Studies within this process: the real orchestrator on a store, with a fake runtime; runs and trainings are computed.

A study of a few candidates takes a second. Devices and trainings are what a test or a simulation makes of them:
`InlineJobs.slowness` is the noise of measurements, `InlineCompute.train` what a training yields.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from nas.core.device import Device
from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import REFERENCE, Conditions, EnergyUsed, Pair, Plan, RawRun, Round, RoundResult
from nas.core.space import SearchSpace
from nas.core.workload import Workload
from nas.infra.store import artifacts, events, leases, results, studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import MeasurementTarget
from nas.measure.protocol.estimator import reference_times
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.measure.protocol.rounds import Reference
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights
from nas.model.text.corpus import CorpusRef
from nas.search.compute import worker
from nas.search.compute.worker import Work
from nas.search.proxy.job import TrainJob, TrainResult, weights_file
from nas.search.study.check import support_filter
from nas.search.study.events import Calibrated
from nas.search.study.ledger import Ledger
from nas.search.study.orchestrator import Orchestrator
from nas.search.study.proposals import ProposalDriver
from nas.search.study.stages import Stages, StageWork, Trainings
from nas.testing import fake_runner
from nas.testing.fake_runtime import FakeRuntime

DEVICE = Device(
    id="box", model="Box", cpu="cpu", target="x86_64-linux", cpu_features=(), cores=2, memory_mb=1024, os="Linux"
)


def raw(report: Sample | None = None, exit_code: int = 0, **conditions: Any) -> RawRun:
    """A run that reported `report`, or left nothing."""
    stdout = ""
    if report:
        printed = {"v": 1, **report.model_dump(mode="json")}
        if report.reference:
            printed["reference"]["v"] = 1
        stdout = json.dumps(printed)
    return RawRun(
        exit_code=exit_code, stdout=stdout, wall_s=0.1, started_at=0.0, conditions=Conditions(**conditions)
    )  # fmt: skip


@dataclass
class InlineJobs:
    """Runs rounds of the fake runtime here. Remembers them, as the job table does."""

    store: Store
    done: dict[tuple[str, int], RoundResult] = field(default_factory=dict)
    foreign_cpu: float | None = None
    """What other processes use meanwhile."""
    slowness: Callable[[int | None], float] = lambda trial: 1.0
    """Factor on all times of a measurement of a trial, called once per measurement."""

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        await asyncio.sleep(0)
        if (key, number) not in self.done:
            assert results.get(self.store, key) is None, "measured again after the result was stored"
            reference = None if round_.reference is None else self._run(round_.reference)
            slow = self.slowness(trial)
            runs = [self._run(round_.candidate, nth, slow) for nth in range(round_.repetitions)]
            pairs = [Pair(reference=reference, candidate=run, foreign_cpu=self.foreign_cpu) for run in runs]
            self.done[key, number] = RoundResult(pairs=pairs, wall_s=0.5)
        return self.done[key, number]

    def _run(self, plan: Plan, repetition: int = 0, slow: float = 1.0) -> RawRun:
        models = {}
        for name, file in plan.inputs.items():
            content = artifacts.path(self.store, file.travels.sha256).read_bytes()
            models[name] = json.loads(content[::-1] if file.recipe else content)
        model = models["model"]
        options = dict(zip(plan.args[::2], plan.args[1::2], strict=True))
        if options["--fault"] == "crash":
            return raw(exit_code=-11)
        sizes = {name: int(options[f"--{name}"]) for name in ("prompt", "gen", "context")}
        times = {name: slow * value for name, value in model["figures"].items() if name.endswith("_ns")}
        media = {name: int(options.get(f"--{name}", 0)) for name in ("images", "sounds")}
        report = fake_runner.report({**model["figures"], **times}, Namespace(**sizes, **media))
        if REFERENCE in models:
            blind = Namespace(**sizes, images=0, sounds=0)
            report["reference"] = fake_runner.report(models[REFERENCE]["figures"], blind)
        # A joule a token, and as many more as the model has MB: larger ones take more.
        steps = round(1e6 * sizes["gen"] * (1 + model["figures"]["weights_mb"])) + repetition
        energy = EnergyUsed(counter="RAPL package", joules=steps / 1e6, steps=steps)
        return RawRun(
            exit_code=0, stdout=json.dumps(report), wall_s=0.1, started_at=0.0, conditions=Conditions(energy=energy)
        )


def calibrated(
    jobs: InlineJobs, runtime: FakeRuntime, reference: Artifact, workloads: Iterable[Workload]
) -> MeasurementTarget:
    """`DEVICE` with what `reference` takes there under the workloads."""
    runner = runtime.runner(DEVICE.target)
    references = {}
    for workload in map(DEVICE.pinned, workloads):
        plan = runtime.plan(reference, runner, workload, 60.0)
        times = reference_times([runtime.parse(jobs._run(plan))], plan.threads)
        references[workload] = Reference(reference, plan, times)
    return MeasurementTarget(DEVICE, runtime, runner, "q4_0", references)


@dataclass
class InlineCompute:
    """Runs stages here; a training is made up from the layout's hash."""

    store: Store
    workers: int = 2
    fail: Callable[[str, Mapping[str, Any]], None] = lambda stage, spec: None
    """Called before each stage; may raise."""
    train: Callable[[TrainJob, Mapping[str, Any]], TrainResult] = lambda job, spec: trained(job, spec)
    """What a training yields."""

    async def run(self, work_: Work, spec: Mapping[str, Any], kind: str = "short") -> dict[str, Any]:
        await asyncio.sleep(0)
        stage = work_.__name__
        jobs = [TrainJob.model_validate(job) for job in spec.get("jobs", ())]
        for key in [Path(spec["destination"]).name] if stage == "export" else [job.key for job in jobs]:
            assert results.get(self.store, key) is None, f"{stage} again after the result was stored"
        self.fail(stage, spec)
        if work_ is worker.train:
            return {"value": {job.key: self._outcome(job, spec) for job in jobs}, "seconds": 2.0 * len(jobs)}
        return work_(spec)

    def _outcome(self, job: TrainJob, spec: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"value": self.train(job, spec).model_dump(mode="json")}
        except CandidateFailed as error:
            return {"failed": {"reason": error.reason, "message": str(error)}}


def trained(job: TrainJob, spec: Mapping[str, Any]) -> TrainResult:
    """Returns a training whose score follows from the layout's hash; after the first quantisation it is half of it."""
    luck = int(Layout.from_json(job.layout).id[:6], 16) / 16**6
    score = (1 + luck) * (1 - 1 / job.steps) + 0.01 * job.seed
    names = () if job.rounding is None else job.rounding.quantisations
    rounded = {name: {"lm/text": score / (1 if number else 2)} for number, name in enumerate(names)}
    weights = weights_file(Path(spec["checkpoints"]), job.key)
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_text(job.key)
    return TrainResult(
        key=job.key, scores={"lm/text": score}, losses={"lm/text": 8 - score}, accuracy={"lm/text": 0.5}, curve=[],
        steps=job.steps, tokens=job.steps, seconds=2.0, cpu_seconds=2.0, device="cpu",
        weights_sha256=sha256(weights.read_bytes()).hexdigest(), rounded=rounded,
    )  # fmt: skip


@dataclass
class Bed:
    """A study that can be run, ended and resumed within this process.

    Args:
        store: open.
        folder: for everything else.
        space: of the study.
        runtime: the fake one.
    """

    store: Store
    folder: Path
    space: SearchSpace
    runtime: FakeRuntime
    jobs: InlineJobs = field(init=False)
    compute: InlineCompute = field(init=False)
    messages: list[tuple[int | None, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        RUNTIMES.add("fake", self.runtime)
        self.jobs, self.compute = InlineJobs(self.store), InlineCompute(self.store)

    def log(self, line: str) -> None:
        """Keeps a line of the log among the events."""
        self.messages.append((None, line))

    def ledger(self, kind: type[Ledger] = Ledger, name: str = "study") -> Ledger:
        """The study's ledger under a new lease; the study is made if there is none."""
        space = self.space.model_dump(mode="json")
        if name not in [study.name for study in studies.all(self.store)]:
            study = studies.create(self.store, name, space, seed=self.space.search.seed, version="0")
            build = self.runtime.runner(DEVICE.target).build
            note = Calibrated("local", "fake", DEVICE.id, build, 1.0, PROTOCOL_VERSION, {}, {})
            events.append(self.store, study.id, note.to_json())
        study = studies.get(self.store, name)
        if (old := leases.current(self.store, study.id)) is not None:
            leases.release(self.store, old)
        lease = leases.acquire(self.store, study.id, leases.new_holder())
        return kind(self.store, study, lease, lambda trial, what, payload: self.messages.append((trial, what)))

    def work(self, ledger: Ledger) -> StageWork:
        """Stages that run here."""
        return StageWork(
            space=self.space,
            targets={("local", "fake"): self.target()},
            corpus=CorpusRef(source="default", hash="0" * 64),
            stages=Stages(ledger, first_pause_s=0.0),
            ledger=ledger,
            compute=self.compute,
            trainings=Trainings(self.compute, self.folder / "work", self.folder / "lock"),
            jobs=self.jobs,
            scratch=self.folder / "work",
            lock=self.folder / "lock",
        )

    def target(self) -> MeasurementTarget:
        """The device, calibrated on what the fake reports."""
        reference = self.folder / "reference"
        artifact = self.runtime.export(self.runtime.reference_models()[0], "q4_0", RandomWeights(), reference)
        artifacts.put_file(self.store, reference)
        return calibrated(self.jobs, self.runtime, artifact, self.space.workloads.values())

    def orchestrator(self, ledger: Ledger, trials: int) -> Orchestrator:
        """To be made inside a running event loop."""
        proposals = ProposalDriver(self.space, support_filter(self.space), self.folder / "lock")
        return Orchestrator(self.work(ledger), ledger, proposals, trials, self.log)

    def run(self, trials: int = 5, kind: type[Ledger] = Ledger, seconds: float = 200.0) -> StudyState:
        """Runs the study to its end."""

        async def go() -> StudyState:
            return await asyncio.wait_for(self.orchestrator(self.ledger(kind), trials).run(), seconds)

        return asyncio.run(go())
