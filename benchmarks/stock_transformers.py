"""Compares what released files give in several versions of transformers, alone and in padded batches; JSON.

    python benchmarks/stock_transformers.py [--version 4.57.6] [--version 5.23.0] [--no-lm-eval] > result.json

For each version a virtual environment is made once in the user's cache ($NAS_CACHE/venvs) with that transformers and
lm-eval. Members of every class are written with random weights, RoPE bases other than the
classes' own included. In each version, without hilnas, every member gives:

- logits, compared with those of our PyTorch model;
- logits and greedy text of a batch of four texts of different lengths, padded on the left and on the right, compared
  with the texts one by one; `pipeline(batch_size=4)` against `batch_size=1`;
- lm-eval's `loglikelihood` and `generate_until`, batches of 8 against batches of 1.

Exits with 1 where a difference is more than rounding. A version that has no class for a member reports so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VERSIONS = ("4.57.6", "5.23.0")
LM_EVAL = "0.4.13"
LAYOUTS = {
    "lfm2": "d128 v640 ffn=swiglu:320 [C3*2 A4/2(rope_theta=50000) C3]",
    "lfm2_moe": "d128 v640 untied ffn=moe:8x2:64 [C3+swiglu:320 A4/2 C3]",
    "qwen3": "d128 v640 ffn=swiglu:352 [A4/2*3]",
    "llama": "d64 v640 ffn=swiglu:160 [A4/2(qk_norm=0)*3]",
    "mixed": "d128 v640 ffn=swiglu:160 [C3 M16(groups=2) W4/2@4(sink=1) C4&A4/2 ^0 A4/2 A4/2(kv=5)+moe:8x2:64]",
}
TEXTS = (
    "Once upon a time",
    "a",
    "The quick brown fox jumps",
    "0123456789, and so on:",
    "é日本",
    "yes",
    "no no",
    "x" * 30,
)
LIMIT = 2e-5
"""Of logits whose standard deviation is about 1: rounding of float32 in another order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="append", help="of transformers; repeatable")
    parser.add_argument("--no-lm-eval", action="store_true", help="leave lm-eval out")
    parser.add_argument("--prepare", action="store_true", help="make the environments only")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        json.dump({path.name: _measured(path, not options.no_lm_eval) for path in _members(options.inside)}, sys.stdout)
        return
    pythons = {version: _environment(version) for version in options.version or VERSIONS}
    if options.prepare:
        return
    with tempfile.TemporaryDirectory() as scratch:
        _write_members(Path(scratch))
        result = {version: _run(python, Path(scratch), options) for version, python in pythons.items()}
    json.dump({"limit": LIMIT, **result}, sys.stdout, indent=1)
    sys.exit(not all(_agrees(member) for members in result.values() for member in members.values()))


def _environment(version: str) -> Path:
    """Returns the Python of an environment with that version of transformers, made where it is missing."""
    from nas.core import paths

    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    import setup_venv

    folder = paths.cache() / "venvs" / f"transformers-{version}"
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"making {folder}", file=sys.stderr)
        # The interpreter that .venv was made with has pip, .venv has not.
        ask = "import json; from setup_venv import *; print(json.dumps([ensure_uv(), uv_environment(pip_settings())]))"
        base = [getattr(sys, "_base_executable", sys.executable), "-c", ask]
        printed = subprocess.run(base, cwd=Path(setup_venv.__file__).parent, check=True, stdout=subprocess.PIPE)
        uv, settings = json.loads(printed.stdout)
        environment = settings | os.environ
        packages = [f"transformers=={version}", f"lm-eval=={LM_EVAL}", "accelerate", setup_venv.TORCH]
        setup_venv.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], environment)
        setup_venv.run([uv, "pip", "install", "--quiet", "--python", str(python), *packages], environment)
        done.touch()
    return python


