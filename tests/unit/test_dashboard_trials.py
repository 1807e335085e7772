"""The list of all trials: filters, order, pages, and its JSON twin."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import LOOPBACK, Page
from test_dashboard_study import filled

from nas.views import trials


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """Trial 0 is a reference, 1 to 5 are the front, 6 breaks a budget, 7 is under way."""
    lab = LiveLab(tmp_path_factory.mktemp("trials"))
    filled(lab)
    return client(lab, OPEN, LOOPBACK)


def rows(visitor: TestClient, query: str = "") -> list[dict[str, Any]]:
    answer = visitor.get(f"/studies/study/trials.json?{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["rows"]
    return found


def numbers(visitor: TestClient, query: str = "") -> list[int]:
    return [row["trial"] for row in rows(visitor, query)]


def test_filters_and_order(visitor: TestClient) -> None:
    assert numbers(visitor) == [*range(8)]
    assert numbers(visitor, "state=front&sort=trial&order=down") == [5, 4, 3, 2, 1]
    assert numbers(visitor, "state=infeasible") == [6]
    latencies = [row["values"]["latency"] for row in rows(visitor, "sort=latency&order=down")]
    known = [value for value in latencies if value is not None]
    assert known == sorted(known, reverse=True) and latencies == known + [None] * (8 - len(known))
    limited = rows(visitor, f"axis=latency&low={known[2]}&high={known[1]}")
    assert {row["values"]["latency"] for row in limited} == {known[1], known[2]}
    assert numbers(visitor, "block=conv") == [*range(8)]
    assert numbers(visitor, "state=&block=&axis=&low=&high=&page=") == [*range(8)], "an empty form field is no filter"


def test_pages(visitor: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ROWS", 3)
    assert [numbers(visitor, f"page={page}") for page in (1, 2, 3, 9)] == [[0, 1, 2], [3, 4, 5], [6, 7], [6, 7]]
    answer = visitor.get("/studies/study/trials?page=2&sort=latency", headers=HTML)
    assert 'rel="prev"' in answer.text and 'rel="next"' in answer.text and "page 2 of 3" in answer.text


def test_the_page_shows_what_the_twin_has(visitor: TestClient) -> None:
    answer = visitor.get("/studies/study/trials?sort=latency&order=down&block=conv", headers=HTML)
    assert answer.status_code == 200
    page = Page(answer.text)
    shown = [named["data-trial"] for tag, named in page.tags if tag == "tr" and "data-trial" in named]
    assert shown == [str(number) for number in numbers(visitor, "sort=latency&order=down&block=conv")]
    sorted_by = [named for tag, named in page.tags if tag == "th" and "aria-sort" in named]
    assert [named["aria-sort"] for named in sorted_by] == ["descending"]
    assert "published" in page.text and "=HYPERLINK(1)" in page.text


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("state=lost", 404, "unknown state 'lost'"),
        ("block=conf", 404, "unknown kind of block 'conf'; did you mean 'conv'?"),
        ("axis=latencies", 404, "unknown axis 'latencies'"),
        ("sort=price", 404, "unknown column 'price'"),
        ("page=0", 422, "page"),
        ("axis=latency&low=nan", 422, "low"),
        ("order=sideways", 422, "order"),
    ],
)
def test_a_bad_query_is_named(visitor: TestClient, query: str, status: int, message: str) -> None:
    answer = visitor.get(f"/studies/study/trials.json?{query}")
    assert answer.status_code == status and message in answer.json()["error"], answer.text


def test_a_candidate_says_where_it_is(visitor: TestClient) -> None:
    best = rows(visitor, "state=front&sort=p_front&order=down")[0]["trial"]
    view = visitor.get(f"/studies/study/trials/{best}.json").json()["standing"]
    assert view["front"] == 5 and 1 <= view["place"] <= 5
    assert (view["previous"], view["next"]) == (best - 1, best + 1)
    assert len(view["neighbours"]) == trials.NEIGHBOURS and best not in [each["trial"] for each in view["neighbours"]]
    apart = [each["differs"] for each in view["neighbours"]]
    assert apart == sorted(apart)
    page = visitor.get(f"/studies/study/trials/{best}", headers=HTML).text
    assert f"Place {view['place']} of 5 on the front" in page and 'rel="prev"' in page and "Similar layouts" in page
    edges = [visitor.get(f"/studies/study/trials/{trial}.json").json()["standing"] for trial in (0, 7)]
    assert edges[0]["previous"] is None and edges[0]["place"] is None and edges[1]["next"] is None
