"""Conversations: JSON lines with checked roles, the chat template, token ids and which of them are answers. No torch.

A line is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...], "task": ..., "solved": ...}; all but the
messages may be left out, and other keys are ignored. Roles are system or developer (first, if at all), user, assistant
and tool; the last message is an assistant's, which is trained on, or expected where models are evaluated. A line of
preferences ends with a question instead and has "chosen" and "rejected" answers. Other forms are converted, see
`nas.train.posttrain.formats`.

Templates see messages as transformers gives them: with tool calls, reasoning and whatever else a message has.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from nas.core.downloads import download_problem
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.model.text.reader import is_compressed, unpacked
from nas.train.posttrain.formats import converted
from nas.train.release.model_tokenizer import ModelTokenizer, read_member_tokenizer
from nas.train.release.templates import DATE, DEFAULT, TOOLS, TURN, rendered
from nas.train.release.tokenizer import SPECIAL, MemberTokenizer

Role = Literal["system", "developer", "user", "assistant", "tool"]
Tool = str | dict[str, Any]

_FOLLOWS: dict[str, tuple[str, ...]] = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_IN_ANSWERS = ("<|tool_call_start|>", "<|tool_call_end|>")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of what a model thinks before it answers; templates get it under the first two, as in transformers."""
MOST_PROBLEMS = 20
"""That are named of a file."""


class Line(BaseModel):
    """A line of a file of data; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Returns the line that a record is.

        Raises:
            ValueError: the record lacks something.
        """
        return cls.model_validate(record)

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        """Returns why the line cannot be used with a tokenizer of `special` tokens; None: it can."""
        return None


class ChatLine(Line, ABC):
    """A line with answers, in any form of `nas.train.posttrain.formats`."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        return cls.model_validate(converted(record))

    @property
    @abstractmethod
    def conversations(self) -> Sequence[Conversation]:
        """Conversations that end with the line's answers."""


class Message(BaseModel):
    """A turn of a conversation; what else it has is for templates.

    Args:
        content: its text; None: it calls tools without a word.
        tool_calls: of an assistant, in the form that templates read.
        weight: 0: an answer that is not trained on.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Role
    content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    weight: Literal[0, 1] = 1

    @property
    def text(self) -> str:
        """The content; empty: none."""
        return self.content or ""

    @property
    def reasoning(self) -> Any:
        """What an assistant thinks before it answers; None: nothing is said of it."""
        extra = self.model_extra or {}
        return next((extra[name] for name in _REASONING if extra.get(name)), None)

    def variables(self) -> dict[str, Any]:
        """Returns the message as templates see it."""
        message = self.model_dump(exclude_unset=True, exclude={"weight"})
        if (reasoning := self.reasoning) is None:
            return message
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}

    def texts(self) -> Iterator[str]:
        """Yields all texts that a template may read, but the role."""
        yield from _texts(list(self.model_dump(exclude_unset=True, exclude={"role"}).values()))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.items():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


class Conversation(ChatLine):
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
        """Content of the last message; see `ChatTokenizer.plain` for one that calls tools."""
        return self.messages[-1].text

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        problem = problem_of(self.messages, "assistant", special) or problem_of_tools(self.tools, special)
        trained = any(message.weight for message in self.messages if message.role == "assistant")
        return problem or (None if trained else "every answer has weight 0")


class Preference(ChatLine):
    """A question with a better and a worse answer."""

    messages: tuple[Message, ...] = Field(min_length=1)
    chosen: str
    rejected: str
    tools: tuple[Tool, ...] = ()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        line = super().from_record(record)
        *question, last = line.messages
        if last.role == "assistant" and last.text == line.chosen:  # of data sets whose `messages` are the better talk
            return line.model_copy(update={"messages": tuple(question)})
        return line

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
AnyChatLine = TypeVar("AnyChatLine", bound=ChatLine)


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
            expected, where = " or ".join(_FOLLOWS[before]), f"after {before}" if before else "at the start"
            return f"message {number} has role {message.role}, expected {expected} {where}"
        if message.role in ("user", "assistant") and not message.text.strip() and not message.tool_calls:
            return f"message {number} ({message.role}) is empty"
        allowed = _IN_ANSWERS if message.role == "assistant" else ()
        if token := _special_in(message.texts(), [token for token in special if token not in allowed]):
            return f"message {number} ({message.role}) contains the special token {token}"
        before = message.role
    return None if before == last else f"the last message has role {before or 'none'}, expected {last}"


def problem_of_tools(tools: Sequence[Tool], special: Sequence[str] = SPECIAL) -> str | None:
    """Returns the special token that a tool spells, in words; None: none does."""
    token = _special_in(_texts(tools), special)
    return f"a tool contains the special token {token}" if token else None


def _special_in(texts: Iterable[str], special: Sequence[str]) -> str | None:
    return next((token for text in texts for token in special if token in text), None)


def read_lines(path: Path, kind: type[AnyLine]) -> list[AnyLine]:
    """Reads a file of conversations or preferences; see `read_placed_lines`."""
    return [line for _, line in read_placed_lines(path, kind)]


def read_placed_lines(
    path: Path, kind: type[AnyLine], special: Sequence[str] = SPECIAL, bad: list[str] | None = None
) -> list[tuple[str, AnyLine]]:
    """Reads a file of lines of one kind, each with its place, `file:line`; empty lines are skipped.

    A file may also hold one JSON list, whose places are `file, record N`, and may be compressed.

    Args:
        path: of the file.
        kind: of its lines.
        special: tokens that contents may not spell.
        bad: takes the problems of bad lines, which are left out; None: they are raised.

    Raises:
        InvalidInput: there is no such file or it holds no good line; or one line for each of the first problems, as
            `file:line: message`.
    """
    lines: list[tuple[str, AnyLine]] = []
    problems: list[str] = []
    for place, record in placed_records(path):
        parsed = _parsed(record, kind, special)
        if not isinstance(parsed, str):
            lines.append((place, parsed))
            continue
        problems.append(f"{place}: {parsed}")
        if bad is None and len(problems) == MOST_PROBLEMS:
            break
    if bad is None or not lines:
        raise_problems(problems)
    if not lines:
        raise InvalidInput("holds no line", where=str(path))
    if bad is not None:
        bad += problems
    return lines


def raise_problems(problems: Sequence[str]) -> None:
    """Raises InvalidInput with one line for each of the first problems, if there are any."""
    if problems:
        raise InvalidInput("\n".join(problems[:MOST_PROBLEMS]))


def placed_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields place and content of the records of a file; the content of a line that is no JSON is a `ValueError`."""
    try:
        content = (unpacked(path) if is_compressed(path) else path.read_bytes()).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InvalidInput(f"cannot read it: {error.strerror}", where=str(path)) from error
    if content.startswith(b"PAR1"):
        raise InvalidInput("is Parquet: write it as JSON lines, as `datasets` does with `to_json`", where=str(path))
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InvalidInput("is UTF-16: save it as UTF-8", where=str(path))
    if content.lstrip().startswith(b"["):
        try:
            records = from_json(content)
            yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, 1))
            return
        except ValueError:  # lines that are lists, or broken ones
            pass
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _json_or_error(line, path if number == 1 else None)


