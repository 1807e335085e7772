"""Benchmarks of `nas adapt`: ranks of summed scores, random kills, starts and recipes, a large model.

    python -m benchmarks.adapt mixes FOLDER [--size small|tiny] [--mixes 20] [--family KIND] [--family-mixes 10]
                                                                                Kendall's tau of summed scores
    python -m benchmarks.adapt pairs FOLDER                                     terms for pairs of replacements
    python -m benchmarks.adapt scratch FOLDER [--budget MS]                     `benchmarks.adapt_scratch`, continues
    python -m benchmarks.adapt smart FOLDER                                     `benchmarks.adapt_smart`
    python -m benchmarks.adapt bits FOLDER [--size tiny|small] [--page docs/measured/quantising.md]
                                                                                `benchmarks.adapt_bits`, continues
    python -m benchmarks.adapt kills FOLDER [--kills 10] [--seed 0] [--text T]  SIGKILL at random moments
    python -m benchmarks.adapt ablations FOLDER [--minutes 8]                   `benchmarks.adapt_ablations`, continues
    python -m benchmarks.adapt large FOLDER                                     `benchmarks.adapt_large`, continues
    python -m benchmarks.adapt real FOLDER [--long] [--budget B] [--front 0]    `benchmarks.adapt_real`, continues
    python -m benchmarks.adapt tasks FOLDER [--limit 200]                       `benchmarks.adapt_tasks`, of `real`
    python -m benchmarks.adapt choices FOLDER [--seeds 3] [--minutes 60]        `benchmarks.adapt_choices`, of `real`
    python -m benchmarks.adapt page                                             tables of docs/measured/adapting.md

`mixes` trains a teacher, a small one on 20M tokens of the installed packages' source and documentation, and a tiny one
on the default corpus. Each step and mix is one file of the folder, so another run continues.
With `--family`, further mixes replace mixers by that kind of block alone, such as `conv` or `mamba2`.
Reports: FOLDER/report.json, FOLDER/kills.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from benchmarks import (
    adapt_ablations,
    adapt_bits,
    adapt_choices,
    adapt_large,
    adapt_real,
    adapt_scratch,
    adapt_smart,
    adapt_tasks,
)
from benchmarks.page import fill, table
from benchmarks.runs import kill_campaign, say
from nas.core.block import Block
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.quality_config import CorpusSource
from nas.core.replacement import RECALL_GROUP, TEXT_GROUP, Slot, block_name, lender_of, parsed, slots_of
from nas.model.nn.fit import Precision, TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, precision_of
from nas.model.nn.mixes import compared
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import save_weights
from nas.model.text.corpus import build_corpus
from nas.model.text.documents import read_sources
from nas.train.adapt import healing, library
from nas.train.adapt.adapt import write_child
from nas.train.adapt.alternatives import default_alternatives
from nas.train.adapt.device import Bench, Measured
from nas.train.adapt.healing import Healing, batches_of, heal
from nas.train.adapt.library import Library, LibrarySettings, Replacement, Score, TrainedTeacher
from nas.train.adapt.prepare import prepare
from nas.train.adapt.request import AdaptRequest, AdaptSettings
from nas.train.adapt.text import recall_text, report_sources, report_text
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.pretrain.loss import pretraining_loss
from nas.train.pretrain.next_token import ALL, Packed, bits_of, window_nats
from nas.train.pretrain.recipe import Schedule
from nas.train.pretrain.tokenizer_training import train_tokenizer
from tests.support.smollm2 import fetch_smollm2

_RECALL = ("divergence_before", "divergence")
SMALL, PAIRS = (Path(__file__).parent / f"recorded/adapt-{name}.json" for name in ("small", "pairs"))
PAGE = Path(__file__).parents[1] / "docs/measured/adapting.md"


@dataclass(frozen=True)
class Size:
    """Settings of a run."""

    layout: str
    teacher_tokens: int
    lr: float
    library: LibrarySettings
    healing: Healing
    window: int
    precision: Precision = "float32"
    """Of the teacher's training."""
    corpus: CorpusSource = "default"


