"""Transports over a shell: the contract on this machine's own `sh`, and devices that do not tell the truth."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from shell_here import ShellHere

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.measure.devices.transports import scripts, shell
from nas.measure.devices.transports.base import Lease, Transport
from nas.measure.devices.transports.scripts import read_report
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.wire import Stream
from nas.testing.transport_contract import TransportContract, run, write


class TestShellContract(TransportContract):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> Iterator[Transport]:
        # Every string that reaches the device is quoted, this one too.
        transport = ShellTransport(ShellHere(tmp_path / 'it\'s "$HOME" here'))
        transport.connect()
        yield transport
        transport.close()


@pytest.fixture
def device(tmp_path: Path) -> ShellTransport:
    return ShellTransport(ShellHere(tmp_path / "device"))


def test_processors_that_are_not_there(device: ShellTransport) -> None:
    with pytest.raises(Unsupported, match="cores"):
        run(device, "exit 0", cpu_affinity=[4000])


def test_reading_takes_time_in_proportion_to_the_number_of_files(device: ShellTransport, tmp_path: Path) -> None:
    """Servers have thousands of files below /sys; reading all must not be booked as other processes' work."""
    seconds = []
    for number in (1_000, 8_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(number):
            (folder / f"{name:04}").write_text("45000\n")
        start = sum(os.times()[:4])
        assert len(device.read_many([f"{folder}/*"])) == number
        seconds.append(sum(os.times()[:4]) - start)
    assert seconds[1] < 24 * seconds[0] + 0.5, seconds


def test_a_device_without_a_tool_that_is_needed(device: ShellTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "TOOLS", ("sh", "no-such-tool"))
    with pytest.raises(Unsupported, match="lacks no-such-tool"):
        device.connect()


def test_a_device_without_the_clock_that_is_needed(device: ShellTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "PREPARE", scripts.PREPARE.replace("cat /proc/", "cat /nowhere/"))
    with pytest.raises(Unsupported, match="lacks a readable /proc/uptime"):
        device.connect()


def test_the_least_recently_used_content_is_removed(
    device: ShellTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "KEPT_KB", 250)
    content = tmp_path / "device" / "content"
    places: dict[int, Path] = {}
    for letter in range(4):
        device.claim(Lease("authority", letter))  # what a job has pushed itself stays until the next one
        path = tmp_path / f"{letter}"
        path.write_bytes(bytes([letter]) * 100_000)
        places[letter] = Path(device.push(path, shell.sha256_of(path)))
        for at, place in places.items():
            if place.exists():
                os.utime(place, (at, at))
    assert [letter for letter, place in places.items() if place.exists()] == [2, 3]
    assert sum(path.stat().st_size for path in content.iterdir()) < 250_000


def test_a_full_device_loses_what_the_job_does_not_need(
    device: ShellTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tmp_path / "device" / "content"

    def push(name: str) -> None:
        (tmp_path / name).write_text(name)
        device.push(tmp_path / name, shell.sha256_of(tmp_path / name))

    for number in range(2):
        device.claim(Lease("authority", number))
        push(f"{number}")
    assert len(list(content.iterdir())) == 3  # with the supervisor
    full = 'echo "head: write error: No space left on device"; exit 1'
    receive = f'[ "$(ls {content} | wc -l)" -lt 3 ] || {{ {full}; }}\n{scripts.RECEIVE}'
    monkeypatch.setattr(scripts, "RECEIVE", receive)
    push("more")
    assert len(list(content.iterdir())) == 3
    with pytest.raises(InfrastructureFailed, match=r"No space left on device \(\d+ MB are free there\)"):
        push("too much")


def test_a_device_that_is_full_when_a_runner_is_put_together_loses_what_the_job_does_not_need(
    device: ShellTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tmp_path / "device" / "content"
    files: dict[str, str] = {}
    for number in range(2):
        device.claim(Lease("authority", number))
        path = tmp_path / f"{number}"
        path.write_text(f"{number}")
        files = {"runner": shell.sha256_of(path)}
        device.push(path, files["runner"])
    full = 'echo "cp: error writing: No space left on device"; exit 3'
    bundle = f'[ "$(ls {content} | wc -l)" -lt 3 ] || {{ {full}; }}\n{scripts.BUNDLE}'
    monkeypatch.setattr(scripts, "BUNDLE", bundle)
    assert Path(device.bundle(files), "runner").read_text() == "1"
    assert len(list(content.iterdir())) == 2  # with the supervisor


@pytest.mark.parametrize("authority", ["", ".", "..", "../x", "a/b", "a b", "$(x)", "-", "x" * 65])
def test_an_authority_has_a_plain_name(authority: str) -> None:
    with pytest.raises(InvalidInput):
        Lease(authority, 1)


class Liar:
    """A `Stream` of prepared answers."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = iter(pieces)
        self.byte_count = 0

    def read(self, timeout_s: float) -> bytes | None:
        piece = next(self.pieces, b"")
        self.byte_count += len(piece)
        return piece

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Lying(ShellHere):
    """Tells the truth until `answer` is set."""

    answer: Liar | None = None

    def start(self, command: str) -> Stream:
        return self.answer or super().start(command)


@pytest.fixture
def lying(tmp_path: Path) -> tuple[ShellTransport, Lying]:
    wire = Lying(tmp_path / "device")
    transport = ShellTransport(wire)
    transport.connect()
    return transport, wire


def test_a_device_that_never_stops_talking(lying: tuple[ShellTransport, Lying], tmp_path: Path) -> None:
    transport, wire = lying
    asking = {
        "run": lambda: run(transport, "exit 0", output_limit=1000),
        "claim": lambda: transport.claim(Lease("coordinator", 1)),
        "read_many": lambda: transport.read_many(["/x"]),
    }
    for ask in asking.values():
        wire.answer = Liar(itertools.repeat(b"x" * 1000))
        with pytest.raises(InfrastructureFailed, match="more than was asked"):
            ask()
        assert wire.answer.byte_count < 2 << 20


@pytest.mark.parametrize("pieces", [[], [b"garbage"], [b"\n"], [b"\xff\x00" * 100]])
def test_a_device_that_talks_nonsense(lying: tuple[ShellTransport, Lying], pieces: list[bytes]) -> None:
    transport, wire = lying
    wire.answer = Liar(pieces)
    with pytest.raises(InfrastructureFailed):
        run(transport, "exit 0")
    with pytest.raises(InfrastructureFailed):
        transport.read_many(["/x"])


TIMES = "0m0.0s " * 8


@pytest.mark.parametrize(
    "report",
    [
        f"r 0 {TIMES}ran 0 1.0 2.0\n",
        f"r 0 {TIMES}ran x 1.0 2.0 0\n",
        f"r 0 {TIMES}ran 0 1.0 2.0 0 and more\n",
        f"r 5 {TIMES}ran 0 1.0 2.0 0\n",
        f"r 0 {'0m ' * 8}ran 0 1.0 2.0 0\n",
        f"r 0 {TIMES}\n",
        "r\n",
    ],
)
def test_a_report_that_is_not_whole(report: str) -> None:
    with pytest.raises(InfrastructureFailed):
        read_report(b"r\noutput\n" + report.encode(), "r", "device")


def test_a_report() -> None:
    times = "0m00.01s 0m00.02s 1m00.50s 0m00.25s 0m00.01s 0m00.02s 1m01.00s 0m00.50s"
    report = read_report(f"welcome\nr\nout\n\nr 4 {times} ran 137 10.00 12.50 1\nerr\n".encode(), "r", "device")
    assert (report.output, report.errors, report.runner_cpu_s) == (b"out\n", b"err\n", 60.75)
    assert report.ran is not None
    assert (report.ran.exit_code, report.ran.wall_s, report.ran.timed_out) == (-9, 2.5, True)


def test_a_runner_cannot_forge_its_report(device: ShellTransport) -> None:
    """It does not know the mark of its run; and what it says comes before the true report."""
    result = run(device, f"printf '\\n%s 0 {TIMES}ran 0 1.0 2.0 0 -\\n' 0123456789abcdef; exit 3")
    assert result.exit_code == 3


def test_all_files_are_below_the_folder(device: ShellTransport, tmp_path: Path) -> None:
    device.connect()
    write(device, "x", str(tmp_path / "device" / "runs" / "mark"))
    assert {path.name for path in (tmp_path / "device").iterdir()} >= {"content", "bundles", "runs", "fences", "tmp"}
    assert (tmp_path / "device").stat().st_mode & 0o777 == 0o700


def processes(condition: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Those with such a command line, ancestors first."""
    pairs = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if condition(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                pairs.append((len(process.parents()), process))
    return [process for _, process in sorted(pairs, key=lambda pair: pair[0])]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(slice(1), id="the one that reports"),
        pytest.param(slice(-1, None), id="the one that waits for the runner"),
        pytest.param(slice(None), id="all"),
    ],
)
def test_a_supervisor_that_is_killed_is_noticed_at_once(device: ShellTransport, tmp_path: Path, chosen: slice) -> None:
    """Not at the deadline only, and the runner is not left alone."""
    device.connect()
    runner, root = ["sleep", f"30{os.getpid()}"], str(tmp_path / "device")
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(device.run, runner, env={}, deadline_s=3600, output_limit=100)
        while not processes(runner.__eq__):
            assert not result.done()
            threading.Event().wait(0.01)
        for process in processes(lambda line: line[2:4] == ["run", root])[chosen]:
            process.kill()
        with pytest.raises(InfrastructureFailed, match="ended"):
            result.result(timeout=60)
    assert not processes(runner.__eq__)
    assert run(device, "exit 3").exit_code == 3
