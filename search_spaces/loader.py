"""Search spaces from YAML files, packaged or the user's own; every error says `file:line`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from nas.core.block import Role
from nas.core.block_space import BlockSpace, Knob, block_spaces
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import MAX_DEPTH, MAX_VOCAB, MAX_WIDTH, Layout
from nas.core.metrics import RECALL, RECALL_METRIC
from nas.core.model_choices import check_reachable, impossible_choices
from nas.core.quality_config import CorpusFiles
from nas.core.replacement import LibraryScores
from nas.core.scoring import PUBLISHED
from nas.core.space import ModelSpace, Pattern, Range, SearchSpace, cross_problems
from nas.search.spaces.problems import Problem, in_order, problem_at, problems
from nas.search.spaces.yaml_text import MAX_CHARACTERS, Document, KeyPath, read_yaml

Further = Callable[[Any, SearchSpace | None], Iterable[tuple[KeyPath, str]]]
"""Further checks of a document's value. The second argument holds its choices of layouts (and may hold nothing else);
None where something is wrong with them. Yields (key path, message)."""


def load_space(name_or_path: str | Path, further: Further | None = None) -> SearchSpace:
    """Loads the space of a packaged name ('lfm2-demo') or of a YAML file ('my.yaml').

    Raises:
        UnknownName: no packaged space of that name, and no such file.
        InvalidInput: the file cannot be used: one line for each problem, as `file:line: message`.
    """
    path = _file(name_or_path)
    name = str(name_or_path) if path.name == str(name_or_path) else str(path)
    return parse_space(space_text(path), name, further, base_of(path))


def base_of(name_or_path: str | Path) -> Path:
    """Returns the folder that relative paths in a space are taken from: its file's; of others, the current one."""
    path = Path(name_or_path)
    return path.parent if path.is_file() else Path()


def space_text(name_or_path: str | Path) -> str:
    """Reads the YAML text of a packaged space or of a file.

    Raises:
        UnknownName: no packaged space of that name, and no such file.
        InvalidInput: the file is too large or not text.
    """
    path = _file(name_or_path)
    content = _content(path) if path.is_file() else _content_of_pipe(path)
    if len(content) > 4 * MAX_CHARACTERS:
        raise InvalidInput(f"larger than {MAX_CHARACTERS:,} characters", where=str(path))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not UTF-8 at byte {error.start}", where=str(path)) from None


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4 * MAX_CHARACTERS + 1)


_content_of_pipe = cache(_content)  # which has it once


def parse_space(text: str, name: str, further: Further | None = None, base: Path | None = None) -> SearchSpace:
    """Parses the space in YAML `text`; messages use `name` for the file.

    Args:
        text: the document.
        name: of the file.
        further: checks that need more than the text, such as which runtimes are installed.
        base: folder of relative paths; None: files that the space names are not looked at.

    Raises:
        InvalidInput: one line for each problem, as `name:line: message`.
    """
    document = read_yaml(text, name)
    if not isinstance(document.value, dict):
        what = "is empty" if document.value is None else "is no mapping"
        raise InvalidInput(f"{what}: a space is a YAML file of keys such as 'name: ...'", where=f"{name}:1")
    space, mistakes = None, []
    try:
        space = SearchSpace.model_validate(document.value)
    except ValidationError as error:
        mistakes = [*problems(error, document), *_hidden(error, document)]
    choices = space
    if not document.value.get("layouts"):
        impossible = list(_choice_problems(document.value))
        choices = None if impossible else _choices_of(document.value)
        if choices is not None:
            impossible = list(_unreachable(choices))
        choices = None if impossible else choices
        mistakes += [problem_at(*finding, document) for finding in impossible]
    if further is not None:
        mistakes += [problem_at(*finding, document) for finding in further(document.value, choices)]
    if space is not None:
        mistakes += [problem_at(*finding, document) for finding in (*_without_recall(space), *_too_narrow(space))]
    if space is not None and base is not None:
        mistakes += [problem_at(*finding, document) for finding in _unscored(space, base)]
    if mistakes:
        raise InvalidInput("\n".join(in_order(mistakes)))
    assert space is not None, "nothing is wrong with it"
    return space


def list_spaces() -> dict[str, str]:
    """Returns the packaged spaces: name -> first line of `doc`."""
    return {name: (load_space(path).doc.strip().splitlines() or [""])[0] for name, path in _packaged().items()}


