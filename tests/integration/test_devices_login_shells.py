"""Login shells, their rc files, locales and sshd's options, against a real sshd: the agent depends on none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from device_lab import sshd

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed
from nas.measure.devices.transports.shell import RemoteShell, ShellTransport
from nas.measure.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.testing.transport_contract import device_hash, run

pytestmark = pytest.mark.needs("devices")

TALKS = "echo Welcome; echo Careful >&2"
SHELLS = {
    "dash": ("dash", "", ""),
    "bash, talks": ("bash", f"echo '{TALKS}' >root/.bashrc", ""),
    "bash, talks at its end": ("bash", "echo 'trap \"echo Bye\" EXIT' >root/.bashrc", ""),
    "bash, CDPATH": ("bash", "echo 'export CDPATH=.:$HOME:/' >root/.bashrc", ""),
    "bash is sh, decimal comma": ("bash", "mount --bind usr/bin/bash usr/bin/dash", "SetEnv LC_ALL=de_DE.UTF-8"),
    "bash, Turkish": ("bash", "", "SetEnv LC_ALL=tr_TR.UTF-8"),
    "zsh, talks": ("zsh", f"echo '{TALKS}' >root/.zshenv", ""),
    "fish": ("fish", "", ""),
    "fish, talks at its end": (
        "fish",
        "mkdir -p root/.config/fish; "
        "echo 'function bye --on-event fish_exit; echo Bye; end' >root/.config/fish/config.fish",
        "",
    ),
    "tcsh": ("tcsh", "", ""),
    "tcsh, talks": ("tcsh", "echo 'echo Welcome' >root/.cshrc", ""),
    "banner": ("dash", "echo 'Authorised users only' >run/banner", "Banner /run/banner"),
    "no sftp": ("dash", "sed -i /Subsystem/d run/sshd_config", ""),
    "no terminal": ("dash", "", "PermitTTY no"),
    "one session": ("dash", "", "MaxSessions 1"),
    "one try": ("dash", "", "MaxAuthTries 1"),
    "no forwarding, compression": ("dash", "", "DisableForwarding yes\nCompression yes"),
    "new keys after each 16 kB": ("dash", "", "RekeyLimit 16K"),
    "a chosen command": ("dash", "", 'ForceCommand sh -c "$SSH_ORIGINAL_COMMAND"'),
}
"""Name -> login shell, commands that prepare its home, sshd's options."""

WITHOUT_COMMANDS = {
    "ForceCommand echo hello": "it said: 'hello'",
    "ForceCommand internal-sftp": "did not start `sh`",
    "ForceCommand cat": "did not start `sh`",
    "MaxSessions 0": "refuses a session",
    "ForceCommand /bin/false": "did not start `sh`",
}
"""Options of sshd that leave no shell -> what is said."""


@pytest.mark.parametrize("name", SHELLS)
def test_a_login_shell(name: str, tmp_path: Path) -> None:
    shell, setup, options = SHELLS[name]
    keys = tmp_path / "keys"
    old = "mkdir -p root/tmp/kept; touch -d 2001-01-01 root/tmp/kept"
    setup = f"sed -i s,/bin/sh,/usr/bin/{shell}, etc/passwd; {old}\n{setup}"
    with sshd(tmp_path / "device", keys, setup=setup, options=options) as machine:
        address = SshAddress("root", machine.address, machine.port)
        pin(address, host_key(address), keys)
        transport = ShellTransport(SshWire(address, keys))
        transport.connect()
        result = run(transport, "echo out; echo err >&2; exit 7")
        assert (result.stdout, result.stderr_tail, result.exit_code) == (b"out\n", b"err\n", 7)
        path = tmp_path / "file"
        path.write_bytes(bytes(range(256)))
        sha256 = sha256_of(path)
        assert device_hash(transport, transport.push(path, sha256)) == sha256
        files = transport.read_many(["/proc/sys/kernel/ostype"])
        assert files["/proc/sys/kernel/ostype"] == "Linux\n"
        transport.close()
        assert (machine.root / "root/tmp/kept").exists()


@pytest.mark.parametrize("option", WITHOUT_COMMANDS)
def test_a_login_without_commands(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in one line, soon."""
    monkeypatch.setitem(cast(Any, RemoteShell.must).__kwdefaults__, "timeout_s", 5.0)
    keys = tmp_path / "keys"
    with sshd(tmp_path / "device", keys, options=option) as machine:
        address = SshAddress("root", machine.address, machine.port)
        pin(address, host_key(address), keys)
        transport = ShellTransport(SshWire(address, keys))
        with pytest.raises(InfrastructureFailed, match=WITHOUT_COMMANDS[option]) as caught:
            transport.connect()
        transport.close()
    assert str(address) in str(caught.value)
    assert "\n" not in str(caught.value)
