"""Logits through the runner itself: the kernels of whatever machine can run it, with no library but its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import RawRun
from nas.runtimes.host import emulator_of
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.output import read_sample
from nas.runtimes.toolchain import build_environment

_DEADLINE_S = 3600.0
"""Emulation is a hundred times slower than the machine it stands for."""
_MASK = (1 << 64) - 1


class Machine(Protocol):
    """Where a runner runs: this machine, an emulator, a device."""

    def __call__(self, arguments: Sequence[str], model: Path, rows: Path) -> RawRun:
        """One process of the runner.

        Args:
            arguments: its own; {model} and {rows} in them stand for files on that machine.
            model: the model file here.
            rows: where what the runner wrote to {rows} shall lie here.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """What the runner decodes: a prompt in chunks, then tokens one by one.

    Args:
        prompt: tokens of the prompt.
        gen: tokens decoded after it.
        batch: tokens of a chunk; the last may be shorter.
        seed: of the token ids.
    """

    prompt: int
    gen: int
    batch: int
    seed: int = 0

    def ids(self, vocab: int) -> NDArray[np.int64]:
        """The token ids [prompt + gen] that runner.c draws: splitmix64 (Steele, Lea, Flood 2014)."""
        state, ids = self.seed, []
        for _ in range(self.prompt + self.gen):
            state = (state + 0x9E3779B97F4A7C15) & _MASK
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
            ids.append((z ^ (z >> 31)) % vocab)
        return np.array(ids, np.int64)


def runner_logits(machine: Machine, model: Path, vocab: int, feed: Feed, scratch: Path) -> NDArray[np.float32]:
    """Logits [gen + 1, V]: of the prompt's last token, then of each decoded one.

    Raises:
        CandidateFailed: the runner died on the file, or what it wrote is no logits.
        InfrastructureFailed: the runner could not work there.
    """
    rows = scratch / "rows"
    sizes = {"prompt": feed.prompt, "gen": feed.gen, "batch": feed.batch, "seed": feed.seed}
    numbers = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    read_sample(machine(["--model", "{model}", "--logits", "{rows}", *numbers], model, rows))
    logits = np.fromfile(rows, "<f4")
    if logits.size != (feed.gen + 1) * vocab:
        raise CandidateFailed("garbage_output", f"{logits.size} logits where {feed.gen + 1} x {vocab} were due")
    return logits.reshape(-1, vocab).astype(np.float32, copy=False)


def here(build: Build) -> Machine:
    """This machine, by emulation where the build is for another one.

    Raises:
        InfrastructureFailed: no emulator is at hand.
    """
    emulator = emulator_of(build.details.target)
    if emulator is None:
        raise InfrastructureFailed(
            f"logits of {build.details.target} need an emulator on this machine (Debian: qemu-user-static)"
        )

    def run(arguments: Sequence[str], model: Path, rows: Path) -> RawRun:
        paths = {"{model}": str(model), "{rows}": str(rows)}
        argv = [*emulator, str(build.executable), *(paths.get(argument, argument) for argument in arguments)]
        return _run(argv)

    return run


def _run(argv: Sequence[str]) -> RawRun:
    started, begun = time.time(), time.monotonic()
    try:
        done = subprocess.run(
            argv,
            env=build_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:  # subprocess.run has killed it
        return RawRun(exit_code=-9, stdout="", wall_s=_DEADLINE_S, started_at=started, timed_out=True)
    return RawRun(
        exit_code=done.returncode,
        stdout=done.stdout,
        stderr_tail=done.stderr[-4096:],
        wall_s=time.monotonic() - begun,
        started_at=started,
    )
