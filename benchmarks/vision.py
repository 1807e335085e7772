"""A small model of images and text, trained here in three stages, on the questions of easy-VQA.

    python -m benchmarks.vision FOLDER [--seeds 2] [--latency] [--page docs/measured/vision.md]

The data are those of the package easy-vqa, fetched by pip: pictures of 64 x 64 pixels with one shape each, and
questions after the shape, its colour, and whether there is one. Each seed is a model of its own: a member is trained on
text (topics of Python's help, generated tasks) and to chat, then it gets an encoder with random weights, and the stages
connector, mid and joint; joint also with fewer tokens an image. After each, a question about each of 846 pictures that
nothing was trained on is answered, and text is scored. FOLDER holds data, models and results: a stopped run continues.
About 15 minutes of one core; the results are in benchmarks/recorded/vision.json. With --latency, the time to the first
token is measured with llama.cpp by `nas bench`'s protocol, with the files of the first seed's model after joint, for as
many tokens of a picture as it is asked with; and with a layout of LFM2-VL-450M's size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.page import fill, table
from benchmarks.post_training import run_in_process, write_family
from benchmarks.retrieval import interval, interval_text
from benchmarks.runs import say
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.measurement import TTFT_PARTS
from nas.core.published import named_layout
from nas.core.task import IGNORE
from nas.core.tower import Tower
from nas.core.workload import Workload
from nas.measure.protocol.bench import BenchOptions, bench_all
from nas.measure.runtimes.toolchain import fetched
from nas.model.nn.weights import load_model
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, read_lines
from nas.train.posttrain.sft import padded
from nas.train.posttrain.start import start_model
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain import member_training
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions
from nas.train.towers.data import MediaLine, read_media_lines
from nas.train.towers.gguf import write_gguf_model
from nas.train.towers.images import FrameSettings
from nas.train.towers.modality import MediaFile
from nas.train.towers.release import TowerFolder
from nas.train.towers.training import Data, TowerRecord, train_tower
from nas.train.towers.vision import VISION, VisionSettings

RECORDED = Path(__file__).parent / "recorded/vision.json"
KINDS = ("shape", "colour", "yes or no")
STAGES = ("connector", "mid", "joint")
PARTS = ("pixels", "encoder", "connector", "language model")
_FEWER = "joint with fewer"
_WHEEL = "easy_vqa-1.0-py3-none-any.whl"
_SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
_SHAPES = ("circle", "rectangle", "triangle")
_AT_ONCE = 64
_SIDE = 64
"""Pixels of a side of a picture of easy-VQA."""
_LARGE_TOKENS = (256, 144, 64, 16)
_WINDOW = 128


class Question(NamedTuple):
    """A conversation as ids, which of them are answers, and its pictures."""

    ids: NDArray[np.int32]
    answers: NDArray[np.bool_]
    files: Sequence[MediaFile]


class Sizes(NamedTuple):
    """What is trained.

    Args:
        layout: of the language model.
        tower: shape of encoder and connector.
        tokens: of pre-training.
        tasks: generated conversations without images.
        epochs: over the questions, by stage.
        answers: most questions about a picture whose answer is yes or no.
        image_tokens: of a picture, in training.
        fewer: the same in one more stage joint.
        test_tokens: of a picture, in questions to the models of joint.
    """

    layout: str = "d128 v1024 ffn=swiglu:256 [C3 A4/2 C3 A4/2]"
    tower: Mapping[str, int] = {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8,
        "num_patches": 64, "projector_hidden_size": 192,
    }  # fmt: skip
    tokens: int = 200_000
    tasks: int = 1000
    epochs: Mapping[str, float] = {"connector": 0.06, "mid": 0.6, "joint": 0.12}
    answers: int = 2
    image_tokens: int = 16
    fewer: int = 4
    test_tokens: tuple[int, ...] = (4, 9, 16, 36)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data, models and results")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--latency", action="store_true", help="measure times with llama.cpp, too; needs its build")
    parser.add_argument("--report", action="store_true", help="compute nothing more: report what FOLDER holds")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables")
    options = parser.parse_args()
    folder, sizes = options.folder.resolve(), Sizes()
    if not (folder / "data" / "test.jsonl").is_file():
        wheel = fetched("easy-vqa", "1.0", _WHEEL, _SHA256, ["--no-deps"], 3, say)
        with zipfile.ZipFile(wheel) as archive:
            write_data(archive, folder / "data", sizes.answers)
    if not options.report:
        run(folder, range(options.seeds), sizes)
    if options.latency:
        measure(folder, sizes)
    record = recorded(folder, range(options.seeds), sizes)
    write_durably(RECORDED, f"{json.dumps(record, indent=1)}\n".encode())
    if options.page:
        write_page(options.page, record)


def write_data(archive: zipfile.ZipFile, folder: Path, answers: int) -> None:
    """Writes pictures, the questions to train on, and one question about each test picture, of the kinds in turns."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        questions: dict[int, list[dict[str, str]]] = {}
        for question, answer, number in json.loads(archive.read(f"easy_vqa/data/{part}/questions.json")):
            line = {"image": f"{part}/{number}.png", "question": question, "answer": answer}
            questions.setdefault(number, []).append(line)
        chosen = []
        for number, lines in sorted(questions.items()):
            (folder / part / f"{int(number)}.png").write_bytes(
                archive.read(f"easy_vqa/data/{part}/images/{number}.png")
            )
            drawn = random.Random(number).sample(lines, len(lines))
            by_kind = {kind: [line for line in drawn if kind_of(line["answer"]) == kind] for kind in KINDS}
            if part == "train":
                chosen += [*by_kind["shape"], *by_kind["colour"], *by_kind["yes or no"][:answers]]
            else:
                chosen += by_kind[KINDS[number % len(KINDS)]][:1]
        write_durably(folder / f"{part}.jsonl", "".join(f"{json.dumps(line)}\n" for line in chosen).encode())


