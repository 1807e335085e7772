"""Version constants of result keys, each pinned together with what a fixed input gives.

Results are stored under keys that hold these versions. If code gives another result under the same version, stored
results stand for what this code would not give: so a test here fails until the version is raised. Then
`HILNAS_REPIN=1 pytest tests/unit/test_versions.py` records the new pair.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretrain_lab import SETTINGS, pretraining, write_corpus, write_tokenizer
from safetensors.numpy import save_file
from study_support import DEVICE, ScriptedJobs, raw, reference_times, sample

from nas.core.layout import Layout
from nas.core.plan import EnergyUsed, Pair, RawRun, RoundResult
from nas.core.quality_config import Rounding
from nas.core.space import MeasurementSettings
from nas.core.task import make_task
from nas.core.workload import Workload
from nas.measure.protocol.reference import GATE_VERSION
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.measure.protocol.rounds import Reference, Subject, measure
from nas.measure.runtimes.base import Checkpoint, GateReport, RandomWeights
from nas.measure.runtimes.executorch import gate as executorch_gate
from nas.measure.runtimes.executorch import writer as executorch_writer
from nas.measure.runtimes.executorch.contents import constant_sizes
from nas.measure.runtimes.executorch.programs import Program
from nas.measure.runtimes.executorch.templates import Template
from nas.measure.runtimes.llama_cpp import gate as llama_cpp_gate
from nas.measure.runtimes.llama_cpp import writer as llama_cpp_writer
from nas.measure.runtimes.llama_cpp.oracle import Oracle
from nas.model.nn.model import Model
from nas.model.text import default, generators
from nas.model.text.corpus import refer
from nas.search.proxy.job import ROUNDING_VERSION, TRAINER_VERSION, LmRun, TaskRun, TrainJob
from nas.search.proxy.tasks import SUITE_VERSION
from nas.search.proxy.train import train
from nas.testing.fake_runtime import FakeRuntime
from nas.train.pretrain import data as pretrain_data
from nas.train.pretrain import member_training
from nas.train.release import files as release_files
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

pytestmark = pytest.mark.usefixtures("home")

PINNED = Path(__file__).resolve().parents[1] / "data" / "pinned_results.json"
ALL_KINDS = "d64 v256 ffn=swiglu:64 [C3 W2/1@8(sink=1) M16 A2/1 C5+moe:8x2:32]"
EXACT_KINDS = "d64 v256 ffn=swiglu:64 [C3 W2/1@8(sink=1) A2/1 C5+moe:8x2:32]"
"""Kinds whose files need no exponentials, which processors compute to other last digits."""
ROUNDED = 5e-4
"""Relative difference that other processors make in trainings of a few steps."""


def check(name: str, version: object, result: Any, rel: float = 1e-9) -> None:
    """Compares a result with the recorded one, numbers to `rel`; `name` is the constant's, with its module."""
    recorded = json.loads(PINNED.read_text())
    pin = recorded.get(name, {"version": None, "result": None})
    # What a JSON file holds, too.
    result = json.loads(json.dumps(result))
    same = alike(result, pin["result"], rel)
    if same and version == pin["version"]:
        return
    raised = version != pin["version"]
    if os.environ.get("HILNAS_REPIN") == "1" and raised:
        PINNED.write_text(json.dumps(recorded | {name: {"version": version, "result": result}}, indent=1) + "\n")
        return
    if raised:
        pytest.fail(f"{name} is {version!r} now: record its result, HILNAS_REPIN=1 pytest {__file__}")
    pytest.fail(
        f"a fixed input gives another result under the same {name} = {version!r}, so stored results would stand for "
        "what this code does not give. If that is not wanted, mend the code; if it is, raise the constant, then run "
        f"HILNAS_REPIN=1 pytest {__file__}\nresult: {json.dumps(result)}\nrecorded: {json.dumps(pin['result'])}"
    )


