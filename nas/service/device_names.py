"""What people call devices: by id, by the beginning of one, or by a tag that one device has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from nas.core.errors import InvalidInput, UnknownName
from nas.devices.attachments import Attachment
from nas.store import devices
from nas.store.rows import Health
from nas.store.store import Store

LOCAL = "local"
"""This machine."""

TAG = "tag:"


def known_devices(store: Store, attached: Iterable[Attachment]) -> dict[str, tuple[str, ...]]:
    """Id -> tags of every device that was registered, and of those attached to this host; no tags of removed ones."""
    registered = {row.id: row.device.tags if row.health is not Health.RETIRED else () for row in devices.all(store)}
    return registered | {each.id: each.tags for each in attached if each.id is not None}


def find_name(name: str, known: Mapping[str, Collection[str]], *, where: str | None = None) -> str:
    """The id of the one device that is meant.

    Args:
        name: an id, a prefix that only one id has, or `tag:NAME` where only one device has the tag.
        known: id -> tags.
        where: what carried the name, for messages.

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
            raise UnknownName("tag of a device", tag, {each for tags in known.values() for each in tags}, where=where)
    else:
        meant = [id for id in known if name and id.startswith(name)]
        if not meant:
            raise UnknownName("device", name, [LOCAL, *known], where=where)
    if len(meant) > 1:
        raise InvalidInput(f"device {name!r} may be any of {', '.join(sorted(meant))}: name one of them", where=where)
    return meant[0]
