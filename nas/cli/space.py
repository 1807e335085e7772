"""`nas space`: list, show, validate and sample search spaces."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, SeedOption, SpaceArgument, open_store_if_any
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.core.block import Scalar
from nas.core.block_space import ArgKnob, BlockSpace, Choice, Knob
from nas.core.layout import Layout
from nas.core.published import MODELS
from nas.core.scoring import measurement_keys
from nas.core.space import Objective, ParamBudget, RuntimeSpace, SearchSpace
from nas.core.units import show_count, show_share
from nas.measure.devices.attachments import own_attachments
from nas.measure.farm.farm import known_devices
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Support
from nas.search.proposers.sampling import Sampler
from nas.search.spaces import base_of, list_spaces, load_space, space_json, space_key
from nas.search.spaces.loader import Further
from nas.search.study.check import installed, missing_builds

SAMPLES = 200
_LIBRARY = {"sum": "sum of the library's scores", "assembled": "mix assembled and evaluated"}
_SHOWN_CHOICES = 6
_SHOWN_REASONS = 8

app = command_app(help="List, show, validate and sample search spaces.")


@dataclass(frozen=True, slots=True)
class RuntimeSupport:
    """Support of sampled layouts by a runtime.

    Args:
        runtime: its label.
        sampled: number of layouts.
        stock: layouts that run on the stock build.
        patched: further layouts that run on the patched build.
        admitted: layouts that the space admits, by its `build` key.
        refused_for: reason -> number of layouts refused for it.
        patched_for: reason -> number of admitted layouts that need the patched build for it.
        blocks: block kind -> (layouts with it, admitted ones among them).
    """

    runtime: str
    sampled: int
    stock: int
    patched: int
    admitted: int
    refused_for: dict[str, int]
    patched_for: dict[str, int]
    blocks: dict[str, tuple[int, int]]


@app.command("list")
def list_packaged(json: JsonFlag = False) -> None:
    """List the packaged search spaces."""
    spaces = list_spaces()
    if json:
        print_json({"spaces": [{"name": name, "doc": doc} for name, doc in spaces.items()]})
    else:
        print_table(("space", "what for"), spaces.items())


@app.command()
def show(
    space: SpaceArgument,
    support: Annotated[
        bool, typer.Option("--support", help="Sample layouts and show which of them each runtime supports.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show the choices, budgets and reference models of a search space."""
    loaded = load_space(space)
    layouts = draw_layouts(loaded) if support else []
    surveys, rows = survey(loaded, layouts) if support else [], support_by_layout(loaded, layouts)
    if json:
        extra = {"support": [dataclasses.asdict(one) for one in surveys], "layouts": rows} if support else {}
        print_json({"key": space_key(loaded), "doc": loaded.doc, **space_json(loaded), **extra})
        return
    fields = [*space_fields(loaded), *(field for one in surveys for field in _support_fields(one))]
    if len(surveys) > 1:
        both = sum(row["admitted"] for row in rows)
        fields.append(("support", f"all {len(surveys)} runtimes: {both} of {len(rows)} sampled layouts run on each"))
    print_fields(fields)


