"""Grows start weights of a model from a smaller one, such as a trained proxy.

Width grows by copies with split outgoing weights (Net2Net, Chen et al. 2016; heads as in bert2BERT, Chen et al. 2022),
depth by layers that add nothing, as their projections into the residual stream are zero. The function is preserved, up
to rounding, by

- width that grows by a whole factor: RMSNorm divides by the mean square, which equal numbers of copies do not change.
  Another factor changes the mean square a little.
- more heads, key-value heads, hidden units, taps, experts, and inserted layers.
- head size that grows by a whole factor; see `nas.model.nn.attention`.

A block that cannot be mapped starts as one that adds nothing, with its other weights drawn. With another vocabulary,
embedding and head are drawn and the layers between them mapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout
from nas.model.nn.growth import BlockGrowth, CannotGrow, even, shares, tiled
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.model.nn.weights import checkpoint_layout


@dataclass(frozen=True, slots=True)
class Growth:
    """Difference of a grown model from the smaller one.

    Args:
        added: inserted layers.
        changes: reasons why the larger model computes another function; empty: it is the same, up to rounding.
    """

    added: int
    changes: tuple[str, ...]

    def describe(self) -> str:
        """Returns one line for logs and records."""
        function = "same function" if not self.changes else f"another function ({'; '.join(self.changes)})"
        return f"{function}, {self.added} layers added" if self.added else function


def grow_checkpoint(path: Path, layout: Layout | None, large: Layout, seed: int) -> tuple[Model, Growth]:
    """Returns a model of `large` with weights grown from those at `path`.

    Args:
        path: a checkpoint; its header may lack the layout, as that of a study's proxy does.
        layout: of the checkpoint; None: as in its header.
        large: layout of the larger model.
        seed: of weights that are drawn, and of splits.

    Raises:
        InvalidInput: the file is not a checkpoint of the layout, or one layout cannot grow into the other.
    """
    if layout is None:
        layout = checkpoint_layout(path)
    try:
        with safe_open(path, "pt"):
            tensors = load_file(path)
    except SafetensorError as error:
        raise InvalidInput(f"no safetensors file: {error}", where=str(path)) from error
    expected = Model(layout, None).state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected or tensors[name].shape != expected[name].shape:
            raise InvalidInput(f"holds no weights of {layout}: {name} does not fit", where=str(path))
    return grow(layout, tensors, large, seed)


def grow(small: Layout, tensors: Mapping[str, Tensor], large: Layout, seed: int) -> tuple[Model, Growth]:
    """Returns a model of `large` that preserves the function of `tensors` in `small` as far as possible.

    Raises:
        InvalidInput: `large` is narrower or has other norms or bounds, or layers that share weights or caches exclude
            another depth.
    """
    if large.d_model < small.d_model:
        raise InvalidInput(f"a model of width {small.d_model} does not grow to width {large.d_model}", where="--from")
    if (small.norms, small.softcap) != (large.norms, large.softcap):
        raise InvalidInput("norms and softcap do not change as a model grows", where="--from")
    places = _places(small, large)
    model = Model(large, seed)
    return model, _Grower(small, tensors, large, model, seed).grow(places)


class _Grower:
    def __init__(self, small: Layout, tensors: Mapping[str, Tensor], large: Layout, model: Model, seed: int) -> None:
        self.small, self.tensors, self.large, self.seed = small, tensors, large, seed
        self.start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.model = model
        self.width = tiled(small.d_model, large.d_model)
        self.changes: list[str] = []

    def grow(self, places: Mapping[int, int]) -> Growth:
        if not even(self.small.d_model, self.large.d_model):
            self.changes.append(
                f"width {self.large.d_model} is no multiple of {self.small.d_model}: RMSNorm sees other mean squares"
            )
        if missing := sorted(set(range(self.small.depth)) - set(places.values())):
            self.changes.append(f"layers {missing} have no place")
        grown = self._ends()
        for depth, layer in enumerate(self.large.layers):
            if layer.share is None:
                grown |= self._layer(depth, layer, places.get(depth))
        self.model.load_state_dict(self.start | grown)
        return Growth(self.large.depth - len(places), tuple(self.changes))

    def _ends(self) -> dict[str, Tensor]:
        """Returns embedding, final norm and head."""
        small, large, width = self.small, self.large, self.width
        if small.vocab != large.vocab:
            self.changes.append(f"a vocabulary of {large.vocab:,} instead of {small.vocab:,}: embedding and head drawn")
            return {}
        norm, embed = self.tensors["norm.weight"][width], self.tensors["embed.weight"]
        grown = {"embed.weight": embed[:, width]}
        split = shares(width, self._rng("head"))
        if large.tied:
            # The head is the embedding, whose copies cannot be split: the norm in front of it is.
            grown["norm.weight"] = norm * split
            if not small.tied:
                self.changes.append("the head becomes the embedding")
        else:
            grown |= {"norm.weight": norm, "head.weight": self.tensors.get("head.weight", embed)[:, width] * split}
        return grown

    def _layer(self, depth: int, layer: Layer, source: int | None) -> dict[str, Tensor]:
        grown: dict[str, Tensor] = {}
        parts = [(f"mixers.{j}", block) for j, block in enumerate(layer.mixers)]
        parts += [("ffn", layer.ffn)] if layer.ffn else []
        for j, (part, block) in enumerate(parts):
            name = f"layers.{depth}.{part}."
            start = _under(self.start, name)
            carried = None
            if source is not None:
                before = self.small.layers[source].blocks[j].resolve(self.small.d_model)
                weights = _under(self.tensors, f"layers.{source}.{part}.")
                try:
                    after = block.resolve(self.large.d_model)
                    growing = BlockGrowth(before, after, weights, start, self.width, self._rng(name))
                    carried = MODULES[block.kind].grow(growing)
                except CannotGrow as reason:
                    self.changes.append(f"layer {depth}: {block.format()} starts from drawn weights, {reason}")
            output = f"{MODULES[block.kind].projection}.weight"
            if carried is None and output not in start:
                raise InvalidInput(f"the module of {block.kind} names no `projection`: such blocks cannot be added")
            new = carried if carried is not None else {output: torch.zeros_like(start[output])}
            grown |= {name + key: tensor for key, tensor in new.items()}
        if source is not None:
            for norm in (f"{half}_{place}.weight" for half in ("mixer", "ffn") for place in ("norm", "out_norm")):
                if f"layers.{source}.{norm}" in self.tensors:
                    grown[f"layers.{depth}.{norm}"] = self.tensors[f"layers.{source}.{norm}"][self.width]
        return grown

    def _rng(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"grow:{self.seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4]))


def _places(small: Layout, large: Layout) -> dict[int, int]:
    """Maps depths in `large` to layers of `small`: their longest common subsequence of kinds of layers."""
    a, b = ([_kinds(layer) for layer in layout.layers] for layout in (small, large))
    if any(_bound(layout) for layout in (small, large)):
        if a != b:
            raise InvalidInput(
                "layers that share weights or caches grow in width alone: both layouts must have the same blocks",
                where="--from",
            )
        return {depth: depth for depth in range(large.depth)}
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            best[i][j] = 1 + best[i + 1][j + 1] if a[i] == b[j] else max(best[i + 1][j], best[i][j + 1])
    places, i, j = {}, 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            places[j] = i
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return places


def _kinds(layer: Layer) -> tuple[object, ...]:
    reads = tuple(dict(block.args).get("kv") for block in layer.mixers)
    return (*(block.kind for block in layer.mixers), "+", layer.ffn.kind if layer.ffn else None, layer.share, reads)


def _bound(layout: Layout) -> bool:
    return any(layer.share is not None or any("kv" in dict(b.args) for b in layer.mixers) for layer in layout.layers)


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
