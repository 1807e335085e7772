"""Search spaces from YAML files, packaged or the user's own; every error says `file:line`."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from nas.core.errors import InvalidInput, UnknownName
from nas.core.frame import check_reachable
from nas.core.space import REMOVED_LIMITS, SearchSpace
from nas.search_spaces.problems import describe
from nas.search_spaces.yaml_text import MAX_CHARACTERS, Document, read_yaml

log = logging.getLogger(__name__)


def load_space(name_or_path: str | Path) -> SearchSpace:
    """Loads the space of a packaged name ('lfm2-demo') or of a YAML file ('my.yaml').

    Raises:
        UnknownName: no packaged space of that name, and no such file.
        InvalidInput: the file cannot be used: one line for each problem, as `file:line: message`.
    """
    path = _file(name_or_path)
    return parse_space(space_text(path), str(name_or_path) if path.name == str(name_or_path) else str(path))


def space_text(name_or_path: str | Path) -> str:
    """Reads the YAML text of a packaged space or of a file.

    Raises:
        UnknownName: no packaged space of that name, and no such file.
        InvalidInput: the file is too large or not text.
    """
    path = _file(name_or_path)
    if path.stat().st_size > 4 * MAX_CHARACTERS:
        raise InvalidInput(f"larger than {MAX_CHARACTERS:,} characters", where=str(path))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not UTF-8 at byte {error.start}", where=str(path)) from None


def parse_space(text: str, name: str) -> SearchSpace:
    """Parses the space in YAML `text`; messages use `name` for the file.

    Raises:
        InvalidInput: one line for each problem, as `name:line: message`.
    """
    document = read_yaml(text, name)
    try:
        space = SearchSpace.model_validate(document.value)
    except ValidationError as error:
        raise InvalidInput("\n".join(describe(error, document))) from None
    if not space.layouts:
        _check_reachable(space, document)
    _warn_of_removed(document, name)
    return space


def list_spaces() -> dict[str, str]:
    """Returns the packaged spaces: name -> first line of `doc`."""
    return {name: (load_space(path).doc.strip().splitlines() or [""])[0] for name, path in _packaged().items()}


def _packaged() -> dict[str, Path]:
    folder = Path(str(resources.files("nas.search_spaces")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _file(name_or_path: str | Path) -> Path:
    path, packaged = Path(name_or_path), _packaged()
    name = str(name_or_path).removesuffix(".yaml")
    if name in packaged and not path.exists():
        return packaged[name]
    if not path.is_file():
        raise UnknownName("search space (no packaged one, and no such file)", str(name_or_path), packaged)
    return path


def _warn_of_removed(document: Document, name: str) -> None:
    value = document.value
    protocol = value.get("protocol") if isinstance(value, dict) else None
    if found := [key for key in REMOVED_LIMITS if isinstance(protocol, dict) and key in protocol]:
        log.warning("%s: protocol: %s: ignored, noise is not refused any more", name, ", ".join(found))


def _check_reachable(space: SearchSpace, document: Document) -> None:
    try:
        check_reachable(space)
    except InvalidInput as error:
        assert error.where, "names the key"
        message = f"{error.where}: {error.message}"
        raise InvalidInput(message, where=document.where(tuple(error.where.split(".")))) from None
