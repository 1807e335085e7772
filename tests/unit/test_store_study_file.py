"""Exported studies: they come back whole, and nothing in a file is believed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from exhaustive import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy import select
from store_support import StillClock, add_device, break_down, key, new_study, open_store, proposal, put

from nas.core.errors import InvalidInput, UnknownName
from nas.core.trial import EventKind
from nas.infra.store import archive, devices, events, leases, outcomes, results, studies, trials
from nas.infra.store.archive import Header, export_study
from nas.infra.store.jobs import MAX_FAILURES
from nas.infra.store.models import attempt
from nas.infra.store.rows import Health, JobState, Study, StudyState
from nas.infra.store.store import Store

Lines = list[dict[str, Any]]


class Anything:
    """Checks nothing: what the JSON in records must be is not the store's affair."""

    def header(self, header: Header) -> None: ...

    def record(self, record: BaseModel) -> None: ...

    def whole(self, study: int) -> None: ...


def import_study(store: Store, source: io.StringIO, **options: Any) -> Study:
    return archive.import_study(store, source, Anything(), **options)


def filled(store: Store) -> int:
    """A study with something of everything."""
    study = new_study(store).id
    studies.set_state(store, study, StudyState.RUNNING)
    trials.propose(
        store,
        study,
        [proposal(32, origin="reference"), proposal(64, parents=(0,), operator="mutate", record={"ehvi": 0.1})],
    )
    studies.freeze_reference(store, study, {"quality": 0.5})
    for kind in (EventKind.EXPORTED, EventKind.MEASURING, EventKind.GATED_IN):
        trials.add_event(store, study, 0, kind)
    trials.add_event(store, study, 0, EventKind.TRAINING, {"rung": 0})
    trials.add_event(store, study, 1, EventKind.FAILED, {"reason": "device", "retryable": True})
    results.put(store, key("m"), "measure", {"ms": 1.5}, seconds=3, trial=(study, 0))
    results.use(store, key("m"), (study, 1))
    outcomes.record_attempt(store, "invalid", "throttled", stage="measure", study=study, trial=1, payload={"t": 90})
    return study


def exported(store: Store, study: int) -> str:
    out = io.StringIO()
    lines = export_study(store, study, out)
    assert lines == out.getvalue().count("\n")
    return out.getvalue()


@pytest.fixture
def text(store: Store) -> str:
    return exported(store, filled(store))


def lines(text: str) -> Lines:
    return [json.loads(line) for line in text.splitlines()]


