"""Submitted studies as processes: limits, restarts, and what survives the coordinator."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_lab import Lab, ScriptedProcess, space_text

from nas.core import logs
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import studies
from nas.infra.store.rows import StudyState
from nas.infra.web.errors import Conflict
from nas.search.spaces import parse_space
from nas.serve.api.submissions import LaunchProcess, Submission, SubmissionFolder, SubmissionState, SubmittedStudies


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.process.end()


def submit(lab: Lab, study: str = "mine") -> None:
    lab.submitted.submit(study, space_text(), by="somebody")
    lab.clock.time += 1


def test_it_can_learn_from_studies_that_are_there(lab: Lab) -> None:
    with pytest.raises(InvalidInput, match="'one'"):
        lab.submitted.submit("mine", space_text(), warm_start=("one",), by="somebody")
    begin(lab, "one")
    assert lab.submitted.submit("mine", space_text(), warm_start=("one",), by="somebody").warm_start == ("one",)
    with pytest.raises(Conflict):
        lab.submitted.submit("mine", space_text(), by="somebody")


def test_a_name_is_not_the_address_of_another_study_s_data(lab: Lab) -> None:
    with pytest.raises(InvalidInput, match="does not end in"):
        submit(lab, "mine.json")
    assert lab.submitted.find("mine.json") is None


def begin(lab: Lab, study: str = "mine", state: StudyState = StudyState.RUNNING) -> int:
    """What the process of a study does in the database; gives the study's id."""
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    row = studies.create(lab.store, study, space, seed=0, version="0")
    studies.set_state(lab.store, row.id, state)
    return row.id


def submission_of(lab: Lab, study: str = "mine") -> Submission:
    submission = lab.submitted.find(study)
    assert submission is not None
    return submission


def run_to_the_end(lab: Lab, script: str) -> Submission:
    """Starts what is due with a process that does no more than `script`; gives how the study stands after it."""
    lab.process.script = script
    lab.submitted.poll()
    lab.process.processes[-1].wait()
    lab.submitted.poll()
    return submission_of(lab)


def test_so_many_at_once_in_the_order_they_came(lab: Lab) -> None:
    for name in ("c", "a", "b"):
        submit(lab, name)
    lab.submitted.poll()
    lab.submitted.poll()
    assert [study for study, _ in lab.process.started] == ["c", "a"]
    begin(lab, "c", StudyState.COMPLETE)
    lab.process.processes[0].communicate()
    lab.submitted.poll()
    assert [study for study, _ in lab.process.started] == ["c", "a", "b"]
    assert submission_of(lab, "c").has_ended


def test_a_complete_study_is_not_started_again(lab: Lab) -> None:
    submit(lab)
    begin(lab, state=StudyState.COMPLETE)
    done = run_to_the_end(lab, "")
    assert (done.state, done.exit_code, done.message) == (SubmissionState.ENDED, 0, None)


def test_what_is_refused_is_told_and_not_tried_again(lab: Lab) -> None:
    submit(lab)
    done = run_to_the_end(lab, "import sys; print('nas: no such device', file=sys.stderr); sys.exit(3)")
    assert (done.state, done.exit_code, done.message) == (SubmissionState.ENDED, 3, "nas: no such device")


@pytest.mark.parametrize("end", ["sys.exit(4)", "sys.exit(130)", "os.kill(os.getpid(), 9)"])
def test_what_broke_is_resumed_later_and_given_up_at_last(lab: Lab, end: str) -> None:
    submit(lab)
    begin(lab)
    waits = []
    while not (after := run_to_the_end(lab, f"import os, sys; {end}")).has_ended:
        assert after.state is SubmissionState.QUEUED
        waits.append(after.not_before - lab.clock.time)
        lab.submitted.poll()
        assert len(lab.process.started) == len(waits), "it was started before its time"
        lab.clock.time = after.not_before
    assert waits == sorted(waits)
    assert lab.process.started == [("mine", True)] * 7
    lab.submitted.steer("mine", "run")
    lab.submitted.poll()
    assert len(lab.process.started) == 8


