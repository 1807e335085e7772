"""What users see of a study that failed, or whose process is gone: in the CLI, the API, and on pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from dashboard_lab import DashboardLab
from live_lab import LiveLab
from study_support import tiny_space

from nas.core.errors import StudyChanged
from nas.infra.store import leases, studies
from nas.infra.store.rows import Role, StudyState
from nas.infra.store.studies import Condition
from nas.infra.web.errors import Conflict
from nas.search.study.opened import LaunchOptions

RESUME = "nas launch --study study --resume"
INTERRUPTION = "its process is gone; it held the study until 1970-01-01 00:17:10+00:00"
REASON = "box: 3 repetitions were refused"


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    return LiveLab(tmp_path)


def condition(lab: LiveLab) -> Condition:
    return studies.condition(lab.store, studies.get(lab.store, "study"))


def test_a_study_whose_process_is_gone_is_interrupted_when_its_lease_ends(lab: LiveLab) -> None:
    study = lab.study()
    assert condition(lab) == Condition("running")
    lease = leases.acquire(lab.store, study, "elsewhere:1:abcd")
    lab.clock.sleep(leases.LEASE_S - 0.1)
    assert condition(lab) == Condition("running")
    lab.clock.sleep(0.1)
    assert leases.LEASE_S <= 30.0
    assert condition(lab) == Condition("interrupted", INTERRUPTION, RESUME)
    leases.renew(lab.store, lease)  # it was only slow
    assert condition(lab) == Condition("running")
    for state in (StudyState.COMPLETE, StudyState.STOPPED):
        studies.set_state(lab.store, study, state, lease=lease)
        leases.release(lab.store, lease)
        assert condition(lab).state == state.value and condition(lab).reason is None


def test_a_failure_keeps_its_reason_until_the_next_state(lab: LiveLab) -> None:
    study = lab.study()
    studies.set_state(lab.store, study, StudyState.FAILED)
    assert condition(lab).reason == "the version of hilnas that ran it stored no reason"
    studies.set_state(lab.store, study, StudyState.FAILED, reason=REASON)
    assert condition(lab) == Condition("failed", REASON, RESUME)
    studies.set_state(lab.store, study, StudyState.RUNNING)
    assert condition(lab) == Condition("running")


def interrupted(lab: LiveLab) -> None:
    """A study whose process is gone, and one that failed."""
    leases.acquire(lab.store, lab.study(), "elsewhere:1:abcd")
    studies.set_state(lab.store, lab.study("broken"), StudyState.FAILED, reason=REASON)
    lab.clock.sleep(leases.LEASE_S)


def test_commands_show_it(lab: LiveLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(lab)
    database = f"sqlite:///{tmp_path / 'nas.db'}"
    monkeypatch.setenv("NAS_DB", database)
    listed = {row["study"]: row for row in json.loads(nas("study", "list", "--json").out)["studies"]}
    assert (listed["study"]["state"], listed["study"]["resume"]) == ("interrupted", RESUME)
    assert (listed["broken"]["state"], listed["broken"]["reason"]) == ("failed", REASON)
    text = nas("study", "list")
    assert f"broken\ttiny\tfailed\t0\t{REASON}" in text.out
    assert f"to continue study: {RESUME}" in text.err
    study = json.loads(nas("study", "show", "broken", "--json").out)
    assert (study["state"], study["reason"]) == ("failed", REASON)
    assert re.search(
        rf"reason +{REASON}\nto continue +nas launch --study broken --resume", nas("study", "show", "broken").out
    )


def test_pages_and_their_json_show_it_without_a_new_event(tmp_path: Path) -> None:
    lab = DashboardLab(tmp_path)
    leases.acquire(lab.store, lab.study(), "elsewhere:1:abcd")
    visitor = lab.visitor(Role.OPERATE)
    assert visitor.page("/studies/study.json").json()["state"] == "running"
    lab.clock.sleep(leases.LEASE_S)
    answer = visitor.page("/studies/study.json").json()
    assert (answer["state"], answer["reason"], answer["resume"]) == ("interrupted", INTERRUPTION, RESUME)
    for path in ("/studies/study", "/studies/study/now"):
        page = visitor.page(path).text
        assert INTERRUPTION in page and RESUME in page
    (line,) = visitor.page("/studies.json").json()["studies"]
    assert (line["state"], line["reason"]) == ("interrupted", INTERRUPTION)
    assert INTERRUPTION in visitor.page("/studies").text


def test_a_study_that_nobody_runs_is_not_told_to_go_on(tmp_path: Path) -> None:
    lab = DashboardLab(tmp_path)
    leases.acquire(lab.store, lab.study(), "elsewhere:1:abcd")
    lab.submitted.steer("study", "run")
    lab.clock.sleep(leases.LEASE_S)
    with pytest.raises(Conflict, match="nas launch --resume"):
        lab.submitted.steer("study", "run")


def test_a_study_is_resumed_without_naming_its_space(
    lab: LiveLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(lab)
    monkeypatch.setenv("NAS_DB", f"sqlite:///{tmp_path / 'nas.db'}")
    spaces: list[Any] = []

    def launch(options: LaunchOptions, *_: Any) -> StudyState:
        spaces.append(options.space)
        raise StudyChanged("enough")

    monkeypatch.setattr("nas.cli.launch.launch", launch)
    monkeypatch.setattr("nas.cli.launch.support_filter", lambda space: None)
    assert nas("launch", "--study", "study", "--resume").code == 3
    assert spaces == [tiny_space()]
    refused = nas("launch", "--study", "study")
    assert refused.code == 3 and "--space: required, except" in refused.err
