"""Compares a small hybrid member with an attention-only one: equal non-embedding weights, equal tokens; JSON.

    python benchmarks/family_training.py --state FOLDER --minutes 120
        [--page docs/measured/family-training.md] > result.json

Both are trained by what `nas family train` runs, on the default corpus (the source and documentation of Python's
library, and generated text) with a tokenizer trained on it, one after the other. `--minutes` is the time of both
trainings together: a few steps show how many tokens that is, and the folder keeps the number. Started again with
the same folder after a kill, it continues. Then held-out text is scored: with PyTorch, and with llama.cpp's F16 and
Q4_0 files of both. At last both Q4_0 files are run in turn on this machine, which should be calm then.

`--page` writes tables and plot between the marks in a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from runs import Model, built, decode_ms, markdown, print_json, say

from nas.core.durable import write_durably
from nas.core.family import FAMILY, Family, Member, MemberTraining, families_folder, write_record
from nas.core.layout import Layer, Layout
from nas.core.measurement import Sample
from nas.core.workload import Workload
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.binding import evaluate
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.nn.fit import Worker
from nas.model.nn.model import Model as Network
from nas.model.text.corpus import build_corpus
from nas.model.text.documents import read_sources
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.pretrain.member_training import MemberToTrain, train_member, train_plan
from nas.train.pretrain.next_token import ALL, PretrainingRequest, bits_per_byte
from nas.train.pretrain.recipe import Recipe, Settings, complete
from nas.train.pretrain.tokenizer_training import train_tokenizer

HYBRID = "d256 v4096 ffn=swiglu:768 [C3*2 A4/2 C3*2 A4/2 C3*2]"
FILES = ("f16", "q4_0")
BEGIN, END_MARK = "<!-- measured: family_training -->", "<!-- end -->"
_TRIAL_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder that everything is kept in")
    parser.add_argument("--minutes", type=float, default=60.0, help="for both trainings together")
    parser.add_argument("--layout", default=HYBRID, help="one-line layout with attention and other mixers")
    parser.add_argument("--eval-kb", type=int, default=64, help="held-out text scored per domain")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--page", type=Path, help="Markdown page that gets tables and plot")
    options = parser.parse_args()
    os.environ["NAS_HOME"] = str(options.state.resolve() / "home")
    hybrid = Layout.parse(options.layout)
    layouts = {"hybrid": hybrid, "attention": attention_only(hybrid)}
    corpus = _corpus(options.state / "corpus")
    tokenizer = _tokenizer(options.state / "tokenizer.json", corpus, hybrid.vocab)
    settings = Settings(eval_bytes=options.eval_kb * 1024)
    plan = _plan(options.state / "plan.json", hybrid, corpus, tokenizer, settings, options.minutes)
    # Of one compute, so that both have one recipe: what is left out follows from the layout otherwise.
    recipe, _ = complete(settings.model_copy(update={"tokens": plan["tokens"]}), hybrid)
    settings = Settings.model_validate(recipe.model_dump())
    _write_family(layouts)
    trained = {
        name: _trained(name, layout, PretrainingRequest(corpus, settings, tokenizer=tokenizer), options)
        for name, layout in layouts.items()
    }
    speeds = _speeds({name: model for name, (_, model) in trained.items()}, options.repetitions)
    members = {name: found | {"speed": speeds[name]} for name, (found, _) in trained.items()}
    result = {"minutes": options.minutes, "recipe": recipe.model_dump(mode="json"), "members": members}
    if options.page:
        _write_page(options.page, result)
    print_json(result)


def attention_only(layout: Layout) -> Layout:
    """Returns the layout with its first attention as every mixer; the feed-forward's width keeps the weights equal."""
    attention = next(block for layer in layout.layers for block in layer.mixers if block.kind == "gqa")

    def of_width(width: int) -> Layout:
        layers = [Layer((attention,), layer.ffn.replace(width=width)) for layer in layout.layers if layer.ffn]
        return Layout.of(layout.d_model, layout.vocab, layers, tied=layout.tied)

    wanted = layout.params.non_embedding
    widths = range(32, 16 * layout.d_model, 32)  # Q4_0 quantises 32 weights of a row together
    return min(map(of_width, widths), key=lambda other: abs(other.params.non_embedding - wanted))


