"""Files of the coordinator's own that are damaged: noticed, made anew where that is possible, and said."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from service_support import until
from store_support import add_device, key, new_study, open_store, round_of, take

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import PlanFile, Round
from nas.core.protocol import Failure
from nas.core.registry import Registry
from nas.devices.client import JobClient
from nas.devices.content import ContentFolder, file_sha256
from nas.devices.download import Downloads
from nas.runtimes.base import Artifact, RandomWeights, Runtime
from nas.service.own_files import OwnFiles
from nas.store import artifacts, events, jobs, results, trials
from nas.store.rows import Blame, JobRow, JobState, Proposal
from nas.testing.fake_runtime import FakeRuntime

LAYOUT = Layout.parse("d64 v256 ffn=swiglu:96 [C3 A2/1]")
RUNNER = hashlib.sha256(b"#!").hexdigest()


class Lab:
    """A store with an export that a job needs, and the keeper of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, open_store(folder)
        self.runtime, self.runner = FakeRuntime(folder), folder / "runner"
        self.runner.write_bytes(b"#!")
        add_device(self.store)
        self.study = new_study(self.store).id
        trials.propose(self.store, self.study, [Proposal(LAYOUT.to_json(), LAYOUT.id)])
        self.rung = 0
        self.files = OwnFiles(self.store, self.find_file, self.ring, folder)

    def ring(self) -> None:
        self.rung += 1

    def find_file(self, sha256: str) -> Path | None:
        if sha256 == RUNNER:
            return self.runner
        try:
            return artifacts.path(self.store, sha256)
        except InfrastructureFailed:
            return None

    def export(self, layout: Layout = LAYOUT) -> Artifact:
        artifact = self.runtime.export(layout, "q4_0", RandomWeights(), self.folder / "export", recipe=True)
        artifacts.put_file(self.store, self.folder / "export")
        results.put(self.store, key(layout.id), "export", {"value": artifact.model_dump(mode="json")})
        return artifact

    def job(self, artifact: Artifact) -> JobRow:
        plan = round_of().candidate
        runner = plan.runner.model_copy(update={"files": {"run": PlanFile(sha256=RUNNER, size=2)}})
        plan = plan.model_copy(update={"inputs": {"model": artifact.file}, "runner": runner})
        return jobs.enqueue(
            self.store, key("job"), Round(candidate=plan, repetitions=1), device="box", trial=(self.study, 0)
        )

    def told(self) -> list[str]:
        return [
            event.payload["message"] for event in events.since(self.store, self.study) if "message" in event.payload
        ]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    registry: Registry[Runtime] = Registry("runtime", "nas.no.plugins", {"fake": made.runtime})
    for module in ("nas.service.own_files", "nas.runtimes"):
        monkeypatch.setattr(f"{module}.RUNTIMES", registry)
    return made


@pytest.mark.parametrize("damage", ["damaged", "gone"])
def test_a_damaged_export_is_made_anew(lab: Lab, damage: str) -> None:
    artifact = lab.export()
    job, path = lab.job(artifact), artifacts.path(lab.store, artifact.stored.sha256)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"rotten")
    lab.files.look(job.id)
    assert file_sha256(artifacts.path(lab.store, artifact.stored.sha256)) == artifact.stored.sha256
    after = jobs.get(lab.store, job.id)
    assert after is not None and after.state is JobState.QUEUED
    [message] = lab.told()
    assert message.startswith("the coordinator's own ") and message.endswith("; it was made anew")


def test_the_reference_model_is_made_anew_without_a_trial_of_it(lab: Lab) -> None:
    artifact = lab.export(lab.runtime.reference_model())
    job = lab.job(artifact)
    artifacts.path(lab.store, artifact.stored.sha256).write_bytes(b"rotten")
    lab.files.look(job.id)
    assert file_sha256(artifacts.path(lab.store, artifact.stored.sha256)) == artifact.stored.sha256


def test_a_job_ends_where_its_file_cannot_be_made_anew(lab: Lab) -> None:
    job = lab.job(lab.export())
    lab.runner.write_bytes(b"rotten")
    for tries in range(3):
        assert jobs.get(lab.store, job.id) == jobs.live(lab.store)[0], "somebody may put it back"
        assert len(lab.told()) == tries, "but it is said"
        assert take(lab.store).id == job.id
        lab.files.look(job.id)
    ended = jobs.get(lab.store, job.id)
    assert ended is not None and (ended.state, ended.blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)
    assert f"{lab.runner} is damaged" in (ended.message or "") and "build the runtime again" in (ended.message or "")
    assert lab.told() == [ended.message] * 3
    assert lab.rung == 1
    lab.files.look(job.id)
    assert len(lab.told()) == 3, "no more is said of what has ended"


def test_whole_files_are_left_alone(lab: Lab) -> None:
    job = lab.job(lab.export())
    lab.files.look(job.id)
    assert jobs.get(lab.store, job.id) == job
    assert lab.told() == []


def test_what_cannot_be_looked_at_does_not_end_the_thread(lab: Lab) -> None:
    artifact = lab.export()
    job = lab.job(artifact)
    artifacts.path(lab.store, artifact.stored.sha256).write_bytes(b"rotten")
    with lab.files:
        lab.files.suspect("no such job")
        lab.files.suspect(job.id)
        until(lambda: lab.told() != [])


def test_a_job_that_was_given_up_awaits_nothing(lab: Lab) -> None:
    job = lab.job(lab.export())
    taken = take(lab.store)
    jobs.give_up(lab.store, job.id, "no file")
    assert not jobs.renew(lab.store, job.id, "box", "local", taken.epoch or 0)
    jobs.retry(lab.store, job.id)
    assert take(lab.store).id == job.id


def test_agents_words_of_what_got_lost_are_known(tmp_path: Path) -> None:
    """The messages that agents really send, of a coordinator that is gone, slow or has other bytes."""
    content = ContentFolder(tmp_path)
    file = PlanFile(sha256=key("file"), size=10)
    said = []
    answers = [
        lambda request: httpx.Response(503, text="trouble"),
        lambda request: httpx.Response(200, content=b"x" * 5),
        lambda request: httpx.Response(200, content=b"x" * 11),
        lambda request: httpx.Response(200, content=b"x" * 10),
    ]
    for answer in answers:
        client = JobClient(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://c"))
        with pytest.raises(InfrastructureFailed) as error:
            Downloads(client, content).fetch(file)
        said.append(str(error.value))
    failures = [Failure(kind="infrastructure", message=message, phase="preparing") for message in said]
    assert not any(failure.reached_device for failure in failures), said
