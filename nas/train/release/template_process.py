"""Renders chat templates in a process of its own: they are code that others wrote, and may run for ever.

A line of stdin is a request, {"template": Jinja, "date": "YYYY-MM-DD", "variables": {...}}, a line of stdout its
answer, {"text": ...} or {"error": ...}, both in JSON. Memory is limited for the process, time for each request: the
process ends by a signal when it is over. Filters and functions are those that transformers gives to templates.

The file is run by its path, with the standard library and Jinja alone.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

from jinja2 import Environment, Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BYTES = 1 << 30
"""Most address space of the process."""
CHARACTERS = 1 << 24
"""Most characters of a rendered text."""
_LONGEST_ERROR = 400


class _Generation(Extension):
    """The tag of transformers around answers, which changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - as declared by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> None:
    """Raises `message`: templates call this on conversations that they cannot say."""
    raise TemplateError(str(message))


@functools.lru_cache(maxsize=16)
def _compiled(template: str, date: str) -> Template:
    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": datetime.datetime.fromisoformat(date).strftime,
    }
    return environment.from_string(template)


def _answer(request: bytes) -> dict[str, str]:
    try:
        about = json.loads(request)
        text = _compiled(about["template"], about["date"]).render(about["variables"])
        if len(text) > CHARACTERS:
            return {"error": f"it gives more than {CHARACTERS:,} characters"}
        return {"text": text}
    except TemplateError as error:
        return {"error": str(error)[:_LONGEST_ERROR]}
    except MemoryError:
        return {"error": f"it takes more than {BYTES >> 20:,} MiB"}
    except Exception as error:  # whatever the template's code raises
        return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}


def main(seconds: float) -> None:
    """Answers requests until stdin ends, each within so many seconds of processor time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted parent closes stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also within one long operation
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(line)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