def _corpus(folder: Path) -> tuple[Path, ...]:
    """Writes the default corpus as text files, one per domain."""
    domains = build_corpus("default", folder).domains
    folder.mkdir(parents=True, exist_ok=True)
    for name, domain in domains.items():
        text = (domain.train.tobytes() + domain.heldout.tobytes()).decode("utf-8", errors="ignore")
        write_durably(folder / name, text.encode())
    return tuple(folder / name for name in domains)


def _tokenizer(path: Path, corpus: tuple[Path, ...], size: int) -> Path:
    if path.exists():
        return path
    # Of what is trained on alone: merges of held-out words would know them.
    texts = path.with_name("tokenizer-corpus")
    texts.mkdir(exist_ok=True)
    for number, source in enumerate(read_sources(corpus, Settings().held_out)):
        for document in source.documents:
            write_durably(texts / f"{number}-{document.sha256}.txt", document.train.encode())
    train_tokenizer([texts], size, path, say)
    return path


def _sources(corpus: tuple[Path, ...], vocabulary: Vocabulary, recipe: Recipe) -> list[Tokens]:
    return [
        tokenise(source, vocabulary, recipe.fim, recipe.seed, recipe.eval_bytes)
        for source in read_sources(corpus, recipe.held_out)
    ]


def _plan(
    path: Path, layout: Layout, corpus: tuple[Path, ...], tokenizer: Path, settings: Settings, minutes: float
) -> dict[str, Any]:
    """Returns the tokens of each training; measured once, then read from the folder."""
    if not path.exists():
        recipe, _ = complete(settings.model_copy(update={"tokens": 10**7}), layout)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        short = Settings.model_validate(recipe.model_dump() | {"tokens": _TRIAL_STEPS * recipe.batch_tokens})
        with tempfile.TemporaryDirectory() as scratch:
            trial = PretrainingRequest(corpus, short).plan(MemberToTrain(Path(scratch), layout, tokenizer, ()), say)
            began = time.monotonic()
            worker = Worker(torch.device("cpu"), say)
            _, tokens = train_plan(trial, Network(layout, 0), Path(scratch), worker)
            speed = tokens / (time.monotonic() - began)
        tokens = round(minutes * 60 / 2 * speed)
        write_durably(path, json.dumps({"tokens": tokens, "tokens_per_s": speed}).encode())
    plan: dict[str, Any] = json.loads(path.read_text())
    say(f"{plan['tokens']:,} tokens each, at about {plan['tokens_per_s']:.0f} a second")
    return plan


def _write_family(layouts: dict[str, Layout]) -> None:
    members = tuple(
        Member(
            size=name, layout=layout.format(), parameters=layout.params.total, active=layout.params.active,
            non_embedding=layout.params.non_embedding, decisions=(), tried=(),
        )
        for name, layout in layouts.items()
    )  # fmt: skip
    family = Family(name="benchmark", made="-", seed=0, pattern="-", sources=(), decisions=(), members=members)
    write_record(families_folder() / "benchmark" / FAMILY, family)


def _trained(
    name: str, layout: Layout, request: PretrainingRequest, options: argparse.Namespace
) -> tuple[dict[str, Any], Model]:
    """Trains a member, scores it in every number format, and writes its Q4_0 file."""
    record = train_member("benchmark", name, request, say, lambda trained, log: None)
    runs = families_folder() / "benchmark" / name / "training"
    weights = runs / record.config["key"][:12] / "weights.safetensors"
    checkpoint = Checkpoint(weights, record.checkpoint)
    recipe = Recipe.model_validate(record.config["recipe"])
    assert request.tokenizer is not None
    vocabulary = Vocabulary(request.tokenizer, layout.vocab)
    build = built(LLAMA_CPP, layout)
    held_out = {"PyTorch": record.held_out}
    for quantisation in FILES:
        file = options.state / f"{name}-{quantisation}.gguf"
        scores = file.with_suffix(".json")
        artifact = LLAMA_CPP.export(layout, quantisation, checkpoint, file)
        if not scores.exists():
            say(f"scoring {file.name}")
            bits = _quantised(file, layout, vocabulary, _sources(request.corpus, vocabulary, recipe), recipe)
            write_durably(scores, json.dumps(bits).encode())
        held_out[quantisation.upper()] = json.loads(scores.read_text())
    return {
        "layout": layout.format(),
        "parameters": layout.params.total,
        "non_embedding": layout.params.non_embedding,
        "held_out": {form: _short(bits) for form, bits in held_out.items()},
        **_course(record),
    }, Model(LLAMA_CPP, layout, artifact, file, build)


