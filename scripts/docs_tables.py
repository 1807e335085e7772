"""Markdown tables of the keys, blocks, metrics and tasks of search spaces, made from the types that read them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from nas.core.block import BLOCKS, Arg
from nas.core.block_space import BlockSpace, Knob
from nas.core.metrics import METRICS, searchable
from nas.core.space import SearchSpace
from nas.core.task import TASKS
from nas.core.units import parse_count, show_count
from nas.train.adapt.model_types import MODEL_TYPES
from nas.train.compare.lfm2_report import size_class
from nas.train.compare.published import REFERENCES

_ARGS = ("knob", "value", "default", "meaning")
_SIGNS: dict[type, str] = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt", MultipleOf: "multiple_of"}
_WORDS = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}", "multiple_of": "multiple of {}"}


def model_tables() -> str:
    """Returns a table of keys for the space and for each nested model."""
    parts = []
    for path, model in _models(SearchSpace, "", set()):
        rows = [_row(name, field) for name, field in model.model_fields.items()]
        title = f"### `{path}`\n\n" if path else "### Top level\n\n"
        parts.append(f"{title}{_summary(model)}\n\n{_table(('key', 'value', 'default', 'meaning'), rows)}")
    return "\n\n".join(parts)


def block_tables() -> str:
    """Returns a table of arguments for every block kind: its knobs in a space."""
    parts = []
    for name in sorted(BLOCKS, key=lambda name: (BLOCKS[name].role != "mixer", name)):
        kind = BLOCKS[name]
        form = f"`{kind.letter}{kind.syntax}`"
        rows = [(f"`{arg.name}`", _arg_range(arg), _arg_default(arg), arg.doc) for arg in kind.args]
        if kind.role == "ffn":
            rows.append(("`expansion`", "number above 0", "", "width / d_model; stands for `width`"))
        parts.append(f"### `{name}` ({kind.role})\n\n{kind.doc}; written {form}.\n\n{_table(_ARGS, rows)}")
    return "\n\n".join(parts)


def model_types_table() -> str:
    """Returns the table of transformers' types: read, or what no layout says of them."""
    rows = [(f"`{name}`", kind.example, "; ".join(kind.missing) or "**read**") for name, kind in MODEL_TYPES.items()]
    read = sum(not kind.missing for kind in MODEL_TYPES.values())
    table = _table(("`model_type`", "for example", "read, or what no layout says"), rows)
    return f"{read} types are read, {len(rows) - read} are refused.\n\n{table}"


def reference_table() -> str:
    """Returns the models that a family is compared with."""
    rows = [
        (
            f"[{name}]({reference.source})",
            size_class(reference.parameters),
            f"{reference.parameters:,}",
            show_count(reference.active),
            f"`{reference.architecture}`",
        )
        for name, reference in REFERENCES.items()
    ]
    return _table(("model", "class", "parameters", "active", "llama.cpp's architecture"), rows)


def metric_table() -> str:
    """Returns the metrics that budgets and objectives can name."""
    rows = [
        (f"`{metric.name}`", metric.unit, "more" if metric.direction == "max" else "less", metric.doc)
        for metric in map(METRICS.__getitem__, searchable())
    ]
    return _table(("metric", "unit", "better", "meaning"), rows)


def task_table() -> str:
    """Returns the quality tasks and their settings."""
    rows = []
    for name in TASKS:
        kind = TASKS[name]
        settings = ", ".join(f"`{field.name}: {field.default}`" for field in dataclasses.fields(kind))
        rows.append((f"`{name}`", (kind.__doc__ or "").strip().splitlines()[0], settings))
    return _table(("task", "what it asks for", "settings and defaults"), rows)


def post_training_table(result: Mapping[str, Any]) -> str:
    """Returns exact answers after each stage and in each file, from `benchmarks.post_training train`."""
    tasks = list(result["means"][0]["tasks"])
    order = list(dict.fromkeys(mean["weights"] for mean in result["means"]))
    rows = [
        (
            f"`{mean['weights']}`",
            mean["runtime"],
            f"{mean['seeds']}",
            _share(mean["exact"]),
            "" if mean["change"] is None else _share(mean["change"], sign="+"),
            *(f"{100 * mean['tasks'][task]:.0f}" for task in tasks),
        )
        for mean in sorted(result["means"], key=lambda mean: order.index(mean["weights"]))
    ]
    stages = result["seeds"].values()
    times = ", ".join(
        f"`{kind}` {stage['tokens']:,} tokens in {stage['steps']:,} steps, "
        f"{min(seed['stages'][kind]['seconds'] for seed in stages):.0f} to "
        f"{max(seed['stages'][kind]['seconds'] for seed in stages):.0f} s and "
        f"{max(seed['stages'][kind]['peak_memory_mb'] for seed in stages):.0f} MB"
        for kind, stage in next(iter(stages))["stages"].items()
    )
    about = (
        f"{len(stages)} seeds of a member with {result['parameters']:,} weights (`{result['layout']}`), "
        f"{len(result['tasks'])} questions apart from the training data. On one core; tokens of seed 0, times of all: "
        f"{times}. Means over seeds with 95 % intervals (Student's); of tasks the mean share in percent."
    )
    head = ("weights", "runtime", "seeds", "exact, %", "less PyTorch, points", *tasks)
    return f"{about}\n\n{_table(head, rows)}"


