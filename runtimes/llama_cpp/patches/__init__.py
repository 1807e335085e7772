"""Our changes to the pinned source of llama.cpp, one unified diff each, applied in the order of their names.

0001-hilnas.patch adds the architecture `hilnas`: lfm2's graph with sizes read per layer, Mamba-2 as one more mixer, and
sliding windows with sinks. Files of stock architectures load and compute as before. It also lets lfm2 run without a
convolution or without an attention layer, whose empty cache has no buffers that inputs could be written to.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from nas.runtimes.llama_cpp.patches.diff import apply_diff


def patch_files() -> list[Path]:
    """The diffs, first to last."""
    return sorted(Path(__file__).parent.glob("*.patch"))


def patch_hashes() -> tuple[str, ...]:
    """SHA-256 of each, part of a patched build's id."""
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in patch_files())


def apply_patches(tree: Path) -> None:
    """Applies all of them to an unpacked source tree.

    Raises:
        InfrastructureFailed: the tree is not the source that a patch was made for.
    """
    for path in patch_files():
        apply_diff(path, tree)
