"""Choices for the whole model of a search space, then for the blocks of each layer; and the weights they can reach.

A `Frame` holds what is chosen once for a model: width, vocabulary, feed-forward, pattern. A parameter budget that no
frame can keep is an error. The layers of a frame cost what their blocks cost, so the least and greatest weight count at
a depth follow from the cheapest and dearest blocks, as many of each kind as the limits allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nas.core.block import Block
from nas.core.block_space import EXPANSION, BlockSpace, Choice, resolved
from nas.core.errors import InvalidInput
from nas.core.space import DENSE, ModelSpace, Range, SearchSpace
from nas.core.tower import Tower

Half = tuple[Block, ...]
"""Half of a layer: a mixer or several in parallel, or a feed-forward."""
Values = tuple[tuple[str, Choice], ...]
CostSpan = tuple[tuple[int, ...], tuple[int, ...]]
"""Least and greatest weights of a block, each in the order of `MEASURES`."""

MEASURES = ("total", "active", "non_embedding")
_SCAN = 60_000
"""Work that `check_reachable` does, as `Frames.work` counts it: up to a second. In a larger space only sampling finds a
budget impossible."""
_BLOCK_WORK = 3
"""Work of making a block. That of finding weights computed already is 1, about 10 microseconds."""
_ROLE_WORK = 4
"""Work of computing the weights of all mixers or feed-forwards at a depth."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The choices made once for a whole layout.

    Args:
        d_model: residual width.
        vocab: rows of the embedding table.
        ffn: kind of feed-forward; None where each layer chooses.
        leading_dense: first layers that stay dense where later ones are mixtures of experts.
        period: layers after which the stack repeats; 0: never.
        knobs: block kind -> values of its model-wide knobs.
        quantisation: of the file; "" where nothing is chosen.
        vectors: width of token vectors; 0 in language models.
        tower: what reads images, on one line; "" where nothing does.
    """

    d_model: int
    vocab: int
    ffn: str | None
    leading_dense: int
    period: int
    knobs: tuple[tuple[str, Values], ...]
    quantisation: str
    vectors: int
    tower: str = ""

    def values(self, kind: str) -> Values:
        """Returns the model-wide values of `kind`'s knobs."""
        return dict(self.knobs)[kind]


def choice_of(half: Half) -> str:
    """Returns the name of what a layer chose: a kind, or `mlstm&swa`; see `SearchSpace.mixer_choices`."""
    return "&".join(block.kind for block in half)


def ffn_width(expansion: float, d_model: int) -> int:
    """Returns the width: the nearest multiple of the quantiser's block, 256 (K-quants) or 32 (Q4_0, 8da4w)."""
    multiple = 256 if d_model >= 1024 else 32
    return max(multiple, round(expansion * d_model / multiple) * multiple)