def to_text(lines: Lines) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.sql
def test_a_study_comes_back_whole(store: Store, text: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = open_store(elsewhere, StillClock(5.0))
    new_study(other, "unrelated")
    there = import_study(other, io.StringIO(text), trust_results=True)
    here = studies.get(store, "first")
    assert (there.name, there.space, there.proposer, there.created) == ("first", here.space, here.proposer, 1000.0)
    assert (there.state, there.desired_state) == (StudyState.PAUSED, "pause")
    assert there.reference_point == here.reference_point
    for mine, theirs in zip(trials.all(store, here.id), trials.all(other, there.id), strict=True):
        assert (mine.layout_id, mine.origin, mine.parents, mine.status) == (
            theirs.layout_id,
            theirs.origin,
            theirs.parents,
            theirs.status,
        )
    for trial in trials.all(store, here.id):
        kept = [results.of_trial(each, study.id, trial.number) for each, study in ((other, there), (store, here))]
        assert kept[0] == kept[1]
    assert results.stage_seconds(other, there.id) == {"measure": 3.0}
    with other.read() as connection:
        wanted = select(attempt.c.message, attempt.c.trial).where(attempt.c.study == there.id)
        assert [tuple(row) for row in connection.execute(wanted)] == [("throttled", 1)]
    log = [(event.kind, event.trial, event.payload, event.at) for event in events.since(store, here.id)]
    assert log == [(event.kind, event.trial, event.payload, event.at) for event in events.since(other, there.id)]
    again = lines(exported(other, there.id))
    assert again[1:] == lines(text)[1:]
    leases.acquire(other, there.id, "me")
    trials.add_event(other, there.id, 1, EventKind.RETRIED)
    assert [trial.number for trial in trials.propose(other, there.id, [proposal(96)])] == [2]


def test_figures_of_a_file_are_never_found_by_other_studies(store: Store, text: str, tmp_path: Path) -> None:
    forged = text.replace('"ms":1.5', '"ms":0.1')
    assert forged != text
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = open_store(elsewhere)
    there = import_study(other, io.StringIO(forged))
    assert [result.payload for result in results.of_trial(other, there.id, 0)] == [{"ms": 0.1}]
    assert results.get(other, key("m")) is None
    import_study(store, io.StringIO(forged), name="copy", trust_results=True)
    mine = results.get(store, key("m"))
    assert mine is not None and mine.payload == {"ms": 1.5}


@pytest.mark.sql
@pytest.mark.parametrize("trust", [False, True])
def test_attempts_of_a_file_count_for_no_other_study(tmp_path: Path, trust: bool) -> None:
    """Somebody who knows the ids of jobs here exports failures of them."""
    clock = StillClock()
    store = open_store(tmp_path, clock)
    add_device(store)
    devices.set_health(store, "box", Health.GOOD)
    study = new_study(store, "genuine").id
    trials.propose(store, study, [proposal(32)])
    job = put(store, "m", trial=(study, 0))
    records = lines(exported(store, study))
    forged = {
        "kind": "infrastructure",
        "message": "crash",
        "at": 900.0,
        "stage": "measure",
        "trial": 0,
        "payload": None,
    }
    forged |= {"job": job.id, "device": "box", "result_key": job.result_key}
    records[-1:] = [{"attempt": forged}] * MAX_FAILURES + [{"end": len(records) - 1 + MAX_FAILURES}]
    import_study(store, io.StringIO(to_text(records)), name="copy", trust_results=trust)
    assert outcomes.attempts_of_key(store, job.result_key) == []
    failed = break_down(store, clock)
    assert (failed.id, failed.state, failed.blame) == (job.id, JobState.QUEUED, None)


def test_names_are_checked(store: Store, text: str) -> None:
    with pytest.raises(InvalidInput, match="exists"):
        import_study(store, io.StringIO(text))
    with pytest.raises(InvalidInput, match="no study name"):
        import_study(store, io.StringIO(text), name="../x")
    with pytest.raises(UnknownName):
        export_study(store, 99, io.StringIO())


def drop(n: int) -> Callable[[Lines], object]:
    return lambda lines: lines.pop(n)


def change(n: int, **values: Any) -> Callable[[Lines], object]:
    """Changes values of the record in line `n` (0: the header)."""

    def apply(lines: Lines) -> None:
        record = lines[n] if n == 0 else next(iter(lines[n].values()))
        record.update(values)

    return apply


TAMPERED = {
    "empty": (lambda lines: lines.clear(), "empty"),
    "cut short": (drop(-1), "cut short"),
    "a line is missing": (drop(-2), "should have"),
    "continues": (lambda lines: lines.append(lines[-2]), "after the end"),
    "another format": (change(0, format="x"), "line 1: format"),
    "a newer version": (change(0, v=2), "line 1: v"),
    "unknown key": (change(0, colour="red"), "colour"),
    "seed is text": (change(0, seed="1"), "seed"),
    "seed too large": (change(0, seed=1 << 70), "too large"),
    "space is a list": (change(0, space=[]), "space"),
    "two records in a line": (lambda lines: lines[1].update(lines[3]), "holds one of"),
    "gap in numbers": (change(2, number=5), "expected trial 1, found 5"),
    "another layout": (change(2, layout=proposal(96).layout), "not the one that its id names"),
    "no layout": (change(2, layout={"v": 1, "d_model": 64, "vocab": 256, "layers": 3}), "line 3"),
    "layout of text": (change(2, layout={"v": 1, "d_model": "64", "vocab": 256, "layers": []}), "line 3"),
    "layout twice": (
        change(2, layout=proposal(32).layout, layout_id=proposal(32).layout_id),
        "line 3: trial 1: an earlier trial",
    ),
    "illegal event": (change(4, kind="complete"), "first event"),
    "unknown event": (change(4, kind="exploded"), "line 5: event.kind"),
    "event of no trial": (change(4, trial=None), "only 'study' has no trial"),
    "event of another trial": (change(4, trial=7), "no trial 7"),
    "rung of text": (change(10, payload={"rung": "high"}), "line 11"),
    "no such result": (change(-4, trial=7), "no trial 7"),
    "unknown result": (change(-4, result_key=key("?")), "not in the file"),
    "hash of another form": (change(-4, result_key="../../x"), "result_key"),
    "attempt of no trial": (change(-2, trial=9), "no trial 9"),
}


@pytest.mark.parametrize(("tamper", "message"), TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_file_is_refused_whole(
    store: Store, text: str, tamper: Callable[[Lines], object], message: str
) -> None:
    records = lines(text)
    tamper(records)
    with pytest.raises(InvalidInput, match=message):
        import_study(store, io.StringIO(to_text(records)), name="copy")
    assert [study.name for study in studies.all(store)] == ["first"]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "NaN",
        '{"end": NaN}',
        '{"end": 1e400}',
        "nonsense",
        '{"end": ' + "9" * 5000 + "}",
        '"\\ud800"',
        "",
    ],
)
def test_what_is_not_json_is_refused(store: Store, text: str, line: str) -> None:
    with pytest.raises(InvalidInput, match=r"line 2|cut short"):
        import_study(store, io.StringIO(text.splitlines()[0] + "\n" + line + "\n"), name="copy")
    assert len(studies.all(store)) == 1


@pytest.mark.sql
def test_text_that_no_database_can_hold_is_refused(store: Store, text: str) -> None:
    records = lines(text)
    records[-2]["attempt"]["message"] = "\ud800"
    with pytest.raises(InvalidInput, match="line"):
        import_study(store, io.StringIO(to_text(records)), name="copy")


def test_lines_are_limited(store: Store, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as small:
        small.setattr(archive, "MAX_LINE", max(map(len, text.splitlines())) - 1)
        with pytest.raises(InvalidInput, match="too long"):
            import_study(store, io.StringIO(text), name="copy")
    import_study(store, io.StringIO(text), name="copy")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_is_imported_or_refused_as_invalid(text: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        store = open_store(Path(folder))
        records = lines(text)
        line = data.draw(st.integers(0, len(records) - 2))
        record = records[line] if line == 0 else next(iter(records[line].values()))
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(JSON)
        try:
            import_study(store, io.StringIO(to_text(records)), name="copy")
        except InvalidInput:
            assert studies.all(store) == []
        else:
            assert len(trials.all(store, studies.get(store, "copy").id)) == 2
        store.close()
