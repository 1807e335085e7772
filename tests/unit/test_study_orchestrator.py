"""A whole study within this process: it ends, it can be killed at any write, and its log replays."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import random
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

import pytest
from sqlalchemy import event
from study_support import TINY, Bed, bed_of, tiny_space

from nas.core.errors import CandidateFailed, InfrastructureFailed, NasError
from nas.core.layout import Layout
from nas.core.pareto import front_hypervolume
from nas.core.trial import EventKind, TrialState
from nas.infra.store import artifacts, results, studies, trials
from nas.infra.store.rows import StudyState
from nas.model.text.corpus import CorpusRef
from nas.search.analysis.record import read_study
from nas.search.analysis.report import study_report
from nas.search.analysis.second import second_gains
from nas.search.analysis.snapshot import Snapshots, StudySnapshot
from nas.search.proxy.job import TaskRun, TrainJob
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import LM_PRIOR, Quality
from nas.search.study.check import support_filter
from nas.search.study.events import Note, QualityKnown, Remeasured, all_events
from nas.search.study.ledger import Ledger
from nas.search.study.proposals import replay
from nas.search.study.remeasuring import Remeasuring
from nas.search.study.scales import Scales
from nas.search.study.stages import StageWork
from nas.search.study.trial import TrialRun
from nas.serve.views.candidate import candidate_views
from nas.testing import fake_runner, inline_study

TRIALS = 5


class Killed(BaseException):
    """Stands for SIGKILL: nothing may be written after it."""


class Mortal(Ledger):
    """Dies at its `life`-th write, before or after the write is committed."""

    life = 10**9
    after = False
    written = 0

    def _write(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        kind.written += 1
        if kind.written > kind.life or (kind.written == kind.life and not kind.after):
            raise Killed
        result = getattr(super(), name)(*args, **kwargs)
        if kind.written == kind.life:
            raise Killed
        return result


for _name in ("mark", "note", "propose", "put", "freeze", "keep_artifact", "result", "set_state", "pin"):
    setattr(Mortal, _name, lambda self, *args, _name=_name, **kwargs: self._write(_name, *args, **kwargs))


def mortal(dies_at: int, after: bool = False) -> type[Ledger]:
    """Returns a ledger that dies once, at that write."""
    return type("Doomed", (Mortal,), {"life": dies_at, "after": after})


def kill_until_complete(bed: Bed, lives: Iterable[int], after: bool = False) -> int:
    """Runs a study over and over, killed at later and later writes, and once more; returns how often it was killed."""
    deaths = 0
    for life in lives:
        try:
            bed.run(TRIALS, mortal(life, after))
        except Killed:
            deaths += 1
        else:
            break
    bed.run(TRIALS)
    check(bed)
    return deaths


def result_of(bed: Bed) -> dict[str, Any]:
    """Returns the study's report, but not how long it ran."""
    return {name: value for name, value in study_report(bed.store, "study").items() if name != "elapsed_s"}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return bed_of(tmp_path)


def check(bed: Bed, expected: int = TRIALS) -> None:
    study = studies.get(bed.store, "study")
    rows, log = trials.all(bed.store, study.id), all_events(bed.store, study.id)
    assert study.state is StudyState.COMPLETE
    assert [row.number for row in rows] == list(range(expected + len(bed.space.references.layouts())))
    assert all(row.status.terminal for row in rows), rows
    assert {row.status.state for row in rows if row.origin == "reference"} == {TrialState.COMPLETE}
    assert replay(bed.space, support_filter(bed.space), rows, log) == []
    with bed.store.read() as connection:
        firsts = connection.exec_driver_sql("SELECT result_key FROM result_use WHERE first").scalars().all()
    assert max(Counter(firsts).values()) == 1
    report = study_report(bed.store, "study")
    assert report["trials"]["proposed"] == expected
    assert report["trials"]["failed"] == report["trials"]["running"] == 0


def test_a_study_ends_with_a_front(bed: Bed) -> None:
    assert bed.run(TRIALS) is StudyState.COMPLETE
    check(bed)
    assert study_report(bed.store, "study")["front"]


