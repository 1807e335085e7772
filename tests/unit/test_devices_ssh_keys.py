"""Keys of ssh machines and of phones: damaged files are named with what helps, and never replaced; lost connections."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from adb_shell.auth.keygen import keygen

from nas.measure.devices.transports import adb_device, ssh
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.base import NotTrusted
from nas.measure.devices.transports.ssh import SshAddress, SshWire, pin, pinned_fingerprints

ADDRESS = SshAddress.parse("ssh://nas@box.example")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    pin(ADDRESS, paramiko.ECDSAKey.generate(), folder)
    assert len(pinned_fingerprints(ADDRESS, folder)) == 1
    return folder


@pytest.mark.parametrize(
    "line", [b"box.example ssh-ed25519 AAAAA\n", b"x ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA\n", b"\xff\xfe\x00\n"]
)
def test_a_damaged_line_among_the_pinned_keys_is_named(keys: Path, line: bytes) -> None:
    path = keys / "known_hosts"
    before = path.read_bytes() + line
    path.write_bytes(before)
    for use in (
        lambda: pinned_fingerprints(ADDRESS, keys),
        lambda: pin(ADDRESS, None, keys),
        lambda: SshWire(ADDRESS, keys).connect(),
    ):
        with pytest.raises(NotTrusted, match=r"known_hosts is damaged.*remove what is not a line"):
            use()
    assert path.read_bytes() == before


def test_lines_of_other_kinds_are_left_out(keys: Path) -> None:
    path = keys / "known_hosts"
    path.write_bytes(b"# a comment\n\n" + path.read_bytes() + b"too short\n")
    assert len(pinned_fingerprints(ADDRESS, keys)) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no key",
        b"\xff\xfe\x00",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_a_damaged_key_of_this_agent_is_named_with_the_command_that_makes_one(keys: Path, content: bytes) -> None:
    (keys / "id_ed25519").write_bytes(content)
    with pytest.raises(NotTrusted, match=r"id_ed25519 is no private key without a passphrase.*ssh-keygen -t ed25519"):
        SshWire(ADDRESS, keys).connect()


def test_a_key_with_a_passphrase_is_not_asked_for_it(keys: Path) -> None:
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(keys / "id_ed25519"), password="secret")
    with pytest.raises(NotTrusted, match=r"without a passphrase"):
        SshWire(ADDRESS, keys).connect()


@pytest.mark.parametrize("error", [EOFError(), OSError("reset"), paramiko.SSHException("lost")])
def test_the_stream_of_a_lost_connection_is_closed_without_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: paramiko.Channel) -> None:
        raise error

    monkeypatch.setattr(paramiko.Channel, "close", close)
    ssh._ChannelStream(paramiko.Channel(0), "box").close()


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff\xfe\x00"])
def test_a_damaged_key_for_phones_is_named_with_what_helps(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adb").write_bytes(content)
    with pytest.raises(NotTrusted, match=r"adb is no RSA key without a passphrase.*; remove it and adb\.pub"):
        AdbKey.load(tmp_path / "adb")
    assert (tmp_path / "adb").read_bytes() == content


def test_two_that_make_the_key_for_phones_at_once_have_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def slowly(path: str) -> None:
        calls.append(path)
        time.sleep(0.2)
        keygen(path)

    monkeypatch.setattr(adb_device, "keygen", slowly)
    with ThreadPoolExecutor(2) as threads:
        keys = list(threads.map(lambda _: AdbKey.load(tmp_path / "adb"), range(2)))
    assert len(calls) == 1
    assert keys[0].public() == keys[1].public()
