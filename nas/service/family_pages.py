"""Families as pages show them, and the files of their members."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import (
    FAMILY,
    FILES,
    ComparedModel,
    Family,
    Figure,
    Measured,
    MemberFile,
    MemberFiles,
    Ratio,
    read_record,
)
from nas.core.layout import Layout
from nas.service.api_errors import Conflict
from nas.service.families import MemberView, families_folder, family_view, member_folder, read_family
from nas.service.layout_view import LayerView, layout_view

_CONTEXT = 4096
"""Tokens that layers' own figures are told for."""
_NAMES = {
    "decode_tps": ("decode at {}", "tok/s"),
    "prefill_tps": ("prefill at {}", "tok/s"),
    "ttft_ms": ("first token at {}", "ms"),
    "peak_rss_mb": ("memory at {}", "MB"),
}


class FamilyLine(BaseModel):
    """A family in the list."""

    name: str
    study: str | None = Field(None, description="whose front it was built from")
    made: str = ""
    pattern: str = ""
    sizes: list[str] = []
    trained: list[str] = Field([], description="sizes whose weights were trained")
    compared: list[str] = Field([], description="devices on which members and reference models were compared")
    problem: str | None = Field(None, description="why nothing but its name can be told")


class FamiliesView(BaseModel):
    """All families."""

    families: list[FamilyLine]


class FigureKind(BaseModel):
    """A column of figures: a metric at a context."""

    metric: str
    prompt: int
    label: str
    unit: str


class MeasuredView(BaseModel):
    """A model's figures on one device and runtime; one for each kind, null where it was not taken."""

    measured: Measured
    figures: list[Figure | None]


class ModelView(BaseModel):
    """A model of a comparison."""

    model: ComparedModel
    figures: list[Figure | None] = Field(description="one for each of the comparison's kinds")


class ComparisonView(BaseModel):
    """Members and reference models on one device, smallest first."""

    device: str
    made: str
    conditions: dict[str, str]
    notes: list[str]
    kinds: list[FigureKind]
    models: list[ModelView]
    ratios: list[Ratio]
    reported: list[str] = Field(description="the report's devices that some ratio has a number of")


class MemberPage(MemberView):
    """A member, with what is drawn of it."""

    layers: tuple[LayerView, ...]
    kinds: list[FigureKind] = Field(description="of `places`")
    places: list[MeasuredView]


class FamilyPage(BaseModel):
    """A family, its members smallest first."""

    family: Family
    members: list[MemberPage]
    comparisons: list[ComparisonView]


def families_view() -> FamiliesView:
    """All families, by name; of one with a damaged record that, and why."""
    names = sorted(path.parent.name for path in families_folder().glob(f"*/{FAMILY}"))
    return FamiliesView(families=[_line(name) for name in names])


def family_page(name: str) -> FamilyPage:
    """One family.

    Raises:
        UnknownName: there is none of that name.
        InvalidInput: that can be no family's name, or a record is damaged.
    """
    view = family_view(name)
    return FamilyPage(
        family=view.family,
        members=[_member(each) for each in sorted(view.members, key=lambda each: each.member.parameters)],
        comparisons=[
            ComparisonView(
                device=each.device,
                made=each.made,
                conditions=each.conditions,
                notes=list(each.notes),
                kinds=(kinds := _kinds([model.measured for model in each.models])),
                models=[
                    ModelView(model=model, figures=_figures(model.measured, kinds))
                    for model in sorted(each.models, key=lambda model: model.parameters)
                ],
                ratios=list(each.ratios),
                reported=list(dict.fromkeys(device for ratio in each.ratios for device in ratio.report)),
            )
            for each in view.comparisons
        ],
    )


def kind_of(metric: str, prompt: int) -> FigureKind:
    """What figures of a metric at a context are called."""
    label, unit = _NAMES[metric]
    return FigureKind(metric=metric, prompt=prompt, label=label.format(f"{prompt:,} tokens"), unit=unit)


def member_file(family: str, size: str, path: str) -> tuple[Path, MemberFile]:
    """A file that the member's record lists: where it lies, and what the record says of it.

    Raises:
        UnknownName: there is no such family, size or file; what lies in the folder besides is no file of the member.
        InvalidInput: a name that can be none, or a damaged record.
        Conflict: the file is gone, or is not what the record says any more.
    """
    sizes = [member.size for member in read_family(family).members]
    if size not in sizes:
        raise UnknownName(f"size of family {family!r}", size[:64], sizes)
    folder = member_folder(family, size)
    record = read_record(folder / FILES, MemberFiles)
    listed = {each.path: each for each in record.files} if record else {}
    if path not in listed:
        raise UnknownName(f"file of {family} {size}", path[:128], listed)
    found = (folder / path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise InvalidInput(f"the record of {family} {size} names a file outside of its folder")
    if not found.is_file() or found.stat().st_size != listed[path].size:
        raise Conflict(f"{path} of {family} {size} is not what it was when it was written; build its files anew")
    return found, listed[path]


def _line(name: str) -> FamilyLine:
    try:
        view = family_view(name)
    except InvalidInput as error:
        return FamilyLine(name=name, problem=str(error))
    return FamilyLine(
        name=view.family.name,
        study=view.family.study,
        made=view.family.made,
        pattern=view.family.pattern,
        sizes=[each.member.size for each in view.members],
        trained=[each.member.size for each in view.members if each.training],
        compared=[each.device for each in view.comparisons],
    )


def _member(view: MemberView) -> MemberPage:
    kinds = _kinds(view.member.measured)
    return MemberPage(
        member=view.member,
        files=view.files,
        training=view.training,
        layers=layout_view(Layout.parse(view.member.layout), _CONTEXT).layers,
        kinds=kinds,
        places=[MeasuredView(measured=each, figures=_figures(each, kinds)) for each in view.member.measured],
    )


def _kinds(measured: list[Measured] | tuple[Measured, ...]) -> list[FigureKind]:
    order = [*_NAMES]
    found = {(each.metric, each.prompt) for one in measured for each in one.figures}
    return [kind_of(*each) for each in sorted(found, key=lambda each: (order.index(each[0]), each[1]))]


def _figures(measured: Measured, kinds: list[FigureKind]) -> list[Figure | None]:
    known: dict[tuple[str, int], Figure] = {(each.metric, each.prompt): each for each in measured.figures}
    return [known.get((kind.metric, kind.prompt)) for kind in kinds]
