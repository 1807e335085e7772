"""Plans and rounds on this machine, with scripts for runners."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.plan import InputFile, Plan, PlanFile, Round, RoundResult, Runner
from nas.measure.devices.agent.run_plan import Observer, execute, prepare, run_round
from nas.measure.devices.transports.base import Cancelled
from nas.measure.devices.transports.local import LocalTransport


class Folder:
    """A `FileSource` over files written by the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[str] = []
        self.doubted: list[str] = []

    def add(self, content: bytes | str) -> InputFile:
        data = content.encode() if isinstance(content, str) else content
        sha256 = hashlib.sha256(data).hexdigest()
        (self.root / sha256).write_bytes(data)
        return InputFile(sha256=sha256, size=len(data))

    def fetch(self, file: PlanFile) -> Path:
        self.fetched.append(file.sha256)
        return self.root / file.sha256

    def doubt(self, file: PlanFile) -> None:
        self.doubted.append(file.sha256)

    def plan(self, script: str, *args: str, inputs: Mapping[str, str] | None = None, **more: Any) -> Plan:
        files = {"main.sh": self.add(f"#!/bin/sh\n{script}\n")}
        runner = Runner(
            runtime="script", build="b" * 64, target="x86_64-linux", files=files, main="main.sh", options=("--model",)
        )
        contents = {name: self.add(text) for name, text in (inputs or {}).items()}
        return Plan(**({"runner": runner, "inputs": contents, "args": args, "deadline_s": 30} | more))


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    root = tmp_path / "files"
    root.mkdir()
    return Folder(root)


@pytest.fixture
def transport(tmp_path: Path) -> LocalTransport:
    return LocalTransport(tmp_path / "cache")


class FakeClock(SystemClock):
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def run_here(batch: Round, transport: LocalTransport, files: Folder, **options: Any) -> RoundResult:
    defaults: dict[str, Any] = {"observer": Observer(transport), "clock": SystemClock()}
    return run_round(batch, transport, files, lambda runner: True, **(defaults | options))


def test_arguments_name_inputs_by_their_path_on_the_device(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan('cat "$2"; echo " $1 $3 $4"', "--model", "{model}", "q8_0", "1e-05", inputs={"model": "weights"})
    raw = execute(prepare(plan, transport, files, lambda runner: True), transport, Observer(transport))
    assert raw.stdout == "weights --model q8_0 1e-05\n"
    assert raw.exit_code == 0


def test_only_inputs_of_the_plan_are_named(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("exit 0", "{modle}", inputs={"model": "weights"})
    with pytest.raises(UnknownName, match="did you mean 'model'"):
        prepare(plan, transport, files, lambda runner: True)


@pytest.mark.parametrize(
    "words",
    [
        ("--logits", "log"),
        ("--recipe", "{model}", "--output", "/tmp/autostart.sh"),
        ("--model", "/etc/passwd"),
        ("--model", "--output"),
        ("--model", "~/x"),
        ("--model", ".."),
        ("--model", "{model}/../x"),
        ("--model={model}",),
        ("--model=/etc/passwd",),
        ("-o", "x"),
        ("",),
        ("a b",),
        ("x\n",),
    ],
)
def test_a_plan_gives_a_runner_no_option_but_those_that_were_signed_and_no_path(
    files: Folder, transport: LocalTransport, words: tuple[str, ...]
) -> None:
    plan = files.plan("exit 0", *words, inputs={"model": "weights"})
    with pytest.raises(InvalidInput):
        prepare(plan, transport, files, lambda runner: True)
    assert files.fetched == []


def test_a_variable_of_a_plan_names_no_file(files: Folder, transport: LocalTransport) -> None:
    prepare(files.plan("exit 0", env={"OMP_PLACES": "{0}:4:1, threads(2)"}), transport, files, lambda runner: True)
    with pytest.raises(InvalidInput, match="LC_ALL"):
        prepare(files.plan("exit 0", env={"LC_ALL": "/tmp/locale"}), transport, files, lambda runner: True)


def test_a_file_that_could_not_be_pushed_is_checked_again(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("exit 0", "--model", "{model}", inputs={"model": "weights"})
    rotten = plan.inputs["model"].sha256
    (files.root / rotten).write_bytes(b"WEIGHTS")
    with pytest.raises(InfrastructureFailed):
        prepare(plan, transport, files, lambda runner: True)
    assert files.doubted == [rotten]


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "LD_LIBRARY_PATH", "GGML_BACKEND_PATH", "PATH", "PYTHONPATH"])
def test_a_plan_may_not_load_code_through_the_environment(
    files: Folder, transport: LocalTransport, variable: str
) -> None:
    with pytest.raises(UnknownName, match=variable):
        prepare(files.plan("exit 0", env={variable: "/tmp"}), transport, files, lambda runner: True)


def test_environment_of_a_plan_reaches_the_runner(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "3"})
    raw = execute(prepare(plan, transport, files, lambda runner: True), transport, Observer(transport))
    assert raw.stdout == "3\n"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "", ".", "..", ".hidden"])
def test_runner_files_have_plain_names(files: Folder, transport: LocalTransport, name: str) -> None:
    plan = files.plan("exit 0")
    runner = plan.runner.model_copy(update={"files": plan.runner.files | {name: files.add("x")}})
    with pytest.raises(InvalidInput, match="file name"):
        prepare(plan.model_copy(update={"runner": runner}), transport, files, lambda runner: True)


