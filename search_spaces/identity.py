"""Search spaces as data: key and differences, by which `--resume` decides, and YAML to start another one from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nas.core.canonical import content_hash
from nas.core.space import VECTORS, SearchSpace
from nas.search.spaces.yaml_text import dump_yaml


def space_json(space: SearchSpace) -> dict[str, Any]:
    """Returns everything that affects a study: all values, defaults included, without `doc`."""
    unused = {name for name in ("layouts", "parallel") if not getattr(space, name)}
    data: dict[str, Any] = space.model_dump(mode="json", exclude={"doc"} | unused)
    for role in ("mixers", "ffn"):
        data[role] = {block["kind"]: block["knobs"] for block in data[role]}
    for runtime in data["runtimes"]:
        for name in ("choices", "devices"):
            if not runtime[name]:
                del runtime[name]
    if not space.references.further:
        del data["references"]["further"]
    if space.model.norms == "before":
        del data["model"]["norms"]
    if space.quality.rescore is not None and not space.quality.rescore.tasks:
        del data["quality"]["rescore"]["tasks"]
    if space.task == "generation":
        del data["task"]
    if space.task not in VECTORS:
        del data["model"]["vectors"]
    if space.task != "vision":
        del data["model"]["tower"]
    data["workloads"] = {
        name: workload.key() | {"context": workload.context} for name, workload in space.workloads.items()
    }
    return data


def space_key(space: SearchSpace) -> str:
    """Returns the SHA-256 of `space_json`, equal for files that differ only in comments, key order or short forms."""
    return content_hash(space_json(space))


def space_yaml(space: SearchSpace) -> str:
    """Returns YAML that gives an equal space: all values that are not defaults, in short form, without comments."""
    data = space.model_dump(mode="json", exclude_defaults=True)
    for role in ("mixers", "ffn"):
        data[role] = {block["kind"]: _short_knobs(block.get("knobs", {})) for block in data[role]}
    for runtime in data["runtimes"]:
        if choices := runtime.pop("choices", None):
            runtime["quantisation"] = choices
    data["model"] = _short_knobs(data["model"])
    return dump_yaml({"v": 1} | data, flow=None)


def _short_knobs(knobs: dict[str, Any]) -> dict[str, Any]:
    return {name: _short_knob(knob) for name, knob in knobs.items()}


def _short_knob(knob: Any) -> Any:
    """Returns a knob's list of choices, or its only one; unchanged if it has a scope, or is none."""
    if not isinstance(knob, dict) or set(knob) != {"choices"}:
        return knob
    choices = knob["choices"]
    return choices[0] if len(choices) == 1 else choices


def space_difference(before: SearchSpace, after: SearchSpace) -> list[str]:
    """Returns the changes, one line a key, such as `model.depth.choices: [8, 10] -> [8]`."""
    return list(_changes(_compared(before), _compared(after), ""))


def _compared(space: SearchSpace) -> dict[str, Any]:
    """Returns `space_json` with all towers: it leaves out those of sound."""
    data = space_json(space)
    if space.model.tower.choices:
        data["model"]["tower"] = space.model.tower.model_dump(mode="json")
    return data


def _changes(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            key_path = f"{path}.{key}" if path else str(key)
            if key not in after:
                yield f"{key_path}: removed (was {_show(before[key])})"
            elif key not in before:
                yield f"{key_path}: added ({_show(after[key])})"
            else:
                yield from _changes(before[key], after[key], key_path)
    elif before != after:
        yield f"{path}: {_show(before)} -> {_show(after)}"


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
