"""The default corpus: the source of Python's standard library, and generated text. Nothing is downloaded.

Domains: `code`, the library's source without comments and docstrings; `prose`, those comments and docstrings;
`generated`, logs, tables and tool calls with answers at known distances; `languages`, samples of grammars. The last two
are the same on every machine and Python. The first two are so on hosts with the same Python release, patch level
included, unless a distribution patches its library, which the corpus hash shows.
"""

from __future__ import annotations

import io
import sysconfig
import textwrap
import tokenize
from pathlib import Path
from random import Random

from nas.core.errors import InfrastructureFailed
from nas.model.text import generators

RECIPE = 2
"""Increase it whenever the default corpus of an unchanged Python changes: cached copies are then not used."""

_REMOVED = "\0"
"""Marks a line of source of which nothing is left."""
_SEED = 20240
_GENERATED_BYTES = 1 << 20
_LANGUAGES_BYTES = 1 << 19

# Present in every release since 3.11 and in every distribution: no tests, no GUI, no build configuration.
_FOLDERS = """
asyncio collections concurrent/futures email http importlib json logging multiprocessing tomllib unittest urllib wsgiref
xml/dom xml/etree xml/sax xmlrpc zoneinfo
"""
_MODULES = """
_collections_abc _pydecimal _pyio _strptime abc argparse ast base64 bdb bisect calendar cmd codecs configparser
contextlib copy csv dataclasses datetime decimal difflib dis doctest enum filecmp fileinput fnmatch fractions ftplib
functools getopt gettext glob graphlib gzip hashlib heapq hmac imaplib inspect ipaddress locale lzma mailbox mimetypes
netrc ntpath numbers operator optparse os pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint
profile pstats pyclbr pydoc queue quopri random reprlib sched secrets selectors shelve shlex shutil smtplib socket
socketserver ssl statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback
tracemalloc types typing uuid warnings wave weakref webbrowser zipimport
"""


def write_domains(folder: Path) -> None:
    """Writes the default corpus to `folder`, one file per domain.

    Raises:
        InfrastructureFailed: this Python comes without its library's source.
    """
    files = _library_files()
    Random(_SEED).shuffle(files)  # the held-out end should not be the end of the alphabet
    code, prose = zip(*(split_source(file.read_text("utf-8")) for file in files), strict=True)
    (folder / "code.txt").write_bytes("\n\n".join(code).encode())
    (folder / "prose.txt").write_bytes("\n\n".join(prose).encode())
    (folder / "generated.txt").write_bytes(generators.joined(generators.recall_text(_SEED, _GENERATED_BYTES)).text)
    (folder / "languages.txt").write_bytes(generators.languages_text(_SEED, _LANGUAGES_BYTES).encode())


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in _MODULES.split()]
    for folder in _FOLDERS.split():
        files += sorted((root / folder).glob("*.py")) or [root / folder / "__init__.py"]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise InfrastructureFailed(
            f"this Python lacks source files of its library ({', '.join(missing[:3])}): install the full standard"
            " library, or name text files of your own as the corpus"
        )
    return files


def split_source(source: str) -> tuple[str, str]:
    """Splits Python source into code without comments and docstrings, and the removed text as paragraphs."""
    tokens = _prose_tokens(source)
    lines = source.splitlines(keepends=True)
    for token in reversed(tokens):  # from the end: earlier columns stay valid
        (first, start), (last, end) = token.start, token.end
        rest = (lines[first - 1][:start] + lines[last - 1][end:]).rstrip()
        lines[first - 1] = rest + "\n" if rest else _REMOVED
        lines[first:last] = [_REMOVED] * (last - first)
    paragraphs: list[str] = []
    comment_row = -1
    for token in tokens:
        comment = token.type == tokenize.COMMENT
        text = token.string.lstrip("#!: ") if comment else _docstring_text(token.string)
        if comment and token.start[0] == comment_row + 1:
            paragraphs[-1] += "\n" + text
        else:
            paragraphs.append(text)
        comment_row = token.start[0] if comment else -1
    code = "".join(line for line in lines if line != _REMOVED)
    return code, "\n\n".join(text for text in paragraphs if text.strip())


def _prose_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Returns comments, and strings at the start of a statement."""
    prose = []
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token)
        elif token.type not in (tokenize.NL, tokenize.ENCODING):
            starts = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if token.type == tokenize.STRING and starts:
                prose.append(token)
            before = token.type
    return prose


def _docstring_text(literal: str) -> str:
    body = literal.lstrip("rRuUbB")
    quote = 3 if body[:3] in ('"""', "'''") else 1
    body = body[quote:-quote]
    first, newline, rest = body.partition("\n")
    return (first.strip() + newline + textwrap.dedent(rest)).strip()
