"""Available builds are found by what the device can run; what is damaged, foreign or old is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.compile import _details
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import (
    BUILDS,
    LIBRARIES,
    RUNNER_FLAGS,
    VARIANTS,
    BuildDetails,
    build_command,
    find_build,
    tools_hash,
)
from nas.measure.runtimes.toolchain import host_target

AVX2 = ("sse4_2", "avx", "avx2", "fma", "f16c", "bmi2")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))


def put_build(name: str, variant: str, **changes: object) -> Path:
    folder = BUILDS.folder / name
    folder.mkdir(parents=True)
    for file in ("runner", *LIBRARIES):
        (folder / file).write_text(f"{name} {file}")
    fields = {
        "sdist": source.SHA256,
        "runner_c": BUILDS.runner_hash(),
        "variant": variant,
        "target": "x86_64-linux",
        "flags": (),
        "compiler": "cc",
        "tools": False,
    }
    BUILDS.describe(folder, BuildDetails.model_validate(fields | changes), name)
    return folder


def test_no_build_names_the_command() -> None:
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp"):
        LLAMA_CPP.runner("x86_64-linux", AVX2)


def test_best_build_that_the_device_can_run() -> None:
    for name, variant in (("a", "sse42"), ("b", "avx2"), ("c", "avx512")):
        put_build(name, variant)
    assert find_build("x86_64-linux", AVX2).details.variant == "avx2"
    assert find_build("x86_64-linux", ["sse4_2"]).details.variant == "sse42"
    with pytest.raises(InfrastructureFailed, match="aarch64-linux"):
        find_build("aarch64-linux", ["asimd"])


def test_tools_and_patches_are_asked_for() -> None:
    put_build("plain", "avx2")
    with pytest.raises(InfrastructureFailed):
        find_build("x86_64-linux", AVX2, tools=True)
    with pytest.raises(InfrastructureFailed, match="patched"):
        find_build("x86_64-linux", AVX2, patched=True)
    put_build("other tools", "avx2", tools=True)
    with pytest.raises(InfrastructureFailed):
        find_build("x86_64-linux", AVX2, tools=True)
    put_build("tools", "avx2", tools=True, tools_cmake=tools_hash())
    assert find_build("x86_64-linux", AVX2, tools=True).runner.build == "tools"


def test_patched_build_is_one_with_todays_patches() -> None:
    put_build("old", "avx2", patches=("0" * 64,))
    with pytest.raises(InfrastructureFailed, match="--patched"):
        find_build("x86_64-linux", AVX2, patched=True)
    put_build("patched", "avx2", patches=patch_hashes())
    assert find_build("x86_64-linux", AVX2, patched=True).runner.patched


@pytest.mark.parametrize("static", [False, True])
def test_flags_of_the_runner_are_in_the_build_id_unless_they_are_the_first_ones(
    static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "aarch64-linux" if static else host_target()
    old = _details(target, False, None, False, static)
    assert "runner_flags" not in old.model_dump(mode="json")
    put_build("old", "avx2")
    compiling, linking = RUNNER_FLAGS[static]
    monkeypatch.setitem(RUNNER_FLAGS, static, ((*compiling, "-O3"), linking))
    new = _details(target, False, None, False, static)
    assert "-O3" in new.model_dump(mode="json")["runner_flags"][0]
    assert BuildDetails.model_validate_json(new.model_dump_json()) == new
    if not static:
        with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp"):
            find_build("x86_64-linux", AVX2)


def test_static_build_is_the_runner_alone() -> None:
    folder = put_build("phone", "armv8.2", target="aarch64-linux", static=True)
    for file in LIBRARIES:
        (folder / file).unlink()
    found = find_build("aarch64-linux", ["asimd", "asimddp", "fphp", "asimdhp"])
    assert list(found.runner.files) == ["runner"]


def test_missing_build_for_phones_names_the_command() -> None:
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp --patched --target aarch64-linux"):
        find_build("aarch64-linux", ["asimd"], patched=True)


@pytest.mark.parametrize("changes", [{"sdist": "0" * 64}, {"runner_c": "0" * 64}, {"variant": "quantum"}])
def test_build_of_another_version_is_passed_over(changes: dict[str, object]) -> None:
    put_build("old", **({"variant": "avx2"} | changes))  # type: ignore[arg-type]
    with pytest.raises(InfrastructureFailed):
        find_build("x86_64-linux", AVX2)


@pytest.mark.parametrize("victim", ["libllama.so", "manifest.json", "build.json"])
def test_damaged_build_is_passed_over(victim: str) -> None:
    folder = put_build("bad", "avx2")
    (folder / victim).write_text("{")
    with pytest.raises(InfrastructureFailed):
        find_build("x86_64-linux", AVX2)


def test_folder_of_a_build_that_is_gone() -> None:
    folder = put_build("gone", "avx2")
    runner = LLAMA_CPP.runner("x86_64-linux", AVX2)
    assert LLAMA_CPP.runner_folder(runner) == folder
    (folder / "manifest.json").unlink()
    with pytest.raises(InfrastructureFailed, match="nas runtime build"):
        LLAMA_CPP.runner_folder(runner)


def asks_for_glibc(folder: Path, *minors: int) -> None:
    """As the dynamic section of a program does."""
    path = folder / "runner"
    names = b"".join(b"\0GLIBC_2.%d\0" % minor for minor in minors)
    path.write_bytes(b"\x7fELF" + names + b" " * (path.stat().st_size))
    details = BuildDetails.model_validate_json((folder / "build.json").read_bytes())
    BUILDS.describe(folder, details, folder.name)


def test_a_device_with_an_older_c_library_gets_a_static_build() -> None:
    asks_for_glibc(put_build("shared", "avx2"), 17, 34, 2)
    with pytest.raises(InfrastructureFailed) as told:
        find_build("x86_64-linux", AVX2, libc="glibc 2.31")
    assert "need glibc 2.34 or newer, and the device has glibc 2.31" in str(told.value)
    assert f"`{build_command('x86_64-linux', False, 'avx2', static=True)}`" in str(told.value)
    put_build("static", "avx2", static=True)
    for libc in ("glibc 2.31", "bionic"):
        assert find_build("x86_64-linux", AVX2, libc=libc).runner.build == "static"
    for libc in ("glibc 2.34", "glibc 2.41"):
        assert find_build("x86_64-linux", AVX2, libc=libc).runner.build == "shared"


def test_a_device_that_does_not_tell_its_c_library_gets_what_needs_none_if_there_is_one() -> None:
    asks_for_glibc(put_build("shared", "avx2"), 34)
    assert find_build("x86_64-linux", AVX2).runner.build == "shared"
    put_build("static", "sse42", static=True)
    assert find_build("x86_64-linux", AVX2).runner.build == "static"


def test_nothing_here_uses_a_static_build() -> None:
    """Its libraries cannot be loaded, and this machine has what it was built with."""
    variant = next(each for each in VARIANTS if each.target == host_target())
    put_build("static", variant.name, target=host_target(), static=True)
    with pytest.raises(InfrastructureFailed, match=r"no llama.cpp build for"):
        find_build()


def test_another_kind_of_machine_without_features_is_a_plain_one() -> None:
    target = "aarch64-linux" if host_target() == "x86_64-linux" else "x86_64-linux"
    newest, *_, oldest = (each.name for each in VARIANTS if each.target == target)
    put_build("new", newest, target=target, static=True)
    with pytest.raises(InfrastructureFailed, match=rf"\(any, with .*--target {target} --variant {oldest}"):
        find_build(target)
    put_build("old", oldest, target=target, static=True)
    assert find_build(target).runner.build == "old"