SIZES = {
    "tiny": Size(
        "d96 v1024 ffn=swiglu:256 [A6/6:16*4]",
        1 << 20,
        3e-3,
        LibrarySettings(tokens=1 << 16, length=128, batch_tokens=2048, score_tokens=1 << 12),
        Healing(tokens=1 << 16, length=128, batch_tokens=2048, lr=2e-4),
        16,
    ),
    "small": Size(
        "d320 v2048 ffn=swiglu:1024 [A5/5:64*6]",
        20_000_000,
        1.5e-3,
        LibrarySettings(tokens=1 << 17, length=256, batch_tokens=4096, score_tokens=1 << 14, precision="bfloat16"),
        Healing(tokens=1 << 17, length=256, batch_tokens=4096, precision="bfloat16"),
        32,
        "bfloat16",
        "installed",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    names = ("mixes", "pairs", "scratch", "smart", "bits", "kills", "ablations", "large", "real", "tasks", "choices")
    parsers = {name: modes.add_parser(name) for name in names}
    for mode_parser in parsers.values():
        mode_parser.add_argument("folder", type=Path)
    mixes, real = parsers["mixes"], parsers["real"]
    mixes.add_argument("--size", choices=SIZES, default="small")
    mixes.add_argument("--mixes", type=int, default=20)
    mixes.add_argument("--family", help="kind of mixer; none unless told")
    mixes.add_argument("--family-mixes", type=int, default=10)
    parsers["bits"].add_argument("--size", choices=SIZES, default="tiny")
    parsers["bits"].add_argument("--page", type=Path, help="Markdown page that gets the table")
    parsers["scratch"].add_argument("--budget", type=float, default=0.375, help="most milliseconds a token")
    parsers["kills"].add_argument("--kills", type=int, default=10)
    parsers["kills"].add_argument("--seed", type=int, default=0)
    parsers["kills"].add_argument("--text", type=Path, help="adapt SmolLM2 on this text instead of a tiny model")
    parsers["ablations"].add_argument("--minutes", type=float, default=8.0, help="no training starts after that")
    choices = parsers["choices"]
    for budget_parser in (real, choices):
        budget_parser.add_argument("--budget", default="decode_p50<=0.77x")
    choices.add_argument("--seeds", type=int, default=3)
    choices.add_argument("--minutes", type=float, default=60.0, help="no healing starts after that")
    real.add_argument("--front", type=int, default=0)
    real.add_argument("--long", action="store_true", help="requests of 1,920 tokens")
    parsers["tasks"].add_argument("--limit", type=int, default=200, help="questions of a task, at most")
    modes.add_parser("page")
    options = vars(parser.parse_args())
    mode = options.pop("mode")
    if mode == "page":
        for name, text in tables().items():
            fill(PAGE, name, text)
        return
    options["folder"].mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[..., object]] = {
        "mixes": run_mixes,
        "pairs": run_pairs,
        "kills": run_kills,
        "ablations": run_ablations,
        "scratch": adapt_scratch.run,
        "smart": run_smart,
        "bits": run_bits,
        "large": adapt_large.run,
        "real": adapt_real.run,
        "tasks": adapt_tasks.run,
        "choices": adapt_choices.run,
    }
    runs[mode](**options)


def run_ablations(folder: Path, minutes: float) -> None:
    """Trains students of the tiny teacher, see `benchmarks.adapt_ablations`, and prints how many are missing."""
    library, sources = _tiny(folder, SIZES["tiny"].library.model_copy(update={"score_tokens": 1 << 13}))
    print(json.dumps({"missing": adapt_ablations.run(library, sources, minutes)}))


def run_smart(folder: Path) -> None:
    """Compares choices of layers of the tiny teacher that keep attention, see `benchmarks.adapt_smart`."""
    adapt_smart.run(*_tiny(folder, SIZES["tiny"].library.model_copy(update={"score_error": 0.0})))


def run_bits(folder: Path, size: str, page: Path | None) -> None:
    """Chooses blocks and bits together and one after the other, see `benchmarks.adapt_bits`."""
    settings = SIZES[size]
    library, sources, _ = _library(folder, settings)
    adapt_bits.run(library, sources, settings.window, settings.healing, folder)
    if page is not None:
        adapt_bits.write_page(page)


def _tiny(folder: Path, settings: LibrarySettings) -> tuple[Library, list[Tokens]]:
    """Returns a library of the tiny teacher, which is trained first where the folder lacks it, and its text."""
    torch.set_num_threads(1)
    size, worker = SIZES["tiny"], _worker()
    _, sources = _text(folder, size)
    teacher = TrainedTeacher.load(_teacher(folder, size, sources, worker), worker.device)
    return Library(folder / "library", teacher, sources, settings, worker), sources


def run_mixes(folder: Path, size: str, mixes: int, family: str | None, family_mixes: int) -> None:
    """Writes FOLDER/report.json: scores of all alternatives, and the losses of healed mixes."""
    settings = SIZES[size]
    library, sources, vocabulary = _library(folder, settings)
    teacher = library.teacher
    layout = teacher.layout
    alternatives = _alternatives(layout, settings.window)
    library.train(alternatives)
    scores = library.scores(alternatives)
    choices = {f"mix-{number}": mix(alternatives, number) for number in range(mixes)}
    if family is not None:
        drawn = family_of(alternatives, family, family_mixes)
        choices |= {f"{family}-{number}": choice for number, choice in enumerate(drawn)}
    rows = []
    for name, choice in choices.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            row = _healed(folder, choice, library, sources, vocabulary, settings.healing)
            row["summed"] = sum(scores[replacement].text for replacement in choice.items())
            row["summed_recall"] = sum(scores[replacement].kl[RECALL_GROUP] for replacement in choice.items())
            write_durably(path, json.dumps(row, indent=1).encode())
        rows.append(json.loads(path.read_bytes()))
    relatives = rows[mixes:]
    report = {
        "size": size,
        "layout": layout.format(),
        "non_embedding": layout.params.non_embedding,
        "teacher_tokens": settings.teacher_tokens,
        "train_tokens": sum(len(source.train) for source in sources),
        "teacher_bits_per_byte": _losses(teacher.model, library, sources, vocabulary)["bits_per_byte"],
        "tau": taus(rows, "summed"),
        **({"family": family, "tau_family": taus(relatives, "summed")} if relatives else {}),
        "tau_recall": {name: _tau(rows, "summed_recall", f"recall_{name}") for name in _RECALL},
        "blocks": [_block(library, slot, block, scores) for slot, blocks in alternatives.items() for block in blocks],
        "mixes": rows,
    }
    write_durably(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps({name: report.get(name) for name in ("tau", "tau_family")} | {"mixes": len(rows)}))


def taus(rows: list[dict[str, Any]], by: str) -> dict[str, float]:
    """Returns Kendall's tau between the predictions `by` and what was measured."""
    return {name: _tau(rows, by, name) for name in ("divergence_before", "divergence", "bits_per_byte")}


def _tau(rows: list[dict[str, Any]], by: str, measured: str) -> float:
    return float(kendalltau([row[by] for row in rows], [row[measured] for row in rows]).statistic)


def tables() -> dict[str, str]:
    """Returns the tables of `PAGE` by their names."""
    choices = json.loads(adapt_choices.RECORDED.read_bytes())
    return small_tables() | {
        "real-choices": f"{adapt_choices.table_of(choices)}\n{adapt_choices.tau_of(choices)}\n",
        "scratch": adapt_scratch.table_of(json.loads(adapt_scratch.RECORDED.read_bytes())),
        "ablations": adapt_ablations.table_of(adapt_ablations.recorded()),
        "pairs": pair_table(),
        "smart": adapt_smart.table_of(json.loads(adapt_smart.RECORDED.read_bytes())),
        "large": adapt_large.table_of(json.loads(adapt_large.RECORDED.read_bytes())),
        "real": adapt_real.rows(json.loads(adapt_real.recorded(long=False).read_bytes())),
        "real-long": adapt_real.rows(json.loads(adapt_real.recorded(long=True).read_bytes())),
        "tasks": adapt_tasks.rows(tasks := json.loads(adapt_tasks.recorded(long=False).read_bytes())),
        "tasks-long": adapt_tasks.rows(json.loads(adapt_tasks.recorded(long=True).read_bytes())),
        "turns": adapt_tasks.transcript(tasks),
    }


def small_tables() -> dict[str, str]:
    """Returns the tables of `SMALL`: ranks, and every choice."""
    report = json.loads(SMALL.read_bytes())
    rows, bits = report["mixes"], report["teacher_bits_per_byte"]
    family = [row for row in rows if {block.partition("(")[0][:1] for *_, block in row["choice"]} == {"C"}]
    groups = {"all choices": rows, "short convolutions for attention": family}
    groups["sums of 0.1 to 1"] = [row for row in rows if 0.1 <= row["summed"] <= 1]
    ranks = [
        [name, str(len(rows)), *(f"{tau:.2f}" for tau in taus(rows, "summed").values())]
        for name, rows in groups.items()
    ]
    choices = [
        [
            f"`{row['layout'].partition('[')[2][:-1]}`",
            f"{row['summed']:.3f}",
            f"{row['divergence_before']:.3f}",
            f"{row['divergence']:.3f}",
            f"{row['bits_per_byte'] / bits - 1:+.1%}",
        ]
        for row in sorted(rows, key=lambda row: float(row["summed"]))
    ]
    return {
        "ranks": table(["choices", "number", "tau: before healing", "after healing", "bits per byte"], ranks),
        "choices": table(
            ["layers", "sum of scores", "divergence", "healed", f"bits per byte over {bits:.3f}"], choices
        ),
    }


def run_pairs(folder: Path) -> None:
    """Writes `PAIRS`: what each pair of replacements in the mixes of `SMALL` loses together.

    FOLDER is that of `mixes --size small`. A mix is predicted by the sum of its scores, and by that and the pairs'
    terms, which are what a pair loses beyond the sum of its two scores.
    """
    library = _library(folder, SIZES["small"], score_error=0.0)[0]
    alternatives = _alternatives(library.teacher.layout, SIZES["small"].window)
    library.train(alternatives)
    scores = library.scores(alternatives)

    @cache
    def term(*pair: Replacement) -> float:
        return library.divergence(library.mix(dict(pair))) - sum(scores[replacement].text for replacement in pair)

    rows = []
    for row in json.loads(SMALL.read_bytes())["mixes"]:
        choice = {Slot(depth, part): parsed(block, part) for depth, part, block in row["choice"]}
        terms = [term(*pair) for pair in combinations(sorted(choice.items()), 2)]
        summed = sum(scores[replacement].text for replacement in choice.items())
        prediction = {"layout": row["layout"], "summed": summed, "paired": summed + sum(terms), "terms": terms}
        measured = {"divergence_before": library.divergence(library.mix(choice))}
        rows.append(prediction | measured | {name: row[name] for name in ("divergence", "bits_per_byte")})
        print(json.dumps(prediction), flush=True)
    middle = [row for row in rows if 0.1 <= row["summed"] <= 1]
    report = {
        name: {by: taus(group, by) for by in ("summed", "paired")}
        for name, group in (("tau", rows), ("tau_middle", middle))
    } | {"mixes": rows}
    write_durably(PAIRS, _json(report))
    print(json.dumps([report["tau"], report["tau_middle"]]))


def pair_table() -> str:
    """Returns the table of `PAIRS`."""
    report = json.loads(PAIRS.read_bytes())
    rows = []
    for by, name in (("summed", "sum of scores"), ("paired", "with terms of pairs")):
        errors = [abs(row[by] / row["divergence_before"] - 1) for row in report["mixes"] if len(row["terms"])]
        cells = [
            f"{report['tau'][by][measured]:.2f} ({report['tau_middle'][by][measured]:.2f})"
            for measured in ("divergence_before", "divergence", "bits_per_byte")
        ]
        rows.append([name, *cells, f"{median(errors):.1%}, at most {max(errors):.0%}"])
    head = ["prediction", "tau: before healing", "after healing", "bits per byte", "error before healing"]
    return table(head, rows)


def _alternatives(layout: Layout, window: int) -> dict[Slot, tuple[Block | None, ...]]:
    """Returns the alternatives of each place, without those that need another place's block: places are drawn alone."""
    defaults = {slot: default_alternatives(layout, slot, window) for slot in slots_of(layout)}
    return {slot: tuple(block for block in blocks if lender_of(block) is None) for slot, blocks in defaults.items()}


def mix(alternatives: dict[Slot, tuple[Block | None, ...]], number: int) -> dict[Slot, Block | None]:
    """Returns the replaced places of mix `number`: a share between a tenth and two thirds of all."""
    rng = random.Random(number)
    share = rng.uniform(0.1, 0.67)
    return {slot: rng.choice(blocks) for slot, blocks in alternatives.items() if rng.random() < share}


def family_of(
    alternatives: dict[Slot, tuple[Block | None, ...]], kind: str, count: int
) -> list[dict[Slot, Block | None]]:
    """Returns different mixes that replace between one and two thirds of all mixers by the alternative of one kind.

    Raises:
        ValueError: there are no such blocks, or not so many mixes.
    """
    replaceable = {
        slot: block for slot, blocks in alternatives.items() for block in blocks if block and block.kind == kind
    }
    most = len(replaceable) * 2 // 3
    if count > sum(math.comb(len(replaceable), places) for places in range(1, most + 1)):
        raise ValueError(f"{len(replaceable)} places have no {count} mixes of {kind}")
    rng = random.Random(0)
    choices: dict[tuple[Slot, ...], dict[Slot, Block | None]] = {}
    while len(choices) < count:
        slots = sorted(rng.sample(sorted(replaceable), rng.randint(1, most)))
        choices.setdefault(tuple(slots), {slot: replaceable[slot] for slot in slots})
    return list(choices.values())


TINY = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16*2 C3]")
TINY_SETTINGS = AdaptSettings(
    library=LibrarySettings(
        tokens=1024, length=32, batch_tokens=256, score_tokens=256, score_length=32, recall_tokens=0
    ),
    healing=Healing(tokens=2048, length=32, batch_tokens=256, lr=1e-4, weight=1.0, k=64),
    window=8,
    points=3,
    held_out=0.2,
)


