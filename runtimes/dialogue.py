"""A dialogue with a model file: a process answers one question after another, token by token.

What a runtime's library loads is fixed at its first import, and a crash of a model must stay a result. So each runtime
has a module that calls `serve` in a process of its own, and `Dialogue` speaks with that process: requests are JSON
objects, one a line, and answers ids of 4 bytes each, with -1 after the last one.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed, InvalidInput

_END, _TOKEN = -1, struct.Struct("<i")
_TOKEN_S = 300.0


class Session(Protocol):
    """One sequence of a loaded model."""

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns logits [T, V] after the next tokens of the sequence: of all of them, or of the last one only."""
        ...

    def reset(self) -> None:
        """Begins another sequence."""
        ...


class Dialogue:
    """A model in a process that answers one question after another, within the context.

    Args:
        runtime: its name, for messages.
        model: the file, for messages.
        argv: starts the process, which calls `serve`.
        context: most tokens of a question with its answer.
        env: environment of the process; None: this one's.
    """

    def __init__(
        self, runtime: str, model: Path, argv: Sequence[str], context: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._runtime, self._model, self._context = runtime, model, context
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the context
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, bufsize=0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()

    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yields the ids of an answer as they are computed, up to one of `ends`, which is included, or `most` ids.

        Read one answer to its end before asking for the next.

        Args:
            question: ids that the model continues.
            most: ids of the answer; fewer where the context ends.
            ends: ids that end it.
            temperature: of sampling; 0: the likeliest id each time.
            seed: of sampling.

        Raises:
            InvalidInput: the question leaves no room for an answer.
            CandidateFailed: the process died or hung on this model (crash).
        """
        most = min(most, self._context - len(question))
        if most < 1:
            raise InvalidInput(f"{len(question):,} tokens leave no room for an answer in {self._context:,}")
        request = {
            "ids": list(question), "most": most, "ends": list(ends), "temperature": temperature, "seed": seed,
        }  # fmt: skip
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure("died") from None
        while (token := self._read(_TOKEN_S)) != _END:
            yield token

    def _read(self, deadline_s: float) -> int:
        assert self._process.stdout is not None
        found, deadline = b"", time.monotonic() + deadline_s
        while len(found) < _TOKEN.size:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(f"computed no token for {deadline_s:g} s")
            part = self._process.stdout.read(_TOKEN.size - len(found))
            if not part:
                raise self._failure("died")
            found += part
        return int(_TOKEN.unpack(found)[0])

    def _failure(self, what: str) -> CandidateFailed:
        self._errors.seek(0)
        tail = self._errors.read()[-500:].decode(errors="replace").strip()
        return CandidateFailed("crash", f"{self._runtime} {what} on {self._model.name}:\n{tail}")


def serve(session: Session, chunk: int) -> None:
    """Answers requests from stdin until it ends.

    Args:
        session: of the model.
        chunk: most tokens fed at once.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not be read as ids
    for line in sys.stdin:
        request = json.loads(line)
        session.reset()
        rng, ids = np.random.default_rng(request["seed"]), request["ids"]
        for start in range(0, len(ids), chunk):
            logits = session.feed(ids[start : start + chunk])[-1].astype(np.float64)
        for left in range(request["most"], 0, -1):
            token = draw(logits, request["temperature"], rng)
            out.write(_TOKEN.pack(token))
            if token in request["ends"] or left == 1:
                break
            logits = session.feed([token])[-1].astype(np.float64)
        out.write(_TOKEN.pack(_END))


def draw(logits: NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    """Samples an id from softmax(logits / temperature): the greatest of them with Gumbel noise; 0: without noise."""
    return int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape) if temperature else logits))
