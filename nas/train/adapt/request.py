"""What `nas adapt` is asked to do: the keys of its settings file, which options of the command override."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from nas.core import paths
from nas.core.errors import InvalidInput, Unsupported
from nas.core.quantisation import Quantisation
from nas.core.strict import StrictKeys
from nas.core.workload import MAX_CONTEXT, MAX_GEN, Workload
from nas.measure.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nas.measure.runtimes.base import BlockRoundingRuntime
from nas.model.nn.fit import Precision
from nas.search.spaces.problems import describe
from nas.search.spaces.yaml_text import Document, read_yaml
from nas.train.adapt.healing import Healing
from nas.train.adapt.library import LibrarySettings

_REQUIRED = {"model": "MODEL", "budget": "--budget", "corpus": "--corpus", "output": "--output"}
"""Key -> the command's argument or option."""
_SCORE_LENGTH = 2048
"""Most tokens of a window of scores that nothing names: its attention costs time and memory by the square."""
_QUANTISATION = "--quantisation"
_RECORDED = {"device", "runtime", "quantisation", "hours", "prompt", "gen", "threads", "reps"}
"""Keys that the child depends on, besides those of `AdaptSettings`."""


class AdaptSettings(StrictKeys):
    """Settings that the child depends on, besides model, text, budgets and device."""

    library: LibrarySettings = LibrarySettings()
    healing: Healing = Healing()
    window: int = Field(128, ge=2, description="of sliding windows among the alternatives")
    mixers: tuple[str, ...] = Field((), description="further alternatives for attention, in one-line form")
    alternatives: tuple[str, ...] = Field(
        (), description="kinds of blocks that may replace trained ones, '-' for leaving them out; none named: all"
    )
    recall: float = Field(
        0.0, ge=0, description="weight of the divergence at generated answers, beside 1 of that over all held-out text"
    )
    pairs: int = Field(0, ge=0, description="pairs of mixers in neighbouring layers whose terms are computed, at most")
    own_text: int = Field(
        0, ge=0, description="tokens of conversations that the model writes itself, beside those of the corpus"
    )
    points: int = Field(5, ge=2, description="of the front")
    report_tokens: int = Field(
        1 << 17, ge=1024, description="held-out tokens that bits per byte are computed on, at most"
    )
    held_out: float = Field(0.05, gt=0, lt=0.5, description="share of the text that is never trained on")


