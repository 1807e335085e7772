"""YAML with line numbers, safe for untrusted files, and values as such YAML.

The plain data of the YAML 1.2 core schema: no tags, no dates, no octal or base-60 numbers, and `yes`, `no`, `on`, `off`
are words. A repeated key is an error. Anchors, aliases and merge keys work, within a bound on the nodes they
expand to.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from nas.core.errors import InvalidInput

MAX_CHARACTERS = 1_000_000
MAX_NODES = 20_000
MAX_NESTING = 32

KeyPath = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: ten times faster."""
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?")


@dataclass
class Document:
    """The contents of a file, and the lines of its keys.

    Args:
        name: of the file, for messages.
        value: mappings, lists and scalars.
        lines: path of keys -> line, counted from 1.
    """

    name: str
    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Returns `file:line` of `path`, or of the nearest key above it that is in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


def read_yaml(text: str, name: str) -> Document:
    """Parses the document in `text`.

    Raises:
        InvalidInput: it is no YAML, is too large, or uses what the module's docstring rules out; with `file:line`.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"larger than {MAX_CHARACTERS:,} characters", where=name)
    try:
        _check_size(text, name)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidInput(f"not YAML: {error.problem or error.context}", where=f"{name}:{line}") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"not YAML: {' '.join(str(error).split())}", where=name) from None
    document = Document(name)
    if root is not None:
        document.value = _Builder(document).build(root, ())
    return document


def dump_yaml(value: Any, *, width: int = 110, flow: bool | None = False) -> str:
    """Returns a document that `read_yaml` reads as the same value.

    Args:
        value: mappings, lists and scalars.
        width: of lines, in characters.
        flow: whether collections are in brackets; None: those of scalars alone are.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=width, allow_unicode=True, default_flow_style=flow)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, after `|`."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML leaves out the quotes of some texts that are numbers to YAML 1.2, such as 1e3 and 08.
    style = "|" if "\n" in text else "'" if _FLOAT.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _check_size(text: str, name: str) -> None:
    """Bounds nodes and nesting before anything recurses over them."""
    nesting = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        where = f"{name}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.CollectionStartEvent):
            nesting += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            nesting -= 1
        if nesting > MAX_NESTING:
            raise InvalidInput(f"nested deeper than {MAX_NESTING}", where=where)
        if count > 2 * MAX_NODES:
            raise InvalidInput(f"more than {MAX_NODES:,} values", where=where)


class _Builder:
    """Turns nodes into values, and counts them, so that aliases cannot expand a small file into a large value."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._built = 0
        self._open: list[yaml.Node] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._built += 1
        if node.tag not in _TAGS:
            raise self._error(node, f"tags such as {node.tag!r} are not read")
        if self._built > MAX_NODES:
            raise self._error(node, f"aliases expand to more than {MAX_NODES:,} values")
        if node in self._open:
            raise self._error(node, "an alias inside its own anchor")
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        self._open.append(node)
        try:
            return self._value(node, path)
        finally:
            self._open.pop()

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        assert isinstance(node, yaml.ScalarNode), "the third kind of node"
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.value == "<<" and not key_node.style:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self._key(key_node)
            if key in values:
                first = self._document.lines[(*path, key)]
                raise self._error(key_node, f"key {key!r} occurs twice, first in line {first}")
            self._document.lines.setdefault((*path, key), key_node.start_mark.line + 1)
            values[key] = self.build(value_node, (*path, key))
        for other in merged:
            if not isinstance(other, yaml.MappingNode):
                raise self._error(other, "<< merges mappings only")
            for key, value in self.build(other, path).items():
                values.setdefault(key, value)
        return values

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "a key must be a plain word")
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode) -> str | int | float | bool | None:
        text = str(node.value)
        if node.style in ("'", '"', "|", ">"):
            return text
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INT.fullmatch(text) and len(text) < _MAX_DIGITS:
            return int(text)
        if not _FLOAT.fullmatch(text):
            return text
        if math.isinf(number := float(text)):
            raise self._error(node, f"{text[:_MAX_DIGITS]} is too large for a number")
        return number

    def _error(self, node: yaml.Node, message: str) -> InvalidInput:
        return InvalidInput(message, where=f"{self._document.name}:{node.start_mark.line + 1}")


_MAX_DIGITS = 20
_NAMES = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in _NAMES)
"""Tags that PyYAML gives to nodes without one; scalars are parsed by the rules above instead."""