def _write_members(folder: Path) -> None:
    import numpy as np
    import torch

    from nas.core.layout import Layout
    from nas.model.nn.model import Model
    from nas.testing.planted_faults import checkpoint
    from nas.train.release.files import write_files
    from nas.train.release.options import FileOptions

    for name, text in LAYOUTS.items():
        layout = Layout.parse(text)
        trained = checkpoint(layout, folder / f"{name}.weights")
        write_files(folder / name, layout, trained, FileOptions(gguf=(), dtype="float32"), lambda line: None)
        from safetensors.torch import load_file

        model = Model(layout, seed=None).eval()
        model.load_state_dict(load_file(trained.path))
        with torch.no_grad():
            np.save(folder / name / "expected.npy", model(torch.tensor([_ids()])).numpy())


def _ids() -> list[int]:
    return [(37 * i) % 600 + 1 for i in range(48)]


def _run(python: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    argv = [str(python), str(Path(__file__).resolve()), "--inside", str(folder), *["--no-lm-eval"] * options.no_lm_eval]
    environment = os.environ | {
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{python}: exit code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _agrees(member: dict[str, Any]) -> bool:
    if "none" in member:
        return True
    same = all(value for name, value in member.items() if name.startswith("same"))
    return same and all(value <= LIMIT for name, value in member.items() if name.startswith("difference"))


# In the other environment, where nothing of hilnas is.


def _members(folder: Path) -> Iterator[Path]:
    return (folder / name for name in LAYOUTS)


def _measured(folder: Path, lm_eval: bool) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = str(folder / "transformers")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, dtype=torch.float32)
    except (ValueError, KeyError) as error:
        return {"none": str(error).splitlines()[0][:120]}
    tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=True)
    model.eval().generation_config.eos_token_id = None
    result: dict[str, Any] = {"class": type(model).__name__}
    with torch.no_grad():
        logits = model(torch.tensor([_ids()])).logits.numpy()
        result["difference_from_ours"] = float(np.abs(logits - np.load(folder / "expected.npy")).max())
        for side in ("left", "right"):
            result[f"difference_{side}_padded"] = _padded_difference(model, tokenizer, side)
    result["same_generate"] = _same_generate(model, tokenizer)
    result["same_pipeline"] = _same_pipeline(model, tokenizer)
    if lm_eval:
        result |= _lm_eval(model, tokenizer)
    return result


def _padded_difference(model: Any, tokenizer: Any, side: str) -> float:
    tokenizer.padding_side = side
    batch = tokenizer(list(TEXTS[:4]), return_tensors="pt", padding=True)
    together = model(**batch).logits
    differences: list[float] = []
    for row, text in enumerate(TEXTS[:4]):
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        differences.append((together[row][batch.attention_mask[row].bool()] - alone).abs().max().item())
    return max(differences)


def _same_generate(model: Any, tokenizer: Any) -> bool:
    tokenizer.padding_side = "left"

    def texts(batch: list[str]) -> list[list[int]]:
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        generated = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        ids: list[list[int]] = generated[:, inputs.input_ids.shape[1] :].tolist()
        return ids

    return texts(list(TEXTS[:4])) == [ids for text in TEXTS[:4] for ids in texts([text])]


def _same_pipeline(model: Any, tokenizer: Any) -> bool:
    from transformers import pipeline

    pipe: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    four, one = (pipe(list(TEXTS), batch_size=size, **options) for size in (4, 1))
    return bool(four == one)


def _lm_eval(model: Any, tokenizer: Any) -> dict[str, Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def requests(kind: Any, arguments: Callable[[str], tuple[Any, ...]]) -> list[Any]:
        return [Instance(kind, {}, arguments(text), i) for i, text in enumerate(TEXTS)]

    scores, written = [], []
    until = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
    for size in (1, 8):
        wrapped: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)
        scores.append(wrapped.loglikelihood(requests("loglikelihood", lambda text: (text, f" {text[::-1]}!"))))
        written.append(wrapped.generate_until(requests("generate_until", lambda text: (text, until))))
    (one, eight) = scores
    return {
        "difference_lm_eval": max(abs(a[0] - b[0]) / max(1.0, abs(a[0])) for a, b in zip(one, eight, strict=True)),
        "same_lm_eval_greedy": [a[1] for a in one] == [b[1] for b in eight],
        "same_lm_eval_text": written[0] == written[1],
    }


if __name__ == "__main__":
    main()
