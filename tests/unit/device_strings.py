"""Strings that a shell would do something with, were they ever part of its text; and what must become of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from nas.devices.transports.base import Transport
from nas.testing.transport_contract import run

HOSTILE = (
    "$(touch {mark})", "`touch {mark}`", "; touch {mark}", "| touch {mark}", "& touch {mark} &", "\ntouch {mark}\n",
    "' ; touch {mark} ; '", '" ; touch {mark} ; "', "'\"'\"' ; touch {mark} #", "\\'; touch {mark}", "<(touch {mark})",
    "> {mark}", "$'\\x3btouch {mark}'", "$IFS", "${{HOME}}", "*", "?", "[a-z]", "~root", "{{a,b}}", "!!", "-n", "-e",
    "--", "-rf", "%s%n", "\\c", "\\0101", "a=b", "#", "(", ")", "", " ", "\t", "\r\n", "\x1b[31m", "\x7f", "é",
    "\u202e", "🙂", "==> x <==", "x" * 3000,
)  # fmt: skip
"""Each would leave the file `{mark}` behind if it were run, or come back as something else."""

CHARACTERS = st.one_of(st.sampled_from("$`;|&<>()'\"\\*?[]{}~!#%-=\n\r\t \x1b"), st.characters(codec="utf-8"))
WORDS = st.text(CHARACTERS.filter(lambda each: each != "\0"), max_size=40)
FILE_NAMES = WORDS.map(lambda word: word.replace("/", "|")).filter(
    lambda name: name not in ("", ".", "..") and len(name.encode()) < 200
)


def come_back(transport: Transport, words: Sequence[str], variable: str) -> None:
    """Arguments and a variable of the environment reach a process as they are."""
    script = 'printf "%s\\n" "$GOMP_CPU_AFFINITY"; for word; do printf "%s\\0" "$word"; done'
    done = run(transport, script, *words, env={"GOMP_CPU_AFFINITY": variable})
    assert done.exit_code == 0
    assert done.stdout == f"{variable}\n{''.join(f'{word}{chr(0)}' for word in words)}".encode()


def keep_names(transport: Transport, names: Sequence[str], folder: Path) -> None:
    """Files of a bundle stand under their names, whatever these are, and are hashed and read by them."""
    content = folder / "content"
    content.write_bytes(b"content\n")
    sha256 = hashlib.sha256(b"content\n").hexdigest()
    transport.push(content, sha256)
    made = transport.bundle(dict.fromkeys(names, sha256))
    listing = 'cd "$1" && for name in * .[!.]* ..?*; do [ -e "$name" ] && printf "%s\\0" "$name"; done; :'
    listed = run(transport, listing, made).stdout.decode()
    assert sorted(listed.split("\0")[:-1]) == sorted(set(names))
    for name in names:
        assert transport.hash(f"{made}/{name}") == sha256
        assert transport.read_text(f"{made}/{name}") == "content\n"
