"""Generated conversations with checkable answers, preferences by rule, and text about the same things.

Everything is drawn from lists in this file and is in the public domain (CC0). Questions of the training and test sets
differ: a question belongs to the test set by the hash of its words alone.

    FOLDER/train.jsonl   conversations
           test.jsonl    conversations whose questions are not in train.jsonl
           pairs.jsonl   preferences on questions of train.jsonl
           text/         text for pre-training
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from nas.core.durable import write_durably
from nas.train.posttrain.conversations import Conversation, Message, Preference, write_lines

_NAMES = [
    "Ada", "Alan", "Anna", "Ben", "Carl", "Clara", "Dora", "Emil", "Eva", "Finn", "Greta", "Hugo", "Ida", "Jan",
    "Kira", "Leo", "Lina", "Max", "Mia", "Noah",
]  # fmt: skip
_THINGS = [
    "apple", "bread", "chair", "cloud", "desk", "door", "fish", "glass", "horse", "key", "lamp", "moon", "pen",
    "river", "stone", "table", "tree", "wall",
]  # fmt: skip
_CITIES = [
    "Berlin", "Cairo", "Delhi", "Lima", "London", "Madrid", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tokyo",
    "Vienna", "Warsaw", "Zurich",
]  # fmt: skip
_TEST_SHARE = 0.1
_WEATHER: dict[str, object] = {"name": "get_weather", "parameters": {"city": "string"}}
_CLOCK: dict[str, object] = {"name": "get_time", "parameters": {"city": "string"}}


def arithmetic(rng: Random) -> Conversation:
    """Sum or difference of two numbers up to 20, with a result of at least 0."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        return _single_turn("arithmetic", f"What is {a} + {b}?", str(a + b))
    return _single_turn("arithmetic", f"What is {max(a, b)} - {min(a, b)}?", str(abs(a - b)))


def lookup(rng: Random) -> Conversation:
    """The value of a key in a table of three to five rows."""
    keys = rng.sample(_THINGS, rng.randint(3, 5))
    values = {key: rng.randint(10, 99) for key in keys}
    table = ", ".join(f"{key} = {value}" for key, value in values.items())
    key = rng.choice(keys)
    return _single_turn("lookup", f"Table: {table}. What is {key}?", str(values[key]))


def formatting(rng: Random) -> Conversation:
    """An answer in a given form: repeated, in a list, or as JSON."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    match rng.randrange(3):
        case 0:
            count = rng.randint(2, 4)
            return _single_turn("format", f"Write {thing} {count} times.", " ".join([thing] * count))
        case 1:
            other = rng.choice([candidate for candidate in _THINGS if candidate != thing])
            return _single_turn("format", f"List {thing} and {other}.", f"- {thing}\n- {other}")
        case _:
            text = json.dumps({"name": name, "has": thing})
            return _single_turn("format", f"As JSON: {name} has a {thing}.", text)


def tool_call(rng: Random) -> Conversation:
    """A call of one of two tools, and the answer from its result."""
    city = rng.choice(_CITIES)
    weather = rng.random() < 0.5
    question = f"How is the weather in {city}?" if weather else f"What time is it in {city}?"
    tool = _WEATHER if weather else _CLOCK
    call = f'<|tool_call_start|>[{tool["name"]}(city="{city}")]<|tool_call_end|>'
    tools = (_WEATHER, _CLOCK)
    if rng.random() < 0.5:
        return _single_turn("tool call", question, call, tools=tools)
    degrees, hour = rng.randint(0, 35), rng.randint(1, 12)
    result = {"degrees": degrees} if weather else {"hour": hour}
    answer = f"It is {degrees} degrees in {city}." if weather else f"It is {hour} o'clock in {city}."
    turns = [("user", question), ("assistant", call), ("tool", json.dumps(result)), ("assistant", answer)]
    return _conversation("tool result", turns, tools)


def multi_turn(rng: Random) -> Conversation:
    """A question about what was said two or four messages before."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    turns = [("user", f"I am {name}."), ("assistant", f"Hello {name}."), ("user", f"I have a {thing}.")]
    turns += [("assistant", f"A {thing}, good.")]
    turns += (
        [("user", "Who am I?"), ("assistant", f"You are {name}.")]
        if rng.random() < 0.5
        else [("user", "What do I have?"), ("assistant", f"You have a {thing}.")]
    )
    return _conversation("multi-turn", turns)


