r"""Conversations with images or sound: JSON lines, the files beside them.

    {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What is this?"}, ...]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", ...}]}, ...]}
    {"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nWhat is this?"}, ...]}    LLaVA
    {"image": "a.png", "question": "What is this?", "answer": "A cat"}
    {"file_name": "a.png", "text": "A cat"}                     metadata.jsonl of the folders of `datasets`
    {"audio_filepath": "a.wav", "text": "good morning"}         manifests of NeMo
    {..., "speech": "b.wav", "mode": "sequential"}              the sound of the last answer

and the same with `audio` and `<audio>`. Each marker of the user's messages stands for one file, in their order; where
there is none, files are in front of the first message. Paths are relative to the file's folder and stay inside of it.
Files are read once before anything is trained, and again in each step. What cannot be used is refused, named by file
and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from nas.core.errors import InvalidInput
from nas.train.posttrain.conversations import (
    MOST_PROBLEMS,
    ChatTokenizer,
    Conversation,
    raise_problems,
    read_placed_lines,
)
from nas.train.posttrain.formats import converted
from nas.train.release.tokenizer import SPECIAL
from nas.train.towers.modality import MediaFile, Modality, Processor

METADATA = "metadata.jsonl"
"""File of a folder of `datasets` that names its files."""

_CAPTIONS = (("answer", "question"), ("text", ""), ("transcription", ""))
"""Keys of an answer, and of its question, in lines without messages."""


class MediaConversation(Conversation):
    """A conversation about files of a modality, or with a spoken answer; there is one file at least."""

    modality: ClassVar[Modality]
    paths: tuple[str, ...] = Field((), max_length=64, description="one for each marker")
    speech: str | None = Field(None, min_length=1, description="file with the sound of the last answer")
    mode: Literal["interleaved", "sequential"] = Field("interleaved", description="in which it is spoken")

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        modality = cls.modality
        paths = [_path(file, modality) for file in _listed(record, modality)]
        record = {name: value for name, value in record.items() if name not in modality.keys}
        for caption, question in _CAPTIONS:
            if (
                not {"messages", "conversations"} & record.keys()
                and caption in record
                and (paths or record.get("speech"))
            ):
                user = {"role": "user", "content": str(record.get(question) or modality.marker)}
                spoken: dict[str, Any] = {name: record[name] for name in ("speech", "mode") if name in record}
                record = {"messages": [user, {"role": "assistant", "content": record[caption]}], **spoken}
        if isinstance(messages := record.get("messages"), list):
            record["messages"] = [_with_markers(message, paths, modality) for message in messages]
        record = converted(record)
        messages = _marked(record["messages"], modality.marker, len(paths))
        return cls.model_validate(record | {"paths": paths, "messages": messages})

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        modality, marker = self.modality, self.modality.marker
        if self.speech is not None and modality.kind != "audio":
            return f"has speech, which models that read {modality.noun}s do not answer with"
        if not self.paths and self.speech is None:
            return f"has no {modality.noun}: conversations without are for --text"
        marks = sum(message.text.count(marker) for message in self.messages if message.role == "user")
        if marks != len(self.paths) or any(
            marker in message.text for message in self.messages if message.role != "user"
        ):
            counts = f"{len(self.paths)} {modality.noun}s, but {marks} {marker}"
            return f"{counts} in the user's messages, where alone they may be"
        return super().problem([token for token in special if token != marker])

    def expanded(self, tokens: Sequence[str]) -> Conversation:
        """Returns the conversation with the tokens of its files, given for each."""
        messages, done = [], 0
        for message in self.messages:
            count = message.text.count(self.modality.marker)
            texts = tokens[done : done + count]
            content = self.modality.expanded(message.text, texts) if count else message.content
            messages.append(message.model_copy(update={"content": content}))
            done += count
        return Conversation(messages=tuple(messages), tools=self.tools)


@lru_cache
def _line_of(modality: Modality) -> type[MediaConversation]:
    """Returns the class of lines about files of a modality."""

    class Line(MediaConversation):
        pass

    Line.modality = modality
    return Line


def _listed(record: dict[str, Any], modality: Modality) -> list[Any]:
    files = next((record[key] for key in modality.keys if key in record), None)
    return files if isinstance(files, list) else [] if files is None else [files]


def _path(file: Any, modality: Modality) -> str:
    path = file.get("path") if isinstance(file, dict) else file
    if not isinstance(path, str) or not path:
        raise ValueError(f"{modality.kind} is no path of a file")
    return path


def _with_markers(message: Any, paths: list[str], modality: Modality) -> Any:
    """Returns a message whose parts that are files are markers; `paths` takes those that name one."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    text = ""
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") == modality.kind:
            paths += [_path(part[name], modality) for name in (modality.kind, "path", "url") if name in part][:1]
            text += modality.marker
        elif isinstance(part, dict) and part.get("type") == "text":
            text += str(part.get("text", ""))
        else:
            raise ValueError(f"content has a part that is neither text nor {modality.kind}")
    return message | {"content": text}


def _marked(messages: Any, marker: str, files: int) -> Any:
    """Returns messages with markers in front of the user's first one, for files that nothing stands for."""
    if not isinstance(messages, list):
        return messages
    users = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    if files and users and not any(marker in str(message.get("content")) for message in users):
        users[0]["content"] = marker * files + str(users[0].get("content") or "")
    return messages


class MediaLine(NamedTuple):
    """A conversation that was checked, with its files.

    Args:
        place: file and line.
        conversation: with a marker for each file.
        files: of images or sound.
        speech: sound of the last answer.
    """

    place: str
    conversation: MediaConversation
    files: tuple[MediaFile, ...]
    speech: MediaFile | None

    @property
    def all_files(self) -> tuple[MediaFile, ...]:
        """Those of questions, and that of the answer."""
        return self.files if self.speech is None else (*self.files, self.speech)

    def expanded(self, processor: Processor) -> Conversation:
        """Returns the conversation with the tokens of its files."""
        return self.conversation.expanded([processor.text(file) for file in self.files])


def read_media_lines(path: Path, chat: ChatTokenizer, modality: Modality) -> list[MediaLine]:
    """Reads conversations about images or sound and checks the files.

    Args:
        path: JSON lines, or a folder of `datasets` with its metadata.jsonl.
        chat: tokenizer with the tokens of the modality.
        modality: of the files.

    Raises:
        InvalidInput: a file is missing, or one line for each of the first problems.
    """
    path = path / METADATA if path.is_dir() else path
    read: dict[Path, MediaFile] = {}
    lines: list[MediaLine] = []
    problems: list[str] = []
    for place, line in read_placed_lines(path, _line_of(modality), chat.special):
        try:
            names = line.paths if line.speech is None else (*line.paths, line.speech)
            files = [_inside(path.parent, name, place) for name in names]
            for file in files:
                if file not in read:
                    read[file] = modality.processor.read(file, place)
            media = tuple(read[file]._replace(place=place) for file in files)
            lines.append(MediaLine(place, line, media[: len(line.paths)], media[-1] if line.speech else None))
        except InvalidInput as error:
            problems.append(str(error))
            if len(problems) == MOST_PROBLEMS:
                break
    raise_problems(problems)
    return lines


def _inside(folder: Path, name: str, place: str) -> Path:
    """Returns the path of a file.

    Raises:
        InvalidInput: it is not in the folder, or a link leads out of it.
    """
    file = (folder / name).resolve() if "\0" not in name else folder
    if not file.is_relative_to(folder.resolve()) or Path(name).is_absolute():
        raise InvalidInput(f"{name!r} is not in the folder of the file that names it", where=place)
    return file