def test_an_unknown_runner_is_refused_before_anything_is_fetched(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("exit 0")
    with pytest.raises(Unsupported, match="manifest"):
        prepare(plan, transport, files, lambda runner: False)
    assert files.fetched == []


def test_a_runner_with_other_bytes_than_its_hash_never_runs(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("exit 0")
    (files.root / plan.runner.files["main.sh"].sha256).write_text("#!/bin/sh\nrm -rf .\n")
    with pytest.raises(InfrastructureFailed, match="SHA-256"):
        prepare(plan, transport, files, lambda runner: True)


def test_round_alternates_reference_and_candidate(files: Folder, transport: LocalTransport, tmp_path: Path) -> None:
    log = tmp_path / "log"
    candidate, reference = (files.plan(f"printf {letter} >> {log}; echo {letter}") for letter in "CR")
    result = run_here(Round(candidate=candidate, reference=reference, repetitions=3), transport, files)
    assert log.read_text() == "RCRCRC"
    assert [(pair.reference and pair.reference.stdout, pair.candidate.stdout) for pair in result.pairs] == [
        ("R\n", "C\n")
    ] * 3


def test_round_without_reference(files: Folder, transport: LocalTransport) -> None:
    result = run_here(Round(candidate=files.plan("exit 0"), repetitions=2), transport, files)
    assert [pair.reference for pair in result.pairs] == [None, None]


def test_inputs_are_fetched_once_per_round(files: Folder, transport: LocalTransport) -> None:
    plan = files.plan("exit 0", "{model}", inputs={"model": "weights"})
    run_here(Round(candidate=plan, repetitions=3), transport, files)
    assert len(files.fetched) == 2


@pytest.mark.parametrize(
    ("script", "limits", "expected"),
    [
        ("exit 3", {}, {"exit_code": 3}),
        ("kill -SEGV $$", {}, {"exit_code": -11}),
        ("sleep 300", {"deadline_s": 0.2}, {"timed_out": True}),
        ("yes", {"output_limit": 100}, {"truncated": True}),
    ],
)
def test_a_failed_run_is_a_result_and_ends_the_round(
    files: Folder, transport: LocalTransport, script: str, limits: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = run_here(Round(candidate=files.plan(script, **limits), repetitions=3), transport, files)
    assert len(result.pairs) == 1
    assert result.pairs[0].candidate.model_dump(include=set(expected)) == expected


def test_the_phases_of_a_round(files: Folder, transport: LocalTransport) -> None:
    phases: list[tuple[str, float]] = []
    clock = FakeClock()
    batch = Round(candidate=files.plan("exit 0"), repetitions=2, cool_down_s=2.5)
    run_here(batch, transport, files, clock=clock, enter=lambda phase: phases.append((phase, clock.time)))
    assert phases == [("preparing", 0.0), ("cooling", 0.0), ("running", 2.5)]


def test_cancelled_while_cooling_down(files: Folder, transport: LocalTransport) -> None:
    batch = Round(candidate=files.plan("exit 0"), repetitions=1, cool_down_s=1000)
    clock = FakeClock()
    with pytest.raises(Cancelled):
        run_here(batch, transport, files, clock=clock, cancelled=lambda: clock.time > 5)


def test_cancelled_while_running(files: Folder, transport: LocalTransport) -> None:
    with pytest.raises(Cancelled):
        run_here(Round(candidate=files.plan("sleep 300"), repetitions=1), transport, files, cancelled=lambda: True)


def test_output_that_is_no_text_survives(files: Folder, transport: LocalTransport) -> None:
    result = run_here(Round(candidate=files.plan(r"printf '\377\000'"), repetitions=1), transport, files)
    assert result.pairs[0].candidate.stdout == "\ufffd\0"
    assert RoundResult.model_validate_json(result.model_dump_json()) == result


COOK = """
if [ "$1" = --recipe ]; then tr a-z A-Z < "$2" > "$4"; else cat "$1"; fi
"""


def cooked(files: Folder, script: str = COOK, content: str = "WEIGHTS") -> Plan:
    """A plan whose model is its recipe in capitals."""
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    model = InputFile(sha256=sha256, size=len(content), recipe=files.add("weights"))
    return files.plan(script, "{model}").model_copy(update={"inputs": {"model": model}})


def test_the_runner_makes_an_input_from_its_recipe(files: Folder, transport: LocalTransport) -> None:
    plan = cooked(files)
    for _ in range(2):
        raw = execute(prepare(plan, transport, files, lambda runner: True), transport, Observer(transport))
        assert raw.stdout == "WEIGHTS"
    assert plan.inputs["model"].sha256 not in files.fetched, "only the recipe travels"


def test_what_a_recipe_makes_is_verified(files: Folder, transport: LocalTransport) -> None:
    with pytest.raises(InfrastructureFailed, match="bytes have SHA-256"):
        prepare(cooked(files, content="other"), transport, files, lambda runner: True)


@pytest.mark.parametrize(
    ("script", "message"), [("echo disk full >&2; exit 74", "exit code 74: disk full"), ("exit 0", "No such file")]
)
def test_a_file_that_is_not_made_is_no_candidates_fault(
    files: Folder, transport: LocalTransport, script: str, message: str
) -> None:
    with pytest.raises(InfrastructureFailed, match=message):
        prepare(cooked(files, script), transport, files, lambda runner: True)


def test_an_unknown_runner_makes_nothing(files: Folder, transport: LocalTransport) -> None:
    with pytest.raises(Unsupported):
        prepare(cooked(files), transport, files, lambda runner: False)
    assert files.fetched == []
