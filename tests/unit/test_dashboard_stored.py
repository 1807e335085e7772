"""Whatever is stored is shown as text: markup, quotes, templates, characters that turn the reading direction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any

import pytest
from api_lab import space_text
from dashboard_lab import HTML, DashboardLab, page_routes
from fastapi.testclient import TestClient
from live_lab import figures
from sqlalchemy import update
from store_support import add_device, device, key, proposal, put, take
from study_support import sample, tiny_space
from test_dashboard_pages import Page

from nas.core.measurement import Figure, Measurement, Repetition
from nas.core.trial import EventKind
from nas.core.wire import Failure
from nas.infra.store import calibrations, devices, events, models, outcomes, results, studies, trials
from nas.infra.store.calibrations import ReferenceRun
from nas.infra.store.rows import Health, Role, StudyState
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.search.study.events import Closed
from nas.serve.api.submissions import SubmissionFolder, SubmissionState
from nas.serve.dashboard.access import AccessRules

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}&lt;"
TURNED = "\u202eegnahc\u2066\u200b\x1b[2J\x85"
HOSTILE = MARKUP + TURNED
ESCAPED = "\\u202eegnahc\\u2066\\u200b\\x1b[2J\\x85"
PROXY = "10.0.0.1"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardLab]:
    """A store in which every text that somebody else may have chosen is hostile."""
    rules = AccessRules(proxies=(ip_network(PROXY),), proxy_roles={MARKUP: Role.ADMIN})
    lab = DashboardLab(tmp_path_factory.mktemp("stored"), rules)
    fill_studies(lab)
    fill_devices(lab)
    lab.submitted.submit("waits", space_text(), by=HOSTILE)
    folder = SubmissionFolder(lab.home / "studies" / "waits")
    submission = folder.read()
    assert submission is not None
    changes = {"state": SubmissionState.ENDED, "message": f"{HOSTILE}\nsecond line", "exit_code": 1, "space": HOSTILE}
    folder.write(submission.model_copy(update=changes))
    yield lab
    lab.process.end()


def fill_studies(lab: DashboardLab) -> None:
    """A study with a failed trial, one with a trial that cannot be read, and one that cannot be read itself."""
    study = lab.study()
    lab.complete(study, 1.0, 1.5, 1.5)
    candidate = proposal(4096, operator=HOSTILE[:64], parents=(0,), record={"engine": HOSTILE, HOSTILE: HOSTILE})
    failed = trials.propose(lab.store, study, [candidate])[0].number
    trials.add_event(lab.store, study, failed, EventKind.FAILED, {"reason": HOSTILE, HOSTILE: [HOSTILE]})
    results.put(lab.store, key("hostile"), "measure", measured(), seconds=2.0, trial=(study, failed))
    events.append(lab.store, study, {"what": HOSTILE, "message": HOSTILE})
    events.append(lab.store, study, {"what": Closed.what, "rule": "trials", "message": HOSTILE})
    damaged = lab.study("damaged")
    lab.complete(damaged, 1.0, 1.5, 1.5)
    broken = lab.propose(damaged)
    with lab.store.write() as connection:
        layout = {"v": 1, "d_model": HOSTILE, "layers": [{"mixer": {"kind": HOSTILE}}], HOSTILE: HOSTILE}
        of_broken = (models.trial.c.study == damaged) & (models.trial.c.number == broken)
        connection.execute(update(models.trial).where(of_broken).values(layout=layout))
    space = studies.get(lab.store, study).space
    hostile = studies.create(lab.store, "hostile", space | {"name": HOSTILE, "doc": HOSTILE}, seed=0, version=HOSTILE)
    studies.set_state(lab.store, hostile.id, StudyState.FAILED)


def measured() -> dict[str, Any]:
    """A measurement without figures, for which it gives hostile reasons."""
    nothing = Figure(value=None, unit=MARKUP, reason=HOSTILE)
    repetition = Repetition(valid=False, reason=HOSTILE, sample=sample())
    measurement = Measurement(
        artifact=HOSTILE, runtime="fake", build=HOSTILE, patched=False, device="box", repetitions=[repetition],
        workload=tiny_space().workloads["chat"], refused_share=1.0, protocol=PROTOCOL_VERSION,
        figures=figures(1.0, 1.0) | {"latency": nothing, "peak_rss": nothing, HOSTILE: nothing},
    )  # fmt: skip
    return {"value": measurement.model_dump(mode="json"), "seconds": 2.0}


def fill_devices(lab: DashboardLab) -> None:
    """A device that describes itself in hostile text, and another whose job failed with such a message."""
    texts = {name: MARKUP for name in ("model", "cpu", "os", "soc", "libc", "energy_counter", "transport")}
    described = device("spoken", **texts, tags=(MARKUP,), unread={MARKUP: MARKUP})  # type: ignore[arg-type]
    add_device(lab.store, "spoken", agent="talker")
    devices.register(lab.store, "talker", [described], boot_id=HOSTILE)
    devices.set_health(lab.store, "spoken", Health.MAINTENANCE, HOSTILE)
    devices.set_health(lab.store, "box", Health.GOOD)
    put(lab.store, "job")
    job = take(lab.store)
    outcomes.fail(lab.store, job.id, "box", "local", job.epoch or 0, Failure(kind="infrastructure", message=HOSTILE))
    place = ("box", HOSTILE[:64], HOSTILE)
    calibrations.put(lab.store, *place, 212.5, {})
    calibrations.note_runs(lab.store, place, HOSTILE, [ReferenceRun(1.1, 40.0, True)], 212.5)


def visitor(lab: DashboardLab) -> TestClient:
    """Returns a client that a trusted proxy authenticates as a user whose name is markup."""
    headers = HTML | {"X-Forwarded-User": MARKUP}
    return TestClient(lab.app, base_url="https://lab.example", headers=headers, client=(PROXY, 5000),
                      raise_server_exceptions=False)  # fmt: skip


def pages(lab: DashboardLab) -> list[str]:
    """Every page of things that exist, and some of things that do not."""
    values: dict[str, list[Any]] = {
        "name": ["study", "damaged", "hostile", "waits", "%3Cscript%3E"], "id": ["box", "spoken", "%3Cscript%3E"],
        "number": [0, 1, 9],
    }  # fmt: skip
    addresses = []
    for route in page_routes(lab.app):
        paths = [route.path] if "GET" in route.methods and not route.path.startswith("/assets") else []
        for name in [field.alias for field in route.dependant.path_params]:
            paths = [path.replace(f"{{{name}}}", str(value)) for path in paths for value in values.get(name, ["x"])]
        addresses += paths
    queries = ["/studies/study/compare?trial=0&trial=1", "/studies/damaged/compare?trial=0&trial=1", "/devices?after=c"]
    return [*dict.fromkeys(addresses), *queries]


def test_whatever_is_stored_is_text_on_every_page(lab: DashboardLab) -> None:
    browser = visitor(lab)
    paths = pages(lab)
    assert len(paths) > 30
    for path in paths:
        answer = browser.get(path)
        assert answer.status_code < 500, (path, answer.text)
        if answer.headers["Content-Type"].startswith("text/html"):
            assert "<script" not in re.sub(
                r'<script type="module" src="/assets/[a-z-]+\.js"></script>', "", answer.text
            ), path
            assert not any(character in answer.text for character in TURNED if not character.isascii()), path
            assert "\x1b" not in answer.text, path
            is_page = answer.text.startswith("<!doctype") and "Content-Disposition" not in answer.headers
            tags = Page(answer.text).tags if is_page else []  # a report to send has styles and a picture inside
            assert not [tag for tag, _ in tags if tag in ("img", "iframe", "object", "embed", "base")], path
            assert all((named.get("formaction") or "/").startswith("/") for _, named in tags), path
        elif answer.headers["Content-Type"].startswith("text/csv"):
            assert answer.headers["Content-Disposition"].startswith("attachment; ")
        else:
            assert answer.headers["Content-Type"] == "application/json" and answer.json() is not None
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "times"),
    [
        ("/studies", 3),  # the visitor, a space, why a submission ended
        ("/studies/study", 1),  # why it ended
        ("/submissions/waits", 3),
        ("/devices", 3),
        ("/devices/spoken", 8),
        ("/devices/box", 4),
        ("/studies/study/trials/1", 5),
    ],
)
def test_it_is_shown_as_it_is(lab: DashboardLab, path: str, times: int) -> None:
    text = Page(visitor(lab).get(path).text).text
    assert text.count(MARKUP) >= times, text


@pytest.mark.parametrize(
    "path", ["/submissions/waits", "/devices/spoken", "/devices/box", "/studies", "/studies/study/trials/1"]
)
def test_what_cannot_be_seen_is_written_out(lab: DashboardLab, path: str) -> None:
    assert ESCAPED in Page(visitor(lab).get(path).text).text


def test_lines_stay_lines(lab: DashboardLab) -> None:
    assert f"{ESCAPED}\nsecond line" in Page(visitor(lab).get("/submissions/waits").text).text


def test_the_twin_has_it_as_it_is(lab: DashboardLab) -> None:
    view = visitor(lab).get("/submissions/waits.json").json()
    assert view["submission"]["message"] == f"{HOSTILE}\nsecond line"
