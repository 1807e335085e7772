"""Which of several model files, with which settings, is best on a device under budgets: `nas compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, Unsupported
from nas.core.limit import Limit
from nas.core.measurement import Figure
from nas.core.metrics import measured_by
from nas.core.progress import Log
from nas.core.scoring import SURE, chance_to_keep, own_log_sd, together
from nas.core.stats import Z95
from nas.core.units import show_number
from nas.core.workload import Workload
from nas.measure.protocol.bench import FIELDS
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import FileInspector, TextScorer

RUNTIME_OF = {".gguf": "llama.cpp", ".pte": "executorch"}
"""Ending of a model file -> runtime."""

Verdict = Literal["kept", "open", "broken", "unknown"]
LITTLE = 0.01
"""Share of more bits per byte than the source's that counts as little where no budget decides."""
ALIKE = 0.001
"""Share by which bits per byte of two files differ at most that count as equal: another text orders them otherwise."""
_ORDER: Mapping[Verdict, int] = {"kept": 0, "open": 1, "unknown": 2, "broken": 3}


def runtime_of(file: Path) -> str:
    """Returns the runtime that runs a model file, by the ending of its name.

    Raises:
        InvalidInput: there is no such file, or its name ends otherwise.
    """
    if not file.is_file():
        raise InvalidInput("no such file", where=str(file))
    if file.suffix.lower() not in RUNTIME_OF:
        raise InvalidInput(f"not a model file: names end in {' or '.join(RUNTIME_OF)}", where=str(file))
    return RUNTIME_OF[file.suffix.lower()]


@dataclass(frozen=True)
class Check:
    """A budget and a measured figure.

    Args:
        limit: the budget.
        figure: measured.
        chance: that it is kept; None: the figure could not be read, or its noise is not known.
    """

    limit: Limit
    figure: Figure
    chance: float | None

    @staticmethod
    def of(limit: Limit, figure: Figure, base: Figure | None = None) -> Check:
        """Computes the chance from all noise of the figure, as studies do.

        Args:
            limit: in the metric's unit.
            figure: measured.
            base: what the limit is a multiple of, whose noise counts; None: the limit is exact.
        """
        if figure.value is None:
            return Check(limit, figure, None)
        excess = math.log(figure.value / limit.value) if figure.value > 0 else -math.inf
        # Noise that both figures share does not separate them.
        other = figure.shared_log_sd or 0.0 if base is None else own_log_sd(limit.metric, base)
        sd = together(own_log_sd(limit.metric, figure), other)
        return Check(limit, figure, chance_to_keep(excess, sd))

    @property
    def verdict(self) -> Verdict:
        """What can be said: a budget is kept or broken where the chance is high or low enough for studies."""
        if self.chance is None:
            return "unknown" if self.figure.value is None else "open"
        return "kept" if self.chance >= SURE else "broken" if self.chance <= 1 - SURE else "open"

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {
            "budget": str(self.limit),
            **self.figure.report("reason"),
            "chance": self.chance,
            "verdict": self.verdict,
        }


class Loss(NamedTuple):
    """What a file loses against the source that it was made from, on one text.

    Args:
        kl: nats a token of the divergence from the source.
        half: half width of its 95 % interval over windows of text; infinite for one window.
        bits: share of more bits per byte than the source's.
    """

    kl: float
    half: float
    bits: float

    @property
    def is_little(self) -> bool:
        """Whether it costs at most `LITTLE`."""
        return self.bits <= LITTLE

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        interval = None if math.isinf(self.half) else [self.kl - self.half, self.kl + self.half]
        return {"kl": self.kl, "kl_ci95": interval, "more_bits": self.bits}