def run_kills(folder: Path, kills: int, seed: int, text: Path | None = None) -> None:
    """Writes FOLDER/kills.json: SIGKILLs of adaptations of a model, and whether the children are equal.

    The device is arithmetic in the process. The model is a tiny one; with `text`, SmolLM2-135M-Instruct, trained on
    this text for a moment.
    """
    if (folder / "calm").exists():
        raise SystemExit(f"{folder} has a campaign: name another folder")
    lab = tiny_lab(folder / "lab") if text is None else text
    adapt = adapt_tiny if text is None else adapt_smollm2
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nas.train.adapt.adapt", "nas.train.release.files", "torch._dynamo"])  # loaded once

    def process(inside: Path) -> BaseProcess:
        inside.mkdir(exist_ok=True)
        return context.Process(target=adapt, args=(lab, inside))

    report = kill_campaign(process, folder, hashes, _reached, kills=kills, seed=seed, share=0.5)
    write_durably(folder / "kills.json", _json(report))
    print(json.dumps({"kills": kills, "series": report["runs"][-1]["series"] + 1, "equal": report["equal"]}))


def adapt_tiny(lab: Path, folder: Path) -> None:
    """Adapts the tiny model in `lab` to four fifths of its arithmetic; a checkpoint after every step."""
    torch.set_num_threads(1)
    os.environ["NAS_CACHE"] = str(folder / "cache")
    library._CHECKPOINT_S = healing._CHECKPOINT_S = 0.0
    request = AdaptRequest(
        **dict(TINY_SETTINGS),
        model=lab / "teacher.safetensors",
        tokenizer=lab / "tokenizer.json",
        corpus=(lab / "text",),
        budget=(f"decode_p50<={0.8 * _arithmetic(TINY)['decode_p50']}ms",),
        output=folder / "out",
        library_folder=folder / "library",
        device="arithmetic",
        gguf=("f16",),
    )
    adaptation = prepare(request, lambda layouts: ArithmeticBench(), Worker(torch.device("cpu"), lambda line: None))
    write_child(adaptation, adaptation.run())


