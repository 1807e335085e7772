"""Speech of espeak-ng to train and test models that hear: forms of a closed vocabulary in two languages.

A form is a tuple of slots, each some words to choose from. A text belongs to a part, train, valid or test, by its own
hash; a voice, an accent of espeak-ng with a variant of its, is of one part, too, but test has both those of train and
new ones. Speed, pitch and loudness are drawn. Half of the clips have noise and reverberation; of test, each clip has a
clean and a noisy version. Everything is drawn from seeds. Sounds are WAV files of 16 kHz.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray
from scipy.signal import fftconvolve, resample_poly  # type: ignore[import-untyped]

from nas.core.durable import write_durably
from nas.train.towers.sounds import RATE

QUESTION = "What is said?"
PARTS = ("train", "valid", "test")
Voice = tuple[str, ...]
"""Voices of a language in a part, in the names of espeak-ng."""

_DEADLINE_S = 3600.0
_SILENCE = 1e-3
_MOST_SECONDS = 4.0
_RATES = (130, 200)
_PITCHES = (30, 70)
_DIGITS = "zero|one|two|three|four|five|six|seven|eight|nine"
_ZIFFERN = "null|eins|zwei|drei|vier|fünf|sechs|sieben|acht|neun"
_HUNDREDS = "|".join(["", *(f"{digit} hundred and" for digit in _DIGITS.split("|")[1:])])
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_MONATE = "januar|februar|märz|april|mai|juni|juli|august|september|oktober|november|dezember"

FORMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "en": {
        "digits": (_DIGITS, _DIGITS, _DIGITS, f"|{_DIGITS}", f"|{_DIGITS}"),
        "numbers": (
            _HUNDREDS, "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety", _DIGITS.replace("zero", "")
        ),
        "dates": (
            "|monday|tuesday|wednesday|thursday|friday|saturday|sunday", "the",
            "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth", "of", _MONTHS,
        ),
        "commands": (
            "turn on|turn off|switch on|switch off|check", "the light|the radio|the heating|the fan|the music",
            "|in the kitchen|in the garden|in the office|in every room|upstairs|for ten minutes|for fifteen minutes",
        ),
        "sentences": (
            "the dog|the cat|my sister|our teacher|a boy|the old man", "sees|has|wants|paints|sells", "a|the|one|no",
            "red|small|green|new|big", "house|car|horse|book|boat|chair|apple",
        ),
    },
    "de": {
        "digits": (_ZIFFERN, _ZIFFERN, _ZIFFERN, f"|{_ZIFFERN}", f"|{_ZIFFERN}"),
        "dates": (
            "am|vom|bis zum", "ersten|zweiten|dritten|vierten|fünften|sechsten|siebten|achten|neunten|zehnten", _MONATE
        ),
        "commands": (
            "öffne|schließe|prüfe|putze", "die tür|das fenster|den schrank|die garage",
            "|in der küche|im garten|im büro|heute|morgen",
        ),
        "sentences": (
            "der hund|die katze|meine schwester|unser lehrer|der junge", "sieht|hat|will|malt|kauft", "ein|kein|mein",
            "rotes|kleines|grünes|neues", "haus|auto|pferd|buch|boot",
        ),
    },
}  # fmt: skip
"""Slots by language and name; `|` is between choices, and an empty one leaves the slot out."""

_SHARES = {"en": 0.7, "de": 0.3}
VOICES: Mapping[str, Mapping[str, Voice]] = {
    "en": {
        "train": ("en-us", "en-us+f2", "en-us+m3", "en-us+m7", "en", "en+f4", "en+m5", "en-gb-x-rp+f3"),
        "valid": ("en-us+m1", "en-gb-x-gbcwmd+f1"),
        "test": ("en-gb-scotland+m4", "en-gb-x-gbclan+f5", "en-029+Andrea", "en-us-nyc+m2", "en-us+Alicia"),
    },
    "de": {"train": ("de", "de+f2", "de+m3", "de+f4"), "valid": ("de+m1",), "test": ("de+f5", "de+m4", "de+linda")},
}


class Clip(NamedTuple):
    """What is said, and how.

    Args:
        text: in words of lower case.
        language: of `FORMS`.
        form: likewise.
        voice: of `VOICES`.
        familiar: whether the voice is one of train.
        speed: words a minute.
        pitch: of espeak-ng, 0 to 99.
    """

    text: str
    language: str
    form: str
    voice: str
    familiar: bool
    speed: int
    pitch: int


Speaker = Callable[[Clip], NDArray[np.float64]]
"""Returns samples [T] of a clip at 16 kHz."""


def part_of(text: str) -> str:
    """Returns the part that a text belongs to."""
    place = zlib.crc32(text.encode()) % 20
    return "test" if place < 4 else "valid" if place == 4 else "train"


def texts(part: str, language: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields forms and texts of a part without end."""
    forms = FORMS[language]
    while True:
        form = rng.choice([*forms])
        text = " ".join(" ".join(rng.choice(slot.split("|")) for slot in forms[form]).split())
        if part_of(text) == part:
            yield form, text


