"""The report of a study as one HTML file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_runner import nas
from dashboard_lab import FORM_HEADERS, DashboardLab
from live_lab import LiveLab
from study_support import snapshot

from nas.infra.store.rows import Role
from nas.serve.dashboard.study_report import study_report_html
from nas.serve.views.effects import EffectsView


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


def test_it_has_the_result_and_needs_nothing_else(lab: LiveLab) -> None:
    study = lab.study()
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    best = lab.complete(study, 1.0, 0.55, 0.71)
    text = study_report_html(lab.store, snapshot(lab.store))
    assert f"trial {best}: " in text and "latency at least 44 % lower" in text
    assert "<svg" in text and "The search space" in text
    assert "<script" not in text and "<link" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text), "it fetches nothing"


def test_it_names_budgets_on_quality_without_a_device(lab: LiveLab) -> None:
    lab.study(budgets=[{"metric": "quality", "min": "0.95x"}, {"metric": "file_size", "max": "3MB"}])
    text = study_report_html(lab.store, snapshot(lab.store))
    assert "<li>quality on the proxy: limit 0.95</li>" in text
    assert "<li>file_size on local, fake: limit 3 MB</li>" in text


def test_an_empty_study_has_one_too(lab: LiveLab) -> None:
    lab.study(judged=False)
    text = study_report_html(lab.store, snapshot(lab.store))
    assert "The front is still empty: the reference layouts are not" in text


def test_a_study_that_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = DashboardLab(tmp_path)
    lab.study()
    script, header = lab.stranger(), {"Authorization": f"Bearer {lab.tokens[Role.READ]}"}
    assert script.get("/studies/study.json", headers=header).status_code == 200
    monkeypatch.setattr("nas.search.analysis.snapshot.read_study", lambda *_: pytest.fail("the whole study is read"))
    assert script.get("/studies/study/report", headers=header).status_code == 200


def test_the_command_writes_the_file(lab: LiveLab, tmp_path: Path) -> None:
    lab.study()
    done = nas("study", "report", "study", "-o", f"{tmp_path}/report.html", "--db", str(lab.store.engine.url))
    assert done.code == 0, done.err
    assert (tmp_path / "report.html").read_text().rstrip().endswith("</html>")


def test_a_token_reads_pages_and_their_downloads_and_does_not_act(tmp_path: Path) -> None:
    lab = DashboardLab(tmp_path)
    lab.study()
    script, header = lab.stranger(), {"Authorization": f"Bearer {lab.tokens[Role.ADMIN]}"}
    report = script.get("/studies/study/report", headers=header)
    assert report.status_code == 200 and "The front is still empty" in report.text
    assert report.headers["Content-Disposition"] == 'attachment; filename="study-report.html"'
    assert script.get("/studies/study/trials.csv", headers=header).text.startswith("trial,state")
    moved = script.get("/studies/study/effects.json", headers=header).json()
    assert "has a model" in str(EffectsView.model_validate(moved).no_slices)
    assert (
        script.post("/studies/study/pause", data={"form_token": "x"}, headers=header | FORM_HEADERS).status_code == 403
    )
    for wrong in ({}, {"Authorization": "Bearer hilnas.x.y"}, {"Authorization": "Basic eA=="}):
        assert script.get("/studies/study/trials.csv", headers=wrong).status_code == 401