def alike(first: Any, second: Any, rel: float) -> bool:
    """Whether two JSON values are equal, numbers to `rel` of their size."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(alike(first[key], second[key], rel) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(alike(*pair, rel) for pair in zip(first, second, strict=True))
    if isinstance(first, float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=rel, abs_tol=1e-12)
    return bool(first == second)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """120 kB of made-up sentences."""
    return write_corpus(tmp_path / "corpus", size=30_000)


def test_a_change_of_a_result_or_of_a_version_alone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_versions.PINNED", tmp_path / "pinned.json")
    monkeypatch.delenv("HILNAS_REPIN", raising=False)
    (tmp_path / "pinned.json").write_text(json.dumps({"X": {"version": 1, "result": {"loss": 2.0}}}))
    check("X", 1, {"loss": 2.0001}, ROUNDED)
    with pytest.raises(pytest.fail.Exception, match=r"same X = 1.*raise the constant"):
        check("X", 1, {"loss": 2.001 + 1e-3}, ROUNDED)
    with pytest.raises(pytest.fail.Exception, match="X is 2 now: record its result"):
        check("X", 2, {"loss": 2.001})
    monkeypatch.setenv("HILNAS_REPIN", "1")
    with pytest.raises(pytest.fail.Exception, match="same X = 1"):
        check("X", 1, {"loss": 2.001})
    check("X", 2, {"loss": 2.001})
    monkeypatch.delenv("HILNAS_REPIN")
    check("X", 2, {"loss": 2.001})


@pytest.mark.parametrize("kind", ["lm", "task"])
def test_proxy_trainings(kind: str, tmp_path: Path, text: Path) -> None:
    run = (
        LmRun(corpus=refer([f"{text}/*"], tmp_path), length=32, eval_bytes=1024)
        if kind == "lm"
        else TaskRun(task="selcopy")
    )
    job = TrainJob(
        layout=Layout.parse(ALL_KINDS).to_json(), run=run, steps=4, batch=4, lr=3e-3, warmup=2, weight_decay=0.1,
        clip=1.0, ema=0.9, seed=1,
    )  # fmt: skip
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=print, threads=1)
    figures = {"losses": [*result.losses.values()], "scores": [*result.scores.values()], "curve": result.curve}
    check(f"nas.search.proxy.job.TRAINER_VERSION ({kind})", TRAINER_VERSION, figures, ROUNDED)


def test_scores_after_quantisation(tmp_path: Path, text: Path) -> None:
    run = LmRun(corpus=refer([f"{text}/*"], tmp_path), length=32, eval_bytes=1024)
    job = TrainJob(
        layout=Layout.parse(ALL_KINDS).to_json(), run=run, steps=4, batch=4, lr=3e-3, warmup=2, weight_decay=0.1,
        clip=1.0, ema=0.9, seed=1, rounding=Rounding(runtime="llama.cpp", quantisations=("f16", "f32")),
    )  # fmt: skip
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=print, threads=1)
    scores = {name: [*of_groups.values()] for name, of_groups in result.rounded.items()}
    check("nas.search.proxy.job.ROUNDING_VERSION", ROUNDING_VERSION, scores, ROUNDED)


def test_batches_of_tasks() -> None:
    digests = {}
    for name in ("selcopy", "induction", "mqar"):
        parts = make_task(name, {}).batch(np.random.default_rng(5), 16)
        digests[name] = digest(b"".join(part.astype("<i8").tobytes() for part in parts))
    check("nas.search.proxy.tasks.SUITE_VERSION", SUITE_VERSION, digests)


def test_member_trainings(tmp_path: Path, text: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", text)
    settings = SETTINGS.model_copy(update={"tokens": 6 * 256})
    training = pretraining(tmp_path / "run", text, tokenizer, settings)
    state = training.run()
    figures = {"losses": state.losses.tolist(), "bits_per_byte": training.score()}
    check("nas.train.pretrain.member_training.TRAINER_VERSION", member_training.TRAINER_VERSION, figures, ROUNDED)


def test_tokens_of_members(tmp_path: Path, text: Path) -> None:
    pretraining(tmp_path / "run", text, write_tokenizer(tmp_path / "tokenizer.json", text))
    files = sorted((tmp_path / "cache" / "tokens").glob("*/*.bin"))
    digests = sorted(digest(file.read_bytes()) for file in files)
    assert digests
    check("nas.train.pretrain.data.TOKENS_VERSION", pretrain_data.TOKENS_VERSION, digests)


def test_released_weights(tmp_path: Path) -> None:
    """Only the weights: hashes of code and configuration are in the keys of the other files."""
    digests = {}
    for text in ("d64 v300 ffn=swiglu:96 [C3 A4/2]", "d64 v300 untied ffn=moe:4x2:32 [C3&A2/1 C4+none A4/2(canon=4)]"):
        layout = Layout.parse(text)
        folder = tmp_path / layout.id[:8]
        weights = checkpoint(layout, tmp_path / "weights")
        write_files(folder, layout, weights, FileOptions(gguf=()), print)
        digests[text] = digest((folder / "transformers" / "model.safetensors").read_bytes())
    check("nas.train.release.files.FILES_VERSION", release_files.FILES_VERSION, digests)


def checkpoint(layout: Layout, path: Path) -> Checkpoint:
    """Weights that are equal on every processor."""
    rng = np.random.default_rng(7)
    shapes = {name: tensor.shape for name, tensor in Model(layout, None).state_dict().items()}
    save_file(
        {name: (rng.integers(-999, 999, shape) / 4096).astype(np.float32) for name, shape in shapes.items()}, path
    )
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_gguf_files(tmp_path: Path) -> None:
    """Of random weights; those of trained ones go through llama.cpp's quantiser, which is in the build's id."""
    digests = {}
    for quantisation in ("q4_0", "f16", "f32"):
        path = tmp_path / quantisation
        llama_cpp_writer.write_gguf(Layout.parse(ALL_KINDS), quantisation, RandomWeights(3), path)
        digests[quantisation] = digest(path.read_bytes())
    trained = checkpoint(Layout.parse(EXACT_KINDS), tmp_path / "weights")
    llama_cpp_writer.write_gguf(Layout.parse(EXACT_KINDS), "f16", trained, tmp_path / "trained")
    digests["trained f16"] = digest((tmp_path / "trained").read_bytes())
    check("nas.measure.runtimes.llama_cpp.writer.WRITER_VERSION", llama_cpp_writer.WRITER_VERSION, digests)


def test_executorch_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the lowered programs, whose versions are in the keys beside this one."""

    def named(program: Program) -> Template:
        keys = {
            one.name: tuple(f"{one.name}.{n}" for n in range(len(constant_sizes(one, program.format))))
            for one in program.constants
        }
        return Template(repr((program.kind, program.sizes)).encode(), keys)

    monkeypatch.setattr(executorch_writer, "template", named)
    exact = checkpoint(Layout.parse(EXACT_KINDS), tmp_path / "weights")
    digests = {}
    for text, weights in ((ALL_KINDS, RandomWeights(3)), (EXACT_KINDS, exact)):
        executorch_writer.write_artifact(Layout.parse(text), weights, tmp_path / "model")
        digests[type(weights).__name__] = digest((tmp_path / "model").read_bytes())
    check("nas.measure.runtimes.executorch.writer.WRITER_VERSION", executorch_writer.WRITER_VERSION, digests)


