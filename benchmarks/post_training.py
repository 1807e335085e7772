"""Trains small members from text to chat on generated tasks, and scores them after every stage; JSON.

    python -m benchmarks.post_training train --state FOLDER [--seeds 3] > result.json
    python -m benchmarks.post_training kills --state FOLDER [--kills 3] [--seed 0] > result.json
    python -m benchmarks.post_training passes --state FOLDER > result.json
    python -m benchmarks.post_training memory --state FOLDER > result.json

Each seed of `train` is a member of its own: pre-training, fine-tuning, alignment with on-policy preferences, and merges
of both by several methods. What is compared is the share of exact answers to questions that are not in the training
data: of all weights in PyTorch, and of those of each stage and one merge also from GGUF files in llama.cpp and .pte in
ExecuTorch. Means over seeds have 95 % intervals of Student's distribution. Everything is kept in FOLDER; started again
with the same folder, the command continues. Trainings run in this process, as `nas family post` runs them in a worker.

`kills` runs the same recipe with a merge in a process that is killed at random moments, and compares the weights of all
stages and the files with those of an undisturbed run. Checkpoints are written after every step.

`passes` measures what packing saves in fine-tuning: CPU times of the same steps with padding computed everywhere, and
in mixers alone.

`memory` measures the peak memory of merges of sharded checkpoints of two sizes with tensors of equal shapes, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.runs import DEADLINE_S, ended_or_killed, kill_campaign, print_json, say
from nas.core import paths
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.family import (
    FAMILY,
    PYTORCH,
    TRAINING,
    Family,
    Member,
    MemberTraining,
    families_folder,
    member_folder,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.core.stats import mean_interval
from nas.core.task import IGNORE
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import Worker
from nas.model.nn.model import Model
from nas.model.nn.weights import load_model
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_lines, write_lines
from nas.train.posttrain.evaluate import file_answerer
from nas.train.posttrain.generation import ALL, Respond, answerer, counts, exact_answers, grouped
from nas.train.posttrain.merging import MergeSettings, merge
from nas.train.posttrain.objective import answer_nats
from nas.train.posttrain.sft import padded, passes_of
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain import member_training
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.files import write_files
from nas.train.release.huggingface import DrawnWeights, Planned, shards, write_safetensors
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import read_tokenizer

LAYOUT = "d64 v512 ffn=swiglu:192 [C3 A4/2 C3 A4/2]"
_MOST_TOKENS = 4096
"""Of a pass, on CPUs."""
_LARGER = ("d256 v512 ffn=swiglu:768 [C3 A4/2 C3 A4/2]", "d512 v8192 ffn=swiglu:1536 [C3 M A8/4 C3]")
_STEPS = 12
_MERGED = "d512 v16384 ffn=swiglu:1408 [{layers}]"
_LAYERS = "C3*3 A8/4"
_SHARD_BYTES = 30 * 10**6
MERGES: dict[str, MergeSettings] = {
    "soup": MergeSettings(method="soup"),
    "task-arithmetic": MergeSettings(method="task-arithmetic"),
    "ties": MergeSettings(method="ties", density=0.5),
    "dare-ties": MergeSettings(method="dare-ties", density=0.5),
    "della": MergeSettings(method="della", density=0.5, epsilon=0.5),
}


def main() -> None:
    options = parsed(sys.argv[1:])
    print_json(options.run(options))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command line; `run` is the function that it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, run in (("train", run_trainings), ("kills", run_kills), ("passes", run_passes), ("memory", run_memory)):
        mode_parser = modes.add_parser(mode)
        mode_parser.set_defaults(run=run)
        mode_parser.add_argument(
            "--state", type=lambda text: Path(text).resolve(), required=True, help="keeps everything"
        )
        mode_parser.add_argument("--layout", default=LAYOUT)
        mode_parser.add_argument("--train", type=int, default=2000, help="conversations")
        mode_parser.add_argument("--questions", type=int, default=200, help="that are answered on policy")
        mode_parser.add_argument("--epochs", type=float, default=6, help="of fine-tuning")
        mode_parser.add_argument("--lr", type=float, default=3e-3, help="of fine-tuning")
        mode_parser.add_argument("--test", type=int, default=200, help="questions")
        if mode == "train":
            mode_parser.add_argument("--seeds", type=int, default=3)
            mode_parser.add_argument("--only", type=int, help="do this seed alone; several processes may do one each")
            mode_parser.add_argument(
                "--report", action="store_true", help="compute nothing more: report what FOLDER holds"
            )
        elif mode == "kills":
            mode_parser.add_argument("--kills", type=int, default=3)
            mode_parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    return parser.parse_args(argv)


def run_trainings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns answers, times and settings of all seeds, and means over them."""
    _write_data(options)
    os.environ["NAS_HOME"] = str(options.state / "home")
    member_training.run_workers = run_in_process
    layout = Layout.parse(options.layout)
    write_family(layout, options.seeds)  # the same by each process
    test = read_lines(options.state / "data" / "test.jsonl", Conversation)
    seeds = range(options.seeds) if options.only is None else [options.only]
    members = {str(seed): _member(seed, layout, test, options) for seed in seeds}
    members = {seed: member for seed, member in members.items() if member["answers"]}
    names = dict.fromkeys(name for member in members.values() for name in member["answers"])
    return {
        "layout": layout.format(),
        "parameters": layout.params.total,
        **{name: getattr(options, name) for name in ("train", "test", "questions", "epochs", "lr")},
        "means": [_mean(name, [member["answers"] for member in members.values()], test) for name in names],
        "tasks": [question.task for question in test],
        "seeds": members,
    }