def test_a_coordinator_that_comes_back_watches_what_still_runs(lab: Lab) -> None:
    submit(lab)
    lab.submitted.poll()
    later = SubmittedStudies(lab.store, lab.home, ScriptedProcess("raise SystemExit('a second process')"))
    later.poll()
    assert submission_of(lab).state is SubmissionState.RUNNING
    begin(lab)
    lab.process.end()
    later.poll()  # nobody saw its exit code; the study says that it did not finish
    again = later.find("mine")
    assert again is not None
    assert (again.state, again.exit_code) == (SubmissionState.QUEUED, None)
    next_process = ScriptedProcess()
    third = SubmittedStudies(lab.store, lab.home, next_process)
    lab.clock.time = again.not_before
    third.poll()
    assert next_process.started == [("mine", True)]
    next_process.end()


def test_two_coordinators_never_run_one_study_twice(lab: Lab) -> None:
    other = ScriptedProcess()
    second = SubmittedStudies(lab.store, lab.home, other)
    submit(lab)
    for coordinator in (lab.submitted, second, lab.submitted, second):
        coordinator.poll()
    assert len(lab.process.started) + len(other.started) == 1


def test_a_stop_that_the_process_did_not_hear_is_told_again(lab: Lab) -> None:
    submit(lab)
    lab.submitted.poll()
    lab.submitted.steer("mine", "stop")  # the study is not in the database yet
    number = begin(lab)
    lab.submitted.poll()
    assert studies.get(lab.store, number).desired_state == "stop"
    studies.set_desired_state(lab.store, number, "run")  # as a launch does when it begins
    lab.submitted.poll()
    assert studies.get(lab.store, number).desired_state == "stop"
    lab.process.end()
    lab.submitted.poll()
    assert (submission_of(lab).state, submission_of(lab).message) == (SubmissionState.ENDED, "stopped")


def test_a_paused_study_whose_process_died_stays_paused(lab: Lab) -> None:
    submit(lab)
    number = begin(lab, state=StudyState.PAUSED)
    studies.set_desired_state(lab.store, number, "pause")
    assert run_to_the_end(lab, "import os; os.kill(os.getpid(), 9)").has_ended
    lab.submitted.steer("mine", "run")
    assert submission_of(lab).state is SubmissionState.QUEUED


def test_a_stopped_study_that_is_resumed_is_tried_again_when_its_process_dies_at_once(lab: Lab) -> None:
    submit(lab)
    studies.set_desired_state(lab.store, begin(lab, state=StudyState.STOPPED), "stop")
    assert run_to_the_end(lab, "raise SystemExit(4)").state is SubmissionState.ENDED
    lab.submitted.steer("mine", "run")
    again = run_to_the_end(lab, "raise SystemExit(4)")
    assert again.state is SubmissionState.QUEUED and "it is retried" in str(again.message)


def test_a_clock_that_is_set_back_delays_no_retry(lab: Lab) -> None:
    submit(lab)
    assert run_to_the_end(lab, "raise SystemExit(4)").state is SubmissionState.QUEUED
    lab.clock.time -= 500
    lab.submitted.poll()
    assert lab.process.started == [("mine", False)] * 2


def test_the_log_is_bounded_while_the_process_writes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    begin, end = "sys.stderr.write('x' * 3000); sys.stderr.flush()", "print('end', file=sys.stderr)"
    lab.process.script = f"import sys; {begin}; sys.stdin.read(); {end}"
    submit(lab)
    lab.submitted.poll()
    log = lab.home / "studies" / "mine" / "launch.log"
    while log.stat().st_size < 3000:
        os.sched_yield()
    lab.submitted.poll()
    assert log.stat().st_size == 0
    assert (log.parent / "launch.log.1").read_text() == "x" * 500
    lab.process.end()
    assert log.read_text() == "end\n"


