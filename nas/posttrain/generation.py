"""Answers of a model in PyTorch, greedy or sampled, and the share of exact matches with expected answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.family import TaskScore
from nas.nn.model import Model
from nas.posttrain.conversations import ChatTokenizer, Conversation, read_lines

ALL = "all"
_LOGITS_AT_ONCE = 1 << 25
_MOST_ROWS = 128
_SPARE_TOKENS = 8

Respond = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(ids of questions, most tokens of an answer) -> ids of answers, with or without the one that ends them."""


@torch.no_grad()
def generate(
    model: Model,
    questions: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    *,
    temperature: float = 0.0,
    seeds: Sequence[Sequence[int]] = (),
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
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        by_length[len(question)].append(place)
    answers: list[list[int]] = [[] for _ in questions]
    for length, places in sorted(by_length.items()):
        rows = max(1, min(_MOST_ROWS, _LOGITS_AT_ONCE // (length * model.layout.vocab)))
        for start in range(0, len(places), rows):
            some = places[start : start + rows]
            noise = [np.random.default_rng([*seeds[place]]) for place in some] if temperature else []
            found = _continued(model, [questions[place] for place in some], most, ends, temperature, noise)
            for place, answer in zip(some, found, strict=True):
                answers[place] = answer
    return answers


def _continued(
    model: Model,
    questions: Sequence[Sequence[int]],
    most: int,
    ends: Sequence[int],
    temperature: float,
    noise: Sequence[np.random.Generator],
) -> list[list[int]]:
    device = model.embed.weight.device
    every, state = model.prefill(torch.tensor([list(each) for each in questions], device=device))
    logits = every[:, -1]
    answers: list[list[int]] = [[] for _ in questions]
    running = set(range(len(questions)))
    for left in range(most, 0, -1):
        chosen = _chosen(logits, temperature, noise)
        for row in list(running):
            answers[row].append(int(chosen[row]))
            if answers[row][-1] in ends:
                running.remove(row)
        if not running or left == 1:
            break
        logits, state = model.step(chosen.to(device), state)
    return answers


def _chosen(logits: Tensor, temperature: float, noise: Sequence[np.random.Generator]) -> Tensor:
    """Returns an id for each row: the greatest logit, with Gumbel noise where a temperature is given."""
    if not temperature:
        return logits.argmax(-1).cpu()
    gumbel = np.stack([each.gumbel(size=logits.shape[-1]) for each in noise])
    return (logits.double().cpu() / temperature + torch.from_numpy(gumbel)).argmax(-1)


def exact_matches(conversations: Sequence[Conversation], chat: ChatTokenizer, respond: Respond) -> dict[str, TaskScore]:
    """Returns the answers of `exact_answers` by task; see `by_task`."""
    return by_task(conversations, exact_answers(conversations, chat, respond))


def exact_answers(conversations: Sequence[Conversation], chat: ChatTokenizer, respond: Respond) -> list[bool]:
    """Returns whether each answer equals the expected one but for space around them.

    Args:
        conversations: questions, each with the expected answer.
        chat: tokenizer of the member.
        respond: the model.
    """
    questions = [chat.question(each.question, each.tools) for each in conversations]
    most = max(len(chat.encode(each.answer)) for each in conversations) + _SPARE_TOKENS
    return [
        chat.answer_of(ids).strip() == conversation.answer.strip()
        for conversation, ids in zip(conversations, respond(questions, most), strict=True)
    ]


def by_task(
    conversations: Sequence[Conversation], right: Sequence[bool], before: Sequence[bool] | None = None
) -> dict[str, TaskScore]:
    """Returns task -> counts of right answers; `ALL`: of all tasks.

    Args:
        conversations: what was asked.
        right: whether each answer is right.
        before: the same of PyTorch, to count what a file of the same weights lost and gained.
    """
    own: dict[str, list[int]] = defaultdict(list)
    for number, conversation in enumerate(conversations):
        for task in dict.fromkeys((conversation.task or ALL, ALL)):
            own[task].append(number)
    return {task: _score(numbers, right, before) for task, numbers in sorted(own.items())}


def _score(numbers: Sequence[int], right: Sequence[bool], before: Sequence[bool] | None) -> TaskScore:
    exact = sum(right[i] for i in numbers)
    if before is None:
        return TaskScore.of(exact, len(numbers))
    lost = sum(before[i] and not right[i] for i in numbers)
    return TaskScore.of(exact, len(numbers), lost, sum(right[i] and not before[i] for i in numbers))


def responder(model: Model, chat: ChatTokenizer) -> Respond:
    """Returns greedy answers of a model in evaluation mode."""
    return lambda questions, most: generate(model, questions, most, chat.ends)


def evaluated(model: nn.Module, files: Sequence[str], tokenizer: Path) -> dict[str, float]:
    """Returns "exact TASK" -> share of exact answers to the conversations in `files`, for the record of a training."""
    conversations = [each for path in files for each in read_lines(Path(path), Conversation)]
    if not conversations:
        return {}
    assert isinstance(model, Model)
    chat = ChatTokenizer.read(tokenizer)
    counts = exact_matches(conversations, chat, responder(model, chat))
    return {f"exact {task}": each.exact / each.questions for task, each in counts.items()}
