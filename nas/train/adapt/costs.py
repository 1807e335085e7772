"""What the selection chooses from: the options of each slot, with what they cost in quality and on the device.

Costs of alternatives are differences of measured layouts: the trained model's, and for each alternative the one in
which every second block of its kind is replaced. They add up only roughly.

Where a request names several quantisations, an alternative is a block in one of them. The model itself has the first
one everywhere, so its blocks in the others are alternatives, too, and it loses what rounding to the first one costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nas.core.block import Block
from nas.core.errors import CandidateFailed, Unsupported
from nas.core.layout import Layer, Layout
from nas.core.progress import Progress
from nas.core.quantisation import Quantisation
from nas.core.replacement import (
    RECALL_GROUP,
    Alternative,
    Slot,
    Stored,
    block_name,
    block_of,
    lender_of,
    parsed,
    with_blocks,
)
from nas.train.adapt.library import Library, Pair, Score, neighbouring_pairs
from nas.train.adapt.request import AdaptSettings
from nas.train.adapt.selection import Option, Term

_WHOLE_LAYER = "no layer"
"""Name of the option in a mixer's slot that leaves out the layer."""

Figures = Mapping[str, float]
Measure = Callable[[Layout], Figures]
"""Returns the budgets' metrics of a layout on the device.

Raises:
    Unsupported: the runtime does not carry it.
    CandidateFailed: it does not run.
"""


@dataclass(frozen=True)
class Problem:
    """What the selection chooses from.

    Args:
        options: slot -> its options with their losses and costs, first the block of the trained model.
        base: the trained model's figures.
        terms: of pairs of options.
    """

    options: Mapping[Slot, Sequence[Option[Slot]]]
    base: Figures
    terms: Sequence[Term[Slot]]


