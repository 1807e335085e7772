"""What a build has written for its members. torch is loaded when the first is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nas.core.family import Family, Member, MemberFiles
from nas.core.layout import Layout
from nas.family.file_options import FileOptions
from nas.runtimes.base import RandomWeights


@dataclass(frozen=True)
class MemberFilesWriter:
    """Writes members' files with random weights.

    Args:
        options: for all members; name, measured table and provenance are each member's own.
    """

    options: FileOptions

    def check(self, layout: Layout) -> None:
        """Refuses a vocabulary that the tokenizer is not for, before hours of measuring.

        Raises:
            InvalidInput: saying what does not match.
        """
        from nas.family.tokenizer import read_tokenizer, require_fit

        if self.options.tokenizer is not None:
            require_fit(read_tokenizer(self.options.tokenizer), layout, str(self.options.tokenizer))

    def write(self, folder: Path, family: Family, member: Member, log: Callable[[str], None]) -> MemberFiles | None:
        """Writes what of a member's files is not there yet, unless it was trained; see `write_random_files`."""
        from nas.family.files import write_random_files

        source = {"family": family.name, "study": family.study or "given layouts", "seed": str(family.seed)}
        options = replace(
            self.options,
            name=f"{family.name}-{member.size}",
            measured=member.measured,
            budgets={each.what: f"{each.value}: {each.reason}" for each in member.decisions if each.what == "weights"},
            provenance={**source, **family.provenance},
        )
        return write_random_files(folder, Layout.parse(member.layout), RandomWeights(family.seed), options, log)