@dataclass(frozen=True)
class Candidate:
    """A file with settings, and what was measured.

    Args:
        file: the model.
        workload: with the settings.
        figures: metric -> figure; none where it failed.
        checks: one for each budget; none where it failed.
        bits_per_byte: of text, of this file on this machine; None: `why_no_bits`.
        why_no_bits: a reason; empty: no text was given, or there is a figure.
        failure: why nothing was measured; empty: something was.
        loss: of a file that was made from a source; None: it was not.
        others: cores that other processes used meanwhile; None: not known.
    """

    file: Path
    workload: Workload
    figures: Mapping[str, Figure]
    checks: tuple[Check, ...] = ()
    bits_per_byte: float | None = None
    why_no_bits: str = ""
    failure: str = ""
    loss: Loss | None = None
    others: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of its budgets' verdicts; kept where there are none."""
        return max((check.verdict for check in self.checks), key=_ORDER.__getitem__, default="kept")

    @property
    def settings(self) -> str:
        """The settings that tell candidates of one file apart."""
        threads = f"{self.workload.threads} thread{'s' * (self.workload.threads != 1)}"
        return f"{threads}, {self.workload.kv_type} cache, {self.workload.window} tokens"

    def value(self, name: str) -> float:
        """Returns a figure, infinite where there is none."""
        figure = self.figures.get(name)
        return math.inf if figure is None or figure.value is None else figure.value


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns candidates, best first.

    What keeps all budgets comes before what may keep them, and that before what breaks one. Then come bits per byte,
    files without any last, and then the median time of a token; bits within `ALIKE` are equal. Of those whose times
    cannot be told apart the smaller file comes first, and then the one that reads prompts faster. Of files made from
    one source the divergence takes the place of bits per byte; without budgets, those that lose little are alike.
    """
    fewest: dict[float, float] = {}
    for bits in sorted(one.bits_per_byte for one in candidates if one.bits_per_byte is not None):
        last = fewest[max(fewest)] if fewest else 0.0
        fewest[bits] = last if bits <= last * (1 + ALIKE) else bits

    def place(one: Candidate) -> tuple[object, ...]:
        bits = math.inf if one.bits_per_byte is None else fewest[one.bits_per_byte]
        if one.loss is not None:
            bits = 0.0 if one.loss.is_little and not one.checks else one.loss.kl
        excess = max((-1.0 if check.chance is None else 1 - check.chance for check in one.checks), default=0.0)
        broken = excess if one.verdict == "broken" else 0.0
        return bool(one.failure), _ORDER[one.verdict], broken, bits

    groups = groupby(sorted(candidates, key=place), key=place)
    return [candidate for _, group in groups for candidate in _by_speed(list(group))]


def _by_speed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the fastest one with all that cannot be told apart from it, and then the others likewise."""
    measured = [candidate for candidate in candidates if not candidate.failure]
    if not measured:
        return list(candidates)
    fastest = min(measured, key=lambda candidate: candidate.value("decode_p50"))
    alike = [candidate for candidate in measured if candidate is fastest or _overlap(fastest, candidate)]
    alike.sort(key=lambda one: (one.value("file_size"), one.value("ttft"), one.value("decode_p50")))
    return alike + _by_speed([candidate for candidate in candidates if candidate not in alike])


def sentence(candidates: Sequence[Candidate], limits: Sequence[Limit], device: str) -> str:
    """Returns what to do, of ranked candidates."""
    best, budgets = candidates[0], " and ".join(map(str, limits))
    name = f"{best.file.name} with {best.settings}"
    if best.failure:
        return f"No file ran on {device}."
    if limits and best.verdict == "broken":
        return f"No file keeps {budgets} on {device}; nearest is {name}."
    verdict = f"keeps {budgets}" if best.verdict == "kept" else f"may keep {budgets}: more --reps decide"
    first = f"Best on {device}: {name}{f', which {verdict}' if limits else ''}"
    alike = [one for one in candidates[1:] if one.verdict == best.verdict and not one.failure]
    equal = [one for one in alike if _equal_bits(best, one)]
    unsure = [one for one in equal if _overlap(best, one)]
    if best.loss is not None and best.loss.is_little and not limits:
        peers = [one for one in alike if one.loss is not None and one.loss.is_little]
        unsure = [one for one in peers if _overlap(best, one)]
        reason = (
            f"of the files that cost at most {LITTLE:.0%} more bits per byte than the source,"
            f" {_why_in_speed(best, peers)} ({best.loss.bits:+z.2%})"
        )
    elif not alike:
        reason = "no other does" if limits or len(candidates) == 1 else "no other runs"
    elif best.loss is not None:
        reason = f"it loses least (KL {best.loss.kl:.2g} nats a token, {best.loss.bits:+z.2%} bits per byte)"
    elif best.bits_per_byte is None:
        reason = f"{_why_in_speed(best, alike)}; what quality it has is not known without --corpus"
    elif any(one.file != best.file for one in equal):
        reason = (
            f"of the files with the fewest bits per byte ({best.bits_per_byte:.4f}, within {ALIKE:.1%})"
            f" {_why_in_speed(best, equal)}"
        )
    else:
        reason = _why_in_quality(best, alike)
    more = f" {len(unsure)} other(s) cannot be told apart from it in speed." if unsure else ""
    return f"{first}: {reason}.{more}"


def _why_in_speed(best: Candidate, others: Sequence[Candidate]) -> str:
    """Returns why it is the first of those of equal quality."""
    unsure = [one for one in others if _overlap(best, one)]
    if not unsure:
        ends = [(one.figures["decode_p50"].low, best.figures["decode_p50"].high) for one in others]
        common = any(low is not None and high is not None and low <= high for low, high in ends)
        return "it is the fastest" + " (most of the noise of these intervals is common to all)" * common
    size = best.value("file_size")
    smallest = any(size < one.value("file_size") for one in unsure)
    also = f", and of those alike it is the smallest ({show_number(size)} MB)" * smallest
    return f"none is faster beyond the noise{also}"


