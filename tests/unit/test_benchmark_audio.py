"""The benchmark of models that hear: parts are apart, scores, and a run from sounds to a page that continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from audio_lab import tone
from numpy.typing import NDArray

from benchmarks import audio, audio_data
from benchmarks.audio import Sizes
from benchmarks.audio_data import FORMS, VOICES, Clip, clips, read_lines, write_speech

SIZES = Sizes(
    layout="d32 v512 ffn=swiglu:32 [C3 A2/1]",
    tower={**Sizes().tower, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_mel_bins": 16},
    clips={"train": 64, "valid": 4, "test": 8},
    tokens=2048,
    tasks=40,
    repeats=900,
    epochs=dict.fromkeys([audio.ENCODER, *audio.STAGES], 0.5),
    codec={**Sizes().codec, "epochs": 0.2, "batch": 2, "frames": 4},
)


def spoken(clip: Clip) -> NDArray[np.float64]:
    """A tone for each word."""
    words = audio_data.words()
    return np.concatenate([tone(200 + 20 * words.index(word), 0.1) for word in clip.text.split()]).astype(np.float64)


def test_parts_are_apart_by_text_and_by_voice() -> None:
    drawn = {part: clips(part, 400) for part in audio_data.PARTS}
    for part, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not {clip.text for clip in drawn[part]} & {clip.text for clip in drawn[other]}
        assert not {clip.voice for clip in drawn[part]} & {clip.voice for clip in drawn[other] if not clip.familiar}
        assert all(not set(voices[part]) & set(voices[other]) for voices in VOICES.values())
    assert sum(clip.familiar for clip in drawn["test"]) == 200
    assert {clip.language for clip in drawn["test"]} == set(FORMS)
    assert drawn["test"][:50] == clips("test", 50)


def test_every_word_can_be_learnt() -> None:
    learnt = {word for clip in clips("train", Sizes().clips["train"]) for word in clip.text.split()}
    assert learnt == set(audio_data.words())


@pytest.mark.needs("speech")
def test_every_voice_is_another(tmp_path: Path) -> None:
    """espeak-ng takes its plain voice, without a word, for one that it does not have."""
    speak = audio_data.synthesiser(tmp_path / "a.wav")
    for voices in VOICES.values():
        names = [name for part in voices.values() for name in part]
        spoken = [speak(Clip("am april", "de", "dates", name, True, 160, 50)).tobytes() for name in names]
        assert len(set(spoken)) == len(names)


def test_noise_is_as_loud_as_drawn() -> None:
    samples = 0.5 * np.sin(np.arange(32_000) * 0.3)
    heard = [audio_data.noisy(samples, np.random.default_rng(seed)) for seed in range(8)]
    assert all(np.abs(one).max() <= 0.95 + 1e-9 and len(one) == len(samples) for one in heard)
    assert not np.allclose(heard[0], heard[1])
    assert np.array_equal(heard[0], audio_data.noisy(samples, np.random.default_rng(0)))
    for one in heard:  # of a sine, what is not at its frequency is noise: 5 to 20 dB below, but for the room's
        spectrum = np.square(np.abs(np.fft.rfft(one * np.hanning(len(one)))))
        peak = int(np.argmax(spectrum))
        inside = spectrum[peak - 40 : peak + 41].sum()
        assert 3 < 10 * np.log10(inside / (spectrum.sum() - inside)) < 22


def test_the_grammar_has_every_form() -> None:
    grammar = audio_data.jsgf("de")
    assert "(öffne | schließe | prüfe | putze) (die tür | das fenster" in grammar
    assert "[in der küche | im garten | im büro | heute | morgen])" in grammar
    assert grammar.count("(null | eins") == 3 and grammar.count("[null | eins") == 2


def test_errors_are_of_words() -> None:
    words = ["the", "dog", "sees", "a", "house"]
    for heard, errors in (
        ("the dog sees a house", 0),
        ("", 5),
        ("the dog a house", 1),
        ("the the dog sees a mouse", 2),
        ("dog the sees a house", 2),
        ("one two three four five six", 6),
    ):
        assert audio.word_errors(words, heard.split()) == errors
    assert audio.word_errors([], ["one"]) == 1


def test_rates_are_of_words_and_seeds() -> None:
    kinds = " ".join(f"en:digits:{voice}:{noise}" for voice in ("known", "new") for noise in ("clean", "noisy"))
    figures = audio.Clips.of({"words": "4 4 2 2", "kinds": kinds})
    assert figures.rate(["0 2 1 1", "0 4 1 1"], figures.noise == "noisy")[:5] == "0.667"
    assert figures.rate(["0 2 1 1"], figures.voice == "known") == "0.250 (0.250 to 0.250)"
    assert figures.seed_rates(["0 2 1 1", "3 3 3 3"]) == "0.333, 1.000"


@pytest.mark.exhaustive
def test_a_model_is_trained_and_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    topics = {f"topic{n}": f"Text number {n} about nothing at all. " * 99 for n in range(12)}
    monkeypatch.setattr("benchmarks.vision.topics", topics)
    write_speech(tmp_path / "data", SIZES.clips, spoken)
    assert len(read_lines(tmp_path / "data" / "test.jsonl")) == 16
    audio.run(tmp_path, [0], SIZES)
    record = audio.recorded(tmp_path, [0, 1], SIZES)
    assert list(record["seeds"]) == ["0"]
    scores = record["seeds"]["0"]
    assert list(scores) == [audio.ENCODER, "before", *audio.STAGES]
    assert all(len(scores[stage]["errors"].split()) == 16 for stage in (audio.ENCODER, *audio.STAGES))
    assert len(record["spoken"]["errors"].split()) == 16
    assert 0 < scores["joint"]["text"]["bits_per_byte"] < 12 and len(scores["joint"]["text"]["said"]) == 200
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    audio.run(tmp_path, [0], SIZES)
    assert audio.recorded(tmp_path, [0], SIZES) == record
    again = {path.name for path, moment in written.items() if path.stat().st_mtime_ns != moment}
    assert not again & {"model.safetensors", "weights.safetensors", "joint.json", "spoken.json", "test.jsonl"}
    page = tmp_path / "page.md"
    names = ("recognition", "english", "forms", "text", "codec")
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names))
    audio.write_page(page, record)
    assert page.read_text().count("after joint") == 4 and "| encoded and decoded | " in page.read_text()
