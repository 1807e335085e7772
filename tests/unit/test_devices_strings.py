"""Strings with special characters are refused or quoted before they reach a device; see also the transport contract."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from pydantic import ValidationError
from shell_here import ShellHere

from nas.core.errors import InvalidInput
from nas.core.plan import Plan, PlanFile, Runner
from nas.measure.devices.agent.run_plan import prepare
from nas.measure.devices.attachments import Attachment, open_transport
from nas.measure.devices.transports.base import Lease
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshAddress
from nas.testing.device_strings import FILE_NAMES, WORDS
from nas.testing.transport_contract import check_words


@settings(max_examples=6, deadline=None)
@given(name=FILE_NAMES)
def test_the_folder_of_a_device_may_have_any_name(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        transport = ShellTransport(ShellHere(Path(folder) / name))
        # What a device says of itself comes as lines of text.
        if name == name.strip() and name.splitlines() == [name]:
            check_words(transport, ["$HOME"], "x")
        transport.close()


@given(word=WORDS)
@example("?" * 12)
@example("adb-R5CT123 (2)._adb-tls-connect._tcp")
@example("a; reboot")
@example("host:kill\n")
def test_names_that_a_device_keeps_are_plain_or_refused(word: str) -> None:
    """Authorities and tags, ids and addresses: what is not plain never gets as far as a device.

    An adb server's serials may be question marks, and have blanks and parentheses: they are one line of its protocol,
    and no shell sees them.
    """
    for name, allowed in (
        (lambda: Lease(word, 1).authority, "._-"),
        (lambda: Attachment(address="local", tags=(word,)).tags[0], "._-"),
        (lambda: Attachment(address="local", id=word).id, "._-"),
        (lambda: open_transport(f"adb:{word}", Path()) and word, "._-?() :[]"),
        (lambda: SshAddress.parse(f"ssh://nas@{word}").host, "._-:%"),
    ):
        try:
            accepted = name()
        except ValueError:
            continue
        assert accepted is not None and accepted.isascii()
        assert all(character.isalnum() or character in allowed for character in accepted), accepted


@pytest.mark.parametrize("args, env", [(("a\0b",), {}), ((), {"OMP_PLACES": "\0"})])
def test_what_no_process_can_be_given_is_refused(args: tuple[str, ...], env: dict[str, str], tmp_path: Path) -> None:
    file = PlanFile(sha256="0" * 64, size=0)
    runner = Runner(runtime="any", build="b", target="x86_64-linux", files={"main": file}, main="main")
    plan = Plan(runner=runner, inputs={}, args=args, env=env, deadline_s=1)
    with pytest.raises(InvalidInput, match="of a plan"):
        prepare(plan, LocalTransport(tmp_path), None, lambda runner: True)  # type: ignore[arg-type]


@given(name=WORDS)
@example("../" * 20 + "etc/passwd")
@example("0" * 63 + "\n")
def test_files_of_a_plan_are_named_by_their_hash(name: str) -> None:
    with pytest.raises(ValidationError):
        PlanFile(sha256=name, size=0)
