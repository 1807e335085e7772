"""Names and payloads of a study's log: what is written, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.trial import Event, EventKind
from nas.search.analysis.record import StudyLog
from nas.search.proposers import Observation
from nas.search.study.events import (
    AnchorsChosen,
    Calibrated,
    Closed,
    CorpusUsed,
    Expected,
    Launched,
    Marked,
    Named,
    Note,
    Observed,
    Profiled,
    QualityKnown,
    ReferencePointFixed,
    Remeasured,
    Rescored,
    Spent,
    WarmStarted,
    calibrated_devices,
    elapsed,
    ending,
    marks,
)

LAYOUT = Layout.parse("d64 v256 ffn=swiglu:96 [C3 A2/1]")
OBSERVATION = Observation(LAYOUT, "complete", {"quality": -1.0}, {"ttft@chat": -0.1}, 2, {"quality": 0.1}).to_json()
QUALITY = {"rung": "top", "value": 1.0, "per_group": {"lm": 1.0}, "sd": 0.1, "n_seeds": 2}
CALIBRATED = {"what": "calibrated", "device": "local", "runtime": "fake", "id": "box", "build": "b", "ms": 3.5}
TIMES = {
    "times": {
        "chat": {
            "ttft_ms": 1.5, "decode_ms": 0.1, "run_ms": 3.5, "decode_mean_ms": 0.1, "decode_p95_ms": None,
            "log_sd": {"ttft": 0.01},
        }
    }
}  # fmt: skip
REQUEST = {"prompt": 32, "gen": 4, "threads": 1}
SPENT = {"prefill_ms": 0.5, "prefill_share": 1.0, "decode_ms": 0.25, "decode_share": 1.0}
PHASE = {"whole_ms": 1.5, "profiled_ms": 2.0, "sum_ms": 1.5}
TIMED = {
    "prefill": PHASE, "decode": PHASE, "parts": [{**SPENT, "layer": 0, "part": "mixer", "block": "C3"}],
    "operators": [{**SPENT, "operator": "MUL_MAT"}], "foreign_cpu": None,
}  # fmt: skip
STORED: list[tuple[type[Note], dict[str, Any]]] = [
    (Launched, {"what": "launched", "trials": 5, "warm_start": ["first"]}),
    (Calibrated, {**CALIBRATED, "protocol": 3, "conditions": {"page_size": 4096}, **TIMES}),
    (CorpusUsed, {"what": "corpus", "hash": "0" * 64, "versions": {"trainer": 1}, "made_of": {"python": "3.11.7"}}),
    (Observed, {"what": "observed", "observation": OBSERVATION}),
    (ReferencePointFixed, {"what": "reference point", "point": {"quality": -0.5}}),
    (WarmStarted, {"what": "warm start", "studies": [{"study": "first", "layouts": 1}], "observations": [OBSERVATION]}),
    (Expected, {"what": "expected gain", "gain": None, "hypervolume": 2.0, "batch": 3}),
    (Expected, {"what": "expected gain", "gain": 14805.6, "hypervolume": 0.0, "batch": 3}),
    (Closed, {"what": "closed", "rule": "trials", "message": "all 4 layouts were proposed"}),
    (QualityKnown, {"what": "quality", "rung": 2, "quality": QUALITY}),
    (QualityKnown, {"what": "quality", "rung": 2, "quality": {**QUALITY, "recall": 0.5, "recall_sd": 0.25}}),
    (AnchorsChosen, {"what": "anchors", "layouts": [LAYOUT.to_json()]}),
    (Rescored, {"what": "rescored", "quality": QUALITY, "per_seed": {"100": 1.0, "101": 0.5}}),
    (Named, {"what": "front named", "trials": [7, 3]}),
    (
        Remeasured,
        {
            "what": "remeasured",
            "round": 1,
            "measurements": [
                {
                    "device": "local",
                    "runtime": "fake",
                    "workload": "chat",
                    "result": "0" * 64,
                    "figures": {"latency": Figure(value=2.5, unit="ms").model_dump()},
                },
            ],
        },
    ),
    (Spent, {"what": "spent", "stage": "propose", "seconds": 0.25}),
    (
        Profiled,
        {"what": "profiled", "trial": 3, "device": "box", "runtime": "fake", "build": "b", **REQUEST, "profile": TIMED},
    ),
    (Marked, {"what": "marked", "trial": 3, "star": True, "tags": ["small"], "text": "try it"}),
]


@pytest.mark.parametrize(("kind", "payload"), STORED, ids=[payload["what"] for _, payload in STORED])
def test_payloads_are_stored_and_read(kind: type[Note], payload: dict[str, Any]) -> None:
    note = kind.read(payload)
    assert note is not None
    assert json.dumps(note.to_json()) == json.dumps(payload)
    assert kind.read({"what": "something else"}) is None
    assert kind.read({"state": "running"}) is None


def test_every_note_is_listed_here() -> None:
    assert {kind for kind, _ in STORED} == set(Note.__subclasses__())


def mark(trial: int, *tags: str, star: bool = False, text: str = "") -> dict[str, Any]:
    return Marked(trial, star=star, tags=tags, text=text).to_json()


def test_the_newest_mark_of_a_trial_is_valid_and_an_empty_one_removes_it() -> None:
    written = log(mark(1, "old"), mark(2, star=True), mark(1, "new", text="why"), mark(2))
    assert marks(written) == {1: Marked(1, star=False, tags=("new",), text="why")}


def test_marks_take_no_time_of_a_study() -> None:
    launched = Launched(5).to_json()
    worked = log(launched, {"what": "other"}, {"what": "other"})
    marked = log(launched, {"what": "other"}, {"what": "other"}, mark(1), {"what": "profiled"})
    assert elapsed(worked) == [0.0, 10.0, 20.0]
    assert elapsed(marked) == [0.0, 10.0, 20.0, 20.0, 20.0]


def log(*payloads: dict[str, Any], seconds: float = 10.0) -> list[Event]:
    return [Event(EventKind.STUDY, payload, at=index * seconds) for index, payload in enumerate(payloads)]


LAUNCH = Launched(5).to_json()


def test_time_between_launches_does_not_count() -> None:
    assert elapsed(log({"state": "running"}, LAUNCH, {}, LAUNCH, {}, {})) == [0.0, 0.0, 10.0, 10.0, 20.0, 30.0]


def test_a_clock_that_is_set_back_takes_no_time_back() -> None:
    times = (0.0, 10.0, -1000.0, -990.0)
    rows = [Event(EventKind.STUDY, LAUNCH if at == 0 else {}, at=at) for at in times]
    assert elapsed(rows) == [0.0, 10.0, 10.0, 20.0]
    study = StudyLog()
    for row in rows:
        study.append(row)
    assert study.elapsed_s == 20.0


def test_the_last_rule_that_closed_a_study_counts() -> None:
    assert ending(log(LAUNCH)) is None
    closed = [{"what": "closed", "rule": rule, "message": "why"} for rule in ("trials", "hours")]
    assert ending(log(*closed)) == {"rule": "hours", "message": "why"}


def test_a_device_is_known_by_its_calibration() -> None:
    (device,) = calibrated_devices(log(LAUNCH, {"what": "calibrated", "device": "local", "id": "box"}))
    assert (device.name, device.id, device.cores, device.threads) == ("local", "box", (), ())