def test_the_published_reference_is_measured_and_told_before_anything_is_trained(bed: Bed) -> None:
    bed.run(TRIALS)
    lines = [line for trial, line in bed.messages if trial is None and "reference, " in line]
    assert any(line.startswith("attention reference, ") for line in lines)
    first = next(line for line in lines if line.startswith("published reference, "))
    assert re.search(r" on local \(fake\): ttft [\d.]+ ms, decode_p50 [\d.]+ ms, peak_rss [\d.]+ MB$", first)
    assert bed.messages.index((None, first)) < [what for _, what in bed.messages].index("training")


def test_a_study_of_parallel_mixers_has_a_further_reference_beside_the_two(tmp_path: Path) -> None:
    pair = "d128 v256 ffn=swiglu:320 [C3&A2/1*3]"
    space = tiny_space(
        parallel=[["conv", "gqa"]], limits={}, references={**TINY["references"], "further": {"hybrid": pair}}
    )
    bed = bed_of(tmp_path, space)
    assert bed.run(TRIALS) is StudyState.COMPLETE
    check(bed)
    report = study_report(bed.store, "study")
    assert [row["name"] for row in report["references"]] == ["published", "attention", "hybrid"]
    (hybrid,) = (row for row in report["references"] if row["name"] == "hybrid")
    assert hybrid["layout"] == pair and hybrid["quality"]["value"] > 0
    assert pair not in [row["layout"] for row in report["ranking"]]
    assert any("&" in row["layout"] for row in report["ranking"])


