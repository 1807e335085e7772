"""The pages of devices: what they show, as HTML and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_lab import DashboardLab, Visitor
from store_support import add_device, break_down, key, put, round_of, take
from test_dashboard_pages import Page

from nas.infra.store import calibrations, devices, jobs
from nas.infra.store.calibrations import ReferenceRun
from nas.infra.store.rows import Health, Role
from nas.serve.api import devices as fleet
from nas.serve.dashboard import devices_page

CALM = ReferenceRun(ratio=1.01, temperature_c=41.5, calm=True)
PLACE = ("box", "llama.cpp", "b7000")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DashboardLab]:
    lab = DashboardLab(tmp_path)
    yield lab
    lab.process.end()


@pytest.fixture
def visitor(lab: DashboardLab) -> Visitor:
    return lab.visitor(Role.READ)


def get_page(visitor: Visitor, path: str) -> Page:
    answer = visitor.page(path)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def test_the_list_and_its_twin_say_the_same(lab: DashboardLab, visitor: Visitor) -> None:
    devices.set_health(lab.store, "box", Health.MAINTENANCE, "battery swollen")
    (row,) = visitor.client.get("/devices.json").json()["devices"]
    assert row == fleet.page_of_devices(lab.store, limit=9).model_dump(mode="json")["devices"][0]
    text = get_page(visitor, "/devices").text
    assert "box" in text and "maintenance: battery swollen" in text and "never" in text


def test_without_devices_it_says_how_one_is_attached(lab: DashboardLab, visitor: Visitor) -> None:
    with lab.store.write() as connection:
        connection.exec_driver_sql("DELETE FROM device")
    assert "nas device add" in get_page(visitor, "/devices").text


def test_many_devices_come_in_pages(
    lab: DashboardLab, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(devices_page, "PAGE", 2)
    for name in "acde":
        add_device(lab.store, name, agent=f"of-{name}")
    ids, path = [], "/devices"
    while path:
        ids += [row["id"] for row in visitor.client.get(path.replace("/devices", "/devices.json")).json()["devices"]]
        tags = get_page(visitor, path).tags
        path = next((str(named["href"]) for tag, named in tags if named.get("rel") == "next"), "")
    assert ids == ["a", "box", "c", "d", "e"]


def test_a_lease_says_who_has_it_and_until_when(lab: DashboardLab, visitor: Visitor) -> None:
    put(lab.store)
    devices.set_health(lab.store, "box", Health.GOOD)
    held = take(lab.store)
    assert held.lease_until == lab.clock.time + jobs.LEASE_S
    until = f"00:{held.lease_until // 60:02.0f}:{held.lease_until % 60:02.0f} UTC"
    assert f"local, until 1970-01-01 {until}" in get_page(visitor, "/devices").text
    text = get_page(visitor, "/devices/box").text
    assert f"local, epoch 1, until 1970-01-01 {until} unless renewed" in text
    assert held.id[:12] in text and "leased" in text


def test_failures_stand_in_the_history(lab: DashboardLab, visitor: Visitor) -> None:
    put(lab.store)
    devices.set_health(lab.store, "box", Health.GOOD)
    break_down(lab.store, lab.clock)
    text = get_page(visitor, "/devices/box").text
    assert "failure" in text and "cable fell out" in text and "unknown since" in text


def test_jobs_lead_to_their_trials(lab: DashboardLab, visitor: Visitor) -> None:
    study = lab.study()
    trial = lab.propose(study)
    jobs.enqueue(lab.store, key("of the trial"), round_of(), device="box", trial=(study, trial))
    links = [named["href"] for tag, named in get_page(visitor, "/devices/box").tags if tag == "a"]
    assert f"/studies/study/trials/{trial}" in links


def test_drift_and_temperature_are_drawn(lab: DashboardLab, visitor: Visitor) -> None:
    calibrations.put(lab.store, *PLACE, 212.5, {})
    for number in range(10):
        lab.clock.time += 600
        calibrations.note_runs(lab.store, PLACE, f"job-{number}", [CALM, replace(CALM, calm=False)], 212.5)
    view = visitor.client.get("/devices/box.json").json()
    assert len(view["drift"][0]["runs"]) == 20
    page = get_page(visitor, "/devices/box")
    assert "The reference takes 212.5 ms." in page.text and "by +1.0 %" in page.text
    (plot,) = [json.loads(str(named["data-plot"])) for _, named in page.tags if "data-plot" in named]
    drawn = {series["name"]: len(series["points"]) for series in plot["series"]}
    assert drawn == {"calm": 10, "disturbed": 10, "temperature": 20} and plot["right"] == "°C"


def test_drift_is_not_said_to_be_of_calm_runs(lab: DashboardLab, visitor: Visitor) -> None:
    calibrations.put(lab.store, *PLACE, 212.5, {})
    calibrations.note_runs(lab.store, PLACE, "job", [replace(CALM, calm=False)] * 9, 212.5)
    assert "The latest runs differ from it by +1.0 %" in get_page(visitor, "/devices/box").text


def test_the_list_has_the_latest_temperature_and_charge(lab: DashboardLab, visitor: Visitor) -> None:
    for number, celsius in enumerate((38.2, 41.6)):
        lab.clock.time += 600
        run = ReferenceRun(1.01, celsius, True, battery_percent=80.0 + number)
        calibrations.note_runs(lab.store, PLACE, f"job-{number}", [replace(run, temperature_c=20.0), run], 212.5)
    (row,) = visitor.client.get("/devices.json").json()["devices"]
    assert row["condition"] == {"at": lab.clock.time, "temperature_c": 41.6, "battery_percent": 81.0}
    for path in ("/devices", "/devices/box"):
        assert "42 °C, battery 81 %" in get_page(visitor, path).text


def test_a_device_that_is_not_there_is_said_with_the_nearest(visitor: Visitor) -> None:
    answer = visitor.page("/devices/bxo")
    assert answer.status_code == 404 and "did you mean &#39;box&#39;" in answer.text
    assert visitor.client.get("/devices/bxo.json").json()["kind"] == "unknown_name"
    assert visitor.page("/devices/B%00x").status_code == 422


def test_names_notes_tags_and_who_waits_are_shown_and_escaped(lab: DashboardLab, visitor: Visitor) -> None:
    hostile = "<script>alert(1)</script>"
    labels = fleet.LabelRequest(name=f"{hostile} name", note=f"{hostile} note", tags=["fast"])
    fleet.label_device(lab.store, "box", labels)
    study = lab.study()
    put(lab.store, "a", trial=(study, None))
    put(lab.store, "b", trial=(study, None))
    for path in ("/devices", "/devices/box"):
        page = visitor.page(path).text
        assert hostile not in page
        text = Page(page).text
        for expected in (f"{hostile} name", f"{hostile} note", "fast", "(2 jobs)"):
            assert expected in text
    (row,) = visitor.client.get("/devices.json").json()["devices"]
    assert (row["name"], row["queue"][0]["jobs"]) == (f"{hostile} name", 2)
    queue = visitor.client.get("/studies/study.json").json()["queue"]["jobs"]
    assert sorted((job["place"], job["queued"]) for job in queue) == [(1, 2), (2, 2)]
    assert "queued, 2 of 2" in get_page(visitor, "/studies/study").text