@app.command()
def validate(space: SpaceArgument, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Validate a search space. Every error is reported with file and line; exit code 3 if there are any.

    Runtimes, proposers and devices are those of this host and database.
    """
    loaded = load_space(space, installed_here(db, base_of(space)))
    notes = [*missing_builds(loaded), *_weak_quality(loaded)]
    if json:
        print_json({"valid": True, "name": loaded.name, "key": space_key(loaded), "notes": notes})
    else:
        say(f"{loaded.name}: valid" + (f", {len(loaded.layouts)} layouts" if loaded.layouts else ""))
        for note in notes:
            say(f"note: {note}")


@app.command()
def layouts(json: JsonFlag = False) -> None:
    """List the published models whose names stand for their layouts, in spaces and wherever a layout is given."""
    named = {name: Layout.parse(text) for name, text in MODELS.items()}
    if json:
        rows = [{"name": name, "layout": one.format(), **dataclasses.asdict(one.params)} for name, one in named.items()]
        print_json({"layouts": rows})
        return
    print_table(
        ("name", "weights", "active", "layout"),
        [(name, show_count(one.params.total), show_count(one.params.active), one) for name, one in named.items()],
    )


@app.command()
def sample(
    space: SpaceArgument,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=10_000, help="Number of layouts.")] = 5,
    seed: SeedOption = 0,
    json: JsonFlag = False,
) -> None:
    """Sample random layouts that all runtimes of a space support."""
    rng, draws = np.random.default_rng(seed), sampler(load_space(space))
    layouts = [draws.draw(rng) for _ in range(number)]
    if json:
        print_json(
            {"layouts": [{"id": one.id, "layout": one.format(), **dataclasses.asdict(one.params)} for one in layouts]}
        )
        return
    print_table(
        ("weights", "active", "layout"),
        [(show_count(one.params.total), show_count(one.params.active), one) for one in layouts],
    )


def _weak_quality(space: SearchSpace) -> Iterator[str]:
    """Yields what a study of a space will not know of its scores of quality."""
    if space.quality.library is None and space.quality.anchors is None:
        yield (
            "without quality.anchors the noise of scores is a guess, and tasks are not weighed by what they tell; "
            "'nas space show lfm2' has anchors"
        )


def installed_here(db: str | None, base: Path) -> Further:
    """Returns the checks of a space, with paths relative to `base`, against this host's runtimes and devices."""
    with open_store_if_any(db) as store:
        return installed(known_devices(store, own_attachments().read()), base=base)


def space_fields(space: SearchSpace) -> Iterator[tuple[str, str]]:
    """Yields (name, value) for the main properties of a space."""
    model = space.model
    yield "name", space.name
    yield "purpose", " ".join(space.doc.split())
    if space.layouts:
        yield "layouts", f"{len(space.layouts)}, listed; their values are:"
    yield "width", _show_knob(model.d_model)
    yield "depth", _show_knob(model.depth)
    yield "vocabulary", _show_knob(model.vocab)
    if towers := model.tower.choices:
        yield "tower", ", ".join(towers)
    yield "weights", _show_params(model.params)
    for role, blocks in (("mixer", space.mixers), ("feed-forward", space.ffn)):
        for block in blocks:
            yield role, _show_block(block, space)
    if space.parallel:
        yield "in parallel", ", ".join(map("&".join, space.parallel))
    for runtime in space.runtimes:
        where = f" on {', '.join(runtime.devices)}" if runtime.devices else ""
        yield "runtime", f"{runtime.title} ({runtime.build} build){where}"
    yield "devices", ", ".join(space.devices)
    for name in space.measured:
        load = space.workloads[name]
        out = "a vector for each" if load.encodes else f"{load.gen} out"
        media = f"{load.described_media()}, " if load.media else ""
        part = f", {at_once} at once" if (at_once := min(load.n_batch, load.n_ubatch)) < load.prompt else ""
        size = f"{media}{load.prompt} tokens in{part}, {out}, window {load.window}, {load.threads} thread(s)"
        yield "workload", f"{name}: {size}"
    for budget in space.budgets:
        limit, relative = budget.limit
        bound = f"{limit:g}x the published reference" if relative else budget.max or budget.min
        yield "budget", f"{budget.name} {'<=' if budget.max is not None else '>='} {bound}"
    for objective in space.objectives:
        yield "objective", _show_objective(objective, space)
    for name, layout in space.references.layouts().items():
        params = layout.params
        active = f", {show_count(params.active)} active" if params.active < params.total else ""
        yield f"reference ({name})", f"{layout}  ({show_count(params.total)} weights{active})"
    yield "rungs", " -> ".join(rung.name for rung in space.quality.rungs)


def plan_fields(space: SearchSpace, trials: int) -> Iterator[tuple[str, str]]:
    """Yields (name, value) for the work of a study of `trials` trials."""
    protocol, references = space.protocol, len(space.references.layouts())
    yield "space", space.name
    yield "devices", ", ".join(space.devices)
    yield "runtimes", ", ".join(runtime.title for runtime in space.runtimes)
    trials = min(trials, len(space.listed()) or trials)
    targets = len(space.measured) * len(space.targets)
    yield "screen", f"{trials} + {references} references x {targets} workload(s) x {protocol.screen_repetitions} runs"
    entering = trials
    for index, rung in enumerate(space.quality.rungs):
        steps = [f"{task} {stage.steps} steps" for task, stage in rung.tasks.items()]
        steps += [f"language model {rung.lm_steps} steps"] if rung.lm_steps else []
        steps += [_LIBRARY[rung.library]] if rung.library else []
        what = f"{', '.join(steps)}, {len(rung.seeds)} seed(s)"
        yield f"rung {index} ({rung.name})", f"at most {entering} + {references} references: {what}"
        entering = rung.promoted(entering)
    if (anchors := space.quality.anchors) is not None:
        yield "anchors", f"{anchors.layouts} + {references} references at every rung, {len(anchors.seeds)} seeds"
    yield "confirm", f"the top rung again, {protocol.confirm_repetitions} runs a workload"
    if (again := protocol.remeasure) is not None:
        runs = f"{again.rounds} rounds of {again.repetitions} runs a workload"
        yield "re-measure", f"the published reference and at most {again.members} of the front, {runs}"
    if (fresh := space.quality.rescore) is not None:
        tasks = [f" and {task} {stage.steps} steps" for task, stage in fresh.tasks.items()]
        what = f"the front and {references} references at the top rung{''.join(tasks)}"
        yield "re-score", f"{what}, {len(fresh.seeds)} fresh seeds"


def sampler(space: SearchSpace) -> Sampler:
    """Returns a sampler of layouts that all runtimes of the space support, as used by a search."""

    def supported(layout: Layout) -> bool:
        return all(RUNTIMES[runtime.name].supports(layout).runs_on(runtime.build) for runtime in space.runtimes)

    return Sampler(space, supported)


def draw_layouts(space: SearchSpace) -> list[Layout]:
    """Draws `SAMPLES` layouts regardless of runtime support; those of a list are all returned."""
    if space.layouts:
        return list(space.listed())
    rng, free = np.random.default_rng(0), Sampler(space)
    return [free.draw(rng) for _ in range(SAMPLES)]


def survey(space: SearchSpace, layouts: Sequence[Layout]) -> list[RuntimeSupport]:
    """Counts the support of `layouts` by each runtime of the space."""
    return [_survey_one(label, runtime, layouts) for label, runtime in space.labelled.items()]


def support_by_layout(space: SearchSpace, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """Returns for each layout the verdict and reasons of every runtime, and whether all admit it."""
    rows = []
    for layout in layouts:
        supports = {label: RUNTIMES[runtime.name].supports(layout) for label, runtime in space.labelled.items()}
        rows.append(
            {
                "layout": layout.format(),
                "admitted": all(supports[label].runs_on(runtime.build) for label, runtime in space.labelled.items()),
                "runtimes": {
                    name: {"verdict": support.verdict, "reasons": list(support.reasons)}
                    for name, support in supports.items()
                },
            }
        )
    return rows


def _survey_one(label: str, runtime: RuntimeSpace, layouts: Sequence[Layout]) -> RuntimeSupport:
    supports = [RUNTIMES[runtime.name].supports(layout) for layout in layouts]
    kinds = [{block.kind for layer in layout.layers for block in layer.blocks} for layout in layouts]
    admitted = [support.runs_on(runtime.build) for support in supports]
    return RuntimeSupport(
        runtime=label,
        sampled=len(layouts),
        stock=sum(support.verdict == "stock" for support in supports),
        patched=sum(support.verdict == "patched" for support in supports),
        admitted=sum(admitted),
        refused_for=_reasons(support for support, ok in zip(supports, admitted, strict=True) if not ok),
        patched_for=_reasons(support for support, ok in zip(supports, admitted, strict=True) if ok),
        blocks={
            kind: (
                sum(kind in names for names in kinds),
                sum(ok for names, ok in zip(kinds, admitted, strict=True) if kind in names),
            )
            for kind in sorted(set().union(*kinds))
        },
    )


def _reasons(supports: Iterable[Support]) -> dict[str, int]:
    """Counts layouts per reason, most common first."""
    return dict(Counter(reason for support in supports for reason in support.reasons).most_common())


def _support_fields(one: RuntimeSupport) -> list[tuple[str, str]]:
    refused = 1 - one.admitted / one.sampled
    refusals = f"{one.runtime}: refuses {show_share(refused)} of {one.sampled} sampled layouts"
    builds = f"{one.stock} run on the stock build, {one.patched} more on the patched one"
    blocks = [f"{kind}: {ok} of {total} layouts with it" for kind, (total, ok) in one.blocks.items()]
    return [
        ("support", f"{refusals}; {builds}"),
        *(("  supported", text) for text in blocks),
        *(("  refused", text) for text in _most_common(one.refused_for)),
        *(("  patched", text) for text in _most_common(one.patched_for)),
    ]


def _most_common(reasons: dict[str, int]) -> list[str]:
    return [f"{reason} ({count} layouts)" for reason, count in reasons.items()][:_SHOWN_REASONS]


def _show_knob(knob: Knob | ArgKnob) -> str:
    """Formats choices as a range if they are evenly spaced, else as a list."""
    choices = [_number(choice) for choice in knob.choices]
    if len(choices) == 1:
        return choices[0]
    scope = ", per layer" if knob.scope == "layer" else ""
    if (step := _step(knob.choices)) and len(choices) > 3:
        return f"{choices[0]} to {choices[-1]}{f' by {step}' if step != 1 else ''}{scope}"
    parts = choices if len(choices) <= _SHOWN_CHOICES else [*choices[: _SHOWN_CHOICES - 1], "...", choices[-1]]
    return f"{' | '.join(parts)}{scope}"


def _step(choices: Sequence[Choice]) -> Scalar | None:
    """Returns the distance between neighbours if it is the same for all."""
    numbers = [choice for choice in choices if not isinstance(choice, str)]
    steps = {after - before for before, after in pairwise(numbers)}
    return steps.pop() if len(steps) == 1 and len(numbers) == len(choices) else None


def _number(value: Choice) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _show_block(block: BlockSpace, space: SearchSpace) -> str:
    knobs = "; ".join(f"{name} {_show_knob(knob)}" for name, knob in block.knobs.items())
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


def _show_objective(objective: Objective, space: SearchSpace) -> str:
    workload = f" at {objective.workload}" if objective.workload else ""
    runtime = f" on {objective.runtime}" if objective.runtime else ""
    over = len(measurement_keys(space, objective))
    ratio = f", {objective.aggregate} of its ratios at {over} places" if over > 1 else ""
    return f"{objective.name}: {objective.metric}{workload}{runtime}{ratio}"
