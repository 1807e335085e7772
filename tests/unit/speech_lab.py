"""Small models that speak."""

from __future__ import annotations

from pathlib import Path

from audio_lab import SHAPE, tone, write_sound
from retrieval_lab import write_lines
from transformers import MimiConfig, MimiModel

from nas.core.layout import Layout
from nas.train.towers.codec import CodecShape
from nas.train.towers.codec_training import CodecSettings
from nas.train.towers.detokenizer import DetokenizerShape
from nas.train.towers.model import TowerModel
from nas.train.towers.speech import SpeechHead, SpeechShape, SpeechTokens

DETOKENIZER = DetokenizerShape(codebooks=3, entries=16, line="d32 ffn=swiglu:48 [C3 W2/1@4]")
CODEC = CodecShape(
    codebooks=3, entries=16, line="d32 ffn=swiglu:48 [C3 W2/1@4]", encoder="d32 ffn=swiglu:48 [C3]", bands=16
)
SPEECH = SpeechShape(codebooks=3, entries=16, rq="d32 ffn=swiglu:32 [A2/1*2]")
TOKENS = SpeechTokens(13, 14, 15)


def speaking_model() -> TowerModel:
    """A random model of few tokens that speaks."""
    layout = Layout.parse("d64 v32 ffn=swiglu:96 [C3 A4/2*2]")
    head = SpeechHead(SPEECH, layout.d_model, TOKENS)
    model = TowerModel(layout, SHAPE.tower(layout.d_model), 12, 1, head)
    head.draw(5, model.backbone.embed.weight)
    return model.eval().requires_grad_(False)


def codec_settings(epochs: float = 2, **more: object) -> CodecSettings:
    """Settings of a quick training."""
    small = {"batch": 2, "frames": 3, "channels": 2, "periods": (2,), "windows": (256,), "warmup": 0, "shape": CODEC}
    return CodecSettings.model_validate({"epochs": epochs, "lr": 3e-3, "held_out": 0, **small, **more})


def write_sounds(folder: Path, count: int = 3) -> Path:
    """A folder of tones."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        write_sound(folder / f"{number}.wav", tone(300 * (number + 1), 0.4 + number / 10), 16_000)
    return folder


def write_mimi(folder: Path, **more: object) -> MimiModel:
    """A random, small Mimi with its folder."""
    small = {
        "num_filters": 2, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8, "num_quantizers": 9, "codebook_size": 16, "upsample_groups": 16,
    }  # fmt: skip
    model = MimiModel(MimiConfig(**{**small, **more})).eval()
    model.save_pretrained(folder)
    return model


def write_answers(folder: Path, count: int = 6, **more: object) -> Path:
    """Questions after the pitch of a tone, with answers in text and sound."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, object]] = []
    for number in range(count):
        question = write_sound(folder / f"{number}.wav", tone(300, 0.3 + number / 20)).name
        speech = write_sound(folder / f"{number}-answer.wav", tone(900, 0.3 + number / 20)).name
        lines.append({"audio": question, "question": "Pitch?", "answer": "low", "speech": speech, **more})
    return write_lines(folder / "data.jsonl", lines)