TASKS: dict[str, Callable[[Random], Conversation]] = {
    "arithmetic": arithmetic,
    "lookup": lookup,
    "format": formatting,
    "tool call": tool_call,
    "multi-turn": multi_turn,
}


def is_test(conversation: Conversation) -> bool:
    """Returns whether a conversation is in the test set, by the hash of its question."""
    text = "\n".join(message.text for message in conversation.question)
    return zlib.crc32(text.encode()) < _TEST_SHARE * 2**32


def conversations(count: int, seed: int, *, test: bool) -> list[Conversation]:
    """Returns conversations of all tasks in turn; those of one seed are the same in any order of calls."""
    rng = Random(f"{seed}:{test}")
    makers = list(TASKS.values())
    samples: list[Conversation] = []
    while len(samples) < count:
        sample = makers[len(samples) % len(makers)](rng)
        if is_test(sample) == test:
            samples.append(sample)
    return samples


def worsened(answer: str, rng: Random) -> str:
    """Returns an answer that breaks a rule: another number, words around it, cut short, or said twice."""
    digits = [place for place, letter in enumerate(answer) if letter.isdigit()]
    if digits and rng.random() < 0.5:
        place = rng.choice(digits)
        other = rng.choice([digit for digit in "0123456789" if digit != answer[place]])
        return answer[:place] + other + answer[place + 1 :]
    match rng.randrange(3):
        case 0:
            return f"Well, {answer}"
        case 1:
            return f"{answer} {answer}"
        case _:
            return answer[: len(answer) // 2].rstrip() or f"Well, {answer}"


def preferences(count: int, seed: int) -> list[Preference]:
    """Returns preferences of right answers to worsened ones, on training questions."""
    rng = Random(f"{seed}:preferences")
    return [
        Preference(
            messages=conversation.question,
            tools=conversation.tools,
            chosen=conversation.answer,
            rejected=worsened(conversation.answer, rng),
        )
        for conversation in conversations(count, seed + 1, test=False)
    ]


def text(lines: int, seed: int) -> Iterator[str]:
    """Yields statements about the tasks' numbers and words, without questions and answers of the test set."""
    rng = Random(f"{seed}:text")
    for _ in range(lines):
        name, thing, city, number = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_CITIES), rng.randint(0, 99)
        yield rng.choice(
            (
                f"{name} has a {thing} in {city}.",
                f"The {thing} costs {number}, the {rng.choice(_THINGS)} {rng.randint(0, 99)}.",
                f"After {number} comes {number + 1}.",
                f"{thing} = {number}",
                f"It is {number % 36} degrees in {city}.",
                f'{{"name": "{name}", "has": "{thing}"}}',
            )
        )


def write_tasks(folder: Path, train: int, test: int, pairs: int, lines: int, seed: int = 0) -> None:
    """Writes all files below `folder`."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.jsonl", conversations(train, seed, test=False))
    write_lines(folder / "test.jsonl", conversations(test, seed, test=True))
    write_lines(folder / "pairs.jsonl", preferences(pairs, seed))
    write_durably(folder / "text" / "text.txt", "".join(line + "\n" for line in text(lines, seed)).encode())


def _single_turn(task: str, question: str, answer: str, tools: tuple[dict[str, object], ...] = ()) -> Conversation:
    return _conversation(task, [("user", question), ("assistant", answer)], tools)


def _conversation(task: str, turns: list[tuple[str, str]], tools: tuple[dict[str, object], ...] = ()) -> Conversation:
    messages = tuple(Message.model_validate({"role": role, "content": content}) for role, content in turns)
    return Conversation(messages=messages, tools=tools, task=task)
