"""Launching and steering in a browser, with and without scripts: forms that really are sent, and pages that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from accessible import expect_accessible
from api_lab import space_text
from conftest import PATIENCE_MS, Watched
from dashboard_lab import DashboardLab
from playwright.sync_api import BrowserContext, Page, expect

from nas.infra.store import calibrations, devices, studies
from nas.infra.store.calibrations import ReferenceRun
from nas.infra.store.rows import Health, Role
from nas.infra.web.server import Server, listen_tcp
from nas.serve.dashboard.access import AccessRules

PHONE_IN_THE_DARK = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DashboardLab]:
    """A coordinator's pages with a study, and a device whose reference runs were kept."""
    lab = DashboardLab(tmp_path, AccessRules(secure=False))
    lab.study()
    place = ("box", "llama.cpp", "b7000")
    calibrations.put(lab.store, *place, 212.5, {})
    for number in range(12):
        lab.clock.time += 1800
        runs = [ReferenceRun(1 + 0.004 * number, 40.0 + number % 5, number % 4 != 0)]
        calibrations.note_runs(lab.store, place, f"job-{number}", runs, 212.5)
    yield lab
    lab.process.end()


@pytest.fixture
def operator(lab: DashboardLab, context: BrowserContext, watched: Watched) -> Iterator[Page]:
    """Somebody who has logged in and may steer."""
    with listen_tcp("127.0.0.1", 0) as listening, Server(lab.app, listening) as server:
        watched.origin = f"http://127.0.0.1:{server.port}"
        page = context.new_page()
        page.goto(f"{watched.origin}/studies")
        page.get_by_label("API token").fill(lab.tokens[Role.OPERATE])
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
        yield page


