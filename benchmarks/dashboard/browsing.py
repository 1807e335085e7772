"""Measures how a browser shows a study of many trials: headless Chromium on this machine, without a graphics card.

Chromium and the server share the machine's cores, as they do with `nas launch --open`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.dashboard.candidates import Judge
from benchmarks.dashboard.made import LIVE, copied, generated
from benchmarks.dashboard.maker import Orchestrator
from benchmarks.dashboard.server import Served, served
from benchmarks.dashboard.viewers import Client, percentiles_ms
from nas.infra.store import studies
from nas.infra.store.store import Store

_PATIENCE_MS = 300_000
_SIZE = {"width": 1300, "height": 1000}
_FRAMES = 60

# The module's evaluation ends when all panels are laid out and drawn; two frames later they are on the screen.
_INTERACTIVE = """async () => {
  await import("/assets/study.js");
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const painted = performance.getEntriesByName("first-contentful-paint")[0];
  return {painted: painted ? painted.startTime : null, interactive: performance.now()};
}"""

# One step of a pan, or of a zoom, in each frame, by the keys that do it.
_FRAME_TIMES = """async ([frames, keys]) => {
  const box = document.querySelector(".panel .plot");
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const times = [];
  let before = await frame();
  for (let i = 0; i < frames; i++) {
    box.dispatchEvent(new KeyboardEvent("keydown", {key: keys[i % keys.length], bubbles: true}));
    const now = await frame();
    times.push((now - before) / 1000);
    before = now;
  }
  return times;
}"""

# What the page does every few seconds without a user, until it is on the screen.
_UPDATE = """async () => {
  const {page} = await import("/assets/study.js");
  const began = performance.now();
  const news = await page.data.update(page.choice.keys);
  if (news) page.show();
  const drawn = performance.now();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return {news, drawn: (drawn - began) / 1000, shown: (performance.now() - began) / 1000};
}"""


def measure(home: Path, trials: int, small: int, again: int) -> dict[str, Any]:
    """Runs once and returns the report."""
    file = generated(home, trials, small)
    with tempfile.TemporaryDirectory(prefix="hilnas-dashboard-", dir=home) as folder:
        url = copied(file, Path(folder))
        store = Store.open(url, artifacts=Path(folder) / "artifacts")
        orchestrator = Orchestrator(store, studies.find_id(store, LIVE), Judge())
        with served(url, Path(folder)) as server, sync_playwright() as playwright:
            Client(server.port).get(f"/studies/{LIVE}.json")  # reads the study
            browser = playwright.chromium.launch(executable_path=_chromium(), args=_flags(), timeout=_PATIENCE_MS)
            report = _measured(browser, server, orchestrator, again)
            browser.close()
        store.close()
    return {"trials": trials, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)} | report


def _measured(browser: Browser, server: Served, orchestrator: Orchestrator, again: int) -> dict[str, Any]:
    opened = [_opened(browser, server) for _ in range(again)]
    page = _page(browser, server)
    page.evaluate(_INTERACTIVE)
    updates = []
    for _ in range(again):
        orchestrator.add()
        updates.append(page.evaluate(_UPDATE))
    assert any(update["news"] for update in updates)
    return {
        "chromium": browser.version,
        "first_paint_ms": round(statistics.median(opening["painted"] for opening in opened)),
        "interactive_ms": round(statistics.median(opening["interactive"] for opening in opened)),
        "interactive_worst_ms": round(max(opening["interactive"] for opening in opened)),
        "pan_frame_ms": percentiles_ms(page.evaluate(_FRAME_TIMES, [_FRAMES, ["ArrowRight", "ArrowLeft"]])),
        "zoom_frame_ms": percentiles_ms(page.evaluate(_FRAME_TIMES, [_FRAMES, ["+", "-"]])),
        "update_drawn_ms": percentiles_ms([update["drawn"] for update in updates]),
        "update_shown_ms": percentiles_ms([update["shown"] for update in updates]),
        "heap_mb": round(page.evaluate("performance.memory.usedJSHeapSize") / 1e6),
    }


def _opened(browser: Browser, server: Served) -> dict[str, float]:
    """Opens the page in a new context, without a cache."""
    page = _page(browser, server)
    timing: dict[str, float] = page.evaluate(_INTERACTIVE)
    page.context.close()
    return timing


def _page(browser: Browser, server: Served) -> Page:
    context = browser.new_context(viewport=_SIZE)  # type: ignore[arg-type]
    context.set_default_timeout(_PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{server.address}/studies/{LIVE}", wait_until="commit")
    page.wait_for_selector("#panels")
    return page


def _chromium() -> str:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium, "this needs Chromium (Debian, Ubuntu: apt install chromium)"
    return chromium


def _flags() -> list[str]:
    return ["--disable-dev-shm-usage", "--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
