"""Judges of sampled answers: rules, or a command that the user supplies; and the preferences made from their scores."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nas.core.errors import InfrastructureFailed
from nas.train.posttrain.conversations import Conversation, Preference
from nas.train.release.tokenizer import SPECIAL

_DEADLINE_S = 3600.0
_TAIL = 500


class Sample(NamedTuple):
    """An answer to judge.

    Args:
        conversation: the question, with the answer of the data.
        answer: the one to judge.
        place: `file:line` or another name of the question, for messages.
    """

    conversation: Conversation
    answer: str
    place: str


Judge = Callable[[Sequence[Sample]], list[float]]
"""Scores samples; a greater score is better."""


def exact(samples: Sequence[Sample]) -> list[float]:
    """Scores 1 for the answer of the data, but for space around it, and 0 for others."""
    return [float(sample.answer.strip() == sample.conversation.answer.strip()) for sample in samples]


def contains(samples: Sequence[Sample]) -> list[float]:
    """Scores 1 for the answer of the data, else 0.5 if it is contained, else 0."""
    return [
        right or 0.5 * (sample.conversation.answer.strip() in sample.answer)
        for sample, right in zip(samples, exact(samples), strict=True)
    ]


RULES: dict[str, Judge] = {"exact": exact, "contains": contains}


def command_judge(argv: Sequence[str], deadline_s: float = _DEADLINE_S) -> Judge:
    """Returns a judge that runs a command, without a shell.

    It reads a JSON object per line, {"messages": [...], "tools": [...], "reference": ..., "answer": ...}, and writes a
    number per line.

    Raises (when called):
        InfrastructureFailed: the command cannot be started, dies, hangs, or does not write a finite number for each
            answer; the message names the question.
    """

    def judge(samples: Sequence[Sample]) -> list[float]:
        requests = "".join(json.dumps(_request(sample), ensure_ascii=False) + "\n" for sample in samples)
        code, stdout, stderr = _run(argv, requests.encode(), deadline_s)
        lines = stdout.decode(errors="replace").splitlines()
        scores = []
        for sample, line in zip(samples, lines, strict=False):
            if (score := _number(line)) is None:
                raise InfrastructureFailed(f"judge {argv[0]}: {line[:80]!r} is not a score, for {sample.place}")
            scores.append(score)
        if code or len(lines) != len(samples):
            tail = stderr.decode(errors="replace")[-_TAIL:].strip()
            last = samples[min(len(lines), len(samples) - 1)].place
            raise InfrastructureFailed(
                f"judge {argv[0]}: exit code {code} after {len(lines)} of {len(samples)} scores, at {last}"
                + (f":\n{tail}" if tail else "")
            )
        return scores

    return judge


def _run(argv: Sequence[str], stdin: bytes, deadline_s: float) -> tuple[int, bytes, bytes]:
    """Returns exit code, stdout and stderr of a judge; its children end with it."""
    try:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise InfrastructureFailed(f"judge {argv[0]}: {error.strerror}") from error
    with process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureFailed(f"judge {argv[0]}: no scores after {deadline_s:g} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stdout, stderr


def _request(sample: Sample) -> dict[str, object]:
    conversation = sample.conversation
    return {
        "messages": [message.model_dump(exclude_unset=True) for message in conversation.question],
        "tools": list(conversation.tools),
        "reference": conversation.answer,
        "answer": sample.answer,
    }


def _number(line: str) -> float | None:
    try:
        number = float(line)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def preference_of(
    reference: Sample,
    samples: Sequence[Sample],
    scores: Sequence[float],
    score: float,
    special: Sequence[str] = SPECIAL,
) -> Preference | None:
    """Returns the best and the worst of the sampled answers and the data's own answer (LFM2 report, 4.3.1).

    Of equal scores, sampled answers are preferred to the data's own. None: all scores are equal.

    Args:
        reference: the data's own answer.
        samples: other answers to its question.
        scores: of each.
        score: of the data's own answer.
        special: tokens that answers may not spell.
    """
    conversation = reference.conversation
    scored = [
        (sample.answer.strip(), score) for sample, score in zip(samples, scores, strict=True) if sample.answer.strip()
    ]
    scored.append((conversation.answer, score))
    best, worst = max(scored, key=lambda one: one[1]), min(scored, key=lambda one: one[1])
    if best[1] == worst[1]:
        return None
    preference = Preference(messages=conversation.question, tools=conversation.tools, chosen=best[0], rejected=worst[0])
    return None if preference.problem(special) else preference
