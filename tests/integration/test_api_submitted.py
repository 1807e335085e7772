"""A study submitted over the network, to a coordinator that is killed while it runs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from study_lab import LIMIT_S, SPACE, WITHOUT_RAY, Lab, finish

from nas.infra.store import trials
from nas.infra.store.store import Store
from nas.serve.api.serve import last_address
from tests.support.waiting import until

RUNGS = [{"name": "only", "lm_steps": 30}]
QUALITY = {name: value for name, value in SPACE["quality"].items() if name != "corpus"} | {"rungs": RUNGS}
SEEDS_ONLY = {"proposer": "random", "seeds": 1}


@contextlib.contextmanager
def coordinator(lab: Lab, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`nas serve`, killed at the end if it has not ended."""
    with lab.start("serve", "--log-json", *options) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it says where it is once it listens
            yield process
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def running(lab: Lab, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that does not outlive the test."""
    with lab.start(*arguments) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def log_shown(lab: Lab) -> Iterator[None]:
    """Shows what the study's process said where the test fails, for it says so to nobody else."""
    try:
        yield
    except AssertionError:
        for path in sorted((lab.home / "studies").glob("*/*.log")):
            print(f"{path.name}:\n{path.read_text()}")
        raise


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("NAS_CONFIG", str(tmp_path / "config"))
    lab = Lab(tmp_path / "lab", program=WITHOUT_RAY)
    lab.space(quality=QUALITY, search=SEEDS_ONLY)
    return lab


def proposed(lab: Lab) -> int:
    store: Store = lab.store()
    try:
        return len(trials.all(store, 1))
    finally:
        store.close()


def test_a_study_outlives_the_coordinator_that_started_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    token = lab.run_here("token", "create", "me", "--role", "operate").out.strip()
    with coordinator(lab, "--port", "0") as first:
        address = last_address(lab.home)
        assert address is not None
        monkeypatch.setenv("NAS_TOKEN", token)
        lab.run_here("server", "add", address.url, "--fingerprint", address.ca_sha256, "--token", token)
        monkeypatch.setenv("NAS_SERVER", address.url)
        space = str(lab.folder / "tiny.yaml")
        with log_shown(lab), running(lab, "launch", "--space", space, "--study", "mine", "-n", "1", "--json") as launch:
            until(lambda: proposed(lab) > 0 or launch.poll() is not None, LIMIT_S)
            assert launch.poll() is None, launch.communicate()
            first.send_signal(signal.SIGKILL)
            first.wait()
            with coordinator(lab, "--port", address.url.rpartition(":")[2]):
                done = finish(launch)
                report = lab.json_here("study", "show", "mine")
    assert json.loads(done.stdout) == report
    assert (report["state"], report["trials"]["proposed"]) == ("complete", 1)
    assert "retrying in" in done.stderr
    # One process did it all: nobody started a second one.
    log = (lab.home / "studies" / "mine" / "launch.log").read_text()
    assert log.count("study mine of space tiny") == 1
