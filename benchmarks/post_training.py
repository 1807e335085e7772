"""Trains small members from text to chat on generated tasks, and scores them after every stage; JSON.

    python benchmarks/post_training.py train --state FOLDER [--seeds 3] > result.json
    python benchmarks/post_training.py kills --state FOLDER [--kills 3] [--seed 0] > result.json
    python benchmarks/post_training.py passes --state FOLDER > result.json

Each seed is a member of its own: pre-training, fine-tuning, alignment with on-policy preferences, and merges of both
by several methods. What is compared is the share of exact answers to questions that are not in the training data, with
95 % Wilson intervals: after each stage in PyTorch, and at last in the GGUF files of the aligned weights with llama.cpp
and in their .pte with ExecuTorch.
Every stage of every seed is one result in FOLDER; started again with the same folder, it continues. Trainings run in
this process, as `nas family post` runs them in a worker.

`kills` runs the same recipe and a merge by `nas family post`, undisturbed and killed at random moments, and compares
the weights of all stages and the files.

`passes` measures what padding costs in fine-tuning: times of steps whose conversations are split into passes in several
ways, and of the same number of tokens without any padding, which is the least that packing could take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import print_json, say

from nas.core.durable import write_durably
from nas.core.family import FAMILY, Family, Member, TaskScore, families_folder, member_folder, write_record
from nas.core.layout import Layout
from nas.core.task import IGNORE
from nas.nn.fit import Log, Worker
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.posttrain.conversations import ChatTokenizer, Conversation, read_lines, write_lines
from nas.posttrain.files import file_responder
from nas.posttrain.generation import exact_matches, responder
from nas.posttrain.merging import MergeSettings, merge
from nas.posttrain.objective import answer_nats
from nas.posttrain.recipe import PostTrainingRecipe, run_recipe
from nas.posttrain.sft import PASS_TOKENS, padded, passes_of
from nas.posttrain.tasks import write_tasks
from nas.pretrain import member_training
from nas.pretrain.tokenizer_training import train_tokenizer
from nas.release.files import sha256_of
from nas.release.options import FileOptions
from nas.release.tokenizer import read_tokenizer

LAYOUT = "d64 v512 ffn=swiglu:192 [C3 A4/2 C3 A4/2]"
_MOST_TOKENS = 4096
"""Of a pass, on CPUs."""
MERGES: dict[str, MergeSettings] = {
    method: MergeSettings(method=method, density=density)
    for method, density in (("soup", 1.0), ("task-arithmetic", 1.0), ("ties", 0.5), ("dare-ties", 0.5), ("della", 0.5))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, run in (("train", run_trainings), ("kills", run_kills), ("passes", run_passes)):
        own = modes.add_parser(mode)
        own.set_defaults(run=run)
        own.add_argument("--state", type=Path, required=True, help="folder that everything is kept in")
        own.add_argument("--layout", default=LAYOUT)
        own.add_argument("--train", type=int, default=2000, help="conversations")
        own.add_argument("--questions", type=int, default=200, help="that are answered on policy")
        own.add_argument("--epochs", type=float, default=6, help="of fine-tuning")
        own.add_argument("--lr", type=float, default=3e-3, help="of fine-tuning")
        own.add_argument("--test", type=int, default=200, help="questions")
        if mode == "train":
            own.add_argument("--seeds", type=int, default=3)
        elif mode == "kills":
            own.add_argument("--kills", type=int, default=3)
            own.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args()
    state = options.state.resolve()
    _write_data(state, options)
    print_json(options.run(state, options))


def run_trainings(state: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns scores, times and settings of all seeds."""
    os.environ["NAS_HOME"] = str(state / "home")
    member_training.run_workers = _here
    layout = Layout.parse(options.layout)
    _write_family(layout, options.seeds)
    members = {str(seed): _member(seed, layout, options, state) for seed in range(options.seeds)}
    return {
        "layout": layout.format(),
        "parameters": layout.params.total,
        "train": options.train,
        "test": options.test,
        "epochs": options.epochs,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seeds": members,
    }


