"""Results by key, attempts without one, calibrations."""

from __future__ import annotations

import pytest
from store_support import add_device, key, new_study, proposal

from nas.core.errors import InvalidInput
from nas.infra.store import calibrations, outcomes, results, studies, trials
from nas.infra.store.store import Store


@pytest.mark.sql
def test_the_first_writer_wins(store: Store) -> None:
    first = results.put(store, key(1), "train", {"loss": 1.0}, seconds=9)
    assert results.put(store, key(1), "train", {"loss": 2.0}, seconds=1) == first == results.get(store, key(1))
    assert results.get(store, key(2)) is None
    with pytest.raises(InvalidInput, match="stage 'train', not 'export'"):
        results.put(store, key(1), "export", {})


@pytest.mark.sql
def test_a_result_serves_trials_of_several_studies_and_costs_the_first(store: Store) -> None:
    one, two = new_study(store, "one").id, new_study(store, "two").id
    for study in (one, two):
        trials.propose(store, study, [proposal(32), proposal(64)])
    results.put(store, key(1), "train", {"loss": 1.0}, seconds=9, trial=(one, 0))
    results.put(store, key(1), "train", {"loss": 1.0}, seconds=8, trial=(two, 0))
    results.put(store, key(2), "export", {}, seconds=2, trial=(one, 0))
    for _ in range(2):
        results.use(store, key(1), (one, 1))
    served = {(number, row.key, row.stage) for number, rows in results.summaries(store, one).items() for row in rows}
    assert served == {(0, key(1), "train"), (0, key(2), "export"), (1, key(1), "train")}
    assert results.summaries(store, one, [1, 5]) == {1: results.summaries(store, one)[1]}
    assert [row.first for row in results.summaries(store, one)[0]] == [True, True]
    assert [result.result_key for result in results.of_trial(store, two, 0)] == [key(1)]
    assert results.stage_seconds(store, one) == {"train": 9.0, "export": 2.0}
    assert results.stage_seconds(store, two) == {}
    studies.delete(store, one)
    assert results.get(store, key(1)) is not None


@pytest.mark.sql
def test_attempts_hold_no_key(store: Store) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32)])
    for message in ("reference 6 % off", "reference 7 % off"):
        outcomes.record_attempt(store, "invalid", message, result_key=key(1), stage="measure", study=study, trial=0)
    assert results.get(store, key(1)) is None
    stored = outcomes.attempts_of_key(store, key(1))
    assert [attempt.message for attempt in stored] == ["reference 6 % off", "reference 7 % off"]
    assert {(attempt.study, attempt.trial) for attempt in stored} == {(study, 0)}


def test_a_new_calibration_replaces_the_old_one(store: Store) -> None:
    box = add_device(store)
    assert calibrations.get(store, box, "llama_cpp", "b1") is None
    calibrations.put(store, box, "llama_cpp", "b1", 120.0, {"ms": [119, 120, 121]})
    newer = calibrations.put(store, box, "llama_cpp", "b1", 125.0, {"ms": [125]})
    other = calibrations.put(store, box, "executorch", "b1", 90.0, {"ms": [90]})
    assert calibrations.get(store, box, "llama_cpp", "b1") == newer
    assert {c.runtime: c for c in calibrations.of_device(store, box)} == {"llama_cpp": newer, "executorch": other}
