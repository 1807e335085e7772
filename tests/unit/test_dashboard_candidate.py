"""The pages of a candidate and of a comparison, and their JSON twins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from study_support import Bed, bed_of, snapshot

import nas.serve.dashboard
from nas.core.trial import TrialState
from nas.infra.store import trials
from nas.infra.web.server import web_app
from nas.serve.dashboard.access import LOOPBACK_HOSTS, AccessRules
from nas.serve.dashboard.app import dashboard_router
from nas.serve.dashboard.pages import _templates
from nas.serve.views.candidate import candidate_views, comparison_view

DASHBOARD = Path(nas.serve.dashboard.__file__).parent
HOSTILE = "<script>alert(1)</script>\"'"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and keeps elements, attributes and text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("candidate")
    bed = bed_of(folder)
    bed.run(4)
    return bed


@pytest.fixture(scope="module")
def client(bed: Bed) -> Iterator[TestClient]:
    app = web_app()
    app.router.routes += dashboard_router(bed.store, AccessRules(open_hosts=LOOPBACK_HOSTS, secure=False)).routes
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


def page(client: TestClient, path: str) -> Page:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return Page(answer.text)


def harmless(document: Page) -> None:
    """Nothing runs, styles itself, or is fetched from elsewhere."""
    assert {"style", "iframe", "object", "embed"}.isdisjoint(document.tags)
    scripts = [value for value in document.values("src") if value.endswith(".js")]
    assert document.tags.count("script") == len(scripts)
    for _, name, value in document.attributes:
        assert name != "style" and not name.startswith("on")
        if name in ("href", "src", "data-load"):
            assert value.startswith(("#", "/studies", "/devices", "/families", "/assets/"))


def test_every_trial_has_a_page(client: TestClient, bed: Bed) -> None:
    for row in trials.all(bed.store, 1):
        document = page(client, f"/studies/study/trials/{row.number}")
        harmless(document)
        assert row.status.state in document.text
        ids = document.values("id")
        assert len(ids) == len(set(ids))
        assert set(document.values("aria-labelledby")) | set(document.values("data-copy")) <= set(ids)


def test_a_complete_trial_s_page_shows_what_its_json_tells(client: TestClient, bed: Bed) -> None:
    (view,) = candidate_views(bed.store, snapshot(bed.store), [0])
    assert view.state == TrialState.COMPLETE
    document = page(client, "/studies/study/trials/0")
    assert view.layout.text in document.text
    assert "picture picture-strip" in document.values("class")
    axes = [(plot["x"]["label"], plot["y"]["label"]) for plot in map(json.loads, document.values("data-plot"))]
    assert axes == [("token", "ms per token"), ("ms per token", "samples")]
    assert "no training yet" in document.text
    assert view.commands and view.artifacts
    for command in view.commands:
        assert command.command in document.text
    for artifact in view.artifacts:
        assert artifact.sha256 in document.values("title")
    assert client.get("/studies/study/trials/0.json").json() == view.model_dump(mode="json")


def test_a_comparison_shows_what_its_json_tells(client: TestClient, bed: Bed) -> None:
    document = page(client, "/studies/study/compare?trial=1&trial=0&trial=2")
    harmless(document)
    classes = document.values("class")
    assert sum("picture-strip" in value for value in classes) == 3
    assert any("share of samples" in value for value in document.values("data-plot"))
    view = client.get("/studies/study/compare.json?trial=1&trial=0&trial=2").json()
    assert view == comparison_view(bed.store, snapshot(bed.store), [1, 0, 2]).model_dump(mode="json")
    assert "/studies/study/compare.json?trial=1&trial=0&trial=2" in document.values("href")


def test_forecasts_are_a_part_of_a_page(client: TestClient) -> None:
    document = page(client, "/studies/study/trials/2/forecasts")
    harmless(document)
    view = client.get("/studies/study/trials/2/forecasts.json").json()
    assert document.tags.count("tr") == 1 + len(view["forecasts"])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/studies/nobody/trials/0", 404), ("/studies/study/trials/999", 404), ("/studies/study/trials/999.json", 404),
        ("/studies/study/trials/-1", 422), ("/studies/study/trials/x.json", 422),
        ("/studies/study/trials/99999999999999999999", 422), ("/studies/study/trials/" + "9" * 5000, 422),
        ("/studies/%3Cb%3E/trials/0", 422), ("/studies/study/compare", 422), ("/studies/study/compare?trial=0", 422),
        ("/studies/study/compare?trial=0&trial=0", 422),
        ("/studies/study/compare?trial=0&trial=study/0", 422), ("/studies/study/compare?trial=0&trial=nobody/0", 404),
        ("/studies/study/compare?trial=0&trial=../0", 422), ("/studies/study/compare.json?trial=0&trial=77", 404),
        ("/studies/study/compare?" + "&".join(f"trial={n}" for n in range(7)), 422),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(client: TestClient, path: str, status: int) -> None:
    assert client.get(path).status_code == status


def test_strangers_see_nothing(bed: Bed) -> None:
    app = web_app()
    app.router.routes += dashboard_router(bed.store, AccessRules(open_hosts=frozenset(), secure=False)).routes
    client = TestClient(app, base_url="http://127.0.0.1")
    for path in ("trials/0", "trials/0/forecasts", "compare"):
        for twin in (path, f"{path}.json"):
            assert client.get(f"/studies/study/{twin}", params={"trial": [0, 1]}).status_code == 401


@pytest.mark.parametrize("template", ["candidate.html", "compare.html"])
def test_stored_text_is_never_markup(bed: Bed, template: str) -> None:
    comparison = comparison_view(bed.store, snapshot(bed.store), [0, 1])
    first = comparison.candidates[0]
    place = first.measurements[0].model_copy(update={"device_id": HOSTILE, "build": HOSTILE})
    hostile = first.model_copy(
        update={"name": HOSTILE, "reason": HOSTILE, "operator": HOSTILE, "note": HOSTILE, "measurements": (place,)}
    )
    view = hostile if template == "candidate.html" else comparison.model_copy(update={"candidates": (hostile, hostile)})
    document = Page(_templates.get_template(template).render(view=view, visitor=None, path="/", most=6))
    harmless(document)
    assert HOSTILE.lower() in document.text.lower()


def test_names_keep_their_capitals(bed: Bed) -> None:
    comparison = comparison_view(bed.store, snapshot(bed.store), [0, 1])
    first = comparison.candidates[0]
    command = first.commands[0].model_copy(update={"what": "measure on Pixel B"})
    named = first.model_copy(update={"name": "one of Lab A", "commands": (command,)})
    pages = {
        template: Page(_templates.get_template(template).render(view=view, visitor=None, path="/", most=6)).text
        for template, view in (
            ("candidate.html", named),
            ("compare.html", comparison.model_copy(update={"candidates": (named, named)})),
        )
    }
    assert all("One of Lab A" in text for text in pages.values())
    assert "Measure on Pixel B" in pages["candidate.html"]


def test_every_class_of_the_pictures_that_takes_a_colour_has_one() -> None:
    styles = (DASHBOARD / "assets" / "plots.css").read_text()
    for number in range(15):
        assert f".hue-{number} " in styles
    assert not re.search(r"@import|url\(", styles)
