"""Conversations: JSON lines with checked roles, the chat template, token ids and which of them are answers. No torch.

A line is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...], "task": ..., "solved": ...}; all but the
messages may be left out, and other keys are ignored. Roles are system (first, if at all), user, assistant and tool; the
last message is an assistant's, which is trained on, or expected where models are evaluated. A line of preferences ends
with a question instead and has "chosen" and "rejected" answers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.release.tokenizer import BOS, END_OF_TEXT, END_OF_TURN, SPECIAL, MemberTokenizer, chat_template, read_tokenizer

Role = Literal["system", "user", "assistant", "tool"]
Tool = str | dict[str, Any]

_FOLLOWS: dict[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_IN_ANSWERS = ("<|tool_call_start|>", "<|tool_call_end|>")
_MOST_PROBLEMS = 20


class Line(BaseModel, ABC):
    """A line of a file of data; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @abstractmethod
    def problem(self) -> str | None:
        """Returns why the line cannot be used; None: it can."""


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: str


class Conversation(Line):
    """A conversation that ends with an answer."""

    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[Tool, ...] = ()
    task: str = Field("", max_length=100, description="name under which answers are counted in evaluations")
    solved: float | None = Field(None, ge=0, le=1, description="share of models that answer right, for a curriculum")

    @property
    def question(self) -> tuple[Message, ...]:
        """All messages but the last."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """Content of the last message."""
        return self.messages[-1].content

    def problem(self) -> str | None:
        """Returns why the conversation cannot be used; None: it can."""
        return problem_of(self.messages, "assistant")


class Preference(Line):
    """A question with a better and a worse answer."""

    messages: tuple[Message, ...] = Field(min_length=1)
    chosen: str
    rejected: str
    tools: tuple[Tool, ...] = ()

    def conversation(self, answer: str) -> Conversation:
        """Returns the conversation that ends with `answer`."""
        messages = (*self.messages, Message(role="assistant", content=answer))
        return Conversation(messages=messages, tools=self.tools)

    def problem(self) -> str | None:
        """Returns why the preference cannot be used; None: it can."""
        if self.chosen == self.rejected:
            return "chosen and rejected are the same"
        return next(filter(None, (self.conversation(each).problem() for each in (self.chosen, self.rejected))), None)


AnyLine = TypeVar("AnyLine", bound=Line)


def problem_of(messages: Sequence[Message], last: Role) -> str | None:
    """Returns what is wrong with the roles and contents of a conversation that should end with role `last`."""
    before = ""
    for number, message in enumerate(messages, 1):
        if message.role not in _FOLLOWS[before]:
            expected = " or ".join(_FOLLOWS[before])
            return f"message {number} has role {message.role}, expected {expected} {_position(before)}"
        if not message.content.strip():
            return f"message {number} ({message.role}) is empty"
        allowed = _IN_ANSWERS if message.role == "assistant" else ()
        for token in SPECIAL:
            if token in message.content and token not in allowed:
                return f"message {number} ({message.role}) contains the special token {token}"
        before = message.role
    return None if before == last else f"the last message has role {before or 'none'}, expected {last}"


def _position(before: str) -> str:
    return f"after {before}" if before else "at the start"


def read_lines(path: Path, kind: type[AnyLine]) -> list[AnyLine]:
    """Reads a file of conversations or preferences; see `read_numbered_lines`."""
    return [line for _, line in read_numbered_lines(path, kind)]


def read_numbered_lines(path: Path, kind: type[AnyLine]) -> list[tuple[int, AnyLine]]:
    """Reads a file of conversations or preferences, each with the number of its line, from 1; empty lines are skipped.

    Raises:
        InvalidInput: there is no such file or it is empty; or one line for each of the first problems, as
            `file:line: message`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read it: {error.strerror}", where=str(path)) from error
    found: list[tuple[int, AnyLine]] = []
    problems: list[str] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        parsed = _parsed(line, kind)
        if isinstance(parsed, str):
            problems.append(f"{path}:{number}: {parsed}")
            if len(problems) == _MOST_PROBLEMS:
                break
        else:
            found.append((number, parsed))
    if problems:
        raise InvalidInput("\n".join(problems))
    if not found:
        raise InvalidInput("holds no line", where=str(path))
    return found


