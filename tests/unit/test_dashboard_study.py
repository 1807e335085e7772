"""The page of a study: what stands in it for people, for scripts and for programs."""

from __future__ import annotations

import csv
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab
from service_support import tiny_space
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import HOSTILE, LOOPBACK, Page

from nas.core.trial import EventKind
from nas.service import live_study
from nas.service.ending import CLOSED, EXPECTED
from nas.service.live_studies import LiveStudies
from nas.service.report import study_report
from nas.service.study_tables import harmless
from nas.store import columns, events, studies, trials
from nas.store.rows import StudyState
from nas.store.store import Store

TWO: dict[str, Any] = {
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}, {"name": "other", "quantisation": "q4_0"}]
}


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


@pytest.fixture
def visitor(lab: LiveLab) -> TestClient:
    return client(lab, OPEN, LOOPBACK)


def filled(lab: LiveLab) -> int:
    """A study with a front of five, a reference, a trial over budget, and one under way."""
    study = lab.study()
    lab.complete(study, 1.0, 0.5, 0.5, "reference")
    for step in range(5):
        lab.complete(study, 1.0 + step / 10, 0.5 + step / 10, 0.5 + step / 10)
    broken = lab.propose(study)
    lab.measure(study, broken, 9.0, 9.0)
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, EventKind.INFEASIBLE):
        trials.add_event(lab.store, study, broken, kind, {"reason": "=HYPERLINK(1)"} if "infeasible" in kind else {})
    lab.propose(study)
    return study


def shown(visitor: TestClient, query: str = "") -> Page:
    answer = visitor.get(f"/studies/study{query}", headers=HTML)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def told(visitor: TestClient, query: str = "") -> Any:
    answer = visitor.get(f"/studies/study.json{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_twin_says_what_the_page_shows(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    trials.add_event(
        lab.store, study, 7, EventKind.PROGRESS,
        {"what": EXPECTED, "gain": 0.1, "hypervolume": 2.0, "batch": 2, "quality": None},
    )  # fmt: skip
    events.append(lab.store, study, {"what": CLOSED, "rule": "trials", "message": "all 4 layouts were proposed"})
    view, page = told(visitor), shown(visitor)
    report = study_report(lab.store, "study")
    assert view["hypervolume"]["value"] == pytest.approx(report["hypervolume"])
    assert (view["hypervolume"]["low"], view["hypervolume"]["high"]) == pytest.approx(
        (report["hypervolume_ci95"]["low"], report["hypervolume_ci95"]["high"])
    )
    assert [row["trial"] for row in view["ranked"] if row["on"]] == [row["trial"] for row in report["front"]]
    assert [row["p_front"] for row in view["ranked"] if row["on"]] == [row["p_front"] for row in report["front"]]
    assert view["ending"]["message"] in page.text and view["expected_gain"]["share"] == pytest.approx(0.1)
    assert [each["trial"] for each in view["queue"]["trials"]] == [7] and "trial 7" in page.text
    assert [(each["objective"], each["value"]) for each in view["corner"]] == [
        ("quality", 0.0), ("latency", pytest.approx(2.71828, rel=1e-4)), ("memory", pytest.approx(2.71828, rel=1e-4))
    ]  # fmt: skip
    assert view["states"] == {"proposed": 1, "infeasible": 1, "complete": 5}
    assert f"{view['hypervolume']['value']:.4g}" in page.text


