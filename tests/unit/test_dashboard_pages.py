"""The pages: what they show, as HTML and as JSON, and that nothing in them runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dashboard_lab import DashboardLab
from fastapi.testclient import TestClient
from live_lab import LiveLab
from starlette.requests import Request
from test_dashboard_access import HTML, OPEN, client

import nas.serve.dashboard
from nas.infra.store import studies
from nas.infra.store.rows import Role, StudyState
from nas.serve.dashboard.access import PageAccess
from nas.serve.views import study as studies_view

ASSETS = Path(nas.serve.dashboard.__file__).parent / "assets"
LOOPBACK = "http://127.0.0.1:8000"
NOTHING = "\N{EN DASH}"
HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7*7 }}"


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@pytest.fixture
def visitor(lab: LiveLab) -> TestClient:
    return client(lab, OPEN, LOOPBACK)


class Page(HTMLParser):
    """Text and links of a page; refuses what the security policy would."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert tag != "style" and "style" not in named, f"inline style in <{tag}>"
        assert not any(name.startswith("on") for name in named), f"inline script in <{tag}>"
        assert tag != "script" or named["src"], "inline script"
        for name in ("href", "src", "action"):
            assert (named.get(name) or "/").startswith(("/", "#")), f"{name} leads elsewhere"
        self.tags.append((tag, named))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def listed(visitor: TestClient, query: str = "") -> Any:
    answer = visitor.get(f"/studies.json{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_studies_it_says_how_one_begins(visitor: TestClient) -> None:
    assert "nas launch" in Page(visitor.get("/studies", headers=HTML).text).text
    assert listed(visitor) == {
        "studies": [], "next": None, "waiting": [], "wanted": {"space": "", "state": "", "text": ""}
    }  # fmt: skip


def test_a_study_is_listed_with_its_progress(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.5, 1.5)
    lab.complete(study, 1.2, 1.2, 1.2)
    lab.propose(study)
    (line,) = listed(visitor)["studies"]
    assert line["name"] == "study" and line["state"] == "running"
    assert (line["wanted"], line["proposed"], line["ended"], line["front"]) == (4, 3, 2, 1)
    assert [complete for complete, _ in line["course"]] == [1, 2]
    assert line["course"][-1][1] == line["hypervolume"] > 0
    assert line["device_seconds"] == 4.0
    page = Page(visitor.get("/studies", headers=HTML).text)
    assert "2/4" in page.text and f"{line['hypervolume']:.4g}" in page.text
    (bar,) = [attributes for tag, attributes in page.tags if tag == "progress"]
    assert (bar["value"], bar["max"]) == ("2", "4")
    (plot,) = [json.loads(str(named["data-plot"])) for _, named in page.tags if "data-plot" in named]
    assert len(plot["series"][0]["points"]) == 2


def test_the_bar_of_a_complete_study_is_full(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.5, 1.5)
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    for path in ("/studies", "/studies/study"):
        bars = [named for tag, named in Page(visitor.get(path, headers=HTML).text).tags if tag == "progress"]
        assert [(bar["value"], bar["max"]) for bar in bars] == [("1", "1")]


def test_without_a_reference_point_no_hypervolume_is_told(lab: LiveLab, visitor: TestClient) -> None:
    lab.study(judged=False)
    (line,) = listed(visitor)["studies"]
    assert line["hypervolume"] is None and line["course"] == []
    assert NOTHING in Page(visitor.get("/studies", headers=HTML).text).text


def test_the_list_comes_in_pages_newest_first(
    lab: LiveLab, visitor: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(studies_view, "PAGE", 2)
    for name in "abcde":
        lab.study(name)
    names: list[str] = []
    path = "/studies"
    while path:
        view = visitor.get(path.replace("/studies", "/studies.json")).json()
        names += [line["name"] for line in view["studies"]]
        tags = Page(visitor.get(path, headers=HTML).text).tags
        path = next((str(named["href"]) for tag, named in tags if named.get("rel") == "next"), "")
        assert (view["next"] is None) == (path == "")
    assert names == list("edcba")


def test_a_study_that_cannot_be_read_hides_no_other(lab: LiveLab, visitor: TestClient) -> None:
    lab.study()
    studies.create(lab.store, "older", {"name": "of another version"}, seed=0, version="0")
    older, readable = listed(visitor)["studies"]
    assert "cannot read its space" in older["problem"] and readable["problem"] is None
    assert older["problem"] in Page(visitor.get("/studies", headers=HTML).text).text
    assert visitor.get("/studies/older/points").status_code == 422


@pytest.mark.parametrize("path", ["/studies/%3Cscript%3Ealert(1)%3C%2Fscript%3E/points", "/assets/%3Cscript%3E",
                                  "/assets/..%2Fapp.py", "/studies?before=%3Cscript%3E", "/nosuch", "/launch",
                                  "/studies/a/b/c", "/%3Cscript%3E", "/v2/studies"])  # fmt: skip
def test_errors_are_pages_for_people_and_json_for_programs(visitor: TestClient, path: str) -> None:
    page = visitor.get(path, headers=HTML)
    assert page.status_code in (404, 422) and page.headers["Content-Type"].startswith("text/html")
    assert "<script>" not in page.text and Page(page.text).text
    answer = visitor.get(path)
    assert answer.status_code == page.status_code
    assert set(answer.json()) == {"error", "kind", "request_id"}


def test_an_unknown_path_is_a_page_for_strangers_too_but_not_under_the_api(tmp_path: Path) -> None:
    lab = DashboardLab(tmp_path)
    for visitor in (lab.stranger(), lab.visitor(Role.READ).client):
        answer = visitor.get("/nosuch", headers=HTML)
        assert answer.status_code == 404 and "There is no page /nosuch" in Page(answer.text).text
        assert visitor.get("/v1/nosuch", headers=HTML).headers["Content-Type"] == "application/json"
        assert visitor.get("/devices/", headers=HTML).headers["Location"].endswith("/devices")


def test_points_are_told_by_revision(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.5, 1.5)
    whole = visitor.get("/studies/study/points").json()
    assert whole["told"]["trial"] == [0] and [entry["trial"] for entry in whole["front"]] == [0]
    assert list(whole["told"]["values"]) == ["quality", "latency", "memory"]
    assert whole["course"]["counted"] == 1
    delta = visitor.get(f"/studies/study/points?since={whole['revision']}").json()
    assert delta["told"]["trial"] == [] and delta["course"] is None and delta["revision"] == whole["revision"]
    assert visitor.get("/studies/study/points?since=-1").status_code == 422


def test_files_are_sent_once(visitor: TestClient) -> None:
    first = visitor.get("/assets/dashboard.js")
    assert first.headers["Content-Type"] == "text/javascript; charset=utf-8"
    again = visitor.get("/assets/dashboard.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_nobody_is_asked_for_who_fetches_a_script(visitor: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(access: PageAccess, request: Request) -> None:
        raise AssertionError("a look-up in the database for each script")

    monkeypatch.setattr(PageAccess, "visitor", fail)
    assert visitor.get("/assets/dashboard.js").status_code == 200
    missing = visitor.get("/assets/none.js", headers=HTML)
    assert missing.status_code == 404 and "<h1>" in missing.text


@pytest.mark.parametrize("path", ["/assets/uplot.esm.js", "/studies", "/studies/study", "/studies/study.json"])
def test_pages_and_scripts_are_compressed_for_who_takes_it(lab: LiveLab, visitor: TestClient, path: str) -> None:
    lab.study()
    plain = visitor.get(path, headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    small = visitor.get(path, headers={"Accept-Encoding": "br, gzip"})
    assert small.headers["Content-Encoding"] == "gzip" and "Accept-Encoding" in small.headers["Vary"]
    assert small.num_bytes_downloaded < 0.6 * plain.num_bytes_downloaded
    if path.startswith("/assets"):
        assert small.content == plain.content


def test_a_page_can_be_asked_for_without_its_body(visitor: TestClient) -> None:
    for path in ("/login", "/studies", "/studies.json"):
        answer = visitor.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert visitor.head("/logout").status_code == 404


def test_our_own_scripts_stay_small_and_ask_nobody_else() -> None:
    vendored = {entry["file"] for entry in json.loads((ASSETS / "assets.lock").read_text())}
    scripts = [script.read_text() for script in ASSETS.glob("*.js") if script.name not in vendored]
    lines = [line.strip() for script in scripts for line in script.splitlines()]
    assert 0 < sum(1 for line in lines if line and not line.startswith("//")) < 815
    asking = r"https?:|\beval\b|\bFunction\(|(?:inner|outer)HTML\s*\+?=(?!=)|insertAdjacent|document\.write"
    assert not re.search(asking, "".join(scripts))
