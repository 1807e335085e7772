"""Throughput of pushing files: ours compared with scp and Debian's adb, to a real sshd and adbd, in pairs; JSON.

    python benchmarks/push_throughput.py [--mb 200] [--pairs 5] > result.json

Needs root, a calm machine and some network at first, for the devices of tests/integration/device_lab.py: daemons in
namespaces, wired by virtual Ethernet, which write to memory. So what is compared is the work of both ends, not a cable.

- `ours` and `theirs` are what is alike: the bytes, from a file here to a file there. scp's includes its log-in and ours
  does not, because an agent stays connected; for the same reason adb's server runs and is connected beforehand.
- `push` is what an agent waits for: the device also computes the hash of what arrived, and removes old content. Its
  speed is the device's; Debian's toybox, which the adb device has, hashes a tenth of what coreutils can.
- `adb` goes straight to the device, as to a phone with `adb tcpip`; `adb server` through the host's adb server, as to
  one on USB.

The order alternates. The file is random, so that compression has no effect; each copy is compared by its hash.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import print_json, say

from nas.measure.devices.files import file_sha256
from nas.measure.devices.transports.adb import AdbServer, AdbWire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.measure.devices.transports.wire import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from device_image import image
from device_lab import Machine, adbd, sshd, within

SERVER_PORT = 5099
THERE = "/tmp/copy"


@dataclass(frozen=True, slots=True)
class File:
    """The file that is copied."""

    path: Path
    sha256: str
    megabytes: float


@dataclass(frozen=True, slots=True)
class Way:
    """A transport to a device, and the tool to compare it with.

    Args:
        name: in the result.
        wire: ours.
        theirs: copies the file to THERE with that tool.
        tool: its name and version.
    """

    name: str
    wire: Wire
    theirs: Callable[[], None]
    tool: str


class ThroughServer(AdbWire):
    """A device on the network by the adb server's name; by its address alone it would be taken for a direct one."""

    def connect(self) -> None:
        """See `Wire.connect`."""
        os.environ["ANDROID_ADB_SERVER_PORT"] = str(SERVER_PORT)
        self._services = AdbServer(self._where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200, help="size of the file")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ways", default="ssh,adb,adb server", help="which, with commas between")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hilnas-push-", dir="/dev/shm") as folder:
        file = _random_file(Path(folder) / "file", options.mb)
        result: dict[str, Any] = {"mb": file.megabytes, "pairs": options.pairs, "load_1min": os.getloadavg()[0]}
        for name in options.ways.split(","):
            with WAYS[name](Path(folder) / name.replace(" ", "-"), file) as (machine, way):
                result[name] = _compared(machine, way, file, options.pairs)
    print_json(result)


def _random_file(path: Path, megabytes: int) -> File:
    with path.open("wb") as out:
        for _ in range(megabytes):
            out.write(os.urandom(1_000_000))
    return File(path, file_sha256(path), float(megabytes))


def _compared(machine: Machine, way: Way, file: File, pairs: int) -> dict[str, Any]:
    there = machine.root / THERE.lstrip("/")
    there.parent.mkdir(exist_ok=True)

    def checked(copy: Callable[[], None]) -> float:
        there.unlink(missing_ok=True)
        begun = time.perf_counter()
        copy()
        seconds = time.perf_counter() - begun
        assert hashlib.sha256(there.read_bytes()).hexdigest() == file.sha256, f"{way.name}: another content arrived"
        return file.megabytes / seconds

    def ours() -> None:
        way.wire.put(file.path, THERE)

    rows: list[dict[str, float]] = []
    transport = ShellTransport(way.wire)
    transport.connect()
    checked(ours)  # warm
    checked(way.theirs)
    for number in range(pairs):
        sides = {"ours": lambda: checked(ours), "theirs": lambda: checked(way.theirs)}
        order = list(sides) if number % 2 else list(reversed(sides))
        speeds = {side: sides[side]() for side in order}
        speeds["push"] = _pushed(machine, transport, file)
        rows.append(speeds | {f"{side}/theirs": speeds[side] / speeds["theirs"] for side in ("ours", "push")})
        say(f"{way.name}: {', '.join(f'{name} {value:.3g}' for name, value in rows[-1].items())}")
    there.unlink()
    transport.close()
    return {
        "tool": way.tool,
        "unit": "MB/s",
        "pairs": rows,
        "median": {name: statistics.median(row[name] for row in rows) for name in rows[0]},
    }