def _json_or_error(line: bytes, path: Path | None) -> Any:
    """Returns a line's JSON, or the error with what the file is instead, if its first line is given with its path."""
    try:
        return from_json(line)
    except ValueError as error:
        problem = f"Invalid JSON: {error}".replace(" at line 1 column ", " at column ")
        return ValueError(problem if path is None else download_problem(path, problem))


def check_files(
    files: Iterable[tuple[str, type[ChatLine]]],
    tokenizer: Path | None = None,
    date: str = DATE,
    *,
    skip: Collection[str] = (),
) -> None:
    """Reads files of conversations or preferences, to find their problems before hours of training.

    Args:
        files: with what their lines are.
        tokenizer: tokenizer.json, whose special tokens they may not spell; None: one of a family.
        date: of chat templates.
        skip: those of `files` whose bad lines are left out.

    Raises:
        InvalidInput: the problems of all files; see `read_placed_lines`.
    """
    chat = None if tokenizer is None else ChatTokenizer.read(tokenizer, date)
    problems = []
    for path, kind in dict.fromkeys(files):
        bad: list[str] | None = [] if path in skip else None
        try:
            lines = read_placed_lines(Path(path), kind, chat.special if chat else SPECIAL, bad)
            if chat:
                chat.placed(lines, bad)
        except InvalidInput as error:
            problems.append(str(error))
    if problems:
        raise InvalidInput("\n".join(problems))


def _parsed(record: Any, kind: type[AnyLine], special: Sequence[str]) -> AnyLine | str:
    """Returns the parsed record, or what is wrong with it."""
    try:
        if isinstance(record, ValueError):
            raise record
        if not isinstance(record, dict):
            return "no JSON object"
        parsed = kind.from_record(record)
    except ValidationError as error:
        first = error.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{place}: {message}" if place else message
    except ValueError as error:
        return str(error)
    return parsed.problem(special) or parsed


def write_lines(path: Path, lines: Iterable[BaseModel]) -> None:
    """Writes one JSON object per line, atomically; values that equal their defaults are left out."""
    text = "".join(line.model_dump_json(exclude_defaults=True) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode())


