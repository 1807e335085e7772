"""Sound: features and encoder as transformers computes them, files within limits, folders, training and chat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio_lab import LAYOUT, SHAPE, SOUNDS, audio_model, tone, write_model, write_pitches, write_sound
from cli_runner import nas
from retrieval_lab import write_lines
from safetensors.torch import load_file, save_file
from transformers import ParakeetEncoder, ParakeetEncoderConfig, ParakeetFeatureExtractor

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.train.adapt.checkpoints import read_model
from nas.train.posttrain.conversations import ChatTokenizer
from nas.train.towers import sounds
from nas.train.towers.audio import AUDIO, AudioSettings, AudioShape
from nas.train.towers.data import read_media_lines
from nas.train.towers.release import TowerFolder, encoder_shape, load_encoder
from nas.train.towers.sounds import Part, SoundSettings, features_of, read_samples
from nas.train.towers.training import Data, TowerRecord, train_tower

EXTRACTOR = ParakeetFeatureExtractor(feature_size=128)


def reference_features(samples: list[np.ndarray[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    read = EXTRACTOR(samples, sampling_rate=16_000, return_tensors="pt")
    return read.input_features, read.attention_mask


@pytest.mark.parametrize("count", [1600, 1601, 15_999, 16_000, 40_123])
def test_features_are_those_of_transformers(count: int) -> None:
    samples = tone(440, 3)[:count] * np.linspace(0, 1, count, dtype=np.float32)
    features = features_of(torch.from_numpy(samples), 128)
    expected, mask = reference_features([samples])
    assert len(features) == len(expected[0]) == mask.sum() + 1 and not features[-1].any()
    torch.testing.assert_close(features, expected[0], atol=1e-4, rtol=0)


def test_silence_has_features_of_zero() -> None:
    assert (features_of(torch.zeros(16_000), 128) == 0).all()


def test_a_padded_batch_is_encoded_as_transformers_does_it(tmp_path: Path) -> None:
    shape = SHAPE.model_copy(update={"num_mel_bins": 128})
    samples = [tone(300, 1.0), tone(900, 0.33), tone(2000, 0.81)]
    files = [
        SoundSettings.read(write_sound(tmp_path / f"{number}.wav", one, subtype="FLOAT"))
        for number, one in enumerate(samples)
    ]
    settings = SoundSettings()
    tower = audio_model(shape=shape).model.tower
    encoder = ParakeetEncoder(ParakeetEncoderConfig(**shape.encoder())).eval()
    encoder.load_state_dict(tower.encoder.state_dict())
    rows = tower.train().features(*settings.inputs(files))  # BatchNorms keep their statistics
    features, mask = reference_features(samples)
    mask[torch.arange(3), mask.sum(1)] = True  # the row of zeros behind each sound
    with torch.no_grad():
        expected = encoder(features, attention_mask=mask)
    torch.testing.assert_close(rows, expected.last_hidden_state[expected.attention_mask.bool()], atol=1e-4, rtol=0)
    counts = [settings.text(file).count("<audio>") for file in files]
    assert counts == [13, 5, 11] and sum(counts) == len(rows)  # 12.5 a second, the last one begun
    apart = [tower.eval().features(*settings.inputs([file])) for file in files]
    torch.testing.assert_close(rows, torch.cat(apart), atol=1e-4, rtol=0)


@pytest.mark.parametrize("factor", [2, 4, 16])
def test_other_factors_have_their_tokens(factor: int) -> None:
    shape = SHAPE.model_copy(update={"subsampling_factor": factor})
    settings = SoundSettings(**shape.processor())
    for count in (1600, 16_000, 17_777):
        samples = torch.from_numpy(tone(500, 2)[:count])
        rows = shape.tower(8).features(features_of(samples, 16)[None], torch.tensor([count // 160 + 1]))
        file = sounds.MediaFile(Path("a.wav"), "a.wav", "", (count,))
        assert settings.text(file).count("<audio>") == len(rows)


def level(samples: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(samples[1000:-1000]).mean()))


@pytest.mark.parametrize(
    ("name", "rate", "options"),
    [
        ("a.wav", 16_000, {}),
        ("a.flac", 16_000, {"subtype": "PCM_24"}),
        ("a.wav", 16_000, {"subtype": "PCM_U8"}),
        ("a.wav", 8_000, {"subtype": "ULAW"}),
        ("a.wav", 44_100, {"subtype": "DOUBLE"}),
        ("a.flac", 96_000, {}),
        ("a.wav", 44_101, {"format": "RF64"}),
    ],
)
def test_rates_and_encodings_are_read(tmp_path: Path, name: str, rate: int, options: dict[str, Any]) -> None:
    samples = read_samples(write_sound(tmp_path / name, tone(440, 1, rate), rate, **options), name)
    assert samples.dtype == np.float32 and len(samples) == 16_000
    np.testing.assert_allclose(samples[1000:-1000], tone(440, 1)[1000:-1000], atol=0.02)


@pytest.mark.parametrize(
    ("name", "rate", "target"), [("a.wav", 22_050, 24_000), ("a.flac", 48_000, 24_000), ("a.wav", 24_000, 24_000)]
)
def test_a_part_is_read_alone_and_has_the_samples_of_the_whole(
    name: str, rate: int, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sound(tmp_path / name, np.random.default_rng(0).uniform(-0.9, 0.9, 4 * rate).astype(np.float32), rate)
    whole = read_samples(path, "a", target)
    for start in (0.0, 0.0101, 1.2345, 3.7):
        part = read_samples(path, "a", target, Part(start, 0.5))
        begin = round(start * target)
        np.testing.assert_allclose(part, whole[begin : begin + target // 2], atol=1e-5)
    assert len(part) == len(whole) - begin < target // 2
    decoded, read = list[int](), sounds.soundfile.SoundFile.read

    def counted(*arguments: Any, **named: Any) -> Any:
        block = read(*arguments, **named)
        decoded.append(len(block))
        return block

    monkeypatch.setattr(sounds.soundfile.SoundFile, "read", counted)
    read_samples(path, "a", target, Part(1.0, 0.5))
    assert sum(decoded) < 0.6 * rate


def test_a_new_encoder_hears() -> None:
    """What it makes of features is not what it makes of none, before any training."""
    encoder = AudioShape(hidden_size=64, num_hidden_layers=1, subsampling_conv_channels=32).tower(1, 3).encoder
    features = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 64, dtype=torch.bool)
    with torch.no_grad():
        heard = encoder.subsampling(features, mask)
        silent = encoder.subsampling(torch.zeros_like(features), mask)
    assert float((heard - silent).std()) > 0.01


def test_what_resampling_would_fold_is_gone(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", tone(12_000, 1, 48_000), 48_000)
    assert level(read_samples(path, "a")) < 0.01 * level(tone(12_000, 1, 48_000))


def test_channels_are_averaged_and_clipping_stays(tmp_path: Path) -> None:
    both = np.stack([tone(440), np.zeros(8000, np.float32)], 1)
    np.testing.assert_allclose(read_samples(write_sound(tmp_path / "a.wav", both), "a"), tone(440) / 2, atol=1e-3)
    loud = read_samples(write_sound(tmp_path / "b.wav", 10 * tone(440)), "b")
    assert np.abs(loud).max() <= 1 and SOUNDS.seconds(SoundSettings.read(tmp_path / "b.wav")) == 0.5
    path = write_sound(tmp_path / "c.wav", 10 * tone(440), subtype="FLOAT")
    np.testing.assert_allclose(read_samples(path, "c"), 10 * tone(440))


def changed_bytes(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


def test_what_was_written_to_a_pipe_is_read(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", tone(440))
    changed_bytes(path, 4, b"\xff" * 4)
    changed_bytes(path, 40, b"\xff" * 4)
    assert len(read_samples(path, "a")) == 8000


def broken(folder: Path, case: str) -> Path:
    """Writes a file that cannot be read."""
    path = folder / ("a.flac" if "flac" in case else "a.wav")
    if case in ("truncated wav", "truncated flac", "damaged flac"):
        write_sound(path, tone(440))
        half = path.stat().st_size // 2
        path.write_bytes(path.read_bytes()[:half]) if "truncated" in case else changed_bytes(path, half, bytes(40))
    elif case == "mp3":
        write_sound(path, tone(440), format="MP3")
    elif case == "adpcm":
        write_sound(path, tone(440), subtype="IMA_ADPCM")
    elif case == "not a number":
        write_sound(path, np.full(8000, np.nan, np.float32), subtype="FLOAT")
    elif case == "huge":
        write_sound(path, np.full(8000, 1e30, np.float32), subtype="FLOAT")
    elif case == "no sample":
        write_sound(path, np.zeros(0, np.float32))
    elif case == "short":
        write_sound(path, tone(440, 0.05))
    elif case == "long flac":
        write_sound(path, np.zeros(3600 * 4000, np.int16), 4000)
    elif case == "slow":
        write_sound(path, tone(440), 100)
    elif case == "channels":
        write_sound(path, np.zeros((2000, 17), np.float32))
    elif case == "header":
        write_sound(path, tone(440))
        path.write_bytes(path.read_bytes()[:20])
    elif case == "text":
        path.write_bytes(b"no sound at all")
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "pipe":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("truncated wav", "ends early: 7,978 of 16,000 bytes"),
        ("truncated flac", "damaged"),
        ("damaged flac", "damaged"),
        ("mp3", "no WAV or FLAC"),
        ("adpcm", "IMA_ADPCM, which is not read"),
        ("not a number", "holds NaN"),
        ("huge", "beyond 65,536"),
        ("no sample", "shorter than 0.1 s"),
        ("short", "shorter than 0.1 s"),
        ("long flac", "lasts longer than 120 s"),
        ("slow", "100 samples per second"),
        ("channels", "17 channels"),
        ("header", "damaged|no WAV"),
        ("text", "no WAV or FLAC"),
        ("empty", "no WAV or FLAC"),
        ("pipe", "no file a.wav"),
        ("missing", "no file a.wav"),
    ],
)
def test_files_that_cannot_be_read_are_named_in_one_line(tmp_path: Path, case: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as raised:
        read_samples(broken(tmp_path, case), "data.jsonl:7")
    assert str(raised.value).startswith("data.jsonl:7: ") and "\n" not in str(raised.value)


def test_large_files_are_not_opened_and_changed_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = SoundSettings.read(write_sound(tmp_path / "a.wav", tone(440)))
    write_sound(tmp_path / "a.wav", tone(440, 0.4))
    with pytest.raises(InvalidInput, match="has changed"):
        SOUNDS.inputs([sound])
    monkeypatch.setattr(sounds, "MOST_BYTES", 1 << 10)
    with pytest.raises(InvalidInput, match="larger than"):
        read_samples(tmp_path / "a.wav", "a")


CUSTOM = Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]")


@pytest.mark.parametrize("layout", [LAYOUT, CUSTOM], ids=["stock layout", "own layout"])
def test_folders_are_read_as_written(tmp_path: Path, layout: Layout) -> None:
    audio = write_model(tmp_path / "model", layout=layout)
    read = TowerFolder.read(tmp_path / "model", AUDIO)
    assert (read.shape, read.processor, read.context) == (SHAPE, SOUNDS, 4096)
    files = [SoundSettings.read(write_sound(tmp_path / f"{n}.wav", tone(440, 0.2 + n / 3))) for n in range(2)]
    text = AUDIO.expanded("<audio> or <audio>?", [SOUNDS.text(file) for file in files])
    tokens = torch.tensor([audio.tokenizer.tokenizer.encode(text).ids])
    inputs = SOUNDS.inputs(files)
    torch.testing.assert_close(read.open().model(tokens, *inputs), audio.model(tokens, *inputs), atol=1e-5, rtol=0)
    assert read_model(tmp_path / "model").layout == audio.model.backbone.layout
    with pytest.raises(InvalidInput, match="placeholders for"):
        audio.model(tokens[:, 3:], *inputs)


def changed(folder: Path, name: str, part: str, values: dict[str, Any]) -> None:
    about = json.loads((folder / name).read_text())
    about[part] = about[part] | values
    (folder / name).write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("name", "part", "values", "error", "problem"),
    [
        ("config.json", "audio_config", {"model_type": "whisper"}, Unsupported, "no Parakeet"),
        ("config.json", "audio_config", {"hidden_act": "relu"}, Unsupported, "hidden_act"),
        ("config.json", "audio_config", {"num_hidden_layers": 1 << 40}, InvalidInput, "num_hidden_layers"),
        ("config.json", "audio_config", {"num_hidden_layers": 128, "hidden_size": 8192}, InvalidInput, "has shape"),
        ("config.json", "audio_config", {"num_mel_bins": 24}, InvalidInput, "another tower"),
        ("config.json", "audio_config", {"subsampling_factor": 3}, InvalidInput, "power of 2"),
        ("processor_config.json", "feature_extractor", {"sampling_rate": 8000}, Unsupported, "sampling_rate is 8000"),
        ("processor_config.json", "feature_extractor", {"feature_size": 1 << 40}, InvalidInput, "feature_size"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, part: str, values: dict[str, Any], error: type[Exception], problem: str
) -> None:
    write_model(tmp_path)
    changed(tmp_path, name, part, values)
    with pytest.raises(error, match=problem):
        TowerFolder.read(tmp_path, AUDIO).open()


@pytest.mark.parametrize("form", ["encoder", "ctc", "model with a tower"])
def test_encoders_are_taken_from_folders_of_parakeet(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "parakeet"
    config = {"model_type": "parakeet_encoder", **SHAPE.encoder(), "dropout": 0.1}
    if form == "model with a tower":
        encoder = write_model(folder).model.tower.encoder
    else:
        encoder = audio_model().model.tower.encoder
        folder.mkdir()
        prefix = "encoder." if form == "ctc" else ""
        save_file(
            {prefix + name: tensor for name, tensor in encoder.state_dict().items()}, folder / "model.safetensors"
        )
        whole = {"model_type": "parakeet_ctc", "encoder_config": config} if form == "ctc" else config
        (folder / "config.json").write_text(json.dumps(whole))
    assert encoder_shape(folder, SHAPE, AUDIO) == SHAPE
    tower = SHAPE.tower(64, 9)
    load_encoder(tower, folder, AUDIO)
    for name, tensor in tower.encoder.state_dict().items():
        torch.testing.assert_close(tensor, encoder.state_dict()[name], atol=0, rtol=0)


ANSWER = {"role": "assistant", "content": "A"}


def test_all_forms_of_data_are_read(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", tone(440))
    write_sound(tmp_path / "b.flac", tone(440))
    question = [{"type": "audio", "audio": "b.flac"}, {"type": "text", "text": "What?"}]
    lines = [
        {"audios": ["a.wav"], "messages": [{"role": "user", "content": "<audio>What?"}, ANSWER]},
        {"messages": [{"role": "user", "content": question}, ANSWER]},
        {"audio": "a.wav", "question": "What?", "answer": "A"},
        {"file_name": "a.wav", "transcription": "A"},
        {"audio_filepath": "a.wav", "duration": 0.5, "text": "A"},
        {"audios": ["a.wav", "b.flac"], "messages": [{"role": "user", "content": "Both?"}, ANSWER]},
    ]
    write_lines(tmp_path / "metadata.jsonl", lines)
    read = read_media_lines(tmp_path, ChatTokenizer(audio_model().tokenizer, "model"), AUDIO)
    texts = [line.conversation.messages[0].content for line in read]
    assert texts == ["<audio>What?"] * 3 + ["<audio>"] * 2 + ["<audio><audio>Both?"]
    assert read[5].expanded(SOUNDS).messages[0].text == "<audio>" * 14 + "Both?"
    path = write_lines(tmp_path / "data.jsonl", [{"audio": "../secret.wav", "question": "What?", "answer": "A"}])
    with pytest.raises(InvalidInput, match="not in the folder"):
        read_media_lines(path, ChatTokenizer(audio_model().tokenizer, "model"), AUDIO)


QUICK = {"epochs": 4, "batch": 4, "lr": 0.01, "held_out": 0, "warmup": 0}


def train(folder: Path, stage: str, start: str, output: str) -> TowerRecord:
    texts = [folder / "texts.jsonl"] if stage != "connector" else []
    settings = AudioSettings.model_validate(QUICK | {"stage": stage})
    data = Data([folder / "pitches" / "data.jsonl"], texts)
    return train_tower(str(folder / start), data, settings, folder / output, lambda line: None)


def parts(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a folder, those of each part as one."""
    tensors = load_file(folder / "model.safetensors")
    prefixes = {"encoder": "model.audio_tower.", "connector": "model.multi_modal_projector.", "backbone": "model.lang"}
    return {
        part: torch.cat([tensor.flatten() for name, tensor in sorted(tensors.items()) if name.startswith(prefix)])
        for part, prefix in prefixes.items()
    }


