"""Speech: the detokenizer, the head that speaks, both modes of generation, codes, training, folders and chat."""

from __future__ import annotations

import pytest
import torch
from audio_lab import tone
from speech_lab import DETOKENIZER

from nas.train.towers.detokenizer import Detokenizer, DetokenizerShape, InverseStft, SpeechState


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
    with pytest.raises(ValueError, match="line|upsampling"):
        DetokenizerShape.model_validate(values)
