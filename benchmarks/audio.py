"""A small model that hears, trained here in three stages on speech of espeak-ng, and how well it recognises it.

    python -m benchmarks.audio FOLDER [--seeds 2] [--factors] [--page docs/measured/audio.md]

espeak-ng speaks clips of a closed vocabulary in two languages, see `benchmarks.audio_data`; half of them are noisy.
Each seed is a model of its own: a member is trained on text and to chat, an encoder by CTC on words, and the stages
connector, mid and joint make one model of both. After each, clips of texts that nothing was trained on are recognised,
with voices that were in training and with new ones; the same clips are given to pocketsphinx. Then a codec is trained
on the clips, and what it makes of the test's is recognised by the first seed's model. FOLDER holds data, models and
results: a stopped run continues. The results are in benchmarks/recorded/audio.json. With --factors, real-time factors
of the parts of the whole chain are measured, with one thread.

Needs espeak-ng (apt install espeak-ng), and pocketsphinx for its rows (pip install pocketsphinx==5.1.1).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ParakeetCTCConfig, ParakeetForCTC

from benchmarks import audio_data
from benchmarks.audio_data import FORMS, QUESTION, read_lines, write_speech
from benchmarks.page import fill, table
from benchmarks.post_training import run_in_process, write_family
from benchmarks.retrieval import interval_text
from benchmarks.runs import say
from benchmarks.vision import text_scores, train_language_model, write_text
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit
from nas.model.nn.model import Model
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, Message, write_lines
from nas.train.pretrain import member_training
from nas.train.towers.audio import AUDIO, AudioSettings, AudioShape
from nas.train.towers.codec import read_codec
from nas.train.towers.codec_training import CodecSettings, train_codec
from nas.train.towers.data import MediaLine, read_media_lines
from nas.train.towers.detokenizer import FRAME_RATE, SPEECH_RATE, Detokenizer, DetokenizerShape, SpeechState
from nas.train.towers.modality import MediaFile, Processor
from nas.train.towers.model import TowerModel
from nas.train.towers.release import TowerFolder
from nas.train.towers.sounds import RATE, SoundSettings, read_samples
from nas.train.towers.speech import SOUND_STEPS, TEXT_STEPS, SpeechHead, SpeechShape, SpeechTokens
from nas.train.towers.training import Data, TowerRecord, train_tower

RECORDED = Path(__file__).parent / "recorded/audio.json"
ENCODER = "encoder"
STAGES = ("connector", "mid", "joint")
TALKS = ("tasks", "said")
"""Folders of conversations: generated tasks, and texts that are to be repeated."""
_SPHINX = {"grammar": "pocketsphinx, grammar of the forms", "open": "pocketsphinx, open vocabulary"}
_OTHER_CLIP = 7
_AT_ONCE = 32
_MOST_TOKENS = 24
"""Of an answer."""
_CHECKPOINT_S = 30.0
_PROMPT = 16
"""Tokens of a question besides those of its sound."""
_LEAST_CALLS, _CALLS, _MOST_S = 3, 12, 2.0
"""Of a part that is timed: calls, and seconds after which there are no more than the least."""


class Sizes(NamedTuple):
    """What is trained.

    Args:
        layout: of the language model.
        tower: shape of encoder and connector.
        clips: of each part; of test, each in two versions.
        tokens: of pre-training.
        tasks: generated conversations without sound.
        repeats: texts that are to be repeated.
        epochs: over the clips, by training.
        codec: settings of the codec's training.
        rq: layout of a head that speaks, for real-time factors.
    """

    layout: str = "d128 v1024 ffn=swiglu:256 [C3 A4/2 C3 A4/2]"
    tower: Mapping[str, int] = {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "subsampling_conv_channels": 32, "num_mel_bins": 80, "projector_hidden_size": 256,
    }  # fmt: skip
    clips: Mapping[str, int] = {"train": 1800, "valid": 100, "test": 200}
    tokens: int = 120_000
    tasks: int = 300
    repeats: int = 3000
    epochs: Mapping[str, float] = {ENCODER: 12, "connector": 1, "mid": 3, "joint": 1}
    codec: Mapping[str, Any] = {
        "epochs": 2, "batch": 8, "frames": 20, "lr": 1e-3, "adversarial": 0,
        "shape": {
            "entries": 256, "line": "d128 ffn=swiglu:256 [C3*2 W8/4@30 C3]",
            "encoder": "d128 ffn=swiglu:256 [C3*2 W8/4@30 C3]",
        },
    }  # fmt: skip
    rq: str = "d64 ffn=swiglu:128 [A2/1*2]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data, models and results")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--factors", action="store_true", help="measure real-time factors, too")
    parser.add_argument("--report", action="store_true", help="train nothing more: report what FOLDER holds")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables")
    options = parser.parse_args()
    folder, sizes = options.folder.resolve(), Sizes()
    if not options.report:
        run(folder, range(options.seeds), sizes)
    if options.factors:
        write_durably(folder / "factors.json", json.dumps(factors(folder, sizes)).encode())
    record = recorded(folder, range(options.seeds), sizes)
    write_durably(RECORDED, f"{json.dumps(record, indent=1, ensure_ascii=False)}\n".encode())
    if options.page:
        write_page(options.page, record)


def run(folder: Path, seeds: Sequence[int], sizes: Sizes) -> None:
    """Trains and scores what is missing."""
    os.environ["NAS_HOME"] = str(folder / "home")
    torch.set_num_threads(1)
    member_training.run_workers = run_in_process
    write_speech(folder / "data", sizes.clips)
    _write_repeats(folder / "said", sizes.repeats)
    layout = Layout.parse(sizes.layout)
    write_text(folder, layout, sizes.tasks)
    write_family(layout, len(seeds))
    for seed in seeds:
        _run_seed(folder, seed, sizes)
    _run_sphinx(folder, "grammar")
    _run_codec(folder, seeds[0], sizes)
    _run_sphinx(folder, "open")


def recorded(folder: Path, seeds: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Returns the results that there are; what is of each clip of the test is in its order."""
    test = read_lines(folder / "data" / "test.jsonl")

    def results(name: str, *stages: str) -> dict[str, Any]:
        paths = {stage: folder / name / f"{stage}.json" for stage in stages}
        return {stage: json.loads(path.read_bytes()) for stage, path in paths.items() if path.is_file()}

    of_seeds = {str(seed): results(f"seed{seed}", ENCODER, "before", *STAGES) for seed in seeds}
    return {
        "layout": sizes.layout,
        "tower": dict(sizes.tower),
        "clips": dict(sizes.clips),
        "words": _packed(len(line["answer"].split()) for line in test),
        "kinds": " ".join(
            f"{line['language']}:{line['form']}:{'known' if line['familiar'] else 'new'}:"
            f"{'noisy' if line['noisy'] else 'clean'}"
            for line in test
        ),
        "seeds": {seed: result for seed, result in of_seeds.items() if result},
        **results("", *(f"sphinx-{name}" for name in _SPHINX), "spoken", "factors"),
    }


