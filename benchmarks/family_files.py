"""Compares stock transformers, llama.cpp and ExecuTorch on a built family's files with PyTorch; JSON.

    python benchmarks/family_files.py NAME [--page docs/measured/family-files.md] > result.json

For every member: largest difference of transformers' logits from those of `nas.model.nn` on the same weights, greedy
tokens of transformers (with its cache and without) and of llama.cpp's F16 file, which must be `nas.model.nn`'s, the
quantised files, which must load, and the .pte, whose logits must be as near to PyTorch with 8da4w's rounding as
rounding itself allows. The apps that load the files know nothing of hilnas; the tests use the same ones. Ends with 1
where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nas.core.family import MemberFile, member_folder
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, RandomWeights, Weights
from nas.measure.runtimes.build_cache import CachedBuild
from nas.measure.runtimes.executorch.gate import STEPS, Oracle, judge
from nas.measure.runtimes.llama_cpp.binding import decoded_tokens
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.runner import Feed
from nas.model.nn.model import Model
from nas.serve.views.family import MemberView, family_view
from nas.train.release.huggingface import LazyTensors, checkpoint_of, open_weights, released_type

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import fill, markdown
from benchmarks.runs import built, print_json, say

APPS = Path(__file__).resolve().parent.parent / "tests" / "integration"
LOGITS_WITHIN = 1e-4
"""Two orders of summation in float32, through 16M weights."""
_PROMPT, _TOKENS = 24, 24
_PTE = Feed(prompt=40, gen=STEPS, batch=17)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="one of `nas family show`")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    options = parser.parse_args()
    members = {}
    for view in family_view(options.family).members:
        say(f"{view.member.size}: {view.member.layout}")
        members[view.member.size] = _checked(member_folder(options.family, view.member.size), view)
    if options.page:
        rows = [_row(size, member) for size, member in members.items()]
        fill(options.page, "measured: family_files", f"\n{markdown(rows)}\n")
    print_json({"family": options.family, "members": members})
    sys.exit(not all(member["same"] for member in members.values()))


def _checked(folder: Path, view: MemberView) -> dict[str, Any]:
    if view.files is None:
        raise SystemExit(f"{view.member.size}: no files were written; see `nas family build --help`")
    layout, weights = Layout.parse(view.member.layout), _weights(folder, view)
    prompt = Feed(_PROMPT, 0, _PROMPT).ids(layout.vocab).tolist()
    logits, followed = _predictions(layout, weights, prompt)
    upstream, answer = _transformers(folder / "transformers", prompt)
    difference = float(np.abs(upstream - logits).max())
    build = built(LLAMA_CPP, layout)
    assert isinstance(build, CachedBuild)
    ggufs = {
        file.quantisation.upper(): decoded_tokens(build, folder / file.path, prompt, _TOKENS)
        for file in _of(view, "gguf")
    }
    same = {
        "logits": difference <= LOGITS_WITHIN,
        "transformers": answer["followed"] == answer["uncached"] == [followed],
        "llama_cpp": ggufs["F16"] == followed,
    }
    result: dict[str, Any] = {
        "layout": view.member.layout,
        "parameters": layout.params.total,
        "class": answer["class"],
        "loads": view.files.loads,
        "logits": {"difference": difference, "sd": float(logits.std())},
        "decoded_tokens": len(followed),
        "quantised_same_tokens": {name: _alike(ids, followed) for name, ids in ggufs.items() if name != "F16"},
    }
    for file in _of(view, "pte"):
        result["pte"] = _executorch(layout, weights, folder / file.path)
        same["pte"] = result["pte"]["error"] <= result["pte"]["limit"]
    return result | {"same": all(same.values()), "same_by": same}


def _weights(folder: Path, view: MemberView) -> Weights:
    assert view.files is not None
    kind, _, value = view.files.weights.partition(":")
    if kind == "random":
        return RandomWeights(int(value))
    [path] = (folder / "training").glob("*/weights.safetensors")
    return Checkpoint(path, value)


def _of(view: MemberView, kind: str) -> list[MemberFile]:
    assert view.files is not None
    return [file for file in view.files.files if file.kind == kind]


@torch.no_grad()
def _predictions(layout: Layout, weights: Weights, prompt: list[int]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Returns logits [1, T, V] and the greedy tokens after them, without a cache, on the released numbers."""
    model = Model(layout, seed=None).eval()
    with open_weights(layout, weights, torch.float16) as state:
        tensors = LazyTensors(state)
        types = {name: released_type(name, len(shape), torch.float16) for name, shape in tensors.shapes()}
        model.load_state_dict({name: tensors[name].to(dtype).float() for name, dtype in types.items()})
    ids = torch.tensor([prompt])
    logits = model(ids).numpy()
    for _ in range(_TOKENS):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return logits, ids[0, len(prompt) :].tolist()


def _transformers(folder: Path, prompt: list[int]) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    chat = {"conversation": [{"role": "user", "content": "Hello"}]}
    question = {"ids": [prompt], "texts": ["Hello"], "tokens": _TOKENS, "chat": chat}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npy"
        home = {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "HOME": scratch, "PATH": os.environ["PATH"]}
        answer = json.loads(_app("stock_transformers.py", [folder, out], json.dumps(question), home))
        return np.load(out), answer


def _executorch(layout: Layout, weights: Weights, file: Path) -> dict[str, float]:
    """Returns the relative error of a prompt in chunks and the steps after it, and the gate's limit."""
    ids = _PTE.ids(layout.vocab)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        np.save(scratch / "ids.npy", ids)
        sizes = [str(_PTE.prompt), str(_PTE.batch)]
        _app("stock_runtime.py", [file, scratch / "ids.npy", *sizes, scratch / "logits.npy"], "", dict(os.environ))
        with checkpoint_of(layout, weights, torch.float16, scratch / "weights") as checkpoint:
            oracle = Oracle(layout, checkpoint)
        report = judge(np.load(scratch / "logits.npy"), oracle, layout, ids)
    return {"error": report.error, "limit": report.limit}


def _app(name: str, arguments: list[Path | str], stdin: str, environment: dict[str, str]) -> str:
    argv = [sys.executable, "-P", str(APPS / name), *map(str, arguments)]
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def _alike(ids: list[int], followed: list[int]) -> int:
    """Returns the length of the common prefix."""
    return next((at for at, (one, other) in enumerate(zip(ids, followed, strict=True)) if one != other), len(ids))


def _row(size: str, member: dict[str, Any]) -> dict[str, str]:
    logits, pte, count = member["logits"], member.get("pte"), member["decoded_tokens"]
    return {
        "member": f"{size}: `{member['layout']}`",
        "class": f"`{member['class']}`",
        "logits differ by at most": f"{logits['difference']:.1e} (sd {logits['sd']:.2f})",
        "greedy tokens, transformers": f"{count} of {count}" if member["same_by"]["transformers"] else "differ",
        "llama.cpp, F16": f"{count} of {count}" if member["same_by"]["llama_cpp"] else "differ",
        "quantised: same tokens at first": ", ".join(
            f"{name} {alike}" for name, alike in member["quantised_same_tokens"].items()
        ),
        ".pte: error (limit)": f"{pte['error']:.2%} ({pte['limit']:.2%})" if pte else "not written",
    }


if __name__ == "__main__":
    main()
