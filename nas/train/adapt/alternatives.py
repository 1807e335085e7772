"""Alternatives for the blocks of a trained model, and start values for them from the trained block's weights.

The mixer and the feed-forward of each layer are replaced independently, or the layer is left out. Start values:

    narrower feed-forward    the hidden units of largest mean |hidden unit| times the norm of their output column
    fewer key-value heads    the mean of each group of neighbours (Ainslie et al. 2023, GQA, section 2.1)
    shared keys and values   queries and output projection; keys and values are those of the attention below (Brandon
                             et al. 2024, Cross-Layer Attention, section 2), which has to stay as it is
    fewer experts            those to which tokens give most weight; fewer of them for each token: all weights
    window                   the same projections; logits of sinks: what tokens before the window add to the softmax
    Mamba-2                  C, B and x from queries, keys and values, the output projection as it is (Wang et al. 2024,
                             "The Mamba in the Llama", section 2.2); gate, steps and decays are drawn
    short convolution        values and output projection; gates and taps are drawn
    latent attention         latents from the singular vectors of keys and values together, shared keys from the mean of
                             heads (Li et al. 2025, X-EcoMLA; Yang et al. 2025, appendix A.1); queries as they are
    GLA, mLSTM               queries, keys, values and output projection; gates are drawn

A mixer that is not softmax attention normalises its heads, so that its output is of another size than the trained one.
Where it is larger, its output projection is scaled down: else most of the training goes into the size.

References for the whole: Bercovich et al. 2024 (Puzzle), Yang et al. 2025 (Zebra-Llama, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from nas.core.block import BLOCKS, Block
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.replacement import Slot
from nas.model.blocks.mamba2 import inner_width
from nas.model.nn.attention import Attention
from nas.model.nn.base import BlockModule, Mixer
from nas.model.nn.kinds import MODULES
from nas.model.nn.moe import MixtureOfExperts
from nas.model.nn.primitives import draw_weights
from nas.model.nn.swiglu import DenseFeedForward

_ATTENTION = ("gqa", "swa")
_GATED = ("swiglu", "geglu")
_SOFTMAX = (*_ATTENTION, "mla")
"""Kinds of softmax attention."""
_ROWS = 4
"""Sequences that logits of sinks are taken from."""
_STEP = 32
"""Hidden widths are multiples of the quantisers' block."""


def default_alternatives(
    layout: Layout, slot: Slot, window: int, further: Sequence[Block] = ()
) -> tuple[Block | None, ...]:
    """Returns what may replace the block at `slot`, `further` mixers for attention; None: no block."""
    trained = slot.block(layout)
    assert trained is not None
    if slot.part == "ffn":
        return (*_valid(_feed_forwards(trained), trained, layout.d_model), None)
    mixers = chain(_mixers(trained, layout.d_model, window, further), _sharing(layout, slot.depth, trained))
    return (*_valid(mixers, trained, layout.d_model), None)


def of_kinds(blocks: tuple[Block | None, ...], kinds: Collection[str]) -> tuple[Block | None, ...]:
    """Returns the blocks whose kind is among `kinds`, "-" for no block; all of them if `kinds` is empty.

    Raises:
        UnknownName: there is no such kind.
    """
    for kind in kinds:
        if kind not in ("-", *BLOCKS):
            raise UnknownName("kind of block", kind, ("-", *BLOCKS), where="alternatives")
    return tuple(block for block in blocks if not kinds or (block.kind if block else "-") in kinds)


def further_mixers(texts: Sequence[str], d_model: int) -> tuple[Block, ...]:
    """Returns the mixers that `texts` name.

    Raises:
        InvalidInput: one is no mixer of this width, or has no keys and values of its own.
    """
    mixers = tuple(Block.parse(text, "mixer").canonical(d_model) for text in texts)
    for block in mixers:
        if "kv" in dict(block.args):
            raise InvalidInput(f"{block.format()} shares the cache of another layer", where="mixers")
    return mixers


def _sharing(layout: Layout, depth: int, trained: Block) -> Iterator[Block]:
    """Yields attention with keys and values of the nearest attention below, where that is an equal block."""
    below = [i for i in range(depth) if (mixer := layout.layers[i].mixer) is not None and mixer.kind == "gqa"]
    if trained.kind == "gqa" and below and layout.layers[below[-1]].mixer == trained:
        yield trained.replace(kv=below[-1])