def _packed(numbers: Iterator[int] | Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _write_repeats(folder: Path, count: int) -> None:
    """Writes texts of train as conversations that repeat them, the same as text, and some of valid to score."""
    rng = random.Random("said")
    for part, target, number in (("train", "train", count), ("valid", "test", 200)):
        streams = [(text for _, text in audio_data.texts(part, language, rng)) for language in FORMS]
        texts = [next(rng.choice(streams)) for _ in range(number)]
        talks = [
            Conversation(
                messages=(
                    Message(role="user", content=f"{text} {QUESTION}"),
                    Message(role="assistant", content=text),
                )
            )
            for text in texts
        ]
        if not (folder / f"{target}.jsonl").is_file():
            write_lines(folder / f"{target}.jsonl", talks)
        if part == "train":
            (folder / "text").mkdir(parents=True, exist_ok=True)
            write_durably(folder / "text" / "text.txt", "".join(f"{text}\n" for text in texts).encode())


def _run_seed(folder: Path, seed: int, sizes: Sizes) -> None:
    """Trains and scores the stages of a seed."""
    begin, models = time.process_time(), folder / f"seed{seed}"
    train_language_model(folder, seed, sizes.tokens, TALKS)
    say(f"seed {seed}, language model: {time.process_time() - begin:.0f} s of CPU")
    _train_encoder(folder, seed, sizes)
    say(f"seed {seed}, encoder: {time.process_time() - begin:.0f} s of CPU")
    before = f"chat/seed{seed}"
    for stage in STAGES:
        record = _train_stage(folder, before, stage, seed, sizes)
        before = str(models / stage)
        _score(folder, models / stage, record)
        say(f"seed {seed}, {stage}: {time.process_time() - begin:.0f} s of CPU")


def _train_encoder(folder: Path, seed: int, sizes: Sizes) -> None:
    """Trains an encoder by CTC on words, and scores its greedy decoding, unless that was done.

    The folder is one of transformers' ParakeetForCTC, as `nas family audio --encoder` reads it.
    """
    output, words = folder / f"seed{seed}" / ENCODER, audio_data.words()
    if (path := output.with_suffix(".json")).is_file():
        return
    settings = AudioSettings(
        stage="mid", epochs=sizes.epochs[ENCODER], batch=_AT_ONCE, lr=2e-3, final=0.02, warmup=0.1, seed=seed,
        tower=AudioShape(**sizes.tower), weight_decay=0.01,
    )  # fmt: skip
    torch.manual_seed(seed)
    blank = len(words)
    shape = settings.tower.encoder()
    model = ParakeetForCTC(ParakeetCTCConfig(vocab_size=blank + 1, pad_token_id=blank, encoder_config=shape))
    model.encoder.load_state_dict(settings.tower.tower(1, seed).encoder.state_dict())
    lines = read_lines(folder / "data" / "train.jsonl")
    features = _features(folder / "data", lines, sizes)
    labels = [torch.tensor([words.index(word) for word in line["answer"].split()]) for line in lines]
    steps = settings.steps(len(lines))

    def batches(step: int) -> list[tuple[Tensor, ...]]:
        places = np.random.default_rng([seed, step]).choice(len(lines), settings.batch, replace=False)
        chosen = [features[place] for place in places]
        counts = torch.tensor([len(rows) for rows in chosen])
        return [(pad_sequence(chosen, True), counts, pad_sequence([labels[place] for place in places], True, blank))]

    state = TrainingState(model, settings.optimiser(), steps)
    phase = TrainingPhase(ENCODER, steps, settings.batch, batches, _ctc_loss, lambda step: settings.rate(step, steps))
    checkpoint = TrainingCheckpoint(output.with_suffix(".checkpoint"), {"key": f"{sizes}"}, _CHECKPOINT_S)
    output.mkdir(parents=True, exist_ok=True)
    fit(state, [phase], [checkpoint], Worker(torch.device("cpu"), lambda line: say(str(line))), name=output.name)
    model.eval().save_pretrained(output)
    tested = read_lines(folder / "data" / "test.jsonl")
    heard = _heard_by_ctc(model, _features(folder / "data", tested, sizes), words)
    result = {"steps": steps, "seconds": state.cpu_seconds, "errors": _packed(_errors(tested, heard))}
    write_durably(path, json.dumps(result).encode())
    checkpoint.path.unlink()


def _features(folder: Path, lines: Sequence[Mapping[str, Any]], sizes: Sizes) -> list[Tensor]:
    settings = SoundSettings(feature_size=sizes.tower["num_mel_bins"])
    return [settings.inputs([SoundSettings.read(folder / line["audio"])])[0][0] for line in lines]


def _ctc_loss(model: Any, features: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
    mask = torch.arange(features.shape[1]) < counts[:, None]
    loss: Tensor = model(features, attention_mask=mask, labels=labels).loss
    return loss


@torch.no_grad()
def _heard_by_ctc(model: Any, features: Sequence[Tensor], words: Sequence[str]) -> list[str]:
    """Returns the likeliest word of each frame, equal ones in a row once, without blanks."""
    texts = []
    for rows in features:
        likeliest = model(rows[None]).logits[0].argmax(-1).tolist()
        texts.append(" ".join(words[place] for place, _ in groupby(likeliest) if place < len(words)))
    return texts


def _train_stage(folder: Path, start: str, stage: str, seed: int, sizes: Sizes) -> TowerRecord:
    """Trains a stage; the first gets the encoder."""
    rates = {"connector": {"lr": 3e-3}, "mid": {"lr": 1e-3}, "joint": {"lr": 3e-4}}
    settings = AudioSettings.model_validate(
        {
            "stage": stage,
            "epochs": sizes.epochs[stage],
            "seed": seed,
            "batch": _AT_ONCE,
            "tower": dict(sizes.tower),
            "held_out": 0,
            **rates[stage],
        }
    )
    models, data = folder / f"seed{seed}", folder / "data"
    texts = [folder / name / "train.jsonl" for name in TALKS] if settings.text else []
    files = Data([data / "train.jsonl"], texts, [data / "valid.jsonl"])
    encoder = models / ENCODER if stage == STAGES[0] else None
    return train_tower(start, files, settings, models / stage, say, encoder, _CHECKPOINT_S)


def _score(folder: Path, model: Path, record: TowerRecord) -> None:
    """Writes errors of each clip of the test and scores of text to a stage's file of results, unless it is there."""
    path = model.with_suffix(".json")
    if path.is_file():
        return
    opened = TowerFolder.read(model, AUDIO).open()
    network = opened.model.eval().requires_grad_(False)
    chat = ChatTokenizer(opened.tokenizer, str(model))
    data = folder / "data"
    tested, lines = read_lines(data / "test.jsonl"), read_media_lines(data / "test.jsonl", chat, AUDIO)
    others = [line._replace(files=lines[place - _OTHER_CLIP].files) for place, line in enumerate(lines)]
    result = {
        "steps": record.steps,
        "seconds": record.seconds,
        "valid": record.after,
        "errors": _packed(_errors(tested, transcripts(network, chat, opened.processor, lines))),
        "another": _packed(_errors(tested, transcripts(network, chat, opened.processor, others))),
        "text": text_scores(folder, network, chat, TALKS),
    }
    write_durably(path, json.dumps(result).encode())


@torch.no_grad()
def transcripts(model: TowerModel, chat: ChatTokenizer, processor: Processor, lines: Sequence[MediaLine]) -> list[str]:
    """Returns what a model answers to questions about sounds, greedily."""
    texts = []
    for begin in range(0, len(lines), _AT_ONCE):
        part = lines[begin : begin + _AT_ONCE]
        questions = [torch.tensor(chat.question(line.expanded(processor).question)) for line in part]
        inputs = processor.inputs([file for line in part for file in line.files])
        tokens = pad_sequence(questions, True, chat.pad)
        embedded = F.pad(model.embeddings(tokens, *inputs), (0, 0, 0, _MOST_TOKENS))
        lengths = torch.tensor([len(question) for question in questions])
        rows, answers = torch.arange(len(part)), list[Tensor]()
        for _ in range(_MOST_TOKENS):
            features = model.backbone.features(embedded[:, : int(lengths.max())])[rows, lengths - 1]
            answers.append(model.backbone.logits(features).argmax(-1))
            embedded[rows, lengths] = model.backbone.embed(answers[-1])
            lengths = lengths + 1
            if all(set(row) & set(chat.ends) for row in torch.stack(answers, 1).tolist()):
                break
        texts += [chat.answer_of(row).strip() for row in torch.stack(answers, 1).tolist()]
    return texts


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """Returns the least number of words to replace, insert and leave out that makes one text of the other."""
    row = list(range(len(heard) + 1))
    for place, word in enumerate(reference, 1):
        corner, row[0] = row[0], place
        for number, other in enumerate(heard, 1):
            corner, row[number] = row[number], min(corner + (word != other), row[number] + 1, row[number - 1] + 1)
    return row[-1]


def _errors(lines: Sequence[Mapping[str, Any]], heard: Sequence[str]) -> list[int]:
    return [word_errors(line["answer"].split(), text.lower().split()) for line, text in zip(lines, heard, strict=True)]


def _run_sphinx(folder: Path, name: str) -> None:
    """Writes pocketsphinx's errors of each clip of the test, -1 where it is not English, unless they are there."""
    path = folder / f"sphinx-{name}.json"
    if path.is_file():
        return
    if importlib.util.find_spec("pocketsphinx") is None:
        say("its rows are left out, as there is no pocketsphinx: pip install pocketsphinx==5.1.1")
        return
    sphinx = importlib.import_module("pocketsphinx")
    lines, errors = read_lines(folder / "data" / "test.jsonl"), list[int]()
    decoder = sphinx.Decoder(loglevel="FATAL")
    if name == "grammar":
        decoder.add_jsgf_string("forms", audio_data.jsgf("en"))
        decoder.activate_search("forms")
    begin, seconds = time.process_time(), 0.0
    for line in lines:
        if line["language"] != "en":
            errors.append(-1)
            continue
        samples = read_samples(folder / "data" / line["audio"], line["audio"])
        seconds += len(samples) / RATE
        decoder.start_utt()
        decoder.process_raw((samples * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        heard = decoder.hyp()
        errors += _errors([line], [heard.hypstr if heard else ""])
    result = {"errors": _packed(errors), "factor": (time.process_time() - begin) / max(seconds, 1e-9)}
    write_durably(path, json.dumps(result).encode())


def _run_codec(folder: Path, seed: int, sizes: Sizes) -> None:
    """Trains a codec, and writes errors of the clips as they come back from it, unless that was done."""
    path, data = folder / "spoken.json", folder / "data"
    if path.is_file():
        return
    record = train_codec([data / "train"], CodecSettings.model_validate(sizes.codec), folder / "codec", say)
    codec, tested = read_codec(folder / "codec"), read_lines(data / "test.jsonl")
    for line in tested:
        speech = torch.from_numpy(read_samples(data / line["audio"], line["audio"], SPEECH_RATE))
        with torch.no_grad():
            spoken = codec.detokenizer(codec.codes(speech[None]))[0, : len(speech)]
        sound = folder / "spoken" / line["audio"]
        sound.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(sound, spoken.clamp(-1, 1).numpy(), SPEECH_RATE, "PCM_16")
    lines = "".join(f"{json.dumps(line)}\n" for line in tested)
    write_durably(folder / "spoken" / "test.jsonl", lines.encode())
    model = folder / f"seed{seed}" / STAGES[-1]
    opened = TowerFolder.read(model, AUDIO).open()
    chat = ChatTokenizer(opened.tokenizer, str(model))
    media = read_media_lines(folder / "spoken" / "test.jsonl", chat, AUDIO)
    heard = transcripts(opened.model.eval().requires_grad_(False), chat, opened.processor, media)
    result = {"steps": record.steps, "scores": [record.before, record.after], "errors": _packed(_errors(tested, heard))}
    write_durably(path, json.dumps(result).encode())


def factors(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Returns real-time factors of parts, with random weights: seconds of one core per second of sound.

    The encoder, the head and the detokenizer are measured in the report's size, too; the language model is not.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    soundfile.write(path := folder / "factors.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 2 * RATE), RATE)
    sound = SoundSettings.read(path)
    small = CodecSettings.model_validate(sizes.codec).shape
    layout = Layout.parse(sizes.layout)
    shape = AudioShape(**sizes.tower)
    head = SpeechShape(codebooks=small.codebooks, entries=small.entries, rq=sizes.rq)
    with torch.no_grad():
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}",
            "seconds": sound.size[0] / RATE,
            "trained": {
                **_factors_of_hearing(shape, layout.d_model, sound),
                **_factors_of_language(layout, sound, SoundSettings(**shape.processor())),
                **_factors_of_speech(head, layout.d_model, Detokenizer(small)),
            },
            "report": {
                **_factors_of_hearing(AudioShape(), 2048, sound),
                **_factors_of_speech(SpeechShape(), 2048, Detokenizer(DetokenizerShape())),
            },
        }


def _factors_of_hearing(shape: AudioShape, d_model: int, sound: MediaFile) -> dict[str, Any]:
    settings, tower = SoundSettings(**shape.processor()), shape.tower(d_model).eval().requires_grad_(False)
    inputs, seconds = settings.inputs([sound]), settings.seconds(sound)
    return {
        "features": _part(lambda: settings.inputs([sound]), seconds),
        "encoder and connector": _part(lambda: tower(*inputs), seconds, tower),
    }


def _factors_of_language(layout: Layout, sound: MediaFile, settings: SoundSettings) -> dict[str, Any]:
    """Returns those of reading a question about a sound, and of speaking one turn of text and frames."""
    model = Model(layout, 0).eval().requires_grad_(False)
    question = torch.zeros(1, settings.text(sound).count("<audio>") + _PROMPT, layout.d_model)
    _, state = model.read(question)

    def speak() -> None:
        now = state
        for step in range(TEXT_STEPS + SOUND_STEPS):
            features, now = model.read(question[:, :1], now)
            if step < TEXT_STEPS:
                model.logits(features)

    return {
        "language model, reading": _part(lambda: model.read(question), settings.seconds(sound), model),
        "language model, speaking": _part(speak, SOUND_STEPS / FRAME_RATE, model),
    }


def _factors_of_speech(shape: SpeechShape, d_model: int, detokenizer: Detokenizer) -> dict[str, Any]:
    head = SpeechHead(shape, d_model, SpeechTokens(1, 2, 3))
    features = torch.randn(SOUND_STEPS, d_model, generator=torch.Generator().manual_seed(0))
    head.draw(0, features)
    head.eval().requires_grad_(False)
    codes = torch.randint(
        0, shape.entries, (1, SOUND_STEPS, shape.codebooks), generator=torch.Generator().manual_seed(0)
    )
    detokenizer.eval().requires_grad_(False)
    seconds = SOUND_STEPS / FRAME_RATE

    def frames() -> None:
        for row in features:
            head.frame(row, lambda logits: int(logits[: shape.entries].argmax()))

    def spoken(chunk: int) -> None:
        state = SpeechState(None, None)
        for part in torch.split(codes, chunk, 1):
            _, state = detokenizer.step(part, state)

    return {
        "RQ head": _part(frames, seconds, head),
        "detokenizer": _part(lambda: spoken(1), seconds, detokenizer),
        f"detokenizer, {SOUND_STEPS} frames at once": _part(lambda: spoken(SOUND_STEPS), seconds, detokenizer),
    }


def _part(call: Callable[[], object], seconds: float, module: torch.nn.Module | None = None) -> dict[str, float]:
    """Returns the factor of the fastest of some calls that compute so many seconds of sound, and the weights."""
    spans = list[float]()
    while len(spans) < _LEAST_CALLS or (len(spans) < _CALLS and sum(spans) < _MOST_S):
        begin = time.process_time()
        call()
        spans.append(time.process_time() - begin)
    weights = sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
    return {"factor": min(spans) / seconds, "weights": weights}


def write_page(page: Path, record: Mapping[str, Any]) -> None:
    """Writes the tables of a record; each figure is of the seeds that have come so far."""
    clips = Clips.of(record)

    def of_seeds(stage: str, what: str = "errors") -> list[Any]:
        return [seed[stage][what] for seed in record["seeds"].values() if stage in seed]

    runs = {"the encoder alone, by CTC": of_seeds(ENCODER), **{f"after {stage}": of_seeds(stage) for stage in STAGES}}
    last = f"after {STAGES[-1]}"
    control = {f"{last}, sound of another clip": of_seeds(STAGES[-1], "another")}
    every = np.ones(len(clips.words), bool)
    groups = {
        f"{noise}, {voice} voices": (clips.noise == noise) & (clips.voice == voice)
        for noise in ("clean", "noisy")
        for voice in ("known", "new")
    } | {"all": every}
    count = [f"{name}, {clips.words[mask].sum():,.0f} words" for name, mask in groups.items()]
    rows = [
        [name, *(clips.rate(errors, mask) for mask in groups.values()), clips.seed_rates(errors)]
        for name, errors in {**runs, **control}.items()
        if errors
    ]
    fill(page, "recognition", table(["", *count, "all, of each seed"], rows))
    english = clips.language == "en"
    groups = {"clean": english & (clips.noise == "clean"), "noisy": english & (clips.noise == "noisy"), "all": english}
    peers = {title: [record[key]["errors"]] for name, title in _SPHINX.items() if (key := f"sphinx-{name}") in record}
    rows = [
        [name, *(clips.rate(errors, mask) for mask in groups.values())]
        for name, errors in {**peers, "the encoder alone, by CTC": of_seeds(ENCODER), last: runs[last]}.items()
        if errors
    ]
    count = [f"{name}, {clips.words[mask].sum():,.0f} words" for name, mask in groups.items()]
    fill(page, "english", table(["", *count], rows))
    rows = []
    for form in dict.fromkeys(clips.form.tolist()):
        mask = clips.form == form
        rates = [clips.rate(runs[name], mask) for name in ("the encoder alone, by CTC", last) if runs[name]]
        rows.append([form, f"{clips.words[mask].sum():,.0f}", *rates])
    fill(page, "forms", table(["", "words", "the encoder alone, by CTC", last][: len(rows[0])], sorted(rows)))
    rows = []
    for stage in ("before", *STAGES):
        if not (scores := of_seeds(stage, "text")):
            continue
        bits = [score["bits_per_byte"] for score in scores]
        figures = [f"{statistics.fmean(bits):.3f}", ", ".join(f"{value:.3f}" for value in bits)]
        for name in TALKS:
            right = np.mean([[mark == "1" for mark in score[name]] for score in scores], axis=0)
            figures.append(interval_text(_interval(right, np.ones(len(right)))))
        rows.append([stage, *figures])
    fill(page, "text", table(["", "bits per byte", "of each seed", "generated tasks", "text repeated"], rows))
    if spoken := record.get("spoken"):
        first = [next(iter(record["seeds"].values()))[STAGES[-1]]["errors"]]
        sounds = {"as recorded": first, "encoded and decoded": [spoken["errors"]]}
        groups = {"clean": clips.noise == "clean", "noisy": clips.noise == "noisy", "all": every}
        rows = [[name, *(clips.rate(errors, mask) for mask in groups.values())] for name, errors in sounds.items()]
        fill(page, "codec", table(["", *groups], rows))
    if measured := record.get("factors"):
        rows = []
        for name, part in measured["trained"].items():
            other = measured["report"].get(name)
            rows.append([name, *_factor_cells(part), *(_factor_cells(other) if other else ("", ""))])
        totals = [
            sum(part["factor"] for name, part in measured[size].items() if "at once" not in name)
            for size in ("trained", "report")
        ]
        rows.append(["all that was measured", "", f"{totals[0]:.3f}", "", f"{totals[1]:.3f}"])
        head = ["", "weights", "trained here", "weights", "of the report's size"]
        fill(
            page,
            "factors",
            f"{measured['machine']}, one thread, a sound of {measured['seconds']:.1f} s\n\n{table(head, rows)}",
        )


def _factor_cells(part: Mapping[str, float]) -> tuple[str, str]:
    weights = f"{part['weights'] / 1e6:.2f}M" if part["weights"] else ""
    return weights, f"{part['factor']:.3f}"


class Clips(NamedTuple):
    """What the test's clips are, one entry for each; `words` are what is said in each."""

    words: NDArray[np.float64]
    language: NDArray[np.str_]
    form: NDArray[np.str_]
    voice: NDArray[np.str_]
    noise: NDArray[np.str_]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Clips:
        language, form, voice, noise = np.array([kind.split(":") for kind in record["kinds"].split()]).T
        forms = np.char.add(np.char.add(language, " "), form)
        return cls(np.array(record["words"].split(), np.float64), language, forms, voice, noise)

    def rate(self, runs: Sequence[str], mask: NDArray[np.bool_]) -> str:
        """Returns the word error rate over clips and seeds with its interval."""
        errors = np.mean([np.array(run.split(), np.float64) for run in runs], axis=0)
        clip_ids = np.cumsum(self.noise == "clean")[mask]  # a clip and its noisy version are drawn together
        errors, words = (np.bincount(clip_ids, values[mask]).astype(np.float64) for values in (errors, self.words))
        return interval_text(_interval(errors[words > 0], words[words > 0]))

    def seed_rates(self, runs: Sequence[str]) -> str:
        """Returns the rate of each seed."""
        return ", ".join(f"{np.array(run.split(), np.float64).sum() / self.words.sum():.3f}" for run in runs)


def _interval(errors: NDArray[np.float64], words: NDArray[np.float64]) -> list[float]:
    """Returns errors per word and its 95 % interval, by 2,000 bootstrap draws."""
    draws = np.random.default_rng(0).integers(0, len(words), (2000, len(words)))
    low, high = np.quantile(errors[draws].sum(1) / words[draws].sum(1), [0.025, 0.975])
    return [float(value) for value in (errors.sum() / words.sum(), low, high)]


if __name__ == "__main__":
    main()
