"""The page of all trials of a study: filters, order, pages; and what the page of a candidate says of its neighbours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab
from study_support import tiny_space
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import LOOPBACK, Page
from test_dashboard_study import TWO, filled

from nas.serve.views.trials import ROWS


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@pytest.fixture
def visitor(lab: LiveLab) -> TestClient:
    return client(lab, OPEN, LOOPBACK)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """Looks at a study that stays as it is."""
    lab = LiveLab(tmp_path_factory.mktemp("still"))
    filled(lab)
    return client(lab, OPEN, LOOPBACK)


def listed(visitor: TestClient, **query: object) -> Any:
    answer = visitor.get("/studies/study/trials.json", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(visitor: TestClient, **query: object) -> list[int]:
    return [row["trial"] for row in listed(visitor, **query)["rows"]]


def test_the_front_comes_first_and_trials_without_a_place_last(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    view = listed(visitor)
    ranked = [row["trial"] for row in visitor.get("/studies/study.json").json()["ranked"]]
    assert view["trials"] == view["matching"] == 8
    assert [row["trial"] for row in view["rows"]][: len(ranked)] == ranked
    assert [row["place"] for row in view["rows"] if row["place"]] == [1, 2, 3, 4, 5]
    assert [row["trial"] for row in view["rows"]][len(ranked) :] == [0, 6, 7]
    page = Page(visitor.get("/studies/study/trials", headers=HTML).text)
    links = [named["href"] for tag, named in page.tags if tag == "a"]
    assert [link for link in links if link and "/trials/" in link] == [
        f"/studies/study/trials/{row['trial']}" for row in view["rows"]
    ]
    assert "published reference" in page.text and "All 8 trials" in page.text


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"state": "infeasible"}, [6]),
        ({"state": "proposed"}, [7]),
        ({"sort": "-trial"}, [7, 6, 5, 4, 3, 2, 1, 0]),
        ({"sort": "latency"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"sort": "-latency"}, [6, 5, 4, 3, 2, 0, 1, 7]),
        ({"axis": "latency", "low": 0.55, "high": 0.75, "sort": "trial"}, [2, 3]),
        ({"axis": "latency", "high": 0.65, "state": "complete", "sort": "trial"}, [0, 1, 2]),
        ({"axis": "latency", "sort": "trial"}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_trials_are_filtered_and_sorted(reader: TestClient, query: dict[str, object], expected: list[int]) -> None:
    assert numbers(reader, **query) == expected


def test_trials_are_filtered_by_block_and_by_device(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study(**TWO)
    for step in range(3):
        lab.complete(study, 1.0, 1.0 + step, 1.0)
    lab.measure(study, 1, 2.0, 1.0, runtime="other")
    view = listed(visitor)
    assert view["places"] == ["local/fake", "local/other"]
    other = listed(visitor, place="local/other")
    assert [row["trial"] for row in other["rows"]] == [1]
    assert {axis["place"] for axis in other["columns"] if not axis["objective"]} == {None, "local/other"}
    assert view["blocks"]
    for block in view["blocks"]:
        matches = [row for row in view["rows"] if row["trial"] in numbers(visitor, block=block)]
        assert matches
    assert numbers(visitor, block="moe") == []
    empty = Page(visitor.get("/studies/study/trials?block=moe", headers=HTML).text)
    assert "No trial matches" in empty.text


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("state=done", 404, "state"),
        ("block=nosuch", 404, "block"),
        ("place=nosuch", 404, "place"),
        ("sort=nosuch", 404, "axis"),
        ("axis=latency&low=fast", 422, "number"),
        ("axis=latency&low=nan", 422, "number"),
        ("low=1", 422, "figure"),
        ("start=-1", 422, "row"),
    ],
)
def test_mistakes_in_the_address_are_named(reader: TestClient, query: str, status: int, message: str) -> None:
    answer = reader.get(f"/studies/study/trials.json?{query}")
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text


def test_three_hundred_trials_come_a_page_at_a_time_and_fast(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    lab.multiply(study, 3, 300)
    first = listed(visitor, sort="trial")
    assert (first["matching"], len(first["rows"]), first["previous"], first["next"]) == (308, ROWS, None, ROWS)
    last = listed(visitor, sort="trial", start=10_000)
    assert (last["query"]["start"], len(last["rows"]), last["next"]) == (300, 8, None)
    trials = [number for start in range(0, 308, ROWS) for number in numbers(visitor, sort="trial", start=start)]
    assert trials == list(range(308))
    page = Page(visitor.get("/studies/study/trials?sort=-latency&state=complete", headers=HTML).text)
    (following,) = [named["href"] for tag, named in page.tags if named.get("rel") == "next"]
    assert following == f"/studies/study/trials?state=complete&sort=-latency&start={ROWS}"
    began = time.process_time()
    visitor.get("/studies/study/trials?sort=latency", headers=HTML)
    assert time.process_time() - began < 1.0


def test_the_page_of_three_hundred_trials_is_light(lab: LiveLab, visitor: TestClient) -> None:
    lab.multiply(filled(lab), 3, 300)
    page = visitor.get("/studies/study", headers=HTML)
    document = Page(page.text)
    paths = {named.get("src") or named.get("href") for tag, named in document.tags if tag in ("script", "link")}
    paths |= {f"/assets/{name}" for name in ("dashboard.js", "panel.js", "parallel.js", "plots.js", "choice.js")}
    paths |= {"/assets/study-data.js", "/assets/gestures.js", "/assets/plotting.js", "/assets/uplot.esm.js"}
    (points,) = [named["data-points"] for _, named in document.tags if "data-points" in named]
    sent = [page, *(visitor.get(path) for path in sorted({*filter(None, paths), points}))]
    assert all(answer.status_code == 200 for answer in sent)
    assert sum(answer.num_bytes_downloaded for answer in sent) <= 150_000


def test_a_candidate_says_its_place_its_neighbours_and_what_is_before_and_after_it(
    lab: LiveLab, visitor: TestClient
) -> None:
    filled(lab)
    rows = {row["trial"]: row for row in listed(visitor)["rows"]}
    first, best, last = (visitor.get(f"/studies/study/trials/{number}.json").json() for number in (0, 3, 7))
    assert [candidate["standing"] for candidate in (first, last)] == [None, None]
    assert (best["standing"]["place"], best["standing"]["p_front"]) == (rows[3]["place"], rows[3]["p_front"])
    assert (first["previous"], first["next"], best["previous"], best["next"], last["next"]) == (None, 1, 2, 4, None)
    apart = [row["distance"] for row in best["neighbours"]]
    assert len(apart) == 5 and apart == sorted(apart) and 3 not in [row["trial"] for row in best["neighbours"]]
    page = Page(visitor.get("/studies/study/trials/3", headers=HTML).text)
    assert f"Place {rows[3]['place']} of 5 on the front" in page.text
    quality = best["objectives"][0]
    assert (quality["low"], quality["high"]) == pytest.approx((1.169, 1.231), abs=1e-3)
    assert quality["reference_ends"]["published"] == pytest.approx((0.972, 1.028), abs=1e-3)
    assert "1.20 1.17 to 1.23" in page.text and "1.00 0.97 to 1.03" in page.text, "of the trial and the reference"
    assert "1.10 1.07 to 1.13" in page.text, "of a neighbour"
    links = [named.get("href") for tag, named in page.tags if tag == "a"]
    assert {"/studies/study/trials/2", "/studies/study/trials/4", "/studies/study/trials"} <= set(links)


def test_a_comparison_says_where_calibrations_differ(lab: LiveLab, visitor: TestClient) -> None:
    for name, calibrations in (("study", (2.0,)), ("same", (2.0,)), ("other", (2.5, None))):
        study = lab.study(name)
        for latency, calibration_ms in enumerate(calibrations, 1):
            lab.complete(study, 1.0, latency, 1.0, calibration_ms=calibration_ms)
    pages = {
        other: visitor.get(f"/studies/study/compare?trial=0&trial={other}", headers=HTML).text
        for other in ("same/0", "other/0", "other/1")
    }
    note = "on local/fake: other has another calibration, so ratios have wider intervals"
    assert {other: note in page for other, page in pages.items()} == {"same/0": False, "other/0": True, "other/1": True}


def test_trials_of_several_studies_are_compared(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    same = lab.study("same")
    lab.complete(same, 1.25, 0.4, 0.4)
    quality = tiny_space().quality.model_dump(exclude_unset=True) | {"lr": 0.5}
    other = lab.study("other", quality=quality)
    lab.complete(other, 0.9, 0.3, 0.3)

    def compared(*trials: str) -> Any:
        answer = visitor.get("/studies/study/compare.json", params={"trial": list(trials)})
        assert answer.status_code == 200, answer.text
        return answer.json()

    alike = compared("1", "same/0")
    assert [trial["name"] for trial in alike["candidates"]] == ["trial 1", "same trial 0"] and alike["apart"] == []
    latency = next(row for row in alike["figures"] if row["metric"] == "latency")
    assert [figure["value"] for figure in latency["figures"]] == [0.5, 0.4] and latency["ratios"][1]["value"] < 1
    quality = next(row for row in alike["evaluations"] if not row["group"])
    assert quality["differences"][1] == pytest.approx(0.25)
    assert quality["difference_ends"][1] == pytest.approx((0.222, 0.278), abs=1e-3)
    page = visitor.get("/studies/study/compare?trial=1&trial=same/0", headers=HTML).text
    assert "1.25 ± 0.01" in page and "+0.25 <small" in page and "0.22 to 0.28" in page

    unlike = compared("1", "study/2", "other/0")
    (why,) = unlike["apart"]
    assert why.startswith("quality: other has another ladder")
    totals = [row for row in unlike["evaluations"] if not row["group"]]
    assert [row["values"] for row in totals] == [[1.0, 1.1, None], [None, None, 0.9]]
    page = visitor.get("/studies/study/compare?trial=1&trial=other/0", headers=HTML).text
    assert "on another scale" in page and 'href="/studies/other/trials/0"' in page
    assert 'name="trial" value="other/0"' in page and 'compare.json?trial=1&amp;trial=other/0"' in page
