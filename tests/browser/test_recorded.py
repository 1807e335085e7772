"""Every page over a study that really ran, a device with a past, and a family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from accessible import expect_readable
from conftest import Watched
from live_lab import LiveLab
from playwright.sync_api import BrowserContext, Page, expect
from recorded_study import add_recorded_study
from release_lab import CONTENT, write_family
from store_support import add_device
from study_page import show, state, until

from nas.infra.store import calibrations
from nas.infra.store.calibrations import ReferenceRun
from nas.serve.api.studies import MarkRequest, mark_trial
from nas.serve.dashboard.local_server import dashboard_here

BUILD = "0" * 64
TAGGED = {60: ["old-phones", "again"], 10: ["again"]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server of these pages."""
    lab = LiveLab(tmp_path_factory.mktemp("recorded"))
    device = add_device(lab.store)
    add_recorded_study(lab.store, lab.clock, device)
    for trial, tags in TAGGED.items():
        mark_trial(lab.store, "recorded", trial, MarkRequest(tags=tags))
    add_past(lab, device)
    write_family(Path(os.environ["NAS_HOME"]))
    with dashboard_here(lab.store) as url:
        yield url.removesuffix("/studies")


def add_past(lab: LiveLab, device: str) -> None:
    """A device that was calibrated, and warmed up and drifted since."""
    calibrations.put(lab.store, device, "llama.cpp", BUILD, 361.0, {})
    for job in range(30):
        lab.clock.time += 600
        runs = [ReferenceRun(1 + 0.01 * math.sin(job + i), 40.0 + job / 4, job != 7) for i in range(3)]
        calibrations.note_runs(lab.store, (device, "llama.cpp", BUILD), f"job-{job}", runs, 361.0)


@pytest.fixture
def page(context: BrowserContext, watched: Watched, recorded: str) -> Page:
    watched.origin = recorded
    return context.new_page()


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/studies", "Studies"),
        ("/studies/recorded", "recorded"),
        ("/studies/recorded/trials", "Trials of recorded"),
        ("/studies/recorded/trials/0", "Published"),
        ("/studies/recorded/log", "Log"),
        ("/studies/recorded/trials/2", "Trial 2"),
        ("/studies/recorded/trials/60", "Trial 60"),
        ("/studies/recorded/compare?trial=0&trial=60&trial=61", "trial 60"),
        ("/devices", "Devices"),
        ("/devices/box", "box"),
        ("/families", "Families"),
        ("/families/demo", "demo"),
    ],
)
def test_every_page_opens(page: Page, recorded: str, path: str, title: str) -> None:
    expect_readable(page, recorded + path, title)


def test_the_study_is_drawn(page: Page, recorded: str) -> None:
    show(page, f"{recorded}/studies/recorded")
    assert state(page, "page.data.trials") == 62
    assert state(page, "page.data.front.filter(({ on }) => on).length") == page.locator("#ranked tbody").first.locator(
        "tr:not(.tied)"
    ).count()  # fmt: skip
    assert state(page, "page.data.references.map(({ name }) => name).sort()") == ["attention", "published"]
    assert page.locator("#blocks-part svg").count() == 2
    kinds = page.request.get(f"{recorded}/studies/recorded.json").json()["kinds"]
    rows = page.locator("#blocks-part table.list tbody tr")
    assert rows.count() == len(kinds) > 1
    for row, kind in zip(rows.all(), kinds, strict=True):
        assert [cell.text_content() for cell in row.locator("th, td").all()[:3]] == [
            kind["kind"], str(kind["trials"]), str(kind["front"])
        ]  # fmt: skip
    moved = page.request.get(f"{recorded}/studies/recorded/effects.json").json()
    assert len(moved["knobs"]) > 3
    page.locator("#effects").scroll_into_view_if_needed()
    expect(page.locator("section[aria-labelledby=effects] table.list tbody tr")).to_have_count(len(moved["knobs"]))
    assert moved["slices"] and moved["no_slices"] is None
    slices = page.locator(".slice")
    expect(slices).to_have_count(len(moved["slices"]))
    expect(slices.first.locator("canvas")).to_have_count(len(moved["objectives"]))
    slices.last.locator("summary").click()
    until(
        page,
        "(() => { const box = [...document.querySelectorAll('.slice')].at(-1).querySelector('.chart');"
        " return box.querySelector('canvas').clientWidth === box.clientWidth; })()",
    )
    everywhere = all(kind["front"] for kind in kinds)
    assert page.get_by_text("All kinds are on the front").is_visible() == everywhere


