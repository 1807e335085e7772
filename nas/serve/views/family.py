"""View models of model families: the list, one family with its members and comparisons, and members' files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import (
    BENCHMARKS,
    EVALUATION,
    FAMILY,
    FILES,
    TRAINING,
    ComparedModel,
    Comparison,
    Family,
    FamilyRecord,
    MeasuredModel,
    Member,
    MemberEvaluation,
    MemberFile,
    MemberFiles,
    MemberTraining,
    Ratio,
    RecordedFigure,
    families_folder,
    family_folder,
    member_folder,
    read_family,
    read_record,
)
from nas.core.layout import Layout
from nas.core.metrics import METRICS, recorded
from nas.infra.web.errors import Conflict
from nas.serve.api.types import shared
from nas.serve.views.base import View
from nas.serve.views.layout import LayerView, layout_view

_CONTEXT = 4096
"""Context of the layers' own figures, in tokens."""


class MemberView(FamilyRecord):
    """A member with its files and training."""

    member: Member
    files: MemberFiles | None = None
    training: MemberTraining | None = None
    evaluation: MemberEvaluation | None = None
    benchmarks: MemberEvaluation | None = None


class FamilyView(FamilyRecord):
    """A family with the records of its members and comparisons."""

    family: Family
    folder: str
    members: tuple[MemberView, ...]
    comparisons: tuple[Comparison, ...]


class FamilyLine(View):
    """A family in the list."""

    name: str
    study: str | None = Field(None, description="study whose front it was built from")
    date: str = Field("", serialization_alias="made")
    pattern: str = ""
    sizes: list[str] = Field([])
    trained: list[str] = Field([], description="sizes with trained weights")
    compared: list[str] = Field([], description="devices on which members and reference models were compared")
    problem: str | None = Field(None, description="why only its name is known")


class FamiliesView(View):
    """All families."""

    families: list[FamilyLine]


class FigureKind(View):
    """A column of figures: a metric at a context."""

    metric: str
    prompt: int
    label: str
    unit: str

    @property
    def heading(self) -> str:
        """The label with the unit, such as 'decode at 512 tokens [ms]'."""
        return f"{self.label} [{self.unit}]"


class MeasuredView(View):
    """A model's figures on one device and runtime; one for each kind, null if it was not measured."""

    measured: MeasuredModel
    figures: list[RecordedFigure | None]


class ModelView(View):
    """A model of a comparison."""

    model: ComparedModel
    figures: list[RecordedFigure | None] = Field(description="one for each of the comparison's kinds")


class ComparisonView(View):
    """Members and reference models on one device, smallest first."""

    device: str
    date: str = Field(serialization_alias="made")
    conditions: dict[str, str]
    notes: list[str]
    kinds: list[FigureKind]
    models: list[ModelView]
    ratios: list[Ratio]
    reported: list[str] = Field(description="the report's devices with a number in some ratio")


class MemberPage(MemberView):
    """A member with its layers and figures."""

    layers: tuple[LayerView, ...]
    kinds: list[FigureKind] = Field(description="of `places`")
    places: list[MeasuredView]


class FamilyPage(View):
    """A family, its members smallest first."""

    family: Family
    members: list[MemberPage]
    comparisons: list[ComparisonView]


def list_families() -> list[Family]:
    """Returns all families, by name; raises InvalidInput with the file's name for a damaged record."""
    families = (read_record(path, Family) for path in sorted(families_folder().glob(f"*/{FAMILY}")))
    return [family for family in families if family is not None]


def family_view(name: str) -> FamilyView:
    """Reads a family with its members' files and trainings, and its comparisons.

    Raises:
        UnknownName: there is no such family.
        InvalidInput: the name is not valid, or a record is damaged.
    """
    # A folder that was copied or renamed has a record with the earlier name.
    family = read_family(name).model_copy(update={"name": name})
    folder = family_folder(name)
    compared = (read_record(path, Comparison) for path in sorted(folder.glob("comparison-*.json")))
    return FamilyView(
        family=family,
        folder=str(folder),
        members=tuple(_member_view(name, member) for member in family.members),
        comparisons=tuple(comparison for comparison in compared if comparison is not None),
    )


def families_view() -> FamiliesView:
    """Returns all families, by name; with the reason instead of the content for a damaged record."""
    names = sorted(path.parent.name for path in families_folder().glob(f"*/{FAMILY}"))
    return FamiliesView(families=[_line(name) for name in names])


