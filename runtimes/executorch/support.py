"""Which layouts ExecuTorch carries: every mix of the block kinds that have a program, as long as groups fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.runtimes.base import Support
from nas.runtimes.executorch.chain import build_chain
from nas.runtimes.executorch.programs import GROUP

Quantisation = Literal["8da4w"]

ARCH = "blocks"
_KINDS = ("conv", "gqa", "swa", "mamba2", "swiglu", "moe")


def supports(layout: Layout) -> Support:
    """Stock, since ExecuTorch's own libraries run it, or no, with every reason."""
    for rules in (_kinds, _widths):
        if reasons := tuple(dict.fromkeys(rules(layout))):
            return Support("no", None, reasons)
    return Support("stock", ARCH)


def require(layout: Layout) -> None:
    """Refuses a layout that ExecuTorch does not carry.

    Raises:
        Unsupported: with every reason.
    """
    if not (support := supports(layout)):
        raise Unsupported(f"ExecuTorch does not carry this layout: {'; '.join(support.reasons)}")


def _kinds(layout: Layout) -> Iterator[str]:
    for layer in layout.layers:
        for block in layer.blocks:
            if block.kind not in _KINDS:
                yield f"{block.kind} blocks: there is no ExecuTorch program of them"


def _widths(layout: Layout) -> Iterator[str]:
    for method in build_chain(layout).methods:
        for constant in method.program.constants:
            if constant.role == "int4" and constant.shape[1] % GROUP:
                what = constant.source.replace("{j}", str(method.mixer)) or constant.name
                yield (f"{what} has rows of {constant.shape[1]} numbers: 4-bit weights come in groups of {GROUP}")