def kind_of(answer: str) -> str:
    """Returns the kind of a question, which its answer says."""
    return "shape" if answer in _SHAPES else "yes or no" if answer in ("yes", "no") else "colour"


def run(folder: Path, seeds: Sequence[int], sizes: Sizes) -> None:
    """Trains and scores what is missing."""
    os.environ["NAS_HOME"] = str(folder / "home")
    torch.set_num_threads(1)
    member_training.run_workers = run_in_process
    write_text(folder, Layout.parse(sizes.layout), sizes.tasks)
    write_family(Layout.parse(sizes.layout), len(seeds))
    for seed in seeds:
        _run_seed(folder, seed, sizes)


def recorded(folder: Path, seeds: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Returns the results of each seed that has some, by stage."""
    train, test = (_lines(folder / "data" / f"{part}.jsonl") for part in ("train", "test"))
    results = {
        str(seed): {
            stage: json.loads(path.read_bytes())
            for stage in ("before", *STAGES, _FEWER)
            if (path := folder / f"seed{seed}" / f"{stage}.json").is_file()
        }
        for seed in seeds
    }
    return {
        "layout": sizes.layout,
        "tower": dict(sizes.tower),
        "image_tokens": sizes.image_tokens,
        "fewer": sizes.fewer,
        "train": len(train),
        "kinds": [kind_of(line["answer"]) for line in test],
        "blind": _blind(train, test),
        "seeds": {seed: result for seed, result in results.items() if result},
        **({"latency": json.loads(latency.read_bytes())} if (latency := folder / "latency.json").is_file() else {}),
    }


def measure(folder: Path, sizes: Sizes) -> None:
    """Writes figures of requests with a picture, by model and tokens of it, to `latency.json`, as they come."""
    os.environ["NAS_HOME"] = str(folder / "home")
    path, model, projector = folder / "latency.json", folder / "seeing.gguf", folder / "mmproj-seeing.gguf"
    write_gguf_model(folder / "seed0" / "joint", VISION, "q8_0", model, projector, "seeing")
    small = Workload(prompt=16, gen=16, images=1, image_height=_SIDE, image_width=_SIDE)
    large = small.model_copy(update={"image_height": 512, "image_width": 512})
    shared: dict[str, Any] = {"runtime": "llama.cpp", "quantisation": None, "device": "local"}
    trained = {
        f"trained {tokens}": BenchOptions(
            model, workload=small, repetitions=10, projector=projector, image_tokens=tokens, **shared
        )
        for tokens in sizes.test_tokens
    }
    published = {
        f"published {tokens}": BenchOptions(
            replace(named_layout("LFM2-350M"), tower=Tower.of(768, 12, tokens=tokens)),
            workload=large,
            repetitions=3,
            **shared,
        )
        for tokens in _LARGE_TOKENS
    }
    result: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    waiting = {name: options for name, options in {**trained, **published}.items() if name not in result}
    for name, report in zip(waiting, bench_all([*waiting.values()], lambda line: say(str(line))), strict=True):
        figures = {
            figure: report["figures"][figure] for figure in ("ttft", "image_tokens", "peak_rss", *TTFT_PARTS["images"])
        }
        result[name] = {"device": report["device"], **figures}
        write_durably(path, json.dumps(result).encode())
        say(f"{name}: {figures['ttft']['value']:.4g} ms")


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _blind(train: Sequence[dict[str, str]], test: Sequence[dict[str, str]]) -> str:
    """Returns marks of the answer that is the most frequent one to each question, whatever the picture."""
    answers: dict[str, Counter[str]] = {}
    for line in train:
        answers.setdefault(line["question"], Counter())[line["answer"]] += 1
    best = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    return "".join("01"[best.get(line["question"]) == line["answer"]] for line in test)


def write_text(folder: Path, layout: Layout, count: int) -> None:
    """Writes text to train on, of which a tenth is only scored, generated conversations, and the tokenizer."""
    text, tasks = folder / "text", folder / "tasks"
    if not (tasks / "text").is_dir():
        write_tasks(tasks, count, 200, pairs=0, lines=2000)
    for number, (_, topic) in enumerate(sorted(topics.items())):
        path = text / ("train" if number % 10 else "test") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(topic)
    if not (tokenizer := folder / "tokenizer.json").is_file():
        questions = _lines(folder / "data" / "train.jsonl")
        words = folder / "words.txt"
        words.write_text("".join(f"{line['question']} {line['answer']}\n" for line in questions))
        train_tokenizer([text / "train", tasks / "text", words], layout.vocab, tokenizer, say)


def train_language_model(folder: Path, seed: int, tokens: int, talks: Sequence[str] = ("tasks",)) -> None:
    """Trains `chat/seedN` on text and to chat, and scores it.

    Args:
        folder: with the data and the tokenizer.
        seed: of the training.
        tokens: of pre-training.
        talks: folders in `folder` with text/, train.jsonl and test.jsonl.
    """
    schedule = {"warmup": 0.1, "decay": 0.3}
    stages: list[dict[str, Any]] = [
        {
            "kind": "pretrain",
            "corpus": ["text/train", *(f"{name}/text" for name in talks)],
            "settings": {
                "tokens": tokens,
                "batch_tokens": 1024,
                "lr": 3e-3,
                "seed": seed,
                "stages": [{"name": "text", "length": _WINDOW, "share": 1.0, "schedule": schedule}],
            },
        },
        {
            "kind": "sft",
            "data": [{"path": f"{name}/train.jsonl"} for name in talks],
            "epochs": 2,
            "lr": 2e-3,
            "final": 0.1,
            "seed": seed,
        },
    ]
    recipe = PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})
    files = FileOptions(gguf=(), context=512)
    run_recipe("chat", f"seed{seed}", recipe, folder, say, workers=1, files=files, checkpoint_s=30.0)
    _score_before(folder, seed, talks)


def _run_seed(folder: Path, seed: int, sizes: Sizes) -> None:
    """Trains and scores the stages of a seed."""
    begin = time.process_time()
    train_language_model(folder, seed, sizes.tokens)
    before, models = f"chat/seed{seed}", folder / f"seed{seed}"
    trainings = [(stage, stage, sizes.image_tokens) for stage in STAGES]
    trainings.append((_FEWER, "joint", sizes.fewer))
    for name, stage, tokens in trainings:
        start = str(models / "mid") if stage == "joint" else before
        record = _stage(folder, start, models / name, stage, seed, tokens, sizes)
        before = str(models / name)
        _score(folder, models / name, record, {tokens, *(sizes.test_tokens if stage == "joint" else ())})
        say(f"seed {seed}, {name}: {time.process_time() - begin:.0f} s of CPU")


def _score_before(folder: Path, seed: int, talks: Sequence[str]) -> None:
    """Scores the language model on text alone, unless that was done."""
    path = folder / f"seed{seed}" / "before.json"
    if path.is_file():
        return
    path.parent.mkdir(exist_ok=True)
    start = start_model(f"chat/seed{seed}")
    weights = start.tensors(path)
    scores = text_scores(folder, load_model(weights), ChatTokenizer(start.tokenizer.tokenizer, "tokenizer.json"), talks)
    write_durably(path, json.dumps({"text": scores}).encode())


def _stage(folder: Path, start: str, output: Path, stage: str, seed: int, tokens: int, sizes: Sizes) -> TowerRecord:
    """Trains a stage. The encoder begins with random weights, so it has the whole rate."""
    rates = {"connector": {"lr": 3e-3}, "mid": {"lr": 2e-3, "encoder": 1.0}, "joint": {"lr": 5e-4, "encoder": 1.0}}
    settings = VisionSettings.model_validate(
        {
            "stage": stage,
            "epochs": sizes.epochs[stage],
            "seed": seed,
            "batch": 32,
            "image_tokens": [tokens, tokens],
            "tiles": 1,
            "tower": dict(sizes.tower),
            "held_out": 0,
            **rates[stage],
        }
    )
    texts = [folder / "tasks" / "train.jsonl"] if settings.text else []
    return train_tower(start, Data([folder / "data" / "train.jsonl"], texts), settings, output, say, checkpoint_s=30.0)


def _score(folder: Path, model: Path, record: TowerRecord, counts: Collection[int]) -> None:
    """Writes marks and bits per byte of a stage to its file of results, unless it is there.

    counts: numbers of tokens of a picture.
    """
    path = model.with_suffix(".json")
    if path.is_file():
        return
    opened = TowerFolder.read(model, VISION).open()
    network = opened.model.eval().requires_grad_(False)
    chat = ChatTokenizer(opened.tokenizer, str(model))
    lines = read_media_lines(folder / "data" / "test.jsonl", chat, VISION)
    assert isinstance(opened.processor, FrameSettings)
    frames = {count: _frames(opened.processor, count) for count in sorted(counts)}

    others = [line._replace(files=lines[place - len(KINDS)].files) for place, line in enumerate(lines)]

    def marked(lines: Sequence[MediaLine], frames: FrameSettings) -> str:
        return marks(network, _questions(chat, lines, frames), chat.pad, frames)

    result = {
        "steps": record.steps,
        "seconds": record.seconds,
        "marks": {str(count): marked(lines, settings) for count, settings in frames.items()},
        "another": marked(others, opened.processor),
        "text": text_scores(folder, network, chat),
        "ms": {
            str(count): _times(network, *_questions(chat, lines[:1], settings)[0], settings)
            for count, settings in frames.items()
        },
    }
    write_durably(path, json.dumps(result).encode())


def _frames(settings: FrameSettings, tokens: int) -> FrameSettings:
    return settings.model_copy(update={"min_image_tokens": tokens, "max_image_tokens": tokens})


def _questions(chat: ChatTokenizer, lines: Sequence[MediaLine], frames: FrameSettings) -> list[Question]:
    return [Question(*chat.conversation(line.expanded(frames)), line.files) for line in lines]


@torch.no_grad()
def marks(model: Any, questions: Sequence[Question], pad: int, frames: FrameSettings) -> str:
    """Returns a 1 for each answer of which each token is the likeliest, as greedy decoding gives it, else a 0."""
    result = ""
    for begin in range(0, len(questions), _AT_ONCE):
        part = questions[begin : begin + _AT_ONCE]
        tokens = padded([one.ids[:-1].astype(np.int64) for one in part], pad)
        labels = padded([np.where(one.answers[1:], one.ids[1:], IGNORE).astype(np.int64) for one in part], IGNORE)
        files = [file for one in part for file in one.files]
        predicted = model(tokens, *(frames.inputs(files) if files else ())).argmax(-1)
        right = ((predicted == labels) | (labels == IGNORE)).all(1)
        result += "".join("01"[mark] for mark in right.tolist())
    return result


@torch.no_grad()
def text_scores(folder: Path, model: Any, chat: ChatTokenizer, talks: Sequence[str] = ("tasks",)) -> dict[str, Any]:
    """Returns bits per byte of text that nothing was trained on, in windows without overlap, and marks of talks."""
    nats, size = 0.0, 0
    for path in sorted((folder / "text" / "test").iterdir()):
        text = path.read_text()
        ids, size = chat.encode(chat.begin + text), size + len(text.encode())
        for begin in range(0, len(ids) - 1, _WINDOW):
            window = torch.tensor(ids[begin : begin + _WINDOW + 1])
            nats += float(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    scores: dict[str, Any] = {"bits_per_byte": nats / np.log(2) / size}
    for name in talks:
        lines = read_lines(folder / name / "test.jsonl", Conversation)
        questions = [Question(*chat.conversation(line), ()) for line in lines]
        scores[name] = marks(model, questions, chat.pad, FrameSettings())
    return scores


@torch.no_grad()
def _times(
    model: Any, ids: NDArray[np.int32], answers: NDArray[np.bool_], files: Sequence[MediaFile], frames: FrameSettings
) -> dict[str, float]:
    """Returns milliseconds of each part until the first token of an answer, the fastest of 30."""
    tokens = torch.from_numpy(ids[: int(answers.argmax())].astype(np.int64))[None]
    spans: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(30):
        moments = [time.perf_counter()]
        inputs = frames.inputs(files)
        moments.append(time.perf_counter())
        features = model.tower.features(*inputs)
        moments.append(time.perf_counter())
        rows = model.tower.connector(features)
        moments.append(time.perf_counter())
        embedded = model.backbone.embed(tokens)
        model.backbone(embedded.masked_scatter((tokens == model.placeholder)[..., None], rows))
        moments.append(time.perf_counter())
        for name, seconds in zip(PARTS, np.diff(moments), strict=True):
            spans[name].append(1000 * float(seconds))
    return {name: round(min(values), 3) for name, values in spans.items()}


def write_page(page: Path, record: Mapping[str, Any]) -> None:
    """Writes the tables of a record; each figure is of the seeds that have come so far."""
    kinds, image_tokens = np.array(record["kinds"]), str(record["image_tokens"])

    def of_seeds(stage: str) -> list[Any]:
        return [seed[stage] for seed in record["seeds"].values() if stage in seed]

    rows = [["the most frequent answer to the question", *_shares([record["blind"]], kinds), ""]]
    for stage in STAGES:
        runs = [result["marks"][image_tokens] for result in of_seeds(stage)]
        rows.append([f"after {stage}", *_shares(runs, kinds), _seed_shares(runs)])
    runs = [result["another"] for result in of_seeds("joint")]
    rows.append(["after joint, with another picture", *_shares(runs, kinds), _seed_shares(runs)])
    count = [f"{kind}, n = {int((kinds == kind).sum())}" for kind in KINDS]
    fill(page, "answers", table(["", *count, f"all, n = {len(kinds)}", "all, of each seed"], rows))
    rows = []
    for tokens in of_seeds("joint")[0]["marks"]:
        cells = [tokens]
        for stage in ("joint", _FEWER):
            runs = [result["marks"][tokens] for result in of_seeds(stage)]
            cells += [_shares(runs, kinds)[-1], _seed_shares(runs)]
        spans = [min(result["ms"][tokens][part] for result in of_seeds("joint")) for part in PARTS]
        rows.append([*cells, *(f"{ms:.1f}" for ms in (*spans, sum(spans)))])
    trained = [head for count in (image_tokens, record["fewer"]) for head in (f"trained with {count}", "of each seed")]
    fill(page, "tokens", table(["tokens", *trained, *(f"{part}, ms" for part in PARTS), "all, ms"], rows))
    if latency := record.get("latency"):
        fill(page, "latency", _latency_tables(latency, of_seeds("joint")))
    rows = []
    for stage in ("before", *STAGES):
        scores = [result["text"] for result in of_seeds(stage)]
        bits, tasks = ([score[name] for score in scores] for name in ("bits_per_byte", "tasks"))
        figures = [f"{statistics.fmean(bits):.3f}", ", ".join(f"{value:.3f}" for value in bits)]
        rows.append([stage, *figures, _interval(_right(tasks)), _seed_shares(tasks)])
    head = ["", "bits per byte", "of each seed", f"exact answers, n = {len(tasks[0])}", "of each seed"]
    fill(page, "text", table(head, rows))


def _latency_tables(latency: Mapping[str, Any], joint: Sequence[Mapping[str, Any]]) -> str:
    """Returns answers beside times of the trained model, and times of one of a published size, by tokens."""
    head = ["TTFT, ms", *(f"{part}, ms" for part in TTFT_PARTS["images"].values()), "peak memory, MB"]
    rows: dict[str, list[list[str]]] = {}
    for name, figures in latency.items():
        kind, _, tokens = name.partition(" ")
        low, high = figures["ttft"]["ci95"]
        memory, ttft, *parts = (figures[figure]["value"] for figure in ("peak_rss", "ttft", *TTFT_PARTS["images"]))
        right = [_interval(_right([result["marks"][tokens] for result in joint]))] if kind == "trained" else []
        times = [f"{ttft:.4g} ({low:.4g} to {high:.4g})", *(f"{part:.4g}" for part in parts)]
        rows.setdefault(kind, []).append([tokens, *right, *times, f"{memory:.0f}"])
    answers = {"trained": ["exact answers"], "published": []}
    return "\n".join(table(["tokens", *answers[kind], *head], cells) for kind, cells in rows.items())


def _right(runs: Sequence[str]) -> NDArray[np.float64]:
    """Returns the share of seeds that answered each question."""
    share: NDArray[np.float64] = np.mean([[mark == "1" for mark in run] for run in runs], axis=0)
    return share


def _shares(runs: Sequence[str], kinds: NDArray[np.str_]) -> list[str]:
    """Returns the share of right answers to questions of each kind, and to all."""
    right = _right(runs)
    return [_interval(right[kinds == kind]) for kind in KINDS] + [_interval(right)]


def _interval(values: NDArray[np.float64]) -> str:
    return interval_text(interval(values))


def _seed_shares(runs: Sequence[str]) -> str:
    return ", ".join(f"{_right([run]).mean():.3f}" for run in runs)


if __name__ == "__main__":
    main()
