"""The pictures of a family's page, from its view-model."""

from __future__ import annotations

from markupsafe import Markup

from nas.core.family import MemberTraining
from nas.dashboard.pictures.curves import Curve, training_curves
from nas.dashboard.pictures.sizes import Model, sizes_picture
from nas.dashboard.pictures.strip import layout_strip
from nas.service.family_pages import ComparisonView, FigureKind, MemberPage

DRAWN = ("decode_tps", "prefill_tps")


def strip(view: MemberPage) -> Markup:
    """A member's layout."""
    return layout_strip(view.layers, f"{view.member.size}: {view.member.layout}")


def curve(size: str, training: MemberTraining) -> Markup:
    """A member's training."""
    points = [(float(step), loss) for step, loss in training.curve]
    return training_curves([Curve("training loss", size, points)], f"training of {size}")


def speeds(view: ComparisonView) -> list[Markup]:
    """Tokens per second over parameters, a picture for each kind of speed."""
    return [_speed(view, kind, place) for place, kind in enumerate(view.kinds) if kind.metric in DRAWN]


def _speed(view: ComparisonView, kind: FigureKind, place: int) -> Markup:
    models = []
    for each in view.models:
        figure = each.figures[place]
        if figure is not None and figure.value:
            low, high = figure.ci95 or (None, None)
            models.append(Model(each.model.name, each.model.parameters, figure.value, low, high, each.model.member))
    unit = f"{kind.label}, {kind.unit}"
    return sizes_picture(models, unit, f"{unit}, over parameters on {view.device}: {len(models)} models")
