"""`nas launch` around the search itself: validation of options, plan and final messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cli_runner import nas

import nas.search.spaces as nas_search_spaces
from nas.cli.options import same_database
from nas.infra.store import events, studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.search.spaces import load_space
from nas.search.study.events import Launched
from nas.search.study.opened import LaunchOptions


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The default database, with a study `first` that has just begun."""
    monkeypatch.delenv("NAS_DB", raising=False)
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    store = Store.open()
    studies.create(store, "first", load_space("lfm2-demo").model_dump(mode="json"), seed=0, version="0")
    yield store
    store.close()


def ends_with(state: StudyState, monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """Replaces the search by one that ends at once; returns the options of each call."""
    calls: list[LaunchOptions] = []

    def search(options: LaunchOptions, *callbacks: object) -> StudyState:
        calls.append(options)
        return state

    monkeypatch.setattr("nas.cli.launch.launch", search)
    return calls


def test_dry_run_prints_the_plan_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ends_with(StudyState.COMPLETE, monkeypatch)
    text = nas("launch", "--space", "lfm2-demo", "--dry-run", "--trials", "8").out
    space = load_space("lfm2-demo")
    assert "at most 8 + 2 references" in text
    for rung in space.quality.rungs:
        assert f"({rung.name})" in text
    assert "anchors" not in text
    text = nas("launch", "--space", "lfm2-study", "--dry-run").out
    assert "3 + 2 references at every rung, 3 seeds" in text
    seeds = load_space("lfm2-study").quality.rescore.seeds
    assert f"the front and 2 references at the top rung, {len(seeds)} fresh seeds" in text
    plan = json.loads(nas("launch", "--space", "lfm2-demo", "--study", "x", "--dry-run", "--json").out)
    assert (plan["study"], plan["space"]) == ("x", "lfm2-demo")
    assert calls == []


def test_options_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ends_with(StudyState.COMPLETE, monkeypatch)
    args = ("--study", "first", "--resume", "--trials", "7", "--workers", "1", "--yes")
    args += ("--warm-start", "one", "--warm-start", "two", "--ray-address", "auto", "--train-gpus", "0.5")
    assert nas("launch", "--space", "lfm2-demo", *args).code == 0
    (options,) = calls
    assert (options.study, options.resume, options.trials) == ("first", True, 7)
    assert options.workers == 1
    assert (options.warm_start, options.train_gpus) == (("one", "two"), 0.5)


def test_the_pages_are_served_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def search(options: LaunchOptions, *callbacks: object) -> StudyState:
        (url,) = opened
        assert '"name":"first"' in httpx.get(f"{url}.json").text
        return StudyState.COMPLETE

    monkeypatch.setattr("nas.cli.launch.launch", search)
    done = nas("launch", "--space", "lfm2-demo", "--study", "first", "--resume", "--yes", "--open")
    assert done.code == 0, done.err
    with pytest.raises(httpx.ConnectError):
        httpx.get(opened[0])


def test_shares_of_gpus_are_those_of_a_cluster() -> None:
    refused = nas("launch", "--space", "lfm2-demo", "--yes", "--train-gpus", "0.5")
    assert refused.code == 3 and "--ray-address" in refused.err


def test_the_end_names_the_picture_and_what_to_do_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends_with(StudyState.COMPLETE, monkeypatch)
    done = nas("launch", "--space", "lfm2-demo", "--study", "first", "--yes")
    assert done.code == 0
    assert (tmp_path / "home" / "studies" / "first" / "front.png").stat().st_size > 0
    assert "front.svg" in done.err
    assert "nas study show first" in done.err


def test_the_plan_of_a_resumed_study_has_its_own_number_of_trials(store: Store) -> None:
    events.append(store, studies.get(store, "first").id, Launched(7, ()).to_json())
    plan = json.loads(nas("launch", "--study", "first", "--resume", "--dry-run", "--json").out)
    assert plan["trials"] == 7


def test_an_interrupted_search_is_130_and_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(StudyState.STOPPED, monkeypatch)
    done = nas("launch", "--space", "lfm2-demo", "--study", "first", "--yes")
    assert done.code == 130
    assert "nas launch --study first --resume" in done.err


def test_a_requested_stop_is_no_failure(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(StudyState.STOPPED, monkeypatch)
    studies.set_desired_state(store, studies.get(store, "first").id, "stop")
    assert nas("launch", "--space", "lfm2-demo", "--study", "first", "--yes").code == 0


def test_json_is_the_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(StudyState.COMPLETE, monkeypatch)
    report = json.loads(nas("launch", "--space", "lfm2-demo", "--study", "first", "--json").out)
    assert report["study"] == "first"
    assert report == json.loads(nas("study", "show", "first", "--json").out)


@pytest.mark.parametrize(
    "args",
    [["--space", "lfm22"], ["--space", "lfm2-demo", "--resume"], ["--space", "lfm2", "--study", "first", "--resume"]],
)
def test_invalid_launches_are_rejected(args: list[str]) -> None:
    assert nas("launch", *args, "--yes").code == 3


def test_no_arguments_show_help() -> None:
    assert nas("launch").code == 2


def test_what_to_do_next_names_the_database_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://nas:secret@host/nas"
    assert same_database(url) == " --db 'postgresql://[hidden]@host/nas'"
    assert same_database("sqlite:////home/me/my.db") == " --db sqlite:////home/me/my.db"
    monkeypatch.setenv("NAS_DB", url)
    assert same_database(url) == same_database(None) == "", "it is known without"


def test_errors_do_not_contain_passwords() -> None:
    for url in ("nas:secret@host", "x://nas:secret@host/", "postgresql://nas:secret@host.invalid/nas"):
        done = nas("study", "list", "--db", url)
        assert done.code != 0
        assert "secret" not in done.err


def test_dry_run_says_how_long_it_takes_and_what_that_is_based_on() -> None:
    text = nas("launch", "--space", "lfm2-demo", "--dry-run").out
    (time,) = [line for line in text.splitlines() if line.startswith("time ")]
    assert "about " in time and " to " in time and "training" in time
    assert "a guess: too few trials have ended here yet" in text
    plan = json.loads(nas("launch", "--space", "lfm2-demo", "--dry-run", "--json").out)["estimate"]
    assert 0 < plan["seconds"]["low"] < plan["seconds"]["typical"] < plan["seconds"]["high"]
    assert {"screen", "training", "confirm"} <= {part["name"] for part in plan["parts"]}


def test_a_refused_space_has_no_estimate(tmp_path: Path) -> None:
    text = (Path(nas_search_spaces.__file__).parent / "lfm2-demo.yaml").read_text(encoding="utf-8")
    (tmp_path / "space.yaml").write_text(text.replace("name: long", "nam: long"), encoding="utf-8")
    for args in ((), ("--json",)):
        done = nas("launch", "--space", str(tmp_path / "space.yaml"), "--dry-run", *args)
        assert done.code == 3
        assert done.out == ""
        assert "about" not in done.err


def test_a_coordinator_that_is_not_known_does_not_estimate() -> None:
    done = nas("launch", "--space", "lfm2-demo", "--dry-run", "--server", "https://lab.example")
    assert done.code == 3 and "nas server add" in done.err and done.out == ""
