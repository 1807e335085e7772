"""Text from outside: in a terminal, in a log line, in a metric, it is text and nothing else."""

from __future__ import annotations

import json
from logging import ERROR, Formatter, LogRecord
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nas.cli.output import print_fields, print_json, print_table, say
from nas.core.logs import JsonLines, Lines, visible

HOSTILE = "x\n2026-01-01T00:00:00.000Z ERROR nas: forged\r\x0b\x0c\x1c\x85\u2028\x1b[2J\x9b31m\u202e\x00"
TEXTS = st.text(st.one_of(st.characters(), st.sampled_from('\n\r\x0b\x0c\x1c\x85\u2028\x1b\x9b"\\{}=,# ')), max_size=40)


@given(TEXTS)
def test_what_is_printable_stays_and_nothing_else_does(text: str) -> None:
    result = visible(text)
    assert result.isprintable()
    assert result == text or not text.isprintable()
    assert visible(text, keep="\n").count("\n") == text.count("\n")


def record(text: str, error: BaseException | None = None) -> LogRecord:
    trouble = (type(error), error, error.__traceback__) if error else None
    entry = LogRecord("nas.test", ERROR, __file__, 1, "agent said: %s", (text,), trouble)
    entry.fields = {"device": text}
    return entry


@pytest.mark.parametrize("form", [Lines(), JsonLines()])
@given(text=TEXTS)
@example(text=HOSTILE)
def test_one_record_is_one_line(form: Formatter, text: str) -> None:
    line = form.format(record(text))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


@given(TEXTS)
@example(HOSTILE)
def test_a_traceback_cannot_pass_for_a_record(text: str) -> None:
    first, *rest = Lines().format(record("x", ValueError(text))).splitlines()
    assert first.startswith(tuple("0123456789"))
    assert rest and all(line.startswith("    ") and line.isprintable() for line in rest)
    assert len(JsonLines().format(record("x", ValueError(text))).splitlines()) == 1


def test_commands_print_it_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    value: dict[str, Any] = {"message": HOSTILE}
    say(HOSTILE)
    print_fields([("message", HOSTILE)])
    print_table(("device", "message"), [("box", HOSTILE)])
    print_json(value)
    output = capsys.readouterr()
    assert all(character.isprintable() or character in "\n\t" for character in output.out + output.err)
    assert len(output.out.split("\n")) == 1 + 2 + 3 + 1
    assert json.loads(output.out[output.out.index("{") :]) == value
