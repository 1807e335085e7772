"""What tests do on the page of a study, and what they read there."""

from __future__ import annotations

import math
import re
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, expect

PATIENCE_S = 60
# The module that the page has loaded: its state without a global name.
_STATE = "(async () => { const { page } = await import('/assets/study.js'); return (%s); })()"


def show(page: Page, url: str) -> None:
    """Opens the page of a study, and waits until it is kept up."""
    page.goto(url)
    expect(page.locator("#panels")).to_have_attribute("data-live", "yes")


def state(page: Page, expression: str) -> Any:
    """What an expression over `page`, the script's own state, is."""
    return page.evaluate(_STATE % expression)


def until(page: Page, expression: str) -> None:
    """Waits until something is so in the script's own state; the policy forbids the page to evaluate text itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not state(page, expression):
        assert time.monotonic() < deadline, f"it never came to {expression}"
        page.wait_for_timeout(50)


def query(page: Page) -> dict[str, str]:
    """What the address says."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def corner(page: Page, panel: int, across: float, up: float) -> tuple[float, float]:
    """A place in a panel's plotting area, as shares of its width and height from the lower left, on the screen."""
    page.locator(f".panel[data-panel='{panel}']").scroll_into_view_if_needed()
    box = state(page, f"page.panels[{panel - 1}].plot.over.getBoundingClientRect().toJSON()")
    return box["x"] + across * box["width"], box["y"] + (1 - up) * box["height"]


def drag(page: Page, *places: tuple[float, float]) -> None:
    """Presses at the first place, moves over the others, and lets go at the last."""
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
    page.mouse.up()


def brush(page: Page, panel: int, low: tuple[float, float], high: tuple[float, float]) -> None:
    """Draws a box in a panel."""
    drag(page, corner(page, panel, *low), corner(page, panel, *high))


def where(page: Page, panel: int, trial: int) -> tuple[float, float]:
    """Where a panel shows a trial, on the screen."""
    corner(page, panel, 0, 0)
    x, y = state(
        page,
        f"""(() => {{
      const panel = page.panels[{panel - 1}], {{ left, top }} = panel.plot.over.getBoundingClientRect();
      const at = (side) => panel.plot.valToPos(page.data.values[panel.keys[side]][{trial}], side);
      return [left + at("x"), top + at("y")];
    }})()""",
    )
    return x, y


def picked(page: Page) -> int:
    """Returns the number of selected trials that the page shows."""
    selected = page.locator("#picked")
    expect(selected).to_have_text(re.compile(r"\d+ of \d+ trials selected"))
    return int((selected.text_content() or "").split()[0])


def ranges(page: Page) -> dict[str, tuple[float, float]]:
    """The brushed ranges that the address names."""
    parts = [part.split(":") for part in query(page).get("pick", "").split(",") if part]
    return {key: (float(low), float(high)) for key, low, high in parts}


def within(page: Page, points: str) -> int:
    """How many trials are within the address' ranges, by what the server at `points` tells; infeasible ones are not."""
    columns = page.request.get(f"{points}?axes={','.join(ranges(page))}").json()["told"]
    rows = zip(*(columns["values"][key] for key in ranges(page)), strict=True)
    return sum(
        feasible != 0
        and all(
            low <= (math.nan if value is None else value) <= high
            for value, (low, high) in zip(row, ranges(page).values(), strict=True)
        )
        for row, feasible in zip(rows, columns["feasible"], strict=True)
    )
