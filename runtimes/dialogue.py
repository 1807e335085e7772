"""A dialogue with a model file: a process answers one question after another, token by token.

What a runtime's library loads is fixed at its first import, and a crash of a model must stay a result. So each runtime
has a module that calls `serve` in a process of its own, and `Dialogue` speaks with that process: requests are JSON
objects, one a line, and answers ids of 4 bytes each, with -1 after the last one; those to requests for scores are
records of `_SCORE`, one for each continuation; those to requests for vectors are their width, then float32 rows.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed, InvalidInput

_END = -1
_TOKEN = struct.Struct("<i")
_SCORE = struct.Struct("<?d")
_TOKEN_S = 300.0


class Score(NamedTuple):
    """How likely a continuation is.

    Args:
        greedy: whether each of its ids is the likeliest.
        log_probability: natural logarithm, summed over its ids.
    """

    greedy: bool
    log_probability: float


class Session(Protocol):
    """One sequence of a loaded model."""

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns logits [T, V] after the next tokens of the sequence: of all of them, or of the last one only."""
        ...

    def begin(self, ids: Sequence[int]) -> int:
        """Begins the sequence `ids`; returns how many of its tokens need not be fed, since they are there: not all."""
        ...


class Talker(Protocol):
    """What continues a sequence of ids, at most `context` of them."""

    context: int

    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yields ids as they are computed; see `Dialogue.answer`."""
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
        self._runtime, self._model, self.context = runtime, model, context
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the context
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, bufsize=0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()

    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yields at most `most` ids of an answer as they are computed, up to one of `ends`, which is included.

        Read one answer to its end before asking for the next. At temperature 0 each id is the likeliest.

        Raises:
            InvalidInput: the question leaves no room for an answer.
            CandidateFailed: the process died or hung on this model (crash).
        """
        most = min(most, self.context - len(question))
        if most < 1:
            raise InvalidInput(f"{len(question):,} tokens leave no room for an answer in {self.context:,}")
        self._ask({"ids": list(question), "most": most, "ends": list(ends), "temperature": temperature, "seed": seed})
        while (token := _TOKEN.unpack(self._read(_TOKEN.size, _TOKEN_S))[0]) != _END:
            yield token

    def scores(self, question: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        """Returns the score of each continuation of `question`; neither may be empty.

        Raises:
            InvalidInput: the question with a continuation exceeds the context.
            CandidateFailed: the process died or hung on this model (crash).
        """
        if len(question) + max(map(len, continuations)) > self.context:
            raise InvalidInput(f"{len(question):,} tokens leave no room for a continuation in {self.context:,}")
        self._ask({"ids": list(question), "continuations": [list(continuation) for continuation in continuations]})
        return [Score(*_SCORE.unpack(self._read(_SCORE.size, _TOKEN_S))) for _ in continuations]

    def vectors(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Returns the vectors of the tokens of each text, [T, W]; all are computed together.

        Raises:
            CandidateFailed: the process died or hung on this model (crash), or its vectors are not finite (not_finite).
        """
        self._ask({"texts": [list(text) for text in texts]})
        lengths = [len(text) for text in texts]
        (width,) = _TOKEN.unpack(self._read(_TOKEN.size, _TOKEN_S))
        rows = np.frombuffer(self._read(4 * width * sum(lengths), _TOKEN_S), "<f4").reshape(-1, width)
        if not np.isfinite(rows).all():
            raise CandidateFailed("not_finite", f"{self._model.name}: its vectors hold NaN or infinity")
        return np.split(rows, np.cumsum(lengths)[:-1])

    def _ask(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure("died") from None

    def _read(self, size: int, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        received, deadline = b"", time.monotonic() + deadline_s
        while len(received) < size:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(f"computed no token for {deadline_s:g} s")
            part = self._process.stdout.read(size - len(received))
            if not part:
                raise self._failure("died")
            received += part
        return received

    def _failure(self, what: str) -> CandidateFailed:
        self._errors.seek(0)
        tail = self._errors.read()[-500:].decode(errors="replace").strip()
        return CandidateFailed("crash", f"{self._runtime} {what} on {self._model.name}:\n{tail}")


def _answers() -> BinaryIO:
    """Returns stdout for answers; what libraries print, which must not be read as such, goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def serve_vectors(encode: Callable[[list[list[int]]], NDArray[np.float32]]) -> None:
    """Answers requests for vectors from stdin until it ends; `encode` returns those of some texts, [all tokens, W]."""
    out = _answers()
    for line in sys.stdin:
        rows = encode(json.loads(line)["texts"])
        out.write(_TOKEN.pack(rows.shape[1]) + np.ascontiguousarray(rows, "<f4").tobytes())
        out.flush()


def serve(session: Session, chunk: int) -> None:
    """Answers requests from stdin until it ends.

    Args:
        session: of the model.
        chunk: most tokens fed at once.
    """
    out = _answers()
    for line in sys.stdin:
        request = json.loads(line)
        if "continuations" in request:
            for score in scores(session, chunk, request["ids"], request["continuations"]):
                out.write(_SCORE.pack(*score))
                out.flush()
            continue
        rng, logits = np.random.default_rng(request["seed"]), _begin(session, chunk, request["ids"])
        for remaining in range(request["most"], 0, -1):
            token = draw(logits, request["temperature"], rng)
            out.write(_TOKEN.pack(token))
            out.flush()
            if token in request["ends"] or remaining == 1:
                break
            logits = session.feed([token])[-1].astype(np.float64)
        out.write(_TOKEN.pack(_END))
        out.flush()


def scores(
    session: Session, chunk: int, question: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[Score]:
    """Returns the score of each continuation; the question is fed once where continuations have one id."""
    after = _begin(session, chunk, question)
    answers, fed = [], False
    for continuation in continuations:
        logits, greedy, total = after, True, 0.0
        for place, token in enumerate(continuation):
            if place == 1 and fed:
                _begin(session, chunk, question)
            if place:
                fed = True
                logits = session.feed([continuation[place - 1]])[-1].astype(np.float64)
            greedy = greedy and int(logits.argmax()) == token
            total += float(logits[token] - np.logaddexp.reduce(logits))
        answers.append(Score(greedy, total))
    return answers


def _begin(session: Session, chunk: int, ids: Sequence[int]) -> NDArray[np.float64]:
    """Feeds a sequence from its start and returns the logits after it."""
    for start in range(session.begin(ids), len(ids), chunk):
        logits: NDArray[np.float32] = session.feed(ids[start : start + chunk])
    last: NDArray[np.float64] = logits[-1].astype(np.float64)
    return last


def draw(logits: NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    """Samples an id from softmax(logits / temperature): the greatest of them with Gumbel noise; 0: without noise."""
    return int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape) if temperature else logits))
