"""Speech: the detokenizer, the head that speaks, both modes of generation, codes, training, folders and chat."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from audio_lab import audio_model, tone, write_model
from cli_runner import nas
from exhaustive import mostly_exhaustive
from safetensors.torch import load_file
from speech_lab import (
    CODEC,
    DETOKENIZER,
    SPEECH,
    TOKENS,
    codec_settings,
    speaking_model,
    write_answers,
    write_mimi,
    write_sounds,
)

from nas.core.errors import InvalidInput, Unsupported
from nas.train.adapt.checkpoints import read_model
from nas.train.posttrain.conversations import ChatTokenizer, Message
from nas.train.posttrain.merging import MergeSettings
from nas.train.towers.audio import AUDIO, AudioSettings
from nas.train.towers.chat import SpeechTalker
from nas.train.towers.codec import Codec, read_codec, write_codec
from nas.train.towers.codec_training import CodecTrainer, train_codec
from nas.train.towers.data import read_media_lines
from nas.train.towers.detokenizer import Detokenizer, DetokenizerShape, InverseStft, SpeechState
from nas.train.towers.merging import merge_runs
from nas.train.towers.model import TowerModel
from nas.train.towers.release import TowerFolder, tower_tokenizer, with_head, write_multimodal_model
from nas.train.towers.speech import Mode, SpeechHead, SpeechShape, woven
from nas.train.towers.training import Data, TowerRecord, train_tower
from nas.train.towers.vision import VisionSettings


@pytest.mark.parametrize(("fft", "hop"), [(1280, 320), (512, 128), (640, 320)])
def test_the_inverse_of_torch_stft_is_the_sound(fft: int, hop: int) -> None:
    inverse, rest = InverseStft(fft, hop), (fft - hop) // 2
    samples = torch.from_numpy(tone(440, 1, 24_000))[: 70 * hop][None]
    padded = torch.nn.functional.pad(samples, (rest, rest))
    window = torch.hann_window(fft)
    spectrum = torch.stft(padded, fft, hop, window=window, center=False, return_complex=True).mT
    assert spectrum.shape[1] == samples.shape[1] // hop
    torch.testing.assert_close(inverse(spectrum), samples, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3], [7]])
def test_chunks_of_frames_give_the_same_sound_as_all_together(chunks: list[int]) -> None:
    detokenizer = Detokenizer(DETOKENIZER, 1).eval()
    codes = torch.randint(0, DETOKENIZER.entries, (2, 7, DETOKENIZER.codebooks))
    with torch.no_grad():
        whole = detokenizer(codes)
        state, parts = SpeechState(None, None), []
        for chunk in codes.split(chunks, 1):
            samples, state = detokenizer.step(chunk, state)
            parts.append(samples)
        parts.append(detokenizer.last(state))
    assert whole.shape == (2, 7 * 1920) and whole.std() > 0
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)
    assert parts[0].shape[1] == chunks[0] * 1920 - 24 * 20  # the windows reach 20 ms past the last sample


def test_later_frames_do_not_change_earlier_sound() -> None:
    detokenizer = Detokenizer(DETOKENIZER, 1).eval()
    codes = torch.randint(0, DETOKENIZER.entries, (1, 6, DETOKENIZER.codebooks))
    changed = codes.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % DETOKENIZER.entries
    with torch.no_grad():
        difference = (detokenizer(codes) - detokenizer(changed))[0].abs()
    assert difference[: 4 * 1920 - 480].max() == 0 and difference[4 * 1920 :].max() > 0


def test_the_default_has_the_layers_and_weights_of_the_report() -> None:
    with torch.device("meta"):
        detokenizer = Detokenizer(DetokenizerShape(), None)
    layers = detokenizer.layers.layout
    kinds = [block.kind for layer in layers.layers for block in layer.mixers]
    assert (layers.d_model, kinds.count("conv"), kinds.count("swa")) == (512, 5, 3)
    assert 34e6 < sum(parameter.numel() for parameter in detokenizer.parameters()) < 36e6


@pytest.mark.parametrize("values", [{"line": "d32 [X]"}, {"upsampling": 7}, {"fft": 320}, {"line": "d32 v9 [C3]"}])
def test_shapes_that_do_not_fit_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"line|upsampling"):
        DetokenizerShape.model_validate(values)


def test_the_default_head_has_the_weights_of_the_report() -> None:
    with torch.device("meta"):
        head = SpeechHead(SpeechShape(), 2048, TOKENS)
    weights = sum(parameter.numel() for name, parameter in head.named_parameters() if not name.startswith("embed"))
    assert 113e6 < weights < 118e6 and len(head.embed.weight) == 8 * 2049


def test_losses_of_codes_fall_from_100_to_1() -> None:
    head, features = speaking_model().head, torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert head is not None
    codes = torch.randint(0, 17, (5, 3), generator=torch.Generator().manual_seed(2))
    nats = -head.logits(features, codes).log_softmax(-1).gather(-1, codes[..., None])[..., 0]
    expected = (100 * nats[:, 0] + 10 * nats[:, 1] + nats[:, 2]) / 111
    torch.testing.assert_close(head.nats(features, codes), expected)
    with torch.autocast("cpu", torch.bfloat16):  # whose matrix products round
        logits, nats = head.logits(features, codes).float(), head.nats(features, codes)
    nats_of_codes = -logits.log_softmax(-1).gather(-1, codes[..., None])[..., 0]
    torch.testing.assert_close(nats, (nats_of_codes * torch.tensor([100, 10, 1])).sum(1) / 111)


def test_a_code_depends_on_those_before_it_alone() -> None:
    head, features = speaking_model().head, torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    assert head is not None
    logits = head.logits(features, torch.tensor([[1, 2, 3], [1, 2, 3]]))
    changed = head.logits(features, torch.tensor([[1, 9, 3], [1, 2, 9]]))
    same = (logits == changed).all(-1).tolist()
    assert same == [[True, True, False], [True, True, True]]


START, TEXT_END, FRAME = TOKENS


@pytest.mark.parametrize(
    ("mode", "text", "frames", "expected"),
    [
        ("interleaved", 3, 4, [20, 21, 22, TEXT_END, *[FRAME] * 4]),
        ("interleaved", 8, 40, [*range(20, 26), *[FRAME] * 12, 26, 27, TEXT_END, *[FRAME] * 28]),
        ("interleaved", 5, 30, [*range(20, 25), TEXT_END, *[FRAME] * 30]),
        ("interleaved", 6, 13, [*range(20, 26), *[FRAME] * 12, TEXT_END, FRAME]),
        (
            "interleaved",
            20,
            14,
            [*range(20, 26), *[FRAME] * 12, *range(26, 32), FRAME, FRAME, *range(32, 40), TEXT_END],
        ),
        ("interleaved", 0, 2, [TEXT_END, FRAME, FRAME]),
        ("sequential", 9, 30, [*range(20, 29), START, *[FRAME] * 30]),
        ("sequential", 0, 1, [START, FRAME]),
    ],
)
def test_answers_are_woven_as_they_are_generated(mode: Mode, text: int, frames: int, expected: list[int]) -> None:
    assert woven(mode, TOKENS, range(20, 20 + text), frames) == expected


def slow_answer(model: TowerModel, question: list[int], most: int, mode: Mode, temperature: float) -> list[object]:
    """The same answer by loops over the report's rules, each step computed from the start of the sequence."""
    head, rng = model.head, np.random.default_rng(0)
    assert head is not None
    sequence = [model.backbone.embed(torch.tensor(token)) for token in question]
    answer: list[object] = []

    def draw(logits: torch.Tensor) -> int:
        values = logits.double().numpy()
        return int(np.argmax(values / temperature + rng.gumbel(size=len(values)) if temperature else values))

    def features() -> torch.Tensor:
        return model.backbone.features(torch.stack(sequence)[None])[0, -1]

    def text() -> int:
        token = draw(model.backbone.logits(features()))
        answer.append(token)
        sequence.append(model.backbone.embed(torch.tensor(token)))
        return token

    def sound() -> bool:
        codes = [0, 0, 0]
        for book in range(3):
            logits = head.logits(features()[None], torch.tensor([codes]))[0, book]
            codes[book] = draw(logits if book == 0 else logits[:-1])
            if codes[0] == 16:
                codes = [16, 16, 16]
                break
        answer.append(codes)
        tables = head.embed.weight.view(3, 17, -1)
        sequence.append(tables[0, codes[0]] + tables[1, codes[1]] + tables[2, codes[2]])
        return codes[0] == 16

    text_over = sound_over = False
    while len(answer) < most:
        if mode == "sequential":
            if text() == START:
                while len(answer) < most and not sound():
                    pass
            continue
        for _ in range(6):
            if len(answer) < most and not text_over:
                text_over = text() == TEXT_END
        while sound_over and len(answer) < most:
            text()
        for _ in range(most if text_over else 12):
            if len(answer) < most and not sound_over:
                sound_over = sound()
        while text_over and sound_over and len(answer) < most:
            text()
    return answer


