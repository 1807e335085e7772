"""A runtime of a third party that inherits how builds are made and found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed, UnknownName, Unsupported
from nas.core.progress import Log
from nas.measure.runtimes.build_cache import BuildRequest, BuildSpec, Variant
from nas.measure.runtimes.built_runtime import BuiltRuntime
from nas.measure.runtimes.toolchain import host_features, host_target


class Tiny(BuiltRuntime[BuildSpec]):
    """Its compiler copies a script."""

    name = "tiny"
    quantisations = ("f32",)
    spec_type = BuildSpec
    variants = (
        Variant("impossible", host_target(), frozenset({"no such feature"})),
        Variant("plain", host_target(), frozenset()),
        Variant("plain", "pdp11-unix", frozenset({"eis"})),
    )
    targets = ("pdp11-unix",)
    options = ("--model",)
    disk_bytes = 1
    compiler = "one"

    def __init__(self, folder: Path) -> None:
        self.runner_sources = (folder / "runner.sh",)
        self.profiler_sources = (folder / "profiler.sh", *self.runner_sources)
        for path in self.profiler_sources:
            path.write_text(f"""#!/bin/sh\necho '"finite":true' {path.name}\n""")

    def spec(self, request: BuildRequest) -> BuildSpec:
        features = host_features() if request.target == host_target() else None
        variant = self.variant_for(request.target, features, request.variant)
        return BuildSpec(
            version="1",
            variant=variant.name,
            target=request.target,
            flags=(),
            compiler=self.compiler,
            runner=self.source_hash(self.runner_sources),
        )

    def compile(self, spec: BuildSpec, work: Path, product: Path, log: Log) -> None:
        log("compiling")
        (product / "runner").write_bytes(self.program(spec).read_bytes())
        (product / "runner").chmod(0o755)

    def smoke_models(self, spec: BuildSpec, folder: Path, log: Log) -> Iterator[tuple[Path, Sequence[str]]]:
        yield folder / "model", ()


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Tiny:
    return Tiny(tmp_path)


def test_a_build_is_made_once_and_found(tiny: Tiny) -> None:
    with pytest.raises(InfrastructureFailed, match="run `nas runtime build tiny`"):
        tiny.runner(host_target())
    lines: list[str] = []
    build = tiny.build(log=lines.append)
    assert "compiling" in lines and build.variant == "plain"
    assert tiny.builds() == [build] and tiny.runner(host_target()) == build.runner
    assert build.runner.options == ("--model",) and tiny.runner_folder(build.runner) == build.folder
    lines.clear()
    assert tiny.build(log=lines.append) == build and "compiling" not in lines


def test_a_damaged_build_is_made_again(tiny: Tiny) -> None:
    build = tiny.build(log=print)
    content = build.executable.read_bytes()
    build.executable.write_bytes(bytes(len(content)))  # what a power cut may leave
    lines: list[str] = []
    assert tiny.build(log=lines.append) == build and "compiling" in lines
    assert build.executable.read_bytes() == content


def test_other_sources_are_another_build(tiny: Tiny) -> None:
    before = tiny.build(log=print)
    tiny.runner_sources[0].write_text("#!/bin/sh\necho 2 '\"finite\":true'\n")
    assert tiny.builds() == []
    assert tiny.build(log=print).runner.build != before.runner.build


def test_the_profiler_is_a_build_that_does_not_measure(tiny: Tiny) -> None:
    build = tiny.build(log=print)
    profiler = tiny.profiler(build.runner, print)
    assert b"profiler.sh" in (tiny.runner_folder(profiler) / profiler.main).read_bytes()
    assert tiny.builds() == [build]
    tiny.compiler = "two"
    with pytest.raises(InfrastructureFailed, match=r"another compiler .*run `nas runtime build tiny --variant plain`"):
        tiny.profiler(build.runner, print)


def test_a_runner_that_does_not_work_is_no_build(tiny: Tiny) -> None:
    tiny.runner_sources[0].write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(InfrastructureFailed, match=r"does not work on this machine \(exit code 3\)"):
        tiny.build(log=print)
    assert list(tiny.cached_builds()) == []


def test_targets_and_variants_are_checked(tiny: Tiny) -> None:
    with pytest.raises(UnknownName, match="pdp11-unix"):
        tiny.build("vax-vms", log=print)
    with pytest.raises(UnknownName, match="plain"):
        tiny.build(variant="fancy", log=print)
    with pytest.raises(Unsupported, match="lacks eis"):
        tiny.variant_for("pdp11-unix", ())
