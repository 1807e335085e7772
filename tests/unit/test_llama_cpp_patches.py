"""The patch fits the pinned source; a diff is applied exactly or not at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp.patches import apply_patches, patch_files, patch_hashes
from nas.runtimes.llama_cpp.patches.diff import apply_diff, read_diff

OLD = "".join(f"line {n}\n" for n in range(1, 31))
ODD = ("-- c\n", "++ d\n", "@@ -1 +1 @@\n", "\f\u2028g\r\n")
LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", *ODD]), max_size=30)


def made_by_diff(old: str, new: str, folder: Path) -> Path:
    """What diff(1) says about two texts, as a patch of src/x.c."""
    (folder / "old").write_text(old, newline="")
    (folder / "new").write_text(new, newline="")
    argv = ["diff", "-u", "--label", "a/src/x.c", "--label", "b/src/x.c", "old", "new"]
    (folder / "x.patch").write_bytes(subprocess.run(argv, cwd=folder, capture_output=True, timeout=30).stdout)
    return folder / "x.patch"


def tree_with(content: str, folder: Path) -> Path:
    shutil.rmtree(folder / "tree", ignore_errors=True)
    (folder / "tree" / "src").mkdir(parents=True)
    (folder / "tree" / "src" / "x.c").write_text(content, newline="")
    return folder / "tree"


@given(LINES, LINES)
def test_does_what_diff_says(tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]) -> None:
    folder = tmp_path_factory.mktemp("diff")
    patch, tree = made_by_diff("".join(old), "".join(new), folder), tree_with("".join(old), folder)
    apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_bytes().decode() == "".join(new)


def test_moved_text_is_refused_and_nothing_written(tmp_path: Path) -> None:
    patch = made_by_diff(OLD, OLD.replace("line 3\n", "").replace("line 25\n", "new\n"), tmp_path)
    tree = tree_with("one more\n" + OLD, tmp_path)
    with pytest.raises(InfrastructureFailed, match=r"x\.patch does not fit the source: src/x\.c: other text at line 1"):
        apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_text() == "one more\n" + OLD


def test_missing_file_is_told(tmp_path: Path) -> None:
    patch, tree = made_by_diff(OLD, OLD + "more\n", tmp_path), tree_with(OLD, tmp_path)
    (tree / "src" / "x.c").unlink()
    with pytest.raises(InfrastructureFailed, match=r"no src/x\.c there"):
        apply_diff(patch, tree)


def test_new_file(tmp_path: Path) -> None:
    (tmp_path / "new.patch").write_text("--- /dev/null\n+++ b/y.c\n@@ -0,0 +1,2 @@\n+one\n+two\n")
    apply_diff(tmp_path / "new.patch", tmp_path)
    assert (tmp_path / "y.c").read_text() == "one\ntwo\n"


def test_patches_are_packaged_and_named() -> None:
    assert [path.name for path in patch_files()] == ["0001-hilnas.patch"]
    assert len(patch_hashes()) == 1


def test_only_source_files_are_touched() -> None:
    names = [name for path in patch_files() for name, _ in read_diff(path)]
    assert "src/models/hilnas.cpp" in names
    assert all(name.startswith("src/") for name in names)


def test_other_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "llama-arch.cpp").write_text("int main() {}\n")
    with pytest.raises(InfrastructureFailed, match=r"0001-hilnas\.patch does not fit the source"):
        apply_patches(tmp_path)