def adapt_smollm2(text: Path, folder: Path) -> None:
    """Adapts SmolLM2-135M-Instruct to 0.97 of its arithmetic, on as few tokens as give it a child."""
    os.environ["NAS_CACHE"] = str(folder / "cache")
    library._CHECKPOINT_S = healing._CHECKPOINT_S = 5.0
    length = {"length": 64, "batch_tokens": 512}
    scores = {"score_length": 64, "score_tokens": 512, "recall_tokens": 0}
    request = AdaptRequest(
        alternatives=("swa", "-"),
        library=LibrarySettings.model_validate({"tokens": 512} | length | scores),
        healing=Healing.model_validate({"tokens": 2048, "lr": 3e-5} | length),
        report_tokens=1024,
        points=2,
        model=fetch_smollm2(),
        corpus=(text,),
        budget=("decode_p50<=0.97x",),
        output=folder / "out",
        library_folder=folder / "library",
        device="arithmetic",
        gguf=("f16",),
    )
    adaptation = prepare(request, lambda layouts: ArithmeticBench(), Worker(torch.device("cpu"), say))
    write_child(adaptation, adaptation.run())


def tiny_lab(folder: Path) -> Path:
    """Returns a folder with text, a tokenizer and a model with random weights."""
    if not (folder / "teacher.safetensors").is_file():
        text, rng = folder / "text", random.Random(0)
        text.mkdir(parents=True, exist_ok=True)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(40)]
        for number in range(4):
            lines = (" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(200))
            (text / f"{number}.txt").write_text("\n".join(lines))
        train_tokenizer([text], TINY.vocab, folder / "tokenizer.json", lambda line: None)
        save_weights(Model(TINY, seed=1), folder / "teacher.safetensors")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """Returns name -> SHA-256 of the results of an adaptation: weights, figures, report, files and library."""
    files = [path for part in ("out", "library") for path in _files(folder / part)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        unfinished = "training" in path.relative_to(folder).parts or path.name.startswith(".")
        if path.is_file() and not unfinished:  # checkpoints hold seconds
            yield path


def _reached(folder: Path) -> str:
    """Returns the part of an adaptation that is not finished, by its files."""
    out = folder / "out"
    order = {
        "files": out / "report.json",
        "report": out / "child.safetensors",
        "healing": out / "front.json",
        "scores": next(iter((folder / "library/scores").glob("*.json")), out / "none"),
        "library": next(iter((folder / "library/blocks").glob("*.safetensors")), out / "none"),
        "costs": out / "request.json",
    }
    return next((part for part, path in order.items() if path.is_file()), "start")


def _arithmetic(layout: Layout) -> Mapping[str, float]:
    return {"decode_p50": layout.flops(256) / 1e6, "file_size": layout.params.total / 1e6}


@dataclass
class ArithmeticBench(Bench):
    """A device whose figures follow from a layout, with the noise that is stated.

    Args:
        figures: of a layout.
        log_sd: stated.
    """

    figures: Callable[[Layout], Mapping[str, float]] = _arithmetic
    log_sd: float | None = None

    def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
        values = self.figures(layout).items()
        figures = {name: Figure(value=value, unit=METRICS[name].unit, log_sd=self.log_sd) for name, value in values}
        return Measured(figures, 0.0)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _worker() -> Worker:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Worker(device, lambda line: print(line, flush=True))


def _text(folder: Path, size: Size) -> tuple[Vocabulary, list[Tokens]]:
    """Writes the training part of the size's corpus as files, and tokenises them."""
    text = folder / "text"
    if not text.is_dir():
        partial = folder / "text.partial"
        partial.mkdir(exist_ok=True)
        for name, domain in build_corpus(size.corpus, Path("/")).domains.items():
            content = domain.train.astype("uint8").tobytes().decode(errors="ignore")
            (partial / f"{name.replace('/', '-')}.txt").write_text(content)
        partial.rename(text)
    layout = Layout.parse(size.layout)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        train_tokenizer([text], layout.vocab, tokenizer, print)
    vocabulary = Vocabulary(tokenizer, layout.vocab)
    return vocabulary, [tokenise(document, vocabulary, None, 0, 1 << 18) for document in read_sources([text], 0.05)]


def _library(folder: Path, size: Size, **more: Any) -> tuple[Library, list[Tokens], Vocabulary]:
    """Returns the library of the size's teacher, which is trained first where the folder lacks it, and its text.

    more: settings of the library.
    """
    worker = _worker()
    vocabulary, sources = _text(folder, size)
    teacher = TrainedTeacher.load(_teacher(folder, size, sources, worker), worker.device)
    recall = recall_text(vocabulary, size.library.length, size.library.recall_tokens, 0)
    settings = size.library.model_copy(update=more)
    return Library(folder / "library", teacher, sources, settings, worker, recall), sources, vocabulary


def _teacher(folder: Path, size: Size, sources: list[Tokens], worker: Worker) -> Path:
    path = folder / "teacher.safetensors"
    if path.is_file():
        return path
    model = Model(Layout.parse(size.layout), seed=0).to(worker.device)
    length, batch = size.library.length, size.library.batch_tokens
    packed = Packed("teacher", sources, length, batch // length, 0)
    steps = math.ceil(size.teacher_tokens / batch)
    schedule = Schedule(warmup=0.02, decay=0.3, final=0.1)
    loss = torch.compile(lambda model, inputs, labels: pretraining_loss(model, inputs, labels) / batch)
    phase = TrainingPhase(
        "teacher",
        steps,
        batch,
        lambda step: [packed.batch(step)],
        loss,
        lambda step: size.lr * schedule.factor(step, steps),
    )
    checkpoint = TrainingCheckpoint(folder / "teacher-training.safetensors", {"key": size.layout})
    state = TrainingState(model, Optimiser(weight_decay=0.1, clip=1.0, balance_rate=1e-3), steps)
    fit(
        state,
        [phase],
        [checkpoint],
        worker,
        name="the teacher",
        precision=lambda: precision_of(worker.device, size.precision),
    )
    save_weights(model, path)
    return path


def _healed(
    folder: Path,
    choice: dict[Slot, Block | None],
    library: Library,
    sources: list[Tokens],
    vocabulary: Vocabulary,
    healing: Healing,
) -> dict[str, Any]:
    before = _losses(library.mix(choice), library, sources, vocabulary)
    model = heal(lambda: library.mix(choice), library, batches_of(sources, healing), healing, folder / "training")
    return {
        "choice": [[slot.depth, slot.part, block_name(block)] for slot, block in choice.items()],
        "layout": model.layout.format(),
        **{f"{name}_before": value for name, value in before.items()},
        **_losses(model, library, sources, vocabulary),
    }


def _losses(model: Model, library: Library, sources: list[Tokens], vocabulary: Vocabulary) -> dict[str, float]:
    """Returns divergences from the teacher and bits per byte, on text that neither scores nor healing have seen."""
    settings, worker = library.settings, library.worker
    recall = recall_text(vocabulary, settings.length, settings.recall_tokens, 1)
    text = report_text(sources, settings.length, settings.score_tokens).with_windows_of(recall)
    means = text.means(compared(library.teacher.model, model, text).kl)
    with torch.no_grad():
        reported = report_sources(sources, vocabulary, AdaptSettings().report_tokens)
        nats = window_nats(lambda ids: model(ids.to(worker.device))[0], reported, vocabulary, settings.length)
        bits = bits_of(nats, reported)[ALL]
    return {"divergence": means[TEXT_GROUP], "recall_divergence": means[RECALL_GROUP], "bits_per_byte": bits}


def _block(library: Library, slot: Slot, block: Block | None, scores: Mapping[Replacement, Score]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "depth": slot.depth,
        "part": slot.part,
        "block": block_name(block),
        "kl": dict(scores[slot, block].kl),
    }
    if block is not None:
        record = library.record(slot, block)
        row |= {"error_start": record.error_start, "error": record.error}
    return row


if __name__ == "__main__":
    main()
