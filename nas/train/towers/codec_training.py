"""Training of a codec, or of a detokenizer for codes of Mimi (LFM2 report, section 6.1.3 and "Detokenizer training").

The loss is the L1 distance of log-mel features, hinge losses of discriminators over periods (Kong et al. 2020) and over
windows (Jang et al. 2021), and the distance of their features; the report has these, but not their weights. Codec and
discriminators step together, over the one `fit`, with discriminators held fixed in the codec's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.train.posttrain.conversations import MOST_PROBLEMS, raise_problems
from nas.train.posttrain.sft import TrainingSettings
from nas.train.posttrain.trained_folder import FolderRecord, FolderTraining, split
from nas.train.release.shards import shard_files
from nas.train.towers.codec import FRAME_SAMPLES, Codec, CodecShape, LogMel, write_codec
from nas.train.towers.detokenizer import SPEECH_RATE
from nas.train.towers.modality import MediaFile
from nas.train.towers.sounds import RATE, Part, SoundSettings, read_samples

CODEC_VERSION = 2
"""Part of keys: increase it with every change after which the same training gives other numbers."""
RECORD = "codec.json"
_SUFFIXES = (".wav", ".flac")
_MOST_SCORED = 64
_Period = Annotated[int, Field(ge=2, le=256)]
_Window = Annotated[int, Field(ge=16, le=2 * FRAME_SAMPLES, description="shorter than the shortest clip")]


class CodecSettings(TrainingSettings):
    """Settings of a codec's training; batch and length of clips are the report's, with its 1,000,000 steps."""

    epochs: float = Field(100, gt=0, description="of all sound")
    batch: int = Field(16, ge=1, description="clips per step")
    lr: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    frames: int = Field(30, ge=2, le=1000, description="of a clip: 2.4 s")
    mel: float = Field(45.0, ge=0, description="weight of the distance of log-mel features")
    adversarial: float = Field(1.0, ge=0, description="weight of the discriminators' verdict; 0: there are none")
    features: float = Field(2.0, ge=0, description="weight of the distance of the discriminators' features")
    channels: int = Field(16, ge=1, le=256, description="of the discriminators' first layers")
    periods: tuple[_Period, ...] = Field((2, 3, 5, 7, 11), max_length=16)
    windows: tuple[_Window, ...] = Field((512, 1024, 2048), max_length=16, description="samples")
    shape: CodecShape = CodecShape()


class CodecRecord(FolderRecord):
    """Record of a codec.

    Args:
        settings: of the training.
        hours: of sound that was trained on.
    """

    settings: dict[str, Any]
    hours: float


class Discriminator(nn.Module):
    """Judges parts of a sound, whose samples are folded by a period, or whose windows are magnitudes.

    Args:
        channels: of the first layer.
        period: samples of a row; 0: it sees windows.
        window: samples of a window.
    """

    def __init__(self, channels: int, period: int = 0, window: int = 0) -> None:
        super().__init__()
        self._period, self._window = period, window
        kernel, stride = ((5, 1), (3, 1)) if period else ((3, 9), (1, 2))
        widths = (1, channels, 2 * channels, 4 * channels, 4 * channels)
        padding = (kernel[0] // 2, kernel[1] // 2)
        layers = pairwise(widths)
        self.layers = nn.ModuleList(nn.Conv2d(inner, outer, kernel, stride, padding) for inner, outer in layers)
        self.verdict = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def forward(self, samples: Tensor) -> list[Tensor]:
        """Returns the features of each layer for samples [B, T], and the verdict as the last."""
        if self._period:
            x = torch.unflatten(F.pad(samples, (0, -samples.shape[1] % self._period)), 1, (-1, self._period))
        else:
            window = torch.hann_window(self._window, device=samples.device)
            hop = self._window // 4
            x = torch.stft(samples, self._window, hop, window=window, return_complex=True).abs().mT
        x, features = x[:, None], []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return [*features, self.verdict(x)]


class CodecTrainer(nn.Module):
    """A codec with its discriminators and losses."""

    def __init__(self, codec: Codec, settings: CodecSettings) -> None:
        super().__init__()
        self.codec, self._settings, self.mel = codec, settings, LogMel(settings.shape)
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.seed)
            judges = [Discriminator(settings.channels, period=period) for period in settings.periods]
            judges += [Discriminator(settings.channels, window=window) for window in settings.windows]
        self.judges = nn.ModuleList(judges if settings.adversarial else [])

    def spoken(self, clips: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns clips as they come back from their codes, and the quantiser's loss; of Mimi, codes are given."""
        if self.codec.shape.source == "mimi":
            return self.codec.detokenizer(codes), clips.new_zeros(())
        quantised = self.codec.quantised(clips)
        return self.codec.detokenizer(quantised.embeddings), quantised.loss

    def loss(self, clips: Tensor, codes: Tensor) -> Tensor:
        """Returns the loss of codec and discriminators for clips [B, T]."""
        settings = self._settings
        spoken, loss = self.spoken(clips, codes)
        loss = loss + settings.mel * F.l1_loss(self.mel(spoken), self.mel(clips))
        for judge in self.judges:
            real, faked = judge(clips), judge(spoken.detach())
            loss = loss + F.relu(1 - real[-1]).mean() + F.relu(1 + faked[-1]).mean()
            fixed = {name: parameter.detach() for name, parameter in judge.named_parameters()}
            outputs = functional_call(judge, fixed, (spoken,))
            loss = loss + settings.adversarial * F.relu(1 - outputs[-1]).mean()
            distances = [
                F.l1_loss(feature, target.detach()) for feature, target in zip(outputs[:-1], real[:-1], strict=True)
            ]
            loss = loss + settings.features * torch.stack(distances).mean()
        return loss