def test_a_log_that_fills_the_disk_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(logs, "write_durably", full)
    (tmp_path / "launch.log").write_text("x" * 3000)
    logs.bound_log(tmp_path / "launch.log")
    assert (tmp_path / "launch.log").stat().st_size == 0


def test_a_retry_is_not_explained_by_what_an_earlier_process_printed(lab: Lab) -> None:
    submit(lab)
    first = run_to_the_end(lab, "import sys; print('nas: no route to host', file=sys.stderr); sys.exit(4)")
    assert first.message == "ended with exit code 4; it is retried. nas: no route to host"
    lab.clock.time = first.not_before
    second = run_to_the_end(lab, "import os; os.kill(os.getpid(), 9)")
    assert second.message == "ended with exit code -9; it is retried."
    assert "no route" in (lab.home / "studies" / "mine" / "launch.log").read_text()


def test_secrets_in_the_log_are_not_shown(lab: Lab) -> None:
    submit(lab)
    done = run_to_the_end(lab, "import sys; sys.exit('cannot reach postgresql://nas:hunter2@host/nas')")
    assert done.message is not None
    assert "hunter2" not in done.message
    assert "@host/nas" in done.message


def test_a_process_that_never_opened_its_log_does_not_stop_the_others(lab: Lab) -> None:
    submit(lab)
    lab.submitted.poll()
    (lab.home / "studies" / "mine" / "launch.log").unlink(missing_ok=True)
    lab.process.end()
    later = SubmittedStudies(lab.store, lab.home, ScriptedProcess())
    later.poll()
    again = later.find("mine")
    assert again is not None and again.state is SubmissionState.QUEUED
    assert again.message == "ended with exit code None; it is retried."


def test_one_damaged_record_does_not_stop_the_others(lab: Lab) -> None:
    submit(lab, "good")
    folder = lab.home / "studies" / "bad"
    folder.mkdir()
    (folder / "submission.json").write_text('{"v": 2}')
    (lab.home / "studies" / "odd" / "submission.json").mkdir(parents=True)
    for name, why in (("bad", r"submission\.json is damaged"), ("odd", r"submission\.json cannot be read")):
        with pytest.raises(InfrastructureFailed, match=why):
            lab.submitted.find(name)
    lab.submitted.poll()
    assert lab.process.started == [("good", False)]
    begin(lab, "bad")
    assert lab.submitted.submitter("bad") is lab.submitted.log_tail("bad") is None
    assert [row["study"] for row in lab.get("/v1/studies")["studies"]] == ["bad", "good"]


def test_the_process_is_a_plain_launch_over_the_same_database(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_SERVER", "https://elsewhere")
    monkeypatch.setenv("NAS_TOKEN", "hilnas.x.y")
    calls: list[tuple[list[str], dict[str, str]]] = []

    def note(argv: list[str], *, env: dict[str, str], **more: object) -> None:
        calls.append((argv, env))

    monkeypatch.setattr("nas.serve.api.submissions.subprocess.Popen", note)
    submit(lab)
    folder = SubmissionFolder(lab.home / "studies" / "mine")
    with (folder.path / "launch.lock").open("ab") as lock:
        process = LaunchProcess(lab.store, lab.home)
        process.start(
            folder, submission_of(lab).model_copy(update={"trials": 9, "warm_start": ("one",)}), lock, resume=True
        )
    (argv, environment) = calls[0]
    options = ["--study", "mine", "--yes", "--trials", "9", "--resume"]
    options += ["--warm-start", "one"]
    assert argv[1:] == ["-m", "nas.cli", "launch", "--space", str(folder.space), *options]
    assert environment["NAS_DB"] == str(lab.store.engine.url)
    assert environment["NAS_HOME"] == str(lab.home)
    assert not {"NAS_SERVER", "NAS_TOKEN"} & set(environment)
