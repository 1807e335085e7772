"""Registries of extensions: names -> objects, resolved on first use.

A target is an object or a lazy `"module:attribute"` string, so that listing block kinds imports no torch. Other
distributions add names through entry points of the same group.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from nas.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A lazily resolved table of one kind of extension.

    Args:
        what: the noun for error messages ("block kind").
        group: entry-point group that third parties add to ("nas.blocks").
        builtin: name -> object or "module:attribute".
    """

    def __init__(self, what: str, group: str, builtin: Mapping[str, T | str]) -> None:
        self._what = what
        self.group = group
        self._targets: dict[str, T | str] = dict(builtin)
        self._distributions: dict[str, str] = {}
        self._plugins_read = False

    def add(self, name: str, target: T | str) -> None:
        """Registers `target`; a second registration of a name replaces the first (tests rely on it)."""
        self._targets[name] = target

    def __getitem__(self, name: str) -> T:
        """Returns the object registered as `name`.

        Raises:
            UnknownName: it is not registered; the message suggests the nearest name.
        """
        if name not in self._targets:
            self._read_plugins()
        if name not in self._targets:
            raise UnknownName(self._what, name, self._targets)
        target = self._targets[name]
        if isinstance(target, str):
            target = cast(T, _resolve(target))
            self._targets[name] = target
        return target

    def __contains__(self, name: object) -> bool:
        if name not in self._targets:
            self._read_plugins()
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        self._read_plugins()
        return iter(tuple(self._targets))

    def values(self) -> list[T]:
        """Returns every registered object, resolved."""
        return [self[name] for name in self]

    def version(self, name: str) -> str | None:
        """Returns the version of an extension for the keys of results that depend on it.

        Its attribute `version`, or else the version of the distribution whose entry point added it. None for what
        hilnas has itself: constants such as `TRAINER_VERSION` stand for its code.
        """
        own = getattr(self[name], "version", None)
        return self._distributions.get(name) if own is None else str(own)

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        self._plugins_read = True
        for point in entry_points(group=self.group):
            if point.name not in self._targets:
                self._targets[point.name] = point.value
                self._distributions[point.name] = point.dist.version if point.dist is not None else "unknown"


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