def run_kills(state: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the kills of a run of `nas family post`, and whether its results equal those of an undisturbed one.

    A run is killed at a moment drawn from the first half of the time that the undisturbed one took, and started again.
    """
    recipe = _recipe(options, 0).model_dump(mode="json", exclude_none=True)
    recipe["stages"].append({"kind": "merge", "method": "soup", "models": ["sft", "prefer"]})
    (state / "recipe.json").write_text(json.dumps(recipe))  # JSON is YAML
    began = time.monotonic()
    reached = _post(state, "calm", options.layout, math.inf)
    assert reached is None
    calm_s, wanted = time.monotonic() - began, _hashes(state / "calm")
    rng, rows = random.Random(options.seed), []
    for _ in range(options.kills):
        moment = rng.uniform(0, calm_s / 2)
        reached = _post(state, "killed", options.layout, moment)
        rows.append({"after_s": moment, "killed": reached is not None, "stages_done": reached})
    assert _post(state, "killed", options.layout, math.inf) is None
    return {
        "layout": options.layout, "train": options.train, "epochs": options.epochs, "seed": options.seed,
        "calm_s": calm_s, "kills": rows, "equal": _hashes(state / "killed") == wanted, "files": wanted,
    }  # fmt: skip


def run_passes(state: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns padding and times of steps by batch size and by the cost of a pass that they are split with."""
    torch.set_num_threads(1)
    layout = Layout.parse(options.layout)
    model = Model(layout, seed=0)
    chat = ChatTokenizer(read_tokenizer(state / "tokenizer.json"), "tokenizer.json")
    rows = [chat.conversation(each) for each in read_lines(state / "data" / "train.jsonl", Conversation)]
    data = [(ids[:-1].astype(np.int64), np.where(own[1:], ids[1:], IGNORE).astype(np.int64)) for ids, own in rows]

    def seconds(passes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        began = time.perf_counter()
        for inputs, labels in passes:
            answer_nats(model, inputs, labels)[0].sum().backward()
        return time.perf_counter() - began

    found = []
    for batch in (16, 32):
        steps = [random.Random(number).sample(data, batch) for number in range(24)]
        lengths = [[len(inputs) for inputs, _ in step] for step in steps]
        for overhead in (0, 64, PASS_TOKENS, _MOST_TOKENS):
            split = [
                [([step[i] for i in one]) for one in passes_of(own, _MOST_TOKENS, overhead)]
                for step, own in zip(steps, lengths, strict=True)
            ]
            passes = [[(padded([x for x, _ in one], chat.pad), padded([y for _, y in one], IGNORE)) for one in each]
                      for each in split]  # fmt: skip
            tokens = sum(inputs.numel() for each in passes for inputs, _ in each)
            found.append(
                {
                    "batch": batch,
                    "pass_tokens": overhead,
                    "passes_per_step": sum(map(len, passes)) / len(steps),
                    "padding": 1 - sum(map(sum, lengths)) / tokens,
                    "step_s": statistics.median(map(seconds, passes)),
                }
            )
        packed = [
            [tuple(torch.from_numpy(np.concatenate(each)[: len(np.concatenate(each)) // 64 * 64].reshape(-1, 64))
                   for each in zip(*step, strict=True))] for step in steps
        ]  # fmt: skip
        found.append({"batch": batch, "pass_tokens": None, "passes_per_step": 1, "padding": 0.0,
                      "step_s": statistics.median(map(seconds, packed))})  # fmt: skip
    return {"layout": layout.format(), "parameters": layout.params.total, "splits": found}


def _post(state: Path, home: str, layout: str, moment: float) -> int | None:
    """Runs `nas family post`, and kills it after `moment` seconds.

    Returns:
        None if it ended before, else how many stages had ended.

    Raises:
        RuntimeError: it failed, or took longer than an hour.
    """
    os.environ["NAS_HOME"] = str(state / home)
    _write_family(Layout.parse(layout), 1)
    argv = [sys.executable, "-m", "nas.cli", "family", "post", "chat", "--size", "seed0", "--recipe"]
    with subprocess.Popen([*argv, str(state / "recipe.json")], stdout=subprocess.DEVNULL) as process:
        try:
            code = process.wait(min(moment, 3600.0))
        except subprocess.TimeoutExpired:
            process.kill()
            if math.isinf(moment):
                raise RuntimeError("the run did not end within an hour") from None
            return len(list(member_folder("chat", "seed0").glob("training/*/weights.safetensors")))
    if code:
        raise RuntimeError(f"the run ended with exit status {code}")
    return None


def _hashes(home: Path) -> dict[str, str]:
    """Returns name -> SHA-256 of the weights of all stages, and of the files."""
    folder = home / "families" / "chat" / "seed0"
    found = [*folder.glob("training/*/weights.safetensors"), *folder.rglob("*.gguf")]
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(found)}


def _write_data(state: Path, options: argparse.Namespace) -> None:
    data = state / "data"
    if not (data / "text" / "text.txt").is_file():
        write_tasks(data, options.train, options.test, pairs=0, lines=4000)
        write_lines(data / "questions.jsonl", read_lines(data / "train.jsonl", Conversation)[: options.questions])
    if not (state / "tokenizer.json").is_file():
        train_tokenizer([data / "text", data / "train.jsonl"], Layout.parse(options.layout).vocab,
                        state / "tokenizer.json", say)  # fmt: skip


def _recipe(options: argparse.Namespace, seed: int) -> PostTrainingRecipe:
    text = {
        "tokens": 60_000, "batch_tokens": 1024, "lr": 3e-3, "seed": seed,
        "stages": [{"name": "text", "length": 128, "share": 1.0, "schedule": {"warmup": 0.1, "decay": 0.2}}],
    }  # fmt: skip
    stages: list[dict[str, Any]] = [
        {"kind": "pretrain", "corpus": ["data/text"], "settings": text},
        {"kind": "sft", "data": [{"path": "data/train.jsonl"}], "epochs": options.epochs,
         "batch": 16, "lr": options.lr, "final": 0.05, "seed": seed, "filters": {"length": 512}},
        {"kind": "prefer", "questions": ["data/questions.jsonl"], "judge": "contains", "samples": 3,
         "answer_tokens": 40, "batch": 16, "epochs": 2, "lr": 1e-4, "seed": seed},
    ]  # fmt: skip
    return PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})


def _member(seed: int, layout: Layout, options: argparse.Namespace, state: Path) -> dict[str, Any]:
    """Returns scores, times and settings of every stage of a seed."""
    size = f"seed{seed}"
    files = FileOptions(context=512, transformers=False, gguf=("q4_0", "f16"), pte_context=512)
    record = run_recipe("chat", size, _recipe(options, seed), state, say, workers=1, files=files)
    folder = member_folder("chat", size)
    chat = ChatTokenizer(read_tokenizer(state / "tokenizer.json"), "tokenizer.json")
    test = read_lines(state / "data" / "test.jsonl", Conversation)
    kept = state / "scores" / size
    kept.mkdir(parents=True, exist_ok=True)

    def scored(name: str, answer: Any) -> dict[str, Any]:
        path = kept / f"{name}.json"
        if not path.is_file():
            say(f"{size}: scoring {name}")
            counts: Mapping[str, TaskScore] = answer()
            write_durably(
                path, json.dumps({task: each.model_dump(mode="json") for task, each in counts.items()}).encode()
            )
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def pytorch(weights: Path) -> Mapping[str, TaskScore]:
        model = Model(layout, None)
        load_weights(model, weights)
        return exact_matches(test, chat, responder(model.eval(), chat))

    weights = {
        each.kind: folder / "training" / each.config["key"][:12] / "weights.safetensors" for each in record.history
    }
    stages: dict[str, Any] = {
        each.kind: {
            "exact": scored(each.kind, lambda path=weights[each.kind]: pytorch(path)),
            "held_out": each.held_out,
            "steps": each.steps,
            "tokens": each.tokens,
            "seconds": each.seconds,
            "curve": each.curve[:: max(1, len(each.curve) // 20)],
        }
        for each in record.history
    }
    merges = {}
    for name, settings in MERGES.items():
        path = kept / f"{name}.safetensors"
        if not path.is_file():
            merge([weights["sft"], weights["prefer"]], weights["pretrain"], settings, path)
        merges[name] = scored(name, lambda path=path: pytorch(path))
    quantised = {}
    for quantisation in (*files.gguf, "8da4w"):
        with file_responder(folder, quantisation, context=512) as respond:
            quantised[quantisation] = scored(quantisation, lambda respond=respond: exact_matches(test, chat, respond))
    return {"stages": stages, "merges": merges, "files": quantised}


def _here(spec: Mapping[str, Any], workers: int, log: Log) -> dict[str, Any]:
    """`run_workers` without Ray: one worker, in this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    member_training.run_plan(spec, Worker(torch.device("cpu"), log))
    outcome: dict[str, Any] = json.loads((Path(spec["folder"]) / "outcome.json").read_text())
    return outcome


def _write_family(layout: Layout, seeds: int) -> None:
    members = tuple(
        Member(
            size=f"seed{seed}", layout=layout.format(), parameters=layout.params.total, active=layout.params.active,
            non_embedding=layout.params.non_embedding, decisions=(), tried=(),
        )
        for seed in range(seeds)
    )  # fmt: skip
    family = Family(
        name="chat", made="2026-11-22", seed=0, pattern=layout.format(), sources=(), decisions=(), members=members
    )
    write_record(families_folder() / "chat" / FAMILY, family)


if __name__ == "__main__":
    main()
