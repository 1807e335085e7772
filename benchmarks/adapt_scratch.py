"""A child of `nas adapt` beside the best search from scratch: equal budget, text and seconds.

    python -m benchmarks.adapt scratch FOLDER [--budget 0.375]

FOLDER is that of `mixes --size small`. `nas adapt` runs with a library of its own, so that its seconds count. The
search from scratch is a study of `SPACE` with the same budget, on the same text; it gets `SEARCH_SHARE` of these
seconds, and its best layout is trained for the rest, as the teacher was. Both run on one thread; what has ended is not
repeated, and what was killed counts from its start. Report: `RECORDED`, with all models measured in one run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.page import table
from benchmarks.runs import say
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, precision_of
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import load_model, save_weights
from nas.model.text.documents import read_sources
from nas.train.adapt.request import AdaptSettings
from nas.train.adapt.text import report_sources
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.pretrain.loss import pretraining_loss
from nas.train.pretrain.next_token import ALL, Packed, bits_of, window_nats
from nas.train.pretrain.recipe import Schedule

RECORDED = Path(__file__).parent / "recorded/adapt-scratch.json"
TOKENS = 1_000_000
"""Of healing: a twentieth of the teacher's."""
SEARCH_SHARE = 0.4
_LENGTH, _BATCH, _LR = 256, 4096, 1.5e-3
_SCHEDULE = Schedule(warmup=0.02, decay=0.3, final=0.1)
_PROMPT, _GEN = 128, 128
_SETTINGS = {
    "library": {
        "tokens": 1 << 17,
        "length": _LENGTH,
        "batch_tokens": _BATCH,
        "score_tokens": 1 << 14,
        "precision": "bfloat16",
    },
    "healing": {"tokens": TOKENS, "length": _LENGTH, "batch_tokens": _BATCH, "precision": "bfloat16"},
    "window": 32,
}
SPACE: dict[str, Any] = {
    "v": 1,
    "name": "adapt-scratch",
    "model": {
        "d_model": 320,
        "depth": {"min": 3, "max": 8},
        "vocab": 2048,
        "params": {"total": {"min": "3M", "max": "9M"}},
    },
    "mixers": {
        "conv": {"kernel": [3, 4]},
        "gqa": {"heads": 5, "kv_heads": {"choices": [1, 5], "scope": "layer"}},
        "swa": {"heads": 5, "kv_heads": {"choices": [1, 5], "scope": "layer"}, "window": 32},
    },
    "ffn": {"swiglu": {"width": [512, 640, 768, 896, 1024]}},
    "devices": ["local"],
    "runtimes": [{"name": "llama.cpp", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": _PROMPT, "gen": _GEN}},
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "decode_p50", "workload": "chat"},
    ],
    "references": {
        "published": "d320 v2048 ffn=swiglu:768 [C3*2 A5/5 C3 A5/5 C3]",
        "attention": "d320 v2048 ffn=swiglu:768 [A5/5*5]",
    },
    "quality": {
        "proxy_d_model": 64,
        "rungs": [
            {"name": "short", "lm_steps": 100, "keep": 0.5},
            {"name": "long", "lm_steps": 200, "seeds": [0, 1]},
        ],
    },
}


def run(folder: Path, budget: float) -> None:
    """Runs what FOLDER lacks, and writes `RECORDED`."""
    torch.set_num_threads(1)
    adapted = _once(folder / "adapted.json", lambda: _adapt(folder, budget))
    searched = _once(folder / "searched.json", lambda: _search(folder, budget, SEARCH_SHARE * adapted["seconds"]))
    vocabulary, sources = _text(folder)
    trained = _once(
        folder / "scratch.json",
        lambda: _train(folder, searched["layout"], adapted["seconds"] - searched["seconds"], sources),
    )
    files = {"teacher": "teacher", "child": "adapted/child", "scratch": "scratch"}
    models = {name: load_model(folder / f"{file}.safetensors") for name, file in files.items()}
    held_out = report_sources(sources, vocabulary, AdaptSettings().report_tokens)
    figures = _measured({name: model.layout.format() for name, model in models.items()})
    for name, model in models.items():
        say(f"scoring {name}")
        figures[name] |= {"layout": model.layout.format(), "bits_per_byte": _bits(model, held_out, vocabulary)}
    child = json.loads((folder / "adapted/report.json").read_bytes())["child"]
    report = {
        "budget_ms": budget,
        "adapted": adapted,
        "searched": searched,
        "trained": trained,
        "models": figures,
        "score": child["predicted"]["loss"],
        "divergence": child["divergence"],
        "divergence_before_healing": child["divergence_before_healing"],
    }
    write_durably(RECORDED, _json(report))
    print(table_of(report))


def table_of(report: Mapping[str, Any]) -> str:
    """Returns a row for the teacher, the child and the model from scratch."""
    models, adapted, trained = report["models"], report["adapted"], report["trained"]
    teacher = models["teacher"]
    took = {
        "teacher": ("20M", "-"),
        "child": (f"{TOKENS / 1e6:.0f}M", f"{adapted['seconds']:,.0f}"),
        "scratch": (f"{trained['tokens'] / 1e6:.1f}M", f"{report['searched']['seconds'] + trained['seconds']:,.0f}"),
    }
    called = {"teacher": "the model", "child": "child, healed", "scratch": "best search from scratch"}
    rows = []
    for name, model in models.items():
        low, high = model["ci95"]
        layout, decode = model["layout"].partition(" v2048 ")[2], f"{model['decode_ms']:.3f} ({low:.3f} to {high:.3f})"
        rows.append(
            [
                called[name],
                f"`{layout}`",
                decode,
                f"{teacher['decode_ms'] / model['decode_ms']:.2f}",
                f"{model['bits_per_byte']:.3f}",
                f"{model['bits_per_byte'] / teacher['bits_per_byte'] - 1:+.1%}",
                *took[name],
            ]
        )
    head = ["model", "layout", "decode, ms a token", "faster", "bits per byte", "more", "tokens", "seconds"]
    return table(head, rows)