def _share(value: Mapping[str, Any], sign: str = "") -> str:
    if value["ci95"] is None:
        return f"{100 * value['mean']:{sign}.1f}"
    low, high = value["ci95"]
    return f"{100 * value['mean']:{sign}.1f} ({100 * low:{sign}.1f} to {100 * high:{sign}.1f})"


def passes_table(result: Mapping[str, Any]) -> str:
    """Returns what packing saves, from `benchmarks.post_training passes`."""
    rows = [
        (
            f"`{step['layout']}`",
            f"{step['batch']}",
            f"{100 * step['padding']:.0f} %",
            f"{step['packed_over_padded']:.2f} ({step['quartiles'][0]:.2f} to {step['quartiles'][1]:.2f})",
        )
        for step in result["steps"]
    ]
    return _table(("layout", "conversations of a step", "padding", "time packed / padded"), rows)


def merges_table(result: Mapping[str, Any]) -> str:
    """Returns peak memory of merges, from `benchmarks.post_training memory`: by method and size."""
    peaks = {(merge["method"], merge["model_mb"]): merge["peak_mb"] for merge in result["merges"]}
    sizes = sorted({size for _, size in peaks})
    rows = [
        (f"`{method}`", *(f"{peaks[method, size]:,.0f} MB" for size in sizes))
        for method in dict.fromkeys(method for method, _ in peaks)
    ]
    return _table(("method", *(f"models of {size:,.0f} MB" for size in sizes)), rows)


def _models(model: type[BaseModel], path: str, models: set[type]) -> Iterator[tuple[str, type[BaseModel]]]:
    models.add(model)
    yield path, model
    for name, field in model.model_fields.items():
        for inner, suffix in _nested(field.annotation):
            if inner in models or issubclass(inner, Knob | BlockSpace):
                continue  # documented once, or in prose
            yield from _models(inner, f"{path}.{name}{suffix}".lstrip("."), models)


def _nested(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yields the models in an annotation, each with a suffix of its key: '[]' for lists, '.NAME' for mappings."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _nested(args[0], suffix)
    elif origin in (dict, Mapping):
        yield from _nested(args[1], f"{suffix}.NAME")
    elif origin in (tuple, list):
        yield from _nested(args[0], f"{suffix}[]")
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            yield from _nested(arg, suffix)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    value = "number of weights" if any(_reads_count(item) for item in field.metadata) else _value(field.annotation)
    limits = [_WORDS[sign].format(getattr(item, sign)) for item in field.metadata if (sign := _SIGNS.get(type(item)))]
    text = ", ".join([value, *limits])
    return (
        f"`{name}`",
        text,
        "required" if field.is_required() else _default_text(field.get_default(call_default_factory=True)),
        field.description or "",
    )


def _reads_count(item: object) -> bool:
    return isinstance(item, BeforeValidator) and item.func is parse_count


def _value(annotation: Any) -> str:
    """Returns the text that describes values of this type."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return "number of weights" if any(map(_reads_count, args)) else _value(args[0])
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_value(arg) for arg in args if arg is not type(None)))
    if args[:1] == (BlockSpace,):
        return "KIND: knobs"
    if origin in (tuple, list):
        return f"list of {_value(args[0])}"
    if origin in (dict, Mapping):
        return f"NAME: {_value(args[1])}"
    if annotation is Knob:
        return "knob"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys below"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _default_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Knob):
        return _default_text(value.choices)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, BaseModel | dict):
        return "as below" if value else "none"
    if isinstance(value, tuple | list):
        if any(isinstance(item, BaseModel) for item in value):
            return "as below"
        return ", ".join(f"`{item}`" for item in value) or "none"
    return f"`{value}`" if value != "" else ""


def _arg_range(arg: Arg) -> str:
    if arg.type is bool:
        return "0 or 1"
    word = "whole number" if arg.type is int else "number"
    if arg.low is None and arg.high is None:
        return word
    if arg.high is None:
        return f"{word}, >= {arg.low:,g}"
    low = "up" if arg.low is None else f"{arg.low:,}"
    return f"{word}, {low} to {arg.high:,}"


def _arg_default(arg: Arg) -> str:
    if arg.required:
        return "required"
    return "derived" if arg.default is None else f"`{arg.default:g}`"


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").partition("\n\n")[0].split())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