def test_names_of_references_stay_inside_their_panel(page: Page, recorded: str) -> None:
    page.add_init_script("""
      window.drawn = [];
      const fill = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const [name] = text.split(" ");
        if (["attention", "published"].includes(name)) {
          const { width } = this.measureText(text), { a } = this.getTransform();
          const left = { left: 0, center: -width / 2, right: -width }[this.textAlign];
          window.drawn.push([name, (x + left) * a, (x + left + width) * a, y, this.canvas.width]);
        }
        return fill.apply(this, arguments);
      };
    """)
    show(page, f"{recorded}/studies/recorded")
    boxes = state(page, "page.panels.map(({ plot: { bbox } }) => [bbox.left, bbox.left + bbox.width, bbox.top])")
    drawn = state(page, "window.drawn")
    assert {text for text, *_ in drawn} == {"attention", "published"}
    left_edge, _, top_edge = (min(values) for values in zip(*boxes, strict=True))
    right_edge = max(box[1] for box in boxes)
    for text, start, end, y, _ in drawn:
        assert left_edge <= start and end <= right_edge and y > top_edge, text


def test_references_are_exactly_on_their_values(page: Page, recorded: str) -> None:
    page.add_init_script("""
      window.stars = [];
      let path = [];
      const { beginPath, moveTo, lineTo, closePath } = CanvasRenderingContext2D.prototype;
      Object.assign(CanvasRenderingContext2D.prototype, {
        beginPath() { path = []; return beginPath.call(this); },
        moveTo(x, y) { path.push([x, y]); return moveTo.call(this, x, y); },
        lineTo(x, y) { path.push([x, y]); return lineTo.call(this, x, y); },
        closePath() { if (path.length === 10) window.stars.push(path); return closePath.call(this); },
      });
    """)
    show(page, f"{recorded}/studies/recorded")
    published = "page.data.references.find(({ name }) => name === 'published').values"
    places = state(page, f"page.panels.map((panel) => ['x', 'y'].map((side) => panel.at({published}, side)))")
    centres = [[sum(ends) / 10 for ends in zip(*star, strict=True)] for star in state(page, "window.stars")]
    assert len(places) == 3
    for place in places:
        assert any(math.dist(place, centre) < 0.5 for centre in centres), (place, centres)


def test_a_reference_far_from_the_front_is_at_the_edge_until_it_is_asked_for(page: Page, recorded: str) -> None:
    show(page, f"{recorded}/studies/recorded")
    attention = "page.data.references.find(({ name }) => name === 'attention')"
    outside = f"page.panels[0].at({attention}.values, 'y') - page.panels[0].place({attention})[1]"
    value = f"{attention}.values[page.panels[0].keys.y]"
    assert state(page, outside) > 0 and state(page, f"{value} < page.panels[0].range('y')[0]")
    page.locator("#choices summary").click()
    page.get_by_label("Whole range of the axes").check()
    expect(page).to_have_url(re.compile("far=1"))
    until(page, f"{value} > page.panels[0].range('y')[0]")
    assert state(page, outside) == 0


def test_trials_are_filtered_and_fit_a_phone(page: Page, recorded: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{recorded}/studies/recorded/trials")
    page.get_by_label("State").select_option("infeasible")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#trials .state").first).to_have_text("infeasible")
    page.get_by_role("link", name="latency").click()
    expect(page.locator("#trials [aria-sort=ascending]")).to_contain_text("latency")
    assert page.locator("#trials .state:not(.state-infeasible)").count() == 0
    assert page.locator("#trials").evaluate("(table) => table.scrollWidth <= table.parentElement.clientWidth")
    expect(page.locator("#trials tbody tr svg").first).to_be_visible()
    page.locator("#trials tbody a").first.click()
    expect(page.get_by_role("heading", name="Similar layouts")).to_be_visible()


def test_trials_are_filtered_by_a_tag(page: Page, recorded: str) -> None:
    page.goto(f"{recorded}/studies/recorded/trials")
    page.get_by_label("Tag").select_option("again")
    page.get_by_role("button", name="Filter").click()
    rows = page.locator("#trials tbody th a:not(.tag)")
    expect(rows).to_have_text(["trial 60", "trial 10"])
    page.get_by_role("link", name="old-phones", exact=True).click()
    expect(rows).to_have_text(["trial 60"])
    expect(page.get_by_label("Tag")).to_have_value("old-phones")
    rows.first.click()
    page.get_by_role("link", name="again", exact=True).click()
    expect(page.locator("#trials tbody tr")).to_have_count(2)


def test_a_family_is_read_with_the_keyboard_and_its_files_come(page: Page, recorded: str) -> None:
    page.goto(f"{recorded}/families")
    page.get_by_role("link", name="demo").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("demo")
    expect(page.get_by_role("img", name="over parameters").locator("canvas")).to_have_count(2)
    considered = page.get_by_text("Layouts that were considered: 1")
    considered.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("group", name="Layouts considered for 4M")).to_be_visible()
    with page.expect_download() as coming:
        page.get_by_role("link", name="gguf/model q4_0.gguf").click()
    assert Path(coming.value.path()).read_bytes() == CONTENT
    assert coming.value.suggested_filename == "demo-4M-model q4_0.gguf"
