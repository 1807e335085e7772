"""Takes pictures of the dashboard's pages, light and dark, for the documentation.

    python scripts/take_screenshots.py DATABASE STUDY

DATABASE is the file of a finished study's store, which is only read: a copy of it is served. The pages are that of all
studies, the study's, that of the best candidate of its front, a comparison of the three best, the devices and the form
that launches. Needs Chromium and the package `playwright`.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from nas.dashboard.here import dashboard_here
from nas.store.store import Store

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img" / "dashboard"
SIZE = {"width": 1280, "height": 800}
TALLEST = 2400
LARGEST_KB = 200
PATIENCE_MS = 120_000


def main() -> None:
    """Takes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path)
    parser.add_argument("study")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("Chromium is not installed (Debian, Ubuntu: apt install chromium)")
    with TemporaryDirectory() as folder:
        copy = Path(folder, "nas.db")
        with closing(sqlite3.connect(f"file:{given.database}?mode=ro", uri=True)) as source, closing(
            sqlite3.connect(copy)
        ) as target:
            source.backup(target)
        with (
            closing(Store.open(f"sqlite:///{copy}", artifacts=given.database.parent / "artifacts")) as store,
            dashboard_here(store) as url,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                take(browser, url, given.study, scheme)


def take(browser: Browser, url: str, study: str, scheme: str) -> None:
    """All pages in one colour scheme."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE_MS)
    best = [row["trial"] for row in page.request.get(f"{url}/{study}.json").json()["ranked"] if row["on"]][:3]
    for name, path in pages(study, best):
        page.goto(url.removesuffix("/studies") + path, wait_until="networkidle")
        if name == "study":
            page.locator("#panels[data-live=yes]").wait_for()
        height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": SIZE["width"], "height": height})
        file = FOLDER / f"{name}-{scheme}.png"
        page.screenshot(path=file)
        page.set_viewport_size(SIZE)
        kilobytes = file.stat().st_size / 1000
        print(f"{file.name}: {kilobytes:.0f} kB")
        if kilobytes > LARGEST_KB:
            raise SystemExit(f"{file.name} is larger than {LARGEST_KB} kB")
    page.close()


def pages(study: str, best: list[int]) -> Iterator[tuple[str, str]]:
    """What a picture is called, and the path of its page."""
    yield "studies", "/studies"
    yield "study", f"/studies/{study}"
    if best:
        yield "candidate", f"/studies/{study}/trials/{best[0]}"
    if len(best) > 1:
        yield "compare", f"/studies/{study}/compare?" + "&".join(f"trial={trial}" for trial in best)
    yield "devices", "/devices"
    yield "launch", "/studies/launch"


if __name__ == "__main__":
    main()
