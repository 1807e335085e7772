"""What axe-core finds on a page: https://dequeuniversity.com/rules/axe/ explains its rules."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

GRAVE = ("serious", "critical")


def grave_findings(page: Page) -> list[str]:
    """A line for each element that somebody cannot read or use: the rule, where, and what is wrong."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{rule['id']} ({rule['impact']}): {element['html'][:160]}: {element['failureSummary']}"
        for rule in found
        if rule["impact"] in GRAVE
        for element in rule["nodes"]
    ]