def train_codec(
    sounds: Sequence[Path],
    settings: CodecSettings,
    output: Path,
    log: Log,
    mimi: Path | None = None,
    checkpoint_s: float = 60.0,
) -> CodecRecord:
    """Trains a codec and writes its folder.

    Args:
        sounds: WAV and FLAC files, and folders of them.
        settings: of the training.
        output: folder of the result.
        log: takes one line at a time.
        mimi: folder of Mimi, whose codes the detokenizer reads; None: an encoder of our own is trained with it.
        checkpoint_s: least seconds between checkpoints.

    Raises:
        InvalidInput: a file cannot be used, or the folder holds something else.
        CandidateFailed: the loss is not finite.
    """
    source = "own" if mimi is None else "mimi"
    settings = settings.model_copy(update={"shape": settings.shape.model_copy(update={"source": source})})
    return _CodecTraining(_files(sounds), settings, output, mimi, checkpoint_s).run(log)


class _CodecTraining(FolderTraining[CodecSettings, CodecRecord]):
    record = CodecRecord
    file = RECORD
    phase = "codec"

    def __init__(
        self, files: Sequence[MediaFile], settings: CodecSettings, output: Path, mimi: Path | None, checkpoint_s: float
    ) -> None:
        self._files, self._held_out = split(files, settings.held_out, lambda file: file.sha256)
        if not self._files:
            raise InvalidInput("all files are held out", where="held_out")
        weights = [] if mimi is None else [sha256_of(file) for file in shard_files(mimi)]
        hashes = [[file.sha256 for file in part] for part in (self._files, self._held_out)]
        inputs = [CODEC_VERSION, hashes, weights, settings.model_dump(mode="json")]
        super().__init__(output, settings, inputs, checkpoint_s)
        self._mimi, self._source = mimi, f"codes of Mimi, SHA-256 {weights[0][:12]}" if weights else "sound"
        self._length = settings.frames * FRAME_SAMPLES
        self._sizes = np.asarray([file.size[0] for file in self._files], np.float64)
        self._seconds = float(self._sizes.sum()) / RATE
        self.steps = max(1, round(settings.epochs * self._seconds / (self._length / SPEECH_RATE) / settings.batch))
        self.tokens = settings.batch * settings.frames

    def start(self, folder: Path) -> CodecTrainer:
        self.worker.log(
            f"{len(self._files):,} files with {self._seconds / 3600:.2f} h of sound, {len(self._held_out):,} held out"
        )
        self._codec = Codec(self.settings.shape, self.settings.seed, self._mimi)
        return CodecTrainer(self._codec, self.settings)

    def precision(self) -> AbstractContextManager[object]:
        return nullcontext()

    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """Returns clips [B, T] and, for Mimi, their codes; they depend on the step alone."""
        rng = np.random.default_rng([self.settings.seed, step])
        chosen = rng.choice(len(self._files), self.settings.batch, p=self._sizes / self._sizes.sum())
        return [self._pass(torch.stack([self._clip(self._files[place], rng.random()) for place in chosen]))]

    def loss(self, model: CodecTrainer, *tensors: Tensor) -> Tensor:
        clips, codes = tensors
        return model.loss(clips, codes)

    @torch.no_grad()
    def scores(self, model: CodecTrainer) -> dict[str, float]:
        """Returns the mean distance of log-mel features of the first clips of held-out files."""
        distances = []
        for file in self._held_out[:_MOST_SCORED]:
            samples, codes = (tensor.to(self.worker.device) for tensor in self._pass(self._clip(file, 0.0)[None]))
            spoken, _ = model.spoken(samples, codes)
            distances.append(float(F.l1_loss(model.mel(spoken), model.mel(samples))))
        return {"log-mel distance": float(np.mean(distances))} if distances else {}

    def write(self, model: CodecTrainer) -> dict[str, Any]:
        model.codec.settle()
        write_codec(self.output, model.codec)
        return {
            "source": self._source,
            "layout": model.codec.detokenizer.layers.layout.format(),
            "settings": self.settings.model_dump(mode="json"),
            "examples": len(self._files),
            "hours": self._seconds / 3600,
        }

    def _pass(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Returns clips [B, T] and, for Mimi, their codes."""
        return clips, torch.zeros(0, dtype=torch.int64) if self._mimi is None else self._codec.codes(clips)

    def _clip(self, file: MediaFile, share: float) -> Tensor:
        """Returns a clip [T] that begins at a share of what a file has more; a short one is padded with silence."""
        seconds = self._length / SPEECH_RATE
        part = Part(share * max(0.0, file.size[0] / RATE - seconds), seconds)
        clip = torch.from_numpy(read_samples(file.path, file.place, SPEECH_RATE, part))
        return F.pad(clip, (0, self._length - len(clip)))


def _files(sounds: Sequence[Path]) -> list[MediaFile]:
    """Reads all files once, in the order of their names.

    Raises:
        InvalidInput: one line for each of the first that cannot be used, or there is none.
    """
    paths: list[Path] = []
    for path in sounds:
        inside = (file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES)
        paths += sorted(inside) if path.is_dir() else [path]
    files, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            files.append(SoundSettings.read(path))
        except InvalidInput as error:
            problems.append(str(error))
            if len(problems) == MOST_PROBLEMS:
                break
    raise_problems(problems)
    if not files:
        raise InvalidInput("no WAV or FLAC files there", where="SOUNDS")
    return files
