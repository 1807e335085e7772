"""Tasks that train a library: the files of one process, and failures; without Ray, which test_adapt_ray.py has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_lab import FEW, QUICK, RECALLING, adaptation, write_lab
from cli_runner import nas

from benchmarks.adapt import hashes
from nas.core.block import Block
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.replacement import Slot
from nas.model.nn.fit import Worker
from nas.search.compute.ray import Kind
from nas.search.compute.worker import Outcome, Work
from nas.train.adapt import parallel
from nas.train.adapt.adapt import Adaptation
from nas.train.adapt.parallel import Workers
from tests.support.local_compute import LocalCompute

BLOCKS = {Slot(depth, "ffn"): (Block.parse("swiglu:32", "ffn"),) for depth in (0, 2)}


class Tasks(LocalCompute):
    """One task after another; `ends` is called with its number and spec, and may end it in another way."""

    def __init__(self, ends: Callable[[int, dict[str, Any]], Outcome | None] = lambda number, spec: None) -> None:
        super().__init__(1)
        self.opened: list[int] = []
        self._ends, self._number = ends, 0

    def workers_of(self, tasks: int) -> Tasks:
        self.opened.append(tasks)
        return self

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Outcome:
        assert kind == "shared"
        copy, self._number = dict(spec), self._number + 1
        return self._ends(self._number, copy) or await super().run(work, copy, kind)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(autouse=True)
def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("_PAUSE_S", "_LATE_S"):
        monkeypatch.setattr(parallel, name, 0.0)


def adapted(lab: Path, folder: Path, tasks: Tasks, lines: list[str] | None = None, **more: Any) -> Adaptation:
    worker = Worker(torch.device("cpu"), ([] if lines is None else lines).append)
    return adaptation(lab, folder / "out", folder / "library", worker, workers=Workers(2, tasks.workers_of), **more)


def test_tasks_leave_the_files_of_one_process(lab: Path, tmp_path: Path) -> None:
    settings = RECALLING.model_copy(update={"alternatives": ("conv", "gqa", "swiglu", "-")})
    adaptation(lab, tmp_path / "one/out", tmp_path / "one/library", settings=settings).run()
    tasks = Tasks()
    adapted(lab, tmp_path / "tasks", tasks, settings=settings).run()
    assert hashes(tmp_path / "tasks") == hashes(tmp_path / "one")
    assert tasks.opened == [3], "depths; workers are not needed again for the chosen blocks"
    assert not [path for path in (tmp_path / "tasks/library").iterdir() if path.is_file() and path.suffix != ".lock"]


def test_what_is_trained_and_scored_is_no_task(lab: Path, tmp_path: Path) -> None:
    tasks = Tasks()
    one = adapted(lab, tmp_path, tasks, settings=QUICK)
    one.library.train(BLOCKS)
    one.library.train(BLOCKS)
    next((tmp_path / "library/scores").iterdir()).unlink()
    one.library.train(BLOCKS)
    assert tasks.opened == [2, 1]


def test_a_plan_times_one_process(lab: Path, tmp_path: Path) -> None:
    tasks = Tasks()
    plan = adapted(lab, tmp_path, tasks, settings=FEW).plan()
    assert plan["seconds"].keys() == {"measurements", "library", "scores", "healing", "total"}
    assert not tasks.opened


def test_a_lost_worker_is_replaced_twice(lab: Path, tmp_path: Path) -> None:
    def lost(until: int) -> Callable[[int, dict[str, Any]], None]:
        def end(number: int, spec: dict[str, Any]) -> None:
            if number <= until:
                raise InfrastructureFailed("a worker died: gone")

        return end

    lines: list[str] = []
    (slot,) = list(BLOCKS)[:1]
    one = {slot: BLOCKS[slot]}
    with pytest.raises(InfrastructureFailed, match="depth 0: a worker died: gone; tried 3 times"):
        adapted(lab, tmp_path, Tasks(lost(3)), lines, settings=QUICK).library.train(one)
    assert lines.count("depth 0: a worker died: gone; trying again") == 2
    library = adapted(lab, tmp_path, Tasks(lost(2)), settings=QUICK).library
    library.train(one)
    assert library.file(slot, BLOCKS[slot][0]).is_file()


def test_what_other_folders_or_models_give_is_refused(lab: Path, tmp_path: Path) -> None:
    def of_node(name: str, value: str) -> Callable[[int, dict[str, Any]], None]:
        return lambda number, spec: spec.update({name: value})

    for name, reason in (("mark", "a node has another .*library than the command"), ("sha256", "another .*teacher")):
        tasks = Tasks(of_node(name, "0" * 64))
        with pytest.raises(InfrastructureFailed, match=f"{reason}.*; tried 3 times"):
            adapted(lab, tmp_path, tasks, settings=QUICK).library.train(BLOCKS)
    with pytest.raises(InfrastructureFailed, match="depth 2: a worker ended, but its blocks are not in"):
        adapted(lab, tmp_path, Tasks(lambda number, spec: {"value": None}), settings=QUICK).library.train(BLOCKS)
    assert not list((tmp_path / "library").glob("blocks/*"))


def test_a_failure_of_a_block_is_not_tried_again(lab: Path, tmp_path: Path) -> None:
    failed = {"failed": {"reason": "not_finite", "message": "the loss is not finite"}}
    numbers: list[int] = []

    def end(number: int, spec: dict[str, Any]) -> Outcome:
        numbers.append(number)
        return failed

    with pytest.raises(CandidateFailed, match="the loss is not finite"):
        adapted(lab, tmp_path, Tasks(end), settings=QUICK).library.train({Slot(0, "ffn"): BLOCKS[Slot(0, "ffn")]})
    assert numbers == [1]


def test_disks_hold_a_checkpoint_for_each_depth_under_way(lab: Path, tmp_path: Path) -> None:
    library = adapted(lab, tmp_path, Tasks(), settings=QUICK).library
    both = library.missing_bytes(BLOCKS)
    sizes = [library.missing_bytes({slot: blocks}) for slot, blocks in BLOCKS.items()]
    assert both == sum(sizes)
    library.parallel = 1
    assert library.missing_bytes(BLOCKS) == sizes[0] + sizes[1] // 7


def test_options_that_do_not_go_together(lab: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--hours: the training of one process is timed"):
        adapted(lab, tmp_path, Tasks(), hours=1.0)
    options = ("-b", "ttft<=1s", "-c", str(lab / "text"), "-o", str(tmp_path / "out"))
    done = nas("adapt", str(lab / "teacher.safetensors"), *options, "--workers", "2", "--ray-address", "auto")
    assert done.code == 3 and "--workers" in done.err and "--ray-address" in done.err
