"""Runs the state machine of `test_store_jobs_machine.py`, shortly: on SQLite it has many more examples every time."""

from __future__ import annotations

from exhaustive import examples
from hypothesis import settings
from test_store_jobs_machine import Farm


class TestFarm(Farm.TestCase):
    settings = settings(max_examples=examples(24), stateful_step_count=25, deadline=None)
