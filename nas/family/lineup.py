"""Who takes part in a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InvalidInput
from nas.core.family import FILES, Member, MemberFiles, read_record
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.family.contender import Contender, of_layout, of_reference
from nas.family.references import REFERENCES, find_reference
from nas.family.size_classes import SIZE_CLASSES, known_class, size_class
from nas.runtimes.base import Runtime
from nas.runtimes.llama_cpp.stock_model import QUANTISATION
from nas.service.families import member_folder, read_family


@dataclass(frozen=True)
class Asked:
    """What a comparison was asked for.

    Args:
        family: name of a built family.
        references: names of reference models; none: those of the others' size classes.
        layouts: one-line strings or published names.
        classes: size classes: their reference models, and only their members.
        alone: no reference models but those that are named.
    """

    family: str | None = None
    references: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    alone: bool = False


def line_up(asked: Asked, runtime: Runtime, device: str) -> list[Contender]:
    """Members, then layouts, then reference models: those that are named, else those of the others' size classes.

    Raises:
        UnknownName: no such family, class or reference model.
        Unsupported: a layout that the runtime does not carry, or a reference model that nothing here does.
        InvalidInput: nothing was asked for, or a layout that cannot be read.
    """
    classes = [known_class(name) for name in asked.classes]
    own = [
        each
        for each in (*_members(asked.family, runtime, device), *_layouts(asked.layouts, runtime))
        if not classes or not each.member or size_class(each.parameters) in classes
    ]
    references = [of_reference(find_reference(name)) for name in asked.references]
    if not references and not asked.alone:
        references = _of_classes(classes or [size_class(each.parameters) for each in own])
    if not own and not references:
        raise InvalidInput(
            f"nothing to compare: name a --family, a --layout, a --reference ({', '.join(REFERENCES)}) or a --class "
            f"({', '.join(SIZE_CLASSES)})"
        )
    return list(_each_once((*own, *references)))


def _of_classes(classes: Sequence[str]) -> list[Contender]:
    return [of_reference(each) for each in REFERENCES.values() if size_class(each.parameters) in classes]


def _each_once(contenders: Iterable[Contender]) -> Iterator[Contender]:
    seen: set[str] = set()
    for contender in contenders:
        if contender.name not in seen:
            seen.add(contender.name)
            yield contender


def _layouts(texts: Sequence[str], runtime: Runtime) -> Iterator[Contender]:
    for text in texts:
        if text in LFM2:
            yield of_reference(REFERENCES[text])
        else:
            layout = Layout.parse(text)
            yield of_layout(f"layout {layout.id[:12]}", layout, runtime)


def _members(family: str | None, runtime: Runtime, device: str) -> Iterator[Contender]:
    if family is None:
        return
    for member in read_family(family).members:
        yield _member(family, member_folder(family, member.size), member, runtime, device)


def _member(family: str, folder: Path, member: Member, runtime: Runtime, device: str) -> Contender:
    """With its own file, which may hold trained weights, where it has one."""
    contender = of_layout(f"{family}-{member.size}", Layout.parse(member.layout), runtime)
    files = read_record(folder / FILES, MemberFiles)
    written = [
        folder / each.path
        for each in (files.files if files else ())
        if each.kind == "gguf" and each.quantisation.casefold() == QUANTISATION
    ]
    return Contender(
        contender.name, contender.parameters, contender.active, contender.architecture,
        next((path for path in written if path.is_file()), contender.subject),
        member=True, patched=contender.patched,
        searched=any(each.searched for each in member.measured if each.device == device),
    )  # fmt: skip
