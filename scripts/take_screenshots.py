"""Takes pictures of the dashboard's pages, light and dark, for the documentation.

    python scripts/take_screenshots.py DATABASE STUDY

DATABASE is the file of a finished study's store, which is only read: a copy of it is served. The pages are that of all
studies, the study's, that of its trials, that of the best candidate of its front, a comparison of the three best, the
devices, the one that was seen last, a family in `$NAS_HOME` if there is one, and the form that launches. Needs Chromium
and the package `playwright`.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

from nas.api.submissions import LaunchProcess, SubmittedStudies
from nas.dashboard.access import AccessRules
from nas.dashboard.app import dashboard_router
from nas.store.rows import Role
from nas.store.store import Store
from nas.web.server import Server, listen_tcp, web_app

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img" / "dashboard"
LOOPBACK, VISITOR = "127.0.0.1", "operator"
SIZE: ViewportSize = {"width": 1280, "height": 800}
TALLEST = 2400
LARGEST_KB = 200
COLOURS = 256
PATIENCE_MS = 120_000


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path)
    parser.add_argument("study")
    given = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("Chromium is not installed (Debian, Ubuntu: apt install chromium)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as folder,
        served(given.database, Path(folder)) as origin,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            take(browser, origin, given.study, scheme)


@contextmanager
def served(database: Path, folder: Path) -> Iterator[str]:
    """The origin of a coordinator's pages over a copy of the database, for who is named as a proxy would."""
    copy = folder / "nas.db"
    with (
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    rules = AccessRules(secure=False, proxies=frozenset({LOOPBACK}), proxy_roles={VISITOR: Role.OPERATE})
    with closing(Store.open(f"sqlite:///{copy}", artifacts=database.parent / "artifacts")) as store:
        app = web_app()
        app.include_router(
            dashboard_router(store, rules, SubmittedStudies(store, folder, LaunchProcess(store, folder)))
        )
        with closing(listen_tcp(LOOPBACK, 0)) as listening, Server(app, listening) as server:
            yield f"http://{LOOPBACK}:{server.port}"


def take(browser: Browser, origin: str, study: str, scheme: Literal["light", "dark"]) -> None:
    """All pages in one colour scheme."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme, extra_http_headers={"X-Forwarded-User": VISITOR})
    page.set_default_timeout(PATIENCE_MS)
    told = [page.request.get(f"{origin}{path}.json").json() for path in (f"/studies/{study}", "/devices", "/families")]
    best = [row["trial"] for row in told[0]["ranked"] if row["on"]][:3]
    devices = sorted(told[1]["devices"], key=lambda device: device["last_seen"], reverse=True)
    for name, path in pages(
        study, best, [device["id"] for device in devices], [family["name"] for family in told[2]["families"]]
    ):
        page.goto(origin + path, wait_until="networkidle")
        if name == "study":
            page.locator("#panels[data-live=yes]").wait_for()
        if name == "launch":
            page.get_by_role("button", name="Check the space only").click()
            page.wait_for_load_state("networkidle")
        height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": SIZE["width"], "height": height})
        file = FOLDER / f"{name}-{scheme}.png"
        with Image.open(BytesIO(page.screenshot())) as picture:
            picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
        page.set_viewport_size(SIZE)
        kilobytes = file.stat().st_size / 1000
        print(f"{file.name}: {kilobytes:.0f} kB")
        if kilobytes > LARGEST_KB:
            raise SystemExit(f"{file.name} is larger than {LARGEST_KB} kB")
    page.close()


def pages(study: str, best: list[int], devices: list[str], families: list[str]) -> Iterator[tuple[str, str]]:
    """What a picture is called, and the path of its page."""
    yield "studies", "/studies"
    yield "study", f"/studies/{study}"
    yield "trials", f"/studies/{study}/trials"
    if best:
        yield "candidate", f"/studies/{study}/trials/{best[0]}"
    if len(best) > 1:
        yield "compare", f"/studies/{study}/compare?" + "&".join(f"trial={trial}" for trial in best)
    yield "devices", "/devices"
    if devices:
        yield "device", f"/devices/{devices[0]}"
    if families:
        yield "family", f"/families/{families[0]}"
    yield "launch", f"/launch?like={study}"


if __name__ == "__main__":
    main()
