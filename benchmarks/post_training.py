"""Trains small members from text to chat on generated tasks, and scores them after every stage; JSON.

    python benchmarks/post_training.py --state FOLDER [--seeds 3] > result.json

Each seed is a member of its own: pre-training, fine-tuning, alignment with on-policy preferences, and merges of both
by several methods. What is compared is the share of exact answers to questions that are not in the training data, with
95 % Wilson intervals: after each stage in PyTorch, and at last in the GGUF files of the aligned weights with llama.cpp.
Every stage of every seed is one result in FOLDER; started again with the same folder, it continues. Trainings run in
this process, as `nas family post` runs them in a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from runs import print_json, say
from scipy.stats import binomtest

from nas.core.durable import write_durably
from nas.core.family import FAMILY, Family, Member, families_folder, member_folder, write_record
from nas.core.layout import Layout
from nas.nn.fit import Log, Worker
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.posttrain.conversations import ChatTokenizer, Conversation, read_lines, write_lines
from nas.posttrain.generation import exact_matches, responder
from nas.posttrain.gguf import gguf_file, gguf_responder
from nas.posttrain.merging import MergeSettings, merge
from nas.posttrain.recipe import PostTrainingRecipe, run_recipe
from nas.posttrain.tasks import write_tasks
from nas.pretrain import member_training
from nas.pretrain.tokenizer_training import train_tokenizer
from nas.release.options import FileOptions
from nas.release.tokenizer import read_tokenizer

LAYOUT = "d64 v512 ffn=swiglu:192 [C3 A4/2 C3 A4/2]"
MERGES: dict[str, MergeSettings] = {
    method: MergeSettings(method=method, density=density)
    for method, density in (("soup", 1.0), ("task-arithmetic", 1.0), ("ties", 0.5), ("dare-ties", 0.5), ("della", 0.5))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder that everything is kept in")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layout", default=LAYOUT)
    parser.add_argument("--train", type=int, default=2000, help="conversations")
    parser.add_argument("--test", type=int, default=200, help="questions")
    parser.add_argument("--questions", type=int, default=200, help="that are answered on policy")
    parser.add_argument("--epochs", type=float, default=6, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=3e-3, help="of fine-tuning")
    options = parser.parse_args()
    state = options.state.resolve()
    os.environ["NAS_HOME"] = str(state / "home")
    member_training.run_workers = _here
    data = state / "data"
    if not (data / "text" / "text.txt").is_file():
        write_tasks(data, options.train, options.test, pairs=0, lines=4000)
        write_lines(data / "questions.jsonl", read_lines(data / "train.jsonl", Conversation)[: options.questions])
    layout = Layout.parse(options.layout)
    if not (state / "tokenizer.json").is_file():
        train_tokenizer([data / "text", data / "train.jsonl"], layout.vocab, state / "tokenizer.json", say)
    _write_family(layout, options.seeds)
    members = {str(seed): _member(seed, layout, options, state) for seed in range(options.seeds)}
    print_json(
        {
            "layout": layout.format(),
            "parameters": layout.params.total,
            "train": options.train,
            "test": options.test,
            "epochs": options.epochs,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "seeds": members,
        }
    )


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
    files = FileOptions(context=512, transformers=False, gguf=("q4_0", "f16"))
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
            write_durably(path, json.dumps(_with_intervals(answer())).encode())
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def pytorch(weights: Path) -> Mapping[str, tuple[int, int]]:
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
    for quantisation in files.gguf:
        path = gguf_file(folder, quantisation)
        with gguf_responder(path, chat, context=512) as respond:
            quantised[quantisation] = scored(quantisation, lambda respond=respond: exact_matches(test, chat, respond))
    return {"stages": stages, "merges": merges, "gguf": quantised}


def _with_intervals(counts: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Any]]:
    found = {}
    for task, (right, asked) in counts.items():
        interval = binomtest(right, asked).proportion_ci(0.95, "wilson")
        found[task] = {"right": right, "asked": asked, "ci95": [round(interval.low, 4), round(interval.high, 4)]}
    return found


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
