"""The users' API on devices, agents and jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_lab import Lab, refusal
from store_support import add_device, new_study, put, take

from nas.infra.store import agents, calibrations, devices, jobs
from nas.infra.store.rows import DeviceEventKind, Health, Role
from nas.measure.farm.farm import find_name, known_devices


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def order(lab: Lab, what: str, reason: str | None = None, device: str = "box") -> dict[str, object]:
    body = None if reason is None else {"reason": reason}
    answer = lab.client().post(f"/v1/devices/{device}/{what}", json=body)
    assert answer.status_code == 200, answer.text
    view: dict[str, object] = answer.json()
    return view


def test_a_device_is_shown_with_its_lease_history_and_calibrations(lab: Lab) -> None:
    study = new_study(lab.store)
    put(lab.store, "a", trial=(study.id, None))
    job = take(lab.store)
    calibrations.put(lab.store, "box", "fake", "c1", 12.5, {"build": "b1"})
    view = lab.get("/v1/devices/box")
    until = lab.clock.time + jobs.LEASE_S
    assert view["lease"] == {"holder": "local", "until": until, "study": "first", "submitted_by": None}
    assert (view["state"], view["epoch"], view["device"]["model"]) == ("leased", 1, "Box")
    (listed,) = view["jobs"]
    assert (listed["id"], listed["study"], listed["state"], listed["epoch"]) == (job.id, "first", "leased", 1)
    [registered] = view["history"]
    assert (registered["kind"], registered["what"]) == ("registered", "local")
    (calibration,) = view["calibrations"]
    assert (calibration["runtime"], calibration["reference_ms"]) == ("fake", 12.5)


def test_a_device_is_shown_with_its_drift(lab: Lab) -> None:
    calibrations.put(lab.store, "box", "fake", "c1", 12.5, {"build": "b1"})
    for number in range(3):
        lab.clock.time += 60
        runs = [calibrations.ReferenceRun(1.28, 41.5, True)] * 3
        calibrations.note_runs(lab.store, ("box", "fake", "c1"), f"job {number}", runs, 12.5)
    (drift,) = lab.get("/v1/devices/box")["drift"]
    assert (drift["runtime"], drift["build"], drift["calibration"]) == ("fake", "b1", "c1")
    assert drift["reference_ms"] == 12.5
    assert (drift["off"], drift["recalibrate"]) == (pytest.approx(0.28), True)
    assert len(drift["runs"]) == 9
    assert drift["runs"][0] == {
        "at": lab.clock.time - 120, "job": "job 0", "ratio": 1.28, "temperature_c": 41.5, "calm": True
    }  # fmt: skip


def test_what_happens_to_devices_is_followed_by_id(lab: Lab) -> None:
    add_device(lab.store, "phone", "lab-1")
    assert lab.get("/v1/device-events")["events"] == [], "so new that another may come before it"
    lab.clock.time += devices.SETTLED_S
    page = lab.get("/v1/device-events", limit=1)
    assert [(event["device"], event["what"]) for event in page["events"]] == [("box", "local")]
    rest = lab.get("/v1/device-events", after=page["last"])
    assert [event["device"] for event in rest["events"]] == ["phone"]
    assert lab.get("/v1/device-events", after=rest["last"]) == {"events": [], "last": rest["last"]}
    devices.set_health(lab.store, "box", Health.BAD, "it failed")
    lab.clock.time += devices.SETTLED_S
    [bad] = lab.get("/v1/device-events", device="box", after=rest["last"], wait_s=30)["events"]
    assert (bad["kind"], bad["what"], bad["reason"]) == ("health", "bad", "it failed")
    assert lab.get("/v1/device-events", device="phone", after=rest["last"])["events"] == []
    refusal(lab.client().get("/v1/device-events?device=bxo"), 404, "unknown_name")
    lab.clock.time -= 3600
    assert lab.get("/v1/device-events", after=rest["last"])["events"] == [bad], "the clock was set back"


def test_lists_come_in_pages(lab: Lab) -> None:
    for number in range(4):
        add_device(lab.store, f"phone-{number}", f"agent-{number}")
        lab.clock.time += number % 2  # two jobs are of the same moment
        put(lab.store, f"job {number}")
    for path, key, name in (("devices", "devices", "id"), ("agents", "agents", "name"), ("jobs", "jobs", "id")):
        whole = [row[name] for row in lab.get(f"/v1/{path}")[key]]
        names, after = [], {}
        while True:
            page = lab.get(f"/v1/{path}", limit=2, **after)
            assert len(page[key]) <= 2
            names += [row[name] for row in page[key]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert names == whole
        assert len(set(whole)) == len(whole) > 3


def test_jobs_are_chosen_by_state_device_and_study(lab: Lab) -> None:
    add_device(lab.store, "phone", "other")
    study = new_study(lab.store)
    put(lab.store, "a", trial=(study.id, None))
    put(lab.store, "b", device="phone")
    take(lab.store)
    assert [job["device"] for job in lab.get("/v1/jobs", state="leased")["jobs"]] == ["box"]
    assert [job["device"] for job in lab.get("/v1/jobs", device="phone")["jobs"]] == ["phone"]
    assert [job["study"] for job in lab.get("/v1/jobs", study="first")["jobs"]] == ["first"]
    assert lab.get("/v1/jobs", study="first", state="done")["jobs"] == []


def test_a_drained_device_finishes_its_job_and_takes_no_other(lab: Lab) -> None:
    put(lab.store, "a")
    put(lab.store, "b")
    take(lab.store)
    assert order(lab, "drain")["state"] == order(lab, "drain")["state"] == "draining"
    assert jobs.claim(lab.store, "box", "local") is None
    assert order(lab, "resume")["state"] == order(lab, "resume")["state"] == "leased"


def test_a_check_puts_a_good_device_in_doubt_and_leaves_a_bad_one_bad(lab: Lab) -> None:
    devices.set_health(lab.store, "box", Health.GOOD)
    assert order(lab, "check")["health"] == "unknown"
    devices.set_health(lab.store, "box", Health.BAD, "three jobs failed")
    assert order(lab, "check")["health"] == "bad"


def test_a_removed_device_comes_back_by_release_only(lab: Lab) -> None:
    put(lab.store, "a")
    take(lab.store)
    assert "jobs to do" in refusal(lab.client().post("/v1/devices/box/remove"), 422, "invalid_input")
    jobs.cancel(lab.store, [job["id"] for job in lab.get("/v1/jobs")["jobs"]])
    assert order(lab, "remove")["health"] == "retired"
    assert "release" in refusal(lab.client().post("/v1/devices/box/drain"), 422, "invalid_input")
    assert order(lab, "release")["health"] == "unknown"


def test_a_revoked_agent_does_not_authenticate(lab: Lab) -> None:
    secret = agents.enrol(lab.store, agents.issue_token(lab.store), "lab-1")
    assert [(agent["name"], agent["access"]) for agent in lab.get("/v1/agents")["agents"]] == [
        ("lab-1", "enrolled"), ("local", "local"),
    ]  # fmt: skip
    assert lab.client().post("/v1/agents/lab-1/revoke").json()["access"] == "revoked"
    assert lab.revoked == [None]
    assert not agents.authenticate(lab.store, "lab-1", secret)
    assert not agents.authenticate(lab.store, "lab-1", "")
    refusal(lab.client().post("/v1/agents/local/revoke"), 422, "invalid_input")
    refusal(lab.client().post("/v1/agents/none/revoke"), 404, "unknown_name")
    agents.enrol(lab.store, agents.issue_token(lab.store), "lab-2")
    assert lab.client(Role.OPERATE).post("/v1/agents/lab-2/revoke").status_code == 403


def label(lab: Lab, **labels: object) -> dict[str, object]:
    answer = lab.client().post("/v1/devices/box/label", json=labels)
    assert answer.status_code == 200, answer.text
    view: dict[str, object] = answer.json()
    return view


def test_a_device_is_named_noted_and_tagged(lab: Lab) -> None:
    label(lab, name="desk, left", note="new battery", tags=["fast", "fast", "lab"])
    view = label(lab, note="swollen battery")
    assert (view["name"], view["note"], view["tags"]) == ("desk, left", "swollen battery", ["fast", "lab"])
    (listed,) = lab.get("/v1/devices")["devices"]
    assert (listed["name"], listed["note"]) == ("desk, left", "swollen battery")
    history = [(event["kind"], event["reason"]) for event in lab.get("/v1/devices/box")["history"]]
    assert history[:2] == [("note", "swollen battery"), ("tags", "fast lab")]
    count = len(history)
    label(lab, note="swollen battery")
    assert len(lab.get("/v1/devices/box")["history"]) == count, "nothing changed"
    view = label(lab, name="", tags=[])
    assert (view["name"], view["note"], view["tags"]) == (None, "swollen battery", [])
    for wrong in ({"tags": ["two words"]}, {"name": "x" * 65}, {"note": "two\nlines"}, {"colour": "red"}):
        refusal(lab.client().post("/v1/devices/box/label", json=wrong), 422, "invalid_input")
    assert lab.client().post("/v1/devices/bxo/label", json={"name": "a"}).status_code == 404


def test_many_notes_do_not_remove_the_name(lab: Lab) -> None:
    devices.label(lab.store, "box", DeviceEventKind.NAME, "desk")
    for number in range(devices.LOG_KEPT + 1):
        devices.label(lab.store, "box", DeviceEventKind.NOTE, f"note {number}")
    assert devices.labels(lab.store)["box"].name == "desk"


def test_spaces_find_a_device_by_a_tag_that_was_given_here(lab: Lab) -> None:
    label(lab, tags=["fast"])
    assert find_name("tag:fast", known_devices(lab.store, ())) == "box"


def test_who_waits_for_a_device_is_shown_in_the_order_of_the_queue(lab: Lab) -> None:
    one, other = (new_study(lab.store, name).id for name in ("one", "other"))
    for number, (study, priority) in enumerate([(one, 0), (one, 0), (other, 5), (None, 9)]):
        lab.clock.time += 1
        trial = None if study is None else (study, None)
        put(lab.store, f"job {number}", trial=trial, priority=priority)
    take(lab.store)
    now = lab.clock.time
    assert lab.get("/v1/devices/box")["queue"] == [
        {"study": "other", "jobs": 1, "place": 1, "since": now - 1, "submitted_by": None},
        {"study": "one", "jobs": 2, "place": 2, "since": now - 3, "submitted_by": None},
    ]
