"""The member that a command names, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import Family, Member
from nas.family.file_ledger import files_of
from nas.service.families import member_folder, read_family


def find_member(family: str, size: str) -> tuple[Path, Family, Member]:
    """The folder of a member, its family and its record.

    Raises:
        UnknownName: no family of this name, or no such size in it.
        InvalidInput: its record is damaged.
    """
    record = read_family(family)
    members = {member.size: member for member in record.members}
    if size not in members:
        raise UnknownName(f"size of {family}", size, members, where="--size")
    return member_folder(family, size), record, members[size]


def tokenizer_of(member: Path) -> Path:
    """The tokenizer.json that was written for the member in folder `member`.

    Raises:
        InvalidInput: there is none yet.
    """
    files = files_of(member)
    for file in files.files if files else ():
        path = (member / file.path).resolve()
        if file.kind == "tokenizer" and path.name == "tokenizer.json" and path.is_relative_to(member.resolve()):
            return path
    raise InvalidInput(f"{member.name} has no tokenizer yet: name a tokenizer.json", where="--tokenizer")
