"""The contract of a transport, as tests: subclass `TransportContract`, override the fixture `transport`, run pytest.

The device needs a POSIX `sh` with `sleep`, `yes`, `cat`, `env` and `sha256sum` on its PATH; nothing else runs there.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.devices.transports.base import (
    STDERR_TAIL,
    TEXT_LIMIT,
    Cancelled,
    CommandResult,
    Lease,
    StaleLease,
    Transport,
)
from nas.testing.device_strings import FILE_NAMES, HOSTILE, WORDS

# Subclasses share the inherited tests but not the transport, so no example is stored for replay.
few_examples = settings(
    max_examples=6,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class TransportContract:
    """Properties that agents rely on. The subclass overrides the fixture `transport`."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> Transport:
        """A connected transport, closed after the test."""
        raise AssertionError("override the fixture `transport`")

    @pytest.fixture
    def local_file(self, tmp_path: Path) -> tuple[Path, str]:
        """A file on this side and its hash."""
        path = tmp_path / "pushed-from-here"
        path.write_bytes(bytes(range(256)) * 1000)
        return path, hashlib.sha256(path.read_bytes()).hexdigest()

    @pytest.mark.parametrize(("script", "exit_code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
    def test_exit_code(self, transport: Transport, script: str, exit_code: int) -> None:
        assert run(transport, script).exit_code == exit_code

    def test_streams_are_apart(self, transport: Transport) -> None:
        result = run(transport, "echo out; echo err >&2")
        assert (result.stdout, result.stderr_tail) == (b"out\n", b"err\n")

    def test_hostile_words_do_nothing(self, transport: Transport, tmp_path: Path) -> None:
        mark = "hilnas-was-here"
        words = [word.format(mark=mark) for word in HOSTILE]
        check_words(transport, words, "".join(words))
        check_names(transport, [word.replace("/", "|") for word in words if word and len(word) < 200], tmp_path)
        script = 'for folder in . "$HOME" /tmp; do [ ! -e "$folder/$1" ] || exit 1; done'
        assert run(transport, script, mark).exit_code == 0

    @few_examples
    @given(words=st.lists(WORDS, max_size=20), variable=WORDS)
    def test_any_words_arrive_as_they_are(self, transport: Transport, words: list[str], variable: str) -> None:
        check_words(transport, words, variable)

    @few_examples
    @given(names=st.lists(FILE_NAMES, min_size=1, max_size=3, unique=True))
    def test_any_file_name_is_kept(self, transport: Transport, tmp_path: Path, names: list[str]) -> None:
        check_names(transport, names, tmp_path)

    def test_environment_is_what_was_named(self, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NAS_SECRET", "leaked")
        names = {line.split("=")[0] for line in run(transport, "env", env={"ASKED": "a b"}).stdout.decode().split("\n")}
        assert names - {"", "PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "LANG", "ASKED"}

    def test_standard_input_is_empty(self, transport: Transport) -> None:
        assert run(transport, "cat").stdout == b""

    def test_deadline_kills_and_is_reported(self, transport: Transport) -> None:
        for deadline_s in (0.3, 3, 30):  # a busy device may print nothing within the first
            result = run(transport, "echo before; sleep 300", deadline_s=deadline_s)
            assert (result.timed_out, result.exit_code) == (True, -9)
            if result.stdout:
                break
        assert result.stdout == b"before\n"

    def test_deadline_also_ends_what_the_process_started(self, transport: Transport) -> None:
        """The run ends although a grandchild holds the streams open."""
        assert run(transport, "sleep 300 & sleep 300", deadline_s=0.3).timed_out

    def test_too_much_output_kills_and_is_reported(self, transport: Transport) -> None:
        result = run(transport, "yes", output_limit=10_000)
        assert result.truncated
        assert result.stdout == b"y\n" * 5000

    def test_output_of_exactly_the_limit_is_no_fault(self, transport: Transport) -> None:
        result = run(transport, "printf 1234567890", output_limit=10)
        assert (result.stdout, result.truncated, result.exit_code) == (b"1234567890", False, 0)

    def test_a_flood_on_stderr_neither_blocks_nor_grows(self, transport: Transport) -> None:
        lines = "i=0; while [ $i -lt 5000 ]; do echo 'more than a pipe can hold' >&2; i=$((i+1)); done"
        result = run(transport, f"{lines}; echo end >&2")
        assert result.exit_code == 0
        assert len(result.stderr_tail) == STDERR_TAIL
        assert result.stderr_tail.endswith(b"end\n")

    def test_cancelling_kills(self, transport: Transport) -> None:
        with pytest.raises(Cancelled):
            run(transport, "sleep 300", cancelled=lambda: True)

    def test_missing_programs_are_not_retried(self, transport: Transport) -> None:
        with pytest.raises(Unsupported, match="no-such-program"):
            transport.run(["/no-such-program"], env={}, deadline_s=60, output_limit=10)

    def test_an_older_epoch_is_refused(self, transport: Transport) -> None:
        transport.claim(Lease("coordinator", 7))
        assert run(transport, "exit 0").exit_code == 0
        with pytest.raises(StaleLease) as claiming:
            transport.claim(Lease("coordinator", 6))
        with pytest.raises(StaleLease) as running:
            run(transport, "exit 0")
        assert (claiming.value.last, running.value.last) == (7, 7), "so that the coordinator can continue above it"
        transport.claim(Lease("coordinator", 7))
        assert run(transport, "exit 0").exit_code == 0

    def test_epochs_of_another_authority_are_its_own(self, transport: Transport) -> None:
        transport.claim(Lease("coordinator", 7))
        transport.claim(Lease("another", 1))
        assert run(transport, "exit 0").exit_code == 0

    def test_missing_interpreters_are_not_retried(self, transport: Transport, tmp_path: Path) -> None:
        script = tmp_path / "script"
        script.write_text("#!/no/such/interpreter\n", encoding="utf-8")
        sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
        transport.push(script, sha256)
        folder = transport.bundle({"script": sha256})
        with pytest.raises(Unsupported, match="script"):
            transport.run([f"{folder}/script"], env={}, deadline_s=60, output_limit=10)

    def test_push_is_by_content_and_idempotent(self, transport: Transport, local_file: tuple[Path, str]) -> None:
        path, sha256 = local_file
        remote = transport.push(path, sha256)
        assert device_hash(transport, remote) == sha256
        assert transport.push(path, sha256) == remote

    def test_push_refuses_other_content(self, transport: Transport, local_file: tuple[Path, str]) -> None:
        path, sha256 = local_file
        wrong = hashlib.sha256(b"something else").hexdigest()
        with pytest.raises(InfrastructureFailed):
            transport.push(path, wrong)
        with pytest.raises(InfrastructureFailed):
            transport.bundle({"file": wrong})
        assert device_hash(transport, transport.push(path, sha256)) == sha256

    def test_make_is_by_content_and_happens_once(self, transport: Transport) -> None:
        paths: list[str] = []

        def produce(path: str) -> None:
            paths.append(path)
            write(transport, "made", path)

        sha256 = hashlib.sha256(b"made").hexdigest()
        remote = transport.make(sha256, produce)
        assert device_hash(transport, remote) == sha256
        assert transport.make(sha256, produce) == remote and len(paths) == 1
        assert run(transport, 'test -e "$1"', paths[0]).exit_code == 1

    def test_make_refuses_other_content_and_none(self, transport: Transport) -> None:
        sha256 = hashlib.sha256(b"wanted").hexdigest()
        with pytest.raises(InfrastructureFailed):
            transport.make(sha256, lambda path: write(transport, "something else", path))
        with pytest.raises(InfrastructureFailed):
            transport.make(sha256, lambda path: None)
        assert device_hash(transport, transport.make(sha256, lambda path: write(transport, "wanted", path))) == sha256

    def test_bundle_makes_files_executable_under_their_names(self, transport: Transport, tmp_path: Path) -> None:
        script = tmp_path / "script"
        script.write_text('#!/bin/sh\ncat "${0%/*}/data"\n', encoding="utf-8")
        data = tmp_path / "data"
        data.write_text("next to it\n", encoding="utf-8")
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (script, data)}
        for path in (script, data):
            transport.push(path, hashes[path.name])
        folder = transport.bundle(hashes)
        assert transport.bundle(hashes) == folder
        result = transport.run([f"{folder}/script"], env={}, deadline_s=60, output_limit=100)
        assert result.stdout == b"next to it\n"

    def test_reads_many_files_at_once(self, transport: Transport) -> None:
        """Missing ones have errors, wildcards are expanded or omitted, commands come last."""
        paths = ["/proc/stat", "/no/such/file", "/proc/self/comm", "/proc/sys/kernel/os*", "/no/such/*"]
        commands = ["no-such-command -x", "echo 'a  *' | cat; echo \"$0\" >&2"]
        answer = transport.read_many(paths, commands)
        kernel = {path for path in answer if path.startswith("/proc/sys/kernel/os")}
        assert set(answer) == {*paths[:3], *kernel, *commands}
        assert kernel == {"/proc/sys/kernel/osrelease", "/proc/sys/kernel/ostype"}
        assert answer["/proc/sys/kernel/ostype"] == "Linux\n"
        assert str(answer["/proc/stat"]).startswith("cpu ")
        assert answer[commands[1]] == "a  *\n"
        errors = {name: error.errno for name, error in answer.items() if isinstance(error, OSError)}
        assert errors == {"/no/such/file": errno.ENOENT, commands[0]: errno.ENOENT}

    def test_a_large_file_is_read_in_part(self, transport: Transport) -> None:
        (text,) = transport.read_many(["/proc/kallsyms"]).values()
        assert isinstance(text, str) and len(text.encode()) <= TEXT_LIMIT
        assert transport.read_many([]) == {}

    def test_connect_and_close_may_be_repeated(self, transport: Transport) -> None:
        transport.connect()
        transport.close()
        transport.close()
        transport.connect()
        assert run(transport, "exit 0").exit_code == 0


def check_words(transport: Transport, words: Sequence[str], variable: str) -> None:
    """Asserts that arguments and an environment variable reach a process unchanged."""
    script = 'printf "%s\\n" "$GOMP_CPU_AFFINITY"; for word; do printf "%s\\0" "$word"; done'
    done = run(transport, script, *words, env={"GOMP_CPU_AFFINITY": variable})
    assert done.exit_code == 0
    assert done.stdout == f"{variable}\n{''.join(f'{word}{chr(0)}' for word in words)}".encode()


def check_names(transport: Transport, names: Sequence[str], folder: Path) -> None:
    """Asserts that files of a bundle have the given names and the right content."""
    content = folder / "content"
    content.write_bytes(b"content\n")
    sha256 = hashlib.sha256(b"content\n").hexdigest()
    transport.push(content, sha256)
    remote = transport.bundle(dict.fromkeys(names, sha256))
    listing = 'cd "$1" && for name in * .[!.]* ..?*; do [ -e "$name" ] && printf "%s\\0" "$name"; done; :'
    listed = run(transport, listing, remote).stdout.decode()
    assert sorted(listed.split("\0")[:-1]) == sorted(names)
    for name in names[:3]:
        assert device_hash(transport, f"{remote}/{name}") == sha256


def device_hash(transport: Transport, remote: str) -> str:
    """Returns the SHA-256 of a file on the device, computed there."""
    return run(transport, 'sha256sum <"$1"', remote).stdout.decode()[:64]


def write(transport: Transport, text: str, path: str) -> None:
    """Writes a file on the device."""
    assert run(transport, 'printf %s "$1" > "$2"', text, path).exit_code == 0


def run(transport: Transport, script: str, *arguments: str, **options: Any) -> CommandResult:
    """Runs one `sh -c` on the device, with generous limits."""
    limits: dict[str, Any] = {"env": {}, "deadline_s": 60, "output_limit": 1 << 20}
    return transport.run(["sh", "-c", script, "sh", *arguments], **(limits | options))