def _why_in_quality(best: Candidate, alike: Sequence[Candidate]) -> str:
    """Returns why it is the first by bits per byte, and what is not known."""
    bits = f"{best.bits_per_byte:.4f}"
    unscored = {one.file.name: one for one in reversed(alike) if one.bits_per_byte is None}
    if not unscored:
        return f"it has the fewest bits per byte ({bits})"
    others = any(one.bits_per_byte is not None and one.file != best.file for one in alike)
    first = f"of the files that could be scored it has the fewest bits per byte ({bits})"
    notes = [
        f"{name} ({'; '.join(filter(None, (_beside(best, one), one.why_no_bits)))})" for name, one in unscored.items()
    ]
    reason = first if others else f"it is the only file that could be scored ({bits} bits per byte)"
    return f"{reason}; not known is the quality of {', '.join(notes)}"


def _beside(best: Candidate, other: Candidate) -> str:
    """Returns how another file differs in speed and size."""
    times, sizes = (other.value(name) / best.value(name) for name in ("decode_p50", "file_size"))
    parts = []
    if math.isfinite(times) and not _overlap(best, other):
        parts.append(f"{abs(1 - times):.0%} {'less' if times < 1 else 'more'} time per token")
    if math.isfinite(sizes) and abs(1 - sizes) >= 0.01:
        parts.append(f"{abs(1 - sizes):.0%} {'smaller' if sizes < 1 else 'larger'}")
    return ", ".join(parts)


def _equal_bits(one: Candidate, other: Candidate) -> bool:
    first, second = one.bits_per_byte, other.bits_per_byte
    if first is None or second is None:
        return first is second
    return abs(first / second - 1) <= ALIKE


def _overlap(one: Candidate, other: Candidate) -> bool:
    """Returns whether two candidates' times of a token cannot be told apart, by their own noise."""
    first, second = one.figures["decode_p50"], other.figures["decode_p50"]
    sd = together(first.log_sd, second.log_sd)
    if first.value is None or second.value is None:
        return False
    return sd is None or abs(math.log(first.value / second.value)) <= Z95 * sd


def problem_of(file: Path) -> str:
    """Returns why a file holds no model that its runtime could measure; empty: nothing is seen in its header."""
    runtime = RUNTIMES[runtime_of(file)]
    try:
        if isinstance(runtime, FileInspector):
            runtime.needs_patched(file)
    except InvalidInput as error:
        return str(error)
    return ""


class Bits(NamedTuple):
    """Bits per byte of text under a file.

    Args:
        value: None: there are none.
        reason: why there are none.
        failed: the reason is that the file is broken.
        loss: against the source of the file; None: it has none.
    """

    value: float | None = None
    reason: str = ""
    failed: bool = False
    loss: Loss | None = None

    def of(self, candidate: Candidate) -> Candidate:
        """Returns a candidate of the file with these bits; a broken file fails, however fast it is."""
        failure = candidate.failure or (self.reason if self.failed else "")
        return replace(candidate, bits_per_byte=self.value, why_no_bits=self.reason, failure=failure, loss=self.loss)


def bits_of(file: Path, texts: Sequence[str], threads: int, log: Log) -> Bits:
    """Returns bits per byte of texts under a file, or why there are none."""
    runtime = RUNTIMES[runtime_of(file)]
    if not isinstance(runtime, TextScorer):
        return Bits(reason=f"a {file.suffix} holds no tokenizer")
    log(f"scoring text with {file.name}")
    try:
        return Bits(runtime.bits_per_byte(file, texts, threads))
    except Unsupported as error:
        return Bits(reason=error.message)
    except InfrastructureFailed as error:
        return Bits(reason=str(error))
    except (InvalidInput, CandidateFailed) as error:
        return Bits(reason=str(error), failed=True)


def figures_of(report: Mapping[str, Any]) -> dict[str, Figure]:
    """Returns the figures of a report of `nas bench`."""
    return {
        name: Figure(
            value=figure["value"],
            low=figure["ci95"][0],
            high=figure["ci95"][1],
            **{key: figure[key] for key in FIELDS},
        )
        for name, figure in report["figures"].items()
    }


def require_measured(name: str, workload: Workload, where: str) -> None:
    """Raises `InvalidInput` for a metric that a request does not have, such as the time to encode an image."""
    if not measured_by(name, encodes=workload.encodes, media=workload.media):
        request = f"{workload.prompt} tokens in and {workload.gen} out"
        raise InvalidInput(f"{name} is not measured by a request of {request}", where=where)