class Frames:
    """All frames of a space, as a product of axes, and the blocks each frame allows."""

    def __init__(self, space: SearchSpace) -> None:
        model = space.model
        self.space = space
        self._spaces = {block.kind: block for block in space.mixers + space.ffn}
        self._shared = [
            (block.kind, name)
            for block in self._spaces.values()
            for name, knob in block.knobs.items()
            if knob.scope == "model"
        ]
        ffn: tuple[str | None, ...] = (None,)
        if model.ffn_scope == "model":
            ffn = tuple(block.kind for block in space.ffn)
        self.axes: tuple[tuple[Choice | None, ...], ...] = (
            model.d_model.choices,
            model.vocab.choices,
            ffn,
            model.leading_dense.choices,
            space.pattern.period.choices,
            *(self._spaces[kind].knobs[name].choices for kind, name in self._shared),
            model.vectors.choices,
            *((model.tower.choices,) if model.tower.choices else ()),
            *((space.quantisations,) if space.quantisations else ()),
        )
        self.count = math.prod(len(axis) for axis in self.axes)
        self._blocks: dict[tuple[str, int, Values], tuple[Block, ...]] = {}
        self._halves: dict[tuple[str, int, tuple[Values, ...]], tuple[Half, ...]] = {}
        self._costs: dict[tuple[str, int, Values], CostSpan | None] = {}
        self._role_spans: dict[Hashable, Span | None] = {}
        self.work = 0
        """How much was computed so far; depends on the calls alone, not on the machine."""

    def at(self, picks: Sequence[int]) -> Frame:
        """Returns the frame with choice number `picks[i]` on axis i."""
        values = [axis[pick] for axis, pick in zip(self.axes, picks, strict=True)]
        quantisation = str(values.pop()) if self.space.quantisations else ""
        tower = str(values.pop()) if self.space.model.tower.choices else ""
        vectors = int(values.pop() or 0)
        d_model, vocab, ffn, leading, period = values[:5]
        shared = dict(zip(self._shared, values[5:], strict=True))
        knobs = tuple(
            (kind, tuple((name, _chosen(value)) for (owner, name), value in shared.items() if owner == kind))
            for kind in self._spaces
        )
        kind = None if ffn is None else str(ffn)
        sizes = int(leading or 0), int(period or 0)
        return Frame(int(d_model or 0), int(vocab or 0), kind, *sizes, knobs, quantisation, vectors, tower)

    def picks(self, frame: Frame) -> list[int]:
        """Returns the choice numbers of `frame`: the inverse of `at`."""
        shared = [dict(frame.values(kind))[name] for kind, name in self._shared]
        values = [frame.d_model, frame.vocab, frame.ffn, frame.leading_dense, frame.period, *shared, frame.vectors]
        values += [frame.tower] if self.space.model.tower.choices else []
        values += [frame.quantisation] if self.space.quantisations else []
        return [axis.index(value) for axis, value in zip(self.axes, values, strict=True)]

    def all(self) -> Iterator[Frame]:
        """Yields every frame, first axis slowest."""
        for picks in itertools.product(*(range(len(axis)) for axis in self.axes)):
            yield self.at(picks)

    def blocks(self, frame: Frame, kind: str) -> tuple[Block, ...]:
        """Returns the valid blocks of `kind` that a layer may use in `frame`, in canonical form."""
        key = (kind, frame.d_model, frame.values(kind))
        if key not in self._blocks:
            free = (knob for knob in self._spaces[kind].knobs.values() if knob.scope == "layer")
            self.work += _BLOCK_WORK * math.prod(len(knob.choices) for knob in free)
            self._blocks[key] = tuple(dict.fromkeys(_blocks(self._spaces[kind], *key[1:])))
        return self._blocks[key]

    def halves(self, frame: Frame, choice: str) -> tuple[Half, ...]:
        """Returns what a layer may have in `frame` where it chooses a kind, or mixers in parallel as in `mlstm&swa`."""
        kinds = choice.split("&")
        key = (choice, frame.d_model, tuple(map(frame.values, kinds)))
        if key not in self._halves:
            self._halves[key] = tuple(itertools.product(*(self.blocks(frame, kind) for kind in kinds)))
        return self._halves[key]

    def costs(self, frame: Frame, choice: str) -> CostSpan | None:
        """Returns the least and greatest weight counts of a choice's blocks; None where there are no valid ones."""
        kinds = choice.split("&")
        spans = list(filter(None, (self._kind_costs(frame, kind) for kind in kinds)))
        if len(spans) < len(kinds):
            return None
        norms = frame.d_model * (len(kinds) - 1)  # mixers in parallel have one
        low, high = (map(sum, zip(*ends, strict=True)) for ends in zip(*spans, strict=True))
        return tuple(count - norms for count in low), tuple(count - norms for count in high)

    def _kind_costs(self, frame: Frame, kind: str) -> CostSpan | None:
        key = (kind, frame.d_model, frame.values(kind))
        if key not in self._costs:
            costs = [block_cost(block, frame.d_model) for block in self.blocks(frame, kind)]
            low, high = tuple(map(min, zip(*costs, strict=True))), tuple(map(max, zip(*costs, strict=True)))
            self._costs[key] = (low, high) if costs else None
        return self._costs[key]

    def role_span(self, frame: Frame, kinds: Iterable[str], limits: Mapping[str, Range], depth: int) -> Span | None:
        """Returns bounds of the weight counts of the blocks of one role in a stack; None where there is no such stack.

        Args:
            frame: of the stack.
            kinds: choices of the role, those that may occur.
            limits: choice -> how often it may occur.
            depth: of the stack.
        """
        kinds = tuple(kinds)
        counts = tuple((kind, limits[kind]) for kind in kinds if kind in limits)
        used = {part for kind in kinds for part in kind.split("&")}
        key = (frame.d_model, kinds, counts, depth, *(values for kind, values in frame.knobs if kind in used))
        self.work += 1
        if key not in self._role_spans:
            self.work += _ROLE_WORK
            self._role_spans[key] = _role_span({kind: self.costs(frame, kind) for kind in kinds}, limits, depth)
        return self._role_spans[key]


