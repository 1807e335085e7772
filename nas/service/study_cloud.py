"""What one panel of a study's page shows, for who draws it on the server."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.service.live_axes import AxisView
from nas.service.live_points import (
    FrontEntry,
    ReferenceEntry,
    front_entries,
    read_layouts,
    reference_entries,
    values,
)
from nas.service.live_study import LiveStudy
from nas.service.live_table import BROKEN, ORIGINS
from nas.service.study_state import PageState


class PanelData(NamedTuple):
    """A panel.

    Args:
        x: its axes,
        y: at the chosen place.
        cloud: [P, 2] all trials that have a figure on both, references not counted.
        front: all of it, and what is tied with it.
        references: stars.
    """

    x: AxisView
    y: AxisView
    cloud: NDArray[np.float64]
    front: list[FrontEntry]
    references: list[ReferenceEntry]


def first_panel(study: LiveStudy, page: PageState) -> PanelData:
    """The first panel as the page's address has it."""
    x, y = (page.shown(key, study.axes) for key in (page.panels[0].x, page.panels[0].y))
    read_layouts(study, (x.key, y.key))
    with study.lock:
        rows = study.table.rows
        own = rows["origin"] != ORIGINS.index("reference")
        if not page.infeasible:
            own &= study.table.feasible() != BROKEN
        figures = np.column_stack([values(study, x.key), values(study, y.key)])[own]
        return PanelData(
            x=x,
            y=y,
            cloud=figures[np.isfinite(figures).all(axis=1)],
            front=front_entries(study, [x.key, y.key]),
            references=reference_entries(study, [x.key, y.key]),
        )