def check_files(files: Iterable[tuple[str, type[Line]]]) -> None:
    """Reads files of conversations or preferences, to find their problems before hours of training.

    Raises:
        InvalidInput: the problems of all files; see `read_numbered_lines`.
    """
    problems = []
    for path, kind in dict.fromkeys(files):
        try:
            read_lines(Path(path), kind)
        except InvalidInput as error:
            problems.append(str(error))
    if problems:
        raise InvalidInput("\n".join(problems))


def _parsed(line: bytes, kind: type[AnyLine]) -> AnyLine | str:
    """Returns the parsed line, or what is wrong with it."""
    try:
        parsed = kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].replace(" at line 1 column ", " at column ")
        return f"{place}: {message}" if place else message
    return parsed.problem() or parsed


def write_lines(path: Path, lines: Iterable[BaseModel]) -> None:
    """Writes one JSON object per line, atomically; values that equal their defaults are left out."""
    text = "".join(line.model_dump_json(exclude_defaults=True) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode())


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), *, ask: bool = False) -> str:
    """Returns a conversation in the release's chat template.

    Args:
        messages: of the conversation.
        tools: that it may call, as JSON objects or as text.
        ask: whether the start of an answer follows, for generation.
    """
    return _template().render(
        messages=[message.model_dump() for message in messages],
        tools=list(tools),
        bos_token=BOS,
        add_generation_prompt=ask,
    )


@cache
def _template() -> Template:
    # As transformers renders it: blocks trimmed, JSON without HTML escapes.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(chat_template())


class ChatTokenizer:
    """Conversations as token ids.

    Questions and answers are encoded apart, as they are at inference, where a model continues the ids of a question.

    Args:
        tokenizer: of the member.
        where: its file, for messages.

    Raises:
        InvalidInput: it has no special tokens.
    """

    def __init__(self, tokenizer: MemberTokenizer, where: str) -> None:
        if not set(SPECIAL) <= set(tokenizer.special):
            raise InvalidInput("has no special tokens for a chat template", where=where)
        self._tokenizer = tokenizer.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.pad = tokenizer.special["<|pad|>"]
        self.ends = (tokenizer.special[END_OF_TURN], tokenizer.special[END_OF_TEXT])
        """Ids after which an answer is over."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns that of a tokenizer.json."""
        return cls(read_tokenizer(path), str(path))

    def encode(self, text: str) -> list[int]:
        """Returns ids; special tokens that the text spells become their ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def answer_of(self, ids: Sequence[int]) -> str:
        """Returns the text of generated ids up to the first that ends an answer."""
        end = next((i for i, token in enumerate(ids) if token in self.ends), len(ids))
        return self.decode(ids[:end])

    def question(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the ids that a model continues with its answer to `messages`."""
        return [token for text, _ in _parts(messages, tools, ask=True) for token in self.encode(text)]

    def conversation(
        self, conversation: Conversation, *, last: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns ids [T], and which of them belong to answers, end-of-turn tokens included, [T].

        Args:
            conversation: to encode.
            last: whether the last answer alone counts.
        """
        ids: list[int] = []
        answers: list[bool] = []
        for text, is_answer in _parts(conversation.messages, conversation.tools, ask=False):
            part = self.encode(text)
            ids += part
            if last and is_answer:
                answers = [False] * len(answers)
            answers += [is_answer] * len(part)
        return np.asarray(ids, np.int32), np.asarray(answers, np.bool_)


def _parts(messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> Iterator[tuple[str, bool]]:
    """Yields the rendered text in parts, and whether a part is an answer."""
    done = ""
    for number, message in enumerate(messages):
        if message.role == "assistant":
            before = render(messages[:number], tools, ask=True)
            assert before.startswith(done), "the template renders a conversation as a prefix of its continuation"
            answer = message.content + END_OF_TURN
            yield before[len(done) :], False
            yield answer, True
            done = before + answer
    if ask:
        yield render(messages, tools, ask=True)[len(done) :], False
