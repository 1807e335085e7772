"""The command line as a whole: help, errors, exit codes, and what is imported when."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import typer
from cli_runner import nas

from nas.cli import main as entry
from nas.cli.lazy import COMMANDS, MODULES
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError

HEAVY = {"torch", "ray", "sqlalchemy", "pydantic", "numpy", "rich", "matplotlib", "fastapi", "optuna", "sklearn"}


def test_help_lists_every_command_and_imports_none() -> None:
    script = (
        "import sys; sys.argv = ['nas', '--help']; import nas.cli.main as m\ntry: m.main()\nexcept SystemExit: pass\n"
    )
    listing = "import json; print('MODULES', json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script + listing], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES")
    loaded = set(json.loads(modules))
    for name in COMMANDS:
        assert f"  {name} " in text
    assert not loaded & HEAVY
    assert not {f"nas.cli.{MODULES.get(name, name)}" for name in COMMANDS} & loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_help(name: str) -> None:
    module = importlib.import_module(f"nas.cli.{MODULES.get(name, name)}")
    assert isinstance(module.app, typer.Typer)
    done = nas(name, "--help")
    assert done.code == 0
    assert f"Usage: nas {name}" in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_in_the_list_is_that_of_the_command(name: str) -> None:
    text = nas(name, "--help").out.split("\n\n", 2)[1]
    assert " ".join(text.split()).startswith(COMMANDS[name].removesuffix("."))


def test_no_command_pulls_in_torch_or_ray_when_it_is_imported() -> None:
    imports = "; ".join(f"importlib.import_module('nas.cli.{MODULES.get(name, name)}')" for name in COMMANDS)
    script = f"import importlib, sys; {imports}; print(sorted({{'torch', 'ray', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert nas("--version").out.strip() == version("hilnas")


def test_unknown_command_is_a_usage_error_with_the_nearest_name() -> None:
    done = nas("lauch")
    assert done.code == 2
    assert "'launch'" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(NasError("no"), 1), (InvalidInput("no"), 3), (InfrastructureFailed("no"), 4), (OSError("no"), 4)],
)
def test_an_expected_error_is_one_line_and_its_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(**settings: object) -> None:
        raise error

    monkeypatch.delenv("NAS_DEBUG", raising=False)
    monkeypatch.setattr(entry, "app", raise_error)
    done = nas()
    assert (done.code, done.out, done.err) == (code, "", "nas: no\n")


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OutOfMemoryError("CUDA out of memory.\nof 2 GiB"), "the GPU has too little memory: CUDA out of memory. "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory.\nat"), "this machine has too little memory: Def"),
        (MemoryError(), "this machine has too little memory: "),
    ],
)
def test_too_little_memory_is_one_line(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(**settings: object) -> None:
        raise error

    monkeypatch.setattr(entry, "app", raise_error)
    done = nas()
    assert done.code == 4 and done.err.startswith(f"nas: {text}") and done.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b'{"teacher": ', b"\xff"])
def test_a_damaged_file_of_a_command_is_one_line(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "app", lambda **settings: json.loads(content))
    done = nas()
    assert done.code == 3 and done.err.startswith("nas: stored data cannot be read") and done.err.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_DEBUG", "")  # so that what the command sets is undone
    with pytest.raises(InvalidInput):
        nas("--debug", "space", "show", "no-such-space")


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nas.cli.space.load_space", interrupt)
    assert nas("space", "show", "lfm2").code == 130


@pytest.mark.parametrize(
    ("variables", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_torch_sleep_soon_unless_variables_say_otherwise(
    variables: dict[str, str], spins: str | None
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    script = "import os, sys; sys.argv = ['nas', '--version']; import nas.cli.main as m\ntry: m.main()\n"
    show = "except SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", script + show], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(spins)


def test_sigterm_ends_what_a_command_has_started() -> None:
    script = """
import os
from nas.cli import main
from nas.measure.runtimes.toolchain import stream

def build(**settings):
    stream(["/bin/sh", "-c", "sleep 600 & echo $!; wait"], deadline_s=600, env=os.environ, on_line=print)

main.app = build
main.main()
"""
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        sleeping = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        for _ in range(600):  # whoever inherits it reaps it soon
            os.kill(sleeping, 0)
            time.sleep(0.1)
