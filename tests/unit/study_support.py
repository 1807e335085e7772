"""What the tests of the service share: a tiny space, and a study whose compute and devices are this process."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from nas.core.device import Device
from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.measurement import Figure, ReferenceTimes, Sample
from nas.core.plan import Conditions, EnergyUsed, Pair, Plan, RawRun, Round, RoundResult
from nas.core.space import SearchSpace
from nas.core.stats import Z95
from nas.infra.store import artifacts, events, leases, results, studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import MeasurementTarget
from nas.measure.protocol.estimator import read_times
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.measure.protocol.rounds import Reference
from nas.measure.runtimes import RUNTIMES
from nas.model.text.corpus import CorpusRef
from nas.search.analysis.archive import export_study
from nas.search.analysis.record import MeasurementSummary, read_study
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.compute import worker
from nas.search.compute.worker import Work
from nas.search.proxy.job import LmRun, TrainJob, TrainResult, weights_file
from nas.search.study.check import support_filter
from nas.search.study.events import Calibrated
from nas.search.study.ledger import Ledger
from nas.search.study.orchestrator import Orchestrator
from nas.search.study.proposals import ProposalDriver
from nas.search.study.stages import Stages, StageWork, Trainings
from nas.testing import fake_runner
from nas.testing.fake_runtime import FakeRuntime

CHAT = {"workload": "chat"}
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"d_model": 128, "depth": {"min": 2, "max": 4}, "vocab": 256},
    "mixers": {"conv": {"kernel": [3, 4]}, "gqa": {"heads": 2, "kv_heads": {"choices": [1, 2], "scope": "layer"}}},
    "ffn": {"swiglu": {"width": [256, 320, 384, 448, 512]}},
    "limits": {"gqa": {"min": 1}},
    "devices": ["local"],
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": 64, "gen": 16}},
    "budgets": [{"metric": "peak_rss", "max": "2x", **CHAT}, {"metric": "decode_p50", "max": "1.6x", **CHAT}],
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", **CHAT},
        {"name": "memory", "metric": "peak_rss", **CHAT},
    ],
    "references": {
        "published": "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]",
        "attention": "d128 v256 ffn=swiglu:352 [A2/1*3]",
    },
    "quality": {
        "proxy_d_model": 32,
        "rungs": [
            {"name": "first", "lm_steps": 6, "keep": 0.5},
            {"name": "second", "lm_steps": 12, "keep": 0.5},
            {"name": "third", "lm_steps": 24, "seeds": [0, 1]},
        ],
    },
    "protocol": {"screen_repetitions": 2, "confirm_repetitions": 3},
    "search": {"proposer": "evolution", "seeds": 3, "pool": 16},
}
DEVICE = Device(
    id="box", model="Box", cpu="cpu", target="x86_64-linux", cpu_features=(), cores=2, memory_mb=1024, os="Linux"
)


def tiny_space(**changes: Any) -> SearchSpace:
    """The tiny space with other values of its first-level keys."""
    return SearchSpace.model_validate(TINY | changes)


def sample(ttft_ms: float = 10.0, token_ms: float = 1.0, tokens: int = 16, **more: Any) -> Sample:
    """A runner's report."""
    values: dict[str, Any] = {"load_ms": 5.0, "ttft_ms": ttft_ms, "peak_rss_mb": 50.0}
    return Sample(decode_ns=[round(token_ms * 1e6)] * tokens, **values | more)


def reference_times(report: Sample | None = None) -> ReferenceTimes:
    """What a reference model takes whose runs report `report`."""
    return read_times([report or sample()], 1).floors()


def raw(report: Sample | None = None, exit_code: int = 0, **conditions: Any) -> RawRun:
    """A run that reported `report`, or left nothing."""
    stdout = json.dumps({"v": 1, **report.model_dump(mode="json")}) if report else ""
    return RawRun(
        exit_code=exit_code, stdout=stdout, wall_s=0.1, started_at=0.0, conditions=Conditions(**conditions)
    )  # fmt: skip


