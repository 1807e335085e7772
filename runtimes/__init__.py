"""Runtimes by name. Third parties add theirs through entry points of the group `nas.runtimes`."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.measure.runtimes.base import Runtime

DEFAULT_RUNTIME = "llama.cpp"
"""Used by commands unless another is given. Every search needs it; the others are extras."""

RUNTIMES: Registry[Runtime] = Registry(
    "runtime",
    "nas.runtimes",
    {
        DEFAULT_RUNTIME: "nas.measure.runtimes.llama_cpp.runtime:LLAMA_CPP",
        "executorch": "nas.measure.runtimes.executorch.runtime:EXECUTORCH",
    },
)