def _packaged() -> dict[str, Path]:
    folder = Path(str(resources.files("nas.search.spaces")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _file(name_or_path: str | Path) -> Path:
    path, packaged = Path(name_or_path), _packaged()
    name = str(name_or_path).removesuffix(".yaml")
    if name in packaged and (path.is_dir() or not path.exists()):
        return packaged[name]
    if not path.exists() or path.is_dir():
        raise UnknownName("search space (no packaged one, and no such file)", str(name_or_path), packaged)
    return path


def _hidden(error: ValidationError, document: Document) -> Iterator[Problem]:
    """Finds what a validation does not look at because something else is wrong: names, and all beside a wrong list."""
    value = document.value
    across = cross_problems(value)
    if across:
        yield from problems(ValidationError.from_exception_data("search space", across), document)
    if all(mistake["loc"][:1] == ("layouts",) for mistake in error.errors()):
        layouts = {layout.id: layout.format() for layout in _readable(value["layouts"])}
        try:
            SearchSpace.model_validate(value | {"layouts": list(layouts.values()) or [_ANY_LAYOUT]})
        except ValidationError as others:
            inside = [mistake for mistake in problems(others, document) if not mistake[2].startswith("layouts")]
            yield from inside


def _readable(texts: Any) -> Iterator[Layout]:
    for text in texts if isinstance(texts, list) else ():
        try:
            yield Layout.parse(str(text))
        except InvalidInput:
            continue


def _without_recall(space: SearchSpace) -> Iterator[tuple[KeyPath, str]]:
    """Finds uses of recall where nothing in the top rung measures it; budgets may be decided by what is re-scored."""
    config, top = space.quality, space.quality.rungs[-1]
    named = config.corpus.files if isinstance(config.corpus, CorpusFiles) else config.corpus
    texts = named if top.lm_steps and isinstance(named, tuple) else ()
    groups = [*(f"task/{name}" for name in top.tasks), *(f"lm/{name}" for name in texts)]
    if config.library is not None or any(group.startswith(RECALL) for group in groups):
        return
    add = "`tasks: {automata: {steps: 300}}`"
    text = f"{RECALL_METRIC}: the top rung {top.name!r} measures no recall: add {add} to it"
    fresh = config.rescore is not None and config.rescore.recalls
    uses = [("budgets", index, item.metric) for index, item in enumerate(space.budgets) if not fresh]
    uses += [("objectives", index, item.metric) for index, item in enumerate(space.objectives)]
    for part, index, metric in uses:
        if metric == RECALL_METRIC:
            yield (part, index, "metric"), text


def _too_narrow(space: SearchSpace) -> Iterator[tuple[KeyPath, str]]:
    """Finds layouts of which there is no proxy."""
    config = space.quality
    texts = [rung.teacher.layout for rung in config.rungs if rung.teacher is not None]
    layouts = [*space.references.layouts().values(), *map(Layout.parse, texts)]
    least = min(*space.model.d_model.choices, *(layout.d_model for layout in layouts))
    if config.library is None and least < config.proxy_d_model:
        text = f"proxies of width {config.proxy_d_model} are wider than a layout of width {least}"
        yield ("quality", "proxy_d_model"), text


def _unscored(space: SearchSpace, base: Path) -> Iterator[tuple[KeyPath, str]]:
    """Finds what a library's file of scores does not say: the file itself, references and layouts."""
    if space.quality.library is None:
        return
    try:
        scores = LibraryScores.read(base / space.quality.library.path)
    except InvalidInput as error:
        yield ("quality", "path"), error.message
        return
    further = space.references.further
    references = {
        ("references", *(("further", name) if name in further else (name,))): layout
        for name, layout in space.references.layouts().items()
    }
    listed = {("layouts", index): layout for index, layout in enumerate(space.listed())}
    for key_path, layout in (references | listed).items():
        try:
            if scores.choice(layout) and key_path == ("references", PUBLISHED):
                yield key_path, f"must be the library's model, {scores.layout}"
        except InvalidInput as error:
            yield key_path, error.message


def _choice_problems(value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Finds choices that no layout can have."""
    parts = _mapping(value)
    shape = _mapping(parts.get("model"))
    widths: list[int] = []
    for name, allowed in _SHAPE.items():
        choices = _choices(shape.get(name))
        widths += [int(choice) for choice in choices if name == "d_model" and choice in allowed]
        if outside := [choice for choice in choices if choice not in allowed]:
            step = f"a multiple of {allowed.step} " if allowed.step > 1 else ""
            yield ("model", name), f"must be {step}from {allowed.start} to {allowed[-1]}, not {outside[0]:g}"
    roles: tuple[tuple[str, Role], ...] = (("mixers", "mixer"), ("ffn", "ffn"))
    for part, role in roles:
        kinds = _mapping(parts.get(part))
        for kind in kinds if widths else ():
            try:
                (block,) = block_spaces({kind: kinds[kind]}, role)
            except ValidationError:
                continue  # reported already
            for knob, reason in impossible_choices(block, widths).items():
                yield (part, kind, knob) if knob else (part, kind), reason


def _choices(knob: Any) -> tuple[float, ...]:
    try:
        return () if knob is None else Knob.model_validate(knob).choices
    except ValidationError:
        return ()


def _choices_of(value: Any) -> SearchSpace | None:
    """Returns the parts of a document that say which layouts there are, without the others; None if one is wrong."""
    parts = _mapping(value)
    try:
        choices: dict[str, Any] = {
            "name": str(parts.get("name")),
            "model": ModelSpace.model_validate(parts.get("model")),
            "mixers": _BLOCKS.validate_python(block_spaces(parts.get("mixers"), "mixer")),
            "parallel": _PARALLEL.validate_python(parts.get("parallel", ())),
            "ffn": _BLOCKS.validate_python(block_spaces(parts.get("ffn"), "ffn")),
            "pattern": Pattern.model_validate(parts.get("pattern", {})),
            "limits": _LIMITS.validate_python(parts.get("limits", {})),
            "runtimes": (),
        }
    except ValidationError:
        return None
    mixers = {block.kind for block in choices["mixers"]}
    return (
        SearchSpace.model_construct(**choices)
        if all(mixers.issuperset(kinds) for kinds in choices["parallel"])
        else None
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unreachable(space: SearchSpace) -> Iterator[tuple[KeyPath, str]]:
    try:
        check_reachable(space)
    except InvalidInput as error:
        assert error.where, "names the key"
        yield tuple(error.where.split(".")), error.message


_BLOCKS = TypeAdapter(Annotated[tuple[BlockSpace, ...], Field(min_length=1)])
_PARALLEL = TypeAdapter(tuple[tuple[str, ...], ...])
_LIMITS = TypeAdapter(dict[str, Range])
_SHAPE = {
    "d_model": range(32, MAX_WIDTH + 1, 32),
    "depth": range(1, MAX_DEPTH + 1),
    "vocab": range(2, MAX_VOCAB + 1),
}
_ANY_LAYOUT = "d256 v1024 ffn=swiglu:512 [A8/4]"
