"""How blocks of SmolLM2-135M-Instruct are chosen at one budget: sums of scores beside what others do.

    python -m benchmarks.adapt choices FOLDER [--seeds 3] [--minutes 60]

FOLDER is that of `benchmarks.adapt real`: its library, its costs of alternatives and its budget. Each way of choosing
gives one choice whose predicted cost keeps the budget, but for random ones, of which there are `_RANDOM`. Each choice
is healed on the same few tokens, by seed, and its divergence from the model is computed on text that nothing was chosen
by. Each child is a file of FOLDER/choices, and choices are in FOLDER/choices.json, so another run continues. Report:
`RECORDED`.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau

from benchmarks.adapt_real import request_of
from benchmarks.adapt_smart import sensitivities, smart_layers
from benchmarks.page import mean_and_deviation, table
from benchmarks.runs import say
from nas.core.durable import write_durably
from nas.core.replacement import RECALL_GROUP, TEXT_GROUP, Alternative, Slot, block_name, block_of, parsed, with_blocks
from nas.model.nn.fit import Worker
from nas.model.nn.mixes import compared
from nas.train.adapt.adapt import Adaptation
from nas.train.adapt.costs import Problem, replaced_by
from nas.train.adapt.device import bench_of
from nas.train.adapt.healing import batches_of, heal
from nas.train.adapt.prepare import prepare
from nas.train.adapt.selection import Option, Term, select, total
from nas.train.adapt.text import recall_text, report_text

RECORDED = Path(__file__).parent / "recorded/adapt-choices.json"
_RANDOM = 16
"""Random choices."""
_PAIRS = 58
"""Terms of pairs of neighbouring mixers, at most: half of those of 30 layers with two alternatives each."""
_TOKENS, _BATCH = 16384, 2048
"""Tokens of a healing, and of a step."""
_RESAMPLES = 2000

_PAIRED, _DROPPED = "sums and pairs", "layers dropped"

Choice = dict[Slot, Alternative]
Options = Mapping[Slot, Sequence[Option[Slot]]]


def run(folder: Path, budget: str, seeds: int, minutes: float) -> None:
    """Heals the children that are missing, as many as `minutes` allow, and writes `RECORDED`."""
    request = request_of(folder, budget)
    adaptation = prepare(request, bench_of(request, say), Worker(torch.device("cpu"), say))
    report = compared_choices(adaptation, folder, seeds, minutes)
    write_durably(RECORDED, (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps({"missing": report["missing"]}))


def compared_choices(adaptation: Adaptation, folder: Path, seeds: int, minutes: float) -> dict[str, Any]:
    """Returns what each way of choosing gives, from the files of `folder`; no healing begins after `minutes`."""
    end = time.monotonic() + 60 * minutes
    with adaptation.library.in_use():
        choices = _choices(adaptation, folder / "choices.json")
        ways = [name for name in choices if not name.startswith("random")]
        jobs = [(name, seed) for seed in range(seeds) for name in ways]
        jobs += [(name, 0) for name in choices if name not in ways]
        for name, seed in jobs:
            path = folder / "choices" / f"{name}-{seed}.json"
            if not path.is_file() and time.monotonic() < end:
                say(f"{name}, seed {seed}")
                path.parent.mkdir(exist_ok=True)
                row = choices[name] | {"name": name, "seed": seed} | _healed(adaptation, choices[name], seed)
                write_durably(path, json.dumps(row, indent=1).encode())
    paths = [folder / "choices" / f"{name}-{seed}.json" for name, seed in jobs]
    rows = [json.loads(path.read_bytes()) for path in paths if path.is_file()]
    return {
        "tokens": _TOKENS,
        "recall": adaptation.request.recall,
        "budgets": adaptation.record["budgets"],
        "missing": len(jobs) - len(rows),
        "rows": rows,
    }


def table_of(report: Mapping[str, Any]) -> str:
    """Returns what each way of choosing gives: means and standard deviations over seeds, or random choices."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(row["name"].partition("#")[0], []).append(row)
    names = ("divergence_before", "divergence", "recall_divergence")
    lines = []
    for name, rows in sorted(groups.items(), key=lambda item: fmean(row["divergence"] for row in item[1])):
        spreads = [mean_and_deviation([row[key] for row in rows]) for key in names]
        lines.append([name, len(rows), f"{fmean(row['predicted'] for row in rows):.2f}", *spreads])
    head = ["chosen by", "children", "predicted ms a token", "divergence before healing", "after", "of recall, after"]
    return table(head, lines)


