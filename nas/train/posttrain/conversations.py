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
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.train.release.model_tokenizer import ModelTokenizer, read_member_tokenizer
from nas.train.release.tokenizer import SPECIAL, MemberTokenizer

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

    @property
    @abstractmethod
    def conversations(self) -> Sequence[Conversation]:
        """Conversations that end with the line's answers."""

    @abstractmethod
    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        """Returns why the line cannot be used with a tokenizer of `special` tokens; None: it can."""


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
    def conversations(self) -> Sequence[Conversation]:
        return (self,)

    @property
    def question(self) -> tuple[Message, ...]:
        """All messages but the last."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """Content of the last message."""
        return self.messages[-1].content

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        return problem_of(self.messages, "assistant", special)


class Preference(Line):
    """A question with a better and a worse answer."""

    messages: tuple[Message, ...] = Field(min_length=1)
    chosen: str
    rejected: str
    tools: tuple[Tool, ...] = ()

    @property
    def conversations(self) -> Sequence[Conversation]:
        return self.conversation(self.chosen), self.conversation(self.rejected)

    def conversation(self, answer: str) -> Conversation:
        """Returns the conversation that ends with `answer`."""
        messages = (*self.messages, Message(role="assistant", content=answer))
        return Conversation(messages=messages, tools=self.tools)

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        if self.chosen == self.rejected:
            return "chosen and rejected are the same"
        problems = (conversation.problem(special) for conversation in self.conversations)
        return next(filter(None, problems), None)


AnyLine = TypeVar("AnyLine", bound=Line)


def problem_of(messages: Sequence[Message], last: Role, special: Sequence[str] = SPECIAL) -> str | None:
    """Returns what is wrong with the roles and contents of a conversation that should end with role `last`.

    Args:
        messages: of the conversation.
        last: role of the last one.
        special: tokens that contents may not spell.
    """
    before = ""
    for number, message in enumerate(messages, 1):
        if message.role not in _FOLLOWS[before]:
            expected = " or ".join(_FOLLOWS[before])
            return f"message {number} has role {message.role}, expected {expected} {_position(before)}"
        if not message.content.strip():
            return f"message {number} ({message.role}) is empty"
        allowed = _IN_ANSWERS if message.role == "assistant" else ()
        for token in special:
            if token in message.content and token not in allowed:
                return f"message {number} ({message.role}) contains the special token {token}"
        before = message.role
    return None if before == last else f"the last message has role {before or 'none'}, expected {last}"


def _position(before: str) -> str:
    return f"after {before}" if before else "at the start"


def read_lines(path: Path, kind: type[AnyLine]) -> list[AnyLine]:
    """Reads a file of conversations or preferences; see `read_numbered_lines`."""
    return [line for _, line in read_numbered_lines(path, kind)]


def read_numbered_lines(path: Path, kind: type[AnyLine], special: Sequence[str] = SPECIAL) -> list[tuple[int, AnyLine]]:
    """Reads a file of conversations or preferences, each with the number of its line, from 1; empty lines are skipped.

    Args:
        path: of the file.
        kind: of its lines.
        special: tokens that contents may not spell.

    Raises:
        InvalidInput: there is no such file or it is empty; or one line for each of the first problems, as
            `file:line: message`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read it: {error.strerror}", where=str(path)) from error
    parsed_lines: list[tuple[int, AnyLine]] = []
    problems: list[str] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        parsed = _parsed(line, kind, special)
        if isinstance(parsed, str):
            problems.append(f"{path}:{number}: {parsed}")
            if len(problems) == _MOST_PROBLEMS:
                break
        else:
            parsed_lines.append((number, parsed))
    if problems:
        raise InvalidInput("\n".join(problems))
    if not parsed_lines:
        raise InvalidInput("holds no line", where=str(path))
    return parsed_lines


def check_files(files: Iterable[tuple[str, type[Line]]], tokenizer: Path | None = None) -> None:
    """Reads files of conversations or preferences, to find their problems before hours of training.

    Args:
        files: with what their lines are.
        tokenizer: tokenizer.json, whose special tokens they may not spell; None: one of a family.

    Raises:
        InvalidInput: the problems of all files; see `read_numbered_lines`.
    """
    chat = None if tokenizer is None else ChatTokenizer.read(tokenizer)
    problems = []
    for path, kind in dict.fromkeys(files):
        try:
            lines = read_numbered_lines(Path(path), kind, chat.special if chat else SPECIAL)
            if chat and chat.identity:  # a family's own template says all conversations
                _check_rendered(path, lines, chat)
        except InvalidInput as error:
            problems.append(str(error))
    if problems:
        raise InvalidInput("\n".join(problems))


def _check_rendered(path: str, lines: Iterable[tuple[int, Line]], chat: ChatTokenizer) -> None:
    """Checks that a chat template says all lines.

    Raises:
        InvalidInput: the first that it does not.
    """
    for number, line in lines:
        try:
            for conversation in line.conversations:
                chat.conversation(conversation)
        except InvalidInput as error:
            raise InvalidInput(f"{path}:{number}: {error.message}") from error


def _parsed(line: bytes, kind: type[AnyLine], special: Sequence[str]) -> AnyLine | str:
    """Returns the parsed line, or what is wrong with it."""
    try:
        parsed = kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].replace(" at line 1 column ", " at column ")
        return f"{place}: {message}" if place else message
    return parsed.problem(special) or parsed


