"""The other pages in a browser: nothing that the policy forbids, and what one can do there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from accessible import expect_accessible, expect_readable
from conftest import Watched
from live_lab import LiveLab
from playwright.sync_api import BrowserContext, Page, expect
from release_lab import write_family

from nas.core.family import BENCHMARKS, EVALUATION, MemberEvaluation, TaskScore, write_record
from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.web.server import Server, listen_tcp, web_app
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router

CUT = "all => all.filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.ariaLabel)"
"""Names of the elements whose content is wider than they are."""


def cut(page: Page, selector: str) -> list[str]:
    """Returns what is still cut off when scripts had two seconds to follow a new width."""
    expect(page.locator(selector).first).to_be_visible()
    for _ in range(20):
        names: list[str] = page.locator(selector).evaluate_all(CUT)
        if not names:
            break
        page.wait_for_timeout(100)
    return names


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("", "Studies"),
        ("/study", "study"),
        ("/wide?infeasible=1", "wide"),
        ("/study/trials", "Trials of study"),
        ("/study/log", "Log of study"),
        ("/study/trials/2", "Trial 2"),
        ("/study/compare?trial=2&trial=3", "Trial 2"),
    ],
)
def test_every_page_stands_for_itself(page: Page, finished: str, path: str, title: str) -> None:
    expect_readable(page, finished + path, title)


def test_an_unknown_path_is_a_page_with_a_way_back(page: Page, finished: str, watched: Watched) -> None:
    watched.expected = ["404"]
    expect_readable(page, finished.removesuffix("studies") + "nosuch", "Not Found")
    page.get_by_role("link", name="All studies").click()
    expect(page).to_have_url(finished)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    ("path", "tables"),
    [
        ("", "#studies .wide"),
        ("/wide", "#ranked-list .wide"),
        ("/study/trials/2", ".wide:has(table)"),
        ("/study/compare?trial=1&trial=2", ".wide:has(table)"),
        ("/wide/compare?trial=1&trial=2&trial=3", ".wide:has(table)"),
    ],
)
def test_tables_are_not_cut_off(page: Page, finished: str, path: str, tables: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(finished + path)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    assert cut(page, tables) == []


def test_a_family_is_readable_and_fits_a_phone(
    page: Page, finished: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    write_family(tmp_path)
    sums = {"pytorch": TaskScore.of(30, 40), "q4_0": TaskScore.of(29, 40, lost=2, gained=1)}
    evaluation = MemberEvaluation(
        weights=f"checkpoint:{'0123abcd' * 8}",
        tasks="tasks.jsonl",
        scores={name: {"sums": score} for name, score in sums.items()},
    )
    for record in (EVALUATION, BENCHMARKS):
        write_record(tmp_path / "families" / "demo" / "4M" / record, evaluation)
    expect_readable(page, finished.removesuffix("studies") + "families/demo", "demo")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert cut(page, ".wide:has(table)") == []
    expect_readable(page, finished.removesuffix("studies") + "families", "Families")
    page.set_viewport_size({"width": 390, "height": 800})
    assert cut(page, ".wide:has(table)") == []
    for label in ("Built from", "Sizes", "Trained", "Built"):
        assert page.locator(f'td[data-label="{label}"]').evaluate("e => getComputedStyle(e).display") == "block"


def test_tables_are_tables_for_screen_readers_on_a_phone(page: Page, finished: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{finished}/study/compare?trial=1&trial=2")
    expect(page.locator(".u-legend").first).to_be_visible()
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = Counter(node["role"]["value"] for node in nodes if not node["ignored"])
    elements = {
        "table": "table", "row": "tr", "columnheader": "thead th", "rowheader": "th[scope=row], .u-legend th",
    }  # fmt: skip
    counts = {role: page.locator(tag).filter(visible=True).count() for role, tag in elements.items()}
    assert counts["row"] > counts["table"] > 1
    assert {role: roles[role] for role in elements} == counts


def test_from_the_list_to_a_comparison(page: Page, finished: str) -> None:
    page.goto(finished)
    page.get_by_role("link", name="wide").first.click()
    expect(page).to_have_url(re.compile("/studies/wide"))
    boxes = page.locator("#ranked input[type=checkbox]")
    for nth in (0, 1):
        boxes.nth(nth).check()
    page.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?trial=\d+&trial=\d+"))
    page.get_by_role("link", name=re.compile("[Tt]rial")).first.click()
    expect(page).to_have_url(re.compile(r"/trials/\d+$"))


def test_a_candidate_can_be_copied_and_its_forecasts_come(page: Page, finished: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{finished}/study/trials/2")
    layout = page.locator("#layout-text").text_content()
    page.locator("button[data-copy=layout-text]").click()
    expect(page.locator("button[data-copy=layout-text]")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == layout
    part = page.locator("[data-load]")
    part.scroll_into_view_if_needed()
    expect(part).not_to_contain_text("are computed on request")


@pytest.fixture
def guarded(tmp_path: Path, watched: Watched) -> Iterator[tuple[LiveLab, str]]:
    """A store, and the address of its pages, which want to know who asks."""
    lab = LiveLab(tmp_path)
    lab.study()
    app = web_app()
    app.router.routes += dashboard_router(lab.store, AccessRules(secure=False)).routes
    with listen_tcp("127.0.0.1", 0) as listening, Server(app, listening) as server:
        watched.origin = f"http://127.0.0.1:{server.port}"
        yield lab, watched.origin


def test_logging_in_and_out(guarded: tuple[LiveLab, str], context: BrowserContext, watched: Watched) -> None:
    lab, origin = guarded
    watched.expected = ["403"]  # the wrong token
    page = context.new_page()
    page.goto(f"{origin}/studies/study?infeasible=1")
    expect_accessible(page)
    for token in ("hilnas.ann.wrong", agents.create_api_token(lab.store, "ann", Role.READ)):
        page.get_by_label("API token").fill(token)
        page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/studies/study\?.*infeasible=1"))
    expect(page.locator("#panels")).to_have_attribute("data-live", "yes")
    page.get_by_role("button", name="Log out").click()
    page.goto(f"{origin}/studies")
    expect(page.get_by_label("API token")).to_be_visible()
