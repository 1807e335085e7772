"""`nas compare`: combinations that are measured, verdicts, order and the sentence below them."""

from __future__ import annotations

import csv
import errno
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from cli_runner import nas

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError
from nas.core.progress import Log
from nas.measure.protocol.bench import BenchOptions
from nas.measure.protocol.file_choice import Bits, Loss

FIGURES: dict[tuple[str, int], tuple[float, float]] = {
    ("big.gguf", 1): (30.0, 0.01),
    ("big.gguf", 2): (19.0, 0.01),
    ("small.gguf", 1): (12.0, 0.01),
    ("small.gguf", 2): (11.9, 0.01),
    ("near.gguf", 1): (20.5, 0.05),
    ("near.gguf", 2): (19.8, 0.05),
    ("other.pte", 1): (10.0, 0.01),
    ("other.pte", 2): (9.0, 0.01),
}
"""(file, threads) -> ms of a token, and the deviation of its logarithm."""
SIZES = {"near.gguf": 30.0}
OTHERS, SLOWED, REPETITIONS = 0.1, 2.0, 5
BITS = {"big.gguf": 0.9, "near.gguf": 0.95, "small.gguf": 1.2}


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BenchOptions]:
    """Replaces the device; returns what it was asked for."""
    requests: list[BenchOptions] = []

    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Any]:
        for options in benches:
            requests.append(options)
            assert isinstance(options.subject, Path)
            yield report(options.subject.name, options.workload.threads)

    monkeypatch.setattr("nas.cli.compare.bench_each", measure)
    monkeypatch.setattr("nas.measure.runtimes.llama_cpp.binding.bits_per_byte", lambda build, file, *_: BITS[file.name])
    monkeypatch.setattr("nas.measure.runtimes.built_runtime.BuiltRuntime.find_build", lambda *_, **__: None)
    monkeypatch.setattr("nas.measure.runtimes.llama_cpp.runtime.LlamaCpp.needs_patched", lambda self, model: False)
    for name, _ in FIGURES:
        (tmp_path / name).write_bytes(b"model")
    monkeypatch.chdir(tmp_path)
    return requests


def report(name: str, threads: int) -> dict[str, Any] | NasError:
    if (name, threads) not in FIGURES:
        return CandidateFailed("crash", "the runner died")
    value, sd = FIGURES[name, threads]
    metrics = {"decode_p50": (value, sd, "ms"), "prefill_tps": (100.0, sd, "tok/s"), "peak_rss": (50.0, None, "MB"),
             "file_size": (SIZES.get(name, 40.0), None, "MB"), "ttft": (5.0, sd, "ms"),
             "decode_p95": (None, None, "ms")}  # fmt: skip
    figures = {
        name: {"value": value, "ci95": [value and value * (1 - 2 * (sd or 0)), value and value * (1 + 2 * (sd or 0))],
               "typical": value and value * SLOWED, "log_sd": sd, "shared_log_sd": None, "n": REPETITIONS,
               "unit": unit, "reason": None if value else "too few tokens"}
        for name, (value, sd, unit) in metrics.items()
    }  # fmt: skip
    return {"device": {"id": "box"}, "figures": figures, "foreign_cpu": OTHERS}


def order(*arguments: str) -> list[tuple[str, int, str]]:
    done = nas("compare", *arguments, "--json")
    assert done.code == 0, done.err
    candidates = json.loads(done.out)["candidates"]
    return [(candidate["file"], candidate["workload"]["threads"], candidate["verdict"]) for candidate in candidates]


def test_every_file_is_measured_with_every_setting(requests: list[BenchOptions]) -> None:
    done = nas("compare", "small.gguf", "other.pte", "-t", "1,2", "--context", "0,4096", "--kv", "f16,q8_0", "-p", "64")
    assert done.code == 0, done.err
    settings = [(request.workload.threads, request.workload.context, request.workload.kv_type) for request in requests]
    expected = [(t, c, k) for t in (1, 2) for c in (0, 4096) for k in ("f16", "q8_0")]
    assert settings == expected * 2
    assert [request.runtime for request in requests] == ["llama.cpp"] * 8 + ["executorch"] * 8
    assert len(done.out.splitlines()) == 1 + 16 + 1


def test_what_keeps_the_budget_comes_first() -> None:
    assert order("big.gguf", "small.gguf", "near.gguf", "-t", "1,2", "-b", "decode_p50<=20ms") == [
        ("small.gguf", 2, "kept"), ("small.gguf", 1, "kept"), ("big.gguf", 2, "kept"),
        ("near.gguf", 2, "open"), ("near.gguf", 1, "open"), ("big.gguf", 1, "broken"),
    ]  # fmt: skip