def test_a_further_reference_may_be_measured_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants of the study are the same when it is resumed, and that reference is measured early."""
    further = {"hybrid": "d128 v256 ffn=swiglu:256 [C3 A2/1 C3]"}
    bed = bed_of(tmp_path, tiny_space(references={**TINY["references"], "further": further}))
    original = StageWork.measure

    async def measure(self: StageWork, trial: int, *options: Any) -> Any:
        while trial == 2 and studies.get(bed.store, "study").scales is None:
            await asyncio.sleep(0.01)
        return await original(self, trial, *options)

    with monkeypatch.context() as patch:
        patch.setattr(StageWork, "measure", measure)
        assert bed.run(2) is StudyState.COMPLETE
    assert bed.run(3) is StudyState.COMPLETE


def test_running_a_finished_study_again_changes_nothing(bed: Bed) -> None:
    bed.run(TRIALS)
    before = result_of(bed)
    count = len(all_events(bed.store, 1))
    assert bed.run(TRIALS) is StudyState.COMPLETE
    assert result_of(bed) == before
    added = [event.payload for event in all_events(bed.store, 1)[count:]]
    assert added == [{"state": "running"}, {"state": "complete"}]


def test_a_study_out_of_time_proposes_no_more_and_says_so(tmp_path: Path) -> None:
    space = tiny_space(search={**TINY["search"], "stop": {"hours": 1e-9}})
    bed = bed_of(tmp_path, space)
    assert bed.run(TRIALS) is StudyState.COMPLETE
    report = study_report(bed.store, "study")
    assert report["trials"]["proposed"] == 0
    assert report["ended"]["rule"] == "hours"
    assert report["hypervolume"] == 0.0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_study_survives_death_at_any_write(bed: Bed, after: bool) -> None:
    assert kill_until_complete(bed, range(3, 200, 7), after) > 5


def test_more_trials_can_be_added_later(bed: Bed) -> None:
    bed.run(2)
    bed.run(TRIALS)
    check(bed)


def test_a_trial_that_failed_for_no_reason_of_its_own_is_tried_again_on_resume(bed: Bed) -> None:
    bed.run(1)
    broken: list[Any] = []

    def fail(stage: str, spec: Mapping[str, Any]) -> None:
        """The first layout that is trained from now on cannot be."""
        if stage == "train":
            broken.append(spec["jobs"][0]["layout"])
            if spec["jobs"][0]["layout"] == broken[0]:
                raise InfrastructureFailed("a worker died")

    bed.compute.fail = fail
    bed.run(TRIALS)
    (failed,) = [row for row in trials.all(bed.store, 1) if row.status.state is TrialState.FAILED]
    assert failed.status.retryable
    assert "a worker died" in (failed.status.reason or "")
    bed.compute.fail = lambda stage, spec: None
    bed.run(TRIALS)
    check(bed)


def test_a_note_that_cannot_be_written_is_written_when_its_trial_is_tried_again(bed: Bed) -> None:
    failed: list[int] = []

    class Locked(Ledger):
        """Fails once, at the first quality of a candidate."""

        def note(self, trial: int | None, note: Note) -> None:
            if isinstance(note, QualityKnown) and trial is not None and trial >= 2 and not failed:
                failed.append(trial)
                raise InfrastructureFailed("the database is locked")
            super().note(trial, note)

    assert bed.run(TRIALS, Locked) is StudyState.COMPLETE
    check(bed)
    log = all_events(bed.store, 1)
    assert EventKind.RETRIED in [event.kind for event in log if event.trial == failed[0]]
    noted = [note.rung for event in log if event.trial == failed[0] and (note := QualityKnown.read(event.payload))]
    assert noted[0] == 0


def test_a_worker_that_dies_once_is_not_noticed(bed: Bed) -> None:
    died: set[str] = set()

    def fail(stage: str, spec: Mapping[str, Any]) -> None:
        if stage not in died:
            died.add(stage)
            raise InfrastructureFailed("a worker died")

    bed.compute.fail = fail
    bed.run(TRIALS)
    assert died == {"export", "train", "check_equivalence"}
    check(bed)


def test_a_host_on_which_nothing_works_ends_the_study(bed: Bed) -> None:
    bed.run(1)

    def fail(stage: str, spec: Mapping[str, Any]) -> None:
        raise InfrastructureFailed("the disk is full")

    bed.compute.fail = fail
    # Trials run side by side: a fourth may have failed before the third was looked at.
    with pytest.raises(InfrastructureFailed, match=r"[34] trials in a row.*the disk is full"):
        bed.run(30)
    proposed = len(trials.all(bed.store, 1)) - len(bed.space.references.layouts())
    assert proposed < 10
    bed.compute.fail = lambda stage, spec: None
    bed.run(proposed)
    check(bed, expected=proposed)


def test_a_reference_that_fails_ends_the_study(tmp_path: Path) -> None:
    space = tiny_space()
    attention = space.references.layouts()["attention"]
    bed = bed_of(tmp_path, space, faults={attention.id: "crash"})
    with pytest.raises(NasError, match=r"the attention reference failed.*signal 11"):
        bed.run(2)


def test_a_candidate_that_crashes_fails_alone(tmp_path: Path) -> None:
    space = tiny_space()
    first = bed_of(tmp_path, space)
    first.run(1)
    victim = next(row for row in trials.all(first.store, 1) if row.origin != "reference")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    bed = bed_of(fresh, space, faults={victim.layout_id: "crash"})
    assert bed.run(TRIALS) is StudyState.COMPLETE
    failed = [row for row in trials.all(bed.store, 1) if row.status.state is TrialState.FAILED]
    assert [row.layout_id for row in failed] == [victim.layout_id]
    assert not failed[0].status.retryable
    (measured,) = [row for row in results.of_trial(bed.store, 1, failed[0].number) if row.stage == "measure"]
    assert measured.payload["failed"]["reason"] == "crash"
    rows, log = trials.all(bed.store, 1), all_events(bed.store, 1)
    assert replay(space, support_filter(space), rows, log) == []


def test_the_end_of_a_trial_is_known_as_soon_as_its_task_is_done(bed: Bed) -> None:
    """Else those that wait for it would seem to wait for each other."""

    def fail(stage: str, spec: Mapping[str, Any]) -> None:
        raise CandidateFailed("export", "no such block")

    async def unfinished() -> Mapping[int, int]:
        ledger = bed.ledger()
        orchestrator = bed.orchestrator(ledger, TRIALS)
        orchestrator._start(ledger.propose(Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1*2]"), "proposal"))
        (task,) = orchestrator._all_tasks()
        while not task.done():
            await asyncio.sleep(0)
        return orchestrator._promotion._ladder.on_way

    bed.compute.fail = fail
    assert asyncio.run(unfinished()) == {}


def test_told_to_stop_it_stops_and_goes_on_later(bed: Bed) -> None:
    def stop(stage: str, spec: Mapping[str, Any]) -> None:
        if stage == "train":
            studies.set_desired_state(bed.store, 1, "stop")

    bed.compute.fail = stop
    assert bed.run(TRIALS) is StudyState.STOPPED
    assert studies.get(bed.store, "study").state is StudyState.STOPPED
    bed.compute.fail = lambda stage, spec: None
    studies.set_desired_state(bed.store, 1, "run")
    bed.run(TRIALS)
    check(bed)


def test_paused_it_proposes_nothing(bed: Bed) -> None:
    bed.ledger()
    studies.set_desired_state(bed.store, 1, "pause")
    for seconds in (1.5, 5.0, 30.0):  # as long as references take on a busy machine
        with pytest.raises(TimeoutError):
            bed.run(TRIALS, seconds=seconds)
        rows = trials.all(bed.store, 1)
        if all(row.status.terminal for row in rows):
            break
    assert {row.origin for row in rows} == {"reference"}
    assert all(row.status.state is TrialState.COMPLETE for row in rows)
    assert studies.get(bed.store, "study").state is StudyState.PAUSED


def test_paused_after_its_last_trial_it_begins_nothing_and_does_not_end(bed: Bed) -> None:
    bed.run(2)
    bed.messages.clear()
    studies.set_desired_state(bed.store, 1, "pause")
    with pytest.raises(TimeoutError):
        bed.run(2, seconds=2.0)
    assert studies.get(bed.store, "study").state is StudyState.PAUSED
    assert (None, "measuring the front again") not in bed.messages
    studies.set_desired_state(bed.store, 1, "run")
    assert bed.run(2) is StudyState.COMPLETE


def test_a_damaged_export_is_written_again_on_resume(bed: Bed) -> None:
    bed.run(2)
    damaged = artifacts.all(bed.store)[0].sha256
    artifacts.path(bed.store, damaged).write_bytes(b"rotten")
    bed.run(TRIALS)
    check(bed)
    assert artifacts.intact(bed.store, damaged)


def test_a_full_disk_loses_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.run(1)
    before = study_report(bed.store, "study")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(InfrastructureFailed, match=r"the disk is full at .*; free some with 'nas gc'"):
            bed.run(TRIALS)
    assert study_report(bed.store, "study")["front"] == before["front"]
    bed.run(TRIALS)
    check(bed)


def test_a_full_database_loses_nothing(bed: Bed) -> None:
    """SQLite's own limit of pages stands for the end of the disk."""
    bed.run(1)
    pages = [0]

    def limit(connection: Any, record: Any) -> None:
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {used + pages[0] if pages[0] else 1 << 30}")

    event.listen(bed.store.engine, "connect", limit)
    for pages[0] in (1, 4, 9):
        bed.store.close()
        with pytest.raises(InfrastructureFailed, match="database or disk is full"):
            bed.run(TRIALS)
    pages[0] = 0
    bed.store.close()
    bed.run(TRIALS)
    check(bed)


