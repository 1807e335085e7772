"""The runner on real artifacts: the contract of a runtime, resets, damaged files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights, Runtime
from nas.measure.runtimes.executorch.gate import BATCH, PROMPT, STEPS
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.runner import Feed, local_machine, relative_l2, runner_logits
from nas.measure.runtimes.toolchain import host_target
from nas.testing.planted_faults import checkpoint
from nas.testing.runtime_contract import RuntimeContract
from tests.support.turns import assert_neither_outlives_the_other

pytestmark = pytest.mark.timeout(900)  # blocks are lowered the first time

EVERY_STATE = Layout.parse("d64 v128 ffn=swiglu:64 [C3 A2/1 W2/1@8 M16]")


class TestExecuTorch(RuntimeContract):
    target = host_target()

    @pytest.fixture
    def runtime(self, executorch_build: Build) -> Runtime:
        return EXECUTORCH

    @pytest.fixture
    def layout(self) -> Layout:
        return EVERY_STATE

    @pytest.fixture
    def refused(self) -> Layout:
        return Layout.parse("d64 v128 ffn=swiglu:40 [C3]")


@pytest.fixture(scope="module")
def model(executorch_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    EXECUTORCH.export(EVERY_STATE, "8da4w", checkpoint(EVERY_STATE, folder / "weights"), folder / "model")
    return folder / "model"


def logits(build: Build, model: Path, folder: Path, *options: str) -> np.ndarray:
    argv = [str(build.executable), "--model", str(model), "--prompt", "40", "--gen", "8", "--logits", str(folder / "l")]
    subprocess.run([*argv, *options], check=True, capture_output=True)
    return np.fromfile(folder / "l", np.float32)


def test_warm_up_leaves_nothing_behind(executorch_build: Build, model: Path, tmp_path: Path) -> None:
    cold = logits(executorch_build, model, tmp_path, "--warmup", "0")
    np.testing.assert_array_equal(cold, logits(executorch_build, model, tmp_path, "--warmup", "23"))


@pytest.mark.parametrize("options", [("--mmap", "1"), ("--threads", "2"), ("--context", "4096")])
def test_what_changes_no_number(executorch_build: Build, model: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    expected = logits(executorch_build, model, tmp_path)
    np.testing.assert_array_equal(expected, logits(executorch_build, model, tmp_path, *options))


@pytest.mark.parametrize("keep", [0, 10, 30, 500, 30_000])
def test_cut_file_is_refused(executorch_build: Build, model: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut").write_bytes(model.read_bytes()[:keep])
    refusal(executorch_build, tmp_path / "cut")


@pytest.mark.parametrize(
    ("record", "other"),
    [
        (b"model 64 128 128", b"model 64 -12 128"),
        (b"\nattention 2 0 0 ", b"\nattention 2 0 9 "),
        (b"\nmixer 0 0\n", b"\nmixer 1 0\n"),
        (b"\nmixer 0 0\n", b"\nmixer X 0\n"),
        (b"\nhead 8\n", b"\nhead 99"),
        (b"\ncache 1 32 8\n", b"\ncache 2 32 8\n"),
        (b"data norm_weight", b"data morn_weight"),
    ],
)
def test_wrong_header_is_refused(
    executorch_build: Build, model: Path, tmp_path: Path, record: bytes, other: bytes
) -> None:
    content = model.read_bytes()
    assert record in content and len(record) == len(other)
    (tmp_path / "wrong").write_bytes(content.replace(record, other))
    refusal(executorch_build, tmp_path / "wrong")


def test_steps_that_fill_one_window_twice_are_refused(executorch_build: Build, model: Path, tmp_path: Path) -> None:
    """A window holds any number of tokens, but there are no more positions than the context."""
    content, record = model.read_bytes(), b"\nattention 2 0 0 "
    assert record in content
    (tmp_path / "wrong").write_bytes(content.replace(record, b"\nattention 2 0 1 "))
    refusal(executorch_build, tmp_path / "wrong", "--prompt", "200")


def refusal(build: Build, model: Path, *options: str) -> None:
    """The runner says that the file is bad; it does not die of it."""
    argv = [str(build.executable), "--model", str(model), "--prompt", "32", "--gen", "2", *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode in (65, 70), (done.returncode, done.stdout[:200])
    assert json.loads(done.stdout)["error"]["message"]


def test_a_bad_model_beside_a_good_reference_is_refused(executorch_build: Build, model: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(model.read_bytes()[:500])
    refusal(executorch_build, tmp_path / "cut", "--reference", str(model))


@pytest.mark.parametrize("killed", ["reference", "candidate"])
def test_neither_process_outlives_the_other(
    executorch_build: Build, model: Path, killed: Literal["reference", "candidate"]
) -> None:
    argv = [executorch_build.executable, "--model", model, "--reference", model, "--prompt", "64", "--gen", "200000"]
    assert_neither_outlives_the_other([*map(str, argv)], killed)


def test_cache_in_half_precision_is_close(executorch_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse("d64 v128 ffn=swiglu:64 [A2/1]")
    EXECUTORCH.export(layout, "8da4w", checkpoint(layout, tmp_path / "weights"), tmp_path / "model")
    half, full = (gate_logits(executorch_build, tmp_path, "model", 128, "--kv", kv) for kv in ("f16", "f32"))
    assert 0 < relative_l2(half, full).max() < 0.05


def test_missing_context_is_the_callers_fault(executorch_build: Build, model: Path) -> None:
    argv = [str(executorch_build.executable), "--model", str(model), "--prompt", "32", "--gen", "2", "--context", "33"]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 64


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (b"hilnas-recipe 1 ", b"hilnas-recipe 2 "),
        (b"HILNASET", b"HILNA"),
        (b"\nbytes 0 ", b"\nbytes 0 -"),
        (b" tile 0 ", b" tile 7 "),
        (b" word ", b" ward "),
    ],
)
def test_wrong_recipe_is_refused(executorch_build: Build, tmp_path: Path, part: bytes, other: bytes) -> None:
    recipe, output = tmp_path / "recipe", tmp_path / "made"
    EXECUTORCH.export(EVERY_STATE, "8da4w", RandomWeights(), recipe, recipe=True)
    assert part in recipe.read_bytes()
    recipe.write_bytes(recipe.read_bytes().replace(part, other, 1))
    argv = [str(executorch_build.executable), "--recipe", str(recipe), "--output", str(output)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 65 and json.loads(done.stdout)["error"]["kind"] == "recipe"


def test_recipe_overwrites_nothing(executorch_build: Build, tmp_path: Path) -> None:
    recipe, output = tmp_path / "recipe", tmp_path / "made"
    EXECUTORCH.export(EVERY_STATE, "8da4w", RandomWeights(), recipe, recipe=True)
    output.write_text("mine")
    argv = [str(executorch_build.executable), "--recipe", str(recipe), "--output", str(output)]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 74
    assert output.read_text() == "mine"


def gate_logits(build: Build, folder: Path, model: str, vocab: int, *options: str) -> np.ndarray:
    machine = local_machine(build.executable, build.runner.target)
    return runner_logits(machine, folder / model, vocab, Feed(PROMPT, STEPS, BATCH), folder, options)


def test_dead_runner_is_the_candidates_failure(tmp_path: Path) -> None:
    with pytest.raises(CandidateFailed) as failure:
        runner_logits(local_machine(Path("/bin/false"), host_target()), tmp_path / "model", 8, Feed(8, 1, 8), tmp_path)
    assert failure.value.reason == "crash"