class ChatTokenizer:
    """Conversations as token ids, in the chat template of the tokenizer.

    Questions and answers are encoded apart, as they are at inference, where a model continues the ids of a question.
    Templates get `enable_thinking: false`, with which those of reasoning models ask for the answer itself, but for
    answers that have reasoning.

    Args:
        tokenizer: of the member.
        where: its file, for messages.
        date: of today, for templates that name it, YYYY-MM-DD.
        trains: whether answers are told from the rest of a conversation. Templates that open the reasoning of every
            answer are of use for questions alone.

    Raises:
        InvalidInput: it has no chat template, or with `trains` one that answers cannot be told from.
    """

    def __init__(self, tokenizer: MemberTokenizer, where: str, date: str = DATE, *, trains: bool = True) -> None:
        self._templates, self._date, self._where = tokenizer.chat_templates, date, where
        if DEFAULT not in self._templates or not tokenizer.ends:
            others = f": its named ones are {', '.join(self._templates)}" if self._templates else ""
            lacks = "no token that ends an answer" if DEFAULT in self._templates else f"no chat template{others}"
            raise InvalidInput(f"has {lacks}", where=where)
        self._tokenizer = tokenizer.tokenizer
        texts = {token: text for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        self._named = tokenizer.named
        specials = () if isinstance(tokenizer, ModelTokenizer) else SPECIAL
        self.special = tuple(dict.fromkeys((*specials, *tokenizer.special)))
        """Tokens that messages may not spell."""
        self.ends = tokenizer.ends
        """Ids after which an answer is over."""
        self._ends = [texts[token] for token in self.ends]
        self.pad = tokenizer.ids().get("pad", self.ends[0])
        self._checked = isinstance(tokenizer, ModelTokenizer)
        self.content = hashlib.sha256(tokenizer.content).hexdigest()
        """SHA-256 of tokenizer.json."""
        self.dated = any("strftime_now" in template for template in self._templates.values())
        """Whether the date counts."""
        self.identity = ([tokenizer.describe()] if self._checked else []) + ([date] if self.dated else [])
        """What ids depend on besides tokenizer.json, for keys."""
        self._blank = self._tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("\u2581")
        self._keeps_answers = trains and self._has_earlier_answers()

    @classmethod
    def read(cls, path: Path, date: str = DATE) -> Self:
        """Returns that of a tokenizer.json, with the files beside it."""
        return cls(read_member_tokenizer(path), str(path), date)

    @property
    def template(self) -> str:
        """The chat template of conversations without tools."""
        return self._templates[DEFAULT]

    @property
    def begin(self) -> str:
        """Text of the token that the template puts in front of a conversation; empty: none."""
        begin = self._named.get("bos_token", "")
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

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, ask: bool = False, think: bool = False
    ) -> str:
        """Returns a conversation in the chat template; with `ask`, the start of an answer follows, for generation.

        Raises:
            InvalidInput: the template refuses it.
        """
        variables = {
            **TURN,
            **self._named,
            "messages": [message.variables() for message in messages],
            "tools": list(tools) or None,
            "add_generation_prompt": ask,
            "enable_thinking": think,
        }
        template = self._templates[TOOLS if tools and TOOLS in self._templates else DEFAULT]
        return rendered(template, variables, self._where, self._date)

    def question(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the ids that a model continues with its answer to `messages`."""
        return [token for ids, _ in self._encoded(self._parts(messages, tools, ask=True)) for token in ids]

    def conversation(
        self, conversation: Conversation, *, last: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns ids [T], and which of them belong to answers, end-of-turn tokens included, [T].

        With `last`, or a template that changes earlier answers (Qwen3's removes reasoning), only the last one counts.

        Raises:
            InvalidInput: the template refuses it, or changes its answers, or no answer counts.
        """
        ids: list[int] = []
        answers: list[bool] = []
        for part, counts in self._encoded(self._parts(conversation.messages, conversation.tools, ask=False)):
            ids += part
            if last and counts:
                answers = [False] * len(answers)
            answers += [counts] * len(part)
        if not any(answers):
            raise InvalidInput(
                "no answer is left to train on: the template changes earlier ones, and the last has weight 0",
                where=self._where,
            )
        return np.asarray(ids, np.int32), np.asarray(answers, np.bool_)

    def plain(self, conversation: Conversation) -> Conversation:
        """Returns a conversation whose answer is text: tool calls are as the template says them.

        Raises:
            InvalidInput: the template refuses it, or changes its answers.
        """
        if not conversation.messages[-1].tool_calls:
            return conversation
        *_, (answer, _) = self._parts(conversation.messages, conversation.tools, ask=False)
        message = Message(role="assistant", content=self._split(answer)[0].strip())
        return conversation.model_copy(update={"messages": (*conversation.question, message)})

    def placed(
        self, lines: Iterable[tuple[str, AnyChatLine]], bad: list[str] | None = None
    ) -> list[tuple[str, AnyChatLine]]:
        """Returns the lines that the chat template says.

        Args:
            lines: with their places.
            bad: takes the problems of the others; None: the first is raised.

        Raises:
            InvalidInput: see `bad`; or the template says none of them.
        """
        good, problems = [], []
        for place, line in lines:
            try:
                # A family's template says all that is plain.
                if self._checked or any(map(_is_rich, line.conversations)):
                    for conversation in line.conversations:
                        self.conversation(conversation)
                good.append((place, line))
            except InvalidInput as error:
                problems.append(f"{place}: {error.message}")
                if bad is None:
                    break
        if bad is None or not good:
            raise_problems(problems)
        if bad is not None:
            bad += problems
        return good

    def _encoded(self, parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[int], bool]]:
        done = ""
        for text, counts in parts:
            yield self._encoded_after(done, text), counts
            done += text

    def _encoded_after(self, before: str, text: str) -> list[int]:
        """Returns the ids of a part of a text.

        Tokenizers that put a blank in front of a text, as Llama 2's, would put one into the midst of it.
        """
        if not (self._blank and before):
            return self.encode(text)
        start, whole = self.encode(before), self.encode(before + text)
        return whole[len(start) :] if whole[: len(start)] == start else self.encode(text)

    def _parts(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> list[tuple[str, bool]]:
        """Returns the rendered text in parts, and whether a part is an answer that counts.

        The template may change what is before the last turns: then the last answer alone counts.
        """
        places = [number for number, message in enumerate(messages) if message.role == "assistant"]
        last = [] if ask else places[-1:]
        if self._keeps_answers and places != last:
            try:
                return list(self._parts_at(places, messages, tools, ask=ask))
            except InvalidInput:  # which is raised again where the last one is refused, too
                pass
        return list(self._parts_at(last, messages, tools, ask=ask))

    def _parts_at(
        self, places: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool
    ) -> Iterator[tuple[str, bool]]:
        done = ""
        for number in places:
            message = messages[number]
            think = message.reasoning is not None
            before = self.render(messages[:number], tools, ask=True, think=think)
            whole = self.render(messages[: number + 1], tools, think=think)
            answer, end = self._split(whole.removeprefix(before))
            if not (before.startswith(done) and whole.startswith(before) and end and _says(answer, message)):
                what = "leaves out the tool calls of" if message.tool_calls else "changes"
                raise InvalidInput(f"its chat template {what} the answer {message.text[:40]!r}", where=self._where)
            yield before[len(done) :], False
            yield answer + end, bool(message.weight)
            done = before + answer + end
        if ask:
            question = self.render(messages, tools, ask=True)
            if not question.startswith(done):
                raise InvalidInput("its chat template changes earlier turns", where=self._where)
            yield question[len(done) :], False

    def _split(self, text: str) -> tuple[str, str]:
        """Returns the answer with which a text begins, and the token that ends it; empty: none does."""
        places = [(text.index(end), -len(end), end) for end in self._ends if end in text]
        if not places:
            return text, ""
        place, _, end = min(places)
        return text[:place], end

    def _has_earlier_answers(self) -> bool:
        """Returns whether a conversation begins as it did before its last turns.

        Raises:
            InvalidInput: answers are no continuation of questions, or none of the tokens that end answers is behind.
        """
        before, whole = self.render(_PROBE[:1], ask=True), self.render(_PROBE[:2])
        answer, end = self._split(whole.removeprefix(before))
        if not (whole.startswith(before) and end and _says(answer, _PROBE[1])):
            raise InvalidInput(
                f"its chat template does not continue a question with the answer and one of {', '.join(self._ends)}",
                where=self._where,
            )
        try:
            return bool(list(self._parts_at((1, 3), _PROBE, (), ask=False)))
        except InvalidInput:
            return False


def _is_rich(conversation: Conversation) -> bool:
    """Returns whether messages have more than role and content."""
    return any(message.tool_calls or message.model_extra for message in conversation.messages)


def _says(answer: str, message: Message) -> bool:
    """Returns whether a rendered answer is what a message says: its content, or its content among its calls."""
    if not message.tool_calls and message.reasoning is None:
        return answer.strip() == message.text.strip()
    names = [call.get("function", call).get("name", "") for call in message.tool_calls]
    return all(text in answer for text in (message.text.strip(), *map(str, names)))


_PROBE = tuple(map(Message.model_validate, TURN["messages"])) * 2