def family_page(name: str) -> FamilyPage:
    """Returns one family.

    Raises:
        UnknownName: there is no such family.
        InvalidInput: the name is not valid, or a record is damaged.
    """
    view = family_view(name)
    return FamilyPage(
        family=view.family,
        members=[_member(member) for member in sorted(view.members, key=lambda member: member.member.parameters)],
        comparisons=[
            ComparisonView(
                device=comparison.device,
                date=comparison.made,
                conditions=comparison.conditions,
                notes=list(comparison.notes),
                kinds=(kinds := _kinds([model.measured for model in comparison.models])),
                models=[
                    ModelView(model=model, figures=_figures(model.measured, kinds))
                    for model in sorted(comparison.models, key=lambda model: model.parameters)
                ],
                ratios=list(comparison.ratios),
                reported=list(dict.fromkeys(device for ratio in comparison.ratios for device in ratio.report)),
            )
            for comparison in view.comparisons
        ],
    )


def kind_of(metric: str, prompt: int) -> FigureKind:
    """Returns the column of a metric at a context."""
    row = METRICS[metric]
    return FigureKind(metric=metric, prompt=prompt, label=f"{row.label} at {prompt:,} tokens", unit=row.unit)


def member_file(family: str, size: str, path: str) -> tuple[Path, MemberFile]:
    """Returns the path of a file that the member's record lists, and its entry.

    Raises:
        UnknownName: there is no such family, size or file; other files in the folder do not count.
        InvalidInput: a name is not valid, or a record is damaged.
        Conflict: the file is gone, or no longer as recorded.
    """
    sizes = [member.size for member in read_family(family).members]
    if size not in sizes:
        raise UnknownName(f"size of family {family!r}", size[:64], sizes)
    folder = member_folder(family, size)
    record = read_record(folder / FILES, MemberFiles)
    listed = {file.path: file for file in record.files} if record else {}
    if path not in listed:
        raise UnknownName(f"file of {family} {size}", path[:128], listed)
    target = (folder / path).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise InvalidInput(f"the record of {family} {size} names a file outside of its folder")
    if not target.is_file() or target.stat().st_size != listed[path].size:
        raise Conflict(f"{path} of {family} {size} has changed since it was written; build its files again")
    return target, listed[path]


def _member_view(family: str, member: Member) -> MemberView:
    folder = member_folder(family, member.size)
    return MemberView(
        member=member,
        files=read_record(folder / FILES, MemberFiles),
        training=read_record(folder / TRAINING, MemberTraining),
        evaluation=read_record(folder / EVALUATION, MemberEvaluation),
        benchmarks=read_record(folder / BENCHMARKS, MemberEvaluation),
    )


def _line(name: str) -> FamilyLine:
    try:
        view = family_view(name)
    except InvalidInput as error:
        return FamilyLine(name=name, problem=str(error))
    return FamilyLine(
        name=view.family.name,
        study=view.family.study,
        date=view.family.made,
        pattern=view.family.pattern,
        sizes=[member.member.size for member in view.members],
        trained=[member.member.size for member in view.members if member.training],
        compared=[comparison.device for comparison in view.comparisons],
    )


def _member(view: MemberView) -> MemberPage:
    kinds = _kinds(view.member.measured)
    return MemberPage(
        **shared(MemberPage, view),
        layers=layout_view(Layout.parse(view.member.layout), _CONTEXT).layers,
        kinds=kinds,
        places=[
            MeasuredView(measured=measured, figures=_figures(measured, kinds)) for measured in view.member.measured
        ],
    )


def _kinds(measured: list[MeasuredModel] | tuple[MeasuredModel, ...]) -> list[FigureKind]:
    order = [metric.name for metric in recorded()]
    columns = {(figure.metric, figure.prompt) for one in measured for figure in one.figures}
    return [kind_of(*column) for column in sorted(columns, key=lambda column: (order.index(column[0]), column[1]))]


def _figures(measured: MeasuredModel, kinds: list[FigureKind]) -> list[RecordedFigure | None]:
    by_kind = {(figure.metric, figure.prompt): figure for figure in measured.figures}
    return [by_kind.get((kind.metric, kind.prompt)) for kind in kinds]
