"""What people call devices: by id, by the beginning of one, or by a tag that one device has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nas.core.errors import InvalidInput, UnknownName

LOCAL = "local"
"""This machine."""

TAG = "tag:"


def find_name(name: str, known: Mapping[str, Collection[str]]) -> str:
    """The id of the one device that is meant.

    Args:
        name: an id, a prefix that only one id has, or `tag:NAME` where only one device has the tag.
        known: id -> tags.

    Raises:
        UnknownName: no device is meant.
        InvalidInput: several are.
    """
    if name in known:
        return name
    if name.startswith(TAG):
        tag = name.removeprefix(TAG)
        meant = [id for id, tags in known.items() if tag in tags]
        if not meant:
            raise UnknownName("tag of a device", tag, {each for tags in known.values() for each in tags})
    else:
        meant = [id for id in known if name and id.startswith(name)]
        if not meant:
            raise UnknownName("device", name, [LOCAL, *known])
    if len(meant) > 1:
        raise InvalidInput(f"device {name!r} may be any of {', '.join(sorted(meant))}: name one of them")
    return meant[0]
