"""Alternatives for the blocks of a trained model, and start values for them from the trained block's weights.

The mixer and the feed-forward of each layer are replaced independently, or the layer is left out. Start values:

    narrower feed-forward    the hidden units of largest mean |silu(gate) * up| times the norm of their output column
    fewer key-value heads    the mean of each group of neighbours (Ainslie et al. 2023, GQA, section 2.1)
    window                   the same projections
    Mamba-2                  C, B and x from queries, keys and values, the output projection as it is (Wang et al. 2024,
                             "The Mamba in the Llama", section 2.2); gate, steps and decays are drawn
    short convolution        values and output projection; gates and taps are drawn

References for the whole: Bercovich et al. 2024 (Puzzle), Yang et al. 2025 (Zebra-Llama, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.replacement import Slot
from nas.nn.base import MODULES, BlockModule
from nas.nn.primitives import draw_weights

_ATTENTION = ("gqa", "swa")
_STEP = 32
"""Hidden widths are multiples of the quantisers' block."""


def default_alternatives(layout: Layout, slot: Slot, window: int) -> tuple[Block | None, ...]:
    """Returns what may stand in place of the block at `slot`; None: no block. The block itself is not among them.

    Args:
        layout: of the trained model.
        slot: the place.
        window: of sliding windows.
    """
    own = slot.block(layout)
    assert own is not None
    found = _mixers(own, layout.d_model, window) if slot.part == "mixer" else _feed_forwards(own)
    return (*_valid(found, own, layout.d_model), None)


def _mixers(own: Block, d_model: int, window: int) -> Iterator[Block]:
    if own.kind not in _ATTENTION:
        return
    full = own.resolve(d_model)
    heads, kv, size = full.int("heads"), full.int("kv_heads"), full.int("head_dim")
    for fewer in (kv // 2, kv // 4):
        if fewer and kv % fewer == 0:
            yield own.replace(kv_heads=fewer)
    shared = {name: value for name, value in own.given if name not in ("kv", "window", "sink")}
    yield Block.of("swa", **{**shared, "window": window})
    yield Block.of("conv", kernel=3)
    if heads * size % d_model == 0:
        yield Block.of("mamba2", state=size, heads=heads, groups=heads, expand=heads * size // d_model)


def _feed_forwards(own: Block) -> Iterator[Block]:
    if own.kind == "swiglu":
        width = own.int("width")
        for share in (0.75, 0.5, 0.25):
            yield own.replace(width=max(1, round(width * share / _STEP)) * _STEP)


def _valid(blocks: Iterator[Block], own: Block, d_model: int) -> tuple[Block, ...]:
    found: dict[Block, None] = {}
    for block in blocks:
        try:
            found[block.canonical(d_model)] = None
        except InvalidInput:
            continue
    if own.kind == "swa":  # a wider window is no saving
        found = {each: None for each in found if each.kind != "swa" or each.int("window") <= own.int("window")}
    return tuple(block for block in found if block != own)


def started(block: Block, trained: BlockModule, inputs: Tensor, seed: int, depth: int) -> BlockModule:
    """Returns the module of `block` with start values from the module that it replaces.

    Args:
        block: the alternative.
        trained: the module of the trained model.
        inputs: normalised inputs of it [B, T, D], to choose hidden units by their activations.
        seed: of the values that are drawn.
        depth: layers of the model, see `nas.nn.primitives.Linear`.
    """
    module = MODULES[block.kind](block, trained.d_model)
    draw_weights(module, seed, depth)
    own = {name: tensor.detach() for name, tensor in trained.state_dict().items()}
    values: dict[str, Tensor] = {}
    if block.kind == trained.block.kind == "swiglu":
        values = _pruned(own, inputs, module.block.int("width"))
    elif trained.block.kind in _ATTENTION and block.kind in _ATTENTION:
        values = _pooled(own, trained.block, module.block)
    elif trained.block.kind in _ATTENTION and block.kind == "mamba2":
        values = _scanned(own, trained.block, module)
    elif trained.block.kind in _ATTENTION and block.kind == "conv":
        values = _convolved(own, trained.block, module)
    state = module.state_dict()
    module.load_state_dict(state | {name: value for name, value in values.items() if name in state})
    return module


def _pruned(own: dict[str, Tensor], inputs: Tensor, width: int) -> dict[str, Tensor]:
    gate, up, down = (own[f"{name}.weight"] for name in ("gate", "up", "down"))
    activation = (F.silu(F.linear(inputs, gate)) * F.linear(inputs, up)).abs().flatten(0, -2).mean(0)
    kept = (activation * down.norm(dim=0)).topk(width).indices.sort().values
    return {"gate.weight": gate[kept], "up.weight": up[kept], "down.weight": down[:, kept]}


def _pooled(own: dict[str, Tensor], before: Block, after: Block) -> dict[str, Tensor]:
    kv, size = after.int("kv_heads"), after.int("head_dim")
    group = before.int("kv_heads") // kv
    fewer = {name: own[name].view(kv, group, size, -1).mean(1).flatten(0, 1) for name in ("k.weight", "v.weight")}
    return own | fewer


def _repeated(own: dict[str, Tensor], name: str, block: Block) -> Tensor:
    """Returns keys' or values' projection with one head for each query head: [heads * head_dim, D]."""
    heads = own[name].view(block.int("kv_heads"), block.int("head_dim"), -1)
    return heads.repeat_interleave(block.int("heads") // block.int("kv_heads"), 0).flatten(0, 1)


def _scanned(own: dict[str, Tensor], before: Block, module: BlockModule) -> dict[str, Tensor]:
    after = module.block
    inner = after.int("expand") * module.d_model
    sizes = [before.int(name) for name in ("heads", "head_dim")]
    if [after.int("groups"), after.int("state")] != sizes or inner != sizes[0] * sizes[1]:
        return {}  # heads do not correspond: drawn
    rows = module.state_dict()["in_proj.weight"].clone()
    rows[inner : 4 * inner] = torch.cat([_repeated(own, "v.weight", before), _repeated(own, "k.weight", before),
                                         own["q.weight"]])  # fmt: skip
    taps = torch.zeros_like(module.state_dict()["conv.weight"])
    taps[:, -1] = 1.0
    return {"in_proj.weight": rows, "conv.weight": taps, "out.weight": own["o.weight"]}


def _convolved(own: dict[str, Tensor], before: Block, module: BlockModule) -> dict[str, Tensor]:
    width = module.d_model
    if before.int("heads") * before.int("head_dim") != width:
        return {}
    rows = module.state_dict()["in_proj.weight"].clone()
    rows[2 * width :] = _repeated(own, "v.weight", before)
    return {"in_proj.weight": rows, "out.weight": own["o.weight"]}