def tau_of(report: Mapping[str, Any]) -> str:
    """Returns a sentence on how scores order healed children."""
    rows = [*{json.dumps(row["choice"]): row for row in report["rows"] if row["seed"] == 0}.values()]
    summed = np.array([row["summed"] for row in rows])
    healed = np.array([row["divergence"] + report["recall"] * row["recall_divergence"] for row in rows])
    rng = np.random.default_rng(0)
    places = [rng.integers(len(rows), size=len(rows)) for _ in range(_RESAMPLES)]
    taus = [tau for at in places if np.isfinite(tau := kendalltau(summed[at], healed[at]).statistic)]
    low, high = np.quantile(taus, [0.025, 0.975])
    tau = kendalltau(summed, healed).statistic
    return (
        "Kendall's tau of the sums of scores with the divergence after healing, that of recall included as in the sums,"
        f" is {tau:.2f} ({low:.2f} to {high:.2f}) over {len(rows)} different children."
    )


def _choices(adaptation: Adaptation, path: Path) -> dict[str, dict[str, Any]]:
    """Returns name -> choice, with its sum of scores and predicted cost; those that a file has are not chosen anew."""
    choices: dict[str, dict[str, Any]] = json.loads(path.read_bytes()) if path.is_file() else {}
    if not {_DROPPED, _PAIRED} <= choices.keys():
        with adaptation.bench.opened():
            problem = adaptation.choices.problem()
            (limit,) = adaptation.limits
            most = limit.of(problem.base).value
            chosen = _chosen(adaptation, problem, limit.metric, most)
            dropped = _layers_dropped(adaptation, limit.metric, most)
        for name, picked in chosen.items():
            scored = {slot: _named(problem.options[slot], option.name) for slot, option in picked.items()}
            figures = total(scored, problem.base)
            choice = replaced_by(adaptation.teacher.layout, picked)
            choices.setdefault(name, _row(choice, figures["loss"], figures[limit.metric]))
        choices.setdefault(_DROPPED, dropped)
        write_durably(path, json.dumps(choices, indent=1).encode())
    return choices


def _row(choice: Choice, summed: float, predicted: float) -> dict[str, Any]:
    blocks = [[slot.depth, slot.part, block_name(block)] for slot, block in sorted(choice.items())]
    return {"choice": blocks, "summed": summed, "predicted": predicted}


def _chosen(adaptation: Adaptation, problem: Problem, metric: str, most: float) -> dict[str, dict[Slot, Option[Slot]]]:
    limits = {metric: most}
    own = {slot: options[0] for slot, options in problem.options.items()}

    def least(losses: Options, terms: Sequence[Term[Slot]] = ()) -> dict[Slot, Option[Slot]]:
        picked = select(losses, problem.base, limits, terms)
        assert picked is not None
        return picked

    def other(**settings: Any) -> Problem:
        return replace(adaptation.choices, settings=adaptation.request.model_copy(update=settings)).problem()

    chosen = {"sums": least(problem.options), "sums of text alone": least(other(recall=0.0).options)}
    paired = other(pairs=_PAIRS)
    chosen[_PAIRED] = least(paired.options, paired.terms)
    for number in range(_RANDOM):
        rng = random.Random(number)
        chosen[f"random#{number}"] = least(
            {
                slot: [replace(option, loss=0.0 if option is own[slot] else rng.random()) for option in options]
                for slot, options in problem.options.items()
            }
        )
    cheap = _cheap(problem, metric, most)
    gains = sensitivities(adaptation.library, {slot: block_of(parsed(name, "mixer")) for slot, name in cheap.items()})
    mixers = sorted(cheap)
    rules = {
        "SMART": lambda count: smart_layers(gains, count),
        "KL-guided": lambda count: sorted(range(len(mixers)), key=lambda i: -gains[i])[:count],
        "uniform": lambda count: np.linspace(0, len(mixers) - 1, count).round().astype(int).tolist(),
    }
    for name, rule in rules.items():
        for count in range(len(mixers) - 1, -1, -1):
            stay = {mixers[i] for i in rule(count)}
            picked = own | {slot: _named(problem.options[slot], cheap[slot]) for slot in mixers if slot not in stay}
            if total(picked, problem.base)[metric] <= most:
                chosen[name] = picked
                break
    return chosen


