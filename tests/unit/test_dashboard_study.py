"""The page of a study: what it shows to people, to scripts and to programs."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab
from study_support import tiny_space
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import LOOPBACK, Page

from nas.core.stats import interval
from nas.core.trial import EventKind
from nas.core.units import show_number
from nas.infra.store import events, studies, trials
from nas.infra.store.rows import StudyState
from nas.search.analysis.report import harmless, study_report
from nas.search.study.events import Closed, Expected

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


def get_page(visitor: TestClient, query: str = "") -> Page:
    answer = visitor.get(f"/studies/study{query}", headers=HTML)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def get_json(visitor: TestClient, query: str = "") -> Any:
    answer = visitor.get(f"/studies/study.json{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_log_has_the_lines_of_follow_newest_first(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    events.append(lab.store, study, {"what": "warning", "message": "<b>slow"})
    view = visitor.get("/studies/study/log.json").json()
    assert (view["study"], view["over"], view["earlier"]) == ("study", False, False)
    assert [line["text"] for line in view["lines"][:3]] == [
        "study: warning: <b>slow",
        "trial 7: proposed",
        "trial 6: breaks a budget: =HYPERLINK(1)",
    ]
    assert [line["id"] for line in view["lines"]] == sorted((line["id"] for line in view["lines"]), reverse=True)
    page = visitor.get("/studies/study/log", headers=HTML).text
    assert "&lt;b&gt;slow" in page and 'data-refresh="3"' in page
    assert '<a href="/studies/study/trials/6">trial 6</a>: breaks a budget' in page
    assert 'href="/studies/study/log"' in visitor.get("/studies/study", headers=HTML).text


def test_the_twin_says_what_the_page_shows(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    trials.add_event(
        lab.store, study, 7, EventKind.PROGRESS,
        {"what": Expected.what, "gain": 0.1, "hypervolume": 2.0, "batch": 2, "quality": None},
    )  # fmt: skip
    events.append(lab.store, study, {"what": Closed.what, "rule": "trials", "message": "all 4 layouts were proposed"})
    view, page = get_json(visitor), get_page(visitor)
    report = study_report(lab.store, "study")
    assert view["hypervolume"]["value"] == pytest.approx(report["hypervolume"])
    assert (view["hypervolume"]["low"], view["hypervolume"]["high"]) == pytest.approx(
        (report["hypervolume_ci95"]["low"], report["hypervolume_ci95"]["high"])
    )
    assert [row["trial"] for row in view["ranked"] if row["on"]] == [row["trial"] for row in report["front"]]
    assert [row["p_front"] for row in view["ranked"] if row["on"]] == [row["p_front"] for row in report["front"]]
    for entry, row in zip(view["ranked"], report["front"], strict=False):
        for objective in report["objectives"]:
            name = objective["name"]
            ends = interval(row["objectives"][name], row["value_sd"][name], objective["transform"])
            assert (entry["low"][name], entry["high"][name]) == pytest.approx(ends, rel=1e-4)
    assert view["reliability"] == report["reliability"]
    assert view["reliability"]["candidates"] == 5
    assert "not re-scored on fresh seeds" in page.text
    assert view["ending"]["message"] in page.text and view["expected_gain"]["share"] == pytest.approx(0.1)
    assert [row["trial"] for row in view["queue"]["trials"]] == [7] and "trial 7" in page.text
    assert [(axis["objective"], axis["value"]) for axis in view["corner"]] == [
        ("quality", 0.0), ("latency", pytest.approx(2.71828, rel=1e-4)), ("memory", pytest.approx(2.71828, rel=1e-4))
    ]  # fmt: skip
    assert view["states"] == {"proposed": 1, "infeasible": 1, "complete": 5}
    ends = [view["hypervolume"][name] for name in ("low", "high")]
    assert f"{show_number(view['hypervolume']['value'], *ends)} as measured" in page.text
    assert f"{show_number(view['hypervolume']['estimate'], *ends)} " in page.text


def test_the_page_has_what_its_script_attaches_to(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = get_page(visitor)
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
    assert rows == [str(row["trial"]) for row in get_json(visitor)["ranked"]] + ["0"]


def test_everything_that_can_be_operated_has_a_name(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = get_page(visitor)
    labelled = {named["for"] for tag, named in page.tags if tag == "label" and "for" in named}
    selects = {named["id"] for tag, named in page.tags if tag == "select" and named["name"] != "place"}
    assert selects == {f"{side}{n}" for side in "xy" for n in (1, 2, 3)} <= labelled
    boxes = [named["aria-label"] for tag, named in page.tags if tag == "input" and named.get("name") == "trial"]
    assert len(boxes) == 6 and all(boxes)
    assert {named["scope"] for tag, named in page.tags if tag == "th"} == {"row", "col"}
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1 and levels.count(1) == 1 and 2 in levels
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    wide = [named for _, named in page.tags if named.get("class") == "wide"]
    assert wide and all(named["tabindex"] == "0" and named["aria-label"] for named in wide), "the keyboard scrolls, too"


def test_without_scripts_the_front_is_a_table(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    text = visitor.get("/studies/study", headers=HTML).text
    noscript = text[text.index("<noscript><p>" if "<noscript><p>" in text else "<noscript>") :]
    assert "The ranked list below has the front" in noscript
    assert len([named for tag, named in Page(text).tags if tag == "tr" and "data-trial" in named]) == 6


def test_the_address_chooses_axes(lab: LiveLab, visitor: TestClient) -> None:
    filled(lab)
    page = get_page(visitor, "?x2=kv_bytes&log=kv_bytes&place=local/fake")
    chosen = [
        named["value"] for tag, named in page.tags if tag == "option" and "selected" in named and "value" in named
    ]
    assert chosen == ["quality", "latency", "quality", "kv_bytes", "memory", "latency"]
    checked = [named["name"] for tag, named in page.tags if tag == "input" and "checked" in named]
    assert checked == ["logx2"]
    assert get_json(visitor, "?x2=kv_bytes")["page"]["panels"][1] == {"number": 2, "x": "kv_bytes", "y": "quality"}
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
        lab.measure(study, trial, 0.6 + step / 10, 0.5 + step / 10, runtime="other")
    view = get_json(visitor)
    assert view["places"] == ["local/fake", "local/other"]
    rho = {row["metric"]: row["correlation"]["spearman"] for row in view["agreement"]}
    assert (rho["latency"]["value"], rho["peak_rss"]["value"]) == (1.0, -1.0)
    assert {row["correlation"]["layouts"] for row in view["agreement"]} == {7}
    assert rho["decode_p50"] is None, "all the same"
    assert "local/other" in get_page(visitor).text


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
    live = [named for _, named in get_page(visitor).tags if "data-refresh" in named]
    assert {named["data-from"] for named in live} == {"/studies/study/now"}
    fragment = Page(visitor.get("/studies/study/now", headers=HTML).text)
    assert {named["id"] for _, named in fragment.tags if "data-refresh" in named} == {named["id"] for named in live}
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert not [named for _, named in get_page(visitor).tags if "data-refresh" in named]


def test_a_study_of_which_nothing_is_known_has_a_page(lab: LiveLab, visitor: TestClient) -> None:
    lab.study(judged=False)
    page = get_page(visitor)
    assert "The front is still empty: the reference layouts are not measured" in page.text
    assert get_json(visitor)["hypervolume"] is None


def test_a_study_that_ended_without_a_front_says_why(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 0.5, 0.5, "reference")
    assert get_json(visitor)["no_front"] == "no layout was proposed"
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert "no layout was proposed." in get_page(visitor).text and "Draw the" not in get_page(visitor).text
    studies.set_state(lab.store, study, StudyState.RUNNING)
    broken = lab.propose(study)
    lab.measure(study, broken, 9.0, 9.0)
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, EventKind.INFEASIBLE):
        trials.add_event(lab.store, study, broken, kind, {})
    assert "panels" not in visible_sections(get_page(visitor)), "three empty panels"
    assert get_json(visitor)["waiting"] == "Waiting for the first trial to be complete (ended: 1 infeasible)"
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    page = get_page(visitor)
    assert "The front is empty: no trial is complete (1 infeasible)." in page.text and "panels" not in visible_sections(
        page
    )
    assert "Draw the other trials" in page.text
    assert get_json(visitor)["waiting"] is None
    assert "panels" in visible_sections(get_page(visitor, "?infeasible=1&incomplete=1"))
    lab.complete(study, 1.0, 0.5, 0.5)
    assert get_json(visitor)["no_front"] is None and "panels" in visible_sections(get_page(visitor))


def visible_sections(page: Page) -> set[str | None]:
    return {named.get("id") for tag, named in page.tags if tag == "section" and "hidden" not in named}


def test_a_study_at_work_says_what_it_waits_for(lab: LiveLab, visitor: TestClient) -> None:
    study = lab.study(judged=False)
    measured = lab.propose(study, "reference")
    for kind in (EventKind.EXPORTED, EventKind.MEASURING):
        trials.add_event(lab.store, study, measured, kind, {})
    assert "Waiting for the reference layouts to be measured" in get_page(visitor).text
    lab.judge(study)
    assert get_json(visitor)["waiting"] == "Waiting for the first layouts to be proposed"
    trials.add_event(lab.store, study, lab.propose(study), EventKind.EXPORTED, {})
    assert get_json(visitor)["waiting"] == "Waiting for the first trial to be complete (under way: 1 exported)"
    assert not visible_sections(get_page(visitor)) & {"panels", "courses"}
    lab.complete(study, 1.0, 0.5, 0.5)
    assert get_json(visitor)["waiting"] is None and visible_sections(get_page(visitor)) >= {"panels", "courses"}


def test_who_is_not_there_has_no_page(visitor: TestClient) -> None:
    for path in ("/studies/nobody", "/studies/nobody.json", "/studies/nobody/trials.csv", "/studies/nobody/front.json"):
        assert visitor.get(path, headers=HTML).status_code == 404


def test_a_running_study_says_how_long_it_will_still_take(lab: LiveLab, visitor: TestClient) -> None:
    study = filled(lab)
    time_left = get_json(visitor)["left"]
    assert 0 < time_left["seconds"]["low"] <= time_left["seconds"]["typical"] <= time_left["seconds"]["high"]
    assert study_report(lab.store, "study")["left"] == time_left
    page = get_page(visitor).text
    assert "Time left" in page and time_left["based_on"][0] in page
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    assert get_json(visitor)["left"] is None
    assert "Time left" not in get_page(visitor).text
