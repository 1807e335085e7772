"""What axe-core finds on a page: https://dequeuniversity.com/rules/axe/ explains its rules."""

from __future__ import annotations

from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def findings(page: Page) -> list[str]:
    """A line for each element that breaks a rule of any severity: the rule, where, and what is wrong."""
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{rule['id']} ({rule['impact']}): {element['html'][:160]}: {element['failureSummary']}"
        for rule in violations
        for element in rule["nodes"]
    ]


def expect_accessible(page: Page) -> None:
    """No finding in either colour scheme."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        assert findings(page) == [], scheme


def expect_readable(page: Page, url: str, title: str) -> None:
    """The page opens under that heading, styled, without a finding in either colour scheme, and fits a phone."""
    page.goto(url, wait_until="networkidle")
    expect(page.get_by_role("heading", level=1)).to_contain_text(title)
    rules = page.evaluate("[...document.styleSheets].map((sheet) => sheet.cssRules.length)")
    assert rules and all(rules)
    expect_accessible(page)
    page.set_viewport_size({"width": 360, "height": 800})
    expect(page.locator("html")).to_have_js_property("scrollWidth", 360)
