"""Our changes to the pinned source of llama.cpp, one unified diff each, applied in the order of their names.

0001-hilnas.patch adds the architecture `hilnas`: lfm2's graph with sizes read per layer, Mamba-2 as one more mixer, and
sliding windows with sinks. Files of stock architectures load and compute as before. It also lets lfm2 run without a
convolution or without an attention layer, whose empty cache has no buffers that inputs could be written to.

Patches of other distributions' blocks (`nas.runtimes.llama_cpp.kinds`) follow.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp.kinds import KINDS
from nas.runtimes.toolchain import build_environment, stream

_PATCH_S = 60.0


def patch_files() -> list[Path]:
    """Returns the diffs, first to last."""
    further = {kind.patch for kind in KINDS.values() if kind.patch}
    return [*sorted(Path(__file__).parent.glob("*.patch")), *sorted(further)]


def patch_hashes() -> tuple[str, ...]:
    """Returns the SHA-256 of each, part of a patched build's id."""
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in patch_files())


def apply_patches(tree: Path) -> None:
    """Applies all of them to an unpacked source tree.

    Raises:
        InfrastructureFailed: `git` is missing, or the tree is not the source that a patch was made for.
    """
    for path in patch_files():
        apply_diff(path, tree)


def apply_diff(patch: Path, tree: Path) -> None:
    """Changes the files below `tree` exactly as `patch` says, all of them or none.

    Args:
        patch: a diff whose names start with one folder, as `git diff` writes them ("a/src/x.cpp", "b/src/x.cpp").
        tree: the folder that is meant by it; every line of context must be there.

    Raises:
        InfrastructureFailed: `git` is missing, or a hunk does not fit.
    """
    git = shutil.which("git")
    if git is None:
        raise InfrastructureFailed("no git on this machine to patch llama.cpp with: install the package git")
    # A repository around the tree would make git skip files outside of its index.
    environment = build_environment() | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    argv = [git, "apply", "--whitespace=nowarn", str(patch.resolve())]
    code, tail = stream(argv, deadline_s=_PATCH_S, env=environment, cwd=tree)
    if code != 0:
        raise InfrastructureFailed(f"{patch.name} does not fit the source:\n{tail}")
