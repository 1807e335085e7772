"""The contract of a runtime, as tests: subclass `RuntimeContract`, give the three fixtures, and run pytest."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.plan import Conditions, Plan, RawRun
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, RandomWeights, Runtime
from nas.testing.run_plan import run_plan

WORKLOAD = Workload(prompt=32, gen=5, context=64)


class RuntimeContract:
    """What the service relies on.

    The subclass gives the fixtures `runtime`, `layout` (which it carries) and `refused` (which it does not).

    Attributes:
        target: the ABI of this machine, for which the runtime must have a runner at hand.
    """

    target = "x86_64-linux"

    @pytest.fixture
    def artifact(self, runtime: Runtime, layout: Layout, tmp_path: Path) -> Artifact:
        """The carried layout, exported to `tmp_path / "model"`."""
        return runtime.export(layout, runtime.quantisations[0], RandomWeights(7), tmp_path / "model")

    @pytest.fixture
    def plan(self, runtime: Runtime, artifact: Artifact) -> Plan:
        """A short run of it."""
        return runtime.plan(artifact, runtime.runner(self.target), WORKLOAD, deadline_s=120)

    @pytest.fixture
    def good(self, runtime: Runtime, plan: Plan, tmp_path: Path) -> RawRun:
        """What that run leaves behind."""
        return run_plan(plan, runtime.runner_folder(plan.runner), {"model": tmp_path / "model"})

    def test_support_names_arch_or_reasons(self, runtime: Runtime, layout: Layout, refused: Layout) -> None:
        assert runtime.supports(layout).arch
        assert runtime.supports(runtime.reference_model()).verdict == "stock"
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
        assert list(tmp_path.iterdir()) == [tmp_path / "model"], "export leaves nothing else behind"

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
        """What a device makes from the recipe is, byte for byte, what would have been sent."""
        recipe, made = tmp_path / "recipe", tmp_path / "made"
        other = runtime.export(layout, runtime.quantisations[0], RandomWeights(7), recipe, recipe=True)
        assert (other.sha256, other.size) == (artifact.sha256, artifact.size)
        if other.recipe is None:
            assert recipe.read_bytes() == (tmp_path / "model").read_bytes()
            return
        runner = runtime.runner(self.target, patched=artifact.patched)
        argv = [str(runtime.runner_folder(runner) / runner.main), "--recipe", str(recipe), "--output", str(made)]
        subprocess.run(argv, check=True, timeout=120, stdout=subprocess.DEVNULL)
        assert made.read_bytes() == (tmp_path / "model").read_bytes()
        assert hashlib.sha256(recipe.read_bytes()).hexdigest() == other.recipe.sha256

    def test_plan_survives_json(self, plan: Plan, artifact: Artifact) -> None:
        assert Plan.model_validate_json(plan.model_dump_json()) == plan
        assert plan.inputs["model"] == artifact.file
        assert any("{model}" in arg for arg in plan.args)

    def test_runner_files_are_what_the_manifest_says(self, runtime: Runtime, plan: Plan) -> None:
        folder = runtime.runner_folder(plan.runner)
        assert plan.runner.main in plan.runner.files
        for name, file in plan.runner.files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == file.sha256

    def test_missing_build_is_no_candidates_fault(self, runtime: Runtime) -> None:
        with pytest.raises(InfrastructureFailed):
            runtime.runner("pdp11-unix")

    def test_good_run(self, runtime: Runtime, good: RawRun) -> None:
        sample = runtime.parse(good)
        assert len(sample.decode_ns) == WORKLOAD.gen and min(sample.decode_ns) > 0
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
