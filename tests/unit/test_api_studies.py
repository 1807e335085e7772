"""The users' API on studies: submitting, listing, following, steering."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ten_mistakes
from api_lab import Lab, refusal, space_text
from store_support import new_study, proposal, put

from nas.core.trial import EventKind
from nas.infra.store import leases, studies, trials
from nas.infra.store.rows import Role, StudyState
from nas.search.analysis.report import study_report
from nas.search.spaces import parse_space


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.process.end()


def submit(lab: Lab, study: str = "mine", **body: Any) -> Any:
    return lab.client(Role.OPERATE).post("/v1/studies", json={"study": study, "space": space_text()} | body)


def begin(lab: Lab, study: str = "mine") -> int:
    """What the process of a study does first; returns the study's id."""
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    return studies.create(lab.store, study, space, seed=0, version="0").id


def test_a_submitted_study_is_queued_started_and_reported(lab: Lab) -> None:
    answer = submit(lab, trials=7)
    assert answer.status_code == 201
    view = answer.json()
    assert (view["study"], view["space"], view["state"]) == ("mine", "tiny", "queued")
    assert (view["submission"]["submitted_by"], view["submission"]["trials"]) == ("operate", 7)
    assert lab.get("/v1/studies/mine")["report"] is None
    assert (lab.home / "studies" / "mine" / "space.yaml").read_text() == space_text()
    lab.submitted.poll()
    assert lab.process.started == [("mine", False)]
    begin(lab)
    study = lab.get("/v1/studies/mine")
    assert study["report"] == json.loads(json.dumps(study_report(lab.store, "mine")))
    assert study["submission"]["state"] == "running"


def test_an_order_to_a_device_says_who_submitted_the_studies_that_wait(lab: Lab) -> None:
    submit(lab)
    put(lab.store, "a", trial=(begin(lab), None))
    for path, body in [("drain", None), ("label", {"name": "desk"}), ("reserve", {"for_s": 60, "reason": "mine"})]:
        answer = lab.client(Role.OPERATE).post(f"/v1/devices/box/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert [waiting["submitted_by"] for waiting in answer.json()["queue"]] == ["operate"]


def test_submitting_again_gives_the_same_study_and_another_one_is_refused(lab: Lab) -> None:
    assert submit(lab).json() == submit(lab).json()
    assert "named 'mine'" in refusal(submit(lab, trials=9), 409, "conflict")
    assert "named 'mine'" in refusal(submit(lab, space=space_text(name="other")), 409, "conflict")
    studies.create(lab.store, "launched", {"name": "by hand"}, seed=0, version="0")
    refusal(submit(lab, "launched"), 409, "conflict")
    lab.submitted.poll()
    begin(lab)
    assert submit(lab).status_code == 201


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("v: 1\nname: x\nmodle: {}\n", "space.yaml:3: modle: unknown key 'modle'; did you mean 'model'?"),
        ("a: [1\n", "space.yaml:"),
        ("a: &x [*x]\n", "space.yaml:1"),
        (space_text(devices=["local", "bxo"]), "space.yaml:25: devices.1: unknown device 'bxo'; did you mean 'box'?"),
        (
            space_text(quality={"corpus": ["/etc/passwd"]}),
            "space.yaml:42: quality.corpus: a submitted study trains on the corpus 'default' or 'installed'",
        ),
        (space_text(runtimes=[{"name": "none", "quantisation": "q4_0"}]), "unknown runtime 'none'"),
    ],
)
def test_what_is_wrong_with_a_space_is_told_by_line(lab: Lab, space: str, message: str) -> None:
    assert message in refusal(submit(lab, space=space), 422, "invalid_input")
    assert lab.get("/v1/studies")["studies"] == []


def test_ten_mistakes_are_ten_lines(lab: Lab) -> None:
    message = refusal(submit(lab, space=ten_mistakes.TEXT), 422, "invalid_input")
    ten_mistakes.are_found(message.splitlines(), "space.yaml:")
    assert lab.get("/v1/studies")["studies"] == []


def test_mistakes_are_told_in_the_letters_of_the_space(lab: Lab) -> None:
    message = refusal(submit(lab, space="v: 1\nname: x\nmödle: {}\ngröße: 2\n"), 422, "invalid_input")
    assert "space.yaml:3: mödle: unknown key" in message and "space.yaml:4: größe: unknown key" in message


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "a b", "x" * 65, "\x00", ".hidden"])
def test_studies_have_plain_names(lab: Lab, name: str) -> None:
    refusal(submit(lab, name), 422, "invalid_input")
    assert not list(lab.home.glob("**/*"))


