"""The families below `$NAS_HOME/families`, as the command line and the dashboard show them.

Names come from flags and addresses, so each is checked before it becomes part of a path.
"""

from __future__ import annotations

import re
from pathlib import Path

from nas.core import paths
from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import (
    FAMILY,
    FILES,
    TRAINING,
    Comparison,
    Family,
    Member,
    MemberFiles,
    MemberTraining,
    Record,
    read_record,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class MemberView(Record):
    """A member with what was done to it since the build."""

    member: Member
    files: MemberFiles | None = None
    training: MemberTraining | None = None


class FamilyView(Record):
    """A family with everything that is on record about it."""

    family: Family
    folder: str
    members: tuple[MemberView, ...]
    comparisons: tuple[Comparison, ...]


def families_folder() -> Path:
    """Where families are kept."""
    return paths.home() / "families"


def family_folder(name: str) -> Path:
    """Where the family called `name` is kept, or would be.

    Raises:
        InvalidInput: that can be no family's name.
    """
    return families_folder() / checked_name(name, "a family's name")


def member_folder(family: str, size: str) -> Path:
    """Where a member's files are kept, or would be.

    Raises:
        InvalidInput: the family or the size can be no folder's name.
    """
    return family_folder(family) / checked_name(size, "a size")


def checked_name(name: str, what: str) -> str:
    """`name`, if a folder may be called so.

    Raises:
        InvalidInput: it may not.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} has up to 64 letters, digits, '.', '_' and '-', and begins with a letter or a digit, not {name!r}"
        )
    return name


def list_families() -> list[Family]:
    """All families, by name.

    Raises:
        InvalidInput: a record is damaged; the message names the file.
    """
    found = (read_record(path, Family) for path in sorted(families_folder().glob(f"*/{FAMILY}")))
    return [family for family in found if family is not None]


def read_family(name: str) -> Family:
    """What the build of `name` decided.

    Raises:
        UnknownName: there is no such family.
        InvalidInput: that can be no family's name, or its record is damaged.
    """
    family = read_record(family_folder(name) / FAMILY, Family)
    if family is None:
        raise UnknownName("family", name, [each.parent.name for each in families_folder().glob(f"*/{FAMILY}")])
    return family


def family_view(name: str) -> FamilyView:
    """Everything on record about the family called `name`.

    Raises:
        UnknownName: there is no such family.
        InvalidInput: that can be no family's name, or a record is damaged.
    """
    family = read_family(name)
    folder = family_folder(name)
    compared = (read_record(path, Comparison) for path in sorted(folder.glob("comparison-*.json")))
    return FamilyView(
        family=family,
        folder=str(folder),
        members=tuple(_member_view(name, member) for member in family.members),
        comparisons=tuple(each for each in compared if each is not None),
    )


def _member_view(family: str, member: Member) -> MemberView:
    folder = member_folder(family, member.size)
    return MemberView(
        member=member,
        files=read_record(folder / FILES, MemberFiles),
        training=read_record(folder / TRAINING, MemberTraining),
    )
