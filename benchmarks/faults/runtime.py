"""The campaign's runner as a runtime, so that the coordinator can check devices with it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import InputFile, Plan, PlanFile, Runner
from nas.core.workload import Workload
from nas.measure.runtimes.base import Artifact, Weights
from nas.testing.fake_runtime import FakeRuntime

MAIN = "campaign-runner"
OUTPUT_LIMIT = 1 << 16

_SCRIPT = Path(__file__).with_name("runner.sh")
_METADATA = "Metadata-Version: 2.1\nName: hilnas-campaign\nVersion: 1\n"
_ENTRY_POINTS = f"[nas.runtimes]\ncampaign = {__name__}:RUNTIME\n"


@dataclass(frozen=True)
class CampaignRuntime(FakeRuntime):
    """Models of the fake runtime, with a runner that needs only a device's shell."""

    name: str = "campaign"

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Exports whole models: the script makes no files from recipes."""
        return super().export(layout, quantisation, weights, destination)

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
        """Returns a run that succeeds at once."""
        return plan(runner, artifact.file, "right", 0.0, "check", deadline_s)

    def runner(
        self,
        target: str,
        features: Collection[str] | None = None,
        patched: bool = False,
        libc: str | None = None,
        *,
        images: bool = False,
    ) -> Runner:
        """Returns the script."""
        if patched:
            raise InfrastructureFailed("the campaign's runner has no patched build")
        content = _SCRIPT.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        files = {MAIN: PlanFile(sha256=sha256, size=len(content))}
        options = ("--model", "--seconds", "--conduct", "--tag", "--limit")
        return Runner(runtime=self.name, build=sha256, target=target, files=files, main=MAIN, options=options)

    def runner_folder(self, runner: Runner) -> Path:
        """Returns the folder of the script."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.folder / MAIN, _SCRIPT.read_bytes())
        return self.folder


def plan(runner: Runner, model: InputFile, conduct: str, seconds: float, tag: str, deadline_s: float) -> Plan:
    """One run of the script."""
    options = {"seconds": seconds, "conduct": conduct, "tag": tag, "limit": deadline_s}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return Plan(
        runner=runner,
        inputs={"model": model},
        args=("--model", "{model}", *words),
        deadline_s=deadline_s,
        output_limit=OUTPUT_LIMIT,
    )


def plugin(folder: Path) -> list[str]:
    """Writes an entry point for PYTHONPATH by which the registry of runtimes has "campaign"."""
    package = folder / "hilnas_campaign-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(_METADATA)
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    return [str(folder), str(Path(__file__).parents[2])]


def __getattr__(name: str) -> CampaignRuntime:
    # Made on access, next to the coordinator's home.
    if name != "RUNTIME":
        raise AttributeError(name)
    from nas.core import paths

    return CampaignRuntime(paths.cache() / "campaign")
