"""Registries of extensions: names -> objects, resolved on first use.

A target is an object or a lazy `"module:attribute"` string, so that listing block kinds imports no torch. Other
distributions add names through entry points of the same group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from nas.core.errors import InvalidInput, PluginConflict, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A lazily resolved table of one kind of extension.

    Args:
        what: the noun for error messages ("block kind").
        group: entry-point group that third parties add to ("nas.blocks").
        builtin: name -> object or "module:attribute".
        mark: what must differ between extensions besides their names, in words for error messages.
        of: class whose instances they are, where others are refused.

    Example:
        >>> SHAPES: Registry[type] = Registry("shape", "my.shapes", {"path": "pathlib:PurePath"})
        >>> SHAPES["path"].__name__  # imports pathlib
        'PurePath'
        >>> SHAPES.add("text", str)
        >>> list(SHAPES)  # built in, added, and entry points of the group "my.shapes"
        ['path', 'text']
    """

    def __init__(
        self,
        what: str,
        group: str,
        builtin: Mapping[str, T | str],
        mark: Callable[[T], str] | None = None,
        of: type[Any] | None = None,
    ) -> None:
        self._what = what
        self.group = group
        self._mark = mark
        self._of = of
        self._builtin = frozenset(builtin)
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
            InvalidInput: a plug-in's entry point cannot be loaded, or names something else than an extension.
            PluginConflict: see `__iter__`.
        """
        if name not in self._targets:
            self._read_plugins()
        if name not in self._targets:
            raise UnknownName(self._what, name, self._targets)
        target = self._targets[name]
        if isinstance(target, str):
            target = self._resolve(name, target)
            self._targets[name] = target
        return target

    def __contains__(self, name: object) -> bool:
        if name not in self._targets:
            self._read_plugins()
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        """Iterates over all names; raises `InvalidInput` or `PluginConflict` for a plug-in that cannot be added."""
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
        version = getattr(self[name], "version", None)
        return self._distributions.get(name) if version is None else str(version)

    def _resolve(self, name: str, target: str) -> T:
        module, _, attribute = target.partition(":")
        try:
            extension = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a plug-in's module may raise anything
            if name in self._builtin:
                raise
            problem = f'{name} = "{target}" cannot be loaded: {type(error).__name__}: {error}'
            raise InvalidInput(problem, where=f"entry point {self.group}") from error
        if self._of is not None and not isinstance(extension, self._of):
            what = f"the class {extension.__name__}" if isinstance(extension, type) else f"a {type(extension).__name__}"
            raise InvalidInput(
                f'{name} = "{target}" is {what}; name an instance of {self._of.__name__}',
                where=f"entry point {self.group}",
            )
        return cast(T, extension)

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in self._builtin or point.name in points:
                owner = _owner(points.get(point.name))
                raise PluginConflict(f"{_owner(point)} adds the {self._what} {point.name!r}, which {owner} has already")
            points[point.name] = point
        if points and self._mark is not None:
            marked = {self._mark(self[name]): name for name in self._builtin}
            for name, point in points.items():
                mark = self._mark(self._resolve(name, point.value))
                if mark in marked:
                    other = f"the {self._what} {marked[mark]!r} of {_owner(points.get(marked[mark]))}"
                    raise PluginConflict(f"{_owner(point)} adds the {self._what} {name!r} with the {mark} of {other}")
                marked[mark] = name
        for name, point in points.items():
            if name not in self._targets:
                self._targets[name] = point.value
                self._distributions[name] = "unknown" if point.dist is None else point.dist.version
        self._plugins_read = True  # last: another thread that sees it finds all names


def _owner(point: EntryPoint | None) -> str:
    """Returns the name of the distribution that has an entry point; None: hilnas itself."""
    if point is None:
        return "hilnas"
    return "a plug-in" if point.dist is None else f"the plug-in {point.dist.name} {point.dist.version}"