@pytest.fixture
def anchored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    """Estimates noise from anchors and re-scores its front; every training has luck of its own."""

    def lucky(job: TrainJob, spec: Mapping[str, Any]) -> Any:
        result = trained(job, spec)
        score = result.scores["lm/text"] + int(result.key[:6], 16) / 16**6 / 2
        return result.model_copy(update={"scores": {"lm/text": score}})

    trained = inline_study.trained
    monkeypatch.setattr(inline_study, "trained", lucky)
    quality = {**TINY["quality"], "anchors": {}, "rescore": {"seeds": [100, 101, 102], "p_front": 0.2}}
    return bed_of(tmp_path, tiny_space(quality=quality))


def test_noise_is_estimated_from_anchors_and_the_front_is_of_fresh_seeds(anchored: Bed) -> None:
    assert anchored.run(TRIALS) is StudyState.COMPLETE
    check(anchored)
    scales = studies.get(anchored.store, "study").scales
    assert scales is not None
    for scale in scales["quality"].values():
        assert scale["anchors"] == 5
        assert scale["spreads"]["lm"][1] == 8
        assert scale["spreads"]["lm"][0] > 2 * LM_PRIOR.sd, "the anchors' noise counts, not the prior"
    report = study_report(anchored.store, "study")
    assert all(row["rescored"] and row["quality"]["n_seeds"] == 3 for row in report["front"])
    rest = [row for row in report["ranking"] if not row["rescored"]]
    assert all(row["p_front"] < 0.2 and row["quality"]["n_seeds"] == 2 for row in rest)
    snapshot = Snapshots(anchored.store).get("study")
    (view,) = candidate_views(anchored.store, snapshot, [report["front"][0]["trial"]])
    assert view.objectives[0].rung == view.evaluations[-1].rung == "third, on fresh seeds"
    assert view.objectives[0].value == view.evaluations[-1].value != view.evaluations[-3].value
    sure = report["reliability"]
    assert sure["rescored"] == len(report["ranking"]) - len(rest)
    assert sure["seeds"] == 3
    assert 0 <= sure["front_noise"] <= 1 and sure["front_noise"] == snapshot.front_noise
    assert "re-scored on 3 fresh seeds" in sure["text"]
    assert sure["stated_sd"] == pytest.approx(scales["quality"]["third"]["spreads"]["lm"][0] / math.sqrt(3))
    sds = {row["quality"]["sd"] for row in report["front"]}
    assert all(min(sure["stated_sd"], sure["seen_sd"]) < sd < max(sure["stated_sd"], sure["seen_sd"]) for sd in sds)
    first = {event.trial: note.quality.value for event in all_events(anchored.store, 1)
             if (note := QualityKnown.read(event.payload)) and note.quality.rung == "third"}  # fmt: skip
    assert any(row["quality"]["value"] != first[row["trial"]] for row in report["front"])
    published = next(row for row in report["references"] if row["name"] == "published")
    assert published["quality"]["value"] == pytest.approx(1.0)