@dataclass(frozen=True, slots=True)
class Span:
    """Least and greatest weight counts, each in the order of `MEASURES`."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    def __or__(self, other: Span) -> Span:
        low = tuple(map(min, self.low, other.low))
        return Span(low, tuple(map(max, self.high, other.high)))


@lru_cache(maxsize=1 << 16)
def block_cost(block: Block, d_model: int) -> tuple[int, int, int]:
    """Returns the weights of a block with its pre-norm, in the order of `MEASURES`."""
    count = block.spec.count(block, d_model)
    return count.total + d_model, count.active + d_model, count.total + d_model


def half_cost(half: Half, d_model: int) -> tuple[int, ...]:
    """Returns the weights of half a layer with its one pre-norm, in the order of `MEASURES`."""
    if len(half) == 1:
        return block_cost(half[0], d_model)
    costs = zip(*(block_cost(block, d_model) for block in half), strict=True)
    return tuple(sum(counts) - d_model * (len(half) - 1) for counts in costs)


def frame_cost(frame: Frame, model: ModelSpace, depth: int) -> tuple[int, int, int]:
    """Returns the weights besides those of blocks and their pre-norms: tables, norms, projection; as `MEASURES`."""
    tables = frame.d_model * frame.vocab * (1 if model.tied else 2)
    norms = frame.d_model * (1 + frame.vectors + (2 * depth if model.norms == "both" else 0))
    tower = Tower.parse(frame.tower).weights(frame.d_model) if frame.tower else 0
    return norms + tables + tower, norms + tables, norms + tower


def span(frames: Frames, frame: Frame, depth: int) -> Span | None:
    """Returns bounds of the weight counts of layouts of `frame` at `depth`; None where there is no such layout.

    Exact for each count by itself, except that it is too wide where the stack repeats or the feed-forward is chosen
    per layer.
    """
    space = frames.space
    limits = space.limits if frame.ffn is None else _counts(space, frame, frame.ffn, depth)
    if limits is None:
        frames.work += 1
        return None
    mixers = frames.role_span(frame, space.mixer_choices, space.limits, depth)
    ffn = frames.role_span(frame, limits if frame.ffn else (block.kind for block in space.ffn), limits, depth)
    if mixers is None or ffn is None:
        return None
    base = frame_cost(frame, space.model, depth)
    low = tuple(map(sum, zip(base, mixers.low, ffn.low, strict=True)))
    return Span(low, tuple(map(sum, zip(base, mixers.high, ffn.high, strict=True))))


def depths(frames: Frames, frame: Frame) -> tuple[int, ...]:
    """Returns the depths at which `frame` can meet the parameter budget."""
    spans = ((int(depth), span(frames, frame, int(depth))) for depth in frames.space.model.depth.choices)
    return tuple(depth for depth, reach in spans if reach is not None and _overlaps(frames.space, reach))


def check_reachable(space: SearchSpace) -> None:
    """Checks that a space has a layout within its budget, as far as counting can tell.

    Raises:
        InvalidInput: it has none; with the range of weights that the choices reach. `where` is the key in the space.
    """
    frames = Frames(space)
    reached: Span | None = None
    for frame, depth in ((choices, depth) for choices in frames.all() for depth in space.model.depth.choices):
        if frames.work > _SCAN:
            return
        reach = span(frames, frame, int(depth))
        if reach is not None and _overlaps(space, reach):
            return
        reached = reached | reach if reached and reach else reached or reach
    raise _unreachable(space, reached)


def impossible_choices(space: BlockSpace, widths: Sequence[int]) -> dict[str, str]:
    """Returns the knobs of a kind with a choice that no layer can use: name -> why; "" where no block is valid at all.

    Args:
        space: the kind, with knobs for all required arguments.
        widths: residual widths of the space.
    """
    names = list(space.knobs)
    unseen = {(name, choice) for name in names for choice in space.knobs[name].choices}
    reasons: dict[tuple[str, Choice], str] = {}
    combinations = itertools.product(dict.fromkeys(widths), *(space.knobs[name].choices for name in names))
    possible = False
    for d_model, *choice in itertools.islice(combinations, _SCAN // (4 * _BLOCK_WORK)):
        picked = list(zip(names, choice, strict=True))
        try:
            _block(space.kind, dict(picked), int(d_model))
        except InvalidInput as error:
            for pick in picked:
                reasons.setdefault(pick, error.message)
            continue
        possible = True
        unseen.difference_update(picked)
        if not unseen:
            return {}
    if next(combinations, None) is not None:
        return {}  # too many to try them all
    if not possible:
        return {"": f"no block of these choices is valid: {next(iter(reasons.values()), 'there is none')}"}
    impossible: dict[str, str] = {}
    for name, value in sorted(unseen, key=str):
        impossible.setdefault(name, f"no layer can use {value}: {reasons[name, value]}")
    return impossible


def _block(kind: str, values: Mapping[str, Choice], d_model: int) -> Block:
    numbers = resolved(values)
    if EXPANSION in numbers:
        numbers["width"] = ffn_width(numbers.pop(EXPANSION), d_model)
    return Block.of(kind, **numbers).canonical(d_model)


def _blocks(space: BlockSpace, d_model: int, shared: Values) -> Iterator[Block]:
    free = [name for name, knob in space.knobs.items() if knob.scope == "layer"]
    for choice in itertools.product(*(space.knobs[name].choices for name in free)):
        try:
            yield _block(space.kind, dict(shared) | dict(zip(free, choice, strict=True)), d_model)
        except InvalidInput:
            continue  # such as key-value heads that do not divide the query heads


def _chosen(value: Choice | None) -> Choice:
    assert value is not None, "a knob has a value"
    return value


def _unreachable(space: SearchSpace, reached: Span | None) -> InvalidInput:
    if reached is None:
        where = "limits" if space.limits else "model.depth"
        return InvalidInput("no layout meets the limits at any depth", where=where)
    spans = {name: (reached.low[i], reached.high[i]) for i, name in enumerate(MEASURES)}
    for name, (low, high) in spans.items():
        limits = getattr(space.model.params, name)
        if low > (high if limits.max is None else limits.max) or high < limits.min:
            text = f"impossible parameter budget: the choices reach {low:,} to {high:,} weights ({name})"
            return InvalidInput(text, where=f"model.params.{name}")
    text = "; ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in spans.items())
    message = f"impossible parameter budget: no one choice of depth and widths meets all of it; reached: {text}"
    return InvalidInput(message, where="model.params")


def _overlaps(space: SearchSpace, reach: Span) -> bool:
    budget = space.model.params
    limits = (budget.total, budget.active, budget.non_embedding)
    return all(
        high >= want.min and (want.max is None or low <= want.max)
        for want, low, high in zip(limits, reach.low, reach.high, strict=True)
    )


def _counts(space: SearchSpace, frame: Frame, ffn: str, depth: int) -> dict[str, Range] | None:
    """Returns each feed-forward kind's count in a stack whose kind is chosen once; None: the limits forbid it."""
    lead = min(frame.leading_dense, depth) if ffn == "moe" else 0
    counts = {ffn: depth - lead} | ({DENSE: lead} if lead else {})
    for block in space.ffn:
        if not space.limits.get(block.kind, Range()).holds(counts.get(block.kind, 0)):
            return None
    return {kind: Range(min=count, max=count) for kind, count in counts.items()}