def clips(part: str, count: int, seed: int = 0) -> list[Clip]:
    """Returns clips; half of the voices of test are known."""
    rng = random.Random(f"{part} {seed}")
    streams = {language: texts(part, language, rng) for language in FORMS}
    result = []
    for number in range(count):
        language = rng.choices([*_SHARES], [*_SHARES.values()])[0]
        familiar = part == "train" or (part == "test" and number % 2 == 0)
        voice = rng.choice(VOICES[language]["train" if familiar else part])
        form, text = next(streams[language])
        result.append(Clip(text, language, form, voice, familiar, rng.randint(*_RATES), rng.randint(*_PITCHES)))
    return result


def write_speech(folder: Path, counts: Mapping[str, int], speak: Speaker | None = None) -> None:
    """Writes the clips of all parts with a file of lines for each, unless they are there.

    Args:
        folder: of the files.
        counts: of clips, by part.
        speak: returns samples of a clip; None: espeak-ng.

    Raises:
        SystemExit: espeak-ng is missing, or fails.
    """
    for part, count in counts.items():
        if (folder / f"{part}.jsonl").is_file():
            continue
        (folder / part).mkdir(parents=True, exist_ok=True)
        speak = speak or synthesiser(folder / "spoken.wav")
        lines = []
        for number, clip in enumerate(clips(part, count)):
            rng = np.random.default_rng([PARTS.index(part), number])
            samples = speak(clip) * 10 ** rng.uniform(-0.8, 0)
            versions = {"clean": samples, "noisy": noisy(samples, rng)}
            for name in versions if part == "test" else [("clean", "noisy")[number % 2]]:
                path = f"{part}/{number}-{name}.wav"
                soundfile.write(folder / path, versions[name], RATE, "PCM_16")
                about = {"audio": path, "question": QUESTION, "answer": clip.text, "noisy": name == "noisy"}
                lines.append(about | clip._asdict())
        (folder / "spoken.wav").unlink(missing_ok=True)
        write_durably(folder / f"{part}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a part."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def synthesiser(scratch: Path) -> Speaker:
    """Returns what speaks by espeak-ng, the loudest sample 0.7; `scratch` is a file of its."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("there is no espeak-ng, which speaks the clips: apt install espeak-ng")

    def speak(clip: Clip) -> NDArray[np.float64]:
        command = ["espeak-ng", "-v", clip.voice, "-s", str(clip.speed), "-p", str(clip.pitch), "-w", str(scratch)]
        result = subprocess.run([*command, "--", clip.text], capture_output=True, timeout=_DEADLINE_S, check=False)
        if result.returncode or not scratch.is_file():
            problem = result.stderr.decode(errors="replace").strip()
            raise SystemExit(f"espeak-ng fails with the voice {clip.voice}: {problem}")
        samples, rate = soundfile.read(scratch)
        common = math.gcd(rate, RATE)
        resampled: NDArray[np.float64] = resample_poly(samples, RATE // common, rate // common)
        loud = np.flatnonzero(np.abs(resampled) > _SILENCE)
        begin, end = max(0, loud[0] - RATE // 20), loud[-1] + RATE // 10
        heard = resampled[begin : min(end, begin + round(_MOST_SECONDS * RATE))]
        return 0.7 * heard / float(np.abs(heard).max())

    return speak


def noisy(samples: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Returns samples with reverberation and with white or pink noise, 5 to 20 dB below them.

    The room's response is the direct sound and noise that falls exponentially, by 60 dB in 0.15 to 0.5 s.
    """
    times = np.arange(round(0.5 * RATE)) / RATE
    response = rng.normal(size=len(times)) * 10 ** (-3 * times / rng.uniform(0.15, 0.5))
    response *= rng.uniform(0.3, 0.8) / np.sqrt(np.square(response).sum())
    response[0] = 1.0
    heard: NDArray[np.float64] = fftconvolve(samples, response)[: len(samples)]
    spectrum = np.fft.rfft(rng.normal(size=len(samples)))
    if rng.random() < 0.5:
        spectrum /= np.sqrt(1 + np.arange(len(spectrum)))
    noise = np.fft.irfft(spectrum, len(samples))
    noise *= np.sqrt(np.square(heard).mean() / np.square(noise).mean() / 10 ** (rng.uniform(5, 20) / 10))
    mixed = heard + noise
    return mixed * min(1.0, 0.95 / float(np.abs(mixed).max()))


def jsgf(language: str) -> str:
    """Returns the forms of a language as a grammar of pocketsphinx."""
    rules = []
    for slots in FORMS[language].values():
        parts = []
        for slot in slots:
            words = [word for word in slot.split("|") if word]
            parts.append(f"({' | '.join(words)})" if len(words) == slot.count("|") + 1 else f"[{' | '.join(words)}]")
        rules.append(" ".join(parts))
    return f"#JSGF V1.0;\ngrammar forms;\npublic <said> = {' | '.join(f'({rule})' for rule in rules)};\n"


def words(language: str | None = None) -> list[str]:
    """Returns the words of one language, or of all, sorted."""
    forms = [slots for name in ([language] if language else FORMS) for slots in FORMS[name].values()]
    return sorted({word for slots in forms for slot in slots for word in slot.replace("|", " ").split()})