def test_a_study_that_is_killed_while_it_is_re_scored_goes_on(anchored: Bed) -> None:
    assert kill_until_complete(anchored, range(20, 400, 23)) > 3
    before, count = result_of(anchored), len(all_events(anchored.store, 1))
    anchored.run(TRIALS)
    assert result_of(anchored) == before
    assert len(all_events(anchored.store, 1)) == count + 2


def noisy_report(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each run take a time of its own, up to 4 % more than the fake's; the calibration stays as it is."""
    drawn, target = random.Random(0), bed.target()
    monkeypatch.setattr(Bed, "target", lambda self: target)
    exact = fake_runner.report

    def report(figures: Mapping[str, float], options: Namespace) -> dict[str, Any]:
        slow = {name: value * (1 + drawn.random() / 25) for name, value in figures.items()}
        return exact(slow, options)

    monkeypatch.setattr(fake_runner, "report", report)


def test_what_is_said_of_a_front_is_of_a_second_measurement(anchored: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = {
        **TINY["protocol"],
        "confirm_repetitions": 2,
        "remeasure": {"rounds": 3, "repetitions": 2, "members": 2},
    }
    bed = Bed(anchored.store, anchored.folder, anchored.space.model_validate(
        anchored.space.model_dump(mode="json") | {"protocol": protocol}
    ), anchored.runtime)  # fmt: skip
    noisy_report(bed, monkeypatch)
    assert bed.run(12) is StudyState.COMPLETE
    check(bed, 12)
    log, study = all_events(bed.store, 1), Snapshots(bed.store).get("study")
    record = study.record
    published = record.references["published"].trial.number
    assert 1 <= len(record.named) <= 2
    again = [(event.trial, note) for event in log if (note := Remeasured.read(event.payload)) is not None]
    assert {trial for trial, _ in again} == {published, *record.named}
    rounds = [[trial for trial, note in again if note.round == round_] for round_ in range(3)]
    assert all(sorted(row, key=str) == sorted([published, *record.named], key=str) for row in rounds), "all in each"
    front_ids = [event.id for event in log if event.payload.get("what") == "front named"]
    rescored = [event.id for event in log if event.payload.get("what") == "rescored"]
    assert front_ids[0] < min(rescored), "named before fresh seeds tell anything"
    keys = {row.result for _, note in again for row in note.measurements}
    first = {measurement.key for trial in record.named for measurement in record.records[trial].measurements.values()}
    assert len(keys) == 3 * (1 + len(record.named)) and not keys & first
    headline = study_report(bed.store, "study")["headline"]
    assert headline["second"] and headline["named"] == record.named[0] and headline["confidence"] == 0.95
    assert [gain["objective"] for gain in headline["gains"]] == ["quality", "latency", "memory"]
    (latency,) = (gain for gain in headline["gains"] if gain["objective"] == "latency")
    values = {trial: [note.measurements[0].figures["latency"].value for number, note in again if number == trial]
              for trial in (published, record.named[0])}  # fmt: skip
    ratio = geometric_mean(values[record.named[0]]) / geometric_mean(values[published])
    assert latency["change"] == pytest.approx(ratio - 1)
    assert latency["low"] < latency["change"] < latency["high"]
    count = len(log)
    bed.run(12)
    assert len(all_events(bed.store, 1)) == count + 2, "resumed, it does nothing again"


def test_a_layout_that_cannot_be_measured_again_leaves_the_others(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageWork.measure

    async def measure(
        self: StageWork, trial: int, artifact: Any, where: Any, repetitions: int, replicate: int = 0
    ) -> Any:
        if replicate >= 2 and trial == max(named):
            raise CandidateFailed("crashed", "signal 11")
        return await original(self, trial, artifact, where, repetitions, replicate)

    bed.run(8)
    named = StudySnapshot(read_study(bed.store, "study")).record.named
    assert len(named) == 2
    with bed.store.write() as connection:
        connection.exec_driver_sql("DELETE FROM event WHERE payload LIKE '%remeasured%'")
    monkeypatch.setattr(StageWork, "measure", measure)
    assert bed.run(8) is StudyState.COMPLETE
    assert any("was not measured again: signal 11" in line for _, line in bed.messages)
    record = StudySnapshot(read_study(bed.store, "study")).record
    assert [*second_gains(record)] == [number for number in named if number != max(named)]


def test_one_that_cannot_be_measured_again_keeps_no_other_device_busy() -> None:
    cancelled = list[str]()

    class OnTwo(Remeasuring):
        async def _figures(self, number: int, key: Any, round_: int) -> Any:
            if key == "second":
                raise CandidateFailed("crash", "signal 11")
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(key)

    async def measure() -> tuple[int | None, list[str]]:
        work = Namespace(space=tiny_space(), measurement_keys=lambda workloads: ["first", "second"])
        number = await OnTwo(cast(Any, Namespace(work=work)), {}, lambda line: None)._measure(3, 0)
        return number, [*cancelled]

    assert asyncio.run(measure()) == (3, ["first"])


def test_a_space_may_leave_the_second_measurement_out(tmp_path: Path) -> None:
    bed = bed_of(tmp_path, tiny_space(protocol={**TINY["protocol"], "remeasure": None}))
    assert bed.run(TRIALS) is StudyState.COMPLETE
    record = StudySnapshot(read_study(bed.store, "study")).record
    assert record.named == ()
    assert not study_report(bed.store, "study")["headline"]["second"]


def test_an_anchor_that_cannot_be_trained_is_left_out(anchored: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = CorpusRef(source="default", hash="0" * 64)
    references = {
        Layout.from_json(job.layout).id
        for layout in anchored.space.references.layouts().values()
        for rung in range(len(anchored.space.quality.rungs))
        for job in rung_jobs(anchored.space.quality, rung, layout, corpus)
    }

    def of_good_layouts(job: TrainJob, spec: Mapping[str, Any]) -> Any:
        if job.seed == 2 and Layout.from_json(job.layout).id not in references:  # a seed of anchors alone
            raise CandidateFailed("not_finite", "the loss is not finite")
        return trained(job, spec)

    trained = inline_study.trained
    monkeypatch.setattr(inline_study, "trained", of_good_layouts)
    assert anchored.run(TRIALS) is StudyState.COMPLETE
    scales = studies.get(anchored.store, "study").scales
    assert scales is not None
    assert {scale["anchors"] for scale in scales["quality"].values()} == {2}


@pytest.fixture
def recalling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layouts are better at in text, they recall worse; each training has luck of its own."""

    def recalled(job: TrainJob, spec: Mapping[str, Any]) -> Any:
        result = trained(job, spec)
        text, luck = result.scores["lm/text"], int(result.key[:6], 16) / 16**6 / 2
        return result.model_copy(update={"scores": {"lm/text": text, "lm/recall": 3.0 - text + luck}})

    trained = inline_study.trained
    monkeypatch.setattr(inline_study, "trained", recalled)


def recall_bed(tmp_path: Path, **quality: Any) -> Bed:
    """All trials climb to the top, where a share of the published layout's recall is asked for."""
    rungs = [{name: value for name, value in rung.items() if name != "keep"} for rung in TINY["quality"]["rungs"]]
    budgets = [*TINY["budgets"], {"metric": "quality.recall", "min": "0.97x"}]
    return bed_of(tmp_path, tiny_space(budgets=budgets, quality={**TINY["quality"], "rungs": rungs, **quality}))


RECALLED = "quality.recall on the proxy"


def recall_check(row: Mapping[str, Any]) -> Mapping[str, Any]:
    (budget,) = (check for check in row["budgets"] if check["budget"] == "quality.recall")
    return dict(budget)


@pytest.mark.usefixtures("recalling")
def test_a_candidate_that_recalls_too_little_at_the_top_is_infeasible(tmp_path: Path) -> None:
    bed = recall_bed(tmp_path)
    assert bed.run(10) is StudyState.COMPLETE
    check(bed, 10)
    study = StudySnapshot(read_study(bed.store, "study"))
    report = study_report(bed.store, "study")
    broken = [
        record for record in study.records.values()
        if record.trial.status.state is TrialState.INFEASIBLE and record.quality is not None
    ]  # fmt: skip
    assert broken and report["ranking"]
    for record in broken:
        assert record.quality is not None and record.quality.recall is not None and record.quality.recall < 0.97
        assert record.trial.status.reason == f"{RECALLED}: {record.quality.recall:.4g}, limit 0.97"
        assert record.observation is not None and record.observation.status == "infeasible"
        assert record.observation.constraints[RECALLED] == pytest.approx(0.97 - record.quality.recall)
        assert not any(
            event.kind == "confirming" for event in all_events(bed.store, 1) if event.trial == record.trial.number
        )
    assert {row["trial"] for row in report["ranking"]}.isdisjoint(record.trial.number for record in broken)
    for row in report["ranking"]:
        assert row["quality"]["recall"] >= 0.97 and recall_check(row)["verdict"] == "feasible"
    assert min(record.rungs["first"].recall for record in study.records.values() if record.rungs) < 0.97, (
        "which stopped none"
    )
    (row,) = (budget for budget in report["budgets"] if budget["name"] == "quality.recall")
    assert (row["limit"], row["ratio"], row["device"], row["written"]) == (0.97, 0.97, "", "0.97x")
    (view,) = candidate_views(bed.store, Snapshots(bed.store).get("study"), [broken[0].trial.number])
    assert {budget.name: budget.verdict for budget in view.budgets}[RECALLED] == "infeasible"


def fresh_bed(tmp_path: Path) -> Bed:
    return recall_bed(tmp_path, rescore={"seeds": [100, 101, 102], "p_front": 0.2})


@pytest.mark.usefixtures("recalling")
def test_fresh_seeds_decide_about_recall(tmp_path: Path) -> None:
    bed = fresh_bed(tmp_path)
    assert bed.run(10) is StudyState.COMPLETE
    check(bed, 10)
    study = StudySnapshot(read_study(bed.store, "study"))
    fallen = [
        record for record in study.records.values()
        if record.rescored is not None and record.trial.status.state is TrialState.INFEASIBLE
    ]  # fmt: skip
    assert fallen
    for record in fallen:
        fresh = record.quality.recall if record.quality is not None else None
        assert fresh is not None and fresh < 0.97
        assert record.trial.status.reason == f"on fresh seeds, {RECALLED}: {fresh:.4g}, limit 0.97"
        assert record.trial.number in [done.trial for done in study.record.log.completions], "it was complete before"
        assert record.trial.number not in study.counted
        assert record.observation is not None and record.observation.status == "infeasible"
    report = study_report(bed.store, "study")
    assert report["front"] and all(row["rescored"] for row in report["front"])
    assert all(row["quality"]["recall"] >= 0.97 for row in report["front"])
    assert report["hypervolume"] == pytest.approx(
        front_hypervolume({trial: study.counted[trial] for trial in study.counted}, study.reference_point or [])
    )


def test_recall_of_what_is_rescored_decides_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kind(job: TrainJob, spec: Mapping[str, Any]) -> Any:
        result = trained(job, spec)
        if not isinstance(job.run, TaskRun):
            return result
        return result.model_copy(update={"scores": {"task/automata": 3.0 - result.scores["lm/text"]}})

    trained = inline_study.trained
    monkeypatch.setattr(inline_study, "trained", by_kind)
    tasks = {"automata": {"steps": 12, "seeds": [100, 101]}}
    bed = recall_bed(tmp_path, rescore={"seeds": [100, 101, 102], "p_front": 0.2, "tasks": tasks})
    assert bed.run(10) is StudyState.COMPLETE
    check(bed, 10)
    records = StudySnapshot(read_study(bed.store, "study")).records.values()
    assert all(quality.recall is None for record in records for quality in record.rungs.values())
    again = [record.rescored for record in records if record.rescored is not None]
    assert {frozenset(quality.per_seed) for quality in again} == {frozenset({100, 101, 102})}
    fallen = [record for record in records if record.rescored and record.trial.status.state is TrialState.INFEASIBLE]
    assert fallen and all(f"on fresh seeds, {RECALLED}" in (record.trial.status.reason or "") for record in fallen)
    report = study_report(bed.store, "study")
    assert report["front"] and all(row["quality"]["recall"] >= 0.97 for row in report["front"])


@pytest.mark.usefixtures("recalling")
def test_a_study_with_a_budget_on_recall_is_killed_and_goes_on(tmp_path: Path) -> None:
    bed = fresh_bed(tmp_path)
    assert kill_until_complete(bed, range(20, 400, 41)) > 3
    before, count = result_of(bed), len(all_events(bed.store, 1))
    bed.run(TRIALS)
    assert result_of(bed) == before
    assert len(all_events(bed.store, 1)) == count + 2


WITH_RECALL = [*TINY["objectives"], {"name": "recall", "metric": "quality.recall"}]


@pytest.mark.parametrize("make", [recall_bed, lambda folder: bed_of(folder, tiny_space(objectives=WITH_RECALL))])
def test_recall_as_a_budget_or_an_objective_needs_a_group_of_recall(
    tmp_path: Path, make: Callable[[Path], Bed]
) -> None:
    with pytest.raises(NasError, match="no group of recall that counts"):
        make(tmp_path).run(TRIALS)


@pytest.mark.usefixtures("recalling")
def test_recall_is_an_axis_of_its_own(tmp_path: Path) -> None:
    bed = bed_of(tmp_path, tiny_space(objectives=WITH_RECALL))
    assert bed.run(TRIALS) is StudyState.COMPLETE
    check(bed)
    report = study_report(bed.store, "study")
    assert report["reference_point"].keys() == {"quality", "latency", "memory", "recall"}
    assert report["ranking"]
    for row in report["ranking"]:
        assert row["objectives"]["recall"] == pytest.approx(row["quality"]["per_group"]["lm/recall"])
        assert row["coordinates"]["recall"] == -row["objectives"]["recall"]


def test_quality_is_the_first_coordinate_wherever_the_space_has_it() -> None:
    space = tiny_space(objectives=WITH_RECALL[::-1])
    run = TrialRun(0, Layout.parse(TINY["references"]["published"]), None)
    run.quality = Quality(rung="third", value=1.02, per_group={}, sd=0.01, n_seeds=2, recall=0.9)
    assert Scales(space, cast(Any, None)).coordinates(run) == (-1.02, -0.9, math.inf, math.inf)
