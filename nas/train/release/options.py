"""Options of a member's files: what is written, and what the model card contains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import Family, MeasuredModel, Member, MemberFiles
from nas.measure.runtimes.llama_cpp.support import stored_types
from nas.train.release.tokenizer import MemberTokenizer

Dtype = Literal["float16", "bfloat16", "float32"]
QUANTISATIONS = ("q4_0", "f16", "q8_0", "q4_k_m", "f32")

DEFAULT_CONTEXT = 32768
DEFAULT_PTE_CONTEXT = 2048

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,99}")


@dataclass(frozen=True)
class FileOptions:
    """Files to write for a member, and the content of its model card.

    Args:
        name: of the files; None: that of the member's folder.
        tokenizer: a tokenizer.json of the family, or the tokenizer itself; None: tokens are bytes.
        dtype: of the matrices in the transformers folder. With float16 they equal those of the F16 GGUF file.
        transformers: whether to write the transformers folder.
        gguf: quantisations of the GGUF files.
        pte_context: maximum tokens of a text in the .pte; None: no .pte.
        pte: quantisation of the .pte; None: the runtime's default.
        context: tokens that the model is meant for.
        shard_bytes: maximum size of a safetensors file; the default is transformers' own.
        license: identifier of the licence, such as "apache-2.0"; None: left open.
        measured: content of the card's table.
        budgets: limits of the search, such as "peak RSS at 4K" -> "700 MB".
        provenance: origin of the model: family, study, seed, versions.
    """

    name: str | None = None
    tokenizer: Path | MemberTokenizer | None = None
    dtype: Dtype = "float16"
    transformers: bool = True
    gguf: tuple[str, ...] = ("q4_0", "f16", "q8_0", "q4_k_m")
    pte_context: int | None = None
    pte: str | None = None
    context: int = DEFAULT_CONTEXT
    shard_bytes: int = 50 * 10**9
    license: str | None = None
    measured: tuple[MeasuredModel, ...] = ()
    budgets: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def checked_name(self, folder: Path) -> str:
        """Returns the name of the files.

        Raises:
            InvalidInput: it cannot name files, or another option cannot be used.
        """
        name = self.name or folder.name
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name files: letters, digits and . _ - only")
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise InvalidInput(f"{self.license!r} is no identifier of a licence, such as apache-2.0", where="--license")
        for quantisation in self.gguf:
            if quantisation not in QUANTISATIONS:
                stored_types(quantisation)
        if self.dtype not in get_args(Dtype):
            raise UnknownName("type of weights", self.dtype, get_args(Dtype))
        return name

    def of_member(self, family: Family, member: Member, seed: int | None = None) -> FileOptions:
        """Returns these options with what they say of a member; `seed`: of random weights, None for trained ones."""
        origin = {"family": family.name, "study": family.study or "given layouts"}
        return replace(
            self,
            name=f"{family.name}-{member.size}",
            measured=member.measured,
            budgets={d.what: f"{d.value}: {d.reason}" for d in member.decisions if d.what == "weights"},
            provenance={**origin, **({} if seed is None else {"seed": str(seed)}), **family.provenance},
        )

    def of_runtime(self, runtime: str) -> tuple[tuple[str, ...] | None, int] | None:
        """Returns quantisations (None: the runtime's default) and tokens of a text; None: no files are requested."""
        if runtime == "llama.cpp":
            return self.gguf, self.context
        if runtime == "executorch":
            return ((self.pte,) if self.pte else None, self.pte_context) if self.pte_context is not None else None
        return None, self.context


def kept_options(
    before: MemberFiles | None,
    context: int | None,
    pte: bool | None,
    pte_context: int | None,
    license: str | None = None,
) -> FileOptions:
    """Returns the options for rewriting a member's files; None keeps the value of the files `before`."""
    earlier_pte = before.pte_context if before else None
    has_pte = earlier_pte is not None if pte is None else pte
    return FileOptions(
        context=context or (before.context if before else None) or DEFAULT_CONTEXT,
        pte_context=(pte_context or earlier_pte or DEFAULT_PTE_CONTEXT) if has_pte else None,
        license=license or (before.license if before else None),
    )
