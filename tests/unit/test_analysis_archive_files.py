"""Files of archives: a study comes back whole, and nothing in a file is believed."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from store_support import StillClock, add_device, break_down, key, new_study, open_store, proposal, put
from test_analysis_archive import Line, genuine, line_of, of_stage, read_in, recorded, set_in, to_text

from nas.core.errors import InvalidInput, UnknownName
from nas.core.trial import EventKind
from nas.infra.store import devices, events, leases, outcomes, results, studies, trials
from nas.infra.store.jobs import MAX_FAILURES
from nas.infra.store.models import attempt
from nas.infra.store.rows import Health, JobState, StudyState
from nas.infra.store.store import Store
from nas.search.analysis import archive
from nas.search.analysis.archive import export_study, import_study

KINDS = ("trial", "event", "result", "use", "attempt", "end")


def exported(store: Store, name: str) -> list[Line]:
    out = io.BytesIO()
    count = export_study(store, studies.get(store, name).id, out)
    lines = [json.loads(line) for line in gzip.decompress(out.getvalue()).splitlines()]
    assert count == len(lines)
    return lines


def without_attempts(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "attempt" not in line]


@pytest.mark.sql
def test_a_study_comes_back_whole(store: Store) -> None:
    lines = genuine()
    study = read_in(store, lines, name="copy", trust_results=True)
    assert (study.state, study.desired_state) == (StudyState.COMPLETE, "pause")
    again = exported(store, "copy")
    assert again[0] == lines[0] | {"name": "copy"}
    # Events that were added to the lines stand behind the results there; attempts have other names of jobs.
    inside = sorted(lines[1:], key=lambda line: KINDS.index(next(iter(line))))
    assert without_attempts(again[1:]) == without_attempts(inside)
    assert {trial.status.state.value for trial in trials.all(store, study.id)} == {"complete", "stopped"}
    assert results.stage_seconds(store, study.id)["measure"] > 0
    with store.read() as connection:
        query = select(attempt.c.message, attempt.c.trial).where(attempt.c.study == study.id)
        assert [tuple(row) for row in connection.execute(query)] == [("throttled", 1)]
    leases.acquire(store, study.id, "me")
    assert [trial.number for trial in trials.propose(store, study.id, [proposal(96)])] == [7]


def test_a_study_that_ran_is_paused(store: Store) -> None:
    lines = genuine()
    lines[0]["state"] = "running"
    assert read_in(store, lines).state is StudyState.PAUSED


def test_compressed_and_plain_files_are_the_same_study(store: Store, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text(to_text(genuine()))
    (tmp_path / "packed").write_bytes(gzip.compress(to_text(genuine()).encode()))
    for name in ("plain", "packed"):
        with (tmp_path / name).open("rb") as file:
            import_study(store, file, name=name, trust_results=True)
    plain, packed = (exported(store, name)[1:] for name in ("plain", "packed"))
    assert without_attempts(plain) == without_attempts(packed)


def test_a_pipe_is_read(store: Store) -> None:
    packed = gzip.compress(to_text(genuine()).encode())
    source, target = os.pipe()
    with ThreadPoolExecutor() as threads, os.fdopen(source, "rb") as reader:
        written = threads.submit(lambda: Path(f"/dev/fd/{target}").write_bytes(packed) and os.close(target))
        assert import_study(store, reader).name == genuine()[0]["name"]
        written.result()


def test_figures_of_a_file_are_never_found_by_other_studies(store: Store) -> None:
    lines = genuine()
    key = line_of(lines, of_stage("measure"))["result"]["result_key"]
    read_in(store, lines, name="untrusted")
    assert results.get(store, key) is None
    read_in(store, lines, name="trusted", trust_results=True)
    genuine_result = results.get(store, key)
    set_in(of_stage("measure"), "result", "seconds", value=99.0)(lines)
    read_in(store, lines, name="forged", trust_results=True)
    assert results.get(store, key) == genuine_result


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
    forged = {
        "kind": "infrastructure",
        "message": "crash",
        "at": 900.0,
        "stage": "measure",
        "trial": 0,
        "payload": None,
        "job": job.id,
        "device": "box",
        "result_key": job.result_key,
    }
    lines = genuine()[:-1] + [{"attempt": forged}] * MAX_FAILURES
    read_in(store, [*lines, {"end": len(lines)}], name="copy", trust_results=trust)
    assert outcomes.attempts_of_key(store, job.result_key) == []
    failed = break_down(store, clock)
    assert (failed.id, failed.state, failed.blame) == (job.id, JobState.QUEUED, None)


def test_names_are_checked(store: Store) -> None:
    read_in(store, recorded())
    with pytest.raises(InvalidInput, match="exists"):
        read_in(store, recorded())
    with pytest.raises(InvalidInput, match="no study name"):
        read_in(store, recorded(), name="../x")
    with pytest.raises(UnknownName):
        export_study(store, 99, io.BytesIO())


def trial_line(number: int) -> Callable[[Line], bool]:
    return lambda line: "trial" in line and line["trial"]["number"] == number


def record_of(kind: str) -> Callable[[Line], bool]:
    return lambda line: kind in line


def of_trial(line: Line) -> bool:
    return "event" in line and line["event"]["trial"] is not None


def change(chosen: Callable[[Line], bool], **values: Any) -> Callable[[list[Line]], None]:
    """Changes values of the first record that is chosen."""

    def apply(lines: list[Line]) -> None:
        line = line_of(lines, chosen)
        (line if "format" in line else next(iter(line.values()))).update(values)

    return apply


def layout_of(number: int) -> dict[str, Any]:
    row = line_of(recorded(), trial_line(number))["trial"]
    return {"layout": row["layout"], "layout_id": row["layout_id"]}


MALFORMED_LAYOUT = {"v": 1, "d_model": 64, "vocab": 256, "layers": 3}
TAMPERED: dict[str, tuple[Callable[[list[Line]], object], str]] = {
    "empty": (lambda lines: lines.clear(), "empty"),
    "cut short": (lambda lines: lines.pop(), "cut short"),
    "a line is missing": (lambda lines: lines.pop(-2), "should have"),
    "continues": (lambda lines: lines.append(lines[-2]), "after the end"),
    "another format": (change(record_of("format"), format="x"), "line 1: format"),
    "another version": (change(record_of("format"), v=3), "line 1: v"),
    "unknown key": (change(record_of("format"), colour="red"), "colour"),
    "seed is text": (change(record_of("format"), seed="1"), "seed"),
    "seed too large": (change(record_of("format"), seed=1 << 70), "too large"),
    "space is a list": (change(record_of("format"), space=[]), "space"),
    "two records in a line": (lambda lines: lines[1].update(lines[-2]), "holds one of"),
    "gap in numbers": (change(trial_line(1), number=5), "expected trial 1, found 5"),
    "another layout": (lambda lines: change(trial_line(1), layout=layout_of(3)["layout"])(lines), "that its id names"),
    "no layout": (change(trial_line(1), layout=MALFORMED_LAYOUT), "line 3"),
    "layout of text": (change(trial_line(1), layout=MALFORMED_LAYOUT | {"d_model": "64", "layers": []}), "line 3"),
    "layout twice": (
        lambda lines: change(trial_line(1), **layout_of(0))(lines),
        "line 3: trial 1: an earlier trial",
    ),
    "illegal event": (change(of_trial, kind="complete"), "first event"),
    "unknown event": (change(record_of("event"), kind="exploded"), "event.kind"),
    "event of no trial": (
        change(of_trial, trial=None),
        "only 'study' has no trial",
    ),
    "event of another trial": (change(record_of("event"), trial=70, kind="proposed"), "no trial 70"),
    "rung of text": (change(record_of("event"), payload={"rung": "high"}), "rung"),
    "use of no trial": (change(record_of("use"), trial=70), "no trial 70"),
    "unknown result": (change(record_of("use"), result_key=key("?")), "not in the file"),
    "hash of another form": (change(record_of("use"), result_key="../../x"), "result_key"),
    "attempt of no trial": (change(record_of("attempt"), trial=90), "no trial 90"),
    "text that no database can hold": (change(record_of("attempt"), message="\ud800"), "line"),
}


@pytest.mark.parametrize(("tamper", "message"), TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_file_is_refused_whole(store: Store, tamper: Callable[[list[Line]], object], message: str) -> None:
    lines = genuine()
    tamper(lines)
    with pytest.raises(InvalidInput, match=message):
        read_in(store, lines)
    assert studies.all(store) == []


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"NaN",
        b'{"end": NaN}',
        b'{"end": 1e400}',
        b"nonsense",
        b'{"end": ' + b"9" * 5000 + b"}",
        b'"\\ud800"',
        b"\xff\xfe",
        b"",
    ],
)
def test_what_is_not_json_is_refused(store: Store, line: bytes) -> None:
    text = to_text(recorded()[:1]).encode() + line + b"\n"
    with pytest.raises(InvalidInput, match=r"line 2|cut short"):
        import_study(store, io.BytesIO(text))
    assert studies.all(store) == []


def test_a_line_is_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_LINE", max(len(json.dumps(line)) for line in recorded()))
    with pytest.raises(InvalidInput, match="line is too long"):
        read_in(store, recorded())


def test_a_small_file_with_a_huge_content_is_refused_without_reading_it_all(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    use = json.dumps({"result": line_of(recorded(), of_stage("train"))["result"]}) + "\n"
    bomb = to_text(recorded()[:1]) + use * (30 * (1 << 20) // len(use))
    (tmp_path / "bomb").write_bytes(gzip.compress(bomb.encode()))
    assert (tmp_path / "bomb").stat().st_size < 1 << 20
    with (tmp_path / "bomb").open("rb") as file:
        with pytest.raises(InvalidInput, match=r"bomb:\d+: the file is too long: up to 1 MiB are read, decompressed"):
            import_study(store, file)
        assert file.tell() < (tmp_path / "bomb").stat().st_size / 2
    assert studies.all(store) == []


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[:-200], lambda packed: packed[:500] + b"x" * 50 + packed[550:]]
)
def test_a_damaged_compressed_file_is_refused(store: Store, damage: Callable[[bytes], bytes]) -> None:
    packed = gzip.compress(to_text(recorded()).encode())
    with pytest.raises(InvalidInput, match="cannot be decompressed, it is damaged or was cut short"):
        import_study(store, io.BytesIO(damage(packed)))
    assert studies.all(store) == []


def test_events_keep_their_order(store: Store) -> None:
    study = read_in(store, recorded())
    log = events.since(store, study.id)
    expected = [line["event"] for line in recorded() if "event" in line]
    assert [(event.kind, event.trial, event.payload) for event in log] == [
        (EventKind(event["kind"]), event["trial"], event["payload"]) for event in expected
    ]