def figure(value: float | None, spread: float = 0.0, unit: str = "ms", n: int = 3) -> Figure:
    """A figure whose 95 % interval is `spread` to either side, as a share."""
    if value is None:
        return Figure(value=None, unit=unit, reason="not read")
    sd = math.log1p(spread) / Z95
    return Figure(value=value, low=value / (1 + spread), high=value * (1 + spread), log_sd=sd, n=n, unit=unit)


def summary(figures: Mapping[str, Figure]) -> MeasurementSummary:
    """A measurement as records hold it."""
    return MeasurementSummary("0" * 64, json.dumps({name: each.model_dump() for name, each in figures.items()}))


def snapshot(store: Store) -> StudySnapshot:
    """A study as it is now."""
    return StudySnapshot(read_study(store, "study"))


@dataclass
class ScriptedJobs:
    """Answers each round with the next of `script`, or raises it; keeps what was asked."""

    script: list[RoundResult | Exception]
    asked: list[tuple[str, int, Round]] = field(default_factory=list)

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        self.asked.append((key, number, round_))
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class InlineJobs:
    """Runs rounds of the fake runtime here. Remembers them, as the job table does."""

    store: Store
    done: dict[tuple[str, int], RoundResult] = field(default_factory=dict)
    foreign_cpu: float | None = None
    """What other processes use meanwhile."""

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        await asyncio.sleep(0)
        if (key, number) not in self.done:
            assert results.get(self.store, key) is None, "measured again after the result was stored"
            reference = None if round_.reference is None else self._run(round_.reference)
            runs = [self._run(round_.candidate, nth) for nth in range(round_.repetitions)]
            pairs = [Pair(reference=reference, candidate=run, foreign_cpu=self.foreign_cpu) for run in runs]
            self.done[key, number] = RoundResult(pairs=pairs, wall_s=0.5)
        return self.done[key, number]

    def _run(self, plan: Plan, repetition: int = 0) -> RawRun:
        given = plan.inputs["model"]
        content = artifacts.path(self.store, given.travels.sha256).read_bytes()
        model = json.loads(content[::-1] if given.recipe else content)
        options = dict(zip(plan.args[::2], plan.args[1::2], strict=True))
        if options["--fault"] == "crash":
            return raw(exit_code=-11)
        sizes = {name: int(options[f"--{name}"]) for name in ("prompt", "gen", "context")}
        report = fake_runner.report(model["figures"], Namespace(**sizes))
        # A joule a token, and as many more as the model has MB: larger ones take more.
        steps = round(1e6 * sizes["gen"] * (1 + model["figures"]["weights_mb"])) + repetition
        energy = EnergyUsed(counter="RAPL package", joules=steps / 1e6, steps=steps)
        return RawRun(
            exit_code=0, stdout=json.dumps(report), wall_s=0.1, started_at=0.0, conditions=Conditions(energy=energy)
        )


@dataclass
class InlineCompute:
    """Runs stages here; a training is made up from the layout's hash."""

    store: Store
    workers: int = 2
    fail: Callable[[str, Mapping[str, Any]], None] = lambda stage, spec: None
    """Called before each stage; may raise."""

    async def run(self, work_: Work, spec: Mapping[str, Any], kind: str = "short") -> dict[str, Any]:
        await asyncio.sleep(0)
        stage = work_.__name__
        jobs = [TrainJob.model_validate(job) for job in spec.get("jobs", ())]
        for key in [Path(spec["destination"]).name] if stage == "export" else [job.key for job in jobs]:
            assert results.get(self.store, key) is None, f"{stage} again after the result was stored"
        self.fail(stage, spec)
        if work_ is worker.train:
            return {"value": {job.key: _outcome(job, spec) for job in jobs}, "seconds": 2.0 * len(jobs)}
        return work_(spec)

    def close(self) -> None:
        """Nothing to stop."""


def _outcome(job: TrainJob, spec: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _trained(job, spec).model_dump(mode="json")}
    except CandidateFailed as error:
        return {"failed": {"reason": error.reason, "message": str(error)}}


