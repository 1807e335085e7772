"""Starts the processes of llama.cpp's binding as forks of one that has imported it, which saves most of their time."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from nas.measure.runtimes.llama_cpp import binding
from nas.measure.runtimes.toolchain import stream

_AS_A_PROGRAM = [sys.executable, "-m", binding.__name__]


@contextmanager
def forked_binding() -> Iterator[None]:
    """Lets `binding.run_command` of this process fork; a crash of a model still ends the fork alone."""
    context = get_context("forkserver")
    context.set_forkserver_preload([binding.__name__, __name__])

    def started(argv: Sequence[str], *, deadline_s: float, env: Mapping[str, str]) -> tuple[int, str]:
        """Does what `stream` does."""
        if argv[:3] != _AS_A_PROGRAM:
            return stream(argv, deadline_s=deadline_s, env=env)
        with tempfile.NamedTemporaryFile() as output:
            process = context.Process(target=_run, args=(argv[3:], dict(env), output.name))
            process.start()
            process.join(deadline_s)
            if process.exitcode is None:
                process.kill()
                process.join()
            code, text = process.exitcode, Path(output.name).read_text(errors="replace")
            process.close()
        assert code is not None
        return code, text.strip()

    with mock.patch.object(binding, "stream", started):
        yield


def _run(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY)
    for stream_number in (1, 2):
        os.dup2(file, stream_number)
    sys.argv = [binding.__file__, *arguments]
    runpy.run_path(binding.__file__, run_name="__main__")
