"""Jobs and leases under any order of events: claims, late and repeated messages, lost leases, cancelled work."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from exhaustive import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from store_support import StillClock, add_device, key, open_store, round_of

from nas.core.plan import RoundResult
from nas.core.wire import Failure, Phase
from nas.infra.store import devices, jobs, outcomes
from nas.infra.store.devices import LIMITS, phase_limit_s
from nas.infra.store.rows import DeviceState, Health, JobKind, JobRow, JobState

BOXES = ("box", "phone")
BUSY = {DeviceState.LEASED, DeviceState.PREPARING, DeviceState.COOLING}
PHASES = st.sampled_from(["preparing", "cooling", "running"])


class Farm(RuleBasedStateMachine):
    """Two devices, each with its agent, and messages that arrive late, twice or never."""

    claims = Bundle("claims")

    @initialize()
    def start(self) -> None:
        self.folder = TemporaryDirectory()
        self.clock = StillClock()
        self.store = open_store(Path(self.folder.name), self.clock)
        self.epochs = {add_device(self.store, box, agent=f"agent-{box}"): 0 for box in BOXES}
        self.wall_s: dict[str, float] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(name=st.integers(0, 4), box=st.sampled_from(BOXES), priority=st.integers(0, 1), kind=st.sampled_from(JobKind))
    def enqueue(self, name: int, box: str, priority: int, kind: JobKind) -> None:
        predecessor = jobs.get(self.store, f"{key(name)}.0")
        job = jobs.enqueue(self.store, key(name), round_of(), device=box, priority=priority, kind=kind)
        if predecessor is None:
            assert (job.state, job.device) == (JobState.QUEUED, box)
        elif predecessor.state is JobState.CANCELLED:
            assert job.state is JobState.QUEUED
        else:
            assert job == predecessor

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
            RoundResult(pairs=[], wall_s=seconds),
        )
        current = claim.epoch == self.epochs[claim.device] and before.epoch == claim.epoch
        repeated = before.state is JobState.DONE and before.epoch == claim.epoch
        assert verdict.accepted == (current or repeated)
        if current and before.state is not JobState.DONE:
            self.wall_s[claim.id] = seconds

    @rule(claim=claims, kind=st.sampled_from(["infrastructure", "refused", "cancelled"]), phase=PHASES)
    def fail(self, claim: JobRow, kind: str, phase: Phase) -> None:
        failure = Failure.model_validate({"kind": kind, "message": "no", "phase": phase})
        who = (claim.device, f"agent-{claim.device}", claim.epoch or 0)
        outcomes.fail(self.store, claim.id, *who, failure)

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
        outcomes.expire(self.store)

    @rule()
    def everybody_falls_silent(self) -> None:
        self.clock.time += max(LIMITS[DeviceState.IDLE], phase_limit_s(None, round_of()))
        outcomes.expire(self.store)
        assert all(job.state is JobState.QUEUED for job in jobs.live(self.store))
        assert {devices.get(self.store, box).state for box in BOXES} <= {DeviceState.OFFLINE, DeviceState.DRAINING}

    @rule(box=st.sampled_from(BOXES), health=st.sampled_from(Health))
    def rate(self, box: str, health: Health) -> None:
        devices.set_health(self.store, box, health, "a person")

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
        for id, seconds in self.wall_s.items():
            job = jobs.get(self.store, id)
            assert job is not None and job.state is JobState.DONE
            assert job.result is not None and job.result.wall_s == seconds, "an accepted result was lost or replaced"


TestFarm = Farm.TestCase
TestFarm.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
