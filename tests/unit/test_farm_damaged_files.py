"""Damaged files of the coordinator's own: the job ends with the file's name, and is nobody else's failure."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import pytest
from store_support import add_device, key, new_study, open_store, proposal, round_of, take

from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile, Round
from nas.core.wire import Failure, on_the_way
from nas.infra.store import artifacts, jobs, results, trials
from nas.infra.store.rows import Blame, JobRow, JobState, Json
from nas.measure.devices.agent.client import Downloads, JobClient
from nas.measure.devices.files import ContentFolder
from nas.measure.farm.agent_api import end_if_damaged

RUNNER = hashlib.sha256(b"#!").hexdigest()


class Lab:
    """A store with an artifact and a runner that a job needs."""

    def __init__(self, folder: Path) -> None:
        self.store, self.runner = open_store(folder), folder / "runner"
        self.runner.write_bytes(b"#!")
        (folder / "model").write_bytes(b"model")
        self.model = artifacts.put_file(self.store, folder / "model").sha256
        add_device(self.store)
        study = new_study(self.store).id
        trials.propose(self.store, study, [proposal(64)])
        plan = round_of().candidate
        runner = plan.runner.model_copy(update={"files": {"run": PlanFile(sha256=RUNNER, size=2)}})
        inputs = {"model": plan.inputs["model"].model_copy(update={"sha256": self.model, "size": 5, "recipe": None})}
        plan = plan.model_copy(update={"inputs": inputs, "runner": runner})
        round_ = Round(candidate=plan, repetitions=1)
        self.id = jobs.enqueue(self.store, key("job"), round_, device="box", trial=(study, 0)).id

    def find_file(self, sha256: str) -> Path | None:
        if sha256 == RUNNER:
            return self.runner
        try:
            return artifacts.path(self.store, sha256)
        except InfrastructureFailed:
            return None

    def job(self) -> JobRow:
        row = jobs.get(self.store, self.id)
        assert row is not None
        return row


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_job_whose_export_is_damaged_ends_and_names_the_file(lab: Lab, damage: str) -> None:
    path = artifacts.path(lab.store, lab.model)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"rotten")
    end_if_damaged(lab.store, lab.find_file, lab.id)
    job = lab.job()
    assert (job.state, job.blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)
    assert damage in (job.message or "") and lab.model[:12] in (job.message or "")
    assert "export it again" in (job.message or "") and on_the_way(job.message or "")
    assert not artifacts.intact(lab.store, lab.model), "so that whoever needs it exports it again"


@pytest.mark.parametrize(
    "outcome",
    [
        {"value": {"sha256": "MODEL"}},
        {"failed": {"reason": "export", "message": "no"}},
        {"value": {"weights": "random:x", "recipe": {"sha256": "MODEL"}}},
    ],
    ids=["no artifact", "failed", "no weights"],
)
def test_what_imported_results_say_of_a_damaged_file_does_not_matter(lab: Lab, outcome: Json) -> None:
    """An imported archive may hold any row of an export, also one that names the file of somebody else's job."""
    results.put(lab.store, key("imported"), "export", json.loads(json.dumps(outcome).replace("MODEL", lab.model)))
    artifacts.path(lab.store, lab.model).unlink()
    end_if_damaged(lab.store, lab.find_file, lab.id)
    assert (lab.job().state, lab.job().blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)
    assert lab.model[:12] in (lab.job().message or "")


def test_a_damaged_runner_has_to_be_built_again(lab: Lab) -> None:
    lab.runner.write_bytes(b"rotten")
    end_if_damaged(lab.store, lab.find_file, lab.id)
    message = lab.job().message or ""
    assert f"{lab.runner} is damaged" in message and "build the runtime again" in message


def test_whole_files_end_nothing(lab: Lab) -> None:
    before = lab.job()
    end_if_damaged(lab.store, lab.find_file, lab.id)
    end_if_damaged(lab.store, lab.find_file, "no such job")
    assert lab.job() == before


def test_a_job_that_was_given_up_awaits_nothing(lab: Lab) -> None:
    job = take(lab.store)
    jobs.give_up(lab.store, lab.id, "no file")
    assert not jobs.renew(lab.store, lab.id, "box", "local", job.epoch or 0)
    jobs.retry(lab.store, lab.id)
    assert take(lab.store).id == lab.id


def test_agents_words_of_what_got_lost_are_known(tmp_path: Path) -> None:
    """The messages that agents really send, of a coordinator that is gone, slow or has other bytes."""
    content = ContentFolder(tmp_path)
    file = PlanFile(sha256=key("file"), size=10)
    messages = []
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
        messages.append(str(error.value))
    failures = [Failure(kind="infrastructure", message=message, phase="preparing") for message in messages]
    assert not any(failure.reached_device for failure in failures), messages
