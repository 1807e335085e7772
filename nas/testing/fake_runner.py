"""The runner and the profiler of `FakeRuntime`: a script that reports times computed from figures in the model file.

It imports nothing of this package, because devices run it as a single file.
"""

import argparse
import json
import os
import signal
import sys
import time
from typing import Any

PROFILES = False
"""`FakeRuntime.profiler` writes the script with True here."""


def main() -> None:
    """Makes a model from its recipe, or reports one repetition, or fails as `--fault` says."""
    if sys.argv[1] == "--recipe":
        make_model(*sys.argv[2::2])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--reference")
    for name in ("prompt", "gen", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("images", "sounds"):
        parser.add_argument(f"--{name}", type=int, default=0, help="tokens of all")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    model = read_model(args.model)
    time.sleep(args.seconds)
    misbehave(args.fault)
    figures = model["figures"]
    output = profile(figures, model["layout"]["layers"], args) if PROFILES else report(figures, args)
    if args.reference:
        try:
            reference = read_model(args.reference)
            args.images = args.sounds = 0
        except ValueError as error:
            print(json.dumps({"v": 1, "error": {"kind": "reference", "message": str(error)}}))
            sys.exit(69)
        output["reference"] = report(reference["figures"], args)
    print(json.dumps(output | ({"finite": False} if args.fault == "not_finite" else {})))


def read_model(path: str) -> dict[str, Any]:
    """Returns the content of a model file."""
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib doubles the start-up time of the script
        model: dict[str, Any] = json.load(file)
    return model


def make_model(recipe: str, output: str) -> None:
    """Writes the model, whose bytes are the recipe's in reverse."""
    with open(recipe, "rb") as source, open(output, "xb") as target:  # noqa: PTH123
        target.write(source.read()[::-1])


def timed(figures: dict[str, float], args: argparse.Namespace) -> tuple[float, list[int]]:
    """Returns milliseconds of the prompt and nanoseconds of each token, which grow with weights read and the cache.

    Every 16th token is 5 % slower, so p95 > p50.
    """
    start = figures["decode_ns"] + figures["cache_ns"] * args.prompt
    decode = [round((start + figures["cache_ns"] * i) * (1.05 if i % 16 == 15 else 1.0)) for i in range(args.gen)]
    return figures["prefill_ns"] * (args.prompt + 2 * (args.images + args.sounds)) / 1e6, decode


def report(figures: dict[str, float], args: argparse.Namespace) -> dict[str, object]:
    """Returns the report of a runner."""
    ttft_ms, decode = timed(figures, args)
    memory = figures["weights_mb"] + figures["cache_mb"] * args.context
    return {
        "v": 1,
        "load_ms": figures["weights_mb"] / 2,
        "ttft_ms": ttft_ms,
        "prefill_cpu_ms": ttft_ms,
        "decode_ns": decode,
        "decode_cpu_ns": decode,
        "prefill_ns": [round(ttft_ms * 1e6)],
        "prefill_cpu_ns": [round(ttft_ms * 1e6)],
        "turns": [args.gen] if args.gen else [],
        "peak_rss_mb": memory,
        "prefill_rss_mb": memory,
        "decode_rss_mb": memory,
        "finite": True,
        "info": {"fake": True} | media_uses(figures, args),
    }


def media_uses(figures: dict[str, float], args: argparse.Namespace) -> dict[str, object]:
    """Returns what happened to images or sounds: half of the time of their tokens is the tower's."""
    uses: dict[str, object] = {}
    for name, tokens in (("images", args.images), ("sounds", args.sounds)):
        steps = [round(figures["prefill_ns"] * tokens * share) for share in (0.1, 0.7, 0.2)]
        if tokens:
            uses[name] = {"tokens": tokens, "wall_ns": [steps], "cpu_ns": [steps]}
    return uses


def profile(figures: dict[str, float], layers: list[dict[str, int]], args: argparse.Namespace) -> dict[str, object]:
    """Returns the report of a profiler: each block takes an equal part of the time."""
    ttft_ms, decode = timed(figures, args)
    owners = [layers[layer["share"]] if "share" in layer else layer for layer in layers]
    blocks = [
        (index, part, operator)
        for index, layer in enumerate(owners)
        for key, part, operator in (("mixers", "mixer", "MIX"), ("ffn", "ffn", "MUL_MAT"))
        if key in layer
    ]
    phases = {
        name: {"whole_ns": ns, "profiled_ns": 2 * ns, "nodes": [(*block, 1, ns // len(blocks)) for block in blocks]}
        for name, ns in (("prefill", int(ttft_ms * 1e6)), ("decode", sum(decode)))
    }
    return {"v": 1, "prompt": args.prompt, "gen": args.gen, "finite": True, **phases}


def misbehave(fault: str) -> None:
    """Fails in the given way."""
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "garbage":
        print("\x00 not a report")
        sys.exit(0)
    elif fault == "flood":
        for _ in range(1 << 12):
            print("x" * 1023)
        sys.exit(0)
    elif fault == "out_of_memory":
        print(json.dumps({"v": 1, "error": {"kind": "out_of_memory", "message": "pretended"}}))
        sys.exit(71)


if __name__ == "__main__":
    main()
