r"""Conversations with images: JSON lines, images as files beside them.

    {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What is this?"}, ...]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", ...}]}, ...]}
    {"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nWhat is this?"}, ...]}    LLaVA
    {"image": "a.png", "question": "What is this?", "answer": "A cat"}
    {"file_name": "a.png", "text": "A cat"}                     metadata.jsonl of the folders of `datasets`

Each `<image>` of the user's messages stands for one image, in their order; where there is none, images are in front of
the first message. Paths are relative to the file's folder and stay inside of it. Images are read once before anything
is trained, and again in each step. What cannot be used is refused, named by file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field

from nas.core.errors import InvalidInput
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_placed_lines
from nas.train.posttrain.formats import converted
from nas.train.release.tokenizer import SPECIAL
from nas.train.towers.images import IMAGE, Cut, FrameSettings, Picture, read_picture, with_images

METADATA = "metadata.jsonl"
"""File of a folder of `datasets` that names its images."""

_MOST_PROBLEMS = 20


class ImageConversation(Conversation):
    """A conversation about images; there is one at least."""

    images: tuple[str, ...] = Field((), max_length=64, description="paths, one for each `<image>`")

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        images = [_path(image) for image in _listed(record)]
        record = {name: value for name, value in record.items() if name not in ("image", "images", "file_name")}
        for caption, question in (("answer", "question"), ("text", "")):
            if not {"messages", "conversations"} & record.keys() and caption in record and images:
                user = {"role": "user", "content": str(record.get(question) or IMAGE)}
                record = {"messages": [user, {"role": "assistant", "content": record[caption]}]}
        if isinstance(messages := record.get("messages"), list):
            record["messages"] = [_with_markers(message, images) for message in messages]
        record = converted(record)
        return cls.model_validate(record | {"images": images, "messages": _marked(record["messages"], len(images))})

    def problem(self, special: Sequence[str] = SPECIAL) -> str | None:
        if not self.images:
            return "has no image: conversations without are for --text"
        marks = sum(message.said.count(IMAGE) for message in self.messages if message.role == "user")
        if marks != len(self.images) or any(
            IMAGE in message.said for message in self.messages if message.role != "user"
        ):
            return f"{len(self.images)} images, but {marks} {IMAGE} in the user's messages, where alone they may be"
        return super().problem([token for token in special if token != IMAGE])

    def expanded(self, cuts: list[Cut]) -> Conversation:
        """Returns the conversation with the tokens of its images."""
        messages, done = [], 0
        for message in self.messages:
            count = message.said.count(IMAGE)
            text = with_images(message.said, cuts[done : done + count]) if count else message.content
            messages.append(message.model_copy(update={"content": text}))
            done += count
        return Conversation(messages=tuple(messages), tools=self.tools)


def _listed(record: dict[str, Any]) -> list[Any]:
    images = record.get("images", record.get("image", record.get("file_name")))
    return images if isinstance(images, list) else [] if images is None else [images]


def _path(image: Any) -> str:
    path = image.get("path") if isinstance(image, dict) else image
    if not isinstance(path, str) or not path:
        raise ValueError("an image is no path of a file")
    return path


def _with_markers(message: Any, images: list[str]) -> Any:
    """Returns a message whose parts that are images are `<image>`; `images` takes those that name a file."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    text = ""
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") == "image":
            images += [_path(part[name]) for name in ("image", "path", "url") if name in part][:1]
            text += IMAGE
        elif isinstance(part, dict) and part.get("type") == "text":
            text += str(part.get("text", ""))
        else:
            raise ValueError("content has a part that is neither text nor an image")
    return message | {"content": text}


def _marked(messages: Any, images: int) -> Any:
    """Returns messages with `<image>` in front of the user's first one, for images that nothing stands for."""
    users = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    if images and users and not any(IMAGE in str(message.get("content")) for message in users):
        users[0]["content"] = IMAGE * images + str(users[0].get("content") or "")
    return messages


class PicturedConversation(NamedTuple):
    """A conversation that was checked, with its images.

    Args:
        place: file and line.
        conversation: with `<image>` for each image.
        pictures: its images.
    """

    place: str
    conversation: ImageConversation
    pictures: tuple[Picture, ...]

    def expanded(self, settings: FrameSettings) -> Conversation:
        """Returns the conversation with the tokens of its images."""
        return self.conversation.expanded([picture.cut(settings) for picture in self.pictures])


def read_image_conversations(path: Path, chat: ChatTokenizer) -> list[PicturedConversation]:
    """Reads conversations about images and checks the images.

    Args:
        path: JSON lines, or a folder of `datasets` with its metadata.jsonl.
        chat: tokenizer with the tokens of images.

    Raises:
        InvalidInput: a file is missing, or one line for each of the first problems.
    """
    path = path / METADATA if path.is_dir() else path
    read: dict[Path, Picture] = {}
    lines: list[PicturedConversation] = []
    problems: list[str] = []
    for place, line in read_placed_lines(path, ImageConversation, chat.special):
        try:
            files = [_inside(path.parent, name, place) for name in line.images]
            for file in files:
                if file not in read:
                    read[file] = read_picture(file, place)
            lines.append(PicturedConversation(place, line, tuple(read[file]._replace(place=place) for file in files)))
        except InvalidInput as error:
            problems.append(str(error))
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise InvalidInput("\n".join(problems))
    return lines


def _inside(folder: Path, name: str, place: str) -> Path:
    """Returns the file of an image.

    Raises:
        InvalidInput: it is not in the folder, or a link leads out of it.
    """
    file = (folder / name).resolve() if "\0" not in name else folder
    if not file.is_relative_to(folder.resolve()) or Path(name).is_absolute():
        raise InvalidInput(f"{name!r} is not in the folder of the file that names it", where=place)
    return file
