"""The pictures of a study's page, from its view-model and the data of its first panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from nas.core.block import BLOCKS
from nas.dashboard.pictures.depth import depth_shares
from nas.dashboard.pictures.front import Mark, PanelAxis, front_picture
from nas.dashboard.pictures.plot import Limit
from nas.service.live_axes import AxisView
from nas.service.live_points import Bounds
from nas.service.live_structure import NONE, ShareView
from nas.service.study_cloud import PanelData
from nas.service.study_models import StudyView

ROLES = {"mixer": "Mixers", "ffn": "Feed-forwards"}


def panel(view: StudyView, data: PanelData) -> Markup:
    """The first panel."""
    front = [
        _mark(f"trial {each.trial}", each, each.trial, view, data, strong=each.on)
        for each in data.front
        if _known(each, data)
    ]
    stars = [_mark(each.name, each, each.trial, view, data) for each in data.references if _known(each, data)]
    x, y = (_axis(each, view) for each in (data.x, data.y))
    label = f"{data.y.label} over {data.x.label}: {len(data.cloud)} trials, {len(front)} on the front or tied with it"
    return front_picture(data.cloud, front, stars, x, y, label)


def depth(blocks: Sequence[ShareView], role: str) -> Markup:
    """Where the kinds of a role stand."""
    own = [each for each in blocks if each.role == role]
    rows: dict[str, Mapping[str, list[float]]] = {"all trials": {each.kind: each.all for each in own}}
    if own[0].front is not None:
        rows = {"front": {each.kind: each.front or [] for each in own}} | rows
    return depth_shares(rows, NONE, f"{ROLES[role]} by relative depth")


def legend(blocks: Sequence[ShareView], role: str) -> list[tuple[str, str]]:
    """(kind of block, what it is)."""
    return [(each.kind, BLOCKS[each.kind].doc) for each in blocks if each.role == role and each.kind != NONE]


def _known(each: Bounds, data: PanelData) -> bool:
    return each.values[data.x.key] is not None and each.values[data.y.key] is not None


def _mark(
    name: str, each: Bounds, trial: int, view: StudyView, data: PanelData, *, strong: bool = True
) -> Mark:  # fmt: skip
    x, y = data.x.key, data.y.key
    return Mark(
        name=name,
        at=(each.values[x] or 0.0, each.values[y] or 0.0),
        low=(each.low[x], each.low[y]),
        high=(each.high[x], each.high[y]),
        link=f"/studies/{view.name}/trials/{trial}",
        strong=strong,
    )


def _axis(axis: AxisView, view: StudyView) -> PanelAxis:
    unit = f" [{axis.unit}]" if axis.unit else ""
    limit = None if axis.budget is None else Limit(f"budget on {axis.label}", axis.budget, axis.unit)
    better = "more" if axis.direction == "max" else "less"
    return PanelAxis(f"{axis.label}{unit}, {better} is better", axis.key in view.page.log, limit)
