"""Runs the state machine of `test_store_jobs_machine.py`, shortly: on SQLite it has many more examples every time."""

from __future__ import annotations

import os

from hypothesis import settings
from test_store_jobs_machine import Farm


class TestFarm(Farm.TestCase):
    settings = settings(
        max_examples=40 if os.environ.get("HILNAS_TEST_ALL") else 8, stateful_step_count=25, deadline=None
    )
