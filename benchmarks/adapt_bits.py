"""Blocks and bits of a trained model chosen together, and one after the other, for files of the same size: `RECORDED`.

All ways choose from the same scores and sizes, exactly; the first is what `nas adapt -q q8_0 -q q5_0 -q q4_0` does. The
children are compared with the teacher with the weights that their files have, before and after healing, on text that
nothing was chosen by. Each child is a file of FOLDER/bits, so another run continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.page import fill, table
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.replacement import Slot, Stored, block_name, block_of, parsed, slots_of, with_blocks
from nas.core.stats import mean_interval
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.nn.mixes import compared
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.adapt.alternatives import default_alternatives
from nas.train.adapt.costs import Choices, Problem, replaced_by, stored
from nas.train.adapt.device import FileBench
from nas.train.adapt.healing import Healing, batches_of, heal
from nas.train.adapt.library import Library, rounding_runtime
from nas.train.adapt.request import AdaptSettings
from nas.train.adapt.selection import Option, select, total
from nas.train.adapt.text import report_text
from nas.train.pretrain.data import Tokens

RECORDED = Path(__file__).parent / "recorded/adapt-bits.json"
TYPES = ("q8_0", "q5_0", "q4_0")
SHARES = (0.8, 0.65, 0.5, 0.4)
"""Sizes of files, as shares of the teacher's in Q8_0."""
_SIZE = "file_size"
_TRIES = 5
Picked = dict[Slot, Option[Slot]]
Way = Callable[[Problem, float], Picked | None]


def run(library: Library, sources: Sequence[Tokens], window: int, healing: Healing, folder: Path) -> None:
    """Writes `RECORDED`."""
    library.rounding = rounding_runtime(LLAMA_CPP.name)
    problem, layout = problem_of(library, window)
    rows = []
    for share in SHARES:
        limit = share * problem.base[_SIZE]
        row: dict[str, Any] = {"share": share, "limit": limit, "ways": {}}
        for name, way in WAYS.items():
            if (picked := _within(way, problem, layout, limit)) is None:
                continue
            choice = replaced_by(layout, picked)
            child = with_blocks(layout, choice)[0]
            measured = _measured(library, sources, healing, folder / "bits", choice, child)
            sums = {"expected": total(picked, problem.base)["loss"], "size": size_of(child)}
            row["ways"][name] = {"layout": child.format(), **sums, **measured}
            library.worker.log(f"{share}: {name}: {child}")
        rows.append(row)
    record = {"layout": layout.format(), "size": problem.base[_SIZE], "rows": rows}
    write_durably(RECORDED, (json.dumps(record, indent=1) + "\n").encode())
    print(table_of(record))


def problem_of(library: Library, window: int) -> tuple[Problem, Layout]:
    """Returns what is chosen from, and the layout of the teacher's file."""
    teacher = library.teacher.layout
    alternatives = {
        slot: stored(teacher, slot, default_alternatives(teacher, slot, window), TYPES) for slot in slots_of(teacher)
    }
    layout = replace(teacher, quantisation=TYPES[0])
    settings = AdaptSettings(library=library.settings)
    return Choices(library, layout, alternatives, settings, lambda one: {_SIZE: size_of(one)}).problem(), layout


def _within(way: Way, problem: Problem, layout: Layout, limit: float) -> Picked | None:
    """Returns a choice whose file is no larger than `limit` MB: sums of sizes leave out what headers add."""
    allowed = limit
    for _ in range(_TRIES):
        if (picked := way(problem, allowed)) is None:
            return None
        if (size := size_of(with_blocks(layout, replaced_by(layout, picked))[0])) <= limit:
            return picked
        allowed *= 0.999 * limit / size
    return None


def size_of(layout: Layout) -> float:
    """Returns the MB of a layout's file."""
    request: Any = SimpleNamespace(runtime=LLAMA_CPP.name, deploy_quantisation=TYPES[0])
    value = FileBench(cast(Any, request)).measure(layout).figures[_SIZE].value
    assert value is not None
    return value


