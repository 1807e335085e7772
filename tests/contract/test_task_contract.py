"""The tasks that come with hilnas keep the public contract."""

from __future__ import annotations

from nas.core.task import TASKS
from nas.testing.task_contract import TaskContract


class TestSelectiveCopy(TaskContract):
    name = "selcopy"
    difficulties = ({}, {"items": 1, "length": 3}, {"items": 6, "symbols": 16, "length": 40})


class TestInduction(TaskContract):
    name = "induction"
    difficulties = ({}, {"symbols": 3, "length": 12}, {"jump": 0.0})


class TestAssociativeRecall(TaskContract):
    name = "mqar"
    difficulties = ({}, {"pairs": 1, "length": 4}, {"pairs": 8, "keys": 32, "values": 8, "length": 64})


class TestRecall(TaskContract):
    name = "recall"
    difficulties = (
        {},
        {"pairs": 1, "length": 4},
        {"pairs": 12, "keys": 32, "values": 8, "length": 48},
        {"fewer": False, "beside": False},
    )


class TestNoisyRecall(TaskContract):
    name = "noisyrecall"
    difficulties = ({}, {"pairs": 4, "values": 8, "length": 32, "share": 0.2})


class TestAutomata(TaskContract):
    name = "automata"
    difficulties = ({}, {"states": 3, "branches": 1, "symbols": 5, "length": 20})


class TestKnowledge(TaskContract):
    name = "knowledge"
    difficulties = ({}, {"facts": 96, "fields": 1, "values": 8, "length": 12})


class TestArithmetic(TaskContract):
    name = "arithmetic"
    difficulties = ({}, {"digits": 1, "base": 2, "length": 5}, {"digits": 4, "base": 5, "length": 28})


class TestWordProblem(TaskContract):
    name = "wordproblem"
    difficulties = ({"length": 32}, {"points": 5, "even": True, "length": 16})


class TestBoundFacts(TaskContract):
    name = "boundfacts"
    difficulties = ({}, {"facts": 3, "alike": 2, "sought": 1, "query": 4, "length": 40})


class TestPictures(TaskContract):
    name = "pictures"
    difficulties = ({}, {"side": 16, "cells": 1, "questions": 2})


class TestSounds(TaskContract):
    name = "sounds"
    difficulties = ({}, {"syllables": 1, "frames": 8, "levels": 3, "moves": 3})


class TestSpectra(TaskContract):
    name = "spectra"
    difficulties = ({"frames": 4, "bands": 16}, {"frames": 3, "upsampling": 4, "bands": 8})
    tolerance = 0.02


def test_every_task_is_held_to_the_contract() -> None:
    assert {contract.name for contract in TaskContract.__subclasses__()} == set(TASKS)
