"""Generated text in which it is known what can be recalled, and from how far: logs, tables, tool calls, languages.

Every document states `items` facts and asks for each of them `distance` bytes later, or as near to that as its lines
allow; `Document.recalls` says where, exactly. The languages are samples of probabilistic context-free grammars, each
with a script, a lexicon and an order of words of its own: text without anything to look up.

All randomness comes from `random.Random.random`, whose sequence Python keeps across releases, so that the text is the
same on every machine and Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeVar

DISTANCES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Bytes between a fact and its answer; each gets the same number of bytes of text unless given."""
ITEMS = (2, 8, 32, 128)
"""Facts of a document, drawn with equal chance unless given."""

T = TypeVar("T")


class Recall(NamedTuple):
    """An answer that the text before it determines: bytes `start` to `end`, `distance` bytes after where it stood."""

    start: int
    end: int
    distance: int


@dataclass(frozen=True)
class Document:
    """A generated text and its answers, in their order."""

    text: bytes
    recalls: tuple[Recall, ...] = ()


class Dice:
    """Draws of `random.Random.random` alone.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def below(self, limit: int) -> int:
        """Returns a whole number from 0 to `limit` - 1."""
        return int(self._random() * limit)

    def choice(self, values: Sequence[T]) -> T:
        """Returns one of `values`."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """Returns `values` in random order."""
        remaining = list(values)
        return [remaining.pop(self.below(len(remaining))) for _ in range(len(remaining))]


class _Line(NamedTuple):
    """A line with a value that is stated or asked for: text before the value, and after it."""

    before: str
    after: str


class _Form(NamedTuple):
    """A kind of document: how a fact is stated, how it is asked for, and what stands between.

    `state` and `ask` end in the same text before the value, so that the answer completes what was read before.
    """

    head: str
    state: Callable[[Dice, str], _Line]
    ask: Callable[[Dice, str], _Line]
    middle: Callable[[Dice], str]


def _key(dice: Dice) -> str:
    """Returns a word of three syllables that can be spoken, one of 216,000."""
    return "".join(dice.choice("bdfgklmnprstvz") + dice.choice("aeiou") for _ in range(3))


def _value(dice: Dice) -> str:
    return str(10_000 + dice.below(90_000))


def _time(dice: Dice) -> str:
    return f"{dice.below(24):02}:{dice.below(60):02}"


_VERBS = ("read", "sync", "scan", "flush", "rotate", "probe")
_COLOURS = ("amber", "black", "green", "ivory", "olive", "white")


def _log_noise(dice: Dice) -> str:
    if dice.below(2):
        return f"{_time(dice)} set {_key(dice)} = {_value(dice)}\n"
    return f"{_time(dice)} {dice.choice(_VERBS)} {_key(dice)} ok {dice.below(1000)} ms\n"


def _object(dice: Dice) -> str:
    return json.dumps({_key(dice): int(_value(dice)), "colour": dice.choice(_COLOURS)}) + "\n"


def _call(dice: Dice) -> str:
    called = {"tool": dice.choice(_VERBS), "arguments": {"name": _key(dice), "limit": dice.below(100)}}
    return f"assistant: {json.dumps(called)}\ntool: " + json.dumps({"result": {_key(dice): _value(dice)}}) + "\n"


FORMS: dict[str, _Form] = {
    "log": _Form(
        "",
        lambda dice, key: _Line(f"{_time(dice)} set {key} = ", "\n"),
        lambda dice, key: _Line(f"{_time(dice)} get {key} = ", "\n"),
        _log_noise,
    ),
    "table": _Form(
        "| name | stock | colour |\n| --- | --- | --- |\n",
        lambda dice, key: _Line(f"| {key} | ", f" | {dice.choice(_COLOURS)} |\n"),
        lambda dice, key: _Line(f"Stock of | {key} | ", "\n"),
        lambda dice: f"| {_key(dice)} | {_value(dice)} | {dice.choice(_COLOURS)} |\n",
    ),
    "json": _Form(
        "",
        lambda dice, key: _Line(f'{{"{key}": ', f', "colour": "{dice.choice(_COLOURS)}"}}\n'),
        lambda dice, key: _Line(f'{{"found": {{"{key}": ', "}}\n"),
        _object,
    ),
    "tools": _Form(
        "system: call a tool as JSON, with its arguments.\n",
        lambda dice, key: _Line(f'tool: {{"result": {{"{key}": "', '"}}\n'),
        lambda dice, key: _Line(f'assistant: {{"tool": "{dice.choice(_VERBS)}", "arguments": {{"{key}": "', '"}}\n'),
        _call,
    ),
}
"""Kinds of documents with answers."""


def recall_document(dice: Dice, form: str, items: int, distance: int) -> Document:
    """Returns a document of facts, other lines, and questions.

    Args:
        dice: of keys, values and other lines.
        form: one of `FORMS`.
        items: facts; fewer where they do not fit into `distance`, but at least one.
        distance: bytes from the first fact's value to its answer; exactly that, unless a question alone is longer.
            Other answers of the document differ from it by the lengths of the lines.
    """
    kind = FORMS[form]
    facts: dict[str, str] = {}
    parts, at = [kind.head], len(kind.head)
    values: dict[str, int] = {}
    while len(facts) < items and (not facts or at - next(iter(values.values())) < distance // 2):
        key = _key(dice)
        if key in facts:
            continue
        facts[key], line = _value(dice), kind.state(dice, key)
        values[key] = at + len(line.before)
        parts.append(line.before + facts[key] + line.after)
        at += len(parts[-1])
    lines = {key: kind.ask(dice, key) for key in facts}
    first = next(iter(facts))
    parts.append(_between(dice, kind, values[first] + distance - len(lines[first].before) - at))
    at += len(parts[-1])
    recalls = []
    for key, line in lines.items():
        start = at + len(line.before)
        recalls.append(Recall(start, start + len(facts[key]), start - values[key]))
        parts.append(line.before + facts[key] + line.after)
        at += len(parts[-1])
    return Document("".join(parts).encode("ascii"), tuple(recalls))


def _between(dice: Dice, kind: _Form, size: int) -> str:
    """Returns lines of `size` bytes, the last of them cut; none where `size` is not positive."""
    text = ""
    while len(text) < size:
        text += kind.middle(dice)
    return text[: size - 1] + "\n" if size > 0 else ""


def recall_text(seed: int, size: int, distances: Sequence[int] = DISTANCES) -> list[Document]:
    """Returns documents of all forms, of `size` bytes together or a few more.

    Args:
        seed: of all of them.
        size: bytes, with two between documents.
        distances: of the answers; each gets the same number of bytes.
    """
    dice, documents = Dice(seed), []
    written = dict.fromkeys(distances, 0)
    while sum(written.values()) < size:
        distance = min(distances, key=lambda distance: (written[distance], distance))
        document = recall_document(dice, dice.choice(tuple(FORMS)), dice.choice(ITEMS), distance)
        documents.append(document)
        written[distance] += len(document.text) + 2
    return [documents[place] for place in dice.shuffled(range(len(documents)))]


def joined(documents: Sequence[Document]) -> Document:
    """Returns one text of all documents, with an empty line between two of them."""
    recalls, at = [], 0
    for document in documents:
        recalls += [Recall(recall.start + at, recall.end + at, recall.distance) for recall in document.recalls]
        at += len(document.text) + 2
    return Document(b"\n\n".join(document.text for document in documents), tuple(recalls))


SCRIPTS: dict[str, tuple[str, str]] = {
    "latin": ("bdfgklmnprstvz", "aeiouáéíóú"),
    "greek": ("βγδθκλμνπρστφχ", "αεηιουω"),
    "cyrillic": ("бвгджзклмнпрстфх", "аеиоуыэя"),
    "armenian": ("բգդզթլխծկհձղճմյն", "աեիոու"),
    "georgian": ("ბგდვზთკლმნპრსტფქ", "აეიოუ"),
    "devanagari": ("कखगघचछजटडतथदधनपबमयरलवसह", "अआइईउऊएओ"),
}
"""Script -> consonants and vowels."""


class Language:
    """A probabilistic context-free grammar with a lexicon of its own.

    Sentences are subject, verb and perhaps object in the language's order. Nouns have one of three classes, with which
    their article and, across whatever stands between, the verb's ending agree; a noun can have an adjective, a place
    and a clause of its own, so that agreement spans nested clauses.

    Args:
        dice: of the lexicon and the order of words.
        script: one of `SCRIPTS`.
    """

    _CLASSES = 3
    _NESTED = 2

    def __init__(self, dice: Dice, script: str) -> None:
        self._consonants, self._vowels = SCRIPTS[script]
        self._dice = dice
        self._nouns = [self._words(60, 2) for _ in range(self._CLASSES)]
        self._verbs, self._adjectives, self._places = self._words(80, 2), self._words(60, 3), self._words(8, 1)
        self._articles, self._endings = self._words(self._CLASSES, 1), self._words(self._CLASSES, 1)
        self._which = self._words(1, 2)[0]
        self._order = dice.choice(("SVO", "SOV", "VSO"))
        self._adjective_first = dice.below(2) == 0

    def text(self, dice: Dice, size: int) -> str:
        """Returns sentences of at least `size` bytes, several in a line."""
        sentences: list[str] = []
        written = 0
        while written < size:
            sentences.append(" ".join(self._clause(dice, 0)) + (".\n" if dice.below(4) == 0 else ". "))
            written += len(sentences[-1].encode())
        return "".join(sentences).rstrip()

    def _words(self, count: int, syllables: int) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            length = syllables + self._dice.below(2)
            spoken = (self._dice.choice(self._consonants) + self._dice.choice(self._vowels) for _ in range(length))
            words["".join(spoken)] = None
        return list(words)

    @staticmethod
    def _common(dice: Dice, words: Sequence[str]) -> str:
        """Returns a word; early ones are more frequent, by the product of two draws."""
        return words[dice.below(1 + dice.below(len(words)))]

    def _clause(self, dice: Dice, depth: int, subject: int | None = None) -> list[str]:
        """Returns the words of a clause; with `subject`, of a class that stands before it, without a subject."""
        noun_class = dice.below(self._CLASSES) if subject is None else subject
        parts = {
            "S": [] if subject is not None else self._noun(dice, noun_class, depth),
            "V": [self._common(dice, self._verbs) + self._endings[noun_class]],
            "O": self._noun(dice, dice.below(self._CLASSES), depth + 1) if dice.below(3) else [],
        }
        return [word for part in self._order for word in parts[part]]

    def _noun(self, dice: Dice, noun_class: int, depth: int) -> list[str]:
        noun = [self._common(dice, self._nouns[noun_class])]
        if dice.below(3) == 0:
            adjective = [self._common(dice, self._adjectives)]
            noun = adjective + noun if self._adjective_first else noun + adjective
        words = [self._articles[noun_class], *noun]
        if depth < self._NESTED and dice.below(4) == 0:
            words += [dice.choice(self._places), *self._noun(dice, dice.below(self._CLASSES), depth + 1)]
        if depth < self._NESTED and dice.below(4) == 0:
            words += [self._which, *self._clause(dice, depth + 1, noun_class), ","]
        return words


def languages_text(seed: int, size: int) -> str:
    """Returns documents of 2,048 bytes or a few more, in a language for each script, of `size` bytes together."""
    dice = Dice(seed)
    spoken = [Language(dice, script) for script in SCRIPTS]
    texts: list[str] = []
    written = 0
    while written < size:
        texts.append(spoken[len(texts) % len(spoken)].text(dice, 2048))
        written += len(texts[-1].encode()) + 2
    return "\n\n".join(texts)