def test_with_text_the_fewest_bits_come_first_among_those_that_keep_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    arguments = ("big.gguf", "small.gguf", "other.pte", "-t", "1,2", "-b", "decode_p50<=20ms", "-c", "text.txt")
    assert order(*arguments)[0] == ("big.gguf", 2, "kept")
    done = nas("compare", *arguments)
    last = done.out.splitlines()[-1]
    assert last == (
        "Best on box: big.gguf with 2 threads, f16 cache, 768 tokens, which keeps decode_p50 <= 20 ms:"
        " of the files that could be scored it has the fewest bits per byte (0.9000); not known is the quality of"
        " other.pte (53% less time per token; a .pte holds no tokenizer)."
    )
    assert "a .pte holds no tokenizer" in done.out


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("big.gguf", "-b", "decode_p50<=20ms"), "No file keeps decode_p50 <= 20 ms on box; nearest is big.gguf"),
        (("near.gguf", "-b", "decode_p50<=20ms"), "which may keep decode_p50 <= 20 ms: more --reps decide"),
        (("big.gguf", "small.gguf"), "it is the fastest; what quality it has is not known without --corpus."),
        (("small.gguf", "-t", "1,2"), "1 other(s) cannot be told apart from it in speed."),
        (("small.gguf", "-t", "1,2"), "none is faster beyond the noise; what quality"),
        (
            ("big.gguf", "near.gguf", "-t", "2"),
            "near.gguf with 2 threads, f16 cache, 768 tokens: none is faster"
            " beyond the noise, and of those alike it is the smallest (30 MB)",
        ),
        (("small.gguf", "-t", "7"), "No file ran on local."),
    ],
)
def test_a_sentence_says_what_to_do(arguments: tuple[str, ...], advice: str) -> None:
    done = nas("compare", *arguments)
    assert done.code == 0
    assert advice in done.out.splitlines()[-1]


def test_what_was_measured_before_an_interrupt_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Any]:
        for number, options in enumerate(benches):
            if number == 2:
                raise KeyboardInterrupt
            assert isinstance(options.subject, Path)
            yield report(options.subject.name, options.workload.threads)

    monkeypatch.setattr("nas.cli.compare.bench_each", measure)
    done = nas("compare", "small.gguf", "big.gguf", "-t", "1,2")
    assert done.code == 130 and "stopped: 2 of 4 are measured" in done.err
    assert "small.gguf with 2 threads" in done.out and "big.gguf" not in done.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfrastructureFailed("the device is gone"), 4),
        (InvalidInput("cannot read big.gguf"), 3),
        (OSError(errno.ENOSPC, "No space left on device", "big.gguf"), 4),
    ],
)
def test_what_was_measured_before_an_error_is_shown(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Any]:
        yield report("small.gguf", 1)
        raise error

    monkeypatch.setattr("nas.cli.compare.bench_each", measure)
    done = nas("compare", "small.gguf", "big.gguf")
    assert done.code == code and f"stopped: {error}: 1 of 2 are measured" in done.err
    assert "small.gguf, 1 thread" in done.out


def test_bits_that_hardly_differ_do_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    monkeypatch.setitem(BITS, "small.gguf", BITS["big.gguf"] * 1.0005)
    done = nas("compare", "big.gguf", "small.gguf", "near.gguf", "-c", "text.txt")
    assert done.out.splitlines()[-1].endswith(
        "of the files with the fewest bits per byte (0.9004, within 0.1%) it is the fastest."
    )
    monkeypatch.setitem(BITS, "small.gguf", BITS["big.gguf"] * 1.002)
    done = nas("compare", "big.gguf", "small.gguf", "-c", "text.txt")
    assert done.out.splitlines()[-1].endswith("it has the fewest bits per byte (0.9000).")


def test_intervals_that_overlap_by_common_noise_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(name: str, threads: int) -> Any:
        figures_of_file = report(name, threads)
        assert isinstance(figures_of_file, dict)
        figures_of_file["figures"]["decode_p50"]["ci95"] = [5.0, 40.0]
        return figures_of_file

    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Any]:
        yield from (wide(Path(str(options.subject)).name, options.workload.threads) for options in benches)

    monkeypatch.setattr("nas.cli.compare.bench_each", measure)
    line = nas("compare", "big.gguf", "small.gguf").out.splitlines()[-1]
    assert "small.gguf" in line and "it is the fastest (most of the noise of these intervals is common to all);" in line