def _mean(name: str, answers: Sequence[Mapping[str, str]], test: Sequence[Conversation]) -> dict[str, Any]:
    """Returns shares of exact answers of weights in a runtime, over seeds; of files also the change from PyTorch."""
    weights, _, runtime = name.partition(" ")
    scores = []
    for marks in answers:
        if name in marks:
            right, before = ([mark == "1" for mark in marks[column]] for column in (name, f"{weights} {PYTORCH}"))
            scores.append(counts(grouped(test, right), grouped(test, before)))
    changes = [score[ALL].change or (0.0,) for score in scores]
    return {
        "weights": weights,
        "runtime": runtime,
        "seeds": len(scores),
        "exact": _interval([score[ALL].exact / len(test) for score in scores]),
        "change": None if runtime == PYTORCH else _interval([change[0] for change in changes]),
        "tasks": {
            task: statistics.fmean(score[task].exact / score[task].questions for score in scores)
            for task in scores[0]
            if task != ALL
        },
    }


def _interval(values: Sequence[float]) -> dict[str, Any]:
    mean, half = mean_interval(values)
    return {"mean": mean, "ci95": None if math.isinf(half) else [mean - half, mean + half]}


def run_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the kills of runs of a recipe, and whether their results equal those of an undisturbed one."""
    _write_data(options)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "nas.train.release.files", "torch._dynamo"])  # loaded once
    for old in options.state.glob("*/families"):
        shutil.rmtree(old.parent)
    ended_or_killed(context.Process(target=os.getpid), math.inf, DEADLINE_S)
    campaign = kill_campaign(
        lambda home: context.Process(target=_post, args=(options, home)),
        options.state,
        _hashes,
        lambda home: sum(name.startswith("training/") for name in _hashes(home)),
        kills=options.kills,
        seed=options.seed,
    )
    return {"layout": options.layout, "train": options.train, "epochs": options.epochs} | campaign


def _post(options: argparse.Namespace, folder: Path) -> None:
    """Runs the recipe of a member, with a merge, in a home and cache of its own."""
    cache = folder / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for entry in paths.cache().iterdir():  # builds of runtimes; data that the recipe makes is its own
        if entry.name not in ("conversations", "preferences", "tokens") and not (cache / entry.name).is_symlink():
            (cache / entry.name).symlink_to(entry)
    os.environ["NAS_HOME"], os.environ["NAS_CACHE"] = str(folder), str(cache)
    member_training.run_workers = run_in_process
    write_family(Layout.parse(options.layout), 1)
    recipe = _recipe(options, 0).model_dump(mode="json")
    recipe["stages"].append({"kind": "merge", "method": "ties", "density": 0.5})
    files = FileOptions(context=512, transformers=False, gguf=("q4_0",))
    run_recipe(
        "chat",
        "seed0",
        PostTrainingRecipe.model_validate(recipe),
        options.state,
        lambda line: None,
        workers=1,
        files=files,
        checkpoint_s=0.0,
    )


def _hashes(home: Path) -> dict[str, str]:
    """Returns name -> SHA-256 of the weights of all stages, and of the files."""
    folder = home / "families" / "chat" / "seed0"
    files = [*folder.glob("training/*/weights.safetensors"), *folder.rglob("*.gguf")]
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(files)}


def run_passes(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the padding of steps, and what they take packed as a share of what they take padded."""
    _write_data(options)
    torch.set_num_threads(1)
    chat = ChatTokenizer(read_tokenizer(options.state / "tokenizer.json"), "tokenizer.json")
    lines = read_lines(options.state / "data" / "train.jsonl", Conversation)
    conversations = [chat.conversation(line) for line in lines]
    data = [
        (ids[:-1].astype(np.int64), np.where(counted[1:], ids[1:], IGNORE).astype(np.int64))
        for ids, counted in conversations
    ]

    def padded_nats(model: Model, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        answers = labels != IGNORE
        logits = model.logits(model.features(inputs)[answers])
        return torch.nn.functional.cross_entropy(logits, labels[answers], reduction="none")

    def seconds(model: Model, passes: Sequence[tuple[torch.Tensor, torch.Tensor]], packed: bool) -> float:
        began = time.process_time()
        for inputs, labels in passes:
            nats = answer_nats(model, inputs, labels)[0] if packed else padded_nats(model, inputs, labels)
            torch.autograd.backward(nats.sum())
        return time.process_time() - began

    rows = []
    for layout, batch in itertools.product((Layout.parse(options.layout), *map(Layout.parse, _LARGER)), (16, 32)):
        model, ratios, text, whole = Model(layout, seed=0), [], 0, 0
        for number in range(_STEPS):
            drawn = random.Random(number).sample(data, batch)
            split = [[drawn[i] for i in one] for one in passes_of([len(x) for x, _ in drawn], _MOST_TOKENS)]
            passes = [(padded([x for x, _ in one], chat.pad), padded([y for _, y in one], IGNORE)) for one in split]
            text, whole = text + sum(len(x) for x, _ in drawn), whole + sum(inputs.numel() for inputs, _ in passes)
            times = {packed: seconds(model, passes, packed) for packed in random.sample((False, True), 2)}
            ratios.append(times[True] / times[False])
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "layout": layout.format(),
                "parameters": layout.params.total,
                "batch": batch,
                "padding": 1 - text / whole,
                "packed_over_padded": middle,
                "quartiles": [low, high],
            }
        )
    return {"steps": rows}