def _trained(job: TrainJob, spec: Mapping[str, Any]) -> TrainResult:
    luck = int(Layout.from_json(job.layout).id[:6], 16) / 16**6
    score = (1 + luck) * (1 - 1 / job.steps) + 0.01 * job.seed
    weights = weights_file(Path(spec["checkpoints"]), job.key)
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_text(job.key)
    return TrainResult(
        key=job.key, scores={"lm/text": score}, losses={"lm/text": 8 - score}, accuracy={"lm/text": 0.5}, curve=[],
        steps=job.steps, tokens=job.steps, seconds=2.0, cpu_seconds=2.0, device="cpu",
        weights_sha256=sha256(weights.read_bytes()).hexdigest(),
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
    told: list[tuple[int | None, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        RUNTIMES.add("fake", self.runtime)
        self.jobs, self.compute = InlineJobs(self.store), InlineCompute(self.store)

    def log(self, line: str) -> None:
        """Keeps a line of the log among the events."""
        self.told.append((None, line))

    def ledger(self, kind: type[Ledger] = Ledger, name: str = "study") -> Ledger:
        """The study's ledger under a new lease; the study is made if there is none."""
        space = self.space.model_dump(mode="json")
        if name not in [study.name for study in studies.all(self.store)]:
            made = studies.create(self.store, name, space, seed=self.space.search.seed, version="0")
            build = self.runtime.runner(DEVICE.target).build
            note = Calibrated("local", "fake", DEVICE.id, build, 1.0, PROTOCOL_VERSION, {}, {})
            events.append(self.store, made.id, note.to_json())
        study = studies.get(self.store, name)
        if (old := leases.current(self.store, study.id)) is not None:
            leases.release(self.store, old)
        lease = leases.acquire(self.store, study.id, leases.new_holder())
        return kind(self.store, study, lease, lambda trial, what, payload: self.told.append((trial, what)))

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
        runner = self.runtime.runner(DEVICE.target)
        reference = self.folder / "reference"
        from nas.measure.runtimes.base import RandomWeights

        artifact = self.runtime.export(self.runtime.reference_model(), "q4_0", RandomWeights(), reference)
        artifacts.put_file(self.store, reference)
        plan = self.runtime.plan(artifact, runner, self.runtime.reference_workload(), 60.0)
        calibration = read_times([self.runtime.parse(self.jobs._run(plan))], plan.threads).floors()
        return MeasurementTarget(DEVICE, self.runtime, runner, "q4_0", {plan.threads: Reference(plan, calibration)})

    def orchestrator(self, ledger: Ledger, trials: int) -> Orchestrator:
        """To be made inside a running event loop."""
        proposals = ProposalDriver(self.space, support_filter(self.space), self.folder / "lock")
        return Orchestrator(self.work(ledger), ledger, proposals, trials, self.log)

    def run(self, trials: int = 5, kind: type[Ledger] = Ledger, seconds: float = 200.0) -> StudyState:
        """Runs the study to its end."""

        async def go() -> StudyState:
            return await asyncio.wait_for(self.orchestrator(self.ledger(kind), trials).run(), seconds)

        return asyncio.run(go())


def archived_lines(folder: Path) -> list[dict[str, Any]]:
    """Runs a study of eight trials in `folder`, and returns the lines of its archive."""
    store = Store.open(f"sqlite:///{folder / 'nas.db'}", artifacts=folder / "artifacts")
    bed = Bed(store, folder, tiny_space(), FakeRuntime(folder / "fake"))
    assert bed.run(trials=8) is StudyState.COMPLETE
    with (folder / "study.jsonl.gz").open("wb") as file:
        export_study(store, studies.get(store, "study").id, file)
    store.close()
    return [json.loads(line) for line in gzip.decompress((folder / "study.jsonl.gz").read_bytes()).splitlines()]


def lm_job(steps: int = 3) -> TrainJob:
    """A training of the language model."""
    run = LmRun(corpus=CorpusRef(source="default", hash="0" * 64))
    layout = Layout.parse("d32 v256 ffn=swiglu:64 [C3 A2/1]").to_json()
    return TrainJob(
        layout=layout, run=run, steps=steps, batch=1, lr=0.1, warmup=0, weight_decay=0, clip=1, ema=0, seed=0
    )  # fmt: skip


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.02)
