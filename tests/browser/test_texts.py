"""What scripts write: numbers with the digits of nas/core/units.py, and times from now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

CASES = json.loads((Path(__file__).parents[1] / "data" / "numbers.json").read_text())


def test_scripts_show_numbers_as_the_server_does(page: Page, finished: str) -> None:
    page.goto(f"{finished}/study")
    texts = page.evaluate(
        """async (cases) => {
          const { showWithin } = await import("/assets/plotting.js");
          return cases.map(([value, low, high]) => showWithin(value, low ?? undefined, high ?? undefined));
        }""",
        CASES,
    )
    assert texts == [[number, ends] for _, _, _, number, ends in CASES]


@pytest.mark.parametrize("context", [{"timezone_id": "Asia/Tokyo", "locale": "en-GB"}], indirect=True)
def test_times_are_from_now_and_in_the_visitor_s_zone_on_hover(page: Page, finished: str) -> None:
    page.goto(f"{finished}/study")
    time = page.locator("time").first
    expect(time).to_have_text(re.compile(r"^\d+ (s|min|h|d) ago$"))
    expect(time).to_have_attribute("title", re.compile(r"GMT\+9|JST"))
    texts = page.evaluate(
        """async () => {
          const { fromNow } = await import("/assets/dashboard.js");
          return [5, 65, 3599, 7300, 100000, 200000, -70].map((seconds) => fromNow(0, 1000 * seconds));
        }"""
    )
    assert texts == ["5 s ago", "1 min ago", "59 min ago", "2 h ago", "27 h ago", "2 d ago", "in 1 min"]


def test_without_scripts_times_are_absolute(page: Page, finished: str) -> None:
    text = page.request.get(f"{finished}/study").text()
    assert re.search(r'<time datetime="[\dT:-]+Z" title="[\d: -]+ UTC">[\d: -]+ UTC</time>', text)
