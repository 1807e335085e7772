"""Takes pictures of the dashboard's pages for the documentation, and of all of them for whoever changes them.

    python scripts/take_screenshots.py DATABASE STUDY [STUDY ...] [--every FOLDER]

DATABASE is the file of a store, which is only read: a copy of it is served. Of every study the page and that of its
trials are taken; of the first one also its best candidate, a comparison of the three best, and its log; then the list
of studies, devices, the device that was seen last, a family in `$NAS_HOME` if there is one, the form that launches, the
login and a path that does not exist. Pages have 1280 and 390 pixels, light and dark. `--every` writes all of these to a
folder; without it those that the documentation shows are written to docs/img/dashboard. Needs Chromium and the package
`playwright`.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.server import Server, listen_tcp, web_app
from nas.serve.api.submissions import LaunchProcess, SubmittedStudies
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router

Scheme = Literal["light", "dark"]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img" / "dashboard"
DOC_PICTURES = {"study-1280-light", "study-390-light", "candidate-1280-light", "compare-1280-light"}
"""Pictures in the documentation."""
LOOPBACK, VISITOR = "127.0.0.1", "operator"
HEIGHTS = {1280: 800, 390: 844}
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
TALLEST = 2400
LARGEST_KB = 250
COLOURS = 256
PATIENCE_MS = 120_000


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path)
    parser.add_argument("study", nargs="+")
    parser.add_argument("--every", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("Chromium is not installed (Debian, Ubuntu: apt install chromium)")
    folder = arguments.every or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as copies,
        served(arguments.database, Path(copies)) as origin,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width, scheme in itertools.product(HEIGHTS, SCHEMES):
            take(browser, origin, arguments.study, width, scheme, folder, every=arguments.every is not None)


@contextmanager
def served(database: Path, folder: Path) -> Iterator[str]:
    """Serves the dashboard over a copy of the database to a user authenticated by a proxy; yields the URL."""
    copy = folder / "nas.db"
    with (
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    rules = AccessRules(secure=False, proxies=(ip_network(LOOPBACK),), proxy_roles={VISITOR: Role.OPERATE})
    with closing(Store.open(f"sqlite:///{copy}", artifacts=database.parent / "artifacts")) as store:
        app = web_app()
        app.include_router(
            dashboard_router(store, rules, SubmittedStudies(store, folder, LaunchProcess(store, folder)))
        )
        with closing(listen_tcp(LOOPBACK, 0)) as listening, Server(app, listening) as server:
            yield f"http://{LOOPBACK}:{server.port}"


def take(
    browser: Browser, origin: str, studies: list[str], width: int, scheme: Scheme, folder: Path, *, every: bool
) -> None:
    """All pages, or those of `DOC_PICTURES`, at one width in one colour scheme."""
    headers = {"X-Forwarded-User": VISITOR}
    page = browser.new_page(
        viewport={"width": width, "height": HEIGHTS[width]}, color_scheme=scheme, extra_http_headers=headers
    )
    page.set_default_timeout(PATIENCE_MS)
    for name, path in pages(page, origin, studies):
        file = folder / f"{name}-{width}-{scheme}.png"
        if every or file.stem in DOC_PICTURES:
            picture(page, origin + path, file)
    page.close()


def picture(page: Page, url: str, file: Path) -> None:
    """One page, compressed; no taller than `TALLEST`."""
    size = page.viewport_size
    assert size is not None
    page.goto(url, wait_until="networkidle")
    if page.locator("#panels:not([hidden])").count():
        page.locator("#panels[data-live=yes]").wait_for()
    if page.get_by_role("button", name="Check the space only").count():
        page.get_by_role("button", name="Check the space only").click()
        page.wait_for_load_state("networkidle")
    height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
    page.set_viewport_size({"width": size["width"], "height": height})
    with Image.open(BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    page.set_viewport_size(size)
    kilobytes = file.stat().st_size / 1000
    print(f"{file.name}: {kilobytes:.0f} kB")
    if kilobytes > LARGEST_KB:
        raise SystemExit(f"{file.name} is larger than {LARGEST_KB} kB")


def pages(page: Page, origin: str, studies: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the name of each picture, and the path of its page."""

    def json_of(path: str) -> Any:
        return page.request.get(f"{origin}{path}.json").json()

    for number, study in enumerate(studies):
        suffix = f"-{study}" if number else ""
        yield f"study{suffix}", f"/studies/{study}"
        yield f"trials{suffix}", f"/studies/{study}/trials"
    best = [row["trial"] for row in json_of(f"/studies/{studies[0]}")["ranked"] if row["on"]][:3]
    if best:
        yield "candidate", f"/studies/{studies[0]}/trials/{best[0]}"
    if len(best) > 1:
        yield "compare", f"/studies/{studies[0]}/compare?" + "&".join(f"trial={trial}" for trial in best)
    yield "log", f"/studies/{studies[0]}/log"
    yield "studies", "/studies"
    yield "devices", "/devices"
    for device in sorted(json_of("/devices")["devices"], key=lambda device: -device["last_seen"])[:1]:
        yield "device", f"/devices/{device['id']}"
    for family in json_of("/families")["families"][:1]:
        yield "family", f"/families/{family['name']}"
    yield "launch", f"/launch?like={studies[0]}"
    yield "login", "/login"
    yield "error", "/nosuch"


if __name__ == "__main__":
    main()
