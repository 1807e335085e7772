"""Jobs, leases, health and blame under any order of events: late or repeated messages, lost leases, checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from store_support import StillClock, device, key, new_study, open_store, proposal, round_of

from nas.core.plan import RoundResult
from nas.core.protocol import Failure, Phase
from nas.store import agents, checks, devices, jobs, outcomes, trials
from nas.store.rows import Blame, CheckOutcome, DeviceState, Health, JobKind, JobRow, JobState
from nas.store.timeouts import LIMITS, phase_limit_s

BOXES = ("box", "phone")
BUSY = {DeviceState.LEASED, DeviceState.PREPARING, DeviceState.COOLING}
TRIALS = 2
PHASES = st.sampled_from(["preparing", "cooling", "running"])


@dataclass(frozen=True)
class Telling:
    """A failure that may be the candidate's."""

    job: str
    trial: int | None
    device: str
    at: float

    def concerns(self, job: JobRow) -> bool:
        """Whether it may be the same candidate's."""
        return self.job == job.id or (self.trial is not None and self.trial == job.trial)


class Farm(RuleBasedStateMachine):
    """Two devices, each with its agent (one on the device itself), and messages that arrive late, twice or never."""

    claims = Bundle("claims")

    @initialize()
    def start(self) -> None:
        self.folder = TemporaryDirectory()
        self.clock = StillClock()
        self.store = open_store(Path(self.folder.name), self.clock)
        self.epochs = {self.register(box): 0 for box in BOXES}
        self.study = new_study(self.store).id
        trials.propose(self.store, self.study, [proposal(32 * (1 + n)) for n in range(TRIALS)])
        self.kept: dict[str, float] = {}
        self.tellings: list[Telling] = []
        self.passed = dict.fromkeys(BOXES, 0.0)
        self.decided: dict[str, Health] = {}

    def register(self, box: str) -> str:
        agents.register_local(self.store, f"agent-{box}")
        about = device(box, transport="local" if box == "box" else "ssh")
        devices.register(self.store, f"agent-{box}", [about], boot_id="boot")
        return box

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        name=st.integers(0, 4), box=st.sampled_from(BOXES), priority=st.integers(0, 1), kind=st.sampled_from(JobKind),
        trial=st.none() | st.integers(0, TRIALS - 1),
    )  # fmt: skip
    def enqueue(self, name: int, box: str, priority: int, kind: JobKind, trial: int | None) -> None:
        known = jobs.get(self.store, f"{key(name)}.0")
        job = jobs.enqueue(
            self.store, key(name), round_of(), device=box, priority=priority, kind=kind, trial=(self.study, trial)
        )
        if known is None:
            assert (job.state, job.device) == (JobState.QUEUED, box)
        elif known.state is JobState.CANCELLED:
            assert job.state is JobState.QUEUED
        else:
            assert job == known

    @rule(target=claims, box=st.sampled_from(BOXES))
    def claim(self, box: str) -> object:
        health = devices.get(self.store, box).health
        job = jobs.claim(self.store, box, f"agent-{box}")
        if job is None:
            return multiple()
        assert health in (Health.GOOD, Health.UNKNOWN) or (health is Health.BAD and job.kind is JobKind.CHECK)
        assert job.device == box
        assert job.epoch is not None and job.epoch > self.epochs[box], "an epoch was given twice"
        self.epochs[box] = job.epoch
        return job

    @rule(claim=claims, seconds=st.floats(0, 9))
    def submit(self, claim: JobRow, seconds: float) -> None:
        before = jobs.get(self.store, claim.id)
        assert before is not None and claim.epoch is not None
        verdict = outcomes.submit(
            self.store,
            claim.id,
            claim.device,
            f"agent-{claim.device}",
            claim.epoch,
            RoundResult(pairs=[], push_s=seconds),
        )
        current = claim.epoch == self.epochs[claim.device] and before.epoch == claim.epoch
        repeated = before.state is JobState.DONE and before.epoch == claim.epoch
        assert verdict.accepted == (current or repeated)
        if current and before.state is not JobState.DONE:
            self.kept[claim.id] = seconds

    @rule(claim=claims, kind=st.sampled_from(["infrastructure", "refused", "cancelled"]), phase=PHASES)
    def fail(self, claim: JobRow, kind: str, phase: Phase) -> None:
        before = jobs.get(self.store, claim.id)
        assert before is not None
        failure = Failure.model_validate({"kind": kind, "message": "no", "phase": phase})
        who = (claim.device, f"agent-{claim.device}", claim.epoch or 0)
        if outcomes.fail(self.store, claim.id, *who, failure).accepted and kind == "infrastructure":
            self.failed(before, telling=phase == "running")

    def failed(self, job: JobRow, *, telling: bool) -> None:
        """A job failed just now: its candidate is blamed where it failed before on a device that works since."""
        after = jobs.get(self.store, job.id)
        assert after is not None
        works_since = [each for each in self.tellings if each.concerns(job) and each.at < self.passed[each.device]]
        works_since = [each for each in works_since if self.state(each.job) is not JobState.DONE]
        blamed = telling and job.kind is JobKind.MEASURE and bool(works_since)
        assert (after.blame is Blame.CANDIDATE) == blamed
        if telling:
            self.tellings.append(Telling(job.id, job.trial, job.device, self.clock.time))

    def state(self, id: str) -> JobState:
        job = jobs.get(self.store, id)
        assert job is not None
        return job.state

    @rule(claim=claims, phase=PHASES)
    def renew(self, claim: JobRow, phase: Phase) -> None:
        who = (claim.device, f"agent-{claim.device}", claim.epoch or 0)
        if jobs.renew(self.store, claim.id, *who, phase=phase):
            assert claim.epoch == self.epochs[claim.device]
            assert devices.get(self.store, claim.device).lease_until == self.clock.time + jobs.LEASE_S

    @rule(claim=consumes(claims))
    def cancel(self, claim: JobRow) -> None:
        jobs.cancel(self.store, [claim.id])

    @rule(seconds=st.sampled_from([1.0, jobs.LEASE_S, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.expire()

    @rule()
    def everybody_falls_silent(self) -> None:
        self.clock.time += max(LIMITS[DeviceState.IDLE].seconds, phase_limit_s(None, round_of()))
        self.expire()
        assert all(job.state is JobState.QUEUED for job in jobs.live(self.store))
        assert {devices.get(self.store, box).state for box in BOXES} <= {DeviceState.OFFLINE, DeviceState.DRAINING}

    def expire(self) -> None:
        before = {job.id: job for job in jobs.live(self.store)}
        for id in outcomes.expire(self.store):
            job = before[id]
            overran = job.phase_until is not None and job.phase_until <= self.clock.time
            self.failed(job, telling=job.phase == "running" and (overran or job.device == "box"))

    @rule(box=st.sampled_from(BOXES), outcome=st.sampled_from(CheckOutcome))
    def check(self, box: str, outcome: CheckOutcome) -> None:
        self.clock.time += 1.0
        row = devices.get(self.store, box)
        assert checks.conclude(self.store, box, row.check_number, outcome, "why", self.clock.time)
        assert not checks.conclude(self.store, box, row.check_number, outcome, "why", self.clock.time)
        checked = box not in self.decided
        if checked and outcome is CheckOutcome.PASSED:
            self.passed[box] = self.clock.time
        after = {CheckOutcome.PASSED: Health.GOOD, CheckOutcome.FAILED: Health.BAD, CheckOutcome.UNSURE: row.health}
        assert devices.get(self.store, box).health is (after[outcome] if checked else row.health)

    @rule(box=st.sampled_from(BOXES), health=st.sampled_from([Health.MAINTENANCE, Health.RETIRED, Health.UNKNOWN]))
    def decide(self, box: str, health: Health) -> None:
        devices.set_health(self.store, box, health, "a person")
        self.decided.pop(box, None)
        if health is not Health.UNKNOWN:
            self.decided[box] = health

    @rule(box=st.sampled_from(BOXES), state=st.sampled_from([DeviceState.DRAINING, DeviceState.IDLE]))
    def tell(self, box: str, state: DeviceState) -> None:
        devices.set_state(self.store, box, state)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        for box in BOXES:
            row = devices.get(self.store, box)
            held = [job for job in jobs.live(self.store) if job.device == box and job.state is JobState.LEASED]
            assert len(held) <= 1, "a device has two jobs"
            assert row.epoch == self.epochs[box]
            if held:
                assert held[0].epoch == row.epoch
                assert held[0].lease_until is not None and held[0].phase_until is not None, "a lease that never ends"
            if row.state in BUSY:
                assert row.lease_until is not None, "busy without a lease"
            if row.health in (Health.UNKNOWN, Health.BAD):
                assert row.check_due is not None, "doubtful for ever"
            assert self.decided.get(box, row.health) is row.health, "a person's decision was overruled"
        for id, seconds in self.kept.items():
            job = jobs.get(self.store, id)
            assert job is not None and job.state is JobState.DONE
            assert job.result is not None and job.result.push_s == seconds, "an accepted result was lost or replaced"


TestFarm = Farm.TestCase
TestFarm.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