def run_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak memory of merges of two models with a base, by size and method."""
    rows = []
    for repeats in (1, 8):
        layout = Layout.parse(_MERGED.format(layers=" ".join([_LAYERS] * repeats)))
        folders = [options.state / f"merged-{repeats}" / name for name in ("base", "one", "two")]
        for seed, folder in enumerate(folders):
            _write_shards(folder, layout, seed)
        size = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
        for name in ("soup", "task-arithmetic", "ties", "dare-ties"):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                out = options.state / "merged.safetensors"
                peak = pool.submit(_merge_peak_mb, folders, MERGES[name], out).result()
            say(f"{layout.params.total:,} weights, {name}: {peak:.0f} MB")
            rows.append({"parameters": layout.params.total, "model_mb": size / 1e6, "method": name, "peak_mb": peak})
    return {"layout": _MERGED.format(layers=f"({_LAYERS}) ..."), "merges": rows}


def _merge_peak_mb(folders: Sequence[Path], settings: MergeSettings, out: Path) -> float:
    """Returns the peak resident memory of a merge beyond what this process had before, in MB."""
    torch.set_num_threads(1)
    base, *models = folders
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS, see proc(5)
    before = _status_mb("VmRSS")
    merge(models, base, settings, out)
    return _status_mb("VmHWM") - before


def _status_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def _write_shards(folder: Path, layout: Layout, seed: int) -> None:
    """Writes random weights in bfloat16, as shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    state = DrawnWeights(layout, seed, torch.bfloat16)
    planned = [Planned(name, state.shape(name), torch.bfloat16) for name in sorted(state.names)]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards(planned, _SHARD_BYTES)):
        tensors = (torch.from_numpy(state.floats(one.name)) for one in shard)
        write_safetensors(folder / f"{number}.safetensors", shard, tensors, {"layout": layout.format()})
        index |= {one.name: f"{number}.safetensors" for one in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _write_data(options: argparse.Namespace) -> None:
    data, tokenizer = options.state / "data", options.state / "tokenizer.json"
    if not (data / "questions.jsonl").is_file():
        write_tasks(data, options.train, options.test, pairs=0, lines=4000)
        write_lines(data / "questions.jsonl", read_lines(data / "train.jsonl", Conversation)[: options.questions])
    if not tokenizer.is_file():
        train_tokenizer([data / "text", data / "train.jsonl"], Layout.parse(options.layout).vocab, tokenizer, say)


def _recipe(options: argparse.Namespace, seed: int) -> PostTrainingRecipe:
    text = {
        "tokens": 60_000,
        "batch_tokens": 1024,
        "lr": 3e-3,
        "seed": seed,
        "stages": [{"name": "text", "length": 128, "share": 1.0, "schedule": {"warmup": 0.1, "decay": 0.2}}],
    }
    stages: list[dict[str, Any]] = [
        {"kind": "pretrain", "corpus": ["data/text"], "settings": text},
        {
            "kind": "sft",
            "data": [{"path": "data/train.jsonl"}],
            "epochs": options.epochs,
            "batch": 16,
            "lr": options.lr,
            "final": 0.05,
            "seed": seed,
            "filters": {"length": 512},
        },
        {
            "kind": "prefer",
            "questions": ["data/questions.jsonl"],
            "judge": "contains",
            "samples": 3,
            "answer_tokens": 40,
            "batch": 16,
            "epochs": 2,
            "lr": 1e-4,
            "seed": seed,
        },
    ]
    return PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})


