"""Whose failure it is, and what becomes of devices, under any order of failures, checks and decisions of people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from exhaustive import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_support import RESULT, StillClock, device, key, new_study, open_store, proposal, round_of

from nas.core.wire import Failure, Phase
from nas.infra.store import agents, devices, jobs, outcomes, trials
from nas.infra.store.devices import phase_limit_s
from nas.infra.store.outcomes import BAD_AFTER_JOBS
from nas.infra.store.rows import Blame, CheckOutcome, Health, JobKind, JobRow, JobState

BOX = st.sampled_from(["box", "phone"])
ON_ITSELF = "box"
"""The device that its agent runs on."""

TRIALS = 2
PHASES: list[Phase] = ["preparing", "running"]
End = Literal["result", "failure", "silence", "overrun"]
ENDS: list[End] = ["result", "failure", "failure", "failure", "silence", "overrun"]


@dataclass(frozen=True)
class Telling:
    """A failure that may be the candidate's."""

    job: str
    trial: int | None
    device: str
    at: float

    def concerns(self, job: JobRow) -> bool:
        """Whether it may be of the same candidate."""
        return self.job == job.id or (self.trial is not None and self.trial == job.trial)


class Blames(RuleBasedStateMachine):
    """Two devices with one job of each of two trials and one check; whatever ends is queued again."""

    @initialize()
    def start(self) -> None:
        self.folder, self.clock = TemporaryDirectory(), StillClock()
        self.store = open_store(Path(self.folder.name), self.clock)
        for box in ("box", "phone"):
            agents.register_local(self.store, f"agent-{box}")
            about = device(box, transport="local" if box == ON_ITSELF else "ssh")
            devices.register(self.store, f"agent-{box}", [about], boot_id="boot")
        self.study = new_study(self.store).id
        trials.propose(self.store, self.study, [proposal(32 * (1 + n)) for n in range(TRIALS)])
        self.serial = 0
        for box in ("box", "phone"):
            for trial in (*range(TRIALS), None):
                self.queue(box, trial)
        self.tellings: list[Telling] = []
        self.passed = {"box": 0.0, "phone": 0.0}
        self.failed_jobs: dict[str, set[str]] = {"box": set(), "phone": set()}
        self.decided: dict[str, Health] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def queue(self, box: str, trial: int | None) -> None:
        self.serial += 1
        kind = JobKind.CHECK if trial is None else JobKind.MEASURE
        of = None if trial is None else (self.study, trial)
        jobs.enqueue(self.store, key(self.serial), round_of(), device=box, kind=kind, trial=of)

    @rule(box=BOX, phase=st.sampled_from(PHASES), end=st.sampled_from(ENDS))
    def work(self, box: str, phase: Phase, end: End) -> None:
        """The device's next job is leased, comes as far as `phase`, and ends."""
        self.clock.time += 1000
        self.beat(box)
        row = devices.get(self.store, box)
        job = jobs.claim(self.store, box, f"agent-{box}")
        if job is None:
            return
        assert row.health in (Health.GOOD, Health.UNKNOWN) or (row.health, job.kind) == (Health.BAD, JobKind.CHECK)
        assert jobs.renew(self.store, job.id, box, f"agent-{box}", job.epoch or 0, phase=phase)
        getattr(self, end)(job, phase)
        after = self.job(job.id)
        if end == "result":
            assert after.state is JobState.DONE
        else:
            self.failed(after, telling=phase == "running" and (end != "silence" or box == ON_ITSELF))
        if after.state is not JobState.QUEUED:
            self.queue(box, job.trial)

    def result(self, job: JobRow, phase: Phase) -> None:
        assert outcomes.submit(self.store, *self.who(job), RESULT).accepted

    def failure(self, job: JobRow, phase: Phase) -> None:
        failure = Failure(kind="infrastructure", message="lost", phase=phase)
        assert outcomes.fail(self.store, *self.who(job), failure).accepted

    def silence(self, job: JobRow, phase: Phase) -> None:
        self.clock.time += jobs.LEASE_S
        assert outcomes.expire(self.store) == [job.id]

    def overrun(self, job: JobRow, phase: Phase) -> None:
        end = self.clock.time + phase_limit_s(phase, job.payload)
        while self.clock.time < end:
            assert jobs.renew(self.store, *self.who(job), phase=phase)
            self.clock.time = min(end, self.clock.time + 20)
        assert not jobs.renew(self.store, *self.who(job), phase=phase)
        assert outcomes.expire(self.store) == [job.id]

    def who(self, job: JobRow) -> tuple[str, str, str, int]:
        return job.id, job.device, f"agent-{job.device}", job.epoch or 0

    def failed(self, job: JobRow, *, telling: bool) -> None:
        """The candidate is blamed where it failed before, and the device of that failure has worked since."""
        before = [
            failure for failure in self.tellings if failure.concerns(job) and failure.at < self.passed[failure.device]
        ]
        undone = [failure for failure in before if self.job(failure.job).state is not JobState.DONE]
        blamed = telling and job.kind is JobKind.MEASURE and bool(undone)
        assert (job.blame is Blame.CANDIDATE) == blamed
        if telling:
            self.tellings.append(Telling(job.id, job.trial, job.device, self.clock.time))
        self.failed_jobs[job.device].add(job.id)
        row = devices.get(self.store, job.device)
        if job.device not in self.decided and len(self.failed_jobs[job.device]) >= BAD_AFTER_JOBS:
            assert row.health is Health.BAD
        assert row.health is not Health.GOOD

    def job(self, id: str) -> JobRow:
        row = jobs.get(self.store, id)
        assert row is not None
        return row

    @rule(box=BOX, outcome=st.sampled_from(CheckOutcome))
    def check(self, box: str, outcome: CheckOutcome) -> None:
        self.clock.time += 1
        self.beat(box)
        row = devices.get(self.store, box)
        assert outcomes.conclude_check(self.store, box, row.check_number, outcome, "why", self.clock.time)
        late = (CheckOutcome.FAILED, "late", self.clock.time)
        assert not outcomes.conclude_check(self.store, box, row.check_number, *late)
        health = row.health
        if box not in self.decided and outcome is not CheckOutcome.UNSURE:
            health = Health.GOOD if outcome is CheckOutcome.PASSED else Health.BAD
        if health is Health.GOOD and outcome is CheckOutcome.PASSED:
            self.passed[box] = self.clock.time
            self.failed_jobs[box].clear()
        assert devices.get(self.store, box).health is health

    @rule(box=BOX, health=st.sampled_from([Health.MAINTENANCE, Health.RETIRED]))
    def take_out(self, box: str, health: Health) -> None:
        devices.set_health(self.store, box, health, "a person")
        self.decided[box] = health

    @rule(box=BOX)
    def bring_back(self, box: str) -> None:
        if self.decided.pop(box, None):
            devices.set_health(self.store, box, Health.UNKNOWN, "a person")

    def beat(self, box: str) -> None:
        """The agent is there: what is tested here is not its absence."""
        with self.store.write() as connection:
            devices.heard_from(connection, devices.read(connection, box), self.clock.time)

    @invariant()
    def nothing_is_doubtful_for_ever(self) -> None:
        for row in devices.all(self.store) if hasattr(self, "store") else []:
            assert (row.check_due is not None) == (row.health in (Health.UNKNOWN, Health.BAD))
            assert self.decided.get(row.id, row.health) is row.health, "a person's decision was overruled"
            assert row.lease_until is None, "every job of this test has ended"


TestBlames = Blames.TestCase
TestBlames.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