def test_an_absence_is_no_win(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    done = nas("compare", "big.gguf", "other.pte", "-c", "text.txt")
    assert done.out.splitlines()[-1].endswith(
        ": it is the only file that could be scored (0.9000 bits per byte); not known is the quality of other.pte"
        " (67% less time per token; a .pte holds no tokenizer)."
    )


def test_beside_other_processes_what_was_seen_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = nas("compare", "small.gguf")
    assert "seen" not in calm.out and "Other processes" not in calm.out
    monkeypatch.setattr(f"{__name__}.OTHERS", 1.6)
    head, row, note, _ = nas("compare", "small.gguf").out.splitlines()
    assert "ms/token seen\tidle (95 %)" in head and "\t24\t12.0 (11.8 to 12.2)\t" in row
    assert note.startswith("Other processes used up to 1.6 cores meanwhile")
    (listed,) = csv.DictReader(io.StringIO(nas("compare", "small.gguf", "-f", "csv").out))
    assert (listed["decode_p50_seen"], listed["other_processes"]) == ("24.0", "1.6")


def test_a_verdict_of_few_repetitions_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("compare", "small.gguf", "-b", "decode_p50<=20ms", "-b", "file_size<=80MB", "-f", "md")
    assert nas(*arguments).out.splitlines()[2].endswith("| kept | kept |")
    monkeypatch.setattr(f"{__name__}.REPETITIONS", 2)
    assert nas(*arguments).out.splitlines()[2].endswith("| kept, n = 2 | kept |")


def test_a_file_that_fails_is_a_row_with_its_reason() -> None:
    done = nas("compare", "small.gguf", "-t", "1,7", "-b", "decode_p95<=20ms")
    assert "the runner died" in done.out
    assert "unknown: too few tokens" in done.out
    assert order("small.gguf", "-t", "1,7") == [("small.gguf", 1, "kept"), ("small.gguf", 7, "failed")]


@pytest.mark.parametrize(
    "error", [CandidateFailed("not_finite", "small.gguf: its logits hold NaN"), InvalidInput("no GGUF file")]
)
def test_a_file_that_cannot_score_text_is_never_the_best(
    error: NasError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bits(build: object, file: Path, *_: object) -> float:
        if file.name == "small.gguf":
            raise error
        return BITS[file.name]

    monkeypatch.setattr("nas.measure.runtimes.llama_cpp.binding.bits_per_byte", bits)
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    for files in (("small.gguf", "big.gguf"), ("big.gguf", "small.gguf")):
        arguments = (*files, "-c", "text.txt", "-b", "decode_p50<=20ms")
        assert order(*arguments) == [("big.gguf", 1, "broken"), ("small.gguf", 1, "failed")]
        failed = json.loads(nas("compare", *arguments, "--json").out)["candidates"][1]
        assert failed["bits_per_byte"] is None and failed["failure"] == str(error)
        assert str(error) in nas("compare", *arguments).out


@pytest.mark.parametrize("options", [(), ("-f", "csv"), ("-f", "md"), ("--json",)])
def test_what_a_runtime_said_of_a_file_moves_no_cursor(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bits(build: object, file: Path, *_: object) -> float:
        if file.name == "near.gguf":
            raise InfrastructureFailed("llama.cpp did not finish:\x9b2J")
        return BITS[file.name]

    monkeypatch.setattr("nas.measure.runtimes.llama_cpp.binding.bits_per_byte", bits)
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    done = nas("compare", "big.gguf", "near.gguf", "-c", "text.txt", *options)
    assert "did not finish:" in done.out and "\x9b" not in done.out + done.err


def test_what_is_no_model_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_patched(self: object, model: Path) -> bool:
        if model.name == "lfs.gguf":
            raise InvalidInput("not a GGUF file: it is a pointer of git-lfs")
        return False

    monkeypatch.setattr("nas.measure.runtimes.llama_cpp.runtime.LlamaCpp.needs_patched", needs_patched)
    (tmp_path / "lfs.gguf").write_bytes(b"version https://git-lfs")
    assert order("lfs.gguf", "small.gguf", "-t", "1,2") == [
        ("small.gguf", 2, "kept"), ("small.gguf", 1, "kept"), ("lfs.gguf", 1, "failed"), ("lfs.gguf", 2, "failed"),
    ]  # fmt: skip
    done = nas("compare", "lfs.gguf")
    assert done.code == 0 and "a pointer of git-lfs" in done.out and "No file ran on local." in done.out


def test_formats_hold_the_same_figures() -> None:
    rows = list(csv.DictReader(io.StringIO(nas("compare", "big.gguf", "small.gguf", "-f", "csv").out)))
    assert [(row["file"], row["decode_p50"], row["decode_p50_low"]) for row in rows] == [
        ("small.gguf", "12.0", "11.76"), ("big.gguf", "30.0", "29.4"),
    ]  # fmt: skip
    lines = nas("compare", "big.gguf", "-f", "md", "-b", "decode_p50<=20ms").out.splitlines()
    assert lines[0].endswith("| peak memory | decode_p50 <= 20 ms |")
    assert "| 30.0 (29.4 to 30.6) | 50 MB | broken |" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("gone.gguf",), "gone.gguf: no such file"),
        (("text.txt",), "text.txt: not a model file: names end in .gguf or .pte"),
        (("small.gguf", "--kv", "q2"), "--kv: no such number format: 'q2'"),
        (("small.gguf", "-b", "quality<=1"), "--budget: quality is no cost"),
        (("small.gguf", "-p", "3"), "--prompt"),
        (("small.gguf", "--context", "16"), "shorter than prompt"),
        (("small.gguf", "big.gguf", "--types", "q4_0"), "--types: types are made from one GGUF file"),
        (("other.pte", "--types", "q4_0"), "--types: types are made from one GGUF file"),
        (("small.gguf", "--types", "q4_0,q9_9"), "q9_9"),
        (("small.gguf", "-c", "text.txt"), "--corpus: too short"),
    ],
)
def test_bad_input_is_refused(
    arguments: tuple[str, ...], error: str, tmp_path: Path, requests: list[BenchOptions]
) -> None:
    (tmp_path / "text.txt").write_text("text")
    done = nas("compare", *arguments)
    assert done.code == 3 and error in done.err and not requests


