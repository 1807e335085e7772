"""Answers of a model in PyTorch, greedy or sampled, and the share of exact matches with expected answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nas.core.family import TaskScore
from nas.measure.runtimes.dialogue import Score, scores
from nas.model.nn.model import Model, ModelState
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_lines

ALL = "all"
_TOKENS_AT_ONCE = 1 << 13
_MOST_ROWS = 128
_SPARE_TOKENS = 8

Respond = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(ids of questions, most tokens of an answer) -> ids of answers, with or without the one that ends them."""

Judgements = Mapping[str, Sequence[bool]]
"""Task -> whether each of its answers is right."""


class Answerer(NamedTuple):
    """A model in PyTorch, or a file of one, that is asked.

    Args:
        respond: greedy answers.
        scores: (ids of a question, ids of continuations) -> score of each continuation.
    """

    respond: Respond
    scores: Callable[[Sequence[int], Sequence[Sequence[int]]], list[Score]]


@torch.no_grad()
def generate(
    model: Model,
    questions: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    *,
    temperature: float = 0.0,
    seeds: Sequence[Sequence[int]] = (),
    yield_hook: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Returns the ids after each question, up to one of `ends`, which is included, or `most` ids.

    Questions of equal length are answered together, so that nothing is padded.

    Args:
        model: in evaluation mode.
        questions: ids of each.
        most: ids of an answer.
        ends: ids that end one.
        temperature: 0: the likeliest id each time.
        seeds: of each question's samples; needed where the temperature is not 0.
        yield_hook: called before each token, where a measurement on this host may take its turn.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        by_length[len(question)].append(place)
    answers: list[list[int]] = [[] for _ in questions]
    for length, places in sorted(by_length.items()):
        rows = max(1, min(_MOST_ROWS, _TOKENS_AT_ONCE // length))
        for start in range(0, len(places), rows):
            chunk = places[start : start + rows]
            noise = [np.random.default_rng([*seeds[place]]) for place in chunk] if temperature else []
            inputs = [questions[place] for place in chunk]
            continued = _continued(model, inputs, most, ends, temperature, noise, yield_hook)
            for place, answer in zip(chunk, continued, strict=True):
                answers[place] = answer
    return answers


def _continued(
    model: Model,
    questions: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    temperature: float,
    noise: Sequence[np.random.Generator],
    yield_hook: Callable[[], object],
) -> list[list[int]]:
    device = model.embed.weight.device
    yield_hook()
    features, state = model.read(torch.tensor([list(ids) for ids in questions], device=device))
    logits = model.logits(features[:, -1])
    answers: list[list[int]] = [[] for _ in questions]
    running = set(range(len(questions)))
    for remaining in range(most, 0, -1):
        chosen = _chosen(logits, temperature, noise)
        for row in list(running):
            answers[row].append(int(chosen[row]))
            if answers[row][-1] in ends:
                running.remove(row)
        if not running or remaining == 1:
            break
        yield_hook()
        logits, state = model.step(chosen.to(device), state)
    return answers


def _chosen(logits: Tensor, temperature: float, noise: Sequence[np.random.Generator]) -> Tensor:
    """Returns an id for each row: the greatest logit, with Gumbel noise where a temperature is given."""
    if not temperature:
        return logits.argmax(-1).cpu()
    gumbel = np.stack([rng.gumbel(size=logits.shape[-1]) for rng in noise])
    return (logits.double().cpu() / temperature + torch.from_numpy(gumbel)).argmax(-1)


def exact_answers(conversations: Sequence[Conversation], chat: ChatTokenizer, respond: Respond) -> list[bool]:
    """Returns whether each answer of the model equals the conversation's but for space around them."""
    conversations = list(map(chat.plain, conversations))
    questions = [chat.question(conversation.question, conversation.tools) for conversation in conversations]
    most = max(len(chat.encode(conversation.answer)) for conversation in conversations) + _SPARE_TOKENS
    return [
        chat.answer_of(ids).strip() == conversation.answer.strip()
        for conversation, ids in zip(conversations, respond(questions, most), strict=True)
    ]


def grouped(conversations: Sequence[Conversation], right: Sequence[bool]) -> Judgements:
    """Returns the judgements of answers by task; `ALL`: of all tasks."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for conversation, is_right in zip(conversations, right, strict=True):
        for task in dict.fromkeys((conversation.task or ALL, ALL)):
            by_task[task].append(is_right)
    return dict(sorted(by_task.items()))


def counts(right: Judgements, before: Judgements | None = None) -> dict[str, TaskScore]:
    """Returns task -> counts of right answers; with `before`, those of PyTorch, also what was lost and gained."""
    return {task: _count(answers, None if before is None else before[task]) for task, answers in right.items()}


def _count(right: Sequence[bool], before: Sequence[bool] | None) -> TaskScore:
    if before is None:
        return TaskScore.of(sum(right), len(right))
    pairs = list(zip(before, right, strict=True))
    return TaskScore.of(sum(right), len(right), pairs.count((True, False)), pairs.count((False, True)))


def answerer(model: Model, chat: ChatTokenizer, yield_hook: Callable[[], object] = lambda: None) -> Answerer:
    """Returns a model in evaluation mode, to be asked."""

    def scored(question: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        return scores(_Session(model), len(question), question, continuations)

    return Answerer(lambda questions, most: generate(model, questions, most, chat.ends, yield_hook=yield_hook), scored)


class _Session:
    """A `nas.measure.runtimes.dialogue.Session` of a model in PyTorch."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._state: ModelState | None = None

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        tokens = torch.tensor([list(ids)], device=self._model.embed.weight.device)
        features, self._state = self._model.read(tokens, self._state)
        return np.asarray(self._model.logits(features[0, -1:]).float().cpu())

    def begin(self, ids: Sequence[int]) -> int:
        self._state = None
        return 0


def evaluated(
    model: nn.Module, files: Sequence[str], tokenizer: Path, date: str, yield_hook: Callable[[], object]
) -> dict[str, float]:
    """Returns "exact TASK" -> share of exact answers to the conversations in `files`, for the record of a training."""
    conversations = [line for path in files for line in read_lines(Path(path), Conversation)]
    if not conversations:
        return {}
    assert isinstance(model, Model)
    chat = ChatTokenizer.read(tokenizer, date)
    right = grouped(conversations, exact_answers(conversations, chat, answerer(model, chat, yield_hook).respond))
    return {f"exact {task}": sum(answers) / len(answers) for task, answers in right.items()}