def _quantised(
    file: Path, layout: Layout, vocabulary: Vocabulary, sources: list[Tokens], recipe: Recipe
) -> dict[str, float]:
    build = built(LLAMA_CPP, layout)
    with tempfile.TemporaryDirectory() as scratch:

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            ids = tokens[0].tolist()
            return torch.from_numpy(evaluate(build, file, ids, [len(ids)], Path(scratch)).logits)

        return bits_per_byte(logits, sources, vocabulary, recipe.stages[0].length)


def _short(bits: dict[str, float]) -> dict[str, float]:
    return {Path(name).name: value for name, value in bits.items()}


def _speeds(models: dict[str, Model], repetitions: int) -> dict[str, dict[str, float]]:
    """Runs every model in turn, in rotating order."""
    samples: dict[str, list[Sample]] = {name: [] for name in models}
    for number in range(repetitions):
        for name in sorted(models, reverse=bool(number % 2)):
            samples[name].append(models[name].run(Workload(prompt=512, gen=100, threads=1)))
    return {
        name: {
            "ttft_ms": statistics.median(sample.ttft_ms for sample in each),
            "decode_p50_ms": statistics.median(statistics.median(decode_ms(sample)) for sample in each),
            "peak_rss_mb": statistics.median(sample.peak_rss_mb or float("nan") for sample in each),
            "file_mb": models[name].file.stat().st_size / 1e6,
        }
        for name, each in samples.items()
    }


def _course(record: MemberTraining) -> dict[str, Any]:
    return {"tokens": record.tokens, "steps": record.steps, "seconds": record.seconds, "curve": record.curve}


def _write_page(page: Path, result: dict[str, Any]) -> None:
    text = page.read_text(encoding="utf-8")
    head, begun, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END_MARK)
    if not begun or not ended:
        raise SystemExit(f"{page} lacks {BEGIN} ... {END_MARK}")
    picture = page.parent.parent / "img" / "family-training.png"
    _plot(picture, result["members"])
    body = f"{_tables(result['members'])}\n![Training loss over tokens](../img/{picture.name})\n"
    write_durably(page, f"{head}{BEGIN}\n\n{body}\n{END_MARK}{tail}".encode())
    page.chmod(0o644)
    say(f"wrote {page} and {picture}")


def _tables(members: dict[str, Any]) -> str:
    domains = [name for name in members["hybrid"]["held_out"]["PyTorch"] if name != ALL]
    scores = [
        {"member": name, "weights in": form, **{each: f"{bits[each]:.4f}" for each in (*domains, ALL)}}
        for name, one in members.items()
        for form, bits in one["held_out"].items()
    ]
    shapes = [
        {
            "member": name,
            "layout": f"`{one['layout']}`",
            "non-embedding weights": f"{one['non_embedding']:,}",
            "tokens": f"{one['tokens']:,}",
            "hours": f"{one['seconds'] / 3600:.2f}",
            "last loss": f"{one['curve'][-1][1]:.3f}",
        }
        for name, one in members.items()
    ]
    speeds = [{"member": name, **{key: f"{v:.2f}" for key, v in one["speed"].items()}} for name, one in members.items()]
    return (
        f"{markdown(shapes)}\nHeld-out bits per byte:\n\n{markdown(scores)}\n"
        f"Q4_0 on one thread, 512 tokens read and 100 written:\n\n{markdown(speeds)}"
    )


def _plot(path: Path, members: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name, one in members.items():
        per_step = one["tokens"] / one["steps"]
        axes.plot([step * per_step / 1e6 for step, _ in one["curve"]], [loss for _, loss in one["curve"]], label=name)
    axes.set(xlabel="million tokens", ylabel="training loss (nats per token)")
    axes.legend(loc="upper right")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
