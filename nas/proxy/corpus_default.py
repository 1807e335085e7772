"""The default corpus: the source of Python's standard library, and generated text. Nothing is downloaded.

Domains: `code`, the library's source without comments and docstrings; `prose`, those comments and docstrings;
`generated`, short documents with facts to recall, tables and arithmetic, drawn from one `random.Random`. Two hosts with
the same Python release get the same bytes unless a distribution patches its library, which the corpus hash shows.
"""

from __future__ import annotations

import io
import json
import sysconfig
import textwrap
import tokenize
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

from nas.core.errors import InfrastructureFailed

RECIPE = 1
"""Increase it whenever the default corpus of an unchanged Python changes: cached copies are then not used."""

_REMOVED = "\0"
"""Marks a line of source of which nothing is left."""
_SEED = 20240
_GENERATED_BYTES = 1 << 20

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

_NAMES = (
    "Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kira", "Leo", "Mina", "Noor", "Otto",
    "Pia", "Quin", "Rosa", "Sami", "Tess", "Umar", "Vera", "Wim", "Yara",
)  # fmt: skip
_THINGS = (
    "apples", "books", "coins", "cups", "keys", "lamps", "maps", "nails", "pens", "ropes", "shells", "stamps",
    "stones", "tickets",
)  # fmt: skip
_PLACES = (
    "Bergen", "Cairo", "Dakar", "Hanoi", "Lima", "Lyon", "Osaka", "Porto", "Quito", "Riga", "Seoul", "Tunis", "Turin",
    "Utrecht",
)  # fmt: skip
_COLOURS = (
    "amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "red", "silver", "violet", "white", "yellow",
)  # fmt: skip
_JOBS = (
    "baker", "carpenter", "dentist", "driver", "farmer", "gardener", "nurse", "painter", "pilot", "tailor", "teacher",
    "welder",
)  # fmt: skip
_KINDS = (
    "birds", "boats", "fruits", "insects", "metals", "novels", "planets", "rivers", "songs", "tools", "trees",
    "villages",
)  # fmt: skip


def read_domains() -> dict[str, list[bytes]]:
    """Returns the default corpus, one text per domain.

    Raises:
        InfrastructureFailed: this Python comes without its library's source.
    """
    files = _library_files()
    Random(_SEED).shuffle(files)  # the held-out end should not be the end of the alphabet
    split = [split_source(file.read_text("utf-8")) for file in files]
    return {
        "code": ["\n\n".join(code for code, _ in split).encode()],
        "prose": ["\n\n".join(prose for _, prose in split).encode()],
        "generated": [generate(_SEED, _GENERATED_BYTES)],
    }


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
        _blank(lines, token)
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
    found = []
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append(token)
        elif token.type not in (tokenize.NL, tokenize.ENCODING):
            starts = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if token.type == tokenize.STRING and starts:
                found.append(token)
            before = token.type
    return found


def _docstring_text(literal: str) -> str:
    body = literal.lstrip("rRuUbB")
    quote = 3 if body[:3] in ('"""', "'''") else 1
    body = body[quote:-quote]
    first, newline, rest = body.partition("\n")
    return (first.strip() + newline + textwrap.dedent(rest)).strip()


def _blank(lines: list[str], token: tokenize.TokenInfo) -> None:
    """Removes the token from `lines` (rows count from 1); rows that become empty are marked."""
    (first, start), (last, end) = token.start, token.end
    rest = (lines[first - 1][:start] + lines[last - 1][end:]).rstrip()
    lines[first - 1] = rest + "\n" if rest else _REMOVED
    lines[first:last] = [_REMOVED] * (last - first)


def generate(seed: int, size: int) -> bytes:
    """Returns short documents of random kinds, of `size` bytes or a few more."""
    rng = Random(seed)
    parts: list[str] = []
    written = 0
    while written < size:
        text = rng.choice(_WRITERS)(rng) + "\n\n"
        parts.append(text)
        written += len(text)
    return "".join(parts).encode("ascii")