def test_a_study_of_another_version_is_said_to_be_one(lab: Lab) -> None:
    studies.create(lab.store, "older", {"name": "old", "layers": 3}, seed=0, version="0")
    message = refusal(lab.client(Role.READ).get("/v1/studies/older"), 422, "invalid_input")
    assert "this version cannot read its space" in message


def test_the_list_holds_what_runs_and_what_waits(lab: Lab) -> None:
    for number in range(3):
        new_study(lab.store, f"study-{number}")
    submit(lab)
    first = lab.get("/v1/studies", limit=2)
    assert [study["study"] for study in first["studies"]] == ["study-0", "study-1"]
    second = lab.get("/v1/studies", limit=2, after=first["next"])
    assert [(study["study"], study["state"]) for study in second["studies"]] == [("study-2", "new"), ("mine", "queued")]
    assert second["next"] is None


def test_the_list_is_filtered_by_name_space_and_state(lab: Lab) -> None:
    for number in range(3):
        new_study(lab.store, f"study-{number}")
    submit(lab)

    def names(**filters: str) -> list[str]:
        return [study["study"] for study in lab.get("/v1/studies", **filters)["studies"]]

    assert names(text="DY-1") == ["study-1"]
    assert names(text="study", limit="2") == ["study-0", "study-1"]
    assert names(state="queued") == ["mine"] and names(space="other") == []
    assert names(space="tiny") == ["study-0", "study-1", "study-2", "mine"]
    assert names(state="new") == ["study-0", "study-1", "study-2"]
    assert names(text="none") == []


def test_events_are_followed_by_id(lab: Lab) -> None:
    number = begin(lab)
    trials.propose(lab.store, number, [proposal(32), proposal(64)])
    page = lab.get("/v1/studies/mine/events", limit=1)
    assert [(event["trial"], event["kind"]) for event in page["events"]] == [(0, "proposed")]
    assert not page["ended"]
    skipped = lab.get("/v1/studies/mine/events", from_now="true")
    assert (skipped["events"], skipped["last"]) == ([], page["last"] + 1)
    trials.add_event(lab.store, number, 0, EventKind.FAILED, {"reason": "crash"})
    news = lab.get("/v1/studies/mine/events", after=skipped["last"])
    assert [event["kind"] for event in news["events"]] == ["failed"]
    studies.set_state(lab.store, number, StudyState.STOPPED)
    rest = lab.get("/v1/studies/mine/events", after=page["last"])
    assert [event["kind"] for event in rest["events"]] == ["proposed", "failed", "study"]
    assert (rest["ended"], rest["state"]) == (True, "stopped")
    nothing = lab.get("/v1/studies/mine/events", after=rest["last"], wait_s=30)  # ended: there is nothing to wait for
    assert (nothing["events"], nothing["last"], nothing["ended"]) == ([], rest["last"], True)


def test_a_page_that_is_full_does_not_end_the_log(lab: Lab) -> None:
    number = begin(lab)
    studies.set_state(lab.store, number, StudyState.STOPPED)
    assert not lab.get("/v1/studies/mine/events", limit=1)["ended"]


def test_pause_run_and_stop_reach_the_study(lab: Lab) -> None:
    number = begin(lab)
    operator = lab.client(Role.OPERATE)
    for order in ("pause", "run", "stop"):
        assert operator.post(f"/v1/studies/mine/{order}").json()["desired_state"] == order
    studies.set_state(lab.store, number, StudyState.STOPPED)
    message = refusal(operator.post("/v1/studies/mine/run"), 409, "conflict")
    assert "nas launch --resume" in message
    refusal(operator.post("/v1/studies/mien/stop"), 404, "unknown_name")


def test_a_stopped_study_that_is_resumed_by_hand_is_followed(lab: Lab) -> None:
    submit(lab)
    number = begin(lab)
    lab.submitted.poll()
    lab.client(Role.OPERATE).post("/v1/studies/mine/stop")
    lab.process.end()
    lab.submitted.poll()
    assert lab.get("/v1/studies/mine/events")["ended"]
    lease = leases.acquire(lab.store, number, "by hand")
    assert not lab.get("/v1/studies/mine/events")["ended"]
    leases.release(lab.store, lease)
    assert lab.get("/v1/studies/mine/events")["ended"]


def test_a_study_that_waits_can_be_stopped_and_taken_up_again(lab: Lab) -> None:
    submit(lab)
    operator = lab.client(Role.OPERATE)
    refusal(operator.post("/v1/studies/mine/pause"), 409, "conflict")
    operator.post("/v1/studies/mine/stop")
    lab.submitted.poll()
    assert lab.process.started == []
    page = lab.get("/v1/studies/mine/events")
    assert (page["ended"], page["state"]) == (True, "stopped")
    operator.post("/v1/studies/mine/run")
    lab.submitted.poll()
    assert lab.process.started == [("mine", False)]