def test_stages_train_their_parts(tmp_path: Path, home: Path) -> None:
    write_model(tmp_path / "model")
    write_pitches(tmp_path / "pitches")
    texts = [
        {"messages": [{"role": "user", "content": f"{n} plus 1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(4)
    ]
    write_lines(tmp_path / "texts.jsonl", texts)
    train(tmp_path, "connector", "model", "one")
    before, after = parts(tmp_path / "model"), parts(tmp_path / "one")
    assert [torch.equal(before[part], after[part]) for part in before] == [True, False, True]
    record = train(tmp_path, "mid", "one", "two")
    assert record.curve[-1][1] < record.curve[0][1] and record.texts == 4 and record.examples == 12
    after = parts(tmp_path / "two")
    assert not any(torch.equal(before[part], after[part]) for part in before)


def test_the_commands_train_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"))
    write_pitches(Path("pitches"), 3)
    Path("stage.yaml").write_text("stage: connector\nbatch: 3\nheld_out: 0\n")
    command = ("family", "audio", "model", "--data", "pitches/data.jsonl", "-o", "out", "--config", "stage.yaml")
    trained = nas(*command)
    assert trained.code == 0, trained.err
    assert "3 about sounds" in trained.out and "nas chat out --audio" in trained.err
    assert json.loads(Path("out/audio.json").read_text())["settings"]["lr"] == 1e-3
    chat = ("chat", "out", "--tokens", "2", "--temperature", "0")
    answers = nas(*chat, "--audio", "pitches/0.flac", stdin="Pitch?\nAnd now?\n")
    assert answers.code == 0, answers.err
    assert "0.3 s of sound; real-time factors: reading and encoding" in answers.err
    assert nas(*chat, stdin="hello\n").code == 0
    assert "no file none.wav" in nas(*chat, "--audio", "none.wav", stdin="a\n").err
    assert "no model of sounds and text" in nas("chat", "pitches", "--audio", "pitches/0.flac", stdin="a\n").err
    both = nas(*chat, "--audio", "pitches/0.flac", "--image", "a.png", stdin="a\n")
    assert both.code and "images and sound" in both.err


@pytest.mark.parametrize(
    "values", [{"num_attention_heads": 3}, {"conv_kernel_size": 4}, {"subsampling_factor": 6}, {"num_mel_bins": 12}]
)
def test_shapes_that_do_not_fit_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads|odd|power"):
        AudioShape(**values)
