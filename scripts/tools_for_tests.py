"""Finds out which groups of tests this machine has the tools for, and installs what is missing where it may.

    tools_for_tests.py install    as root on Debian or Ubuntu: installs by apt what is missing
    tools_for_tests.py report     lists the groups that are left out here, and the line that adds them

Both exit with 0; where CI is "true", a missing group is a failure. Tests name their group with the marker `needs`, or
use a fixture of it; tests/conftest.py leaves out those whose group is missing and says so. Standard library only.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
ARM64 = Path("/usr/aarch64-linux-gnu/lib/libstdc++.so.6")
POSTGRESQL = Path("/usr/lib/postgresql")
DEVICE_TOOLS = (
    *("apt-get", "chroot", "dpkg-deb", "ip", "losetup", "mkfs.ext4", "mount", "nsenter", "ssh-keygen", "tc", "unshare"),
)
CONTROL_GROUPS = Path("/sys/fs/cgroup")
NOT_ROOT = "root"
_PROBE_S, _STDERR = 30.0, 2


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that need the same tools.

    Args:
        what: they do, for messages.
        packages: of Debian and Ubuntu that bring the tools.
        missing: returns which of these tools this machine lacks.
        denied: returns what else keeps them from running here, which no package mends.
        fixtures: a test with one of them belongs to the group.
    """

    what: str
    packages: tuple[str, ...]
    missing: Callable[[], list[str]]
    denied: Callable[[], str] = lambda: ""
    fixtures: tuple[str, ...] = ()


def _browser() -> list[str]:
    return [] if any(map(shutil.which, CHROMIUM)) else ["chromium"]


def _postgresql() -> list[str]:
    return [] if shutil.which("initdb") or any(POSTGRESQL.glob("*/bin/initdb")) else ["initdb"]


def _nginx() -> list[str]:
    return [] if shutil.which("nginx") else ["nginx"]


def _speech() -> list[str]:
    return [] if shutil.which("espeak-ng") else ["espeak-ng"]


def _arm64() -> list[str]:
    if platform.machine() == "aarch64":
        return []
    libraries = [] if ARM64.exists() else [ARM64.name]
    return ([] if any(map(shutil.which, EMULATORS)) else [EMULATORS[1]]) + libraries


def _no_namespaces() -> str:
    if platform.machine() != "x86_64":
        return "an x86-64 processor"
    if os.geteuid():
        return NOT_ROOT
    probe = ["unshare", "--mount", "--net", "--pid", "--fork", "true"]
    allowed = subprocess.run(probe, capture_output=True, check=False, timeout=_PROBE_S).returncode == 0
    return "" if allowed else "the right to make namespaces"


def _no_control_groups() -> str:
    parents = [CONTROL_GROUPS / "cpuset", CONTROL_GROUPS / "cpu"]
    parents = parents if all(parent.is_dir() for parent in parents) else [CONTROL_GROUPS]
    try:
        for parent in parents:
            folder = parent / f"hilnas-probe-{os.getpid()}"
            folder.mkdir()
            folder.rmdir()
    except OSError:
        return "the right to make control groups"
    return ""


GROUPS = {
    "browser": Group("look at pages in Chromium", ("chromium",), _browser, fixtures=("browser",)),
    "postgresql": Group(
        "run the store on PostgreSQL", ("postgresql",), _postgresql, fixtures=("postgres_server", "postgres")
    ),
    "nginx": Group("reach the coordinator through a reverse proxy", ("nginx-light",), _nginx),
    "speech": Group("speak clips to train on", ("espeak-ng",), _speech),
    "arm64": Group("run arm64 runners by emulation", ("qemu-user-static", "libstdc++6-arm64-cross"), _arm64),
    "devices": Group(
        "reach real adbd and sshd on machines made of namespaces",
        ("iproute2", "openssh-client", "debian-archive-keyring", "e2fsprogs"),
        lambda: [name for name in DEVICE_TOOLS if not shutil.which(name)],
        _no_namespaces,
    ),
    "control groups": Group("limit the cores and processor time of such machines", (), list, _no_control_groups),
}


def absent() -> dict[str, str]:
    """Returns the groups that cannot run here, and what each lacks."""
    gaps = {name: ", ".join(group.missing()) or group.denied() for name, group in GROUPS.items()}
    return {name: lacks for name, lacks in gaps.items() if lacks}


def remedy(groups: Mapping[str, str]) -> str:
    """Returns the line that adds absent groups."""
    packages = [package for name in groups if GROUPS[name].missing() for package in GROUPS[name].packages]
    steps = [f"apt install {' '.join(packages)}"] if packages else []
    if any(GROUPS[name].denied() == NOT_ROOT for name in groups):
        steps.append("run make test as root")
    return "; ".join(steps)


def in_ci() -> bool:
    """Returns whether nothing may be left out."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def install() -> None:
    """Installs the packages of absent groups; one that apt does not have is left out alone."""
    groups = [group for group in GROUPS.values() if group.missing()]
    if not groups or os.geteuid() or not shutil.which("apt-get"):
        return
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], env=env, check=False)
    for group in groups:
        say(f"installing {' '.join(group.packages)} (apt-get), for tests that {group.what}")
        subprocess.run(["apt-get", "-qq", "install", "-y", *group.packages], env=env, check=False, stdout=_STDERR)


def report() -> int:
    """Lists the groups that are left out; returns the exit code."""
    groups = absent()
    for name, lacks in groups.items():
        say(f"left out: those that {GROUPS[name].what} (group {name}; missing: {lacks})")
    if line := remedy(groups):
        say(f"to run them too on Debian or Ubuntu: {line}")
    return 1 if groups and in_ci() else 0


def say(message: str) -> None:
    """Prints a line."""
    print(f"tests: {message}", file=sys.stderr, flush=True)


def main(command: str) -> int:
    """Runs one command; returns the exit code."""
    if command == "install":
        install()
    return report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
