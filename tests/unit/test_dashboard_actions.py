"""Every action of the pages: who may have it done, from where, and that nothing is done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_lab import space_text
from dashboard_lab import FORM_HEADERS, HOST, HTML, DashboardLab, Inputs, all_routes
from fastapi.testclient import TestClient
from test_dashboard_study import filled

from nas.infra.store import devices, events, studies
from nas.infra.store.rows import DeviceLabels, DeviceState, Health, Role, StudyState
from nas.serve.dashboard.access import LOOPBACK_HOSTS, AccessRules

ROUTES = all_routes()
LOGGING_IN = {"/login", "/logout"}
"""Where strangers, and visitors who leave, may post; tests/unit/test_dashboard_access.py tests both."""

ACTIONS = sorted(route.path for route in ROUTES if "POST" in route.methods and route.path not in LOGGING_IN)
FOR_ADMINS = {"/devices/{id}/remove"}
FROM_ELSEWHERE = (
    HTML,
    FORM_HEADERS | {"Origin": "https://evil.example"},
    FORM_HEADERS | {"Origin": "null"},
    FORM_HEADERS | {"Origin": f"{HOST}0"},
    HTML | {"Sec-Fetch-Site": "same-site"},
)
FIELDS = {"study": "new", "space": space_text(), "reason": "for a test", "next": "/studies"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DashboardLab]:
    lab = DashboardLab(tmp_path)
    filled(lab)
    yield lab
    lab.process.end()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> DashboardLab:
    """A lab like `lab`, for requests that must change nothing."""
    lab = DashboardLab(tmp_path_factory.mktemp("still"))
    filled(lab)
    return lab


def path_of(action: str) -> str:
    """The path of an action on something that exists."""
    return action.replace("{name}", "study").replace("{id}", "box").replace("{number}", "0")


def everything(lab: DashboardLab) -> Any:
    """Everything that actions may change."""
    states = [(row.name, row.state, row.desired_state) for row in studies.all(lab.store)]
    newest = [events.newest(lab.store, row.id) for row in studies.all(lab.store)]
    return states, newest, devices.all(lab.store), devices.history(lab.store, "box"), lab.submitted.not_begun()


def test_there_is_no_other_way_to_change_something_than_to_post() -> None:
    assert {method for route in ROUTES for method in route.methods} == {"GET", "HEAD", "POST"}
    expected = {f"/studies/{{name}}/{order}" for order in ("pause", "run", "stop")} | {"/launch"}
    expected |= {
        f"/devices/{{id}}/{order}"
        for order in ("drain", "resume", "quarantine", "release", "check", "label", "reserve")
    }
    assert expected | FOR_ADMINS <= set(ACTIONS)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_takes_its_role(still: DashboardLab, action: str) -> None:
    before = everything(still)
    too_low = [Role.READ, Role.OPERATE] if action in FOR_ADMINS else [Role.READ]
    for role in too_low:
        assert still.visitor(role).post(path_of(action), **FIELDS).status_code == 403
    assert still.stranger().post(path_of(action), data=FIELDS, headers=FORM_HEADERS).headers["Location"] == "/login"
    assert still.stranger().post(path_of(action), data=FIELDS, headers={"Origin": HOST}).status_code == 401
    assert everything(still) == before


def test_a_role_that_is_enough_acts(lab: DashboardLab) -> None:
    operator, admin = lab.visitor(Role.OPERATE), lab.visitor(Role.ADMIN)
    for action in sorted(ACTIONS, key=lambda action: action in FOR_ADMINS):  # theirs last: they leave less behind
        expected = (200,) if action == "/launch/check" else (303, 409)
        visitor = admin if action in FOR_ADMINS else operator
        assert visitor.post(path_of(action), **FIELDS).status_code in expected, action


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_of_another_site_is_refused(still: DashboardLab, action: str) -> None:
    visitor, before = still.visitor(Role.ADMIN), everything(still)
    for headers in FROM_ELSEWHERE:
        assert visitor.post(path_of(action), headers, **FIELDS).status_code == 403
    assert everything(still) == before


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_takes_the_form_of_its_session(still: DashboardLab, action: str) -> None:
    visitor, another = still.visitor(Role.ADMIN), still.visitor(Role.ADMIN)
    before = everything(still)
    for token in ("", "0" * 64, another.form_token, "\u00e9"):
        assert visitor.post(path_of(action), form_token=token, **FIELDS).status_code == 403
    assert visitor.client.post(path_of(action), data=FIELDS, headers=FORM_HEADERS).status_code == 403
    assert visitor.client.post(path_of(action), json=FIELDS, headers=FORM_HEADERS).status_code == 415
    assert everything(still) == before


def test_nobody_acts_where_everybody_may_look(tmp_path: Path) -> None:
    lab = DashboardLab(tmp_path, AccessRules(open_hosts=LOOPBACK_HOSTS, secure=False))
    lab.study()
    before = everything(lab)
    browser = TestClient(lab.app, base_url="http://127.0.0.1:8000", follow_redirects=False)
    for action in ACTIONS:
        answer = browser.post(path_of(action), data=FIELDS, headers=HTML | {"Origin": "http://127.0.0.1:8000"})
        assert answer.status_code == 403, action
        assert everything(lab) == before, action
    page = browser.get("/studies", headers=HTML).text
    assert Inputs(page).actions == [] and "Read only" in page


def test_studies_are_paused_resumed_and_stopped(lab: DashboardLab) -> None:
    visitor = lab.visitor(Role.OPERATE)
    for order, offered in (("pause", {"run", "stop"}), ("run", {"pause", "stop"}), ("stop", {"run"})):
        assert visitor.post(f"/studies/study/{order}").headers["Location"] == "/studies/study"
        assert studies.get(lab.store, "study").desired_state == order
        list_inputs = Inputs(visitor.page("/studies").text)
        assert set(list_inputs.actions) == {f"/studies/study/{action}" for action in offered}
        assert list_inputs.fields["next"] == "/studies"
        for path in ("/studies/study", "/studies/study/now"):
            inputs = Inputs(visitor.page(path).text)
            assert inputs.actions == list_inputs.actions and inputs.fields["next"] == "/studies/study"


def test_a_trial_gets_a_star_tags_and_a_note(lab: DashboardLab) -> None:
    visitor, path = lab.visitor(Role.OPERATE), "/studies/study/trials/3"
    answer = visitor.post(f"{path}/mark", star="on", tags="small small for-old-phones", note=" <b>try it ")
    assert answer.headers["Location"] == path
    assert visitor.post("/studies/study/trials/5/mark", tags="small").status_code == 303
    marked = visitor.client.get(f"{path}.json").json()
    assert (marked["star"], marked["tags"], marked["note"]) == (True, ["small", "for-old-phones"], "<b>try it")
    page = visitor.page(path).text
    assert "&lt;b&gt;try it" in page and Inputs(page).fields["tags"] == "small for-old-phones"

    def matches(**query: str) -> list[int]:
        return [row["trial"] for row in visitor.client.get("/studies/study/trials.json", params=query).json()["rows"]]

    assert matches(starred="1") == [3] and sorted(matches(tag="small")) == [3, 5]
    assert matches(tag="small", starred="1", state="complete") == [3]
    listed = visitor.page("/studies/study/trials?tag=small").text
    assert listed.count("★") == 1 and "2 of 8 trials match" in listed
    assert visitor.client.get("/studies/study/trials?tag=none").status_code == 404
    rows = visitor.client.get("/studies/study/trials.csv").text.splitlines()
    assert "star,tags,note" in rows[0] and ",1,small for-old-phones,<b>try it," in rows[4]


def test_marks_are_changed_and_removed(lab: DashboardLab) -> None:
    visitor, path = lab.visitor(Role.OPERATE), "/studies/study/trials/3"
    before = visitor.client.get("/studies/study.json").json()
    assert visitor.post(f"{path}/mark", tags="a", note="b").status_code == 303
    count = events.newest(lab.store, studies.find_id(lab.store, "study"))
    assert visitor.post(f"{path}/mark", tags="a", note="b").status_code == 303
    assert events.newest(lab.store, studies.find_id(lab.store, "study")) == count, "nothing has changed"
    for wrong in ({"tags": "<b>"}, {"tags": "a" * 33}, {"note": "n" * 501}, {"note": "a\nb"}):
        assert visitor.post(f"{path}/mark", **wrong).status_code == 422
    assert visitor.post("/studies/study/trials/99/mark", star="on").status_code == 404
    assert visitor.post(f"{path}/mark").status_code == 303
    marked = visitor.client.get(f"{path}.json").json()
    assert (marked["star"], marked["tags"], marked["note"]) == (False, [], "")
    after = visitor.client.get("/studies/study.json").json()
    assert after["front"] == before["front"]


def test_what_makes_no_sense_is_said(lab: DashboardLab) -> None:
    visitor = lab.visitor(Role.OPERATE)
    studies.set_state(lab.store, studies.get(lab.store, "study").id, StudyState.STOPPED)
    answer = visitor.post("/studies/study/run")
    assert answer.status_code == 409 and "nas launch --resume" in answer.text
    answer = visitor.post("/studies/studi/stop")
    assert answer.status_code == 404 and "did you mean" in answer.text
    for page in ("/studies", "/studies/study"):
        assert "/studies/study/run" not in visitor.page(page).text, "it was not submitted here"
    assert "nas launch --study study --resume" in visitor.page("/studies/study").text


@pytest.mark.parametrize("goal", ["//evil.example/", "https://evil.example", "/\\evil.example", "javascript:1"])
def test_an_action_leads_to_no_other_host(lab: DashboardLab, goal: str) -> None:
    visitor = lab.visitor(Role.OPERATE)
    assert visitor.post("/studies/study/pause", next="/studies?before=7").headers["Location"] == "/studies?before=7"
    assert visitor.post("/studies/study/pause", next=goal).headers["Location"] == "/studies/study"


def test_devices_are_steered_and_the_reason_is_kept(lab: DashboardLab) -> None:
    visitor = lab.visitor(Role.OPERATE)

    def after(order: str) -> tuple[DeviceState, Health, str | None]:
        answer = visitor.post(f"/devices/box/{order}", reason=f"for {order}")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/devices/box")
        row = devices.get(lab.store, "box")
        return row.state, row.health, row.health_reason

    assert after("drain")[0] is DeviceState.DRAINING
    assert "/devices/box/resume" in Inputs(visitor.page("/devices/box").text).actions
    assert after("resume")[0] is DeviceState.IDLE
    assert after("quarantine")[1:] == (Health.MAINTENANCE, "for quarantine")
    refused = visitor.post("/devices/box/check")
    assert refused.status_code == 422 and "release it first" in refused.text
    page = visitor.page("/devices/box").text
    assert "for quarantine" in page and "for drain" in page
    assert set(Inputs(page).actions) == {f"/devices/box/{order}" for order in ("drain", "release", "label", "reserve")}
    assert after("release")[1:] == (Health.UNKNOWN, "for release")
    after("check")
    assert visitor.post("/devices/box/drain", reason="x\ny").status_code == 422
    assert visitor.post("/devices/box/drain", reason="x" * 501).status_code == 422


def test_a_device_gets_name_note_and_tags(lab: DashboardLab) -> None:
    visitor = lab.visitor(Role.OPERATE)
    answer = visitor.post("/devices/box/label", name="Bench 3", note="new <battery>", tags="fast rack-2")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/devices/box")
    page = visitor.page("/devices/box").text
    assert "new &lt;battery&gt;" in page
    fields = Inputs(page).fields
    assert (fields["name"], fields["note"], fields["tags"]) == ("Bench 3", "new <battery>", "fast rack-2")
    visitor.post("/devices/box/label", note="")
    assert devices.labels(lab.store)["box"] == DeviceLabels(name="Bench 3", tags=("fast", "rack-2"))
    for wrong in ({"name": "x" * 65}, {"note": "two\nlines"}, {"tags": "a/b"}):
        assert visitor.post("/devices/box/label", **wrong).status_code == 422
    assert "/devices/box/label" not in Inputs(lab.visitor(Role.READ).page("/devices/box").text).actions


def test_a_device_is_reserved_on_its_page(lab: DashboardLab) -> None:
    visitor = lab.visitor(Role.OPERATE)
    answer = visitor.post("/devices/box/reserve", duration="2h", reason="release of <Monday>", study="phones")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/devices/box")
    page = visitor.page("/devices/box").text
    assert "release of &lt;Monday&gt;" in page and "End the reservation" in page
    with lab.store.read() as connection:
        held = devices.reservations(connection, lab.store.now())["box"]
    assert (held.until - lab.store.now(), held.study) == (7200.0, "phones")
    for wrong in ({"duration": "2h"}, {"duration": "8d", "reason": "x"}, {"duration": "soon", "reason": "x"}):
        assert visitor.post("/devices/box/reserve", **({"reason": ""} | wrong)).status_code == 422
    visitor.post("/devices/box/reserve", reason="")
    with lab.store.read() as connection:
        assert devices.reservations(connection, lab.store.now()) == {}
    assert "/devices/box/reserve" not in Inputs(lab.visitor(Role.READ).page("/devices/box").text).actions


def test_only_admins_are_offered_to_remove_devices(lab: DashboardLab) -> None:
    for role, offered in ((Role.READ, False), (Role.OPERATE, False), (Role.ADMIN, True)):
        actions = Inputs(lab.visitor(role).page("/devices/box").text).actions
        assert ("/devices/box/remove" in actions) == offered
        assert bool(actions) == (role is not Role.READ)
    assert lab.visitor(Role.ADMIN).post("/devices/box/remove").status_code == 303
    assert devices.get(lab.store, "box").health is Health.RETIRED
    assert Inputs(lab.visitor(Role.ADMIN).page("/devices/box").text).actions == ["/devices/box/release"]