@pytest.mark.parametrize("mode", ["interleaved", "sequential"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 20.0])
def test_generation_equals_a_reference_that_computes_all_again(mode: Mode, temperature: float) -> None:
    model, question, most = speaking_model(), [5, 30, 9], 90
    answer = list(model.spoken(torch.tensor([question]), most, (), mode, temperature=temperature, seed=0))
    plain = [part.tolist() if isinstance(part, torch.Tensor) else part for part in answer]
    assert plain == slow_answer(model, question, most, mode, temperature)
    if temperature == 20:  # nearly all tokens and codes are as likely
        assert len(plain) == most and [16, 16, 16] in plain and (START if mode == "sequential" else TEXT_END) in plain


def test_answers_are_over_behind_a_token_that_ends_them() -> None:
    model = speaking_model()
    answer = list(model.spoken(torch.tensor([[5, 30, 9]]), 200, range(12, 32), "interleaved", temperature=20, seed=1))
    tokens = [part for part in answer if isinstance(part, int)]
    assert tokens[-1] >= 12 and max([0, *tokens[:-1]]) < 12 and isinstance(answer[-1], int)


def test_codes_of_mimi_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    mimi = write_mimi(tmp_path)
    codec = Codec(CODEC.model_copy(update={"source": "mimi", "codebooks": 8}), 0, tmp_path)
    for count in (1920, 24_000, 24_001):
        samples = torch.from_numpy(tone(440, 2, 24_000))[None, :count]
        codes = codec.codes(samples)
        padded = torch.nn.functional.pad(samples, (0, -count % 1920))
        assert codes.shape == (1, -(-count // 1920), 8)  # 12.5 frames a second
        assert torch.equal(codes.mT, mimi.encode(padded[:, None]).audio_codes[:, :8])
        assert codec.detokenizer(codes).shape == padded.shape == mimi.decode(codes.mT).audio_values[:, 0].shape
    with pytest.raises(InvalidInput, match="name a folder"):
        Codec(codec.shape).codes(samples)


@pytest.mark.parametrize(
    ("values", "problem"),
    [({"codebook_size": 8}, "8 entries"), ({"num_quantizers": 2}, "2 codebooks"), ({"sampling_rate": 8000}, "8000 Hz")],
)
def test_another_mimi_is_refused(tmp_path: Path, values: dict[str, int], problem: str) -> None:
    write_mimi(tmp_path, **values)
    with pytest.raises(Unsupported, match=problem):
        Codec(CODEC.model_copy(update={"source": "mimi"}), 0, tmp_path)


def test_an_own_codec_speaks_its_codes_as_its_embeddings(tmp_path: Path) -> None:
    codec, samples = Codec(CODEC, 3).eval(), torch.from_numpy(tone(440, 1, 24_000))[None, :9000]
    codec.settle()
    codes = codec.codes(samples)
    assert codes.shape == (1, 5, 3) and len(codes.unique()) > 1
    padded = torch.nn.functional.pad(samples, (0, 600))
    with torch.no_grad():
        expected = codec.detokenizer(codec.quantised(padded).embeddings)
        torch.testing.assert_close(codec.detokenizer(codes), expected, atol=1e-4, rtol=0)
    write_codec(tmp_path / "codec", codec)
    read = read_codec(tmp_path / "codec")
    assert read.shape == CODEC and torch.equal(read.codes(samples), codes)
    (tmp_path / "codec" / "config.json").write_text('{"model_type": "mimi"}')
    with pytest.raises(InvalidInput, match="no codec"):
        read_codec(tmp_path / "codec")


def test_discriminators_learn_from_their_loss_and_the_codec_from_its_own() -> None:
    settings = codec_settings(mel=0.0, features=0.0)
    trainer = CodecTrainer(Codec(settings.shape, 1), settings)
    clips = torch.from_numpy(tone(440, 1, 24_000))[None, : 3 * 1920]
    trainer.loss(clips, torch.zeros(0, dtype=torch.int64)).backward()
    judge, clone = trainer.judges[0], trainer.judges[0].verdict.weight.grad.clone()
    judge.zero_grad()
    spoken = trainer.spoken(clips, clips)[0].detach()
    (torch.relu(1 - judge(clips)[-1]).mean() + torch.relu(1 + judge(spoken)[-1]).mean()).backward()
    torch.testing.assert_close(judge.verdict.weight.grad, clone)
    assert trainer.codec.detokenizer.output.weight.grad.abs().max() > 0


@pytest.mark.parametrize("values", [{"windows": [0]}, {"windows": [100_000]}, {"periods": [0]}, {"periods": [1]}])
def test_discriminators_that_fit_no_clip_are_refused(values: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        codec_settings(**values)


def test_sounds_are_no_lines_that_could_be_skipped() -> None:
    with pytest.raises(ValueError, match="bad_lines"):
        codec_settings(bad_lines="skip")


@pytest.mark.parametrize("source", ["own", "mimi"])
def test_codecs_are_trained(tmp_path: Path, home: Path, source: str) -> None:
    sounds, mimi = write_sounds(tmp_path / "sounds"), None
    if source == "mimi":
        torch.manual_seed(1)
        write_mimi(mimi := tmp_path / "mimi")
    lines: list[str] = []
    settings = codec_settings(epochs=12)
    record = train_codec([sounds], settings, tmp_path / "codec", lambda line: lines.append(str(line)), mimi)
    assert record.curve[-1][1] < record.curve[0][1] and record.examples == 3 and record.steps > 5
    codec = read_codec(tmp_path / "codec", mimi)
    assert codec.shape.source == source
    samples = torch.from_numpy(tone(300, 0.4, 24_000))[None]
    assert codec.detokenizer(codec.codes(samples)).isfinite().all()
    again = train_codec([sounds], settings, tmp_path / "codec", lambda line: lines.append(str(line)), mimi)
    assert again == record and "already" in lines[-1]


def test_sounds_of_a_codec_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (write_sounds(tmp_path / "sounds") / "bad.wav").write_bytes(b"RIFF no sound")
    for path, problem in ((tmp_path / "sounds", "bad.wav is no WAV"), (tmp_path, "bad"), (tmp_path / "a", "no file a")):
        with pytest.raises(InvalidInput, match=problem):
            train_codec([path], codec_settings(), tmp_path / "codec", lambda line: None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="no WAV or FLAC files"):
        train_codec([tmp_path / "empty"], codec_settings(), tmp_path / "codec", lambda line: None)


def write_codec_folder(folder: Path, **more: Any) -> Path:
    """A random codec's folder."""
    codec = Codec(CODEC.model_copy(update=more), 3)
    codec.settle()
    write_codec(folder, codec)
    return folder


def train(folder: Path, start: str, output: str, codec: Path | None = None, **more: Any) -> TowerRecord:
    settings = AudioSettings.model_validate(
        {"stage": "mid", "epochs": 12, "batch": 3, "lr": 0.01, "held_out": 0, "warmup": 0, "text": 0, **more}
    )
    data = Data([folder / "answers" / "data.jsonl"], (), [folder / "answers" / "data.jsonl"])
    return train_tower(str(folder / start), data, settings, folder / output, lambda line: None, codec=codec)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random model that speaks."""
    folder = tmp_path_factory.mktemp("speaking")
    audio = audio_model()
    tokenizer = tower_tokenizer(audio.tokenizer, 4096, AUDIO, speech=True)
    with_head(audio.model, audio.model.backbone.layout, SPEECH, tokenizer, 1)
    write_multimodal_model(folder, replace(audio, tokenizer=tokenizer))
    write_codec_folder(folder / "codec")
    return folder


@pytest.mark.parametrize("mode", mostly_exhaustive(["interleaved", "sequential"], "interleaved"))
def test_a_model_learns_to_speak(tmp_path: Path, home: Path, mode: Mode) -> None:
    write_model(tmp_path / "model")
    write_answers(tmp_path / "answers", 3, mode=mode)
    codec = write_codec_folder(tmp_path / "codec")
    record = train(tmp_path, "model", "one", codec, speech=SPEECH, epochs=60)
    assert record.after["loss"] < 0.2 < record.before["loss"] and record.after["loss of codes"] < 0.5
    whole = TowerFolder.read(tmp_path / "one", AUDIO).open()
    assert whole.model.head is not None and whole.model.head.shape == SPEECH
    assert read_model(tmp_path / "one").layout.vocab == whole.model.backbone.layout.vocab
    talker = SpeechTalker(tmp_path / "one", AUDIO, [tmp_path / "answers" / "0.wav"], 4096, lambda line: None,
                          tmp_path / "said.wav", mode)  # fmt: skip
    tokenizer = ChatTokenizer(whole.tokenizer, "model")
    question = tokenizer.question([Message(role="user", content=talker.opening + "Pitch?")])
    answer = list(talker.answer(question, 60, tokenizer.ends))
    assert tokenizer.answer_of(answer) == "low" and answer[-1] in tokenizer.ends
    sound, rate = soundfile.read(tmp_path / "said.wav")
    assert rate == 24_000 and len(sound) in [1920 * frames for frames in (3, 4, 5, 6)]


def test_stages_train_the_head_of_the_folder_before(tmp_path: Path, home: Path) -> None:
    write_model(tmp_path / "model")
    write_answers(tmp_path / "answers", 3)
    with pytest.raises(InvalidInput, match=r"data.jsonl:1: has speech: name a codec"):
        train(tmp_path, "model", "none")
    codec = write_codec_folder(tmp_path / "codec")
    with pytest.raises(InvalidInput, match="the codec has 3 codebooks of 16 entries"):
        train(tmp_path, "model", "none", codec, speech=SpeechShape(codebooks=2, entries=16, rq=SPEECH.rq))
    train(tmp_path, "model", "one", codec, speech=SPEECH, epochs=1, stage="connector")
    train(tmp_path, "one", "two", epochs=1)
    heads = [
        {
            name: tensor
            for name, tensor in load_file(tmp_path / folder / "model.safetensors").items()
            if "speech" in name
        }
        for folder in ("one", "two")
    ]
    assert heads[0].keys() == heads[1].keys() and "model.speech_head.project.weight" in heads[0]
    assert not torch.equal(*(head["model.speech_head.project.weight"] for head in heads))
    assert (tmp_path / "two" / "codec" / "model.safetensors").is_file()
    other = write_codec_folder(tmp_path / "other", entries=32)
    with pytest.raises(InvalidInput, match="codes of another codec"):
        train(tmp_path, "two", "three", other)
    assert merge_runs([tmp_path / "two", tmp_path / "one"], None, MergeSettings(), tmp_path / "merged")
    SpeechTalker(tmp_path / "merged", AUDIO, [], 100, lambda line: None, tmp_path / "a.wav", "sequential")


def test_the_commands_train_and_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_sounds(Path("sounds"))
    write_model(Path("model"))
    write_answers(Path("answers"), 3)
    Path("codec.yaml").write_text(codec_settings(epochs=1).model_dump_json())
    trained = nas("family", "codec", "sounds", "-o", "codec", "--config", "codec.yaml")
    assert trained.code == 0, trained.err
    assert "3 files" in trained.out and "--codec codec" in trained.err
    Path("stage.yaml").write_text(
        f"stage: mid\ntext: 0\nheld_out: 0\nlr: 0.01\nepochs: 40\nbatch: 3\nspeech: {SPEECH.model_dump_json()}\n"
    )
    command = ("family", "audio", "model", "--data", "answers/data.jsonl", "-o", "out", "--config", "stage.yaml")
    spoken = nas(*command, "--codec", "codec")
    assert spoken.code == 0, spoken.err
    chat = ("chat", "out", "--tokens", "40", "--temperature", "0", "--speak", "said.wav")
    answers = nas(*chat, "--audio", "answers/0.wav", stdin="Pitch?\n")
    assert answers.code == 0, answers.err
    assert all(part in answers.err for part in ("encoder", "backbone", "RQ head", "detokenizer", "together"))
    assert soundfile.info("said.wav").samplerate == 24_000
    assert "does not speak" in nas("chat", "model", "--speak", "a.wav", stdin="a\n").err


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("codec/config.json", None, "no codec"),
        ("codec/config.json", '{"model_type": "hilnas_codec", "fft": 1e9}', "fft"),
        ("codec/config.json", '{"model_type": "hilnas_codec", "entries": 65536}', "has shape|lacks"),
        ("codec/config.json", '{"model_type": "hilnas_codec", "line": "d64"}', "line"),
        ("codec/config.json", "[", "JSON|json"),
        ("codec/model.safetensors", None, "safetensors"),
        ("codec/model.safetensors", "no tensors", "safetensors"),
        ("config.json", {"speech_config": {"rq": "d32 [C3", "codebooks": 3}}, "rq"),
        ("config.json", {"speech_config": {"codebooks": 32}}, "has shape|lacks"),
        ("config.json", {"speech_config": {"codebooks": 1 << 40}}, "codebooks"),
    ],
)
def test_damaged_folders_are_refused_in_a_line(
    tmp_path: Path, speaking: Path, name: str, content: str | dict[str, Any] | None, problem: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(speaking, folder)
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises((InvalidInput, Unsupported), match=problem) as raised:
        SpeechTalker(folder, AUDIO, [], 100, lambda line: None, tmp_path / "a.wav", "sequential")
    assert "\n" not in str(raised.value)


def test_files_of_speech_need_a_folder(tmp_path: Path, speaking: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no folder"):
        SpeechTalker(speaking, AUDIO, [], 100, lambda line: None, tmp_path / "a" / "a.wav", "sequential")


def test_speech_does_not_overwrite_what_it_answers(tmp_path: Path, speaking: Path) -> None:
    heard = tmp_path / "heard.wav"
    soundfile.write(heard, tone(440, 1, 24_000), 24_000)
    with pytest.raises(InvalidInput, match=r"--speak: .*heard\.wav is a file that this command reads"):
        SpeechTalker(speaking, AUDIO, [heard], 100, lambda line: None, heard, "sequential")


def test_data_of_models_that_do_not_speak_has_no_speech(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="do not speak"):
        VisionSettings.of_stage("mid").spoken(CODEC)
    write_answers(tmp_path, 1, mode="both")
    with pytest.raises(InvalidInput, match=r"data.jsonl:1: mode"):
        read_media_lines(tmp_path / "data.jsonl", ChatTokenizer(audio_model().tokenizer, "model"), AUDIO)
    for speech, problem in (("../b.wav", "not in the folder"), ("b.wav", "no file b.wav"), ("", "speech")):
        write_answers(tmp_path, 1, speech=speech)
        with pytest.raises(InvalidInput, match=problem):
            read_media_lines(tmp_path / "data.jsonl", ChatTokenizer(audio_model().tokenizer, "model"), AUDIO)
