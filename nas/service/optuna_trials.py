"""A trial as Optuna has it: parameters that people can read, objectives in their own units, budgets as constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nas.core.block import Block, Scalar
from nas.core.block_space import EXPANSION, BlockSpace
from nas.core.frame import ffn_width
from nas.core.layout import Layout
from nas.core.scoring import check_budgets
from nas.core.space import SearchSpace
from nas.core.trial import TrialState
from nas.service.record import Record, StudyRecord
from nas.service.table import measured

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

NOISE = "measured under noise"
"""The constraint that keeps trials off Optuna's front that are not on ours."""


class Parameters:
    """Layouts of a space as Optuna's parameters.

    `d_model`, `vocab` and `depth`; `KIND.layers`, how many layers use a block kind; `KIND.KNOB`, where one value holds
    for all layers; and for each layer from 0 on `layerNN.mixer`, `layerNN.ffn` and `layerNN.KIND.KNOB`. Knobs with one
    choice are left out, and so is what a layout does not have.

    Args:
        space: of the layouts.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._slots = int(max(space.model.depth.choices))

    def of(self, layout: Layout) -> dict[str, tuple[Scalar | str, BaseDistribution]]:
        """Name -> (value, distribution), equal distributions for all layouts of the space."""
        return dict(self._all(layout))

    def _all(self, layout: Layout) -> Iterator[tuple[str, tuple[Scalar | str, BaseDistribution]]]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        model = self._space.model
        depths = [int(depth) for depth in model.depth.choices]
        yield "depth", (layout.depth, IntDistribution(min(depths), max(depths)))
        yield "d_model", (layout.d_model, CategoricalDistribution(model.d_model.choices))
        yield "vocab", (layout.vocab, CategoricalDistribution(model.vocab.choices))
        used = Counter(block.kind for layer in layout.layers for block in layer.blocks)
        for role, kinds in (("mixer", self._space.mixers), ("ffn", self._space.ffn)):
            names = [kind.kind for kind in kinds]
            for name in names:
                yield f"{name}.layers", (used[name], IntDistribution(0, self._slots))
            for number, layer in enumerate(layout.layers):
                block = layer.mixer if role == "mixer" else layer.ffn
                if block is not None and block.kind in names:
                    yield f"layer{number:02}.{role}", (block.kind, CategoricalDistribution(names))
                    yield from self._knobs(kinds[names.index(block.kind)], block, number, layout.d_model)

    def _knobs(
        self, kind: BlockSpace, block: Block, number: int, d_model: int
    ) -> Iterator[tuple[str, tuple[Scalar, BaseDistribution]]]:
        from optuna.distributions import CategoricalDistribution

        for name, knob in kind.knobs.items():
            choices, argument = knob.choices, name
            if name == EXPANSION:
                widths = {
                    ffn_width(float(each), int(to)) for each in choices for to in self._space.model.d_model.choices
                }
                choices, argument = tuple(sorted(widths)), "width"
            value = block.resolve(d_model).get(argument)
            if len(choices) > 1 and value is not None:
                place = f"layer{number:02}." if knob.scope == "layer" else ""
                yield f"{place}{kind.kind}.{argument}", (value, CategoricalDistribution(choices))


def frozen(record: StudyRecord, each: Record, parameters: Parameters) -> FrozenTrial:
    """An ended trial as Optuna stores it.

    A complete trial has values. One that broke a budget or was stopped at a rung is pruned, since it has no final
    quality; one that failed or was cancelled is failed.
    """
    from optuna.trial import create_trial

    found = parameters.of(each.layout)
    trial = create_trial(
        state=_state(each),
        values=_values(record, each) if each.trial.status.state is TrialState.COMPLETE else None,
        params={name: value for name, (value, _) in found.items()},
        distributions={name: distribution for name, (_, distribution) in found.items()},
        user_attrs=_attributes(each),
        constraints=_constraints(record, each),
    )
    trial.datetime_start = datetime.fromtimestamp(each.trial.created)
    trial.datetime_complete = datetime.fromtimestamp(each.trial.updated)
    return trial


def _state(each: Record) -> Any:
    from optuna.trial import TrialState as OptunaState

    state = each.trial.status.state
    if state is TrialState.COMPLETE:
        return OptunaState.COMPLETE
    return OptunaState.PRUNED if state in (TrialState.INFEASIBLE, TrialState.STOPPED) else OptunaState.FAIL


def _values(record: StudyRecord, each: Record) -> list[float]:
    axes = each.axes(record.space, record.published)
    assert None not in axes, f"trial {each.trial.number} is complete but lacks an objective"
    return [axis.value for axis in axes if axis is not None]


def _constraints(record: StudyRecord, each: Record) -> dict[str, float]:
    checks = check_budgets(record.space, each.figures, record.published or {}, final=True)
    return {check.name: check.log_excess for check in checks if check.log_excess is not None} | {
        NOISE: float(each.noisy)
    }


def _attributes(each: Record) -> dict[str, Any]:
    status, params = each.trial.status, each.layout.params
    return {
        "trial": each.trial.number,
        "layout": each.layout.format(),
        "layout_id": each.layout.id,
        "state": status.state.value,
        "rung": status.rung,
        "reason": status.reason,
        "origin": each.trial.origin,
        "operator": each.trial.operator,
        "parents": list(each.trial.parents),
        "params_total": params.total,
        "params_active": params.active,
        "params_non_embedding": params.non_embedding,
        "quality": each.quality.value if each.quality else None,
        "quality_sd": each.quality.sd if each.quality else None,
        **measured(each),
    }