def _role_span(costs: Mapping[str, CostSpan | None], limits: Mapping[str, Range], depth: int) -> Span | None:
    if any(limits[kind].min for kind, cost in costs.items() if cost is None and kind in limits):
        return None
    low, high = [], []
    for measure in range(len(MEASURES)):
        ranges = [(*cost, limits.get(kind, Range())) for kind, cost in costs.items() if cost is not None]
        least = _fill(((lowest[measure], limit) for lowest, _, limit in ranges), depth)
        most = _fill(((-highest[measure], limit) for _, highest, limit in ranges), depth)
        if least is None or most is None:
            return None
        low.append(least)
        high.append(-most)
    return Span(tuple(low), tuple(high))


def _fill(kinds: Iterable[tuple[int, Range]], depth: int) -> int | None:
    """Returns the least sum of `depth` costs with each kind's count in its range; None where there is none."""
    ordered = sorted(kinds, key=lambda kind: kind[0])
    remaining = depth - sum(limit.min for _, limit in ordered)
    total = sum(cost * limit.min for cost, limit in ordered)
    for cost, limit in ordered:
        if remaining <= 0:
            break
        take = remaining if limit.max is None else min(remaining, limit.max - limit.min)
        total, remaining = total + cost * take, remaining - take
    return total if remaining == 0 else None
