"""Real Chromium on real pages: what the tests in this folder share.

Every page fails its test for a message on the console, an error, a violation of the security policy, or a request to
another host, whatever else the test looks at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from live_lab import LiveLab
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from study_support import Bed, tiny_space

from nas.core.trial import EventKind
from nas.infra.store import studies, trials
from nas.infra.store.rows import StudyState
from nas.serve.dashboard.local_server import dashboard_here
from nas.testing.fake_runtime import FakeRuntime

PATIENCE_MS = 60_000
"""The machine may be busy: nothing that works takes this long."""
TWO_RUNTIMES = {"runtimes": [{"name": "fake", "quantisation": "q4_0"}, {"name": "other", "quantisation": "q4_0"}]}

_FLAGS = ("--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-dev-shm-usage")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) => {
  console.error(`policy: ${violatedDirective} ${blockedURI}`);
});
"""


@dataclass
class Watched:
    """What a page must not do, as it was seen; `expected`: parts of messages that its test brings about itself."""

    origin: str
    messages: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Notes what a page does from now on."""
        page.on(
            "console",
            lambda message: self.note(message.type, message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.note("error", str(error)))
        page.on("request", lambda request: self.ask(request.url))

    def note(self, kind: str, text: str) -> None:
        self.messages.append(f"{kind}: {text}")

    def ask(self, url: str) -> None:
        if urlsplit(url).scheme not in ("blob", "data") and not url.startswith(f"{self.origin}/"):
            self.note("request", url)

    @property
    def faults(self) -> list[str]:
        """What no test brought about."""
        return [message for message in self.messages if not any(part in message for part in self.expected)]


@pytest.fixture(scope="session")
def browser(finished: str) -> Iterator[Browser]:
    """One headless Chromium. It comes after the study that runs: its driver keeps this thread's event loop."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    assert path, "these tests need Chromium (Debian, Ubuntu: apt install chromium)"
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=flags, timeout=PATIENCE_MS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the pages of two finished studies: `study`, run with a fake runtime, and `wide`, with given figures."""
    folder = tmp_path_factory.mktemp("finished")
    lab = LiveLab(folder)
    Bed(lab.store, folder, tiny_space(), FakeRuntime(folder / "fake")).run(4)  # type: ignore[arg-type]
    wide = lab.study("wide", **TWO_RUNTIMES)
    fill(lab, wide)
    for trial in range(42):
        lab.measure(wide, trial, 1 + 0.01 * trial, 1.0, runtime="other")
    for name in ("study", "wide"):
        studies.set_state(lab.store, studies.find_id(lab.store, name), StudyState.COMPLETE)
    with dashboard_here(lab.store) as url:
        yield url


def fill(lab: LiveLab, study: int) -> None:
    """A reference, forty complete trials of which some are on the front, and one that breaks a budget."""
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    for i in range(40):
        lab.complete(study, 0.8 + 0.02 * (i * 7 % 20), 0.7 + 0.02 * (i * 11 % 40), 1.4 - 0.01 * (i * 3 % 50))
    broken = lab.propose(study)
    lab.measure(study, broken, 1.0, 2.6)
    lab.note_quality(study, broken, 1.0)
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, EventKind.INFEASIBLE):
        trials.add_event(lab.store, study, broken, kind, {"reason": "peak_rss over its budget"})


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    """A store of this test, with the study `study` under way."""
    lab = LiveLab(tmp_path)
    fill(lab, lab.study())
    return lab


@pytest.fixture
def live(lab: LiveLab) -> Iterator[str]:
    """URL of the pages of that store."""
    with dashboard_here(lab.store) as url:
        yield url


@pytest.fixture
def context(browser: Browser, request: pytest.FixtureRequest) -> Iterator[BrowserContext]:
    """A browser without memory; `request.param`: its options."""
    options: dict[str, Any] = getattr(request, "param", {"viewport": {"width": 1300, "height": 1000}})
    opened = browser.new_context(**options)
    opened.set_default_timeout(PATIENCE_MS)
    opened.add_init_script(_REPORT_VIOLATIONS)
    yield opened
    opened.close()


@pytest.fixture
def watched(context: BrowserContext) -> Iterator[Watched]:
    """Judges all pages of the browser when the test is over."""
    monitor = Watched("")
    context.on("page", monitor.watch)
    yield monitor
    assert monitor.faults == []


@pytest.fixture
def page(context: BrowserContext, watched: Watched, finished: str) -> Page:
    """A page at the finished studies' server."""
    watched.origin = finished.removesuffix("/studies")
    return context.new_page()


@pytest.fixture
def live_page(context: BrowserContext, watched: Watched, live: str) -> Page:
    """A page at the server of the study that is under way."""
    watched.origin = live.removesuffix("/studies")
    return context.new_page()
