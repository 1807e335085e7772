"""The local transport: the contract, and what only this machine can show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.devices.transports import TRANSPORTS, supervise
from nas.measure.devices.transports.base import Lease, Transport
from nas.measure.devices.transports.local import LocalTransport
from nas.testing.transport_contract import TransportContract, run


@pytest.fixture
def local(tmp_path: Path) -> LocalTransport:
    return LocalTransport(tmp_path / "cache")


class TestLocalContract(TransportContract):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> Iterator[Transport]:
        transport = TRANSPORTS["local"]("", tmp_path / "cache")
        transport.connect()
        yield transport
        transport.close()


def test_affinity_holds(local: LocalTransport) -> None:
    cpu = max(os.sched_getaffinity(0))
    assert run(local, "grep Cpus_allowed_list /proc/self/status", cpu_affinity=[cpu]).stdout.split()[1] == b"%d" % cpu


def test_a_processor_that_is_not_there(local: LocalTransport) -> None:
    with pytest.raises(Unsupported, match="cores"):
        run(local, "exit 0", cpu_affinity=[4000])


def test_a_kernel_that_cannot_watch_processes_is_named(
    local: LocalTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        Path(supervise.__file__)
        .read_text()
        .replace("os.pidfd_open(child)", "_missing()")
        .replace("def main()", "def _missing() -> int:\n    raise OSError(errno.ENOSYS, 'pidfd_open')\n\n\ndef main()")
    )
    monkeypatch.setattr(supervise, "__file__", str(script))
    with pytest.raises(Unsupported, match=r"cannot run sh: Linux 5\.3 or newer is needed"):
        run(local, "exit 0")


def test_a_deadline_may_be_longer_than_the_kernel_waits(local: LocalTransport) -> None:
    result = run(local, "exit 7", deadline_s=1e7)
    assert (result.exit_code, result.timed_out) == (7, False)


def test_processor_time_is_counted(local: LocalTransport) -> None:
    script = "sum(range(3_000_000))"
    result = local.run(["python3", "-S", "-c", script], env={}, deadline_s=60, output_limit=10)
    assert result.cpu_s is not None
    assert 0 < result.cpu_s <= result.wall_s * (os.cpu_count() or 1)


def test_a_descendant_that_left_the_group_is_killed_too(local: LocalTransport, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    run(local, f"setsid sh -c 'echo $$ > {mark}; exec sleep 300' & while [ ! -s {mark} ]; do :; done", deadline_s=30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_no_descriptor_leaks_into_the_process(local: LocalTransport) -> None:
    with Path("/dev/null").open() as opened:
        os.set_inheritable(opened.fileno(), True)
        assert run(local, "ls /proc/$$/fd").stdout.split() == [b"0", b"1", b"2"]


def test_push_links_where_it_can(local: LocalTransport, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.write_bytes(b"weights")
    remote = Path(local.push(source, sha256_of(source)))
    assert remote.samefile(source)


def test_damage_is_found_and_repaired(local: LocalTransport, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.write_bytes(b"weights")
    sha256 = sha256_of(source)
    remote = Path(local.push(source, sha256))
    remote.unlink()
    remote.write_bytes(b"weight?")
    with pytest.raises(InfrastructureFailed, match="damaged"):
        local.push(source, sha256)
    assert Path(local.push(source, sha256)).read_bytes() == b"weights"


def test_a_damaged_bundle_is_found_and_repaired(local: LocalTransport, tmp_path: Path) -> None:
    source = tmp_path / "runner"
    source.write_bytes(b"#!/bin/sh\n")
    files = {"runner": sha256_of(source)}
    local.push(source, files["runner"])
    folder = Path(local.bundle(files))
    (folder / "runner").chmod(0o755)
    (folder / "runner").write_bytes(b"#!/bin/sh\nrm -rf .\n")
    with pytest.raises(InfrastructureFailed, match="damaged"):
        local.bundle(files)
    assert Path(local.bundle(files), "runner").read_bytes() == b"#!/bin/sh\n"


def test_a_bundle_that_is_used_counts_as_new(local: LocalTransport, tmp_path: Path) -> None:
    source = tmp_path / "runner"
    source.write_bytes(b"#!/bin/sh\n")
    files = {"runner": sha256_of(source)}
    local.push(source, files["runner"])
    os.utime(local.bundle(files), (0, 0))
    assert Path(local.bundle(files)).stat().st_mtime > 0


def test_an_epoch_is_written_once_and_not_before_each_process(local: LocalTransport, tmp_path: Path) -> None:
    local.claim(Lease("authority", 3))
    recorded = (tmp_path / "cache" / "fences" / "authority").stat()
    run(local, "exit 0")
    assert (tmp_path / "cache" / "fences" / "authority").stat().st_ino == recorded.st_ino
