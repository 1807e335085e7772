"""The patch fits the pinned source; a diff is applied exactly or not at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed
from nas.measure.runtimes.llama_cpp.patches import apply_diff, apply_patches, patch_files, patch_hashes

OLD = "".join(f"line {n}\n" for n in range(1, 31))


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


def test_does_what_diff_says(tmp_path: Path) -> None:
    new = OLD.replace("line 3\n", "").replace("line 25\n", "new\n-- c\n@@ -1 +1 @@\n")
    patch, tree = made_by_diff(OLD, new, tmp_path), tree_with(OLD, tmp_path)
    apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_text() == new


def test_other_text_is_refused_and_nothing_written(tmp_path: Path) -> None:
    patch = made_by_diff(OLD, OLD.replace("line 3\n", "").replace("line 25\n", "new\n"), tmp_path)
    tree = tree_with(other := OLD.replace("line 24\n", "changed\n"), tmp_path)
    with pytest.raises(InfrastructureFailed, match=r"(?s)x\.patch does not fit the source.*src/x\.c"):
        apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_text() == other


def test_lines_that_moved_are_found(tmp_path: Path) -> None:
    """A patch of another distribution does not know what ours inserted before its own lines."""
    patch = made_by_diff(OLD, OLD.replace("line 3\n", "new\n").replace("line 25\n", ""), tmp_path)
    before = "".join(f"more {n}\n" for n in range(7))
    tree = tree_with(before + OLD, tmp_path)
    apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_text() == before + OLD.replace("line 3\n", "new\n").replace("line 25\n", "")


@pytest.mark.parametrize(
    ("old", "new"), [("a\nb", "a\nb\n"), ("a\nb\n", "a\nb"), ("a\nb", "a\nc"), ("a\r\n\fb\n", "a\r\n\fc")]
)
def test_ends_of_lines_are_kept(tmp_path: Path, old: str, new: str) -> None:
    patch, tree = made_by_diff(old, new, tmp_path), tree_with(old, tmp_path)
    apply_diff(patch, tree)
    assert (tree / "src" / "x.c").read_bytes() == new.encode()


def test_missing_file_is_told(tmp_path: Path) -> None:
    patch, tree = made_by_diff(OLD, OLD + "more\n", tmp_path), tree_with(OLD, tmp_path)
    (tree / "src" / "x.c").unlink()
    with pytest.raises(InfrastructureFailed, match=r"src/x\.c: No such file"):
        apply_diff(patch, tree)


def test_new_file(tmp_path: Path) -> None:
    (tmp_path / "new.patch").write_text("--- /dev/null\n+++ b/y.c\n@@ -0,0 +1,2 @@\n+one\n+two\n")
    apply_diff(tmp_path / "new.patch", tmp_path)
    assert (tmp_path / "y.c").read_text() == "one\ntwo\n"


def test_removed_file(tmp_path: Path) -> None:
    tree = tree_with("one\n", tmp_path)
    (tmp_path / "x.patch").write_text("--- a/src/x.c\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n")
    apply_diff(tmp_path / "x.patch", tree)
    assert not (tree / "src" / "x.c").exists()


def test_patches_are_packaged_and_named() -> None:
    names = [
        "0001-hilnas.patch",
        "0002-linear-attention.patch",
        "0003-latent-attention.patch",
        "0004-mlstm.patch",
        "0005-layers.patch",
        "0006-arguments.patch",
    ]
    assert [path.name for path in patch_files()] == names
    assert len(patch_hashes()) == 6


def test_only_source_files_are_touched() -> None:
    lines = [line for path in patch_files() for line in path.read_text().splitlines() if line.startswith("+++ ")]
    names = [line.removeprefix("+++ b/") for line in lines]
    assert "src/models/hilnas.cpp" in names
    assert all(name.startswith("src/") for name in names)


def test_other_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "llama-arch.cpp").write_text("int main() {}\n")
    with pytest.raises(InfrastructureFailed, match=r"0001-hilnas\.patch does not fit the source"):
        apply_patches(tmp_path)
