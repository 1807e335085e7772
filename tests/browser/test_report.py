"""The report of a study as a page and in print."""

from __future__ import annotations

from pathlib import Path

import pytest
from accessible import expect_accessible
from conftest import fill
from live_lab import LiveLab
from playwright.sync_api import Browser, Page
from study_support import snapshot

from nas.serve.dashboard.study_report import study_report_html


@pytest.fixture
def report(browser: Browser, tmp_path: Path) -> Page:
    """The report of a study with a front, opened from its file."""
    lab = LiveLab(tmp_path)
    fill(lab, lab.study())
    file = tmp_path / "report.html"
    file.write_text(study_report_html(lab.store, snapshot(lab.store)))
    page = browser.new_page()
    page.goto(file.as_uri())
    return page


def test_the_picture_has_its_marks(report: Page) -> None:
    marks = report.locator("figure svg use")
    boxes = marks.evaluate_all("(all) => all.map((each) => each.getBoundingClientRect().width)")
    assert len(boxes) > 10 and min(boxes) > 0
    expect_accessible(report)


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window(report: Page, width: int) -> None:
    report.set_viewport_size({"width": width, "height": 800})
    assert report.evaluate("document.documentElement.scrollWidth") == width


def test_print_cuts_nothing_off(report: Page, tmp_path: Path) -> None:
    report.emulate_media(media="print")
    report.set_viewport_size({"width": 718, "height": 1000})  # A4 with margins of 1 cm
    beyond = "(all) => all.filter((each) => each.getBoundingClientRect().right > 718).map((each) => each.outerHTML)"
    assert report.locator("body *:not(svg *)").evaluate_all(beyond) == []
    report.pdf(
        path=tmp_path / "report.pdf", format="A4", margin=dict.fromkeys(("top", "right", "bottom", "left"), "1cm")
    )
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")
