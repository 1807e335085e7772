"""Chat templates, rendered as by transformers, within limits of time, memory and output.

A template is code of a model's folder. It runs in Jinja's sandbox, in a process that `template_process` describes;
one process renders all templates of this one, and another one is started after a template that broke a limit.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nas.core.errors import InvalidInput
from nas.train.release import template_process

DATE = "2025-01-01"
"""The date that templates get where none is given: weights must not depend on the day of a training."""
DEFAULT = "default"
"""Name of the template for conversations; one named `TOOLS` is for those with tools."""
TOOLS = "tool_use"

TURN: Mapping[str, Any] = {
    "messages": [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant")],
    "tools": None,
    "documents": None,
    "add_generation_prompt": False,
    "enable_thinking": False,
}
"""What a template reads, with one question and its answer."""

_ENV_VARS = ("LD_LIBRARY_PATH",)

SECONDS = 5.0
"""Most processor time of a text."""
_WORST_S = 600.0
"""Seconds after which the process is ended, on a machine that has no processor for it."""


def rendered(template: str, variables: Mapping[str, Any], where: str, date: str = DATE) -> str:
    """Returns the text of a template.

    Args:
        template: Jinja.
        variables: that it reads, as JSON can hold them.
        where: its file, for messages.
        date: of today, as `strftime_now` shows it, YYYY-MM-DD.

    Raises:
        InvalidInput: the template refuses the variables, fails, or breaks a limit.
    """
    request = json.dumps({"template": template, "date": date, "variables": variables}).encode() + b"\n"
    answer = _ask(request)
    if "error" in answer:
        raise InvalidInput(f"its chat template refuses a conversation: {answer['error']}", where=where)
    return answer["text"]


class _Renderer:
    """The process that renders."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(template_process.__file__)), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENV_VARS if name in os.environ},
            bufsize=0,
        )

    def ask(self, request: bytes) -> dict[str, str] | None:
        """Returns the answer; None: the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            remaining = memoryview(request)
            while remaining:
                remaining = remaining[self._process.stdin.write(remaining) :]
        except BrokenPipeError:
            return None
        parts: list[bytes] = []
        while not (parts and parts[-1].endswith(b"\n")):
            if not select.select([self._process.stdout], [], [], _WORST_S)[0]:
                return None
            parts.append(self._process.stdout.read(1 << 20))
            if not parts[-1]:
                return None
        answer: dict[str, str] = json.loads(b"".join(parts))
        return answer

    def close(self) -> int:
        """Ends the process and returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            return self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


_renderers: dict[int, _Renderer] = {}
"""The renderer of this process, by its id: one that was forked has none."""
_lock = threading.Lock()


def _ask(request: bytes) -> dict[str, str]:
    with _lock:
        renderer = _renderers.get(os.getpid())
        if renderer is None:
            renderer = _renderers[os.getpid()] = _Renderer()
        if (answer := renderer.ask(request)) is not None:
            return answer
        del _renderers[os.getpid()]
        code = renderer.close()
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return {"error": f"it runs for more than {SECONDS:g} s"}
    return {"error": f"it ends its process (exit code {code})"}


def _close() -> None:
    if renderer := _renderers.pop(os.getpid(), None):
        renderer.close()


atexit.register(_close)
