"""Identity of search spaces: key and differences, by which `--resume` decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nas.core.canonical import content_hash
from nas.core.space import SearchSpace


def space_json(space: SearchSpace) -> dict[str, Any]:
    """Returns everything that affects a study: all values, defaults included, without `doc`."""
    unused = set() if space.layouts else {"layouts"}
    data: dict[str, Any] = space.model_dump(mode="json", exclude={"doc"} | unused)
    for role in ("mixers", "ffn"):
        data[role] = {block["kind"]: block["knobs"] for block in data[role]}
    return data


def space_key(space: SearchSpace) -> str:
    """Returns the SHA-256 of `space_json`, equal for files that differ only in comments, key order or short forms."""
    return content_hash(space_json(space))


def space_difference(before: SearchSpace, after: SearchSpace) -> list[str]:
    """Returns the changes, one line a key, such as `model.depth.choices: [8, 10] -> [8]`."""
    return list(_changes(space_json(before), space_json(after), ""))


def _changes(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}.{key}" if path else str(key)
            if key not in after:
                yield f"{place}: removed (was {_show(before[key])})"
            elif key not in before:
                yield f"{place}: added ({_show(after[key])})"
            else:
                yield from _changes(before[key], after[key], place)
    elif before != after:
        yield f"{path}: {_show(before)} -> {_show(after)}"


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