def _member(seed: int, layout: Layout, test: Sequence[Conversation], options: argparse.Namespace) -> dict[str, Any]:
    """Returns answers of a seed's weights ("1": exact), and times and settings of its stages."""
    size, state = f"seed{seed}", options.state
    record = read_record(member_folder("chat", size) / TRAINING, MemberTraining)
    if not options.report:
        none = FileOptions(transformers=False, gguf=())
        record = run_recipe("chat", size, _recipe(options, seed), state, say, workers=1, files=none, checkpoint_s=10.0)
    if record is None or record.kind != "prefer":
        return {"stages": {}, "answers": {}}
    chat = ChatTokenizer(read_tokenizer(state / "tokenizer.json"), "tokenizer.json")
    folder = state / "scored" / size
    folder.mkdir(parents=True, exist_ok=True)
    answers: dict[str, str] = {}

    def answered(name: str, responding: Callable[[], AbstractContextManager[Respond]]) -> None:
        path = folder / f"{name}.txt"
        if not path.is_file():
            if options.report:
                return
            say(f"{size}: answers of {name}")
            with responding() as respond:
                right = exact_answers(test, chat, respond)
            write_durably(path, "".join("01"[mark] for mark in right).encode())
        answers[name] = path.read_text()

    @contextmanager
    def pytorch(path: Path) -> Iterator[Respond]:
        yield answerer(load_model(path, layout), chat).respond

    @contextmanager
    def file(name: str, path: Path, quantisation: str) -> Iterator[Respond]:
        file_options = FileOptions(
            name=name, context=512, gguf=("q4_0",), pte_context=512, tokenizer=state / "tokenizer.json"
        )
        write_files(folder / name, layout, Checkpoint(path, sha256_of(path)), file_options, say)
        with file_answerer(folder / name, quantisation, 512) as answerer:
            yield answerer.respond

    training = member_folder("chat", size) / "training"
    weights = {stage.kind: training / stage.config["key"][:12] / "weights.safetensors" for stage in record.history}
    for name, settings in MERGES.items():
        weights[name] = folder / f"{name}.safetensors"
        if not weights[name].is_file():
            merge([weights["sft"], weights["prefer"]], weights["pretrain"], settings, weights[name])
    compared = ("pretrain", "sft", "prefer", "ties")
    for name in compared:
        answered(f"{name} {PYTORCH}", partial(pytorch, weights[name]))
    for name in reversed(compared):
        for quantisation in ("q4_0", "8da4w"):
            answered(f"{name} {quantisation}", partial(file, name, weights[name], quantisation))
    for name in sorted(set(MERGES) - {"ties"}):
        answered(f"{name} {PYTORCH}", partial(pytorch, weights[name]))
    stages = {
        stage.kind: {
            "steps": stage.steps,
            "tokens": stage.tokens,
            "seconds": stage.seconds,
            "peak_memory_mb": stage.peak_memory_mb,
            "held_out": {Path(name).name: value for name, value in stage.held_out.items()},
            "curve": stage.curve[:: max(1, len(stage.curve) // 20)],
        }
        for stage in record.history
    }
    return {"stages": stages, "answers": answers}


def run_in_process(work: member_training.Work, workers: int, log: Log) -> dict[str, Any]:
    """`run_workers` without Ray: one worker, in this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return member_training.run_plan(work, Worker(torch.device("cpu"), log))


def write_family(layout: Layout, seeds: int) -> None:
    """Writes the family `chat` with a member `seedN` for each seed."""
    members = tuple(
        Member(
            size=f"seed{seed}",
            layout=layout.format(),
            parameters=layout.params.total,
            active=layout.params.active,
            non_embedding=layout.params.non_embedding,
            decisions=(),
            tried=(),
        )
        for seed in range(seeds)
    )
    family = Family(
        name="chat", made="2026-11-22", seed=0, pattern=layout.format(), sources=(), decisions=(), members=members
    )
    write_record(families_folder() / "chat" / FAMILY, family)


if __name__ == "__main__":
    main()
