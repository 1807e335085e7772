"""The rules by which a layout is inside a search space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nas.core.block import Block
from nas.core.block_space import EXPANSION, ArgKnob, BlockSpace, arguments, matches
from nas.core.layout import Layout
from nas.core.model_choices import choice_of, ffn_width
from nas.core.space import DENSE, SearchSpace
from nas.core.units import show_count

EXPERTS = "moe"
"""The feed-forward that leading dense layers come before, as in lfm2moe."""


def reasons_outside(space: SearchSpace, layout: Layout) -> list[str]:
    """Returns a message for every rule of `space` that `layout` breaks; empty where it is inside."""
    rules = (_model(space, layout), _layers(space, layout), _shared_values(space, layout), _stack(space, layout))
    return [reason for rule in rules for reason in rule]


def leading_dense(layout: Layout) -> int:
    """Returns the number of layers before the first mixture of experts; 0 in a layout without one."""
    kinds = [layer.ffn.kind if layer.ffn else None for layer in layout.layers]
    return kinds.index(EXPERTS) if EXPERTS in kinds else 0


def _model(space: SearchSpace, layout: Layout) -> Iterator[str]:
    model = space.model
    knobs = {"d_model": model.d_model, "vocab": model.vocab, "depth": model.depth, "vectors": model.vectors}
    for name, knob in knobs.items():
        if getattr(layout, name) not in knob.choices:
            yield f"{name} {getattr(layout, name)} is none of {list(knob.choices)}"
    tower = layout.tower.format() if layout.tower else ""
    if tower not in (model.tower.choices or ("",)):
        yield f"tower {tower or 'none'} is none of {', '.join(model.tower.choices) or 'a choice'}"
    if layout.tied != model.tied:
        yield f"embeddings are {'' if layout.tied else 'not '}tied"
    if layout.norms != model.norms:
        yield f"norms={layout.norms} is not {model.norms}"
    if layout.softcap:
        yield "bounded logits (softcap): layouts of a space have none"
    if layout.quantisation not in (space.quantisations or ("",)):
        yield f"quantisation {layout.quantisation or 'none'} is none of {', '.join(space.quantisations) or 'a choice'}"
    for name in ("total", "active", "non_embedding"):
        count = getattr(layout.params, name)
        if not getattr(model.params, name).holds(count):
            yield f"{show_count(count)} weights ({name}) are outside the budget"


def _layers(space: SearchSpace, layout: Layout) -> Iterator[str]:
    users: dict[Block, list[int]] = {}
    for index, layer in enumerate(layout.layers):
        if layer.share is not None or not layer.mixers or layer.ffn is None:
            yield f"layer {index}: a layer of a space has a mixer, one feed-forward and weights of its own"
            continue
        if len(layer.mixers) > 1 and (choice := choice_of(layer.mixers)) not in space.mixer_choices:
            yield f"layer {index}: {choice} is none of {', '.join(space.mixer_choices)}"
            continue
        for block in layer.blocks:
            users.setdefault(block, []).append(index)
    for block, indices in users.items():
        spaces = space.mixers if block.spec.role == "mixer" else space.ffn
        where = f"layer {indices[0]}" + (f" and {len(indices) - 1} more" if len(indices) > 1 else "")
        yield from (f"{where}: {reason}" for reason in _block(block, spaces, layout.d_model))


def _block(block: Block, spaces: tuple[BlockSpace, ...], d_model: int) -> Iterator[str]:
    matching = [space for space in spaces if space.kind == block.kind]
    if not matching:
        yield f"{block.kind} is none of {', '.join(space.kind for space in spaces)}"
        return
    explicit, full = dict(block.args), arguments(block, d_model)
    for arg in block.spec.args:
        knob = _knob(matching[0], arg.name, d_model)
        if knob is None and arg.name in explicit:
            yield f"{block.format()}: the space does not vary {arg.name}"
        if knob is not None and not knob.allows(full[arg.name], full):
            yield f"{block.format()}: {arg.name} {full[arg.name]} is none of {list(knob.choices)}"


def _shared_values(space: SearchSpace, layout: Layout) -> Iterator[str]:
    for block_space in space.mixers + space.ffn:
        for name, knob in block_space.knobs.items():
            arg = "width" if name == EXPANSION else name
            if knob.scope == "model" and not _is_shared(layout, block_space.kind, arg, knob):
                yield f"{block_space.kind}: {arg} must be the same in all layers"


def _is_shared(layout: Layout, kind: str, arg: str, knob: ArgKnob) -> bool:
    """Returns whether one choice gives the argument of all blocks of `kind`; a choice may name another argument."""
    blocks = [block for layer in layout.layers for block in layer.blocks if block.kind == kind]
    resolved = [arguments(block, layout.d_model) for block in dict.fromkeys(blocks)]
    named = [choice for choice in knob.choices if isinstance(choice, str)]
    return len(values(layout, kind, arg)) < 2 or any(
        all(matches(args[arg], choice, args) for args in resolved) for choice in named
    )


def values(layout: Layout, kind: str, arg: str) -> set[object]:
    """Returns the values of one argument over all blocks of `kind`."""
    blocks = [block for layer in layout.layers for block in layer.blocks if block.kind == kind]
    return {block.resolve(layout.d_model).get(arg) for block in blocks}


def _stack(space: SearchSpace, layout: Layout) -> Iterator[str]:
    halves = (half for layer in layout.layers for half in (layer.mixers, (layer.ffn,) if layer.ffn else ()))
    counts = Counter(map(choice_of, halves))
    for kind, limit in space.limits.items():
        if not limit.holds(counts[kind]):
            most = "any number" if limit.max is None else limit.max
            yield f"{counts[kind]} {kind} layers, allowed are {limit.min} to {most}"
    lead = leading_dense(layout)
    yield from _ffn_order(space, layout, lead)
    if not any(repeats(layout, int(period), lead) for period in space.pattern.period.choices):
        yield f"the stack repeats with none of the periods {list(space.pattern.period.choices)}"


def _ffn_order(space: SearchSpace, layout: Layout, lead: int) -> Iterator[str]:
    kinds = [layer.ffn.kind for layer in layout.layers if layer.ffn]
    choices = space.model.leading_dense.choices
    if space.model.ffn_scope == "layer":
        if EXPERTS in kinds and lead < min(choices):
            yield f"{lead} leading dense layers, at least {min(choices)} are wanted"
        return
    if len(set(kinds[lead:])) > 1 or any(kind != DENSE for kind in kinds[:lead]):
        yield "the feed-forward kind must be the same in all layers but leading dense ones"
    elif EXPERTS in kinds and lead not in choices:
        yield f"{lead} leading dense layers are none of {list(choices)}"


def repeats(layout: Layout, period: int, lead: int) -> bool:
    """Returns whether the stack repeats after `period` layers, apart from `lead` dense layers; always for period 0."""
    if period == 0:
        return True
    pairs = zip(layout.layers, layout.layers[period:], strict=False)
    return all(a.mixers == b.mixers and (index < lead or a.ffn == b.ffn) for index, (a, b) in enumerate(pairs))


def _knob(space: BlockSpace, name: str, d_model: int) -> ArgKnob | None:
    if name in space.knobs:
        return space.knobs[name]
    if name == "width" and EXPANSION in space.knobs:
        widths = (ffn_width(float(choice), d_model) for choice in space.knobs[EXPANSION].choices)
        return ArgKnob(choices=tuple(dict.fromkeys(widths)))
    return None
