"""The root file system of test devices: Debian packages of its own release; nothing is installed on this host."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from nas.core import paths

RELEASE = "trixie"
PACKAGES = (
    *("adb", "adbd", "dropbear-bin", "openssh-server", "openssh-sftp-server"),
    *("bash", "busybox-static", "coreutils", "dash", "findutils", "grep", "mksh", "procps", "sed", "toybox"),
    *("libfaketime", "time", "util-linux"),
    *("fish", "gzip", "ksh93u+m", "locales", "tcsh", "zsh"),
)
LOCALES = ("de_DE", "tr_TR")
"""With a decimal comma; in the second the capital of `i` is another letter."""
TOOLS = ("apt-get", "chroot", "dpkg-deb", "ip", "mount", "ssh-keygen", "unshare")

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
"""Debian's keys, where the package debian-archive-keyring puts them, on Ubuntu, too."""

ADBD = "usr/lib/android-sdk/platform-tools/adbd"
NO_AUTH = re.compile(
    rb"\xbe\x01\0\0\0\xbf\x0d\0\0\0(?:\xe8.{4}){3}\x48\x8d\x05.{4}\xc6\x00(\x00)",
    re.DOTALL,
)
"""Debian's adbd asks for no key (its patch adbd-don-t-require-authorization-on-Linux): after `signal(SIGPIPE, SIG_IGN)`
and two calls it stores 0 in `auth_required`. That byte made 1 gives the adbd that phones have. x86-64 code."""


def image() -> Path:
    """The root file system of a device, made once."""
    digest = hashlib.sha256(" ".join([RELEASE, *PACKAGES, *LOCALES]).encode()).hexdigest()[:12]
    folder = paths.cache() / "test-devices" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            check_host()
            building = folder.with_suffix(".new")
            shutil.rmtree(building, ignore_errors=True)
            _unpack(building)
            (building / "root").rename(folder)
            shutil.rmtree(building)
    return folder


def check_host() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    assert os.geteuid() == 0, "tests with real devices make network namespaces: run them as root"
    assert not missing, f"tests with real devices need {', '.join(missing)}"


def _unpack(folder: Path) -> None:
    """Fetches the packages with apt, but into `folder` and as if nothing were installed."""
    for name in ("state/lists/partial", "cache/archives/partial", "root/etc"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    signed = f"[signed-by={KEYRING}] " if Path(KEYRING).exists() else ""
    (folder / "sources.list").write_text(f"deb {signed}{_mirror()} {RELEASE} main\n")
    (folder / "apt.conf").write_text(
        f'Dir::State "{folder}/state"; Dir::State::status "{folder}/status"; Dir::Cache "{folder}/cache";'
        f'Dir::Etc::sourcelist "{folder}/sources.list"; Dir::Etc::sourceparts "/dev/null";'
        'Dir::Etc::trustedparts "/etc/apt/trusted.gpg.d"; APT::Install-Recommends "false"; APT::Sandbox::User "root";'
    )
    env = os.environ | {"APT_CONFIG": str(folder / "apt.conf")}
    for arguments in (["update"], ["install", "-y", "--download-only", *PACKAGES]):
        subprocess.run(["apt-get", "-qq", *arguments], env=env, check=True, stdout=subprocess.DEVNULL)
    for package in (folder / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "root")], check=True)
    _complete(folder / "root")


def _complete(root: Path) -> None:
    """Does what maintainer scripts would have done."""
    users = ["root:x:0:0::/root:/bin/sh", "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin"]
    (root / "etc/passwd").write_text("".join(f"{user}\n" for user in users))
    (root / "etc/group").write_text("root:x:0:\n")
    adbd = bytearray((root / ADBD).read_bytes())
    match = NO_AUTH.search(adbd)
    assert match, "this build of adbd is not known: where does it set auth_required?"
    adbd[match.start(1)] = 1
    (root / f"{ADBD}-auth").write_bytes(adbd)
    (root / f"{ADBD}-auth").chmod(0o755)
    for name, program, applets in (
        ("android", "/usr/bin/toybox", ["/usr/bin/toybox"]),
        ("busybox", "/usr/bin/busybox", ["/usr/bin/busybox", "--list"]),
    ):
        listed = subprocess.run(["chroot", str(root), *applets], check=True, capture_output=True, text=True).stdout
        (root / name).mkdir()
        for applet in listed.split():
            (root / name / applet).symlink_to(program)
    (root / "android" / "sh").unlink(missing_ok=True)
    (root / "android" / "sh").symlink_to("/usr/bin/mksh-static")
    for locale in LOCALES:
        compile_one = ["localedef", "--inputfile", locale, "--charmap", "UTF-8", f"{locale}.UTF-8"]
        subprocess.run(["chroot", str(root), *compile_one], check=True)
    # Debian builds busybox without this one.
    (root / "busybox" / "flock").symlink_to("/usr/bin/flock")


def _mirror() -> str:
    """The Debian mirror that this host uses."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.*"))]
    text = "\n".join(path.read_text() for path in sources if path.is_file())
    match = re.search(r"^(?:URIs: *|deb +(?:\[.*\] +)?)(\S+/debian)/?(?: |$)", text, re.MULTILINE)
    return match[1] if match else "http://deb.debian.org/debian"
