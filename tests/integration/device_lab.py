"""Real devices for tests: Debian's own adbd and sshd, each alone on a machine made of namespaces.

A machine has its own network, processes and mounts, and sees a root file system of Debian packages that nothing else
uses; on this host nothing is installed. It is wired to this host by a pair of virtual Ethernet interfaces, which can
be cut. Its processes are seen from here, so that a test knows what really runs there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from device_image import ADBD, check_host, image

ACCOUNT = "lab"

BOOT = """
set -e
mount -t tmpfs -o mode=755 tmpfs {scratch}
mkdir {scratch}/upper {scratch}/work {scratch}/root
mount -t overlay -o lowerdir={image},upperdir={scratch}/upper,workdir={scratch}/work overlay {scratch}/root
cd {scratch}/root
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero urandom random tty; do : >dev/$node; mount --bind /dev/$node dev/$node; done
mkdir dev/pts && mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts && ln -s pts/ptmx dev/ptmx
mkdir -p run/sshd root data/local/tmp data/misc/adb
{setup}
touch run/booted
while :; do chroot . env -i PATH={path} HOME=/root {daemon} || true; sleep 0.2; done
"""


@dataclass
class Link:
    """A network of its own, wired to this host.

    Args:
        name: of the network namespace, and of this host's end of the wire.
        address: of the other end.
    """

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that runs on that network."""
        return ("ip", "netns", "exec", self.name)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Drops all packets while the context is open, without telling either side."""
        _ip("link", "set", self.name, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.name, "up")

    def slow(self, megabits: int) -> None:
        """No more than so many Mbit/s pass in either direction from now on."""
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.name, *shape], check=True)
        subprocess.run(["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", *shape], check=True)


@dataclass
class Machine(Link):
    """A running device.

    Args:
        name: see `Link`.
        address: where its daemon listens.
        port: same.
        init: process id, on this host, of what started everything there.
    """

    port: int
    init: int

    @property
    def root(self) -> Path:
        """Its files."""
        return Path(f"/proc/{self.init}/root{self._inside}")

    @property
    def _inside(self) -> Path:
        """Where they lie for those who share its mounts."""
        return Path(f"/proc/{self.init}/cwd").readlink()

    def forget(self, folder: str) -> None:
        """Removes one of its folders."""
        shutil.rmtree(self.root / folder, ignore_errors=True)

    @contextlib.contextmanager
    def running(self, *command: str) -> Iterator[None]:
        """A program that runs there while the context is open."""
        inside = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--net", f"--wdns={self._inside}"]
        with subprocess.Popen(
            [*inside, "chroot", ".", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as it:
            try:
                yield
            finally:
                it.kill()

    def processes(self, *words: str) -> list[int]:
        """Process ids, on this host, of its processes whose arguments, from the first on, contain `words`."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                same_namespace = (entry / "ns/pid").readlink() == Path(f"/proc/{self.init}/ns/pid").readlink()
                line = (entry / "cmdline").read_text(errors="replace").split("\0")
                if same_namespace and len(line) >= len(words) and all(map(str.__contains__, line, words)):
                    pids.append(int(entry.name))
        return pids

    def kill(self, *words: str) -> None:
        """Sends SIGKILL to all of these processes."""
        pids = self.processes(*words)
        assert pids, words
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def small_disk(self, folder: str, megabytes: int) -> Iterator[None]:
        """One of its folders is an empty disk of that size while the context is open."""
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        place = f"{self._inside}/{folder}"
        enter = ["nsenter", f"--target={self.init}", "--mount"]
        subprocess.run([*enter, "mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
        try:
            yield
        finally:
            subprocess.run([*enter, "umount", "--lazy", place], check=True)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits for `condition`; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def cpuset(core: int) -> contextlib.AbstractContextManager[Path]:
    """A control group whose processes may use one core."""
    settings = {"cpuset.mems": "0", "cpuset.cpus": str(core)}
    return _control_group("cpuset", settings, settings)


def quota(cores: float) -> contextlib.AbstractContextManager[Path]:
    """A control group whose processes together get the time of so many cores."""
    period = 100_000
    allowed = int(period * cores)
    first = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(allowed)}
    return _control_group("cpu", first, {"cpu.max": f"{allowed} {period}"})


@contextlib.contextmanager
def _control_group(controller: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Path]:
    """A control group with the settings of version 1 or 2; yields its folder. Ends when its processes have ended."""
    version_1 = Path("/sys/fs/cgroup") / controller
    root = version_1 if version_1.is_dir() else version_1.parent
    folder = root / f"hilnas-{os.getpid()}"
    if root != version_1:
        (root / "cgroup.subtree_control").write_text(f"+{controller}")
    folder.mkdir()
    for name, text in (first if root == version_1 else second).items():
        (folder / name).write_text(text)
    try:
        yield folder
    finally:
        assert within(20, lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


_started = 0


@contextlib.contextmanager
def machine(
    folder: Path, daemon: str, port: int, setup: str, path: str = "/usr/bin:/usr/sbin", group: Path | None = None
) -> Iterator[Machine]:
    """Boots a machine and waits for its daemon.

    Args:
        folder: an empty one of this host.
        daemon: command line.
        port: where the daemon listens.
        setup: shell commands that run before, in the root folder of the machine.
        path: PATH of the daemon and its children.
        group: the control group that it runs in; None: that of this process.
    """
    check_host()
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    boot = BOOT.format(scratch=scratch, image=image(), setup=setup, daemon=daemon, path=path)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(wired())
        log = stack.enter_context((folder / "log").open("wb"))
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", boot]
        enter = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs")] if group else []
        outer = subprocess.Popen([*enter, *link.inside, *inside], stdout=log, stderr=log)
        stack.callback(outer.wait)
        stack.callback(outer.kill)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        assert within(60, lambda: bool(children.read_text())), (folder / "log").read_text()
        booted = Machine(link.name, link.address, port, int(children.read_text()))
        assert within(60, lambda: _listens(booted)), (folder / "log").read_text()
        yield booted


@contextlib.contextmanager
def wired() -> Iterator[Link]:
    """A network namespace and the wire to it."""
    global _started
    _started += 1
    # Other processes have wires of their own: the process number is in the names and in the addresses.
    pid, last = os.getpid(), 4 * (_started % 64)
    name, net = f"hil{pid % 100000}-{_started}", f"10.{100 + pid % 100}.{pid // 100 % 256}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", f"{net}.{last + 1}/30", "dev", name)
        _ip("link", "set", name, "up")
        for arguments in (["addr", "add", f"{net}.{last + 2}/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _ip("-n", name, *arguments)
        _ip("-n", name, "link", "set", "lo", "up")
        yield Link(name, f"{net}.{last + 2}")
    finally:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _listens(machine: Machine) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((machine.address, machine.port), 1):
        return True
    return False


@contextlib.contextmanager
def sshd(
    folder: Path, keys: Path, *, port: int = 22, options: str = "", setup: str = "", group: Path | None = None
) -> Iterator[Machine]:
    """A machine with sshd, which accepts the key in `keys`; one is made where there is none.

    Args:
        folder: an empty one of this host.
        keys: the agent's.
        port: where it listens.
        options: more lines of its configuration.
        setup: more commands before it starts.
        group: the control group that it runs in.
    """
    config = f"""
Port {port}
HostKey /run/host_key
AuthorizedKeysFile /run/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
Subsystem sftp /usr/lib/openssh/sftp-server
{options}
"""
    commands = f"""
ssh-keygen -q -t ed25519 -N '' -f run/host_key
cp {_public_key(keys)} run/authorized_keys
printf %s {shlex.quote(config)} >run/sshd_config
{setup}
"""
    with machine(folder, "/usr/sbin/sshd -D -e -f /run/sshd_config", port, commands, group=group) as booted:
        yield booted


@contextlib.contextmanager
def account(folder: Path, keys: Path, *, setup: str = "") -> Iterator[Machine]:
    """A server with sshd where `ACCOUNT` is no root, logs in to fish, has one session at a time, and German numbers."""
    home = f"home/{ACCOUNT}"
    commands = f"""
echo '{ACCOUNT}:x:1000:1000::/{home}:/usr/bin/fish' >>etc/passwd
mkdir -p {home} && chown 1000:1000 {home}
{setup}
"""
    options = "MaxSessions 1\nSetEnv LC_ALL=de_DE.UTF-8"
    with sshd(folder, keys, options=options, setup=commands) as booted:
        yield booted


@contextlib.contextmanager
def board(folder: Path, keys: Path, *, port: int = 22, setup: str = "") -> Iterator[Machine]:
    """A machine as embedded boards are: dropbear, and no tools but those of busybox."""
    commands = f"""
chroot . dropbearkey -t ed25519 -f run/host_key >/dev/null
mkdir -m 700 root/.ssh
install -m 600 {_public_key(keys)} root/.ssh/authorized_keys
chown -R 0:0 root && chmod 755 root
cp usr/bin/busybox usr/bin/flock run
for applet in busybox/*; do ln -sf /run/busybox $applet; done
ln -sf /run/flock busybox/flock
{setup}
mount --bind busybox usr/bin
"""
    with machine(folder, f"/usr/sbin/dropbear -F -E -s -r /run/host_key -p {port}", port, commands) as booted:
        yield booted


@contextlib.contextmanager
def adbd(folder: Path, public_key: str, *, port: int = 5555, setup: str = "") -> Iterator[Machine]:
    """A machine with adbd, a shell and tools as phones have them: mksh and toybox, no others on PATH."""
    commands = f"""
mount --bind usr/bin/mksh-static usr/bin/dash
printf '%s\\n' {shlex.quote(public_key)} >data/misc/adb/adb_keys
{setup}
"""
    daemon = f"ADBD_PORT={port} /{ADBD}-auth"
    with machine(folder, daemon, port, commands, path="/android") as booted:
        yield booted


def _public_key(keys: Path) -> str:
    """The quoted path of the agent's public key; a pair is made where there is none."""
    keys.mkdir(parents=True, exist_ok=True)
    if not (keys / "id_ed25519").exists():
        new_key(keys / "id_ed25519")
    return shlex.quote(f"{keys}/id_ed25519.pub")


def new_key(path: Path) -> None:
    """An ed25519 key pair."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