def _of_type(name: str, problem: Problem, limit: float) -> Picked | None:
    """Chooses blocks, all in one type."""
    same = {
        slot: [option for option in listed if option.empty or option.name.endswith(f" {name}")]
        for slot, listed in problem.options.items()
    }
    return select(same, problem.base, {_SIZE: limit})


def _with_blocks_of(picked: Picked | None, problem: Problem, limit: float) -> Picked | None:
    """Chooses the types of blocks that are chosen already."""
    if picked is None:
        return None
    same = {
        slot: [option for option in listed if _block(slot, option) == _block(slot, picked[slot])]
        for slot, listed in problem.options.items()
    }
    return select(same, problem.base, {_SIZE: limit})


def _block(slot: Slot, option: Option[Slot]) -> str:
    return option.name if option.empty else block_name(block_of(parsed(option.name, slot.part)))


def _blocks_first(problem: Problem, limit: float) -> Picked | None:
    """Chooses blocks in the first type under half of the saving, in proportion, then types for the rest."""
    halfway = math.sqrt(limit * problem.base[_SIZE])
    return _with_blocks_of(_of_type(TYPES[0], problem, halfway), problem, limit)


def _bits_alone(problem: Problem, limit: float) -> Picked | None:
    originals = {slot: listed[0] for slot, listed in problem.options.items()}
    return _with_blocks_of(originals, problem, limit)


WAYS: dict[str, Way] = {
    "together": lambda problem, limit: select(problem.options, problem.base, {_SIZE: limit}, problem.terms),
    "blocks, then bits": _blocks_first,
    "bits alone": _bits_alone,
    **{f"blocks in {name.upper()}": partial(_of_type, name) for name in (TYPES[0], TYPES[-1])},
}


def _measured(
    library: Library,
    sources: Sequence[Tokens],
    healing: Healing,
    folder: Path,
    choice: Mapping[Slot, Stored | Any],
    child: Layout,
) -> dict[str, list[float]]:
    """Returns divergences of a child's file by window of text, nats a token, before and after healing."""
    path = folder / f"{child.id[:16]}.json"
    if path.is_file():
        result: dict[str, list[float]] = json.loads(path.read_bytes())
        return result
    folder.mkdir(exist_ok=True)
    text = report_text(sources, library.settings.window, library.settings.score_tokens)

    def divergences(model: Model) -> list[float]:
        weights = folder / "child.safetensors"
        save_weights(model, weights)
        rounded = LLAMA_CPP.rounded(child.architecture, child.quantisation, Checkpoint(weights, sha256_of(weights)))
        kl = compared(library.teacher.model, cast(Model, rounded.to(library.worker.device)), text).kl
        values: list[float] = kl.mean(-1).tolist()
        return values

    before = divergences(library.mix(choice))
    healed = heal(lambda: library.mix(choice), library, batches_of(sources, healing), healing, folder / "training")
    result = {"before": before, "healed": divergences(healed)}
    write_durably(path, json.dumps(result).encode())
    return result


def table_of(record: dict[str, Any]) -> str:
    """Returns for each size and way what was expected, and the divergences with intervals over windows of text."""
    lines = []
    for row in record["rows"]:
        first = row["ways"]["together"]
        for name, way in row["ways"].items():
            more = [a - b for a, b in zip(way["healed"], first["healed"], strict=True)]
            lines.append(
                [
                    f"{row['share']:.0%}",
                    name,
                    f"{way['size'] * 1e3:.0f}",
                    f"{way['expected']:.3f}",
                    mean_text(way["before"]),
                    mean_text(way["healed"]),
                    "" if way is first else mean_text(more, signed=True),
                    f"`{way['layout']}`",
                ]
            )
    head = ["size", "chosen", "kB", "sum of scores", "divergence", "healed", "beyond together, healed", "layout"]
    return table(head, lines)


def mean_text(values: Sequence[float], *, signed: bool = False) -> str:
    """Returns the mean with its 95 % interval."""
    mean, half = mean_interval(values)
    sign = "+" if signed else ""
    return f"{mean:{sign}.3f} ({mean - half:{sign}.3f} to {mean + half:{sign}.3f})"


def write_page(page: Path) -> None:
    """Writes the table of `RECORDED` into a page."""
    fill(page, "together", table_of(json.loads(RECORDED.read_bytes())))
