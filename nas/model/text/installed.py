"""The corpus 'installed': source and documentation of the packages that are installed with hilnas.

Packages are hilnas and what it requires, directly or not, as far as this environment has it: what requirements.lock
pins, where it was installed by that. Their files come from the RECORD of each. Domains: `code`, Python source without
docstrings; `prose`, those docstrings and the packages' .rst and .md files. Nothing is imported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path

from nas.core.errors import InfrastructureFailed

RECIPE = 1
"""Increase it whenever the corpus of unchanged packages changes: cached copies are then not used."""

_SELF = "hilnas"
_MAX_FILE = 1 << 18
"""Largest file that is read: beyond it are tables and generated code."""
_LEFT_OUT = {"_vendor", "include", "node_modules", "test", "testing", "tests", "third_party", "vendor", "vendored"}
"""Folders whose files are copies from elsewhere, or data of tests."""
_GENERATED = ("_pb2.py", "_pb2_grpc.py")
_REQUIRED = re.compile(r"^[A-Za-z0-9._-]+")
_DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(.*?)\1[ \t]*\n', re.MULTILINE | re.DOTALL)
_LEAST_DOCSTRING = 80
"""Characters of the shortest docstring that counts as prose."""


def distributions() -> list[Distribution]:
    """Returns the installed packages that hilnas requires, directly or not, sorted by name; without hilnas.

    Every requirement is followed, also those of extras and other platforms: what is not installed is left out.

    Raises:
        InfrastructureFailed: hilnas itself is not installed.
    """
    try:
        required = _names(distribution(_SELF))
    except PackageNotFoundError as error:
        raise InfrastructureFailed("hilnas is not installed here, so its packages are unknown") from error
    packages: dict[str, Distribution | None] = {_SELF: None}
    while required:
        name = required.pop()
        if name in packages:
            continue
        try:
            packages[name] = package = distribution(name)
        except PackageNotFoundError:
            packages[name] = None
            continue
        required |= _names(package)
    return [package for _, package in sorted(packages.items()) if package is not None]


def write_domains(packages: list[Distribution], folder: Path) -> None:
    """Writes the corpus of `packages` to `folder`, one file per domain.

    Files are in the order of the hash of their contents, each content once: the held-out end of a domain is a random
    choice of whole files, the same wherever these versions are installed.
    """
    files: dict[bytes, tuple[str, str]] = {}
    for package in packages:
        for path in _files(package):
            try:
                content = Path(str(package.locate_file(path))).read_bytes()
                text = content.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # removed since, or in another encoding
            files[hashlib.sha256(content).digest()] = split(text) if path.suffix == ".py" else ("", text.strip())
    code, prose = zip(*(texts for _, texts in sorted(files.items())), strict=True)
    (folder / "code.txt").write_bytes("\n\n".join(filter(str.strip, code)).encode())
    (folder / "prose.txt").write_bytes("\n\n".join(filter(str.strip, prose)).encode())


def split(source: str) -> tuple[str, str]:
    """Splits Python source into code without docstrings, and the docstrings that are long enough to be prose.

    Triple-quoted strings that stand alone on their lines count as docstrings: a hundred times faster than a parser.
    """
    docstrings = [match[2].strip() for match in _DOCSTRING.finditer(source)]
    return _DOCSTRING.sub("", source), "\n\n".join(text for text in docstrings if len(text) >= _LEAST_DOCSTRING)


def _names(package: Distribution) -> set[str]:
    """Returns the names that a package requires, as the index normalises them (PEP 503)."""
    names = (_REQUIRED.match(requirement) for requirement in package.requires or ())
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def _files(package: Distribution) -> Iterator[PackagePath]:
    for path in sorted(package.files or (), key=str):
        is_inside = ".." not in path.parts and not path.parts[0].endswith(".dist-info")
        is_text = path.suffix in (".py", ".rst", ".md") and not path.name.endswith(_GENERATED)
        is_small = path.size is None or 0 < path.size <= _MAX_FILE
        if is_inside and is_text and is_small and _LEFT_OUT.isdisjoint(path.parts):
            yield path
