"""Quality tasks: labels against slow readable solutions; what all tasks share is in tests/contract."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from study_support import lm_job

from nas.core.errors import InvalidInput, UnknownName
from nas.core.registry import Registry
from nas.core.task import IGNORE, TASKS, Task, make_task, task_settings
from nas.search.proxy.job import TaskRun
from nas.search.proxy.tasks.automata import Automata
from nas.search.proxy.tasks.induction import Induction
from nas.search.proxy.tasks.knowledge import Knowledge
from nas.search.proxy.tasks.mqar import AssociativeRecall
from nas.search.proxy.tasks.noisyrecall import NoisyRecall
from nas.search.proxy.tasks.recall import Recall
from nas.search.proxy.tasks.selcopy import SelectiveCopy
from nas.search.proxy.tasks.wordproblem import WordProblem

Example = tuple[list[Any], list[int]]


def examples(task: Task, count: int = 200, seed: int = 0) -> list[Example]:
    x, y = task.batch(np.random.default_rng(seed), count)
    assert x.shape[:2] == y.shape == (count, task.length)
    assert x.dtype == y.dtype == np.int64
    return list(zip(x.tolist(), y.tolist(), strict=True))


class Shifted(SelectiveCopy):
    """A task of a plug-in."""

    version: ClassVar[str] = "3"


def test_the_version_of_a_plug_in_s_task_is_in_training_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        run = TaskRun(task="mine")
        return lm_job().model_copy(update={"run": run}).key

    monkeypatch.setitem(TASKS._targets, "mine", Shifted)
    before = key()
    monkeypatch.setattr(Shifted, "version", "4")
    assert key() != before
    assert "version" not in TaskRun(task="selcopy").key_inputs()


def test_without_one_it_is_that_of_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[SimpleNamespace]:
        target = {"name": "mine", "value": "nas.search.proxy.tasks.mqar:AssociativeRecall"}
        dist = SimpleNamespace(version="1.5")
        return [SimpleNamespace(**target, dist=dist)]

    monkeypatch.setattr("nas.core.registry.entry_points", points)
    registry: Registry[Any] = Registry("task", "nas.tasks", {"own": SelectiveCopy})
    assert (registry.version("mine"), registry.version("own")) == ("1.5", None)
    versioned: Registry[Any] = Registry("task", "nas.tasks", {"own": Shifted})
    assert versioned.version("own") == "3"


@pytest.mark.parametrize("name", sorted({*TASKS} - {"boundfacts", "recall", "wordproblem", "spectra", "sounds"}))
def test_a_label_is_the_next_token(name: str) -> None:
    """Labels may be shifted by one: the answer is never visible at the position that is asked."""
    for x, y in examples(make_task(name, {})):
        text = [*x, y[-1]]  # the symbol after an example may be asked for as well
        labels = {t: label for t, label in enumerate(y) if label != IGNORE}
        assert labels and labels == {t: text[t + 1] for t in labels}


def test_selective_copy_repeats_the_marked_symbols_in_order() -> None:
    task = SelectiveCopy(items=3, symbols=5, length=20)
    lengths = set()
    for x, y in examples(task):
        separator = x.index(1)
        marked = [symbol for symbol in x[:separator] if symbol >= 2]
        assert [label for label in y if label != IGNORE] == marked
        assert y[separator : separator + len(marked)] == marked
        lengths.add(len(marked))
    assert lengths == {1, 2, 3}


def test_selective_copy_places_symbols_everywhere() -> None:
    task = SelectiveCopy(items=3, symbols=5, length=20)
    places = {t for x, _ in examples(task, 500) for t in range(16) if x[t] >= 2}
    assert places == set(range(16))


def test_recall_shows_a_value_beside_its_key_and_asks_for_it() -> None:
    task, counts = Recall(pairs=6, keys=9, values=4, length=32), set()
    for x, y in examples(task):
        keys, blanks, answers = [x[::2], [value for _, value in x[::2]], x[1::2]]
        pairs = dict(answers[:6])
        assert blanks == [13] * 16
        assert [key for key, _ in keys] == [key for key, _ in answers]
        assert answers == [[key, pairs[key]] for key, _ in keys], "a key keeps its value"
        assert y[1::2] == [IGNORE] * 16
        assert y[::2] == [IGNORE] * 6 + [pairs[key] for key, _ in keys[6:]]
        counts.add(len(pairs))
    assert counts == {1, 2, 4, 6}


def test_recall_without_its_differences_is_that_of_mqar() -> None:
    for x, y in examples(Recall(pairs=3, keys=5, values=4, length=20, fewer=False, beside=False)):
        symbols = [symbol for symbol, blank in x if blank == 9]
        pairs = dict(zip(symbols[0:6:2], symbols[1:6:2], strict=True))
        assert len(pairs) == 3 and symbols[1::2] == [pairs[key] for key in symbols[::2]]
        assert y[::2] == [IGNORE] * 3 + symbols[7::2]


def test_induction_asks_only_for_steps_seen_before() -> None:
    task = Induction(symbols=6, length=40, jump=0.3)
    for x, y in examples(task):
        follower = {symbol: label for symbol, label in zip(x, y, strict=True) if label != IGNORE}
        walked: set[int] = set()
        for t, label in enumerate(y):
            if label != IGNORE:
                assert label == follower[x[t]], "a symbol has one follower throughout an example"
                assert x[t] in walked, "the step was shown before it is asked for"
            if x[t] in follower and t + 1 < len(x) and x[t + 1] == follower[x[t]]:
                walked.add(x[t])
        assert len(set(follower.values())) == len(follower), "a cycle has one way into each symbol"


def test_induction_without_jumps_walks_one_cycle_through_all_symbols() -> None:
    task = Induction(symbols=7, length=30, jump=0.0)
    for x, y in examples(task):
        assert sorted(x[:7]) == list(range(7))
        assert all(x[t] == x[t - 7] for t in range(7, 30))
        assert y == [IGNORE] * 7 + x[8:] + [IGNORE]


def test_recall_answers_with_the_value_of_the_key() -> None:
    task = AssociativeRecall(pairs=3, keys=5, values=4, length=20)
    for x, y in examples(task):
        pairs = dict(zip(x[0:6:2], x[1:6:2], strict=True))
        assert len(pairs) == 3
        keys = [x[t] for t in range(6, 20, 2)]
        assert [y[t] for t in range(6, 20, 2)] == [pairs[key] for key in keys]
        assert sorted(keys[:3]) == sorted(pairs)
        assert [t for t in range(20) if y[t] != IGNORE] == list(range(6, 20, 2))


def test_noisy_recall_asks_for_pairs_that_were_shown() -> None:
    task = NoisyRecall(pairs=3, keys=5, values=4, noise=2, length=24, share=0.3)
    for x, y in examples(task):
        pairs: dict[int, int] = {}
        for t, symbol in enumerate(x):
            if symbol < 5:
                assert y[t] == pairs.get(symbol, IGNORE)
                assert 5 <= x[t + 1] < 9
                assert pairs.setdefault(symbol, x[t + 1]) == x[t + 1]
            else:
                assert y[t] == IGNORE


def test_an_automaton_without_choice_soon_repeats_itself() -> None:
    task = Automata(states=3, branches=1, symbols=5, length=40)
    for x, y in examples(task):
        text = [*x, y[-1]]
        assert y[:-1] == x[1:]
        assert any(text[10 : 40 - period] == text[10 + period : 40] for period in (1, 2, 3))


def test_an_automaton_shows_no_more_symbols_than_it_has_edges() -> None:
    counts = [len({*x}) for x, _ in examples(Automata(states=2, branches=2, symbols=30, length=64))]
    assert max(counts) == 4


def test_facts_are_the_same_in_every_example() -> None:
    task = Knowledge(facts=64, fields=2, values=8, length=32)
    facts: dict[tuple[int, int], tuple[int, int]] = {}
    for x, y in examples(task):
        for at in range(0, 32, 4):
            name, values = (x[at], x[at + 1]), (x[at + 2], x[at + 3])
            assert facts.setdefault(name, values) == values
            assert y[at : at + 4] == [IGNORE, *values, IGNORE]
    assert len(facts) == 64


@pytest.mark.parametrize(("points", "even", "elements"), [(3, False, 6), (4, True, 12), (5, True, 60)])
def test_word_problem_multiplies_in_a_group(points: int, even: bool, elements: int) -> None:
    task = WordProblem(points=points, even=even, length=9)
    assert task.vocab == elements
    step: dict[tuple[int, int], int] = {}
    for x, y in examples(task, 2000):
        assert y[0] == x[0]
        for t in range(1, 9):
            assert step.setdefault((y[t - 1], x[t]), y[t]) == y[t], "one product of two elements"
    for element in range(elements):
        products = [product for (row, _), product in step.items() if row == element]
        assert len(set(products)) == len(products), "a row of a group's table has no element twice"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("selcopy", {"items": 0}, "at least 1 item"),
        ("selcopy", {"items": 10, "length": 20}, "cannot hold 10 items"),
        ("induction", {"symbols": 2}, "at least 3 symbols"),
        ("induction", {"symbols": 40}, "nothing recurs"),
        ("induction", {"jump": 1.0}, "probability"),
        ("mqar", {"pairs": 17}, "between 1 and keys"),
        ("mqar", {"length": 15}, "even"),
        ("mqar", {"values": 1}, "2 values"),
        ("mqar", {"pairs": 2.5}, "whole number"),
        ("noisyrecall", {"pairs": 17}, "between 1 and keys"),
        ("noisyrecall", {"pairs": 16, "length": 32}, "none comes again"),
        ("noisyrecall", {"share": 1.0}, "share"),
        ("automata", {"branches": 12}, "branches"),
        ("knowledge", {"facts": 100}, "multiple of values"),
        ("knowledge", {"length": 127}, "multiple of 4"),
        ("knowledge", {"length": 0}, "multiple of 4"),
        ("knowledge", {"length": -4}, "multiple of 4"),
        ("wordproblem", {"points": 6}, "2 to 5"),
        ("wordproblem", {"points": 2, "even": True}, "2 to 5"),
    ],
)
def test_settings_that_cannot_stand_are_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_task(name, settings)


def test_a_whole_number_may_be_written_with_a_point() -> None:
    inputs, _ = make_task("mqar", {"pairs": 2.0, "length": 12.0}).batch(np.random.default_rng(0), 3)
    assert inputs.shape == (3, 12)


def test_an_unknown_setting_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'symbols'"):
        make_task("selcopy", {"symbol": 4})


def test_settings_carry_the_defaults() -> None:
    assert task_settings(make_task("mqar", {"pairs": 2})) == {"pairs": 2, "keys": 16, "values": 16, "length": 36}


def test_numbers_of_endless_digits_are_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="beyond 2\\^62"):
        make_task("arithmetic", {"digits": 10**18, "length": 64})
    make_task("arithmetic", {"digits": 62, "base": 2, "length": 188})
