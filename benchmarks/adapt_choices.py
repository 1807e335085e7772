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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau  # type: ignore[import-untyped]

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
    """Returns name -> choice, with its sum of scores and predicted cost; a file has those that were chosen before."""
    choices: dict[str, dict[str, Any]] = json.loads(path.read_bytes()) if path.is_file() else {}
    names = ("sums", "sums of text alone", "sums and pairs", "layers dropped", *_RULES)
    if missing := [name for name in (*names, *map(_random, range(_RANDOM))) if name not in choices]:
        with adaptation.bench.opened():
            ways = _Ways(adaptation)
            for name in missing:
                say(f"choosing: {name}")
                choices[name] = ways.row(name)
                write_durably(path, json.dumps(choices, indent=1).encode())
    return choices


def _random(number: int) -> str:
    return f"random#{number}"


class _Ways:
    """Ways of choosing, each of which keeps the budget. The device is open."""

    def __init__(self, adaptation: Adaptation) -> None:
        self._adaptation, self._problem = adaptation, adaptation.choices.problem()
        (limit,) = adaptation.limits
        self._metric, self._most = limit.metric, limit.of(self._problem.base).value

    def row(self, name: str) -> dict[str, Any]:
        """Returns what the way of that name chooses."""
        if name == "layers dropped":
            return self._layers_dropped()
        if name in _RULES:
            picked = self._stay(_RULES[name])
        elif name == "sums":
            picked = self._least(self._problem.options)
        elif name == "sums of text alone":
            picked = self._least(self._with(recall=0.0).options)
        elif name == "sums and pairs":
            paired = self._with(pairs=_PAIRS)
            picked = self._least(paired.options, paired.terms)
        else:
            rng = random.Random(int(name.partition("#")[2]))
            picked = self._least(
                {
                    slot: [original, *(replace(option, loss=rng.random()) for option in others)]
                    for slot, (original, *others) in self._problem.options.items()
                }
            )
        scored = {slot: _named(self._problem.options[slot], option.name) for slot, option in picked.items()}
        figures = total(scored, self._problem.base)
        return _row(replaced_by(self._adaptation.teacher.layout, picked), figures["loss"], figures[self._metric])

    @cached_property
    def _gains(self) -> list[float]:
        cheap = _cheap(self._problem, self._metric, self._most)
        blocks = {slot: block_of(parsed(name, "mixer")) for slot, name in sorted(cheap.items())}
        return sensitivities(self._adaptation.library, blocks)

    def _with(self, **settings: Any) -> Problem:
        adaptation = self._adaptation
        return replace(adaptation.choices, settings=adaptation.request.model_copy(update=settings)).problem()

    def _least(self, losses: Options, terms: Sequence[Term[Slot]] = ()) -> dict[Slot, Option[Slot]]:
        picked = select(losses, self._problem.base, {self._metric: self._most}, terms)
        assert picked is not None, "`nas adapt` found a child that keeps this budget"
        return picked

    def _stay(self, rule: Rule) -> dict[Slot, Option[Slot]]:
        """Returns the choice with the most mixers that stay by a rule."""
        options, base = self._problem.options, self._problem.base
        cheap = _cheap(self._problem, self._metric, self._most)
        mixers = sorted(cheap)
        gains = [0.0] * len(mixers) if rule is _uniform else self._gains
        for count in range(len(mixers) - 1, -1, -1):
            stay = {mixers[i] for i in rule(gains, count)}
            others = {slot: _named(options[slot], cheap[slot]) for slot in mixers if slot not in stay}
            picked = {slot: of_slot[0] for slot, of_slot in options.items()} | others
            if total(picked, base)[self._metric] <= self._most:
                break
        return picked

    def _layers_dropped(self) -> dict[str, Any]:
        """Returns the choice without as few whole layers as the budget, as measured, allows: those of least scores."""
        adaptation, choice, summed = self._adaptation, Choice(), 0.0
        slots = [Slot(depth, "layer") for depth in range(adaptation.teacher.layout.depth)]
        scores = adaptation.library.scores({slot: (None,) for slot in slots})
        losses = {
            slot: score.text + adaptation.request.recall * score.kl[RECALL_GROUP] for (slot, _), score in scores.items()
        }
        for slot in sorted(slots, key=losses.__getitem__):
            choice |= {Slot(slot.depth, part): None for part in ("mixer", "ffn")}
            summed += losses[slot]
            layout, _ = with_blocks(adaptation.teacher.layout, choice)
            cost = adaptation.choices.measured(layout)[self._metric]
            if cost <= self._most:
                break
        return _row(choice, summed, cost)


def _row(choice: Choice, summed: float, predicted: float) -> dict[str, Any]:
    blocks = [[slot.depth, slot.part, block_name(block)] for slot, block in sorted(choice.items())]
    return {"choice": blocks, "summed": summed, "predicted": predicted}


def _guided(gains: Sequence[float], count: int) -> Sequence[int]:
    return sorted(range(len(gains)), key=lambda i: -gains[i])[:count]


def _uniform(gains: Sequence[float], count: int) -> Sequence[int]:
    places: list[int] = np.linspace(0, len(gains) - 1, count).round().astype(int).tolist()
    return places


Rule = Callable[[Sequence[float], int], Sequence[int]]
"""Returns which of the mixers stay, of their sensitivities and a number of mixers."""
_RULES: Mapping[str, Rule] = {"SMART": smart_layers, "KL-guided": _guided, "uniform": _uniform}


def _cheap(problem: Problem, metric: str, most: float) -> dict[Slot, str]:
    """Returns for each slot of the most frequent mixer one block, the same in all, that keeps the budget best."""
    originals = {slot: options[0].name for slot, options in problem.options.items() if slot.part == "mixer"}
    ((frequent, _),) = Counter(originals.values()).most_common(1)
    mixers = [slot for slot, name in originals.items() if name == frequent]
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