def _record(rng: Random) -> dict[str, object]:
    return {
        "id": rng.randrange(1000),
        "name": rng.choice(_NAMES),
        "job": rng.choice(_JOBS),
        "city": rng.choice(_PLACES),
        "tags": rng.sample(_COLOURS, rng.randrange(1, 4)),
        "active": rng.random() < 0.5,
    }


def _json_document(rng: Random) -> str:
    records = [_record(rng) for _ in range(rng.randrange(1, 4))]
    return json.dumps({"items": records, "count": len(records)}, indent=rng.choice([None, 2]))


def _table(rng: Random) -> str:
    rows = [(rng.choice(_NAMES), rng.choice(_PLACES), rng.randrange(10, 100)) for _ in range(rng.randrange(3, 7))]
    lines = [f"| {name:<5} | {place:<8} | {score:>5} |" for name, place, score in rows]
    total = sum(score for _, _, score in rows)
    head = ["| name  | city     | score |", "|-------|----------|-------|"]
    return "\n".join([*head, *lines, f"| all   | {len(rows):<8} | {total:>5} |"])


def _arithmetic(rng: Random) -> str:
    lines = []
    for _ in range(rng.randrange(4, 9)):
        a, b = rng.randrange(100), rng.randrange(100)
        sign, value = rng.choice([("+", a + b), ("-", a - b), ("*", a * b)])
        lines.append(f"{a} {sign} {b} = {value}")
    return "\n".join(lines)


def _counting_questions(rng: Random) -> str:
    """Returns facts, then questions in another order."""
    owners = rng.sample(_NAMES, rng.randrange(3, 6))
    facts = {name: (rng.randrange(2, 60), rng.choice(_THINGS), rng.choice(_COLOURS)) for name in owners}
    stated = [f"{name} has {count} {colour} {thing}." for name, (count, thing, colour) in facts.items()]
    rng.shuffle(owners)
    asked = []
    for name in owners:
        count, thing, colour = facts[name]
        asked += [f"Q: How many {thing} does {name} have?\nA: {count}"]
        asked += [f"Q: What colour are the {thing} of {name}?\nA: {colour}"]
    return "\n".join([" ".join(stated), *asked])


def _dialogue(rng: Random) -> str:
    guest, host = rng.sample(_NAMES, 2)
    job, city = rng.choice(_JOBS), rng.choice(_PLACES)
    return "\n".join(
        [
            f"{host}: Hello, what is your name?",
            f"{guest}: My name is {guest}, I am a {job} from {city}.",
            f"{host}: Nice to meet you, {guest}. How long have you been a {job}?",
            f"{guest}: For {rng.randrange(2, 30)} years. Do you know {city}?",
            f"{host}: I was in {city} once, {rng.choice(['in spring', 'in winter', 'last year', 'as a child'])}.",
            f"{guest}: Then come and see us again.",
        ]
    )


def _syllogism(rng: Random) -> str:
    low, middle, high = rng.sample(_KINDS, 3)
    colour = rng.choice(_COLOURS)
    yes = rng.random() < 0.5
    claim = f"some {low} are not {colour}" if not yes else f"all {low} are {colour}"
    return (
        f"All {low} are {middle}. All {middle} are {high}. All {high} are {colour}.\n"
        f"Does it follow that {claim}? {'Yes' if yes else 'No'}, because all {low} are {high}."
    )


def _ordering(rng: Random) -> str:
    names = rng.sample(_NAMES, 4)
    pairs = list(pairwise(names))
    rng.shuffle(pairs)
    stated = " ".join(f"{older} is older than {younger}." for older, younger in pairs)
    return f"{stated}\nThe oldest is {names[0]}, the youngest is {names[-1]}. In order: {', '.join(names)}."


_WRITERS: tuple[Callable[[Random], str], ...] = (
    _json_document,
    _table,
    _arithmetic,
    _counting_questions,
    _dialogue,
    _syllogism,
    _ordering,
)
