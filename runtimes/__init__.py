"""Runtimes by name. Third parties add theirs through entry points of the group `nas.runtimes`."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.runtimes.base import Runtime

RUNTIMES: Registry[Runtime] = Registry(
    "runtime",
    "nas.runtimes",
    {
        "llama.cpp": "nas.runtimes.llama_cpp.runtime:LLAMA_CPP",
        "executorch": "nas.runtimes.executorch.runtime:EXECUTORCH",
    },
)