FILES = {"big.gguf": ("source", 0.0, 0.9), "near.gguf": ("q5_k_m", 0.02, 0.907), "small.gguf": ("q4_0", 0.3, 0.98)}
"""File -> its type, divergence from the source, and bits per byte."""


@pytest.fixture
def texts() -> list[tuple[str, str]]:
    """Returns what files of types were compared on, and the text of their importance matrix."""
    return []


@pytest.fixture
def compared_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: list[tuple[str, str]]) -> list[Path]:
    """Replaces files of types; returns those that were compared with the source."""
    compared: list[Path] = []

    class FakeTypes:
        def __init__(self, source: Path, types: Sequence[str], text: str, importance_from: str, *_: object) -> None:
            texts.append((text, importance_from))
            self.files = {
                source.with_name(name): kind for name, (kind, *_) in FILES.items() if kind in ("source", *types)
            }

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def make(self) -> dict[Path, str]:
            return {}

        def bits(self, file: Path) -> Bits:
            compared.append(file)
            _, kl, bits = FILES[file.name]
            return Bits(bits, loss=Loss(kl, kl / 10, bits / 0.9 - 1))

    monkeypatch.setattr("nas.train.adapt.made_types.MadeTypes", FakeTypes)
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 2000)
    return compared


@pytest.mark.parametrize(
    ("arguments", "best", "why"),
    [
        ((), "near.gguf", "cost at most 1% more bits per byte than the source, it is the fastest (+0.78%)"),
        (("-b", "decode_p50<=15ms"), "small.gguf", "no other does"),
        (("-b", "decode_p50<=25ms"), "near.gguf", "it loses least (KL 0.02 nats a token, +0.78% bits per byte)"),
        (("-b", "file_size<=100MB"), "big.gguf", "it loses least (KL 0 nats a token, +0.00% bits per byte)"),
    ],
)  # fmt: skip
def test_types_of_one_file_are_compared_with_it(
    arguments: tuple[str, ...], best: str, why: str, compared_files: list[Path]
) -> None:
    done = nas("compare", "big.gguf", "--types", "q5_k_m,q4_0", "-c", "text.txt", "-t", "1", *arguments)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[-2].startswith(f"Best on box: {best}") and lines[-2].endswith(f"{why}."), lines[-2]
    assert lines[-1] == f"It is {best}"
    assert len(compared_files) == 3 and "KL (95 %)" in lines[0] and "0.018 to 0.022" in done.out


@pytest.mark.parametrize("option", ["--importance", "--no-importance"])
def test_an_importance_matrix_is_of_text_that_compares_nothing(
    option: str, compared_files: list[Path], texts: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = [f"word {number}" for number in range(1000)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    assert nas("compare", "big.gguf", "--types", "q4_0", "-c", "text.txt", option).code == 0
    ((compared_on, importance_from),) = texts
    assert words[-1] in compared_on and words[0] not in compared_on
    before, _, _ = (tmp_path / "text.txt").read_text().partition(compared_on)
    assert importance_from == (before if option == "--importance" else "")


def test_an_interrupt_keeps_the_types_that_were_compared(
    compared_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Any]:
        for options in benches[:2]:
            assert isinstance(options.subject, Path)
            yield report(options.subject.name, options.workload.threads)
        raise KeyboardInterrupt

    monkeypatch.setattr("nas.cli.compare.bench_each", measure)
    done = nas("compare", "big.gguf", "--types", "q5_k_m,q4_0", "-c", "text.txt", "-f", "csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert done.code == 130 and "stopped: 2 of 3 are measured" in done.err
    assert [(row["file"], row["kl"]) for row in rows] == [("near.gguf", "0.02"), ("big.gguf", "0.0")]
