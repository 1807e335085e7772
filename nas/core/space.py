"""The search space: data model and validation of the user's YAML; sampling is in `nas.search.proposers`.

Errors carry the path of keys; `nas.search.spaces.loader` turns that into file:line.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from nas.core.block import BLOCKS, Role
from nas.core.block_space import MAX_CHOICES, ArgKnob, BlockSpace, Knob, Scope, arguments, block_spaces, problem, refuse
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout, Norms
from nas.core.metrics import METRICS, measured_by, metric
from nas.core.published import named_layout
from nas.core.quality_config import QualityConfig, Rounding, TaskStage
from nas.core.quantisation import Quantisation
from nas.core.stats import P95_MIN_TOKENS
from nas.core.strict import Strict
from nas.core.task import make_task, task_kind
from nas.core.tower import Media, Tower
from nas.core.units import parse_count, parse_limit
from nas.core.workload import Workload

VECTORS = {"retrieval": 128, "detokenization": 1282}
"""Width of the vectors of spaces that name none: of tokens in LFM2-ColBERT, of spectra in LFM2-Audio's detokenizer."""
DENSE = "swiglu"
"""The feed-forward of leading dense layers, as in lfm2moe."""
WeightCount = Annotated[int, BeforeValidator(parse_count)]


class Range(Strict):
    """Least and greatest, both allowed."""

    min: int = Field(0, ge=0)
    max: int | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self

    def holds(self, value: int) -> bool:
        """Returns whether `value` is inside."""
        return self.min <= value and (self.max is None or value <= self.max)


class WeightRange(Range):
    """A range of weight counts, written as 350000000 or '350M'."""

    min: WeightCount = 0
    max: WeightCount | None = None

    @model_validator(mode="after")
    def _ordered(self) -> WeightRange:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"impossible parameter budget: max {self.max:,} is below min {self.min:,}")
        return self


class ParamBudget(Strict):
    """Limits on `Layout.params`; what is left out is free."""

    total: WeightRange = Field(WeightRange(), description="all weights; tied tables count once")
    active: WeightRange = Field(WeightRange(), description="weights that one token passes through")
    non_embedding: WeightRange = Field(WeightRange(), description="without embedding and output tables")


MEDIA_TASKS: dict[str, Media] = {"vision": "images", "audio": "sounds"}
"""Tasks of spaces whose models have a tower, and what it reads."""


