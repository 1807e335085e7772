"""What the tests of spaces with tasks of their own share: layouts, trainings, and a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from study_support import bed_of

from nas.core.layout import Layout, narrow
from nas.core.space import SearchSpace
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.search.analysis.report import study_report
from nas.search.proposers.mutation import crossover, mutate
from nas.search.proposers.sampling import Sampler
from nas.search.proxy.job import TaskRun, TrainJob, TrainResult
from nas.serve.dashboard.local_server import dashboard_here
from nas.testing.inline_study import trained


def task_quality(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The part `quality` of a space whose two rungs train tasks, the second one with two seeds."""
    rungs = [{"name": "first", "tasks": tasks, "keep": 0.5}, {"name": "second", "tasks": tasks, "seeds": [0, 1]}]
    return {"proxy_d_model": 32, "min_reference": 0.01, "rungs": rungs}


def task_job(layout: Layout, task: str, settings: Any, seed: int = 0) -> TrainJob:
    """A training of a layout's proxy on a task for three steps."""
    return TrainJob(
        layout=narrow(layout, 32, 256).to_json(), run=TaskRun(task=task, settings=settings), steps=3, batch=4, lr=0.01,
        warmup=0, weight_decay=0, clip=1, ema=0, seed=seed,
    )  # fmt: skip


def varied(space: SearchSpace) -> list[Layout]:
    """Layouts of a space: 20 drawn, 20 edited and 20 crossed ones."""
    sampler, rng = Sampler(space), np.random.default_rng(0)
    layouts = [sampler.draw(rng) for _ in range(20)]
    layouts += [mutate(layout, sampler, rng)[0] for layout in layouts]
    return layouts + [crossover(*layouts[first : first + 2], sampler, rng)[0] for first in range(20)]


@contextmanager
def studied(folder: Path, space: SearchSpace, task: str) -> Iterator[tuple[Store, dict[str, Any], str]]:
    """A study of eight trials, whose scores on the task are given: its store, its report, and the URL of its page."""

    def train(job: TrainJob, spec: Mapping[str, Any]) -> TrainResult:
        result = trained(job, spec)
        return result.model_copy(update={"scores": {f"task/{task}": result.scores["lm/text"]}})

    bed = bed_of(folder, space)
    bed.compute.train = train
    assert bed.run(trials=8) is StudyState.COMPLETE
    report = study_report(bed.store, "study")
    assert report["front"] and report["hypervolume"] > 0
    with dashboard_here(bed.store) as url:
        yield bed.store, report, f"{url.partition('/studies')[0]}/studies/study"
    bed.store.close()