def _mixers(trained: Block, d_model: int, window: int, further: Sequence[Block]) -> Iterator[Block]:
    if trained.kind not in _ATTENTION:
        return
    full = trained.resolve(d_model)
    heads, kv, size = full.int("heads"), full.int("kv_heads"), full.int("head_dim")
    for fewer in (kv // 2, kv // 4):
        if fewer and kv % fewer == 0:
            yield trained.replace(kv_heads=fewer)
    shared = {name: value for name, value in trained.args if name not in ("kv", "window", "sink")}
    yield Block.of("swa", **{**shared, "window": window})
    yield Block.of("swa", **{**shared, "window": window, "sink": 1})
    rope = size // 4 * 2
    latent = (kv * size - rope) // _STEP * _STEP
    # Latent attention has RoPE's base alone.
    plain = full.get("rope_factor") == 1 and not (full.int("rope_dim") or full.int("rope_long"))
    if trained.kind == "gqa" and rope and latent and plain:  # of a window, latents of all tokens would be kept
        theta = float(full.get("rope_theta") or 0.0)
        yield Block.of(
            "mla", heads=heads, head_dim=size, latent=latent, nope_dim=size - rope, rope_dim=rope, rope_theta=theta
        )
    yield Block.of("conv", kernel=3)
    if heads * size % d_model == 0:
        yield Block.of("mamba2", state=size, heads=heads, groups=heads, expand=heads * size // d_model)
    if heads * size == d_model:
        yield Block.of("mlstm", heads=heads, key_dim=size)
    yield from further


def _feed_forwards(trained: Block) -> Iterator[Block]:
    if trained.kind in _GATED:
        width = trained.int("width")
        for share in (0.75, 0.5, 0.25):
            yield trained.replace(width=max(1, round(width * share / _STEP)) * _STEP)
    if trained.kind == "moe":
        experts, top_k = trained.int("experts"), trained.int("top_k")
        half, fewer = max(2, experts // 2), max(1, top_k // 2)
        yield trained.replace(experts=half)  # not valid where fewer are left than a token takes
        yield trained.replace(top_k=fewer)
        yield trained.replace(experts=half, top_k=fewer)


def _valid(blocks: Iterable[Block], trained: Block, d_model: int) -> tuple[Block, ...]:
    valid: dict[Block, None] = {}
    for block in blocks:
        try:
            valid[block.canonical(d_model)] = None
        except InvalidInput:
            continue
    if trained.kind == "swa":  # a wider window is no saving
        most = trained.int("window")
        valid = {block: None for block in valid if block.kind != "swa" or block.int("window") <= most}
    return tuple(block for block in valid if block != trained)


def started(block: Block, trained: BlockModule, inputs: Tensor, seed: int, depth: int) -> BlockModule:
    """Returns the module of `block` with start values from the module that it replaces.

    Args:
        block: the alternative.
        trained: the module of the trained model.
        inputs: normalised inputs of it [B, T, D], to choose hidden units by their activations.
        seed: of the values that are drawn.
        depth: layers of the model, see `nas.model.nn.primitives.Linear`.
    """
    module = MODULES[block.kind](block, trained.d_model)
    draw_weights(module, seed, depth)
    weights = {name: tensor.detach() for name, tensor in trained.state_dict().items()}
    values: dict[str, Tensor] = {}
    if isinstance(trained, DenseFeedForward) and block.kind == trained.block.kind in _GATED:
        values = _pruned(weights, trained.hidden(inputs), module.block.int("width"))
    elif isinstance(trained, MixtureOfExperts) and block.kind == "moe":
        values = _used(weights, trained, inputs, module.block.int("experts"))
    elif isinstance(trained, Attention) and block.kind in _ATTENTION and _has_heads_of(module.block, trained.block):
        pooled = _pooled(weights, trained.block, module.block) | _sinks(trained, module.block, inputs)
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        values = {name: value for name, value in pooled.items() if shapes.get(name) == value.shape}  # norms may differ
    elif trained.block.kind in _ATTENTION and block.kind == "mamba2":
        values = _scanned(weights, trained.block, module, inputs)
    elif trained.block.kind in _ATTENTION and block.kind == "conv":
        values = _convolved(weights, trained.block, module)
    elif trained.block.kind in _ATTENTION and block.kind == "mla":
        values = _latent(weights, trained.block, module.block, inputs)
    elif trained.block.kind in _ATTENTION and block.kind in ("gla", "mlstm"):
        values = _linear(weights, trained.block, module, inputs)
    state = module.state_dict()
    module.load_state_dict(state | {name: value for name, value in values.items() if name in state})
    alike = bool(values) and block.kind in _SOFTMAX
    if isinstance(module, Mixer) and isinstance(trained, Mixer) and module.projection and not alike:
        _limit_size(module, trained, inputs)
    return module


@torch.no_grad()
def _limit_size(module: Mixer, trained: Mixer, inputs: Tensor) -> None:
    """Scales the output projection down where outputs are larger than those of `trained`."""
    target, output = trained(inputs)[0].cpu(), module(inputs.cpu())[0]
    larger = (output.square().mean() / target.square().mean().clamp_min(1e-12)).sqrt()
    module.get_submodule(module.projection).weight /= larger.clamp_min(1.0)


@torch.no_grad()
def _pruned(weights: dict[str, Tensor], hidden: Tensor, width: int) -> dict[str, Tensor]:
    gate, up, down = (weights[f"{name}.weight"] for name in ("gate", "up", "down"))
    units = (hidden.abs().flatten(0, -2).mean(0) * down.norm(dim=0)).topk(width).indices.sort().values
    return {"gate.weight": gate[units], "up.weight": up[units], "down.weight": down[:, units]}


def _has_heads_of(after: Block, before: Block) -> bool:
    """Returns whether attention has the heads of another one, or key-value heads that are means of its whole groups."""
    sizes = [[block.int(name) for name in ("heads", "head_dim")] for block in (before, after)]
    return sizes[0] == sizes[1] and before.int("kv_heads") % after.int("kv_heads") == 0


def _pooled(weights: dict[str, Tensor], before: Block, after: Block) -> dict[str, Tensor]:
    kv, size = after.int("kv_heads"), after.int("head_dim")
    group = before.int("kv_heads") // kv
    wide = ("k_norm.weight",) if before.get("qk_norm_wide") else ()
    per_head = [name for name in ("k.weight", "v.weight", "k.bias", "v.bias", *wide) if name in weights]
    return weights | {
        name: torch.unflatten(weights[name], 0, (kv, group, size)).mean(1).flatten(0, 1) for name in per_head
    }


def _used(weights: dict[str, Tensor], trained: MixtureOfExperts, inputs: Tensor, experts: int) -> dict[str, Tensor]:
    with torch.no_grad():
        shares, chosen = trained.route(inputs.flatten(0, -2))
    use = torch.zeros(trained.experts, device=inputs.device).index_add(0, chosen.flatten(), shares.flatten())
    used = use.topk(experts).indices.sort().values
    return {name: tensor if name.startswith("shared") else tensor[used] for name, tensor in weights.items()}


@torch.no_grad()
def _sinks(trained: Attention, after: Block, inputs: Tensor) -> dict[str, Tensor]:
    """Returns logits of sinks that keep the weights of tokens in the window as they are; none without such tokens.

    That is the mean over tokens of the logarithm of what all tokens before the window add to the softmax.
    """
    sunk = after.kind == "swa" and after.get("sink") and trained.block.kind == "gqa"
    if not sunk or inputs.shape[1] <= after.int("window"):
        return {}
    x = inputs[:_ROWS]
    x, _ = trained.mixed_in(x, trained.init_state(len(x), x.dtype, x.device))
    q, k = trained.turned(trained.queries(x), 0), trained.turned(trained.keys(x), 0)
    k = k.repeat_interleave(trained.heads // trained.kv_heads, 1)
    scores = q @ k.mT / math.sqrt(trained.head_dim)  # [B, heads, T, T]
    beyond = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(-after.int("window"))
    added = scores.masked_fill(~beyond, -torch.inf)[:, :, after.int("window") :].logsumexp(-1)
    return {"sinks.weight": added.mean((0, 2))}


def _repeated(weights: dict[str, Tensor], name: str, block: Block) -> Tensor:
    """Returns keys' or values' projection with one head for each query head: [heads * head_dim, D]."""
    heads = weights[name].view(block.int("kv_heads"), block.int("head_dim"), -1)
    return heads.repeat_interleave(block.int("heads") // block.int("kv_heads"), 0).flatten(0, 1)


def _scanned(weights: dict[str, Tensor], before: Block, module: BlockModule, inputs: Tensor) -> dict[str, Tensor]:
    after = module.block
    inner = inner_width(after, module.d_model)
    sizes = [before.int(name) for name in ("heads", "head_dim")]
    if [after.int("groups"), after.int("state")] != sizes or inner != sizes[0] * sizes[1]:
        return {}  # heads do not correspond: drawn
    q, k = (_heads(weights, name, before, inputs) for name in ("q", "k"))
    keys = k.repeat_interleave(len(q) // len(k), 0)
    rows = module.state_dict()["in_proj.weight"].clone()
    rows[inner : 4 * inner] = torch.cat([_repeated(weights, "v.weight", before), keys.flatten(0, 1), q.flatten(0, 1)])
    taps = torch.zeros_like(module.state_dict()["conv.weight"])
    taps[:, -1] = 1.0
    return {"in_proj.weight": rows, "conv.weight": taps, "out.weight": weights["o.weight"]}


def _convolved(weights: dict[str, Tensor], before: Block, module: BlockModule) -> dict[str, Tensor]:
    width = module.d_model
    if before.int("heads") * before.int("head_dim") != width:
        return {}
    rows = module.state_dict()["in_proj.weight"].clone()
    rows[2 * width :] = _repeated(weights, "v.weight", before)
    return {"in_proj.weight": rows, "out.weight": weights["o.weight"]}


def _heads(weights: dict[str, Tensor], name: str, block: Block, inputs: Tensor) -> Tensor:
    """Returns the projection of each head of `name` [heads, head_dim, D], with the mean effect of QK-norm."""
    rows = weights[f"{name}.weight"].view(-1, block.int("head_dim"), weights[f"{name}.weight"].shape[-1])
    if f"{name}_norm.weight" not in weights:
        return rows
    size = torch.unflatten(inputs @ rows.flatten(0, 1).T, -1, rows.shape[:2]).square().mean((0, 1, 3)).sqrt()
    gain = weights[f"{name}_norm.weight"]
    return rows / size[:, None, None] * gain.view(-1, rows.shape[1], 1)  # of each head, or of all


def _linear(weights: dict[str, Tensor], before: Block, module: BlockModule, inputs: Tensor) -> dict[str, Tensor]:
    q, k = (_heads(weights, name, before, inputs) for name in ("q", "k"))
    keys = k.repeat_interleave(len(q) // len(k), 0)
    rows = torch.cat([q.flatten(0, 1), keys.flatten(0, 1), _repeated(weights, "v.weight", before)])
    heads = module.block.int("heads") == before.int("heads")
    same = heads and rows.shape == module.state_dict()["qkv.weight"].shape
    return {"qkv.weight": rows, "out.weight": weights["o.weight"]} if same else {}


def _latent(weights: dict[str, Tensor], before: Block, after: Block, inputs: Tensor) -> dict[str, Tensor]:
    """Returns latent attention that is nearest to the keys without positions and the values.

    A head's pairs of numbers whose RoPE frequency is one of the shared key's belong to that, the others lose their
    positions.
    """
    heads, kv, size = (before.int(name) for name in ("heads", "kv_heads", "head_dim"))
    latent, rope = after.int("latent"), after.int("rope_dim")
    nope = size - rope
    parts = [after.int(name) for name in ("heads", "head_dim", "nope_dim", "query")]
    if parts != [heads, size, nope, 0] or nope < 2 or size % rope or latent > kv * (nope + size):
        return {}  # heads do not correspond, or nothing is compressed: drawn
    turned = torch.arange(size).view(2, -1)[:, :: size // rope].flatten()
    still = torch.tensor([i for i in range(size) if i not in set(turned.tolist())])
    q, k = (_heads(weights, name, before, inputs) for name in ("q", "k"))
    u, s, down = torch.linalg.svd(torch.cat([k[:, still].flatten(0, 1), weights["v.weight"]]), full_matrices=False)
    down, up = down[:latent], u[:, :latent] * s[:latent]
    keys, values = up.split([kv * nope, kv * size])
    level = (inputs @ down.T).square().mean().sqrt()  # latents are normalised
    return {
        "q.weight": torch.cat([q[:, still], q[:, turned]], 1).flatten(0, 1),
        "kv_down.weight": torch.cat([down, k[:, turned].mean(0)]),
        "kv_norm.weight": level.expand(latent),
        "k_up.weight": _to_heads(keys.view(kv, nope, latent).mT, heads),
        "v_up.weight": _to_heads(values.view(kv, size, latent), heads),
        "o.weight": weights["o.weight"],
    }


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats matrices of key-value heads for the query heads that read them: [kv, a, b] -> [heads * a, b]."""
    return x.repeat_interleave(heads // len(x), 0).flatten(0, 1)