class AdaptRequest(AdaptSettings):
    """One adaptation of a trained model to budgets.

    Example:
        >>> AdaptRequest(model=Path("lfm2"), budget=("decode_p50<=20ms",), corpus=(Path("texts"),), output=Path("out"))
    """

    model: Path = Field(description="GGUF file, folder of transformers, or a checkpoint that names its layout")
    budget: tuple[str, ...] = Field(description="limits that the child keeps, such as decode_p50<=20ms")
    corpus: tuple[Path, ...] = Field((), description="files and folders of text; required without own_text")
    output: Path = Field(description="folder of results")
    device: str = Field("local", description="id, unique start of an id, or tag:NAME; local: this machine")
    runtime: str = DEFAULT_RUNTIME
    quantisation: Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)
    ] = Field(None, description="of the files: one, or several to choose from at each place; none: the runtime's first")
    tokenizer: Path | None = Field(None, description="tokenizer.json or GGUF file; none: the model's own")
    hours: float | None = Field(
        None, gt=0, description="that the whole takes: tokens of library and healing are scaled to it"
    )
    library_folder: Path = Field(
        default_factory=lambda: paths.home() / "library", description="library of trained blocks"
    )
    workers: int = Field(1, ge=1, description="processes of this machine that train the library")
    ray_address: str | None = Field(None, description="address of a Ray cluster that trains the library")
    prompt: int = Field(512, ge=16, le=MAX_CONTEXT, description="prompt length in tokens")
    gen: int = Field(128, ge=1, le=MAX_GEN, description="tokens to generate per repetition")
    threads: int = Field(1, ge=1, le=1024, description="number of compute threads")
    reps: int = Field(5, ge=2, description="number of valid repetitions")
    gguf: tuple[str, ...] = Field(("q4_0", "f16"), description="quantisations of the GGUF files")
    pte: bool = Field(False, description="whether a .pte for ExecuTorch is written")
    front: int = Field(0, ge=0, le=32, description="further children of the front that are healed")
    write_space: Path | None = Field(None, description="search space that is written instead of a child")
    mixes: int = Field(256, ge=4, description="layouts of that space, or fewer where there are no more")
    db: str | None = Field(None, description="database URL; none: SQLite in $NAS_HOME")

    @property
    def workload(self) -> Workload:
        """What layouts are measured with."""
        return Workload(prompt=self.prompt, gen=self.gen, threads=self.threads)

    @property
    def deploy_quantisation(self) -> str:
        """What the runtime writes the model in; raises `UnknownName` for one that it does not have."""
        runtime = RUNTIMES[self.runtime]
        name = self.quantisation[0] if self.quantisation else runtime.quantisations[0]
        runtime.require_quantisation(name)
        return name

    @property
    def bits(self) -> tuple[str, ...]:
        """The quantisations that each place chooses from, the model's own first; (): nothing is chosen.

        Raises:
            InvalidInput: one occurs twice or has parts, there are terms of pairs, or a space is to be written.
            UnknownName: the runtime does not have one.
            Unsupported: the runtime cannot tell what rounding loses.
        """
        whole = self.deploy_quantisation  # also a single one is refused before anything is trained
        if self.quantisation is None or len(self.quantisation) < 2:
            return ()
        runtime = RUNTIMES[self.runtime]
        if not isinstance(runtime, BlockRoundingRuntime):
            raise Unsupported(
                f"what a quantisation of {self.runtime} loses is not known: name one", where=_QUANTISATION
            )
        first = Quantisation.parse(whole)
        names = (first.others, *self.quantisation[1:])
        for name in names:
            runtime.require_quantisation(name)
        if any("+" in name for name in names) or first.shares or any(role != "embedding" for role, _ in first.parts):
            raise InvalidInput(
                "places choose from plain names; the first may add the embedding's, as in q8_0+embedding:q4_0",
                where=_QUANTISATION,
            )
        if len(set(names)) < len(names):
            raise InvalidInput("names one twice", where=_QUANTISATION)
        for key, named in (("pairs", self.pairs), ("--write-space", self.write_space)):
            if named:
                raise InvalidInput(
                    f"several are not combined with {key}: scores of pairs and mixes are not rounded",
                    where=_QUANTISATION,
                )
        return names

    def record(self) -> dict[str, Any]:
        """Returns what the child depends on besides model, text and budgets, as JSON values."""
        return self.model_dump(mode="json", include=AdaptSettings.model_fields.keys() | _RECORDED)

    def completed(self, precision: Precision) -> AdaptRequest:
        """Returns the request with what it does not name.

        That is `precision` for library and healing, and windows of scores as long as the device's workload: in shorter
        ones, a sliding window or a state would lose nothing that the scores see.
        """
        length = max(self.library.length, min(self.prompt + self.gen, _SCORE_LENGTH))
        library = self.library.model_copy(
            update={"score_length": self.library.score_length or length}
            | ({} if "precision" in self.library.model_fields_set else {"precision": precision})
        )
        named = "precision" in self.healing.model_fields_set
        healing = self.healing if named else self.healing.model_copy(update={"precision": precision})
        return self.model_copy(update={"library": library, "healing": healing})

    def with_tokens(self, library: int, healing: int) -> AdaptRequest:
        """Returns the request with other numbers of tokens that library and healing are trained on."""
        return self.model_copy(
            update={
                "library": self.library.model_copy(update={"tokens": library}),
                "healing": self.healing.model_copy(update={"tokens": healing}),
            }
        )


def read_request(path: Path | None, options: Mapping[str, Any]) -> AdaptRequest:
    """Returns the request of a settings file and of options.

    Args:
        path: YAML or JSON with keys of `AdaptRequest`, whose relative paths start at its folder; None: no file.
        options: keys that override those of the file.

    Raises:
        InvalidInput: the file cannot be read, a required key is missing, or values are unknown or out of range; one
            line for each problem.
    """
    document = Document("settings", {})
    if path is not None:
        try:
            document = read_yaml(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--config") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path} is not UTF-8 at byte {error.start}", where="--config") from None
    values = document.value or {}
    if not isinstance(values, dict):
        raise InvalidInput(f"{path} holds no keys", where="--config")
    keys = {name: value if path is None else _from_folder(path.parent, name, value) for name, value in values.items()}
    keys |= options
    for name, option in _REQUIRED.items():
        if not keys.get(name) and not (name == "corpus" and keys.get("own_text")):
            raise InvalidInput(f"is missing; name it, or {name!r} in the file of --config", where=option)
    try:
        return AdaptRequest.model_validate(keys)
    except ValidationError as error:
        raise InvalidInput("\n".join(describe(error, document, AdaptRequest))) from None


def _from_folder(folder: Path, name: str, value: Any) -> Any:
    """Returns the value of a key, with its relative paths resolved from `folder`."""
    if name == "corpus" and isinstance(value, list):
        return [_from_folder(folder, name, path) for path in value]
    names = ("model", "corpus", "output", "tokenizer", "library_folder", "write_space")
    return str(folder / paths.expanded(value, name)) if name in names and isinstance(value, str) else value
