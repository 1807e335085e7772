"""A residual layer, and the packing of rows of different lengths."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nas.core.layout import Layer, Norms
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.kinds import MODULES
from nas.model.nn.primitives import RMSNorm


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Packs rows of different lengths one after another, so that norms and feed-forwards compute no padding.

    Only mixers relate tokens. They get the rows unpacked, padded at their ends, so kinds of blocks need no code for
    packed rows.

    Args:
        rows: B.
        length: T, of the longest row.
        places: of the N packed tokens in [B * T].
    """

    rows: int
    length: int
    places: Tensor

    @staticmethod
    def of(mask: Tensor) -> PackedRows:
        """Returns the packing of the positions that are true in `mask`, [B, T]."""
        rows, length = mask.shape
        return PackedRows(rows, length, mask.flatten().nonzero()[:, 0])

    def pack(self, rows: Tensor) -> Tensor:
        """Maps [B, T, ...] -> [1, N, ...]."""
        return rows.flatten(0, 1)[self.places][None]

    def unpack(self, packed: Tensor) -> Tensor:
        """Maps [1, N, D] -> [B, T, D], with zeros after the rows' ends."""
        rows = packed.new_zeros(self.rows * self.length, packed.shape[-1]).index_copy(0, self.places, packed[0])
        return rows.view(self.rows, self.length, -1)


class ResidualLayer(nn.Module):
    """x + sum of mixers(norm(x)), then x + ffn(norm(x)); either half may be missing.

    Norms may be behind blocks instead, x + norm(mixer(x)), or on both sides.
    """

    def __init__(self, layer: Layer, d_model: int, norms: Norms = "before") -> None:
        super().__init__()

        def norm(place: Norms) -> nn.Module:
            return RMSNorm(d_model) if norms in (place, "both") else nn.Identity()

        if layer.mixers:
            self.mixer_norm, self.mixer_out_norm = norm("before"), norm("behind")
        self.mixers = nn.ModuleList(MODULES[block.kind](block, d_model) for block in layer.mixers)
        if layer.ffn:
            self.ffn_norm, self.ffn_out_norm = norm("before"), norm("behind")
        self.ffn = MODULES[layer.ffn.kind](layer.ffn, d_model) if layer.ffn else None

    def forward(
        self,
        x: Tensor,
        states: list[State | None],
        packed: PackedRows | None = None,
        padding: Padding | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Maps [B, T, D] -> [B, T, D], or packed rows [1, N, D], and the state of each mixer after the chunk."""
        after: list[State] = []
        if self.mixers:
            h = self.mixer_norm(x)
            h = without_padding(packed.unpack(h) if packed else h, padding)
            for mixer, state in zip(self.mixers, states, strict=True):
                y, new = mixer(h, state, padding)
                x = x + self.mixer_out_norm(packed.pack(y) if packed else y)
                after.append(new)
        if self.ffn is not None:
            x = x + self.ffn_out_norm(self.ffn(self.ffn_norm(x)))
        return x, after
