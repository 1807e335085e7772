"""A search space as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from nas.core.block import Scalar
from nas.core.block_space import BlockSpace, Knob
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.scoring import places
from nas.core.space import Budget, Objective, ParamBudget, SearchSpace
from nas.core.units import show_count
from nas.core.workload import Workload

_SHOWN_CHOICES = 6


def space_fields(space: SearchSpace) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a person looks for first."""
    model = space.model
    yield "name", space.name
    yield "purpose", " ".join(space.doc.split())
    yield "width", show_knob(model.d_model)
    yield "depth", show_knob(model.depth)
    yield "vocabulary", show_knob(model.vocab)
    yield "weights", _show_params(model.params)
    for role, blocks in (("mixer", space.mixers), ("feed-forward", space.ffn)):
        for block in blocks:
            yield role, _show_block(block, space)
    for runtime in space.runtimes:
        yield "runtime", f"{runtime.name} {runtime.quantisation} ({runtime.build} build)"
    yield "devices", ", ".join(space.devices)
    for name in space.measured:
        yield "workload", f"{name}: {_show_workload(space.workloads[name])}"
    for budget in space.budgets:
        yield "budget", _show_budget(budget)
    for objective in space.objectives:
        yield "objective", _show_objective(objective, space)
    for name, layout in space.references.layouts().items():
        yield f"reference ({name})", show_layout(layout)
    yield "rungs", " -> ".join(rung.name for rung in space.quality.rungs)


def plan_fields(space: SearchSpace, trials: int) -> Iterator[tuple[str, str]]:
    """(name, value) of what a study of `trials` trials would do."""
    protocol, references = space.protocol, len(space.references.layouts())
    yield "space", space.name
    yield "devices", ", ".join(space.devices)
    yield "runtimes", ", ".join(f"{runtime.name} {runtime.quantisation}" for runtime in space.runtimes)
    places = len(space.measured) * len(space.devices) * len(space.runtimes)
    yield "screen", f"{trials} + {references} references x {places} workload(s) x {protocol.screen_repetitions} runs"
    entering = trials
    for index, rung in enumerate(space.quality.rungs):
        steps = [f"{task} {stage.steps} steps" for task, stage in rung.tasks.items()]
        steps += [f"language model {rung.lm_steps} steps"] if rung.lm_steps else []
        what = f"{', '.join(steps)}, {len(rung.seeds)} seed(s)"
        yield f"rung {index} ({rung.name})", f"at most {entering} + {references} references: {what}"
        entering = rung.promoted(entering)
    yield "confirm", f"the top rung again, {protocol.confirm_repetitions} runs a workload"


def show_layout(layout: Layout) -> str:
    """The one-line string with its weights, all of them and, where fewer, those a token passes through."""
    params = layout.params
    active = f", {show_count(params.active)} active" if params.active < params.total else ""
    return f"{layout}  ({show_count(params.total)} weights{active})"


def show_knob(knob: Knob) -> str:
    """Choices as a range where they are one, else as a list."""
    choices = [_number(choice) for choice in knob.choices]
    if len(choices) == 1:
        return choices[0]
    scope = ", each layer by itself" if knob.scope == "layer" else ""
    if (step := _step(knob.choices)) and len(choices) > 3:
        return f"{choices[0]} to {choices[-1]}{f' by {step}' if step != 1 else ''}{scope}"
    shown = choices if len(choices) <= _SHOWN_CHOICES else [*choices[: _SHOWN_CHOICES - 1], "...", choices[-1]]
    return f"{' | '.join(shown)}{scope}"


def _step(choices: Sequence[Scalar]) -> Scalar | None:
    """The distance between neighbours, where it is the same for all."""
    steps = {after - before for before, after in pairwise(choices)}
    return steps.pop() if len(steps) == 1 else None


def _number(value: Scalar) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _show_block(block: BlockSpace, space: SearchSpace) -> str:
    knobs = "; ".join(f"{name} {show_knob(knob)}" for name, knob in block.knobs.items())
    limit = space.limits.get(block.kind)
    if limit is None:
        return f"{block.kind}: {knobs}"
    most = "" if limit.max is None else f" to {limit.max}"
    return f"{block.kind}: {knobs}; in {limit.min}{most or ' or more'} layers"


def _show_params(params: ParamBudget) -> str:
    parts = []
    for name in ("total", "active", "non_embedding"):
        limits = getattr(params, name)
        if limits.min or limits.max is not None:
            most = "any" if limits.max is None else show_count(limits.max)
            parts.append(f"{name} {show_count(limits.min)} to {most}")
    return ", ".join(parts) or "any number"


def _show_workload(workload: Workload) -> str:
    return f"{workload.prompt} tokens in, {workload.gen} out, window {workload.window}, {workload.threads} thread(s)"


def _show_budget(budget: Budget) -> str:
    limit, relative = budget.limit
    sign = "<=" if budget.max is not None else ">="
    return f"{budget.name} {sign} {f'{limit:g}x the published reference' if relative else budget.max or budget.min}"


def _show_objective(objective: Objective, space: SearchSpace) -> str:
    workload = f" at {objective.workload}" if objective.workload else ""
    runtime = f" on {objective.runtime}" if objective.runtime else ""
    over = len(places(space, objective)) if METRICS[objective.metric].source != "proxy" else 1
    ratio = f", {objective.aggregate} of its ratios at {over} places" if over > 1 else ""
    return f"{objective.name}: {objective.metric}{workload}{runtime}{ratio}"
