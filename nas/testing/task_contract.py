"""The contract of a quality task, as tests: subclass `TaskContract`, name the task and difficulties, and run pytest.

class TestParity(TaskContract):
    name = "parity"
    difficulties = ({}, {"length": 64})
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest

from nas.core.canonical import canonical_json
from nas.core.errors import UnknownName
from nas.core.task import IGNORE, MediaTask, RetrievalTask, Setting, SpectraTask, Task, make_task, task_settings

_EXAMPLES = 4000


class TaskContract:
    """Properties that training, scoring and result keys rely on.

    Attributes:
        name: the task's name in `nas.core.task.TASKS`.
        difficulties: settings to test; `{}` means the defaults.
        tolerance: of the labels' entropy over 4,000 examples, in nats, or of the mean distance of spectra from medians.
    """

    name: ClassVar[str]
    difficulties: ClassVar[tuple[Mapping[str, Setting], ...]] = ({},)
    tolerance: ClassVar[float] = 0.01

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per difficulty."""
        if "settings" in metafunc.fixturenames:
            metafunc.parametrize("settings", metafunc.cls.difficulties, ids=str)

    @pytest.fixture
    def task(self, settings: Mapping[str, Setting]) -> Task:
        """The task at one difficulty."""
        return make_task(self.name, settings)

    def test_examples_have_the_promised_shape_and_symbols(self, task: Task) -> None:
        x, y = task.batch(np.random.default_rng(0), 64)
        assert x.shape[:2] == y.shape[:2] == (64, task.length)
        symbols = x[:, task.media.amount :] if isinstance(task, MediaTask) else x
        assert x.dtype == np.int64 and symbols.min() >= 0 and symbols.max() < task.vocab
        if isinstance(task, SpectraTask):
            assert x.ndim == 3 and y.shape[2:] == (task.bands,) and y.dtype == np.float32 and np.isfinite(y).all()
            return
        assert y.ndim == 2 and y.dtype == np.int64
        labels = y[y != IGNORE]
        assert ((labels >= 0) & (labels < task.vocab)).all()

    def test_every_example_has_a_label_or_a_query_and_a_document(self, task: Task) -> None:
        _, y = task.batch(np.random.default_rng(0), 256)
        if isinstance(task, RetrievalTask):
            assert (y == IGNORE).all() and 0 < task.query < task.length
        else:
            assert (y != IGNORE).any(axis=1).all()

    def test_batches_depend_on_the_generator_alone(self, task: Task, settings: Mapping[str, Setting]) -> None:
        x, y = task.batch(np.random.default_rng(3), 8)
        again_x, again_y = make_task(self.name, settings).batch(np.random.default_rng(3), 8)
        assert np.array_equal(x, again_x)
        assert np.array_equal(y, again_y)
        assert not np.array_equal(x, task.batch(np.random.default_rng(4), 8)[0])

    def test_chance_is_the_entropy_of_the_labels(self, task: Task) -> None:
        if isinstance(task, RetrievalTask):  # nothing to guess by labels
            assert math.isfinite(task.chance_nats) and task.chance_nats > 0
            return
        _, y = task.batch(np.random.default_rng(1), _EXAMPLES)
        if isinstance(task, SpectraTask):
            assert np.abs(y - np.median(y, (0, 1))).mean() == pytest.approx(task.chance_nats, abs=self.tolerance)
            return
        counts = Counter(y[y != IGNORE].tolist())
        entropy = -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
        if isinstance(task, MediaTask):  # the question tells something, too
            assert 0 < task.chance_nats < entropy
        else:
            assert entropy == pytest.approx(task.chance_nats, abs=self.tolerance)

    def test_settings_identify_the_task_in_result_keys(self, task: Task) -> None:
        written = task_settings(task)
        canonical_json(written)
        assert make_task(self.name, written) == task

    def test_an_unknown_setting_is_refused(self) -> None:
        with pytest.raises(UnknownName):
            make_task(self.name, {"no such setting": 1})