def write_lines(path: Path, lines: Iterable[BaseModel]) -> None:
    """Writes one JSON object per line, atomically; values that equal their defaults are left out."""
    text = "".join(line.model_dump_json(exclude_defaults=True) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode())


class ChatTokenizer:
    """Conversations as token ids, in the chat template of the tokenizer.

    Questions and answers are encoded apart, as they are at inference, where a model continues the ids of a question.
    Templates get `enable_thinking: false`, with which those of reasoning models ask for the answer itself.

    Args:
        tokenizer: of the member.
        where: its file, for messages.

    Raises:
        InvalidInput: it has no chat template, or one that answers cannot be told from.
    """

    def __init__(self, tokenizer: MemberTokenizer, where: str) -> None:
        if tokenizer.chat_template is None or not tokenizer.ends:
            raise InvalidInput("has no special tokens for a chat template", where=where)
        self.template, self._where = tokenizer.chat_template, where
        self._tokenizer = tokenizer.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        texts = {token: text for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        self._names = {f"{purpose}_token": texts[token] for purpose, token in tokenizer.ids().items()}
        self.special = tuple(dict.fromkeys((*SPECIAL, *tokenizer.special)))
        """Tokens that messages may not spell."""
        self.ends = tokenizer.ends
        """Ids after which an answer is over."""
        self.pad = tokenizer.ids().get("pad", self.ends[0])
        self.identity = [tokenizer.describe()] if isinstance(tokenizer, ModelTokenizer) else []
        """What ids depend on besides tokenizer.json, for keys."""
        self._end, self._keeps_answers = "", True
        self._end = self._end_of_turn([texts[token] for token in self.ends])
        self._keeps_answers = self._has_earlier_answers()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns that of a tokenizer.json, with the files beside it."""
        return cls(read_member_tokenizer(path), str(path))

    @property
    def begin(self) -> str:
        """Text of the token that the template puts in front of a conversation; empty: none."""
        begin = self._names.get("bos_token", "")
        return begin if self.render(_PROBE[:1], ask=True).startswith(begin) else ""

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

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, ask: bool = False) -> str:
        """Returns a conversation in the chat template; with `ask`, the start of an answer follows, for generation.

        Raises:
            InvalidInput: the template refuses it.
        """
        try:
            return _compiled(self.template).render(
                messages=[message.model_dump() for message in messages],
                tools=list(tools),
                add_generation_prompt=ask,
                enable_thinking=False,
                **self._names,
            )
        except TemplateError as error:
            raise InvalidInput(f"its chat template refuses a conversation: {error}", where=self._where) from error

    def question(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the ids that a model continues with its answer to `messages`."""
        return [token for text, _ in self._parts(messages, tools, ask=True) for token in self.encode(text)]

    def conversation(
        self, conversation: Conversation, *, last: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns ids [T], and which of them belong to answers, end-of-turn tokens included, [T].

        With `last`, or a template that changes earlier answers (Qwen3's removes reasoning), the last one alone counts.

        Raises:
            InvalidInput: the template refuses it, or changes its answers.
        """
        ids: list[int] = []
        answers: list[bool] = []
        for text, is_answer in self._parts(conversation.messages, conversation.tools, ask=False):
            part = self.encode(text)
            ids += part
            if last and is_answer:
                answers = [False] * len(answers)
            answers += [is_answer] * len(part)
        return np.asarray(ids, np.int32), np.asarray(answers, np.bool_)

    def _parts(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> Iterator[tuple[str, bool]]:
        """Yields the rendered text in parts, and whether a part is an answer."""
        places = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if not self._keeps_answers:
            places = [] if ask else places[-1:]
        done = ""
        for number in places:
            before = self.render(messages[:number], tools, ask=True)
            whole = self.render(messages[: number + 1], tools)
            answer, end, _ = whole.removeprefix(before).partition(self._end)
            if not (before.startswith(done) and whole.startswith(before) and end) or (
                answer.strip() != messages[number].content.strip()
            ):
                raise InvalidInput(
                    f"its chat template changes the answer {messages[number].content[:40]!r}", where=self._where
                )
            yield before[len(done) :], False
            yield answer + end, True
            done = before + answer + end
        if ask:
            yield self.render(messages, tools, ask=True).removeprefix(done), False

    def _end_of_turn(self, ends: Sequence[str]) -> str:
        """Returns the one of `ends` that the template puts behind an answer.

        Raises:
            InvalidInput: it puts none of those there that end answers, or answers are no continuation of questions.
        """
        before, whole = self.render(_PROBE[:1], ask=True), self.render(_PROBE[:2])
        behind = whole.removeprefix(before + _PROBE[1].content)
        matches = [end for end in ends if whole != behind and behind.lstrip().startswith(end)]
        if not matches:
            raise InvalidInput(
                f"its chat template does not continue a question with the answer and one of {', '.join(ends)}",
                where=self._where,
            )
        return matches[0]

    def _has_earlier_answers(self) -> bool:
        """Returns whether a conversation begins as it did before its last turns."""
        try:
            return len(list(self._parts(_PROBE, (), ask=False))) > 0
        except InvalidInput:
            return False


_PROBE = tuple(Message(role=role, content=f"{role} speaks") for role in ("user", "assistant", "user", "assistant"))


class _Generation(Extension):
    """The tag of transformers around answers, which changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - as declared by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _compiled(template: str) -> Template:
    # As transformers renders it: blocks trimmed, JSON without HTML escapes.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> None:
    """Raises `message`: templates call this on conversations that they cannot say."""
    raise TemplateError(message)