def test_the_page_has_what_its_script_attaches_to(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = shown(visitor)
    (panels,) = [named for tag, named in page.tags if named.get("id") == "panels"]
    assert panels["data-points"] == "/studies/study/points"
    assert [named["data-panel"] for tag, named in page.tags if tag == "figure"] == ["1", "2", "3"]
    names = {named.get("name") for _, named in page.tags}
    assert {f"{what}{side}{n}" for what in ("", "log") for side in "xy" for n in (1, 2, 3)} <= names
    assert {"infeasible", "place"} <= names
    ids = [named["id"] for _, named in page.tags if "id" in named]
    assert len(set(ids)) == len(ids)
    assert {"parallel", "course-trials", "course-hours", "clear", "png", "picked", "ranked"} <= set(ids)
    rows = [named["data-trial"] for tag, named in page.tags if tag == "tr" and "data-trial" in named]
    assert rows == [str(row["trial"]) for row in told(visitor)["ranked"]] + ["0"]


def test_everything_that_can_be_operated_has_a_name(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = shown(visitor)
    labelled = {named["for"] for tag, named in page.tags if tag == "label" and "for" in named}
    for tag, named in page.tags:
        if tag == "select" and named["name"] != "place":
            assert named["id"] in labelled
        if tag == "input" and named.get("name") == "trial":
            assert named["aria-label"]
        if tag == "th":
            assert named["scope"] in ("row", "col")
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    wide = [named for _, named in page.tags if named.get("class") == "wide"]
    assert wide and all(named["tabindex"] == "0" and named["aria-label"] for named in wide), "the keyboard scrolls, too"


def test_without_scripts_the_front_is_a_picture(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    text = visitor.get("/studies/study", headers=HTML).text
    drawn = text[text.index("<noscript>") : text.index("</noscript>")]
    assert drawn.count('class="front"') == 5 and drawn.count('class="star"') == 1
    assert "5 trials, 5 on the front" in drawn
    memory = visitor.get("/studies/study?x1=latency&y1=memory&infeasible=1&log=latency", headers=HTML).text
    drawn = memory[memory.index("<noscript>") : memory.index("</noscript>")]
    assert "6 trials" in drawn, "with the one that broke a budget"
    assert "budget on memory: 2 MB" in drawn


def test_the_address_chooses_axes(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = shown(visitor, "?x2=kv_bytes&log=kv_bytes&place=local/fake")
    chosen = [
        named["value"] for tag, named in page.tags if tag == "option" and "selected" in named and "value" in named
    ]
    assert chosen == ["quality", "latency", "quality", "kv_bytes", "memory", "latency"]
    checked = [named["name"] for tag, named in page.tags if tag == "input" and "checked" in named]
    assert checked == ["logx2"]
    assert told(visitor, "?x2=kv_bytes")["page"]["panels"][1] == {"number": 2, "x": "kv_bytes", "y": "quality"}
    assert visitor.get("/studies/study.json?x1=nothing").status_code in (404, 422)


def test_values_of_any_axis_can_be_asked_for(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    answer = visitor.get("/studies/study/points?axes=params_total,decode_p50.chat@local.fake").json()
    values = answer["told"]["values"]
    assert list(values) == ["params_total", "decode_p50.chat@local.fake"]
    assert values["params_total"][0] == tiny_space().references.layouts()["published"].params.total
    assert values["decode_p50.chat@local.fake"][7] is None, "not measured yet"
    entry = answer["front"][0]
    assert set(entry["values"]) == {"quality", "latency", "memory", *values} == set(entry["low"])
    assert entry["low"]["params_total"] is None and entry["low"]["latency"] < entry["values"]["latency"]
    assert [answer["told"]["statuses"][code] for code in answer["told"]["status"][-2:]] == ["infeasible", "proposed"]
    assert answer["told"]["feasible"][-2:] == [0, None]
    assert visitor.get("/studies/study/points?axes=nothing").status_code in (404, 422)


def test_a_figure_without_a_workload_is_that_of_the_file(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study(budgets=[{"metric": "file_size", "max": "3MB"}])
    lab.complete(study, 1.0, 0.5, 0.5)
    answer = visitor.get("/studies/study/points?axes=file_size@local.fake").json()
    assert answer["told"]["values"]["file_size@local.fake"] == [1.0]
    assert answer["front"][0]["high"]["file_size@local.fake"] == 1.0


def test_places_that_order_trials_alike_agree(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study(**TWO)
    for step in range(7):
        trial = lab.propose(study)
        lab.measure(study, trial, 0.5 + step / 10, 1.0 - step / 10, runtime="fake")
        lab.measure(study, trial, 0.6 + step / 10, 0.5 + step / 10, runtime="other", noisy=step == 6)
    view = told(visitor)
    assert view["places"] == ["local/fake", "local/other"]
    rho = {each["metric"]: each["correlation"]["spearman"] for each in view["agreement"]}
    assert (rho["latency"]["value"], rho["peak_rss"]["value"]) == (1.0, -1.0)
    assert {each["correlation"]["layouts"] for each in view["agreement"]} == {6}, "the noisy one is left out"
    assert rho["decode_p50"] is None, "all the same"
    assert "local/other" in shown(visitor).text


def test_all_trials_can_be_taken_away(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    answer = visitor.get("/studies/study/trials.csv")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="study-trials.csv"'
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert [row["trial"] for row in rows] == [str(number) for number in range(8)]
    assert [row["on_front"] for row in rows] == ["0", "1", "1", "1", "1", "1", "0", "0"]
    assert rows[6]["reason"] == "'=HYPERLINK(1)" and rows[7]["latency [ms]"] == ""
    assert float(rows[2]["quality"]) == pytest.approx(1.1)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_no_text_is_a_formula(text: str) -> None:
    assert harmless(text) == f"'{text}"
    assert harmless("conv 3") == "conv 3"


def test_the_front_can_be_taken_away(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    answer = visitor.get("/studies/study/front.json")
    content = json.loads(answer.text)
    assert len(content["front"]) == 5 and content["references"][0]["name"] == "published"
    assert set(content["front"][0]["values"]) == {axis["key"] for axis in content["axes"]}


def test_what_stands_still_is_not_asked_for_again(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    live = [named for _, named in shown(visitor).tags if "data-refresh" in named]
    assert {named["data-from"] for named in live} == {"/studies/study/now"}
    fragment = Page(visitor.get("/studies/study/now", headers=HTML).text)
    assert {named["id"] for _, named in fragment.tags if "data-refresh" in named} == {named["id"] for named in live}
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert not [named for _, named in shown(visitor).tags if "data-refresh" in named]


def test_a_study_of_which_nothing_is_known_has_a_page(lab: LiveLab, visitor: TestClient) -> None:
    lab.study(judged=False)
    page = shown(visitor)
    assert "Nothing is on the front yet" in page.text and "no trial has both figures yet" in page.text
    assert told(visitor)["hypervolume"] is None


def test_what_is_stored_never_runs(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study(devices=[HOSTILE])
    events.append(lab.store, study, {"what": CLOSED, "rule": "trials", "message": HOSTILE})
    page = shown(visitor)
    assert HOSTILE in page.text
    assert all(str(named["src"]).startswith("/assets/") for tag, named in page.tags if tag == "script")


def test_who_is_not_there_has_no_page(visitor: TestClient) -> None:
    for path in ("/studies/nobody", "/studies/nobody.json", "/studies/nobody/trials.csv", "/studies/nobody/front.json"):
        assert visitor.get(path, headers=HTML).status_code == 404


def test_the_layouts_of_a_large_study_do_not_hold_its_page_up(
    lab: LiveLab, visitor: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(lab)
    monkeypatch.setattr(live_study, "LAYOUTS_AT_ONCE", 3)
    with held(monkeypatch, "layouts") as go_on:
        page = shown(visitor)
        (later,) = [named["data-from"] for _, named in page.tags if named.get("id") == "blocks-part"]
        assert later == "/studies/study/blocks" and "0 of 8" in page.text
        assert "0 of 8" in visitor.get(str(later), headers=HTML).text
        for path in (".json", "/points?axes=params_total", "/trials.csv", "/front.json"):
            answer = visitor.get(f"/studies/study{path}")
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
            assert answer.json()["error"] == "layouts of study 'study' are being read: 0 of 8"
        go_on.set()
        until(lambda: "swiglu" in visitor.get(str(later), headers=HTML).text)
    assert not [named for _, named in shown(visitor).tags if "data-from" in named and named["id"] == "blocks-part"]
    assert told(visitor)["blocks"]


def test_a_large_study_that_is_being_read_says_how_far_it_is(lab: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(lab)
    with LiveStudies(lab.store, at_once=3) as live, held(monkeypatch, "states") as go_on:
        visitor = client(lab, OPEN, LOOPBACK, live=live)
        page = visitor.get("/studies/study", headers=HTML)
        assert (page.status_code, page.headers["Refresh"]) == (202, "1")
        assert "trials of study &#39;study&#39;" in page.text and "0 of 8" in page.text
        for path in (".json", "/points", "/trials.csv"):
            answer = visitor.get(f"/studies/study{path}")
            assert answer.status_code == 503 and "Retry-After" in answer.headers and "0 of 8" in answer.text
        assert "0 of 8 trials" in visitor.get("/studies", headers=HTML).text
        (line,) = visitor.get("/studies.json").json()["studies"]
        assert (line["reading"], line["problem"]) == ({"done": 0, "total": 8}, None)
        go_on.set()
        until(lambda: visitor.get("/studies/study", headers=HTML).status_code == 200)
        assert visitor.get("/studies.json").json()["studies"][0]["reading"] is None


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """What reads all trials in turn waits, until the event is set or the context ends."""
    go_on, read = threading.Event(), getattr(columns, name)

    def wait(store: Store, study: int, some: Sequence[int]) -> Any:
        assert not isinstance(some, range) or go_on.wait(60)
        return read(store, study, some)

    monkeypatch.setattr(columns, name, wait)
    try:
        yield go_on
    finally:
        go_on.set()


def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