def test_verdicts_of_the_gates(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    exact = rng.standard_normal((8, 50)).astype(np.float32)
    noise = [0.01 * rng.standard_normal((8, 50)).astype(np.float32) for _ in range(3)]

    def figures(report: GateReport) -> list[float]:
        return [report.error, report.limit]

    chosen = np.argsort(-exact, axis=1)[:, :2]
    layout = Layout.parse("d64 v96 ffn=swiglu:64 [C3 A2/1]")
    oracle = Oracle(layout, "f32", checkpoint(layout, tmp_path / "weights"))
    verdicts = {
        "llama.cpp": figures(llama_cpp_gate.compare(exact + noise[0], exact, exact + noise[1])),
        "oracle": oracle.exact(np.arange(16)).logits.astype(float).std(axis=1).tolist(),
        "choices": [
            llama_cpp_gate.judge_choices({1: chosen}, [exact + share * noise[2]], [exact + noise[1]]).split(",")[0]
            for share in (0.0, 1.0, 20.0)
        ],
        "executorch": [
            figures(
                executorch_gate.compare(
                    exact + noise[0], exact, [exact + shift for shift in noise[1:]], exact, routed=routed
                )
            )
            for routed in (False, True)
        ],
    }
    check("nas.measure.protocol.reference.GATE_VERSION", GATE_VERSION, verdicts, ROUNDED)


def recorded(ttft_ms: float, token_ms: tuple[float, ...], rss: float, foreign_cpu: float = 0.0) -> RawRun:
    """A run whose tokens take `token_ms` in turn."""
    report = sample(ttft_ms).model_copy(
        update={"decode_ns": [round(1e6 * token_ms[n % len(token_ms)]) for n in range(16)], "peak_rss_mb": rss}
    )
    steps = round(1e4 * ttft_ms)
    energy = EnergyUsed(counter="RAPL package", joules=steps / 1e6, steps=steps)
    return raw(report, foreign_cpu=foreign_cpu, energy=energy)


REFERENCES = ((10.0, (1.0,)), (10.2, (1.01, 1.02)), (9.9, (0.99,)), (10.1, (1.0, 1.6)), (12.0, (1.2,)), (10.0, (1.0,)))
CANDIDATES = (
    (20.1, (2.0, 2.1, 1.9), 50.0, 0.0), (20.4, (2.0, 2.2), 50.2, 0.0), (19.9, (1.9, 2.0, 2.0, 9.0), 50.1, 0.0),
    (20.0, (2.0, 2.1), 50.0, 1.5), (24.1, (2.4, 2.5), 50.4, 0.0), (20.2, (2.1, 2.0), 50.3, 0.0),
)  # fmt: skip


def test_measurements_of_recorded_runs(tmp_path: Path) -> None:
    """Quiet repetitions, a disturbed one, one beside a slow reference, and one with a token that took long."""
    pairs = [
        Pair(reference=recorded(ttft, tokens, 40.0), candidate=recorded(*candidate))
        for (ttft, tokens), candidate in zip(REFERENCES, CANDIDATES, strict=True)
    ]
    runtime = FakeRuntime(tmp_path)
    layout = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")
    artifact = runtime.export(layout, "q4_0", RandomWeights(), tmp_path / "model")
    subject = Subject(artifact, runtime, runtime.runner(DEVICE.target), DEVICE, Workload(prompt=64, gen=16))
    plan = runtime.plan(artifact, subject.runner, subject.workload, 60.0)
    rounds = [RoundResult(pairs=pairs[:4], wall_s=4.0), RoundResult(pairs=pairs[4:], wall_s=2.0)]
    limits = MeasurementSettings(max_attempts=1)
    reference = Reference(artifact, plan, reference_times(sample(10.0, 1.0, 16)))
    measurement = asyncio.run(measure(subject, reference, ScriptedJobs([*rounds]), "key", 0, 4, limits))
    fields = measurement.model_dump(mode="json")
    result = {name: fields[name] for name in ("figures", "refused_share", "drift")}
    result["reps"] = [[rep["valid"], rep["reason"], rep["drift"]] for rep in fields["repetitions"]]
    check("nas.measure.protocol.repetitions.PROTOCOL_VERSION", PROTOCOL_VERSION, result)


def test_the_default_corpus() -> None:
    """A fixed source stands for the standard library, which differs between versions of Python."""
    source = '"""Module."""\n\n\ndef f(x):  # doubles\n    """Returns 2 x.\n\n    Always.\n    """\n    return 2 * x\n'
    parts = [
        *default.split_source(source),
        digest(generators.joined(generators.recall_text(1, 20_000)).text),
        digest(generators.languages_text(1, 20_000).encode()),
    ]
    check("nas.model.text.default.RECIPE", default.RECIPE, parts)
