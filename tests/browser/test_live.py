"""A study that continues while its page is open."""

from __future__ import annotations

from conftest import Watched, fill
from live_lab import LiveLab
from playwright.sync_api import Page, Route, expect
from study_page import picked, show, state, until

from nas.infra.store import studies

TRIALS = "page.data.trials"


def test_new_trials_appear(lab: LiveLab, live: str, live_page: Page) -> None:
    show(live_page, f"{live}/study?pick=quality:0.5:9")
    before, front = state(live_page, TRIALS), state(live_page, "page.data.front.length")
    count = picked(live_page)
    best = lab.complete(studies.find_id(lab.store, "study"), 2.0, 0.2, 0.2)
    expect(live_page.locator("#picked")).to_have_text(f"{count + 1} of {before + 1} trials selected")
    assert state(live_page, "page.data.front.map(({ trial }) => trial)") == [best] and front > 1
    assert state(live_page, "page.panels[0].cloud[0].length") == before + 1
    assert state(live_page, "page.data.course.trial.at(-1)") == best
    expect(live_page.locator("#now")).to_contain_text("1 on the front")


def test_the_ranked_list_goes_on_and_keeps_its_marks(lab: LiveLab, live: str, live_page: Page) -> None:
    show(live_page, f"{live}/study?pick=quality:0.5:9")
    row = live_page.locator("#ranked tr[data-trial]").first
    marked = row.get_attribute("data-trial")
    row.get_by_role("checkbox").check()
    live_page.locator("h1").click()
    best = lab.complete(studies.find_id(lab.store, "study"), 2.0, 5.0, 5.0)
    new = live_page.locator(f"#ranked tr[data-trial='{best}']")
    expect(new).to_have_class("picked", timeout=20_000)  # the list is fetched every five seconds
    expect(live_page.locator("#ranked input:checked")).to_have_count(1)
    expect(live_page.locator(f"#ranked tr[data-trial='{marked}'] input")).to_be_checked()


def test_only_what_is_new_is_asked_for(lab: LiveLab, live: str, live_page: Page) -> None:
    urls: list[str] = []
    live_page.on("request", lambda request: urls.append(request.url) if "/points?" in request.url else None)
    show(live_page, f"{live}/study")
    lab.complete(studies.find_id(lab.store, "study"), 1.0, 1.0, 1.0)
    until(live_page, "page.data.trials === 43")
    assert sum("since=0&" in url for url in urls) == 1 and len(urls) > 1


def test_a_study_made_anew_begins_anew(lab: LiveLab, live: str, live_page: Page) -> None:
    show(live_page, f"{live}/study")
    old = state(live_page, "page.data.study")
    studies.delete(lab.store, old)
    fill(lab, lab.study())
    until(live_page, f"page.data.study !== {old} && page.data.trials === 42")


def test_a_hidden_page_rests(lab: LiveLab, live: str, live_page: Page) -> None:
    live_page.clock.install()
    urls: list[str] = []
    live_page.on("request", lambda request: urls.append(request.url))
    show(live_page, f"{live}/study")
    hide = """(state) => {
      Object.defineProperty(document, "visibilityState", { get: () => state, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    live_page.evaluate(hide, "hidden")
    urls.clear()
    live_page.clock.run_for(60_000)
    assert urls == []
    live_page.evaluate(hide, "visible")
    live_page.clock.run_for(10_000)
    until(live_page, "page.section.dataset.live === 'yes'")
    assert any("/points?since=" in url for url in urls)


def test_a_slow_server_is_not_asked_again_before_it_answers(lab: LiveLab, live: str, live_page: Page) -> None:
    live_page.clock.install()
    show(live_page, f"{live}/study")
    waiting: list[Route] = []
    live_page.route("**/studies/study/now", lambda route: waiting.append(route))
    live_page.clock.run_for(30_000)
    live_page.wait_for_timeout(500)
    assert len(waiting) == 1
    waiting.pop().continue_()
    for _ in range(200):
        live_page.clock.run_for(5_000)
        live_page.wait_for_timeout(50)
        if waiting:
            break
    waiting.pop().continue_()


def test_it_says_when_the_server_does_not_answer(lab: LiveLab, live: str, live_page: Page, watched: Watched) -> None:
    watched.expected = ["503"]
    show(live_page, f"{live}/study")
    broken = {"status": 503, "content_type": "application/json", "body": '{"error": "busy"}'}
    live_page.route("**/points?*", lambda route: answer(route, broken))
    expect(live_page.locator("#panels")).to_have_attribute("data-live", "no")
    live_page.unroute("**/points?*")
    expect(live_page.locator("#panels")).to_have_attribute("data-live", "yes")


def answer(route: Route, response: dict[str, object]) -> None:
    route.fulfill(**response)  # type: ignore[arg-type]
