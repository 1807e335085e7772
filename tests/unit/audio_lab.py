"""Small models of sound and text, and sounds for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from retrieval_lab import write_lines

from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.train.release.tokenizer import byte_tokenizer
from nas.train.towers.audio import AUDIO, AudioShape
from nas.train.towers.release import MultimodalModel, tower_tokenizer, with_tower, write_multimodal_model
from nas.train.towers.sounds import SoundSettings

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2*2]")
SHAPE = AudioShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, conv_kernel_size=9,
    subsampling_conv_channels=8, num_mel_bins=16, projector_hidden_size=40,
)  # fmt: skip
SOUNDS = SoundSettings(feature_size=16)
_PUBLISHED = {
    r"^encoder\.subsampling\.layers": "conformer.pre_encode.conv",
    r"^encoder\.subsampling\.linear": "conformer.pre_encode.out",
    r"^encoder": "conformer",
    r"self_attn\.([qkv])_proj": r"self_attn.linear_\1",
    r"self_attn\.o_proj": "self_attn.linear_out",
    r"self_attn\.relative_k_proj": "self_attn.linear_pos",
    r"self_attn\.bias_": "self_attn.pos_bias_",
    r"conv\.norm": "conv.batch_norm",
    r"^connector\.layer_norm": "audio_adapter.model.0",
    r"^connector\.linear_1": "audio_adapter.model.1",
    r"^connector\.linear_2": "audio_adapter.model.3",
}
"""Parts of our names, and what they are in LFM2-Audio, whose encoder is NeMo's."""
PITCHES = {"low": 200, "middle": 800, "high": 3000}


def tone(pitch: float, seconds: float = 0.5, rate: int = 16_000) -> NDArray[np.float32]:
    """A tone with a little noise, equal on every machine."""
    times = np.arange(round(seconds * rate))
    noise = 1e-3 * np.sin(times**2 * 0.37)
    return (0.3 * np.sin(2 * np.pi * pitch / rate * times) + noise).astype(np.float32)


def write_sound(path: Path, samples: NDArray[Any], rate: int = 16_000, **more: Any) -> Path:
    soundfile.write(path, samples, rate, **more)
    return path


def audio_model(layout: Layout = LAYOUT, shape: AudioShape = SHAPE) -> MultimodalModel:
    """A random model of byte tokens, with statistics in its BatchNorms."""
    tokenizer = tower_tokenizer(byte_tokenizer(layout.vocab), 4096, AUDIO)
    tower = shape.tower(layout.d_model, 2)
    generator = torch.Generator().manual_seed(4)
    for name, values in tower.encoder.state_dict().items():
        if "running" in name:
            values.copy_(0.5 + torch.rand(values.shape, generator=generator))
    model = with_tower(Model(layout, 1).state_dict(), layout, tokenizer, tower, AUDIO.marker, 3)
    settings = SoundSettings(**shape.processor())
    return MultimodalModel(AUDIO, model.eval().requires_grad_(False), shape, tokenizer, settings, 4096)


def write_model(folder: Path, **more: Any) -> MultimodalModel:
    """The same with its folder."""
    audio = audio_model(**more)
    write_multimodal_model(folder, audio)
    return audio


def published_name(name: str) -> str:
    """The name of a tower's tensor in files of LFM2-Audio."""
    for pattern, replacement in _PUBLISHED.items():
        name = re.sub(pattern, replacement, name)
    return name


def write_pitches(folder: Path, count: int = 12) -> Path:
    """Questions after the pitch of a tone, with answers."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        name, pitch = list(PITCHES.items())[number % 3]
        file = f"{number}.{'wav' if number % 2 else 'flac'}"
        write_sound(folder / file, tone(pitch * (1 + number / 100), 0.3 + number / 50))
        lines.append({"audio": file, "question": "Pitch?", "answer": name})
    return write_lines(folder / "data.jsonl", lines)
