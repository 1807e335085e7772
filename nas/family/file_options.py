"""What is written for a member."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import Measured, MemberFiles

Dtype = Literal["float16", "bfloat16", "float32"]
QUANTISATIONS = ("q4_0", "f16", "q8_0", "q4_k_m", "f32")

DEFAULT_CONTEXT, DEFAULT_PTE_CONTEXT = 32768, 2048

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class FileOptions:
    """What is written for a member, and what its card says.

    Args:
        name: what files are called; None: as the member's folder.
        tokenizer: a tokenizer.json; None: tokens are bytes.
        dtype: of the matrices in the transformers folder. With float16 they are the numbers of the F16 GGUF file.
        transformers: whether to write the transformers folder.
        gguf: quantisations to write GGUF files of.
        pte_context: most tokens of a text in the .pte; None: no .pte.
        context: tokens that the model is meant for.
        shard_bytes: most bytes of a safetensors file; transformers' own limit.
        measured: what the card's table shows.
        budgets: what the search allowed, such as "peak RSS at 4K" -> "700 MB".
        provenance: where the model comes from: family, study, seed, versions.
    """

    name: str | None = None
    tokenizer: Path | None = None
    dtype: Dtype = "float16"
    transformers: bool = True
    gguf: tuple[str, ...] = ("q4_0", "f16", "q8_0", "q4_k_m")
    pte_context: int | None = None
    context: int = DEFAULT_CONTEXT
    shard_bytes: int = 50 * 10**9
    measured: tuple[Measured, ...] = ()
    budgets: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def checked_name(self, folder: Path) -> str:
        """What files are called.

        Raises:
            InvalidInput: it is no name of a file, or another option cannot be used.
        """
        name = self.name or folder.name
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name files: letters, digits and . _ - only")
        for quantisation in self.gguf:
            if quantisation not in QUANTISATIONS:
                raise UnknownName("quantisation of GGUF files", quantisation, QUANTISATIONS)
        if self.dtype not in get_args(Dtype):
            raise UnknownName("type of weights", self.dtype, get_args(Dtype))
        return name


def kept_options(
    before: MemberFiles | None, context: int | None, pte: bool | None, pte_context: int | None
) -> FileOptions:
    """What is written for a member again: what is not said stays as it was asked for before.

    Args:
        before: its files; None: it has none.
        context: tokens that it is meant for.
        pte: whether to write a .pte.
        pte_context: most tokens of a text in it.
    """
    known = before.context if before else None
    known_pte = before.pte_context if before else None
    wanted = known_pte is not None if pte is None else pte
    return FileOptions(
        context=context or known or DEFAULT_CONTEXT,
        pte_context=(pte_context or known_pte or DEFAULT_PTE_CONTEXT) if wanted else None,
    )
