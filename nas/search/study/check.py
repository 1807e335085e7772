"""Checks of a search space against this installation: its runtimes, proposers and devices."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.published import named_layout
from nas.core.space import MEDIA_TASKS, RuntimeSpace, SearchSpace
from nas.core.workload import Workload
from nas.measure.farm.farm import LOCAL, find_name, this_machine
from nas.measure.protocol.calibration import known_runtime
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Runtime
from nas.model.text.reader import files_of
from nas.search.proposers import PROPOSERS, Sampler
from nas.search.spaces.loader import Further
from nas.search.spaces.yaml_text import KeyPath

Problems = Iterator[tuple[KeyPath, str]]


def support_filter(space: SearchSpace) -> Callable[[Layout], bool]:
    """Returns a predicate: whether every runtime of the space can run a layout.

    Raises:
        UnknownName: no such runtime or quantisation.
        Unsupported: a runtime cannot run a reference layout; the message has the reasons.
    """
    runtimes = [(known_runtime(spec), spec.build) for spec in space.runtimes]
    for name, layout in space.references.layouts().items():
        for runtime, build in runtimes:
            if reason := _refusal(name, layout, runtime, build):
                raise Unsupported(reason, where="references")
    return _carried_by(runtimes)


def missing_builds(space: SearchSpace) -> list[str]:
    """Returns what to build before this machine can measure layouts of a space, one message each."""
    if LOCAL not in space.devices:
        return []
    machine, missing = this_machine(), []
    for spec in map(space.labelled.__getitem__, space.labels_on(LOCAL)):
        try:
            known_runtime(spec).runner(
                machine.target,
                machine.cpu_features,
                patched=spec.build == "any",
                libc=machine.libc,
                images=space.task in MEDIA_TASKS,
            )
        except InfrastructureFailed as error:
            missing.append(str(error))
    return missing


def installed(
    devices: Mapping[str, Collection[str]] | None, draw_s: float = math.inf, base: Path | None = None
) -> Further:
    """Returns the further checks of `parse_space` that need this installation.

    Args:
        devices: id -> tags of the devices that can be used; None: devices are not checked.
        draw_s: seconds after which a space of which no layout was found yet is refused.
        base: folder of relative paths; None: files of corpora are not looked for.
    """

    def check(value: Any, choices: SearchSpace | None) -> Problems:
        document = value if isinstance(value, dict) else {}
        if devices is not None:
            names = document.get("devices")
            for index, name in enumerate(names if isinstance(names, list) else ()):
                if isinstance(name, str) and name != LOCAL and (error := _error(find_name, name, devices)):
                    yield ("devices", index), error
            if LOCAL in (names if isinstance(names, list) else [LOCAL]):
                yield from _absent_cores(document.get("workloads"))
        if base is not None:
            yield from _missing_texts(_at(document.get("quality"), "corpus"), base)
        proposer = _at(document.get("search"), "proposer")
        if isinstance(proposer, str) and (error := _error(PROPOSERS.__getitem__, proposer)):
            yield ("search", "proposer"), error
        runtimes, problems = _runtimes(document.get("runtimes"))
        problems += _unsupported_references(document.get("references"), runtimes)
        yield from problems
        if choices is not None and runtimes and not problems:
            yield from _no_layout(choices, runtimes, draw_s)

    return check


def _runtimes(items: Any) -> tuple[list[tuple[Runtime, str]], list[tuple[KeyPath, str]]]:
    """Returns the runtimes that exist, with the build that each may use, and what is wrong with the others."""
    runtimes: list[tuple[Runtime, str]] = []
    problems: list[tuple[KeyPath, str]] = []
    for index, item in enumerate(items if isinstance(items, list) else ()):
        name, quantisation, build = (_at(item, key) for key in ("name", "quantisation", "build"))
        if not isinstance(name, str):
            continue
        if error := _error(RUNTIMES.__getitem__, name):
            problems.append((("runtimes", index, "name"), error))
            continue
        runtimes.append((RUNTIMES[name], str(build or "stock")))
        with contextlib.suppress(ValidationError):  # reported already
            spec = RuntimeSpace.model_validate({"name": name, "quantisation": quantisation})
            if error := _error(known_runtime, spec):
                problems.append((("runtimes", index, "quantisation"), error))
    return runtimes, problems


def _unsupported_references(references: Any, runtimes: list[tuple[Runtime, str]]) -> list[tuple[KeyPath, str]]:
    problems: list[tuple[KeyPath, str]] = []
    further = _at(references, "further")
    key_paths: list[tuple[str, ...]] = [("published",), ("attention",)]
    key_paths += [("further", str(name)) for name in (further if isinstance(further, dict) else ())]
    for key_path in key_paths:
        text: Any = references
        for key in key_path:
            text = _at(text, key)
        try:
            layout = named_layout(str(text))
        except InvalidInput:
            continue  # reported already
        reasons = [_refusal(str(key_path[-1]), layout, runtime, build) for runtime, build in runtimes]
        problems += [(("references", *key_path), reason) for reason in reasons if reason]
    return problems


def _absent_cores(workloads: Any) -> Problems:
    """Finds workloads that are pinned to cores which this machine has not."""
    for name in workloads if isinstance(workloads, dict) else ():
        cores = _at(workloads[name], "affinity")
        if not isinstance(cores, list):
            continue
        with contextlib.suppress(ValidationError):
            if error := _error(this_machine().pinned, Workload(affinity=tuple(cores))):
                yield ("workloads", name, "affinity"), error.removeprefix("affinity: ")


def _missing_texts(corpus: Any, base: Path) -> Problems:
    """Finds entries of a corpus that name no file."""
    keys: KeyPath = ("quality", "corpus") if isinstance(corpus, list) else ("quality", "corpus", "files")
    entries = corpus if isinstance(corpus, list) else _at(corpus, "files")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, str) and (error := _error(files_of, entry, base, "corpus")):
            yield (*keys, index), error


def _no_layout(choices: SearchSpace, runtimes: list[tuple[Runtime, str]], draw_s: float) -> Problems:
    until = time.monotonic() + draw_s
    if error := _error(lambda: Sampler(choices, _carried_by(runtimes)).draw(np.random.default_rng(0), until)):
        yield ("layouts" if choices.layouts else "mixers",), error


def _refusal(name: str, layout: Layout, runtime: Runtime, build: str) -> str | None:
    support = runtime.supports(layout)
    if support.runs_on(build):
        return None
    return f"the {name} reference does not run on {runtime.name}: {'; '.join(support.reasons)}"


def _carried_by(runtimes: Sequence[tuple[Runtime, str]]) -> Callable[[Layout], bool]:
    return lambda layout: all(runtime.supports(layout).runs_on(build) for runtime, build in runtimes)


def _error(act: Callable[..., object], *arguments: object) -> str | None:
    try:
        act(*arguments)
    except InvalidInput as error:
        return error.message
    return None


def _at(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
