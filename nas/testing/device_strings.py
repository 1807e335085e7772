"""Strings that a shell would interpret if they became part of its text, for tests of transports."""

from __future__ import annotations

from hypothesis import strategies as st

HOSTILE = (
    "$(touch {mark})",
    "`touch {mark}`",
    "; touch {mark}",
    "| touch {mark}",
    "& touch {mark} &",
    "\ntouch {mark}\n",
    "' ; touch {mark} ; '",
    '" ; touch {mark} ; "',
    "'\"'\"' ; touch {mark} #",
    "\\'; touch {mark}",
    "<(touch {mark})",
    "> {mark}",
    "$'\\x3btouch {mark}'",
    "$IFS",
    "${{HOME}}",
    "*",
    "?",
    "[a-z]",
    "~root",
    "{{a,b}}",
    "!!",
    "-n",
    "-e",
    "--",
    "-rf",
    "%s%n",
    "\\c",
    "\\0101",
    "a=b",
    "#",
    "(",
    ")",
    "",
    " ",
    "\t",
    "\r\n",
    "\x1b[31m",
    "\x7f",
    "é",
    "\u202e",
    "🙂",
    "==> x <==",
    "x" * 3000,
)
"""Each would create the file `{mark}` if it were run, or come back changed."""

CHARACTERS = st.one_of(st.sampled_from("$`;|&<>()'\"\\*?[]{}~!#%-=\n\r\t \x1b"), st.characters(codec="utf-8"))
WORDS = st.text(CHARACTERS.filter(lambda letter: letter != "\0"), max_size=40)
"""Arguments that a process can be given."""

FILE_NAMES = WORDS.map(lambda word: word.replace("/", "|")).filter(
    lambda name: name not in ("", ".", "..") and len(name.encode()) < 200
)
"""Names in a folder."""
