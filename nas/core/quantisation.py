"""Names of a file's quantisation that give parts of the model another one than the rest.

    q8_0+embedding:f16+ffn:q4_0+mixers.0-3.7:q4_0

The first name is that of all other tensors. A part is a role (`ROLES`), perhaps with layers: numbers and ranges joined
by dots, counted from 0, or a share of the depth: `ffn.1/3` are the feed-forwards of the first of three equal parts of
a model of any depth. Layers override shares, and shares the role. What the names mean is the runtime's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, UnknownName

ROLES = ("embedding", "mixers", "ffn")
"""Of tensors; the embedding's is that of the output, too."""
LAYERED = ("mixers", "ffn")
"""Roles of tensors that are in layers."""
Place = tuple[str, int | None]
"""Role, and number of a layer; None: all of them."""


@dataclass(frozen=True)
class Quantisation:
    """The quantisations of a file's parts.

    Args:
        others: of all that `parts` does not name.
        parts: place -> its own.
        shares: role, number of a share from 1, and number of shares -> that of its layers.

    Example:
        >>> mixed = Quantisation.parse("q8_0+ffn:q4_0+ffn.0-1:f16")
        >>> mixed.at("ffn", 1), mixed.at("ffn", 2), mixed.at("mixers", 2)
        ('f16', 'q4_0', 'q8_0')
    """

    others: str
    parts: Mapping[Place, str]
    shares: Mapping[tuple[str, int, int], str] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=1 << 12)
    def parse(name: str) -> Quantisation:
        """Reads a name.

        Raises:
            UnknownName: no such role.
            InvalidInput: a part cannot be read, or is named twice.
        """
        others, *texts = name.split("+")
        parts: dict[Place, str] = {}
        shares: dict[tuple[str, int, int], str] = {}
        for text in texts:
            place, _, kind = text.partition(":")
            role, *layers = place.split(".")
            if role not in ROLES:
                raise UnknownName("role of tensors", role, ROLES)
            if not kind:
                raise InvalidInput(f"{name}: {text!r} names no quantisation, as in {role}:q4_0")
            if layers and role not in LAYERED:
                raise InvalidInput(f"{name}: {role} is in no layer")
            numbers: list[int | None] = []
            for layer in layers:
                if "/" not in layer:
                    numbers += _range(layer, name)
                elif shares.setdefault((role, *_share(layer, name)), kind) != kind:
                    raise InvalidInput(f"{name}: {role}.{layer} is named twice")
            for number in numbers if layers else [None]:
                if (role, number) in parts:
                    raise InvalidInput(f"{name}: {role}{'' if number is None else f'.{number}'} is named twice")
                parts[role, number] = kind
        return Quantisation(others, parts, shares)

    @staticmethod
    def of(others: str, parts: Mapping[Place, str]) -> str:
        """Returns the shortest name of `parts` with all others; equal parts have one name.

        Args:
            others: the quantisation of all that is not named.
            parts: that of the embedding, and of all mixers and feed-forwards of a model by layer.
        """
        words = [others]
        if (embedding := parts.get(("embedding", None), others)) != others:
            words.append(f"embedding:{embedding}")
        for role in LAYERED:
            by_layer = {number: name for (at, number), name in sorted(parts.items(), key=_order) if at == role}
            if len(names := set(by_layer.values())) == 1:
                words += [f"{role}:{name}" for name in names - {others}]
                continue
            for name in dict.fromkeys(name for name in by_layer.values() if name != others):
                numbers = [number for number, one in by_layer.items() if one == name and number is not None]
                words.append(f"{role}.{'.'.join(_ranges(numbers))}:{name}")
        return "+".join(words)

    @property
    def names(self) -> frozenset[str]:
        """All quantisations that occur."""
        return frozenset((self.others, *self.parts.values(), *self.shares.values()))

    @property
    def depth(self) -> int:
        """Layers that a model needs to have; 0: no layer is named."""
        return 1 + max((number for _, number in self.parts if number is not None), default=-1)

    def at(self, role: str, layer: int | None = None, depth: int = 0) -> str:
        """Returns the quantisation of a role's tensors, of one layer of `depth` if they are in layers."""
        if (kind := self.parts.get((role, layer))) is not None:
            return kind
        if layer is not None:
            for (of, share, count), name in self.shares.items():
                if of == role and layer * count // depth == share - 1:
                    return name
        return self.parts.get((role, None), self.others)


def file_word(name: str) -> str:
    """Returns what names files of a quantisation: its first name, with a part of the hash of all where it has parts."""
    first, _, parts = name.partition("+")
    return f"{first}-{content_hash(name)[:8]}" if parts else first


_MOST = 1 << 10
"""Layers of a model at most."""


def _range(text: str, name: str) -> Iterator[int]:
    first, dash, last = text.partition("-")
    numbers = [first, last] if dash else [first]
    if not all(number.isascii() and number.isdigit() and len(number) <= 4 for number in numbers):
        raise InvalidInput(f"{name}: {text!r} is no layer or range of layers, as 3 or 0-3")
    low, high = int(numbers[0]), int(numbers[-1])
    if not low <= high < _MOST:
        raise InvalidInput(f"{name}: {text} is no range of at most {_MOST:,} layers")
    yield from range(low, high + 1)


def _share(text: str, name: str) -> tuple[int, int]:
    share, _, count = text.partition("/")
    if not all(number.isascii() and number.isdigit() and len(number) <= 2 for number in (share, count)):
        raise InvalidInput(f"{name}: {text!r} is no share of the depth, as 1/3")
    if not 1 <= int(share) <= int(count):
        raise InvalidInput(f"{name}: {text} is no share of the depth: they are counted from 1")
    return int(share), int(count)


def _order(item: tuple[Place, str]) -> int:
    return -1 if (number := item[0][1]) is None else number


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
