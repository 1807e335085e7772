"""Operators that our runner implements: attention over a cache that is the runner's own.

A program calls them; which cache is meant, RoPE, window and sinks, the artifact says and the runner knows. So programs
depend on no context length, and a cache may be of any number format. They are never computed in Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("hilnas", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.define("attend.out(Tensor q, Tensor k, Tensor v, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define("attend_shared(Tensor q) -> Tensor")
_LIBRARY.define("attend_shared.out(Tensor q, *, Tensor(a!) out) -> Tensor(a!)")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Appends keys and values [1, S, KV, d] to the cache, attends: q [1, S, H, d] -> [1, S, H d]."""
    mixed: Tensor = torch.ops.hilnas.attend(q, k, v)
    return mixed


def attend_shared(q: Tensor) -> Tensor:
    """The same over a cache that another layer has appended to."""
    mixed: Tensor = torch.ops.hilnas.attend_shared(q)
    return mixed


def _shape(q: Tensor, *_: Tensor) -> Tensor:
    return q.new_empty(1, q.shape[1], q.shape[2] * q.shape[3])


def _out(*tensors: Tensor, out: Tensor) -> Tensor:
    return out


for _name in ("attend", "attend_shared"):
    _LIBRARY.impl(_name, _shape, "Meta")
    _LIBRARY.impl(f"{_name}.out", _out, "Meta")