def fits(page: Page) -> None:
    """Nothing stands out of the window's side."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_space_is_checked_while_it_is_edited(operator: Page) -> None:
    operator.get_by_role("link", name="Launch").click()
    operator.get_by_label("Begin with a packaged space").select_option("lfm2-demo")
    operator.get_by_role("button", name="Show it").click()
    check, space = operator.locator("#space-check"), operator.get_by_label("Search space, in YAML")
    expect(check).to_contain_text("The space is valid")
    expect(check.locator("svg")).not_to_have_count(0)
    text = space.input_value()
    space.fill(text.replace("[local]", "[loacl]") + "searhc: {}\n")
    expect(check.locator("#space-problems li")).to_have_count(2)
    expect(space).to_have_attribute("aria-invalid", "true")
    expect(space).to_be_focused()
    space.fill(text)
    expect(check).to_contain_text("The space is valid")
    expect(space).not_to_have_attribute("aria-invalid", "true")


@pytest.mark.parametrize("context", [{}, {"java_script_enabled": False}], indirect=True, ids=["scripts", "no scripts"])
def test_a_space_is_checked_by_a_button(operator: Page) -> None:
    operator.goto(operator.url.partition("/studies")[0] + "/launch?space=lfm2-demo")
    space = operator.get_by_label("Search space, in YAML")
    space.fill("v: 1\nmodle: {}\n")
    operator.get_by_role("button", name="Check the space only").click()
    expect(operator.locator("#space-problems")).to_contain_text("did you mean 'model'?")
    expect(space).to_have_value("v: 1\nmodle: {}\n")


@pytest.mark.parametrize("context", [{}, {"java_script_enabled": False}], indirect=True, ids=["scripts", "no scripts"])
def test_a_study_is_launched(lab: DashboardLab, operator: Page, watched: Watched, tmp_path: Path) -> None:
    watched.expected = ["422"]
    operator.get_by_role("link", name="Launch").click()
    operator.get_by_label("Begin with a packaged space").select_option("lfm2-demo")
    operator.get_by_role("button", name="Show it").click()
    space = operator.get_by_label("Search space, in YAML")
    expect(space).to_have_value(re.compile("name: lfm2-demo"))
    operator.get_by_label("Name of the study").fill("mine")
    space.fill("v: 1\nmodle: {}\n")
    operator.get_by_role("button", name="Launch").click()
    problem = "Line 2: modle: unknown key 'modle'; did you mean 'model'?"
    expect(operator.locator("#space-problems")).to_contain_text(problem)
    expect(space).to_have_value("v: 1\nmodle: {}\n")
    expect(operator.get_by_label("Name of the study")).to_have_value("mine")
    file = tmp_path / "tiny.yaml"
    file.write_text(space_text())
    operator.get_by_label("Or a file").set_input_files(file)
    operator.get_by_role("button", name="Launch").click()
    expect(operator).to_have_url(re.compile("/submissions/mine$"))
    assert (lab.home / "studies" / "mine" / "space.yaml").read_text() == space_text()
    operator.get_by_role("button", name="Stop mine").click()
    expect(operator.locator("#submission")).to_contain_text("stopped while it waited")


def test_the_form_its_problems_and_a_submission_are_accessible(
    operator: Page, watched: Watched, tmp_path: Path
) -> None:
    watched.expected = ["422"]
    operator.goto(f"{watched.origin}/launch")
    expect_accessible(operator)
    operator.get_by_label("Name of the study").fill("mine")
    operator.get_by_label("Search space, in YAML").fill("v: 1\nmodle: {}\n")
    operator.get_by_role("button", name="Launch").click()
    expect(operator.locator("#space-problems")).to_contain_text("did you mean 'model'?")
    expect_accessible(operator)
    file = tmp_path / "tiny.yaml"
    file.write_text(space_text())
    operator.get_by_label("Or a file").set_input_files(file)
    operator.get_by_role("button", name="Launch").click()
    expect(operator).to_have_url(re.compile("/submissions/mine$"))
    expect_accessible(operator)


def test_a_study_is_steered_from_the_list_and_its_page(lab: DashboardLab, operator: Page) -> None:
    operator.get_by_role("button", name="Pause study").click()
    expect(operator.get_by_role("button", name="Resume study")).to_be_visible()
    assert studies.get(lab.store, "study").desired_state == "pause"
    operator.get_by_role("link", name="study", exact=True).click()
    operator.get_by_role("button", name="Resume study").click()
    expect(operator).to_have_url(re.compile("/studies/study"))
    expect(operator.get_by_role("button", name="Pause study")).to_be_visible()
    assert studies.get(lab.store, "study").desired_state == "run"


def test_a_device_is_put_into_quarantine_and_back(lab: DashboardLab, operator: Page) -> None:
    operator.get_by_role("link", name="Devices").click()
    operator.get_by_role("link", name="box").click()
    expect(operator.get_by_role("img", name="12 reference runs").locator("canvas")).to_be_visible()
    operator.get_by_label("Reason").fill("battery <b>swollen</b>")
    operator.get_by_role("button", name="Quarantine box").click()
    expect(operator.locator("#device")).to_contain_text("battery <b>swollen</b>")
    assert devices.get(lab.store, "box").health is Health.MAINTENANCE
    operator.get_by_role("button", name="Release box").click()
    expect(operator.get_by_role("button", name="Quarantine box")).to_be_visible()
    devices.set_health(lab.store, "box", Health.BAD, "seen by who only looks on")
    expect(operator.locator("#device")).to_contain_text("seen by who only looks on", timeout=PATIENCE_MS)


@pytest.mark.parametrize("context", [PHONE_IN_THE_DARK], indirect=True)
def test_on_a_phone_in_the_dark(operator: Page, watched: Watched) -> None:
    for path in ("/devices", "/devices/box", "/launch?space=lfm2-demo", "/studies"):
        operator.goto(watched.origin + path)
        if path.startswith("/launch"):
            expect(operator.locator("#space-check")).to_contain_text("The space is valid")
        fits(operator)
        expect_accessible(operator)
