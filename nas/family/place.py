"""Where families lie, and the member that a command names."""

from __future__ import annotations

from pathlib import Path

from nas.core import paths
from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import FAMILY, FILES, Family, Member, MemberFiles, read_record


def families_folder() -> Path:
    """One folder per family."""
    return paths.home() / "families"


def find_member(family: str, size: str) -> tuple[Path, Family, Member]:
    """The folder of a member, its family and its record.

    Raises:
        UnknownName: no family of this name, or no such size in it.
        InvalidInput: its record is damaged.
    """
    known = {path.parent.name for path in families_folder().glob(f"*/{FAMILY}")}
    if family not in known:
        raise UnknownName("family", family, known)
    record = read_record(families_folder() / family / FAMILY, Family)
    assert record is not None, "its file was there"
    members = {member.size: member for member in record.members}
    if size not in members:
        raise UnknownName(f"size of {family}", size, members, where="--size")
    return families_folder() / family / size, record, members[size]


def tokenizer_of(member: Path) -> Path:
    """The tokenizer.json that was written for the member in folder `member`.

    Raises:
        InvalidInput: there is none yet.
    """
    files = read_record(member / FILES, MemberFiles)
    for file in files.files if files else ():
        path = member / file.path
        if (
            file.kind == "tokenizer"
            and path.name == "tokenizer.json"
            and path.resolve().is_relative_to(member.resolve())
        ):
            return path
    raise InvalidInput(f"{member.name} has no tokenizer yet: name a tokenizer.json", where="--tokenizer")
