"""The JSON form of a layout: canonical, with defaults left out, so that equal layouts have equal JSON and one id.

    {"v": 1, "d_model": 64, "vocab": 256,
     "layers": [{"mixers": [{"kind": "conv", "kernel": 3}], "ffn": {"kind": "swiglu", "width": 96}}, {"share": 0}]}

Version 1 never changes the meaning of a key or a default: new behaviour is a new key.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nas.core.block import Block, Scalar
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """The canonical form."""
    tied = {} if layout.tied else {"tied": False}
    layers = [_layer_to_json(layer) for layer in layout.layers]
    return {"v": 1, "d_model": layout.d_model, "vocab": layout.vocab, "layers": layers, **tied}


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    """The layout that `layout_to_json` wrote.

    Raises:
        InvalidInput: another version, unknown or missing keys, or values of another type.
    """
    data = _object(data, {"v", "d_model", "vocab", "layers", "tied"}, "layout")
    if data.get("v") != 1:
        raise InvalidInput(f"layout version {data.get('v')!r}: this build reads version 1")
    layers = [_layer_from_json(layer) for layer in _list(data.get("layers"), "layers")]
    tied = data.get("tied", True)
    if not isinstance(tied, bool):
        raise InvalidInput(f"tied must be true or false, not {tied!r}")
    return Layout.of(_whole(data, "d_model"), _whole(data, "vocab"), layers, tied=tied)


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    if layer.share is not None:
        return {"share": layer.share}
    mixers = {"mixers": [_block_to_json(block) for block in layer.mixers]} if layer.mixers else {}
    return mixers | ({"ffn": _block_to_json(layer.ffn)} if layer.ffn else {})


def _block_to_json(block: Block) -> dict[str, Scalar | str]:
    return {"kind": block.kind, **dict(block.given)}


def _layer_from_json(data: Any) -> Layer:
    layer = _object(data, {"mixers", "ffn", "share"}, "layer")
    mixers = tuple(_block_from_json(block) for block in _list(layer.get("mixers", []), "mixers"))
    ffn = _block_from_json(layer["ffn"]) if "ffn" in layer else None
    return Layer(mixers, ffn, _whole(layer, "share") if "share" in layer else None)


def _block_from_json(data: Any) -> Block:
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise InvalidInput(f"a block is an object with a kind, not {data!r}")
    return Block.of(**data) if any(isinstance(value, list | dict) for value in data.values()) else _checked(**data)


@lru_cache(maxsize=1 << 14, typed=True)
def _checked(kind: str, **args: Scalar) -> Block:
    """A study has some hundred blocks in all its layouts: each is checked once."""
    return Block.of(kind, **args)


def _object(data: Any, known: set[str], what: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{what} must be an object, not {data!r}")
    if unknown := set(data) - known:
        raise InvalidInput(f"unknown key in {what}: {', '.join(sorted(unknown))}; valid: {', '.join(sorted(known))}")
    return data


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInput(f"{what} must be a list, not {value!r}")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{key} must be a whole number, not {value!r}")
    return value