class TowerKnob(Strict):
    """A choice between towers. In YAML: a line, or lists of `shape` and of sizes, or a list of these.

    `{shape: [768x12, 384x12], factor: [2, 4], tokens: [64, 256]}` are eight towers, and
    `{shape: ["sound:512x17", "sound:256x12"], channels: [64, 256]}` are four.
    """

    choices: tuple[str, ...] = Field(
        (), description="lines such as `768x12:tokens=64` or `sound:512x17`, see [images and sound](#images-and-sound)"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and ("choices" in data or not data):
            return data
        parts = data if isinstance(data, (list, tuple)) else [data]
        return {"choices": tuple(line for part in parts for line in _towers(part))}

    @field_validator("choices")
    @classmethod
    def _canonical(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        towers = tuple(Tower.parse(line).format() for line in lines)
        if len(set(towers)) < len(towers):
            raise ValueError(f"a tower occurs twice in {list(towers)}")
        if len(towers) > MAX_CHOICES:
            raise ValueError(_TOO_MANY_TOWERS)
        return towers


_TOO_MANY_TOWERS = f"at most {MAX_CHOICES} towers"


def _towers(part: Any) -> list[Any]:
    """Returns the lines of a part of a `TowerKnob`."""
    if not isinstance(part, Mapping):
        return [part]
    lists = [
        [f":{name}={value}" for value in (_items(listed) or [listed])]
        for name, listed in part.items()
        if name != "shape"
    ]
    lists.insert(0, [*map(str, _items(part.get("shape")) or [part.get("shape")])])
    if math.prod(map(len, lists)) > MAX_CHOICES:
        raise ValueError(_TOO_MANY_TOWERS)
    return ["".join(pick) for pick in itertools.product(*lists)]


class ModelSpace(Strict):
    """Knobs of the whole model."""

    d_model: Knob = Field(description="residual width, a multiple of 32")
    depth: Knob = Field(description="number of layers")
    vocab: Knob = Field(description="rows of the embedding table")
    vectors: Knob = Field(
        Knob(choices=(0,)),
        description="width of token vectors, under `task: retrieval`, 128 where left out; of spectra, under"
        " `task: detokenization`, 1,282",
    )
    tower: TowerKnob = Field(
        TowerKnob(),
        description="what reads images or sound, under `task: vision` or `audio`: encoder and connector",
    )
    tied: bool = Field(True, description="whether the output head is the embedding table")
    norms: Norms = Field("before", description="whether RMSNorms are on the input of blocks, on the output, or on both")
    params: ParamBudget = Field(ParamBudget(), description="how many weights a layout may have")
    ffn_scope: Scope = Field("model", description="whether the feed-forward kind is chosen once or per layer")
    leading_dense: Knob = Field(
        Knob(choices=(0,)), description="first layers that stay swiglu in a model whose feed-forward is moe"
    )


class Pattern(Strict):
    """`period: 0` lets every layer be its own; a period of p repeats the first p layers down the stack."""

    period: Knob = Field(Knob(choices=(0,)), description="layers after which the stack repeats; 0: never")


class RuntimeSpace(Strict):
    """A runtime that candidates are measured on."""

    name: str = Field(description="see `nas runtime list`")
    quantisation: str = Field(
        description="one that the runtime exports; of a list each candidate has one, references have the first, and"
        " quality is that of [rounded proxies](../explanation/proxies.md#after-quantisation)"
    )
    choices: tuple[str, ...] = Field((), description="the list of `quantisation`, which stands there instead")
    build: Literal["stock", "any"] = Field("stock", description="'any' also admits layouts that need the patched build")
    devices: tuple[str, ...] = Field((), description="those of the space's `devices` that it runs on; left out: all")

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(names := data.get("quantisation"), (list, tuple)):
            return data
        if not names or len(set(map(str, names))) < len(names):
            refuse([problem(("quantisation",), InvalidInput("must name one or more, each once"))])
        return {**data, "quantisation": names[0], "choices": names}

    @model_validator(mode="after")
    def _first_is_of_references(self) -> RuntimeSpace:
        if self.choices and self.choices[0] != self.quantisation:
            raise ValueError("choices follow from a list of quantisations: leave them out")
        return self

    @property
    def title(self) -> str:
        """Name and quantisations, such as 'llama.cpp q4_0' or 'llama.cpp q4_0|q8_0'."""
        return _title(self.name, self.choices or self.quantisation)

    def stored_as(self, layout: Layout) -> str:
        """Returns the quantisation of a layout's file."""
        return layout.quantisation if self.choices and layout.quantisation else self.quantisation


class Budget(Strict):
    """A hard constraint: a candidate that breaks it is infeasible, whatever else it does well."""

    metric: str = Field(description="one of the metrics below")
    max: str | float | None = Field(
        None, description="limit where less is better: '800ms', or '1.25x' of the published reference's figure"
    )
    min: str | float | None = Field(
        None, description="limit where more is better; of `quality` and `quality.recall`, '0.95x' and 0.95 are the same"
    )
    workload: str | None = Field(None, description="one of `workloads`; required for what is measured on a device")
    device: str | None = Field(None, description="one of `devices`; left out: every device")
    runtime: str | None = Field(None, description="one of `runtimes`, as `name` or 'name quantisation'; left out: all")

    @model_validator(mode="after")
    def _readable(self) -> Budget:
        row = metric(self.metric)
        selectors = {"workload": self.workload, "device": self.device, "runtime": self.runtime}
        if row.source == "proxy" and (selected := [key for key, value in selectors.items() if value is not None]):
            raise ValueError(f"{self.metric} is of the proxy, not of a device: leave {', '.join(selected)} out")
        limit = self.max if row.direction == "min" else self.min
        other = self.min if row.direction == "min" else self.max
        word = "max" if row.direction == "min" else "min"
        if limit is None or other is not None:
            raise ValueError(f"a budget on {self.metric} needs '{word}' and nothing else")
        parse_limit(limit, row.unit)
        return self

    @property
    def limit(self) -> tuple[float, bool]:
        """(value, whether it is a multiple of the published reference's figure on the same device)."""
        row = metric(self.metric)
        limit = self.max if row.direction == "min" else self.min
        assert limit is not None
        return parse_limit(limit, row.unit)

    @property
    def name(self) -> str:
        """Such as 'ttft@chat'; one figure has one name."""
        parts = [self.metric, *(f"@{self.workload}" for _ in (1,) if self.workload)]
        return "".join(parts) + "".join(f"/{part}" for part in (self.device, self.runtime) if part)


class Objective(Strict):
    """An axis of the front."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="what the axis is called in results")
    metric: str = Field(description="one of the metrics below")
    workload: str | None = Field(None, description="one of `workloads`; required for what is measured on a device")
    device: str | None = Field(None, description="one of `devices`; left out: all of them, see `aggregate`")
    runtime: str | None = Field(
        None, description="one of `runtimes`, as `name` or 'name quantisation'; left out: all, see `aggregate`"
    )
    aggregate: Literal["worst", "geomean"] = Field(
        "worst", description="over several devices or runtimes: of the ratio to the published reference"
    )

    @field_validator("metric")
    @classmethod
    def _metric_exists(cls, name: str) -> str:
        return metric(name).name


class References(Strict):
    """Run first in every study, to the top rung, exempt from budgets."""

    published: str = Field(description="layout, or published name such as LFM2-350M, that every ratio refers to")
    attention: str = Field(description="attention-only layout of equal size: where quality starts to count")
    further: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], str] = Field(
        default_factory=dict, description="name -> further layout, which is run and shown like these"
    )

    @field_validator("published", "attention")
    @classmethod
    def _parses(cls, text: str) -> str:
        return named_layout(text).format()

    @field_validator("attention")
    @classmethod
    def _differs(cls, text: str, info: ValidationInfo) -> str:
        if text == info.data.get("published"):
            raise ValueError("is the layout of `published`; give another one, such as with other key-value heads")
        return text

    @field_validator("further")
    @classmethod
    def _parse(cls, texts: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        layouts = {name: named_layout(text).format() for name, text in texts.items()}
        references = dict(info.data)
        for name, text in layouts.items():
            if name in references:
                raise ValueError(f"{name} is one of the two that every space has")
            if text in references.values():
                raise ValueError(f"{name} is the layout of another reference")
            references[name] = text
        return layouts

    def layouts(self) -> dict[str, Layout]:
        """Layouts by name."""
        texts = {"published": self.published, "attention": self.attention, **self.further}
        return {name: Layout.parse(text) for name, text in texts.items()}


class Remeasure(Strict):
    """The second measurement of what the first one chose, when the search has ended.

    Members of the front and the published reference take turns, round by round. What a study says of them is computed
    from these figures alone, so that luck in the search is not part of it.
    """

    rounds: int = Field(5, ge=2, le=100, description="times that each is measured; noise is estimated between rounds")
    repetitions: int = Field(2, ge=2, description="processes per workload and round")
    members: int = Field(6, ge=1, le=100, description="layouts of the front at most, those that stand out first")


class MeasurementSettings(Strict):
    """Measurement protocol (docs/explanation/measurement-protocol.md)."""

    screen_repetitions: int = Field(3, ge=2, description="processes per workload before training")
    confirm_repetitions: int = Field(10, ge=2, description="processes per workload at the top rung")
    max_attempts: int = Field(
        3, ge=1, description="further rounds per measurement, after failed runs, before it fails as retryable"
    )
    deadline_s: float = Field(600.0, gt=0, description="per process")
    remeasure: Remeasure | None = Field(
        Remeasure(), description="of the front when the search has ended; null: it is not measured again"
    )


class StopRules(Strict):
    """Conditions that end proposals, besides `trials`; running trials are finished."""

    hours: float | None = Field(None, gt=0, description="of a running orchestrator, over all launches; none: no limit")
    gain: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="expected gain of the next batch, as a share of the hypervolume; for proposers that tell one",
    )


class SearchSettings(Strict):
    """Settings of the proposer."""

    proposer: str = Field("ehvi", description="what chooses the next layouts")
    trials: int = Field(40, ge=1, description="layouts that a study proposes unless `--trials` says otherwise")
    seed: int = Field(0, ge=0, description="of everything random in the search")
    seeds: int = Field(6, ge=0, description="heuristic layouts proposed before the surrogate has data")
    pool: int = Field(384, ge=8, description="candidates scored per proposal")
    stop: StopRules = Field(StopRules(), description="when a study ends before its trials are used up")


class SearchSpace(Strict):
    """A whole space; `docs/reference/search-space.md` is generated from these fields."""

    v: Literal[1] = Field(1, description="version of this format")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="what studies of this space are listed under")
    doc: str = Field("", description="what the space is for; its first line is shown in lists")
    task: Literal["generation", "retrieval", "vision", "audio", "detokenization"] = Field(
        "generation",
        description="what models are for: to generate text, to find documents by a vector for each token, to answer"
        " questions about images or sound, or to make spectra of codes of sound. Workloads of retrieval encode a text"
        " of `prompt` tokens, those of detokenization `prompt` positions, those of vision and audio have an image or a"
        " sound in front of it unless they say otherwise; quality is of tasks of that kind,"
        " and references get the widest vectors, or the first tower, unless they name some",
    )
    layouts: tuple[str, ...] = Field(
        (), description="the only layouts to propose, one line each; instead of `model`, `mixers`, `ffn` and `limits`"
    )
    model: ModelSpace = Field(description="knobs of the whole model")
    mixers: tuple[BlockSpace, ...] = Field(min_length=1, description="what a layer may mix tokens with")
    parallel: tuple[tuple[str, ...], ...] = Field(
        (), description="further choices of a layer: kinds of mixers that run in parallel, such as `[[mlstm, swa]]`"
    )
    ffn: tuple[BlockSpace, ...] = Field(min_length=1, description="feed-forwards to choose from")
    pattern: Pattern = Field(Pattern(), description="whether the stack repeats")
    limits: dict[str, Range] = Field(
        default_factory=dict,
        description="block kind -> how many layers may use it; of mixers alone: parallel ones count as `mlstm&swa`",
    )
    devices: tuple[str, ...] = Field(
        ("local",),
        min_length=1,
        description="where candidates are measured: `local`, an id or the start of one, `tag:NAME`",
    )
    runtimes: tuple[RuntimeSpace, ...] = Field(min_length=1, description="what candidates are exported to")
    workloads: dict[str, Workload] = Field(min_length=1, description="named requests to measure")
    budgets: tuple[Budget, ...] = Field((), description="limits that every candidate must keep")
    objectives: tuple[Objective, ...] = Field(min_length=2, description="the axes of the front")
    references: References = Field(description="layouts that every candidate is compared with")
    quality: QualityConfig = Field(QualityConfig(), description="how quality is estimated")
    protocol: MeasurementSettings = Field(MeasurementSettings(), description="how candidates are measured")
    search: SearchSettings = Field(SearchSettings(), description="how candidates are proposed")

    @model_validator(mode="before")
    @classmethod
    def _from_layouts(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not data.get("layouts"):
            return _of_task(data)
        listed = _parsed(data["layouts"])
        return _of_task({**_derived(listed), **data, "layouts": [layout.format() for layout in listed]})

    @field_validator("quality")
    @classmethod
    def _teachers_are_layouts(cls, quality: QualityConfig, info: ValidationInfo) -> QualityConfig:
        references, rounding = info.data.get("references"), _chosen(info.data.get("runtimes", ()))
        if rounding is not None:
            quality = quality.after(Rounding(runtime=rounding.name, quantisations=rounding.choices))
        return quality if references is None else quality.taught_by(references.published)

    @field_validator("mixers", mode="before")
    @classmethod
    def _mixers(cls, data: Any) -> Any:
        return block_spaces(data, "mixer")

    @field_validator("ffn", mode="before")
    @classmethod
    def _ffn(cls, data: Any) -> Any:
        return block_spaces(data, "ffn")

    @model_validator(mode="after")
    def _names_exist(self) -> SearchSpace:
        problems = [*self._listing_problems()]
        if self.quality.library is not None and not self.layouts:
            error = InvalidInput("a library has scores of listed layouts: give `layouts`")
            problems.append(problem(("quality", "from"), error))
        problems += self._quantisation_problems()
        problems += self._task_problems()
        refuse([*problems, *self._parallel_problems(), *cross_problems(self.model_dump(mode="json"))])
        return self

    def _parallel_problems(self) -> Iterator[InitErrorDetails]:
        kinds = {block.kind: block for block in self.mixers}
        if self.parallel and self.model.norms != "before":
            yield problem(("model", "norms"), InvalidInput("mixers side by side have no norm behind them"))
        for index, names in enumerate(self.parallel):
            unknown = [(place, name) for place, name in enumerate(names) if name not in kinds]
            for place, name in unknown:
                yield problem(("parallel", index, place), UnknownName("mixer of this space", name, kinds))
            if len(set(names)) < max(2, len(names)):
                yield problem(("parallel", index), InvalidInput("must be two kinds of mixers or more, each once"))
            elif any(set(names) == set(earlier) for earlier in self.parallel[:index]):
                yield problem(("parallel", index), InvalidInput(f"{'&'.join(names)} occurs twice"))
            elif not unknown and math.prod(kinds[name].layer_choices for name in names) > MAX_CHOICES:
                text = f"{'&'.join(names)}: a layer would have more than {MAX_CHOICES} different pairs of blocks"
                yield problem(("parallel", index), InvalidInput(text))

    def _quantisation_problems(self) -> Iterator[InitErrorDetails]:
        chosen = [index for index, runtime in enumerate(self.runtimes) if runtime.choices]
        names = [runtime.name for runtime in self.runtimes]
        for index in chosen:
            if len(chosen) > 1 or names.count(names[index]) > 1:
                error = InvalidInput("candidates choose the quantisation of one runtime, which occurs once")
                yield problem(("runtimes", index, "quantisation"), error)
        least = min(int(depth) for depth in self.model.depth.choices)
        for index, runtime in enumerate(self.runtimes):
            for name in runtime.choices or (runtime.quantisation,):
                if "+" in name and (needed := _layers_of(name)) > least:
                    error = InvalidInput(
                        f"{name} names layer {needed - 1}, and a candidate may have {least} layers: name shares of the"
                        " depth, as in ffn.1/3"
                    )
                    yield problem(("runtimes", index, "quantisation"), error)
        if chosen and self.quality.library is not None:
            error = InvalidInput("scores of a library are not of quantised blocks: name one quantisation")
            yield problem(("runtimes", chosen[0], "quantisation"), error)
        for part, layouts in (
            ("layouts", dict(enumerate(map(Layout.parse, self.layouts)))),
            ("references", self.references.layouts()),
        ):
            for place, layout in layouts.items():
                if layout.quantisation and layout.quantisation not in self.quantisations:
                    error = InvalidInput(f"q={layout.quantisation} is no choice of a runtime's `quantisation`")
                    yield problem((part, place), error)

    def _task_problems(self) -> Iterator[InitErrorDetails]:
        """Finds parts that are of another task than the space's."""
        encodes, media = self.task in VECTORS, MEDIA_TASKS.get(self.task)
        for part, layouts in (
            ("layouts", dict(enumerate(map(Layout.parse, self.layouts)))),
            ("references", self.references.layouts()),
        ):
            for place, layout in layouts.items():
                if bool(layout.vectors) is not encodes:
                    yield problem((part, place), InvalidInput(_vectors_problem(encodes)))
                elif (layout.tower and layout.tower.media) != media:
                    yield problem((part, place), InvalidInput(_tower_problem(self.task)))
        if any(bool(choice) is not encodes for choice in self.model.vectors.choices):
            yield problem(("model", "vectors"), InvalidInput(_vectors_problem(encodes)))
        if {Tower.parse(line).media for line in self.model.tower.choices} != {media} - {None}:
            yield problem(("model", "tower"), InvalidInput(_tower_problem(self.task)))
        for name, workload in self.workloads.items():
            if workload.encodes is not encodes:
                what = "encode a text: leave `gen` out" if encodes else "decode: give `gen` of 1 or more"
                yield problem(("workloads", name, "gen"), InvalidInput(f"workloads of {self.task} {what}"))
            if workload.media not in (None, media):
                task = next(task for task, of_task in MEDIA_TASKS.items() if of_task == workload.media)
                error = InvalidInput(f"{workload.media} need a tower: give `task: {task}`")
                yield problem(("workloads", name, str(workload.media)), error)
        if media and not any(workload.media for workload in self.workloads.values()):
            yield problem(("workloads",), InvalidInput(f"no workload of {self.task} has {media}"))
        yield from self._metric_problems(encodes)
        if self.task != "generation" and self.quantisations:
            place = [runtime.choices != () for runtime in self.runtimes].index(True)
            error = InvalidInput(f"what a quantisation loses is not known for {self.task}: name one")
            yield problem(("runtimes", place, "quantisation"), error)
        yield from self._rung_problems()

    def _metric_problems(self, encodes: bool) -> Iterator[InitErrorDetails]:
        parts: Mapping[str, Sequence[Budget | Objective]] = {"budgets": self.budgets, "objectives": self.objectives}
        for part, items in parts.items():
            for index, item in enumerate(items):
                row, workload = METRICS[item.metric], self.workloads.get(item.workload or "")
                media = None if workload is None else workload.media
                if row.source != "proxy" and not measured_by(item.metric, encodes=encodes, media=media):
                    whose = (
                        f"workload {item.workload!r}: it has no {row.of_media}"
                        if row.of_media
                        else f"workloads of {self.task}"
                    )
                    error = InvalidInput(f"{item.metric} is not measured by {whose}")
                    yield problem((part, index, "metric"), error)
                elif row.of_vectors and item.workload is None:
                    text = f"{item.metric} needs a workload; valid: {', '.join(self.workloads)}"
                    yield problem((part, index), InvalidInput(text))

    def _rung_problems(self) -> Iterator[InitErrorDetails]:
        examples = {"retrieval": "boundfacts", "vision": "pictures", "audio": "sounds", "detokenization": "spectra"}
        example = examples.get(self.task)
        for index, rung in enumerate(self.quality.rungs):
            if example and (rung.lm_steps or rung.library):
                text = f"rung {rung.name!r} trains no {self.task}: give `tasks: {{{example}: {{steps: 300}}}}` alone"
                yield problem(("quality", "rungs", index), InvalidInput(text))
        placed: list[tuple[tuple[str | int, ...], dict[str, TaskStage]]] = [
            (("rungs", index), rung.tasks) for index, rung in enumerate(self.quality.rungs)
        ]
        placed += [] if self.quality.rescore is None else [(("rescore",), self.quality.rescore.tasks)]
        for where, tasks in placed:
            for name, stage in tasks.items():
                if task_kind(make_task(stage.task or name, stage.settings)) != self.task:
                    error = InvalidInput(f"{stage.task or name} is no task of {self.task}")
                    yield problem(("quality", *where, "tasks", name), error)

    def _listing_problems(self) -> Iterator[InitErrorDetails]:
        derived = _derived(self.listed()) if self.layouts else {}
        for part, value in derived.items():
            if getattr(self, part) != value:
                yield problem((part,), InvalidInput(f"follows from `layouts`: leave {part!r} out"))

    def listed(self) -> tuple[Layout, ...]:
        """Returns the layouts of a space that lists them, in each quantisation unless they name one; else none."""
        return tuple(variant for text in self.layouts for variant in self.variants(Layout.parse(text)))

    @property
    def quantisations(self) -> tuple[str, ...]:
        """What candidates choose from, the references' first; empty where nothing is chosen."""
        chosen = _chosen(self.runtimes)
        return () if chosen is None else chosen.choices

    def variants(self, layout: Layout) -> tuple[Layout, ...]:
        """Returns the layout in each quantisation that candidates choose from; itself where it names one."""
        if layout.quantisation or not self.quantisations:
            return (layout,)
        return tuple(replace(layout, quantisation=name) for name in self.quantisations)

    def listing(self, layouts: Iterable[Layout]) -> SearchSpace:
        """Returns this space with a list of layouts in place of its choices; raises `ValidationError`."""
        settings = self.model_dump(mode="json", exclude={"model", "mixers", "parallel", "ffn", "pattern", "limits"})
        return SearchSpace.model_validate(settings | {"layouts": [layout.format() for layout in layouts]})

    def block_space(self, kind: str) -> BlockSpace:
        """Returns the knobs of a block kind that the space uses; raises `UnknownName`."""
        for block in self.mixers + self.ffn:
            if block.kind == kind:
                return block
        raise UnknownName("block kind in this space", kind, [block.kind for block in self.mixers + self.ffn])

    @property
    def mixer_choices(self) -> tuple[str, ...]:
        """What a layer may mix tokens with: kinds of mixers, then those in parallel, as in `mlstm&swa`."""
        return (*(block.kind for block in self.mixers), *map("&".join, self.parallel))

    @property
    def labelled(self) -> dict[str, RuntimeSpace]:
        """The runtimes by the label of their figures: the name, or where it occurs more than once, the title."""
        names = [runtime.name for runtime in self.runtimes]
        return {runtime.name if names.count(runtime.name) == 1 else runtime.title: runtime for runtime in self.runtimes}

    @property
    def targets(self) -> list[tuple[str, str]]:
        """The devices with the labels of the runtimes that run there, in the order of the file."""
        return [(device, label) for device in self.devices for label in self.labels_on(device)]

    def labels_on(self, device: str) -> list[str]:
        """Returns the labels of the runtimes that run on a device; of one that the space does not name, all."""
        return [
            label
            for label, runtime in self.labelled.items()
            if not runtime.devices or device in runtime.devices or device not in self.devices
        ]

    def labels(self, runtime: str | None) -> list[str]:
        """Returns the labels of the runtimes that a budget or objective names: by name or title; None: all."""
        return [label for label, spec in self.labelled.items() if runtime in (None, spec.name, spec.title)]

    @property
    def measured(self) -> tuple[str, ...]:
        """Workloads that a budget or an objective needs, in the order of the file; at least one."""
        items: tuple[Budget | Objective, ...] = (*self.budgets, *self.objectives)
        used = {item.workload for item in items}
        # File sizes need no workload; the first one is used for their artifact.
        return tuple(name for name in self.workloads if name in used) or tuple(self.workloads)[:1]


def _of_task(data: Any) -> Any:
    """Fills in what follows from the task of a space as it is written, where that is readable."""
    if not isinstance(data, Mapping) or data.get("task") not in (*VECTORS, *MEDIA_TASKS):
        return data
    encodes = data["task"] in VECTORS
    usual = {"gen": 0} if encodes else {MEDIA_TASKS[data["task"]]: 1}
    workloads = {
        name: {**usual, **load} if isinstance(load, Mapping) else load
        for name, load in _mapping(data.get("workloads")).items()
    }
    filled = {**data, "workloads": workloads} if workloads else {**data}
    if isinstance(model := data.get("model"), Mapping):
        if encodes:
            filled["model"] = model = {"vectors": VECTORS[data["task"]], **model}
        with contextlib.suppress(ValidationError, InvalidInput, KeyError, IndexError):
            part: dict[str, Any] = (
                {"vectors": int(max(Knob.model_validate(model["vectors"]).choices))}
                if encodes
                else {"tower": Tower.parse(TowerKnob.model_validate(model["tower"]).choices[0])}
            )
            filled["references"] = _with_part(data.get("references"), part)
    return filled


def _with_part(references: Any, part: Mapping[str, Any]) -> Any:
    """Gives vectors or a tower to those of a space's references that are readable layouts without."""
    if isinstance(references, Mapping):
        return {name: _with_part(value, part) for name, value in references.items()}
    with contextlib.suppress(InvalidInput):
        layout = named_layout(references) if isinstance(references, str) else None
        if layout is not None and not any(getattr(layout, name) for name in part):
            return replace(layout, **part).format()
    return references


def _vectors_problem(encodes: bool) -> str:
    return "needs vectors of 1 number or more" if encodes else f"has vectors: give `task: {' or '.join(VECTORS)}`"


def _tower_problem(task: str) -> str:
    """Returns what is wrong with a tower, or with none, in a space of a task."""
    if (media := MEDIA_TASKS.get(task)) is not None:
        return f"needs a tower of {media}, such as {'768x12' if media == 'images' else 'sound:512x17'}"
    return "has a tower: give `task: vision` for images, `task: audio` for sound"


def cross_problems(data: Any) -> list[InitErrorDetails]:
    """Returns what is wrong between the parts of a space: names that refer to nothing, repeated names, too few tokens.

    Args:
        data: a space as JSON, or a document in which other parts may be wrong: those are not looked at.
    """
    data = _mapping(data)
    problems = [*_limit_problems(data), *_repeated(data), *_device_problems(data)]
    for part in ("budgets", "objectives"):
        for index, item in enumerate(_items(data.get(part))):
            problems += [problem((part, index, *key), error) for key, error in _selector_problems(data, _mapping(item))]
    return problems


def _limit_problems(data: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    if data.get("layouts") and "mixers" not in data:
        return
    parallel = ["&".join(_names(names)) for names in _items(data.get("parallel"))]
    kinds = [*_names(data.get("mixers"), "kind"), *parallel, *_names(data.get("ffn"), "kind")]
    for kind in _mapping(data.get("limits")):
        if kind not in kinds:
            yield problem(("limits", kind), UnknownName("block kind in limits", kind, kinds))
    leading = _mapping(data.get("model")).get("leading_dense", 0)
    choices = _items(leading["choices"]) if isinstance(leading, Mapping) and "choices" in leading else _items(leading)
    if leading not in (0, None) and [count for count in choices or [1] if count != 0] and DENSE not in kinds:
        yield problem(
            ("model", "leading_dense"), InvalidInput(f"leading_dense needs {DENSE!r} among the feed-forwards")
        )


def _device_problems(data: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    """Finds runtimes on devices that the space does not name, and devices without a runtime."""
    devices = _names(data.get("devices", ("local",)))
    used = [_names(_mapping(item).get("devices")) for item in _items(data.get("runtimes"))]
    for index, names in enumerate(used):
        for place, name in enumerate(names):
            if name not in devices:
                yield problem(("runtimes", index, "devices", place), UnknownName("device of this space", name, devices))
    for index, name in enumerate(devices):
        if used and all(names and name not in names for names in used):
            yield problem(("devices", index), InvalidInput(f"no runtime runs on {name}"))


def _selector_problems(
    data: Mapping[str, Any], item: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], InvalidInput]]:
    workloads = _mapping(data.get("workloads"))
    name, workload = item.get("metric"), item.get("workload")
    row = METRICS.get(name) if isinstance(name, str) else None
    if row is not None and row.source == "device" and workload is None:
        yield (), InvalidInput(f"{name} needs a workload; valid: {', '.join(map(str, workloads))}")
    for key, valid in (
        ("workload", list(workloads)),
        ("device", _names(data.get("devices", ("local",)))),
        ("runtime", [*_names(data.get("runtimes"), "name"), *_titles(data)]),
    ):
        if isinstance(value := item.get(key), str) and value not in valid and valid:
            yield (key,), UnknownName(key, value, valid)
    yield from _nowhere(data, item)
    if name == "decode_p95" and isinstance(workload, str) and workload in workloads:
        yield from _too_few_tokens(data, workload)


def _nowhere(data: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], InvalidInput]]:
    """Finds a budget or objective of a runtime on a device that it does not run on."""
    device, runtime = item.get("device"), item.get("runtime")
    runtimes = [_mapping(entry) for entry in _items(data.get("runtimes"))]
    titles = _titles(data)
    where = [
        _names(entry.get("devices"))
        for entry, title in zip(runtimes, titles, strict=True)
        if runtime in (entry.get("name"), title)
    ]
    if isinstance(device, str) and where and all(names and device not in names for names in where):
        yield ("device",), InvalidInput(f"{runtime} does not run on {device}: see its `devices`")


