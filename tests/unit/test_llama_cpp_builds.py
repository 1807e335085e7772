"""Available builds are found by what the device can run; what is damaged, foreign or old is passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.runtimes import zig
from nas.measure.runtimes.build_cache import BuildRequest, write_manifest
from nas.measure.runtimes.llama_cpp import runtime, source
from nas.measure.runtimes.llama_cpp.compile import RUNNER_FLAGS, TRIPLES, library_flags
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import LIBRARIES, TOOLS_SOURCE, VARIANTS, LlamaCppSpec
from nas.measure.runtimes.toolchain import host_target

AVX2 = ("sse4_2", "avx", "avx2", "fma", "f16c", "bmi2")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))


def put_build(name: str, variant: str, **changes: object) -> Path:
    folder = LLAMA_CPP.folder / name
    folder.mkdir(parents=True)
    for file in ("runner", *LIBRARIES):
        (folder / file).write_text(f"{name} {file}")
    target, static = str(changes.get("target", "x86_64-linux")), bool(changes.get("static"))
    instructions = next((entry for entry in VARIANTS if (entry.name, entry.target) == (variant, target)), VARIANTS[0])
    fields = {
        "version": source.COMMIT,
        "sdist": source.SHA256,
        "runner": LLAMA_CPP.source_hash(LLAMA_CPP.runner_sources),
        "runner_flags": RUNNER_FLAGS[static],
        "variant": variant,
        "target": target,
        "flags": library_flags(instructions, static=static, images=bool(changes.get("images"))),
        "compiler": zig.COMPILER if static else "cc",
    }
    spec = LlamaCppSpec.model_validate(fields | changes)
    write_manifest(folder, "llama.cpp", spec)
    return folder.rename(folder.with_name(spec.build_id))


def test_no_build_names_the_command() -> None:
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp"):
        LLAMA_CPP.runner("x86_64-linux", AVX2)


def test_best_build_that_the_device_can_run() -> None:
    for name, variant in (("a", "sse42"), ("b", "avx2"), ("c", "avx512")):
        put_build(name, variant)
    assert LLAMA_CPP.find_build("x86_64-linux", AVX2).spec.variant == "avx2"
    assert LLAMA_CPP.find_build("x86_64-linux", ["sse4_2"]).spec.variant == "sse42"
    with pytest.raises(InfrastructureFailed, match="aarch64-linux"):
        LLAMA_CPP.find_build("aarch64-linux", ["asimd"])


def test_tools_and_patches_are_asked_for() -> None:
    put_build("plain", "avx2")
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.find_build("x86_64-linux", AVX2, tools=True)
    with pytest.raises(InfrastructureFailed, match="patched"):
        LLAMA_CPP.find_build("x86_64-linux", AVX2, patched=True)
    put_build("other tools", "avx2", tools="0" * 64)
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.find_build("x86_64-linux", AVX2, tools=True)
    folder = put_build("tools", "avx2", tools=sha256_of(TOOLS_SOURCE))
    assert LLAMA_CPP.find_build("x86_64-linux", AVX2, tools=True).folder == folder


def test_patched_build_is_one_with_todays_patches() -> None:
    put_build("old", "avx2", patches=("0" * 64,))
    with pytest.raises(InfrastructureFailed, match="--patched"):
        LLAMA_CPP.find_build("x86_64-linux", AVX2, patched=True)
    put_build("patched", "avx2", patches=patch_hashes())
    assert LLAMA_CPP.find_build("x86_64-linux", AVX2, patched=True).runner.patched


@pytest.mark.parametrize("static", [False, True])
def test_flags_of_the_runner_are_in_the_build_id(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "aarch64-linux" if static else host_target()
    before = LLAMA_CPP.spec(BuildRequest(target, static=static))
    put_build("before", "avx2")
    compiling, linking = RUNNER_FLAGS[static]
    monkeypatch.setitem(RUNNER_FLAGS, static, ((*compiling, "-O3"), linking))
    after = LLAMA_CPP.spec(BuildRequest(target, static=static))
    assert after.build_id != before.build_id
    assert LlamaCppSpec.model_validate_json(after.model_dump_json()) == after
    if not static:
        with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp"):
            LLAMA_CPP.find_build("x86_64-linux", AVX2)


def test_ids_of_builds_stay_the_same() -> None:
    """Every cached result names its build by this hash: a new field of the spec must not change it."""
    fields = {
        "version": "1",
        "variant": "avx2",
        "target": "x86_64-linux",
        "compiler": "cc",
        "runner": "r",
        "sdist": "s",
    }
    spec = LlamaCppSpec.model_validate({**fields, "flags": ("-O2",), "runner_flags": (("-O2",), ("-lm",))})
    assert spec.build_id == "fa60eb2867050aa47f3d77870144a01d573e7caa6e625ad822572a3ecc67e138"


def test_the_id_of_a_static_build_has_the_name_of_a_processor_alone() -> None:
    """So another processor, or another target of zig, gets another name of the variant."""
    processors = {f"{variant.target} {variant.name}": variant.mcpu for variant in VARIANTS}
    assert content_hash([processors, TRIPLES]) == "763f3ebe12c3c03c08226ecc7c287fb30db483d06f5ca2ce9ea93ef240ad7a0f"
    for target in TRIPLES:
        assert LLAMA_CPP.spec(BuildRequest(target, static=True)).compiler == zig.COMPILER


def test_another_compiler_of_shaders_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, glslc = BuildRequest("x86_64-linux", variant="avx2-vulkan"), tmp_path / "bin" / "glslc"
    monkeypatch.setattr(runtime, "host_target", lambda: "x86_64-linux")
    plain = LLAMA_CPP.spec(BuildRequest("x86_64-linux", variant="avx2"))
    monkeypatch.setenv("PATH", str(glslc.parent), prepend=":")
    glslc.parent.mkdir()
    specs = []
    for version in ("2023.2", "2025.1"):
        glslc.write_text(f"#!/bin/sh\nprintf 'shaderc v{version}\\nspirv-tools v2023.1\\n'\n")
        glslc.chmod(0o755)
        specs.append(LLAMA_CPP.spec(request))
    assert specs[0].compiler == f"{plain.compiler}; glslc; shaderc v2023.2; spirv-tools v2023.1"
    assert specs[0].build_id != specs[1].build_id
    assert LLAMA_CPP.spec(BuildRequest("x86_64-linux", variant="avx2")) == plain


def test_a_missing_compiler_of_shaders_is_told_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "host_target", lambda: "x86_64-linux")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "glslc" else which(name, path=path))
    with pytest.raises(InfrastructureFailed, match=r"no glslc on this machine: install it, .*spirv-headers"):
        LLAMA_CPP.spec(BuildRequest("x86_64-linux", variant="avx2-vulkan"))


def test_a_static_build_has_no_gpu() -> None:
    with pytest.raises(InvalidInput, match="shared libraries only"):
        LLAMA_CPP.spec(BuildRequest("x86_64-linux", variant="avx2-vulkan", static=True))


def test_static_build_is_the_runner_alone() -> None:
    folder = put_build("phone", "armv8.2", target="aarch64-linux", static=True)
    for file in LIBRARIES:
        (folder / file).unlink()
    build = LLAMA_CPP.find_build("aarch64-linux", ["asimd", "asimddp", "fphp", "asimdhp"])
    assert list(build.runner.files) == ["runner"]


def test_missing_build_for_phones_names_the_command() -> None:
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp --patched --target aarch64-linux"):
        LLAMA_CPP.find_build("aarch64-linux", ["asimd"], patched=True)


@pytest.mark.parametrize(
    ("features", "option"),
    [
        ("asimd", " --variant armv8"),
        ("asimd asimddp fphp asimdhp", ""),
        ("asimd asimddp fphp asimdhp i8mm", " --variant armv8.2-i8mm"),
        ("asimd asimddp fphp asimdhp i8mm sve sve2", " --variant armv8.2-sve2"),
        ("asimd asimddp fphp asimdhp sve", ""),
    ],
)
def test_missing_build_is_named_for_the_phone(features: str, option: str) -> None:
    with pytest.raises(InfrastructureFailed) as caught:
        LLAMA_CPP.find_build("aarch64-linux", features.split())
    assert str(caught.value).endswith(f"run `nas runtime build llama.cpp --target aarch64-linux{option}`")


def test_best_build_that_a_phone_runs() -> None:
    everything = ["asimd", "asimddp", "fphp", "asimdhp", "i8mm", "sve", "sve2"]
    for name, variant in (("a", "armv8"), ("b", "armv8.2-i8mm"), ("c", "armv8.2")):
        put_build(name, variant, target="aarch64-linux", static=True)
    assert LLAMA_CPP.find_build("aarch64-linux", everything).variant == "armv8.2-i8mm"
    assert LLAMA_CPP.find_build("aarch64-linux", everything[:4]).variant == "armv8.2"
    assert LLAMA_CPP.find_build("aarch64-linux", everything[:1]).variant == "armv8"


@pytest.mark.parametrize("changes", [{"sdist": "0" * 64}, {"runner": "0" * 64}, {"variant": "quantum"}])
def test_build_of_another_version_is_passed_over(changes: dict[str, object]) -> None:
    put_build("old", **({"variant": "avx2"} | changes))  # type: ignore[arg-type]
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.find_build("x86_64-linux", AVX2)


@pytest.mark.parametrize("victim", ["libllama.so", "manifest.json", "build.json"])
def test_damaged_build_is_passed_over(victim: str) -> None:
    folder = put_build("bad", "avx2")
    (folder / victim).write_text("{")
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.find_build("x86_64-linux", AVX2)


def test_folder_of_a_build_that_is_gone() -> None:
    folder = put_build("gone", "avx2")
    runner = LLAMA_CPP.runner("x86_64-linux", AVX2)
    assert LLAMA_CPP.runner_folder(runner) == folder
    (folder / "manifest.json").unlink()
    with pytest.raises(InfrastructureFailed, match="nas runtime build"):
        LLAMA_CPP.runner_folder(runner)


def asks_for_glibc(folder: Path, *minors: int) -> None:
    """Makes the runner name symbols of these versions of glibc, as the dynamic section of a program does."""
    path = folder / "runner"
    names = b"".join(b"\0GLIBC_2.%d\0" % minor for minor in minors)
    path.write_bytes(b"\x7fELF" + names + b" " * (path.stat().st_size))
    write_manifest(folder, "llama.cpp", LlamaCppSpec.model_validate_json((folder / "build.json").read_bytes()))


def test_a_device_with_an_older_c_library_gets_a_static_build() -> None:
    shared = put_build("shared", "avx2")
    asks_for_glibc(shared, 17, 34, 2)
    with pytest.raises(InfrastructureFailed) as failure:
        LLAMA_CPP.find_build("x86_64-linux", AVX2, libc="glibc 2.31")
    assert "need glibc 2.34 or newer, and the device has glibc 2.31" in str(failure.value)
    assert f"`{LLAMA_CPP.build_command('x86_64-linux', False, 'avx2', static=True)}`" in str(failure.value)
    static = put_build("static", "avx2", static=True)
    for libc in ("glibc 2.31", "bionic"):
        assert LLAMA_CPP.find_build("x86_64-linux", AVX2, libc=libc).folder == static
    for libc in ("glibc 2.34", "glibc 2.41"):
        assert LLAMA_CPP.find_build("x86_64-linux", AVX2, libc=libc).folder == shared


def test_a_device_that_does_not_tell_its_c_library_gets_what_needs_none_if_there_is_one() -> None:
    shared = put_build("shared", "avx2")
    asks_for_glibc(shared, 34)
    assert LLAMA_CPP.find_build("x86_64-linux", AVX2).folder == shared
    static = put_build("static", "sse42", static=True)
    assert LLAMA_CPP.find_build("x86_64-linux", AVX2).folder == static


def test_nothing_here_uses_a_static_build() -> None:
    """Its libraries cannot be loaded, and this machine has what it was built with."""
    variant = next(variant for variant in reversed(VARIANTS) if variant.target == host_target())
    put_build("static", variant.name, target=host_target(), static=True)
    with pytest.raises(InfrastructureFailed, match=r"no llama.cpp build for"):
        LLAMA_CPP.find_build()


def test_another_kind_of_machine_without_features_is_a_plain_one() -> None:
    target = "aarch64-linux" if host_target() == "x86_64-linux" else "x86_64-linux"
    newest, *_, oldest = (variant.name for variant in VARIANTS if variant.target == target)
    put_build("new", newest, target=target, static=True)
    with pytest.raises(InfrastructureFailed, match=rf"\(any, with .*--target {target} --variant {oldest}"):
        LLAMA_CPP.find_build(target)
    plain = put_build("old", oldest, target=target, static=True)
    assert LLAMA_CPP.find_build(target).folder == plain
