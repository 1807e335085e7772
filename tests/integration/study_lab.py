"""Shared by tests of whole searches: a tiny space, and `nas` with its own home, cache and fake runtime.

`Lab.run_here` runs a command in the test's process, and stages of a launch in its threads. `Lab.run` and `Lab.start`
run one in a process of its own: `Lab.program` is `NAS`, where launches start Ray, or `WITHOUT_RAY`.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from cli_runner import Outcome, nas
from study_support import TINY

from nas.infra.store.store import Store
from nas.measure.runtimes import RUNTIMES
from nas.testing.fake_plugin import fake_environment
from nas.testing.fake_runtime import FakeRuntime, Fault
from tests.support.local_compute import without_ray

NAS = (sys.executable, "-c", "from nas.cli.main import main; main()")
WITHOUT_RAY = (sys.executable, "-m", "tests.support.local_compute")
LIMIT_S = 540.0
SPACE: dict[str, Any] = {
    **TINY,
    "v": 1,
    # The next letter of an alphabet is learned within a dozen steps. Rungs that keep a number wait for all, so what is
    # done does not depend on who is first.
    "quality": {
        "proxy_d_model": 32,
        "corpus": ["alphabet.txt"],
        "length": 64,
        "lr": 0.03,
        "warmup": 2,
        "ema": 0.5,
        "eval_bytes": 1024,
        "min_reference": 0.01,
        "rungs": [
            {"name": "first", "lm_steps": 6, "keep": 4},
            {"name": "second", "lm_steps": 12, "keep": 2},
            {"name": "third", "lm_steps": 24, "seeds": [0, 1]},
        ],
    },
    "protocol": {
        "screen_repetitions": 2,
        "confirm_repetitions": 2,
        "deadline_s": 20,
        "remeasure": {"rounds": 2, "repetitions": 2, "members": 2},
    },
    "search": {"proposer": "random", "seeds": 2},
}


@dataclass
class Lab:
    """A home, a cache and a fake runtime, for commands that run as processes."""

    folder: Path
    faults: Mapping[str, Fault] = field(default_factory=dict)
    run_s: float = 0.0
    program: tuple[str, ...] = NAS

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.home = self.folder / "home"
        (self.folder / "alphabet.txt").write_text((string.ascii_letters + string.digits) * 1200)
        self.space()

    @property
    def environment(self) -> dict[str, str]:
        """What the commands run in."""
        variables = {"NAS_HOME": str(self.home), "NAS_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **variables, **fake_environment(self.folder / "plugin", self.faults, self.run_s)}

    def space(self, name: str = "tiny", **changes: Any) -> Path:
        """A file with the tiny space, in which `changes` replace keys of the first level."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(SPACE | changes, sort_keys=False))
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command, running."""
        pipe = subprocess.PIPE
        return subprocess.Popen([*self.program, *arguments], env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command, to its end, which must be `code` and no traceback."""
        with self.start(*arguments) as process:
            return finish(process, code)

    def json(self, *arguments: str) -> Any:
        """Returns what a command prints under --json."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def run_here(self, *arguments: str, code: int = 0) -> Outcome:
        """Runs a command in this process; its end must be `code` and no traceback."""
        RUNTIMES.add("fake", FakeRuntime(self.folder / "plugin" / "runners", faults=self.faults, run_s=self.run_s))
        with mock.patch.dict(os.environ, self.environment), without_ray():
            done = nas(*arguments)
        assert "Traceback" not in done.err and "starting Ray" not in done.err, done.err
        assert done.code == code, f"{done.code}, not {code}: {done.err[-2000:]}"
        return done

    def json_here(self, *arguments: str) -> Any:
        """Returns what a command prints under --json, run in this process."""
        return json.loads(self.run_here(*arguments, "--json").out)

    def launch(self, study: str, *more: str, space: str = "tiny") -> tuple[str, ...]:
        """Arguments of a launch."""
        return (
            "launch",
            "--yes",
            "--workers",
            "2",
            "--space",
            str(self.folder / f"{space}.yaml"),
            "--study",
            study,
            *more,
        )

    def store(self) -> Store:
        """The database."""
        return Store.open(f"sqlite:///{self.home / 'hilnas.db'}", artifacts=self.home / "artifacts", create=False)


def finish(process: subprocess.Popen[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """The end of a command; it must not show a traceback."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert "Traceback" not in err, err
    assert process.returncode == code, f"{process.returncode}, not {code}: {err[-2000:]}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
