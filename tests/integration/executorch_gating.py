"""The gate of ExecuTorch on checkpoints that a wrong graph cannot hide behind."""

from __future__ import annotations

from pathlib import Path

from nas.core.layout import Layout
from nas.runtimes.base import GateReport
from nas.runtimes.executorch.builds import find_build
from nas.runtimes.executorch.runtime import EXECUTORCH
from nas.testing.planted_faults import Edit, checkpoint, unchanged

QUANTISATION = "8da4w"


def gate(folder: Path, right: Layout, exported: Layout | None = None, edit: Edit = unchanged) -> GateReport:
    """Exports `exported` (else `right`) with edited weights, and holds it against `right` with the unedited ones."""
    exported, model = exported or right, folder / "model"
    EXECUTORCH.export(exported, QUANTISATION, checkpoint(exported, folder / "wrong", edit), model)
    return hold_against(right, folder, model)


def hold_against(right: Layout, folder: Path, model: Path) -> GateReport:
    """The gate on a file that claims to be `right`."""
    return EXECUTORCH.gate(right, QUANTISATION, checkpoint(right, folder / "right"), model, find_build().runner)