def _layers_dropped(adaptation: Adaptation, metric: str, most: float) -> dict[str, Any]:
    """Returns the choice without the fewest whole layers that keeps the budget as measured, those of least scores."""
    layout, choice, summed = adaptation.teacher.layout, Choice(), 0.0
    slots = [Slot(depth, "layer") for depth in range(layout.depth)]
    scores = adaptation.library.scores({slot: (None,) for slot in slots})
    losses = {
        slot: score.text + adaptation.request.recall * score.kl[RECALL_GROUP] for (slot, _), score in scores.items()
    }
    for slot in sorted(slots, key=losses.__getitem__):
        choice |= {Slot(slot.depth, part): None for part in ("mixer", "ffn")}
        summed += losses[slot]
        cost = adaptation.choices.measured(with_blocks(layout, choice)[0])[metric]
        if cost <= most:
            break
    return _row(choice, summed, cost)


def _cheap(problem: Problem, metric: str, most: float) -> dict[Slot, str]:
    """Returns for each slot of the most frequent mixer one block, the same in all, that keeps the budget best."""
    own = {slot: options[0].name for slot, options in problem.options.items() if slot.part == "mixer"}
    ((frequent, _),) = Counter(own.values()).most_common(1)
    mixers = [slot for slot, name in own.items() if name == frequent]
    names = set.intersection(*({option.name for option in problem.options[slot][1:]} for slot in mixers))
    losses = {}
    for name in names:
        options = [_named(problem.options[slot], name) for slot in mixers]
        if not options[0].empty and problem.base[metric] + sum(option.costs[metric] for option in options) <= most:
            losses[name] = sum(option.loss for option in options)
    best = min(losses, key=losses.__getitem__)
    return dict.fromkeys(mixers, best)


def _named(options: Iterable[Option[Slot]], name: str) -> Option[Slot]:
    return next(option for option in options if option.name == name)


def _healed(adaptation: Adaptation, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns divergences of a child before and after healing, in nats per token."""
    began, library = time.monotonic(), adaptation.library
    choice: Choice = {Slot(depth, part): parsed(name, part) for depth, part, name in row["choice"]}
    settings = adaptation.request.healing.model_copy(update={"tokens": _TOKENS, "batch_tokens": _BATCH, "seed": seed})
    text = report_text(adaptation.sources, library.settings.window, library.settings.score_tokens)
    text = text.with_windows_of(
        recall_text(adaptation.vocabulary, library.settings.window, library.settings.recall_tokens, 1)
    )
    teacher = library.teacher.model
    before = text.means(compared(teacher, library.mix(choice), text).kl)
    with TemporaryDirectory(dir=adaptation.folder) as scratch:  # a checkpoint is three times the model
        batches = batches_of(adaptation.sources, settings)
        model = heal(lambda: library.mix(choice), library, batches, settings, Path(scratch))
    after = text.means(compared(teacher, model, text).kl)
    return {
        "divergence_before": before[TEXT_GROUP],
        "recall_divergence_before": before[RECALL_GROUP],
        "divergence": after[TEXT_GROUP],
        "recall_divergence": after[RECALL_GROUP],
        "seconds": round(time.monotonic() - began),
    }
