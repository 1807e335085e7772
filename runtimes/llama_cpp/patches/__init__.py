"""Our changes to the pinned source of llama.cpp, one unified diff each, applied in the order of their names.

0001-hilnas.patch adds the architecture `hilnas`: lfm2's graph with sizes read per layer, Mamba-2 as one more mixer, and
sliding windows with sinks. Files of stock architectures load and compute as before. It also lets lfm2 run without a
convolution or without an attention layer, whose empty cache has no buffers that inputs could be written to.

0002-linear-attention.patch adds gated linear mixers to it: Gated DeltaNet and gated linear attention, on ggml's own
operators.

0003-latent-attention.patch adds multi-head latent attention with a cache of latents (deepseek2's absorbed graph, per
layer), a convolution in front of attention whose window is a recurrent state, squared ReLU, and shared experts.

0004-mlstm.patch adds mLSTM on ggml's scan of Mamba-2: a head's decay is sigmoid(f) = exp(-softplus(-f)), its values are
weighed by the input gate, and one more number a value, always 1, collects the sum of keys.

0005-layers.patch lets a layer read another one's cache or run another one's weights, have a recurrent mixer and
attention in parallel, or lack a mixer or a feed-forward.

0006-arguments.patch adds what published models have besides: gates and biases of attention, RoPE that is scaled or on a
part of a head, QK-norm over all heads, bounds of scores and logits, norms behind blocks, GELU gates, gated shared
experts, experts whose weights do not add up to one, and an epsilon of Gated DeltaNet's own.

Patches of other distributions' blocks (`nas.measure.runtimes.llama_cpp.kinds`) follow.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.measure.runtimes.llama_cpp.kinds import KINDS

VULKAN_HEADERS = Path(__file__).parent / "vulkan" / "headers.patch"
"""For builds with Vulkan only: settings of the validation layer, which no build of ours turns on, need Vulkan's headers
of 1.3.272 (December 2023), and Debian 12 has 1.3.239."""
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NOTHING = "/dev/null"


def patch_files() -> list[Path]:
    """Returns the diffs, first to last."""
    further = {kind.patch for kind in KINDS.values() if kind.patch}
    return [*sorted(Path(__file__).parent.glob("*.patch")), *sorted(further)]


def patch_hashes() -> tuple[str, ...]:
    """Returns the SHA-256 of each, part of a patched build's id."""
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in patch_files())


def apply_patches(tree: Path) -> None:
    """Applies all of them to an unpacked source tree; raises `InfrastructureFailed` for another source."""
    for path in patch_files():
        apply_diff(path, tree)


def apply_diff(patch: Path, tree: Path) -> None:
    """Changes the files below `tree` exactly as `patch` says, all of them or none.

    Args:
        patch: a diff whose names start with one folder, as `git diff` writes them ("a/src/x.cpp", "b/src/x.cpp").
        tree: the folder that is meant by it; every line of context must be there, though not at the same number.

    Raises:
        InfrastructureFailed: a hunk does not fit.
    """
    contents: dict[str, str | None] = {}
    for change in _changes(_LINE.findall(patch.read_bytes().decode())):
        try:
            old = [] if change.old == _NOTHING else _LINE.findall((tree / change.old).read_bytes().decode())
            new = "".join(change.applied(old))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InfrastructureFailed(f"{patch.name} does not fit the source: {change.old}: {why}") from error
        removed = change.new == _NOTHING
        contents[change.old if removed else change.new] = None if removed else new
    for name, content in contents.items():
        if content is None:
            (tree / name).unlink()
        else:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(content.encode())


@dataclass(slots=True)
class _Hunk:
    """Lines `before` from number `at` on, which `after` replaces."""

    at: int
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Change:
    """What a diff says about one file."""

    old: str
    new: str
    hunks: list[_Hunk] = field(default_factory=list)

    def applied(self, lines: list[str]) -> list[str]:
        """Returns the new content of a file.

        Raises:
            ValueError: a hunk does not fit.
        """
        lines, done, shift = list(lines), 0, 0
        for hunk in self.hunks:
            size, expected = len(hunk.before), max(hunk.at - 1, 0) + shift
            fitting = [at for at in range(done, len(lines) - size + 1) if lines[at : at + size] == hunk.before]
            if not fitting:
                raise ValueError(f"no such lines as from {hunk.at} on")
            at = min(fitting, key=lambda at: abs(at - expected))
            lines[at : at + size] = hunk.after
            done, shift = at + len(hunk.after), shift + at - expected + len(hunk.after) - size
        return lines


def _changes(lines: list[str]) -> Iterator[_Change]:
    """Yields the changes of a unified diff; lines between them ("diff --git", "index") mean nothing."""
    change, at = None, 0
    while at < len(lines):
        if lines[at].startswith("--- "):
            if change:
                yield change
            change, at = _Change(_name(lines[at]), _name(lines[at + 1])), at + 2
        elif change and (match := _HUNK.match(lines[at])):
            hunk = _Hunk(int(match[1]))
            change.hunks.append(hunk)
            at = _read(hunk, lines, at + 1, int(match[2] or 1), int(match[3] or 1))
        else:
            at += 1
    if change:
        yield change


def _read(hunk: _Hunk, lines: list[str], at: int, before: int, after: int) -> int:
    """Reads a hunk of so many lines; returns the number of the first line behind it."""
    sides: list[list[str]] = []
    while at < len(lines) and (len(hunk.before) < before or len(hunk.after) < after or lines[at].startswith("\\")):
        sign, rest = lines[at][0], lines[at][1:]
        if sign == "\\":  # "\ No newline at end of file"
            for side in sides:
                side[-1] = side[-1].removesuffix("\n")
        else:
            sides = [hunk.before] * (sign != "+") + [hunk.after] * (sign != "-")
            for side in sides:
                side.append(rest)
        at += 1
    return at


def _name(line: str) -> str:
    """Returns the file that a line such as "--- a/src/x.cpp" names."""
    name = line[4:].split("\t")[0].strip()
    return name if name == _NOTHING else name.partition("/")[2]
