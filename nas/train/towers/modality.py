"""What towers read, images or sound: the parts that differ between the two, behind one interface.

A `Modality` names them: how files become inputs (`Processor`), and the shape of encoder and connector (`Shape`). Data,
training, folders and chat know a modality by this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.core.strict import StrictKeys
from nas.model.nn.tower import Connector
from nas.train.towers.model import Tower

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def checked(kind: type[AnySettings], values: Mapping[str, Any], where: str) -> AnySettings:
    """Returns settings from values, of which those with other names are ignored.

    Raises:
        InvalidInput: they do not fit.
    """
    try:
        return kind.model_validate({name: values[name] for name in kind.model_fields.keys() & values.keys()})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(": ".join([*map(str, first["loc"][:1]), first["msg"]]), where=where) from error


def require_file(path: Path, place: str, most: int) -> None:
    """Checks that a file is there and has at most so many bytes; raises InvalidInput and OSError."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path.name}", where=place)
    if path.stat().st_size > most:
        raise InvalidInput(f"{path.name} is larger than {most >> 20} MB", where=place)


class MediaFile(NamedTuple):
    """An image or a sound that was read once.

    Args:
        path: of its file.
        place: for messages.
        sha256: of the file.
        size: height and width of an image in pixels; samples of a sound.
    """

    path: Path
    place: str
    sha256: str
    size: tuple[int, ...]


class Processor(StrictKeys, ABC):
    """How files become inputs of a tower."""

    @staticmethod
    @abstractmethod
    def size_of(path: Path, place: str) -> tuple[int, ...]:
        """Decodes a file and returns its size, see `MediaFile`.

        Raises:
            InvalidInput: it cannot be read.
        """

    @classmethod
    def read(cls, path: Path, place: str | None = None) -> MediaFile:
        """Reads a file, to find its size and its problems.

        Raises:
            InvalidInput: it cannot be read.
        """
        place = place or str(path)
        size = cls.size_of(path, place)
        return MediaFile(path, place, sha256_of(path), size)

    @classmethod
    @abstractmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Self:
        """Returns the settings in the content of processor_config.json, of ours or of others.

        Raises:
            InvalidInput: a value does not fit.
            Unsupported: files are processed in another way.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns the content of processor_config.json."""

    @abstractmethod
    def text(self, file: MediaFile) -> str:
        """Returns the tokens that stand for a file.

        Raises:
            InvalidInput: the file has a size that has none.
        """

    @abstractmethod
    def inputs(self, files: Sequence[MediaFile]) -> tuple[Tensor, ...]:
        """Reads files again and returns the tower's inputs of all, one after another.

        Raises:
            InvalidInput: a file has changed.
        """

    def samples(self, file: MediaFile, rate: int) -> Tensor:
        """Reads a sound again and returns its samples [T] at that rate.

        Raises:
            InvalidInput: the file has changed, or is an image.
        """
        raise InvalidInput("an image has no samples of sound", where=str(file.path))

    def seconds(self, file: MediaFile) -> float:
        """Returns how long a sound lasts; 0: it is an image."""
        return 0.0


class Shape(StrictKeys, ABC):
    """Shape of an encoder and its connector; names are those of transformers' configurations."""

    projector_hidden_size: int = Field(2048, ge=1, le=65536)
    projector_bias: bool = True
    projector_use_layernorm: bool = True

    apart: ClassVar[frozenset[str]] = frozenset({"projector_hidden_size", "projector_bias", "projector_use_layernorm"})
    """Fields that are not the encoder's."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the encoder's configuration that are the same for all."""
    encoder_type: ClassVar[str]
    """Of the encoder in transformers."""
    last: ClassVar[str]
    """A tensor that every encoder has, which tells the names of the others from what is in front of it."""

    def encoder(self) -> dict[str, Any]:
        """Returns the arguments of the encoder's configuration in transformers."""
        return self.model_dump(exclude=set(self.apart)) | dict(self.fixed)

    def connector(self) -> dict[str, Any]:
        """Returns the other fields."""
        return self.model_dump(include=set(self.apart))

    def connected(self, features: int, d_model: int) -> Connector:
        """Returns a connector from so many features to embeddings of a language model."""
        norm, bias = self.projector_use_layernorm, self.projector_bias
        return Connector(features, self.projector_hidden_size, d_model, norm=norm, bias=bias)

    @classmethod
    @abstractmethod
    def problem(cls, encoder: Mapping[str, Any]) -> str | None:
        """Returns why an encoder's configuration is not of this kind."""

    @abstractmethod
    def processor(self) -> dict[str, Any]:
        """Returns the settings of a processor that the shape determines."""

    @abstractmethod
    def tower(self, d_model: int, seed: int = 0) -> Tower:
        """Returns a tower with random weights for a language model of width `d_model`."""


@dataclass(frozen=True)
class Modality:
    """What a kind of towers reads.

    Args:
        name: `vision` or `audio`: of the command, of the record, and of the encoder in config.json and in tensors.
        kind: `image` or `audio`: of a file in data and in contents in parts, and of the marker.
        noun: of a file, in messages.
        keys: of lines of data that name files.
        tokens: special tokens; the first is the marker, which also stands for one embedding of the tower.
        own_type: of config.json, where no class of transformers holds the model.
        stock: type and class of transformers that hold it with a layout that they have; None: none does.
        shape: class of its shapes.
        processor: class of its processors.
    """

    name: str
    kind: str
    noun: str
    keys: tuple[str, ...]
    tokens: tuple[str, ...]
    own_type: str
    stock: tuple[str, str] | None
    shape: type[Shape]
    processor: type[Processor]

    @property
    def marker(self) -> str:
        """Stands for a file in the text of a message."""
        return self.tokens[0]

    @property
    def record(self) -> str:
        """File of a folder: what the model was trained of, and how."""
        return f"{self.name}.json"

    def expanded(self, text: str, tokens: Sequence[str]) -> str:
        """Returns a text with the tokens of files in place of markers, one for each."""
        first, *others = text.split(self.marker)
        return first + "".join(one + other for one, other in zip(tokens, others, strict=True))
