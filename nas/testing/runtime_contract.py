"""The contract of a runtime, as tests: subclass `RuntimeContract`, give the three fixtures, and run pytest."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from nas.core.clock import SystemClock
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.plan import Conditions, Plan, PlanFile, RawRun, Round, RoundResult
from nas.core.profile import summary
from nas.core.workload import Workload
from nas.measure.devices.agent.run_plan import Observer, run_round
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.runtimes.base import Artifact, Checkpoint, Profiler, RandomWeights, ReleaseRequest, Runtime, Vocabulary
from nas.testing.run_plan import run_plan


def no_vocabulary() -> Vocabulary:
    """Fails: no model is released."""
    raise AssertionError("needed before anything is written")


def no_checkpoint() -> AbstractContextManager[Checkpoint]:
    """Fails: no model is released."""
    raise AssertionError("needed before anything is written")


@dataclass(frozen=True)
class _Files:
    """A `FileSource` of files of this machine, by SHA-256."""

    paths: Mapping[str, Path]

    def fetch(self, file: PlanFile) -> Path:
        return self.paths[file.sha256]

    def doubt(self, file: PlanFile) -> None:
        """Does nothing."""


class RuntimeContract:
    """Properties that studies rely on.

    The subclass gives the fixtures `runtime`, `layout` (which it carries) and `refused` (which it does not).

    Attributes:
        target: the ABI of this machine, for which the runtime must have a runner.
        workload: one that the runtime serves; the default is a short prompt in a longer window.
    """

    target: ClassVar[str] = f"{platform.machine()}-{platform.system().lower()}"
    workload: ClassVar[Workload] = Workload(prompt=32, gen=5, context=64)

    @pytest.fixture
    def artifact(self, runtime: Runtime, layout: Layout, tmp_path: Path) -> Artifact:
        """The carried layout, exported to `tmp_path / "model"`."""
        return runtime.export(layout, runtime.quantisations[0], RandomWeights(7), tmp_path / "model")

    @pytest.fixture
    def plan(self, runtime: Runtime, artifact: Artifact) -> Plan:
        """A short run of the artifact."""
        return runtime.plan(artifact, runtime.runner(self.target), self.workload, deadline_s=120)

    @pytest.fixture
    def good(self, runtime: Runtime, plan: Plan, tmp_path: Path) -> RawRun:
        """The result of that run."""
        return run_plan(plan, runtime.runner_folder(plan.runner), {"model": tmp_path / "model"})

    def test_support_names_arch_or_reasons(self, runtime: Runtime, layout: Layout, refused: Layout) -> None:
        assert runtime.supports(layout).arch
        assert all(runtime.supports(layout).verdict == "stock" for layout in runtime.reference_models())
        no = runtime.supports(refused)
        assert not no and no.arch is None and no.reasons

    def test_refused_layout_is_not_exported(self, runtime: Runtime, refused: Layout, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput):
            runtime.export(refused, runtime.quantisations[0], RandomWeights(), tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_unknown_quantisation_is_refused(self, runtime: Runtime, layout: Layout, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="q99"):
            runtime.export(layout, "q99", RandomWeights(), tmp_path / "model")

    def test_artifact_describes_the_file(
        self, runtime: Runtime, layout: Layout, artifact: Artifact, tmp_path: Path
    ) -> None:
        content = (tmp_path / "model").read_bytes()
        assert (artifact.sha256, artifact.size) == (hashlib.sha256(content).hexdigest(), len(content))
        assert (artifact.runtime, artifact.layout_id, artifact.weights) == (runtime.name, layout.id, "random:7")
        assert list(tmp_path.iterdir()) == [tmp_path / "model"], "export writes one file"

    def test_export_depends_on_nothing_but_its_inputs(
        self, runtime: Runtime, layout: Layout, artifact: Artifact, tmp_path: Path
    ) -> None:
        def again(seed: int) -> str:
            return runtime.export(layout, runtime.quantisations[0], RandomWeights(seed), tmp_path / "again").sha256

        assert again(7) == artifact.sha256
        assert again(8) != artifact.sha256

    def test_recipe_makes_the_same_file(
        self, runtime: Runtime, layout: Layout, artifact: Artifact, tmp_path: Path
    ) -> None:
        """A device makes from the recipe byte for byte the exported file."""
        recipe, output = tmp_path / "recipe", tmp_path / "made"
        other = runtime.export(layout, runtime.quantisations[0], RandomWeights(7), recipe, recipe=True)
        assert (other.sha256, other.size) == (artifact.sha256, artifact.size)
        if other.recipe is None:
            assert recipe.read_bytes() == (tmp_path / "model").read_bytes()
            return
        runner = runtime.runner(self.target, patched=artifact.patched)
        argv = [str(runtime.runner_folder(runner) / runner.main), "--recipe", str(recipe), "--output", str(output)]
        subprocess.run(argv, check=True, timeout=120, stdout=subprocess.DEVNULL)
        assert output.read_bytes() == (tmp_path / "model").read_bytes()
        assert hashlib.sha256(recipe.read_bytes()).hexdigest() == other.recipe.sha256

    def test_a_reference_model_takes_turns(
        self, runtime: Runtime, artifact: Artifact, plan: Plan, good: RawRun, tmp_path: Path
    ) -> None:
        """Only of runners that can; the others' processes alternate with those of the reference model."""
        if "--reference" not in plan.runner.options:
            return
        both = runtime.plan(artifact, plan.runner, self.workload, 120, reference=artifact)
        folder, paths = runtime.runner_folder(plan.runner), {"model": tmp_path / "model"}
        sample = runtime.parse(run_plan(both, folder, paths | {"reference": tmp_path / "model"}))
        reference, alone = sample.reference, runtime.parse(good)
        assert reference is not None and alone.reference is None
        assert sample.turns == reference.turns and sum(sample.turns) == self.workload.gen == len(sample.decode_ns)
        assert len(sample.prefill_ns) == len(reference.prefill_ns) >= 1
        assert sample.prefill_ns[0] == pytest.approx(1e6 * sample.ttft_ms)
        for part in (sample, reference, alone):
            assert part.finite and len(part.decode_ns) == self.workload.gen
            assert part.decode_cpu_ns is None or len(part.decode_cpu_ns) == self.workload.gen
        if sample.peak_rss_mb is not None and alone.peak_rss_mb is not None:
            assert sample.peak_rss_mb == pytest.approx(alone.peak_rss_mb, rel=0.2), "the candidate's memory alone"
        (tmp_path / "damaged").write_bytes(b"no model")
        with pytest.raises(InfrastructureFailed, match="the reference model failed"):
            runtime.parse(run_plan(both, folder, paths | {"reference": tmp_path / "damaged"}))

    def test_plan_survives_json(self, plan: Plan, artifact: Artifact) -> None:
        assert Plan.model_validate_json(plan.model_dump_json()) == plan
        assert plan.inputs["model"] == artifact.file
        assert "{model}" in plan.args

    def test_agents_run_the_plan_and_refuse_one_that_writes_files(
        self, runtime: Runtime, plan: Plan, tmp_path: Path
    ) -> None:
        """The signed record of a runner names the options that plans may use; an agent refuses others, and paths."""
        folder = runtime.runner_folder(plan.runner)
        paths = {file.sha256: folder / name for name, file in plan.runner.files.items()}
        files = _Files(paths | {plan.inputs["model"].sha256: tmp_path / "model"})
        transport = LocalTransport(tmp_path / "cache")

        def run(*args: str) -> RoundResult:
            batch = Round(candidate=plan.model_copy(update={"args": args}), repetitions=1)
            observer, clock = Observer(transport), SystemClock()
            return run_round(batch, transport, files, lambda runner: True, observer=observer, clock=clock)

        assert run(*plan.args).pairs[0].candidate.exit_code == 0
        victim = tmp_path / "victim"
        victim.write_text("kept", encoding="utf-8")
        for words in (
            (*plan.args, "--logits", str(victim)),
            ("--recipe", "{model}", "--output", str(victim)),
            (*plan.args, plan.args[0], str(victim)),
            (*plan.args, plan.args[0], "{model}/../../victim"),
        ):
            with pytest.raises(InvalidInput):
                run(*words)
        assert victim.read_text(encoding="utf-8") == "kept"

    def test_a_profiler_takes_the_plan_and_times_every_part(
        self, runtime: Runtime, layout: Layout, artifact: Artifact, plan: Plan, tmp_path: Path
    ) -> None:
        """Of a runtime that is a `Profiler`."""
        if not isinstance(runtime, Profiler):
            return
        profiler = runtime.profiler(plan.runner, print)
        assert profiler.build != plan.runner.build and profiler.options == plan.runner.options
        profiled = runtime.plan(artifact, profiler, self.workload, deadline_s=120)
        raw = run_plan(profiled, runtime.runner_folder(profiler), {"model": tmp_path / "model"})
        profile = runtime.read_profile(raw, layout)
        assert (profile.prompt, profile.gen) == (self.workload.prompt, self.workload.gen)
        for part in summary(profile, layout)["parts"]:
            if part["layer"] is not None:
                assert part["prefill_ms"] > 0 and part["decode_ms"] > 0, part

    def test_runner_files_are_what_the_manifest_says(self, runtime: Runtime, plan: Plan) -> None:
        folder = runtime.runner_folder(plan.runner)
        assert plan.runner.main in plan.runner.files
        for name, file in plan.runner.files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == file.sha256

    def test_chosen_runners_are_among_the_builds(self, runtime: Runtime, plan: Plan) -> None:
        (chosen,) = (build for build in runtime.builds() if build.runner == plan.runner)
        assert chosen.variant and chosen.folder == runtime.runner_folder(plan.runner)

    def test_a_build_for_an_unknown_machine_is_refused(self, runtime: Runtime) -> None:
        with pytest.raises(NasError):
            runtime.build("pdp11-unix", log=lambda line: None)

    def test_doctor_finds_nothing_wrong_without_a_fix(self, runtime: Runtime) -> None:
        findings = list(runtime.doctor())
        assert findings and all(finding.status == "ok" or finding.fix for finding in findings)

    def test_trimming_to_what_there_is_removes_nothing(self, runtime: Runtime) -> None:
        assert runtime.trim(1 << 62) == 0

    def test_release_names_what_loads_the_model_and_writes_nothing_yet(
        self, runtime: Runtime, layout: Layout, refused: Layout, tmp_path: Path
    ) -> None:
        def request(layout: Layout) -> ReleaseRequest:
            quantisations = runtime.quantisations[:1]
            return ReleaseRequest(tmp_path, "model", layout, quantisations, 64, no_vocabulary, no_checkpoint)

        release, no_release = runtime.release(request(layout)), runtime.release(request(refused))
        assert bool(release.parts) != release.loads.startswith("none: ")
        assert no_release.loads.startswith("none: ") and not no_release.parts
        assert list(tmp_path.iterdir()) == []

    def test_missing_build_is_no_candidates_fault(self, runtime: Runtime) -> None:
        with pytest.raises(InfrastructureFailed):
            runtime.runner("pdp11-unix")

    def test_good_run(self, runtime: Runtime, good: RawRun) -> None:
        sample = runtime.parse(good)
        assert len(sample.decode_ns) == self.workload.gen and min(sample.decode_ns) > 0
        assert sample.ttft_ms > 0 and (sample.peak_rss_mb is None or sample.peak_rss_mb > 0) and sample.finite

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"stdout": ""}, "garbage_output"),
            ({"stdout": "{}"}, "garbage_output"),
            ({"stdout": "[1, 2]"}, "garbage_output"),
            ({"stdout": "[" * 100_000}, "garbage_output"),
            ({"truncated": True}, "garbage_output"),
            ({"exit_code": -11}, "crash"),
            ({"exit_code": -9, "conditions": Conditions(oom_kills=1)}, "out_of_memory"),
            ({"exit_code": -9, "timed_out": True}, "timeout"),
        ],
    )
    def test_bad_run(self, runtime: Runtime, good: RawRun, change: dict[str, object], reason: str) -> None:
        with pytest.raises(CandidateFailed) as failure:
            runtime.parse(good.model_copy(update=change))
        assert failure.value.reason == reason

    def test_cut_report(self, runtime: Runtime, good: RawRun) -> None:
        with pytest.raises(CandidateFailed) as failure:
            runtime.parse(good.model_copy(update={"stdout": good.stdout[: len(good.stdout) // 2]}))
        assert failure.value.reason == "garbage_output"