@dataclass(frozen=True, eq=False)
class Choices:
    """The alternatives of a trained model's slots.

    Args:
        library: of their blocks.
        layout: of the trained model; it names a quantisation where that is chosen.
        alternatives: of each slot.
        settings: which pairs have terms, and how much recall weighs.
        measured: returns the budgets' metrics of a layout on the device; raises what `Measure` does.
    """

    library: Library
    layout: Layout
    alternatives: Mapping[Slot, Sequence[Alternative]]
    settings: AdaptSettings
    measured: Measure

    def problem(self) -> Problem:
        """Returns what the selection chooses from.

        Alternatives that do not run on the device are left out before any is trained.
        """
        layout, log = self.layout, self.library.worker.log
        log(f"measuring the model: {layout.depth} layers, {layout.params.total / 1e6:,.1f}M weights")
        base = self.measured(layout)
        costs: dict[tuple[Block | None, Alternative], Figures | None] = {}
        kinds = sorted(self.kinds, key=lambda pair: (block_name(pair[0]), block_name(pair[1])))
        for number, (trained, alternative) in enumerate(kinds):
            what = f"{block_name(alternative)} in place of {block_name(trained)}"
            log(Progress("measured kinds of replacement", number, len(kinds), what))
            choice = self.every_second(trained, alternative)
            costs[trained, alternative] = self._added(choice, len(choice), base, what)
        log(Progress("measured kinds of replacement", len(kinds), len(kinds)))
        alternatives = self.carried(lambda alternative, trained: costs[trained, _kind(alternative)] is not None)
        alternatives = self.library.train(alternatives)
        scores = self.library.scores(alternatives)
        originals = {slot: own_of(layout, slot) for slot in alternatives}
        rounded = self.library.scores({slot: (one,) for slot, one in originals.items() if isinstance(one, Stored)})
        options: dict[Slot, list[Option[Slot]]] = {}
        for slot, listed in alternatives.items():
            trained = slot.block(layout)
            loss = self._loss(rounded[slot, originals[slot]]) if isinstance(originals[slot], Stored) else 0.0
            options[slot] = [Option(block_name(originals[slot]), loss, dict.fromkeys(base, 0.0))]
            for alternative in listed:
                cost, loss = costs[trained, _kind(alternative)], self._loss(scores[slot, alternative])
                assert cost is not None
                if not math.isfinite(loss):
                    log(f"depth {slot.depth}: {block_name(alternative)} is left out: its score is not finite")
                    continue
                needs = lent(layout, alternative, alternatives)
                options[slot].append(
                    Option(block_name(alternative), loss, cost, empty=alternative is None, needs=needs)
                )
        self._add_whole_layers(options, base)
        terms = [
            Term(((a, block_name(x)), (b, block_name(y))), self._loss(term))
            for ((a, x), (b, y)), term in self.terms(alternatives).items()
        ]
        return Problem(options, base, terms)

    def carried(self, by: Callable[[Alternative, Block | None], bool]) -> dict[Slot, tuple[Alternative, ...]]:
        """Returns the alternatives that a runtime carries: `by` tells it of one and the block that it replaces."""
        return {
            slot: tuple(alternative for alternative in listed if by(alternative, slot.block(self.layout)))
            for slot, listed in self.alternatives.items()
        }

    def terms(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> dict[Pair, Score]:
        """Returns the terms of pairs that are more than noise; the library holds all blocks."""
        pairs = neighbouring_pairs(alternatives, self.settings.pairs, self.settings.library.seed)
        significant = {pair: term for pair, term in self.library.pair_terms(pairs).items() if term.is_significant}
        if pairs:
            self.library.worker.log(f"{len(significant)} of {len(pairs)} terms of pairs are more than noise")
        return significant

    def every_second(self, trained: Block | None, alternative: Alternative) -> dict[Slot, Alternative]:
        """Returns the choice that replaces every second block that equals `trained`, by one that costs as given."""
        replacements = [
            (slot, one)
            for slot, listed in self.alternatives.items()
            if slot.block(self.layout) == trained
            for one in listed
            if _kind(one) == _kind(alternative)
        ]
        return dict(replacements[::2])

    @property
    def examples(self) -> list[Layout]:
        """The trained model's layout, and one for each kind of replacement."""
        choices = [self.every_second(*kind) for kind in self.kinds]
        return [self.layout, *(with_blocks(self.layout, choice)[0] for choice in choices)]

    @property
    def kinds(self) -> set[tuple[Block | None, Alternative]]:
        """Blocks of the trained model with alternatives of different costs."""
        return {
            (slot.block(self.layout), _kind(alternative))
            for slot, listed in self.alternatives.items()
            for alternative in listed
        }

    def _loss(self, score: Score) -> float:
        """Returns what a replacement costs in quality, the summand of the selection."""
        return score.text + self.settings.recall * score.kl.get(RECALL_GROUP, 0.0)

    def _add_whole_layers(self, options: dict[Slot, list[Option[Slot]]], base: Figures) -> None:
        """Adds the options that leave out a layer, where a block of it may be left out.

        Losses and costs of mixer and feed-forward do not add up to the layer's, and runtimes carry models with fewer
        layers that refuse a layer without a mixer or feed-forward. So the layer is scored and measured as a whole. Its
        option in the mixer's slot needs the empty one in the feed-forward's slot, and is what the layer has beyond
        that one. Where the runtime refuses a layer without a feed-forward, that one needs the layer's option, too.
        """
        layers = self.layout.layers
        places = {depth: (Slot(depth, "mixer"), Slot(depth, "ffn")) for depth in range(len(layers))}
        depths = [
            depth
            for depth, slots in places.items()
            if options.keys() >= {*slots} and any(None in self.alternatives[slot] for slot in slots)
        ]
        if len(layers) == 1:
            return
        scores = self.library.scores({Slot(depth, "layer"): (None,) for depth in depths})
        costs: dict[Layer, Figures | None] = {}
        for depth in depths:
            layer, mixer, ffn = layers[depth], Slot(depth, "mixer"), Slot(depth, "ffn")
            if layer not in costs:
                alike = [i for i in depths if layers[i] == layer][::2]
                choice: dict[Slot, Alternative] = {Slot(i, part): None for i in alike for part in ("mixer", "ffn")}
                costs[layer] = self._added(choice, len(alike), base, "a layer less")
            cost, score = costs[layer], self._loss(scores[Slot(depth, "layer"), None])
            if cost is None:
                continue
            if not math.isfinite(score):
                self.library.worker.log(f"depth {depth}: a layer less is left out: its score is not finite")
                continue
            alone = next((option for option in options[ffn] if option.empty), None)
            if alone is None:
                nothing = dict.fromkeys(base, 0.0)
                alone = Option(block_name(None), 0.0, nothing, empty=True, needs=(mixer, (_WHOLE_LAYER,)))
                options[ffn].append(alone)
            without = (ffn, alone.name)
            options[mixer] = [
                replace(option, excludes=without) if option.empty else option for option in options[mixer]
            ]
            beyond = {name: value - alone.costs.get(name, 0.0) for name, value in cost.items()}
            needs = (ffn, (alone.name,))
            options[mixer].append(Option(_WHOLE_LAYER, score - alone.loss, beyond, empty=True, needs=needs))

    def _added(self, choice: Mapping[Slot, Alternative], count: int, base: Figures, what: str) -> Figures | None:
        """Returns what each of `count` equal replacements adds to each metric; None: such a model does not run."""
        try:
            layout, _ = with_blocks(self.layout, choice)
            figures = self.measured(layout)
        except (Unsupported, CandidateFailed) as error:
            self.library.worker.log(f"{what} is left out: {error}")
            return None
        return {name: (figures[name] - value) / count for name, value in base.items() if name in figures}


def stored(
    layout: Layout, slot: Slot, alternatives: Sequence[Block | None], quantisations: Sequence[str]
) -> tuple[Alternative, ...]:
    """Returns alternatives of a place in each quantisation, those of its own block in all but the first among them."""
    block = slot.block(layout)
    assert block is not None, "slots have blocks"
    originals = [Stored(block, name) for name in quantisations[1:]]
    others = [Stored(one, name) for one in alternatives if one is not None for name in quantisations]
    return (*originals, *others, *(None for one in alternatives if one is None))


def own_of(layout: Layout, slot: Slot) -> Alternative:
    """Returns what the trained model has at a place, with the quantisation that its layout names."""
    block = slot.block(layout)
    if block is None or not layout.quantisation:
        return block
    return Stored(block, Quantisation.parse(layout.quantisation).others)


def lent(
    layout: Layout, alternative: Alternative, alternatives: Mapping[Slot, Sequence[Alternative]]
) -> tuple[Slot, tuple[str, ...]] | None:
    """Returns the slot, and names of its trained block however stored, whose keys and values a block reads, if any."""
    lender = lender_of(alternative)
    if lender is None:
        return None
    same = [one for one in alternatives.get(lender, ()) if block_of(one) == lender.block(layout)]
    return lender, tuple(map(block_name, (own_of(layout, lender), *same)))


def replaced_by(layout: Layout, picked: Mapping[Slot, Option[Slot]]) -> dict[Slot, Alternative]:
    """Returns what a selection has other than the trained model."""
    return {
        slot: None if option.empty else parsed(option.name, slot.part)
        for slot, option in picked.items()
        if option.name != block_name(own_of(layout, slot))
    }


def _kind(alternative: Alternative) -> Alternative:
    """Returns what blocks of equal costs have in common: for those that read keys and values, not of which layer."""
    if alternative is None or lender_of(alternative) is None:
        return alternative
    if isinstance(alternative, Stored):
        return replace(alternative, block=alternative.block.replace(kv=0))
    return alternative.replace(kv=0)