def _pushed(machine: Machine, transport: ShellTransport, file: File) -> float:
    """Returns MB/s of a whole push; the device checks the hash."""
    begun = time.perf_counter()
    remote = transport.push(file.path, file.sha256)
    seconds = time.perf_counter() - begun
    transport.run(["rm", "-f", remote], env={}, deadline_s=60, output_limit=1000)
    return file.megabytes / seconds


@contextlib.contextmanager
def _ssh(folder: Path, file: File) -> Iterator[tuple[Machine, Way]]:
    keys = folder / "keys"
    with sshd(folder / "device", keys, port=2222) as machine:
        address = SshAddress("root", machine.address, machine.port)
        pin(address, host_key(address), keys)
        options = [f"UserKnownHostsFile={keys}/known_hosts", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"]
        command = ["scp", "-q", "-F", "none", "-i", str(keys / "id_ed25519"), "-P", str(machine.port)]
        command += [part for option in options for part in ("-o", option)]

        def scp() -> None:
            subprocess.run([*command, str(file.path), f"root@{machine.address}:{THERE}"], check=True)

        version = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.split(",")[0]
        yield machine, Way("ssh", SshWire(address, keys), scp, f"scp of {version}")


@contextlib.contextmanager
def _adb(folder: Path, file: File) -> Iterator[tuple[Machine, Way]]:
    with _adb_server(folder, file) as (machine, keys, adb):
        address = f"{machine.address}:{machine.port}"
        yield machine, Way("adb", AdbWire(f"adb:{address}", keys), lambda: _adb_push(adb), _adb_version(adb))


@contextlib.contextmanager
def _through_server(folder: Path, file: File) -> Iterator[tuple[Machine, Way]]:
    with _adb_server(folder, file) as (machine, keys, adb):
        wire = ThroughServer(f"adb:{machine.address}:{machine.port}", keys)
        yield machine, Way("adb server", wire, lambda: _adb_push(adb), _adb_version(adb))


@contextlib.contextmanager
def _adb_server(folder: Path, file: File) -> Iterator[tuple[Machine, Path, list[str]]]:
    """Yields a device with adbd, the folder of keys, and Debian's adb with a connected server."""
    keys = folder / "keys"
    with adbd(folder / "device", AdbKey.load(keys / "adb").public()) as machine:
        mount = 'mount -t tmpfs tmpfs "$1/tmp"; cp "$2" "$1/tmp/key"; : >"$1/tmp/file"; mount --bind "$3" "$1/tmp/file"'
        enter = f'{mount}; root=$1; shift 3; exec chroot "$root" "$@"'
        adb = ["unshare", "--mount", "sh", "-ec", enter, "sh", str(image()), str(keys / "adb"), str(file.path)]
        adb += ["env", "-i", "HOME=/tmp", "ADB_VENDOR_KEYS=/tmp/key", "/usr/bin/adb", "-P", str(SERVER_PORT)]
        with subprocess.Popen(
            [*adb, "server", "nodaemon"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                address = f"{machine.address}:{machine.port}"
                assert within(20, lambda: "connected" in _say(adb, "connect", address)), "no adb server"
                yield machine, keys, [*adb, "-s", address]
            finally:
                server.kill()


def _adb_push(adb: list[str]) -> None:
    subprocess.run([*adb, "push", "/tmp/file", THERE], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _adb_version(adb: list[str]) -> str:
    return f"Debian's adb {_say(adb, 'version').partition('Version ')[2].split()[0]}"


def _say(adb: list[str], *words: str) -> str:
    done = subprocess.run([*adb, *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


WAYS = {"ssh": _ssh, "adb": _adb, "adb server": _through_server}

if __name__ == "__main__":
    assert shutil.which("scp"), "scp is not installed"
    main()