def _too_few_tokens(data: Mapping[str, Any], workload: str) -> Iterator[tuple[tuple[str, ...], InvalidInput]]:
    """Finds 95th percentiles for which no study could ever have enough tokens."""
    try:
        gen = Workload.model_validate(data["workloads"][workload]).gen
        repetitions = MeasurementSettings.model_validate(data.get("protocol", {})).confirm_repetitions
    except ValidationError:
        return  # reported at its own place
    if gen * repetitions < P95_MIN_TOKENS:
        text = f"decode_p95 needs {P95_MIN_TOKENS} tokens; {repetitions} repetitions of {workload!r} decode"
        yield (), InvalidInput(f"{text} {gen * repetitions}")


def _repeated(data: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    objectives = [_mapping(item).get("name") for item in _items(data.get("objectives"))]
    for part, key, values in (
        ("devices", (), _items(data.get("devices"))),
        ("runtimes", (), _titles(data)),
        ("objectives", ("name",), [name and f"objective {name!r}" for name in objectives]),
    ):
        for index, value in enumerate(values):
            if value is not None and value in values[:index]:
                yield problem((part, index, *key), InvalidInput(f"{value} occurs twice"))


def _titles(data: Mapping[str, Any]) -> list[str]:
    """Returns the titles of the runtimes."""
    items = map(_mapping, _items(data.get("runtimes")))
    return [_title(item.get("name"), item.get("choices") or item.get("quantisation")) for item in items]


def _title(name: Any, quantisations: Any) -> str:
    return f"{name} {'|'.join(_names(quantisations)) or quantisations}"


def _chosen(runtimes: Iterable[RuntimeSpace]) -> RuntimeSpace | None:
    """Returns the first runtime whose quantisation candidates choose."""
    return next((runtime for runtime in runtimes if runtime.choices), None)


def _layers_of(quantisation: str) -> int:
    """Returns the layers that a name needs; 0 for one that cannot be read, which its runtime refuses."""
    try:
        return Quantisation.parse(quantisation).depth
    except (InvalidInput, UnknownName):
        return 0


def _mapping(data: Any) -> Mapping[str, Any]:
    return data if isinstance(data, Mapping) else {}


def _items(data: Any) -> Sequence[Any]:
    return data if isinstance(data, (list, tuple)) else ()


def _names(data: Any, key: str = "") -> list[str]:
    """Returns the keys of a mapping, or the texts of a list, or those at `key` of its items."""
    items = list(data) if isinstance(data, Mapping) else _items(data)
    return [str(item[key] if isinstance(item, Mapping) and key in item else item) for item in items]


def _parsed(texts: Any) -> list[Layout]:
    """Reads the layouts of a space that lists them.

    Raises:
        ValidationError: it is no list of layouts, or one occurs twice; each problem at its place.
    """
    place = "layouts"
    if not isinstance(texts, (list, tuple)):
        refuse([problem((place,), InvalidInput("must be a list of layouts, one string each"))])
    numbers: dict[str, int] = {}
    layouts, problems = [], []
    for index, text in enumerate(texts):
        try:
            layout = named_layout(text if isinstance(text, str) else str(text))
            if numbers.setdefault(layout.id, index) != index:
                raise InvalidInput(f"is the layout of item {numbers[layout.id]} (items count from 0)")
            layouts.append(layout)
        except InvalidInput as error:
            problems.append(problem((place, index), error))
    blocks = {block.spec.role for layout in layouts for layer in layout.layers for block in layer.blocks}
    if not problems and len(blocks) < 2:
        problems.append(problem((place,), InvalidInput("no layout has a mixer, or none has a feed-forward")))
    refuse(problems)
    return layouts


def _derived(layouts: Sequence[Layout]) -> dict[str, Any]:
    """Returns the parts of a space that follow from a list of layouts: the values that these have."""
    names = ("d_model", "depth", "vocab", "vectors")
    shape = {name: _values(getattr(layout, name) for layout in layouts) for name in names}
    knobs = {name: Knob(choices=choices) for name, choices in shape.items()}
    towers = dict.fromkeys(layout.tower.format() for layout in layouts if layout.tower)
    return {
        "model": ModelSpace(
            **knobs,
            tower=TowerKnob(choices=tuple(towers)),
            tied=all(layout.tied for layout in layouts),
            norms=layouts[0].norms if len({layout.norms for layout in layouts}) == 1 else "before",
        ),
        "mixers": tuple(_derived_blocks("mixer", layouts)),
        "parallel": (),
        "ffn": tuple(_derived_blocks("ffn", layouts)),
        "pattern": Pattern(),
        "limits": {},
    }


def _derived_blocks(role: Role, layouts: Sequence[Layout]) -> Iterator[BlockSpace]:
    """Yields the kinds of blocks of a role, each with the values of the arguments that are given somewhere."""
    used = [{block for layer in layout.layers for block in layer.blocks} for layout in layouts]
    for kind in sorted({block.kind for blocks in used for block in blocks if block.spec.role == role}):
        named = {name for blocks in used for block in blocks if block.kind == kind for name, _ in block.args}
        knobs = {}
        for arg in BLOCKS[kind].args:
            values = [
                {arguments(block, layout.d_model)[arg.name] for block in blocks if block.kind == kind} - {None}
                for layout, blocks in zip(layouts, used, strict=True)
            ]
            if arg.name in named:
                scope: Scope = "layer" if any(len(choices) > 1 for choices in values) else "model"
                knobs[arg.name] = ArgKnob(
                    choices=_values(value for choices in values for value in choices), scope=scope
                )
        yield BlockSpace(kind=kind, knobs=knobs)


def _values(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))