def _once(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `work`, which is kept in a file."""
    if not path.is_file():
        write_durably(path, _json(work()))
    stored: dict[str, Any] = json.loads(path.read_bytes())
    return stored


def _adapt(folder: Path, budget: float) -> dict[str, Any]:
    """Runs `nas adapt` from its start, and returns its seconds."""
    for part in ("adapted", "adapted-library"):  # of a run that was killed: its seconds are not known
        shutil.rmtree(folder / part, ignore_errors=True)
    config = folder / "adapt-config.json"
    write_durably(config, _json(_SETTINGS))
    return {
        "seconds": _nas(
            "adapt",
            folder / "teacher.safetensors",
            "--tokenizer",
            folder / "tokenizer.json",
            "-c",
            folder / "text",
            "-b",
            f"decode_p50<={budget}ms",
            "--prompt",
            _PROMPT,
            "--gen",
            _GEN,
            "--config",
            config,
            "--library",
            folder / "adapted-library",
            "-o",
            folder / "adapted",
        )
    }


def _search(folder: Path, budget: float, seconds: float) -> dict[str, Any]:
    """Runs a study for so many seconds, and returns its best complete layout."""
    space = folder / "scratch.yaml"
    limit = {"metric": "decode_p50", "max": f"{budget}ms", "workload": "chat"}
    corpus = sorted(str(path.relative_to(folder)) for path in (folder / "text").iterdir())
    quality = SPACE["quality"] | {"corpus": {"files": corpus}}
    search = {"trials": 500, "stop": {"hours": round(seconds / 3600, 4)}}
    whole = SPACE | {"budgets": [limit], "quality": quality, "search": search}
    write_durably(space, yaml.safe_dump(whole, sort_keys=False).encode())
    db = f"sqlite:///{folder.resolve()}/scratch.db"
    resume = ["--resume"] if (folder / "scratch.db").is_file() else []
    _nas("launch", "--space", space, "--study", "scratch", "--db", db, "--workers", 1, "--yes", *resume)
    argv = [sys.executable, "-m", "nas.cli", "study", "show", "scratch", "--json", "--db", db]
    report = json.loads(subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout)
    complete = [row for row in report["told"] if row["status"] == "complete"]
    best = min(complete, key=lambda row: float(row["objectives"]["quality"]))
    return {
        "layout": best["layout"],
        "quality": -best["objectives"]["quality"],
        "origin": best["origin"],
        "seconds": report["elapsed_s"],
        "trials": len(report["told"]),
        "complete": len(complete),
    }


def _train(folder: Path, layout: str, seconds: float, sources: list[Tokens]) -> dict[str, Any]:
    """Trains a layout for so many seconds, saves it, and returns its tokens."""
    worker = Worker(torch.device("cpu"), say)
    packed = Packed("scratch", sources, _LENGTH, _BATCH // _LENGTH, 0)
    loss = torch.compile(lambda model, inputs, labels: pretraining_loss(model, inputs, labels) / _BATCH)

    def trained(steps: int) -> tuple[Model, float]:
        model = Model(Layout.parse(layout), seed=0)
        phase = TrainingPhase(
            "scratch",
            steps,
            _BATCH,
            lambda step: [packed.batch(step)],
            loss,
            lambda step: _LR * _SCHEDULE.factor(step, steps),
        )
        state = TrainingState(model, Optimiser(weight_decay=0.1, clip=1.0, balance_rate=1e-3), steps)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            fit(
                state,
                [phase],
                [TrainingCheckpoint(Path(scratch) / "training.safetensors", {})],
                worker,
                name="the model from scratch",
                precision=lambda: precision_of(worker.device, "bfloat16"),
            )
        return model, time.monotonic() - began

    trained(1)  # compiles
    steps = max(1, math.floor(seconds / (trained(10)[1] / 10)))
    say(f"training {layout} for {steps} steps")
    model, took = trained(steps)
    save_weights(model, folder / "scratch.safetensors")
    return {"steps": steps, "tokens": steps * _BATCH, "seconds": took}


@torch.no_grad()
def _bits(model: Model, held_out: Sequence[Tokens], vocabulary: Vocabulary) -> float:
    nats = window_nats(lambda ids: model(ids)[0], held_out, vocabulary, _LENGTH)
    return bits_of(nats, held_out)[ALL]


def _text(folder: Path) -> tuple[Vocabulary, list[Tokens]]:
    """Returns the text as `nas adapt` reads it."""
    vocabulary = Vocabulary(folder / "tokenizer.json", SPACE["model"]["vocab"])
    return vocabulary, [
        tokenise(document, vocabulary, None, 0, 1 << 20) for document in read_sources([folder / "text"], 0.05)
    ]


def _measured(layouts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns decoding times, measured side by side."""
    argv = [
        sys.executable,
        "-m",
        "nas.cli",
        "bench",
        *layouts.values(),
        "-p",
        str(_PROMPT),
        "-n",
        str(_GEN),
        "--reps",
        "10",
        "--json",
    ]
    results = json.loads(subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout)
    return {
        name: {"decode_ms": result["decode_ms"]["p50"], "ci95": result["decode_ms"]["ci95"]}
        for name, result in zip(layouts, results["results"], strict=True)
    }


def _nas(*arguments: object) -> float:
    """Runs a command of `nas`, and returns its seconds."""
    began = time.monotonic()
    argv: Sequence[str] = [sys.executable, "-m", "nas.cli", *map(str, arguments)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.monotonic() - began


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
