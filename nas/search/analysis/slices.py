"""What the model that the search proposes with predicts as one knob varies: slices through its surrogate.

Layouts of the front are changed in one knob and in nothing else, which need not leave them inside the space: neither
its range of parameters nor its limits are held. A knob is an argument of a kind of block, set in all blocks of the kind
to each number of the space, or the number of layers with a kind of mixer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nas.core.block import Block, Scalar
from nas.core.block_space import EXPANSION
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout
from nas.core.model_choices import ffn_width
from nas.core.space import SearchSpace
from nas.infra.store.store import Store
from nas.search.analysis.record import readable
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proposers.ehvi import EhviSearch
from nas.search.proposers.sampling import Sampler
from nas.search.proposers.surrogate import MIN_POINTS, Surrogate
from nas.search.study.events import all_events
from nas.search.study.proposals import search_state

Floats = NDArray[np.float64]
Change = Callable[[Layout], Layout | None]
"""Returns the changed layout; None for one that cannot be changed so."""
ENGINE = "ehvi"
"""The proposer that has such a model."""
_MOST_LAYOUTS = 10
"""Layouts of the front that are changed: the first by the hypervolume that they add."""
_MOST_VALUES = 6
"""Numbers of layers of a slice: evenly spaced between the least and the greatest tried that fits all layouts."""


@dataclass(frozen=True)
class Slice:
    """Forecasts of the objectives at each value of a knob.

    Args:
        knob: its name.
        values: [V] of the knob, ascending.
        layouts: number of a layout -> [V] what it is changed to; all that can take every value.
        mean: [V, M] minimised coordinates of the objectives, the mean of these layouts.
        sd: [V, M] mean of their standard deviations: that of the mean is not greater, however errors are correlated.
    """

    knob: str
    values: tuple[float, ...]
    layouts: Mapping[int, Sequence[Layout]]
    mean: Floats
    sd: Floats


def study_slices(store: Store, study: StudySnapshot) -> tuple[list[Slice], str | None]:
    """Returns the slices of a study at its front, or none and the reason; fitting the model takes seconds.

    The model is fitted to all results; unlike in the search, layouts under way do not count. Random layouts of the
    space, which set its scales, are drawn without asking what a runtime carries: it need not be installed here.
    """
    space = study.space
    if space.search.proposer != ENGINE:
        return [], f"the study's proposer is {space.search.proposer!r}; only {ENGINE!r} has a model of all objectives"
    if space.layouts:
        return [], "the space lists its layouts, so that no knob can be varied alone"
    reason = f"they need a front, and {MIN_POINTS} results of each objective"
    front = [row.trial for row in study.front if row.on][:_MOST_LAYOUTS]
    if not front:
        return [], reason
    layouts = {trial: study.records[trial].layout for trial in front}
    with readable(study.name):
        state = search_state(space, (), all_events(store, study.id))
        results = min(
            sum(name in observation.objectives for observation in state.sorted_observations())
            for name in state.objectives
        )
        if state.reference_point is None or results < MIN_POINTS:
            return [], reason
        search = EhviSearch(Sampler(space), space.search.seed)
        search.restore(state.to_json())
        study_layouts = [record.layout for record in study.records.values()]
        return slices(search.surrogate(), space, layouts, study_layouts), None


def slices(
    surrogate: Surrogate, space: SearchSpace, layouts: Mapping[int, Layout], study_layouts: Sequence[Layout]
) -> list[Slice]:
    """Returns the slices of all knobs that some layouts can take all values of.

    Args:
        surrogate: the model.
        space: of the study.
        layouts: to change, by number.
        study_layouts: all layouts of the study.
    """
    by_knob = []
    for knob, changes in _knobs(space, study_layouts, list(layouts.values())):
        changed = {number: [change(layout) for change in changes.values()] for number, layout in layouts.items()}
        whole_layouts = {
            number: whole
            for number, layouts_or_none in changed.items()
            if len(whole := [x for x in layouts_or_none if x]) == len(layouts_or_none)
        }
        if not whole_layouts or len(changes) < 2:
            continue
        forecast = surrogate.predict([layout for whole in whole_layouts.values() for layout in whole])[0]
        shape = len(whole_layouts), len(changes), -1
        mean, sd = (moments.reshape(shape).mean(axis=0) for moments in (forecast.mean, forecast.sd))
        by_knob.append(Slice(knob, tuple(changes), whole_layouts, mean, sd))
    return by_knob


def _knobs(
    space: SearchSpace, study_layouts: Sequence[Layout], layouts: Sequence[Layout]
) -> Iterator[tuple[str, dict[float, Change]]]:
    """Yields each knob with its changes by value, ascending."""
    common = _mixers(*study_layouts)
    room = min((sum(_only(layer) is not None for layer in layout.layers) for layout in layouts), default=0)
    for mixer in space.mixers:
        counts = [min(room, sum(_is(layer, mixer.kind) for layer in layout.layers)) for layout in study_layouts]
        values = np.unique(np.linspace(min(counts, default=0), max(counts, default=0), _MOST_VALUES).round())
        yield f"{mixer.kind} layers", {float(value): _to_count(mixer.kind, int(value), common) for value in values}
    for block in space.mixers + space.ffn:
        for name, knob in block.knobs.items():
            numbers = sorted(choice for choice in knob.choices if not isinstance(choice, str))
            yield f"{block.kind} {name}", {float(number): _to_value(block.kind, name, number) for number in numbers}


def _to_value(kind: str, name: str, value: Scalar) -> Change:
    """Returns the change of an argument in all blocks of a kind; it needs one."""

    def changed(block: Block, d_model: int) -> Block:
        if block.kind != kind:
            return block
        arguments = {"width": ffn_width(value, d_model)} if name == EXPANSION else {name: value}
        return Block.of(kind, **{**dict(block.args), **arguments})

    def change(layout: Layout) -> Layout | None:
        if not any(block.kind == kind for layer in layout.layers for block in layer.blocks):
            return None
        width = layout.d_model
        return _checked(
            layout,
            [
                replace(
                    layer,
                    mixers=tuple(changed(block, width) for block in layer.mixers),
                    ffn=layer.ffn and changed(layer.ffn, width),
                )
                for layer in layout.layers
            ],
        )

    return change


def _to_count(kind: str, count: int, common: Sequence[Block]) -> Change:
    """Returns the change of the number of layers with a kind of mixer, at evenly spaced places.

    Layers too many get the commonest other mixer of the layout, and further ones its commonest of the kind; where it
    has none, the first of `common`.
    """

    def change(layout: Layout) -> Layout | None:
        present = sum(_is(layer, kind) for layer in layout.layers)
        more, missing, layers = count > present, abs(count - present), list(layout.layers)
        usual = [mixer for mixer in (*_mixers(layout), *common) if (mixer.kind == kind) == more]
        free = [index for index, layer in enumerate(layers) if _only(layer) and _is(layer, kind) != more]
        if missing > len(free) or not usual:
            return None
        for index in (free[(2 * step + 1) * len(free) // (2 * missing)] for step in range(missing)):
            layers[index] = replace(layers[index], mixers=(usual[0],))
        return _checked(layout, layers)

    return change


def _checked(layout: Layout, layers: Sequence[Layer]) -> Layout | None:
    try:
        return layout.with_layers(layers)
    except InvalidInput:
        return None


def _mixers(*layouts: Layout) -> list[Block]:
    """Returns the mixers that layers have alone, the commonest first."""
    counts = Counter(mixer for layout in layouts for layer in layout.layers if (mixer := _only(layer)))
    return [mixer for mixer, _ in counts.most_common()]


def _only(layer: Layer) -> Block | None:
    """Returns the mixer of a layer that has one alone, and weights of its own."""
    return layer.mixers[0] if len(layer.mixers) == 1 else None


def _is(layer: Layer, kind: str) -> bool:
    mixer = _only(layer)
    return mixer is not None and mixer.kind == kind
