"""The profiler on real artifacts: every layer has its times, and they add up to no more than the request took."""

from __future__ import annotations

import pytest

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.core.profile import Profile, summary
from nas.core.workload import Workload
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.testing.run_plan import run_plan

pytestmark = pytest.mark.timeout(900)  # blocks are lowered the first time

LAYOUT = Layout.parse("d64 v128 ffn=swiglu:64 [C3+none -+swiglu:64 A2/1 W2/1@8&C3 M16+moe:8x2:32 ^2]")


@pytest.fixture(scope="module")
def profile(executorch_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    model = tmp_path_factory.mktemp("profile") / "model"
    artifact = EXECUTORCH.export(LAYOUT, "8da4w", RandomWeights(), model)
    runner = EXECUTORCH.profiler(executorch_build.runner, print)
    assert runner.build not in {build.runner.build for build in EXECUTORCH.builds()}, "no build that measures"
    plan = EXECUTORCH.plan(artifact, runner, Workload(prompt=160, gen=8), deadline_s=60)
    raw = run_plan(plan, EXECUTORCH.runner_folder(runner), {"model": model})
    with pytest.raises(Unsupported, match="layouts, not files"):
        EXECUTORCH.read_profile(raw, None)
    return EXECUTORCH.read_profile(raw, LAYOUT)


def test_every_layer_is_timed(profile: Profile) -> None:
    for phase, _ in profile.phases.values():
        parts = {(node.layer, node.part) for node in phase.nodes}
        layers = {(0, "mixer"), (1, "ffn"), *((layer, part) for layer in range(2, 6) for part in ("mixer", "ffn"))}
        assert parts == {(None, "embedding"), (None, "head"), *layers}
        assert 0 < phase.sum_ns <= phase.profiled_ns and phase.whole_ns > 0
    tables = summary(profile, LAYOUT)
    for rows in (tables["parts"], tables["operators"]):
        for share in ("prefill_share", "decode_share"):
            assert sum(row[share] for row in rows) == pytest.approx(1.0)


def test_operators_are_those_of_the_blocks(profile: Profile) -> None:
    for phase, passes in ((profile.prefill, 2), (profile.decode, 8)):  # a call takes at most 128 tokens
        nodes = {(node.layer, node.part, node.operator): node.nodes for node in phase.nodes}
        attention = {place[:2]: count for place, count in nodes.items() if place[2] == "hilnas::attend.out"}
        assert attention == {(layer, "mixer"): passes for layer in (2, 3, 5)}
        assert nodes[1, "ffn", "XNNPACK"] == nodes[None, "head", "XNNPACK"] == passes
        assert nodes[None, "embedding", "embed"] == passes
        assert nodes[4, "mixer", "cumsum.out"] == passes
    routed = [node.nodes for node in profile.decode.nodes if node[:3] == (4, "ffn", "XNNPACK")]
    assert routed == [3 * 8], "a router and two experts for each token"
