"""Every route of the pages, asked for anything: never 5xx, and what is answered as HTML is sound and runs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from api_lab import space_text
from dashboard_lab import FORM_HEADERS, HOST, DashboardLab, Visitor, all_routes
from exhaustive import examples
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from release_lab import write_family
from test_dashboard_pages import Page

from nas.core import paths
from nas.infra.store import events
from nas.infra.store.rows import Role
from nas.serve.dashboard.pages import HEADERS

EXAMPLES = int(os.environ.get("HILNAS_FUZZ", examples(12)))
ROUTES = {f"{method} {route.path}": route for route in all_routes() for method in sorted(route.methods)}
VALUES = {"name": ["study", "mine"], "id": ["box"], "number": ["0", "1"], "trial": ["0", "1"], "space": ["lfm2-demo"],
          "size": ["4M", "12M"], "path": ["gguf/model q4_0.gguf"]}  # fmt: skip
"""Parameter -> values that exist."""
FIELDS = ["next", "reason", "study", "space", "trials", "warm_start", "file", "token"]

words = st.one_of(
    st.sampled_from([name for names in VALUES.values() for name in names]),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "\x00", "..", "a" * 3000, "1e999", "-0", "<script>alert(1)</script>", "\u202e", "null", "[]"]),
)
forms = st.dictionaries(st.sampled_from(FIELDS) | words, words | st.just(space_text()), max_size=6)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardLab]:
    """A little of everything."""
    lab = DashboardLab(tmp_path_factory.mktemp("fuzz"))
    study = lab.study()
    lab.complete(study, 1.0, 1.5, 1.5)
    lab.propose(study)
    write_family(paths.home(), "study")
    lab.submitted.submit("mine", space_text(), by="somebody")
    events.append(lab.store, study, {"what": "something that no page knows"})
    yield lab
    lab.process.end()


def values(name: str) -> st.SearchStrategy[str]:
    """Values of a parameter: mostly those that exist, sometimes anything."""
    choices = st.sampled_from(VALUES[name]) if name in VALUES else words
    return st.one_of(choices, choices, choices, words)


def path_of(route: APIRoute, draw: Any) -> str:
    """The path of a route, with values in place of its parameters."""
    path = route.path
    for field in route.dependant.path_params:
        place = f"{{{field.alias}:path}}" if f"{{{field.alias}:path}}" in path else f"{{{field.alias}}}"
        path = path.replace(place, quote(draw(values(field.alias)), safe=""))
    return path


def query_of(route: APIRoute, draw: Any) -> str:
    """A query of parameters that the route knows, and of others; some occur twice."""
    parameters = [field.alias for field in route.dependant.query_params]
    names = draw(st.lists(st.sampled_from([*parameters, "x"]) | words, max_size=4))
    return urlencode([(name, draw(values(name))) for name in names])


def check(answer: httpx.Response) -> None:
    """Checks what holds for every answer."""
    assert answer.status_code < 500, answer.text
    kind = answer.headers.get("Content-Type", "")
    if kind.startswith("text/html"):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "<script>alert" not in answer.text and "\u202e" not in answer.text.partition("<textarea")[0]
        if answer.text.startswith("<!doctype") and "Content-Disposition" not in answer.headers:
            Page(answer.text)
    elif answer.status_code >= 400:
        assert set(answer.json()) == {"error", "kind", "request_id"}


@pytest.mark.parametrize("label", ROUTES)
def test_whatever_is_asked_for(lab: DashboardLab, label: str) -> None:
    method, route = label.split()[0], ROUTES[label]
    visitor: Visitor = lab.visitor(Role.ADMIN)
    statuses = []

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def ask(data: Any) -> None:
        path = f"{path_of(route, data.draw)}?{query_of(route, data.draw)}"
        accept = data.draw(st.sampled_from(["text/html", "*/*", ""]))
        headers = FORM_HEADERS | {"Accept": accept}
        if method == "GET":
            answer = visitor.client.get(path, headers=headers)
        else:
            token = {"form_token": visitor.form_token} if data.draw(st.integers(0, 3)) else {}
            form = data.draw(forms) | token
            in_parts = {"files": {name: (None, value) for name, value in form.items()}}
            answer = visitor.client.post(
                path, headers=headers, **(in_parts if data.draw(st.booleans()) else {"data": form})
            )
        check(answer)
        statuses.append(answer.status_code)

    ask()
    assert statuses


@pytest.mark.parametrize("label", [label for label in ROUTES if label.startswith("POST")])
def test_bodies_that_are_no_forms(lab: DashboardLab, label: str) -> None:
    visitor = lab.visitor(Role.ADMIN)
    path = ROUTES[label].path.replace("{name}", "study").replace("{id}", "box")

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        body=st.binary(max_size=200) | st.binary(max_size=50).map(lambda inside: b"--x\r\n" + inside + b"\r\n--x--"),
        kind=st.sampled_from(
            [
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "text/plain",
                "",
                "application/json",
            ]
        ),
    )
    def ask(body: bytes, kind: str) -> None:
        answer = visitor.client.post(path, content=body, headers={"Origin": HOST, "Content-Type": kind})
        check(answer)
        assert answer.status_code in (303, 403, 413, 415, 422)

    ask()


def test_a_fault_would_be_found(lab: DashboardLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.serve.dashboard.devices_page.page_of_devices", None)
    with pytest.raises(AssertionError):
        test_whatever_is_asked_for(lab, "GET /devices")
