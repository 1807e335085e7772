"""Runs `nas` with hostile arguments, files and environments, and counts what no user should see.

    python -m benchmarks.command_fuzz [--seed 1] [--every 1] [--only GROUP] [--workers 2] > result.jsonl
    python -m benchmarks.command_fuzz --page docs/measured/robustness.md result.jsonl

Every option and argument of every command gets values from lists of odd ones; spaces, layouts, archives, models,
databases and state files are damaged at random; environments lack a home, a temporary folder, streams, permissions.
Each run has a folder of its own, with a study, a family, model files and a database, and is a fork of a process that
has imported everything; those for which the interpreter itself must start, such as with other locales, are processes
of their own. Faults are: tracebacks, warnings of Python, ends by a signal or with an unknown exit code, silent
failures, runs that hang, and scratch files that are left. Prints JSON lines; exit code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import gc
import gzip
import importlib
import json
import os
import pkgutil
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import yaml
from typer.main import get_command

import nas
from benchmarks.page import fill, table
from nas.cli.main import app, main

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = ROOT / "benchmarks" / "recorded" / "studies" / "two-runtimes-idle.jsonl.gz"
SPACE = ROOT / "search_spaces" / "lfm2-demo.yaml"
LAYOUT = "d64 v512 ffn=swiglu:128 [C3 A2/1]"
LIMIT_S = 60.0
MEMORY_BYTES = 8 << 30
CODES = (0, 1, 2, 3, 4, 130)
NOBODY = 54321
"""A user without an entry in the list of users, as containers run as."""

FAULT_TEXT = re.compile(
    r"Traceback \(most recent|Exception ignored|^\S+:\d+: \w*Warning|<\w+ object at 0x|<class '", re.MULTILINE
)
SCRATCH = ("*.partial", ".hilnas*", "*.tmp")


def _split(text: str) -> list[str]:
    return text.split()


TEXTS = (
    *(
        "",
        " ",
        "a\nb",
        "x\ty",
        "small ",
        "\x1b[31mred",
        "é" * 300,
        "x" * 5000,
        "caf\udce9",
        "\u202eabc",
        "\ufeffx",
        "exp №5",
    ),
    *_split(r"- -- a/b ../x %s%n ~ ~nobody/x $(id) ' ;ls [ {} null 0 -1 1e999 nan ٣ a=b = @x . .. / None SMALL 1:2:3"),
    *_split("tag: tag:x"),
    *_split(r"\ 💥 * ? # a,b,,c , http://[::1"),
)
NUMBERS = ("", " 7", "1" * 400, *_split("0 -1 1.5 9223372036854775808 1e3 nan inf -inf x ٣ 0x10 1_000"))
PATHS = (
    *("", "-", "/", "x" * 300, "caf\udce9.yaml", "a\nb.yaml", "/dev/null", "/dev/full", "/dev/stdin", "/dev/fd/9"),
    *_split("empty binary folder nowhere/x missing loop dangling socket zeros.gz cut.gz text.yaml /proc/self/mem"),
    *_split("small.jsonl hilnas.db deep.json secret m.gguf cut.gguf cut.safetensors ~nobody/x"),
)
DATABASES = (
    *(
        f"sqlite:///{name}"
        for name in _split("missing.db empty binary folder /dev/null cut.db other.db newer.db :memory:")
    ),
    *(
        f"sqlite:///{name}"
        for name in ("", "caf\udce9.db", "a?b=c", "home/hilnas.db?mode=ro", "socket", "/proc/self/mem")
    ),
    *_split("x sqlite:// sqlite+aiosqlite:///x.db mysql://x/y :// é://x postgresql:// postgresql://h:port/x"),
    *_split("postgresql://nobody@127.0.0.1:1/x postgresql://[::1"),
)
URLS = tuple(_split("x http://x https://127.0.0.1:1 https:// https://[::1 https://h:99999 https://u:p@127.0.0.1:1/x"))
POOLS: Mapping[str, Sequence[str]] = {"db": DATABASES, "server": URLS, "url": URLS, "webhook": URLS}
"""Name of an option -> values, instead of those of its type."""


def _words(text: str) -> dict[str, tuple[str, ...]]:
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name.strip(): tuple(shlex.split(words)) for name, _, words in lines}


USABLE = _words(f"""
    space: lfm2-demo
    study: small
    layout: '{LAYOUT}'
    subjects: '{LAYOUT}'
    file: missing
    files: m.gguf
    folder: model
    model: model
    output: -o out
    optuna: --optuna optuna.db
    sizes: --sizes 3M
    size: --size 3M
    corpus: --corpus text.txt
    recipe: --recipe text.yaml
    address: adb:X
    device: local
    url: https://127.0.0.1:1
    line: hilnas-enrol.x
""")
"""Name of a required parameter -> words that can be used; others get 'x'."""
HARMLESS = _words(f"""
    launch: --space lfm2-demo --dry-run
    bench: --device nowhere
    compare: --device nowhere
    family train: --size 9M
    family post: --size 9M
    family compare: --device nowhere
    family build: --no-measure --no-files --layout '{LAYOUT}' -y
    adapt: model --device nowhere -o out
    server add: --token x
    study delete: -y
    serve: --port 0
    agent token: --url https://x
""")
"""Command -> words that keep it from measuring, training or building for minutes."""
STEADY = (("serve",), ("agent", "run"), ("study", "follow"), ("family", "serve"))
"""Commands that run until they are ended."""


@dataclass(frozen=True)
class Case:
    """A run of `nas`.

    Args:
        group: row of the table.
        words: arguments; surrogates stand for bytes that are no text.
        env: variables that are set, or with None removed.
        shell: what a fork does to itself first, of `ALTERATIONS`.
        files: path -> content of files that are written first.
        new: whether the interpreter starts anew.
        before: arguments of runs before it in the same folder, which count for themselves.
    """

    group: str
    words: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    alteration: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    new: bool = False
    before: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a run: `fault` is empty where it ended as it should."""

    group: str
    words: tuple[str, ...]
    alteration: str
    code: int
    seconds: float
    fault: str
    output: str


def _close(*numbers: int) -> None:
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)


def _leave_for_nowhere() -> None:
    folder = Path("gone").absolute()
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _protect_home() -> None:
    for path in (Path("home"), *Path("home").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    _become_nobody()


def _limit(what: int, limit: int) -> None:
    resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))


def _write_to_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


ALTERATIONS: Mapping[str, Callable[[], object]] = {
    "no stdin": partial(_close, 0),
    "no stdout": partial(_close, 1),
    "no stderr": partial(_close, 2),
    "no streams": partial(_close, 0, 1, 2),
    "full stdout": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
    "broken pipe": _write_to_nobody,
    "removed folder": _leave_for_nowhere,
    "unknown user": _become_nobody,
    "read-only home": _protect_home,
    "16 open files": partial(_limit, resource.RLIMIT_NOFILE, 16),
    "files of 2 kB": partial(_limit, resource.RLIMIT_FSIZE, 2048),
    "umask 777": partial(os.umask, 0o777),
}
"""What a process does to itself before it runs the command."""
SILENT = ("no stderr", "no streams", "broken pipe")
"""After which a command may fail without a word: `nas study list | head` ends as other programs do."""
ENVIRONMENTS: Sequence[Mapping[str, str | None]] = (
    {"HOME": None, "NAS_HOME": None, "NAS_CACHE": None, "NAS_CONFIG": None},
    {"HOME": "/proc/nowhere", "NAS_HOME": None, "NAS_CACHE": None, "NAS_CONFIG": None},
    *({"NAS_HOME": text} for text in ("", " ", "rel", "we?ird", "caf\udce9", "x" * 300, "a\nb", "m.gguf")),
    *(
        {name: text}
        for name in ("NAS_HOME", "NAS_CACHE", "NAS_CONFIG")
        for text in ("/dev/null", "/proc", "~nobody/x", "loop")
    ),
    *({"TMPDIR": text} for text in ("/nowhere", "", "x" * 300, "m.gguf", "/proc")),
    *({"NAS_DB": text} for text in DATABASES),
    *({"NAS_SERVER": text, "NAS_TOKEN": "x"} for text in URLS),
    *({"COLUMNS": text} for text in ("0", "-1", "1", "x", "99999999999")),
    *({"TERM": text} for text in ("", "dumb", "x", "xterm-256color")),
    *({name: "x"} for name in _split("TZ PATH OMP_NUM_THREADS SSL_CERT_FILE CUDA_VISIBLE_DEVICES BROWSER")),
    *({name: "http://[::1"} for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")),
    *({"HTTPS_PROXY": text} for text in ("x", "ftp://x", "socks5://127.0.0.1:1", "http://127.0.0.1:1")),
    *({"_NAS_COMPLETE": text} for text in ("x", "source_zsh")),
    *({"LC_ALL": text} for text in ("C", "POSIX", "de_DE.ISO-8859-1", "xx_YY.UTF-8", "ja_JP.eucJP")),
    *({"PYTHONIOENCODING": text} for text in ("ascii", "latin-1", "utf-16", "cp1252")),
    {"PYTHONWARNINGS": "always"},
    {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
)
AT_START = ("LC_ALL", "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONUTF8")
"""Variables that the interpreter reads when it starts."""
READERS = tuple(
    tuple(shlex.split(line))
    for line in f"""
--version
--help
space list
space show lfm2-demo
space validate lfm2-demo
space sample lfm2-demo
launch --space lfm2-demo --dry-run
study list
study show small
study front small
study trials small --json
study effects small
study hardware small
study report small -o report.html
study export small -f csv -o study.csv
study replay small
study delete small -y
study pause small
family show fam
family report fam -o fam.html
device list
device remove x
agent list
agent run
token list
token create anna
server list
server add https://127.0.0.1:1 --token x
server add https://[2001:db8::1]:1 --token x
--show-completion
--install-completion
runtime list
doctor
gc
db upgrade
export '{LAYOUT}' -o out.gguf
import model -o out.safetensors
bench m.gguf --device nowhere
compare m.gguf cut.gguf --device nowhere
""".strip().splitlines()
)
"""Commands that work in the folder of a run, or say why not."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Returns path -> command of Typer for each that can be run."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    context = command.make_context("nas", [], resilient_parsing=True)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def argument_cases(chance: random.Random) -> Iterator[Case]:
    """Yields runs of every command with odd values of each of its parameters, and with words that it has not."""
    for path, command in commands(get_command(app)):
        needed = [one for one in command.params if one.required]
        for one in command.params:
            option = one.opts[0] if one.opts[0].startswith("-") else None
            if getattr(one, "is_flag", False):
                continue
            values = POOLS.get(one.name, PATHS if "path" in str(one.type_descriptor.annotation).lower() else ())
            typed = str(one.type_descriptor.annotation)
            values = values or (NUMBERS if re.search("int|float", typed) else (*TEXTS, *PATHS))
            # In the order of the draws: a set's differs between processes, and `--every` takes some of them.
            for value in dict.fromkeys([*chance.sample(values, 5), *chance.sample(TEXTS, 3)]):
                others = [word for other in needed if other is not one for word in USABLE.get(other.name, ("x",))]
                words = [
                    *path,
                    *HARMLESS.get(" ".join(path), ()),
                    *others,
                    *([option, value] if option else ["--", value]),
                ]
                yield Case("arguments", tuple(words))
        for extra in ("--no-such", "-", "x" * 100, "--json=1", "--help"):
            yield Case("arguments", (*path, *HARMLESS.get(" ".join(path), ()), extra))


def environment_cases(chance: random.Random) -> Iterator[Case]:
    """Yields commands in odd environments and processes."""
    for env in ENVIRONMENTS:
        new = any(name in env for name in AT_START)
        for words in chance.sample(READERS, 5 if new else 12):
            yield Case("environments", words, env, new=new)
    for alteration in ALTERATIONS:
        for words in READERS:
            yield Case("streams, users, limits", words, alteration=alteration)


def space_cases(chance: random.Random) -> Iterator[Case]:
    """Yields commands on damaged spaces."""
    whole = SPACE.read_text(encoding="utf-8")
    texts = [damaged_text(chance, whole) for _ in range(60)]
    texts += [
        yaml.safe_dump(damaged_value(chance, yaml.safe_load(whole)), allow_unicode=True).encode() for _ in range(240)
    ]
    nested, laughs = (
        b"[" * 5000,
        b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)),
    )
    for text in (
        *texts,
        b"",
        b"\0",
        b"---\n---\n",
        b"!!python/object/apply:os.system [id]",
        nested,
        laughs,
        b"- a\n",
        b"x",
        whole.encode("utf-16"),
    ):
        words = chance.choice(
            [
                ("space", "validate"),
                ("space", "show"),
                ("space", "sample"),
                ("launch", "--dry-run", "--space"),
                ("space", "show", "--json"),
            ]
        )
        yield Case("spaces", (*words, "damaged.yaml"), files={"damaged.yaml": text})


def layout_cases(chance: random.Random) -> Iterator[Case]:
    """Yields exports of damaged layouts."""
    alphabet = "dvCAMWGL[]()*/@+=:, 0123456789.-xé\n"
    for _ in range(150):
        text = chance.choice((LAYOUT, "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 W2/1@8(sink=1) M16]"))
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            text = (
                text[:place]
                + chance.choice(alphabet) * chance.choice((0, 1, 1, 9))
                + text[place + chance.randint(0, 3) :]
            )
        yield Case(
            "layouts", ("export", text, "-o", "out.gguf", "--recipe", *chance.choice(((), ("-r", "executorch"))))
        )


def file_cases(chance: random.Random) -> Iterator[Case]:
    """Yields readings of damaged archives, models and state files; the originals are those of a run's folder."""
    lines = gzip.decompress(ARCHIVE.read_bytes()).splitlines(keepends=True)
    head, last = lines[:40], lines[-20:]
    for _ in range(100):
        archive = [*head, *last] if chance.random() < 0.5 else lines[: chance.randint(1, 300)]
        place = chance.randrange(len(archive))
        if chance.random() < 0.7:
            archive[place] = json.dumps(damaged_value(chance, json.loads(archive[place]))).encode() + b"\n"
        else:
            archive[place] = damaged_text(chance, archive[place].decode())
        reading = chance.choice(
            (
                ("show",),
                ("trials",),
                ("effects",),
                ("hardware",),
                ("export", "-f", "csv", "-o", "x.csv"),
                ("report", "-o", "x.html"),
            )
        )
        before = (("study", "import", "damaged.jsonl", "--name", "again", "--trust"),)
        words = ("study", reading[0], "again", *reading[1:])
        yield Case("archives", words, files={"damaged.jsonl": b"".join(archive)}, before=before)
    models = [
        ("m.gguf", ("bench", "m.gguf", "-d", "nowhere")),
        ("m.gguf", ("compare", "m.gguf", "m.gguf", "-d", "nowhere")),
    ]
    models += [(f"model/{name}", ("import", "model", "-o", "out")) for name in ("config.json", "model.safetensors")]
    models += [
        ("model/config.json", ("adapt", "model", "-o", "out", "-d", "nowhere")),
        ("text.safetensors", ("generate", "text.safetensors")),
    ]
    models += [("text.safetensors", ("export", LAYOUT, "-o", "out.gguf", "--checkpoint", "text.safetensors"))]
    for _ in range(120):
        name, words = chance.choice(models)
        yield Case("models", words, alteration=f"damaged {name} {chance.randrange(1 << 30)}")
    states = (
        "agent/devices.json",
        "agent/enrolment.json",
        "families/fam/family.json",
        "config/servers.json",
        "keys",
        "signing.key",
    )
    readers = [
        ("device", "list"),
        ("device", "remove", "adb:X"),
        ("family", "show", "fam"),
        ("family", "show"),
        ("family", "report", "fam", "-o", "x"),
    ]
    readers += [
        ("server", "list"),
        ("server", "remove", "x"),
        ("agent", "run"),
        ("doctor",),
        ("device", "list", "--server", "https://127.0.0.1:1"),
    ]
    readers += [
        ("family", "build", "--name", "fam", "--sizes", "3M", "--layout", LAYOUT, "--no-measure", "--no-files", "-y")
    ]
    for _ in range(150):
        yield Case(
            "state files",
            chance.choice(readers),
            alteration=f"damaged home/{chance.choice(states)} {chance.randrange(1 << 30)}",
        )


def database_cases(chance: random.Random) -> Iterator[Case]:
    """Yields commands on damaged databases."""
    readers = [
        words
        for words in READERS
        if words[0] in ("study", "device", "agent", "token", "doctor", "gc", "db", "bench", "launch")
    ]
    for _ in range(300):
        how = chance.choice(("bytes", "cut", "values", "values", "values", "tables"))
        yield Case("databases", chance.choice(readers), alteration=f"database {how} {chance.randrange(1 << 30)}")


def damaged_text(chance: random.Random, text: str) -> bytes:
    """Returns the bytes of a text with a few of them changed, lost, doubled or replaced by what is hard to read."""
    data = bytearray(text.encode())
    for _ in range(chance.randint(1, 3)):
        place, length = chance.randrange(len(data) + 1), chance.choice((0, 1, 10, len(data) // 3))
        data[place : place + length] = chance.choice(
            (b"", b"\0", b"\t", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\xe2\x80\xae", b"{", b"*a", b"- ", b'"')
        )
    return bytes(data)


def damaged_value(chance: random.Random, value: Any) -> Any:
    """Returns JSON with one value lost or replaced, anywhere in it."""
    odd: tuple[Any, ...] = (
        None,
        [],
        {},
        "",
        "x",
        -1,
        0,
        1e308,
        1e999,
        True,
        1 << 70,
        [[]],
        {"x": 1},
        "\udce9".encode("utf-8", "replace").decode(),
        "a\nb",
        0.5,
        [1, "x", None],
    )
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return chance.choice(odd)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    what = chance.random()
    if what < 0.12:
        del copy[place]
    elif what < 0.2 and isinstance(copy, dict):
        copy[chance.choice(("x", "", "é", "name "))] = copy.pop(place)
    else:
        copy[place] = damaged_value(chance, copy[place])
    return copy


GROUPS = (argument_cases, environment_cases, space_cases, layout_cases, file_cases, database_cases)


def cases(seed: int) -> list[Case]:
    """Returns all cases; the same for the same seed."""
    return [case for number, group in enumerate(GROUPS) for case in group(random.Random(f"{seed} {number}"))]


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
"""The configuration of a model of transformers."""


def make_world(world: Path) -> None:
    """Makes the folder that each run gets a copy of."""
    files = {
        "empty": b"",
        "binary": bytes(range(256)) * 40,
        "text.yaml": b"a: 1\n",
        "caf\udce9.yaml": b"a: 1\n",
        "a\nb.yaml": b"a: 1\n",
        "zeros.gz": gzip.compress(bytes(50 << 20)),
        "cut.gz": gzip.compress(b"text" * 1000)[:30],
        "deep.json": b"[" * 100_000,
        "text.txt": b"some words of a text\n" * 500,
        "text.safetensors": (8).to_bytes(8, "little") + b'{"a":{}}',
        "cut.db": b"SQLite format 3\0" + bytes(30),
        "home/agent/devices.json": b'{"v":1,"devices":[{"address":"adb:X","tags":["phone"]}]}',
        "home/agent/enrolment.json": b"{}",
        "home/config/servers.json": b'{"v":1,"servers":[]}',
        "home/signing.key": b"x",
        "home/keys": b"x",
        "model/config.json": json.dumps(MODEL).encode(),
    }
    for name, content in files.items():
        (world / name).parent.mkdir(parents=True, exist_ok=True)
        (world / name).write_bytes(content)
    (world / "folder").mkdir()
    (world / "cache").mkdir()
    (world / "loop").symlink_to("loop")
    (world / "dangling").symlink_to("nowhere")
    (world / "small.jsonl").write_bytes(gzip.decompress(ARCHIVE.read_bytes()))
    os.mkfifo(world / "secret")
    (world / "secret").unlink()
    (world / "secret").touch(0o000)
    with contextlib.chdir(world), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, statement in (
        ("other.db", "CREATE TABLE x (y)"),
        ("newer.db", "CREATE TABLE alembic_version (version_num TEXT)"),
    ):
        with contextlib.closing(sqlite3.connect(world / name)) as database:
            database.execute(statement)
            database.execute("INSERT INTO alembic_version VALUES ('9999')") if name == "newer.db" else None
            database.commit()
    commands = (
        ("study", "import", "small.jsonl", "--name", "small"),
        ("family", "build", "--sizes", "3M", "--layout", LAYOUT, "--no-measure", "--no-files", "--name", "fam", "-y"),
        ("export", LAYOUT, "-o", "m.gguf"),
    )
    for words in commands:
        outcome = run_in(world, Case("world", words))
        assert outcome.code == 0, outcome
    _write_weights(world / "model" / "model.safetensors")
    for name in ("m.gguf", "model/model.safetensors"):
        content = (world / name).read_bytes()
        (world / f"cut{Path(name).suffix}").write_bytes(content[: len(content) // 2])


def _write_weights(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    width, inner, layer = 64, 128, "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}self_attn.{name}_proj.weight": (rows, width)
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
    }
    shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (width, inner), "model.embed_tokens.weight": (256, width)}
    shapes |= {
        name: (width,)
        for name in (f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight", "model.norm.weight")
    }
    numbers = np.random.default_rng(0)
    save_file(
        {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}, path, {"format": "pt"}
    )


def _alter(alteration: str) -> None:
    """Damages a file of this folder or this process, as the words of an alteration say."""
    what, _, rest = alteration.partition(" ")
    if what == "damaged":
        name, _, seed = rest.rpartition(" ")
        _damage_file(Path(name), random.Random(seed))
    elif what == "database":
        how, _, seed = rest.partition(" ")
        _damage_database(how, random.Random(seed))
    elif alteration:
        ALTERATIONS[alteration]()


def _damage_file(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    if chance.random() < 0.5:
        with contextlib.suppress(ValueError):
            path.write_bytes(json.dumps(damaged_value(chance, json.loads(content))).encode())
            return
    if content.isascii():
        path.write_bytes(damaged_text(chance, content.decode()))
        return
    data = bytearray(content)
    for _ in range(chance.choice((1, 3, 20))):
        place = chance.choice(
            (chance.randrange(min(len(data), 64)), chance.randrange(min(len(data), 4096)), chance.randrange(len(data)))
        )
        data[place] = chance.randrange(256)
    path.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])


def _damage_database(how: str, chance: random.Random) -> None:
    path = Path("home/hilnas.db")
    if how == "cut":
        os.truncate(path, chance.choice((0, 50, 4096, chance.randrange(path.stat().st_size))))
    elif how == "bytes":
        with path.open("r+b") as file:
            for _ in range(chance.choice((1, 4, 40))):
                file.seek(chance.randrange(path.stat().st_size - 100))
                file.write(chance.randbytes(chance.choice((1, 100))))
    else:
        with contextlib.closing(sqlite3.connect(path)) as database:
            named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
            tables = [name for (name,) in named]
            if how == "tables":
                name = chance.choice(tables)
                database.execute(f'ALTER TABLE "{name}" RENAME TO gone')
            else:
                filled = [name for name in tables if database.execute(f'SELECT 1 FROM "{name}"').fetchone()]
                name = chance.choice(filled)
                column = chance.choice([row[1] for row in database.execute(f'PRAGMA table_info("{name}")')])
                value = chance.choice(("", "x", "{", "[]", "null", -1, 1e300, b"\xff\xfe", 1 << 62, "é" * 100, "{}"))
                with contextlib.suppress(sqlite3.IntegrityError):
                    database.execute(f'UPDATE OR IGNORE "{name}" SET "{column}" = ?', (value,))
            database.commit()


def run(case: Case, world: Path) -> list[Outcome]:
    """Runs a case in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hilnas-fuzz-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "a folder"
        shutil.copytree(world, place, symlinks=True, ignore=lambda _, names: {"socket"} & set(names))
        Path(folder).chmod(0o755)
        for path in place.rglob("*"):
            if case.alteration in ("unknown user", "read-only home") and not path.is_symlink():
                os.chown(path, NOBODY, NOBODY)
        if case.alteration == "unknown user":
            os.chown(place, NOBODY, NOBODY)
        for name, content in case.files.items():
            (place / name).write_bytes(content)
        outcomes = [run_in(place, Case(case.group, words)) for words in case.before]
        return [*outcomes, run_in(place, case)]


def run_in(place: Path, case: Case) -> Outcome:
    """Runs the command of a case in `place`, waits for its end, and judges it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as crash:
        start = time.monotonic()
        sys.stdout.flush()
        if not (child := os.fork()):
            _become(case, place, out.fileno(), err.fileno(), crash.fileno())
        code, hung = _end_of(child, steady=any(case.words[: len(path)] == path for path in STEADY))
        texts = []
        for file in (out, err, crash):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace"))
    output = "\n".join(texts)
    fault = "hangs" if hung else ""
    if texts[2]:
        fault = "traceback"
    elif not fault and (match := FAULT_TEXT.search(output)):
        fault = f"shows {match[0]!r}"
    elif not fault and code not in CODES:
        fault = f"ends with {code}"
    elif not fault and code and not "".join(texts).strip() and case.alteration not in SILENT:
        fault = f"ends with {code} and says nothing"
    elif not fault and (leftovers := [path.name for pattern in SCRATCH for path in place.rglob(pattern)]):
        fault = f"leaves {leftovers[0]}"
    excerpt = output[-3000:] if fault else texts[1][-300:]
    parts = [case.alteration, *(f"{name}={value}" for name, value in case.env.items()), *case.files]
    description = ", ".join(parts).strip(", ")
    return Outcome(case.group, case.words, description, code, round(time.monotonic() - start, 2), fault, excerpt)


def _end_of(child: int, *, steady: bool) -> tuple[int, bool]:
    """Waits for a process, and ends it if it takes too long; returns its exit code and whether it hung."""
    limit, is_terminated = (5.0 if steady else LIMIT_S), False
    past = 0.0
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            code = os.waitstatus_to_exitcode(status)
            return (0 if is_terminated and steady and code == -signal.SIGTERM else code), is_terminated and not steady
        if past > limit and not is_terminated:
            os.killpg(child, signal.SIGTERM)
            is_terminated = True
        elif past > limit + 15:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL, True
        pause = 0.005 if past < 1 else 0.05
        time.sleep(pause)
        past += pause  # not by a clock: where everything is stopped for a while, nothing hangs


def _become(case: Case, place: Path, out: int, err: int, crash: int) -> NoReturn:
    """Becomes the command, in a fork."""
    os.setsid()
    os.chdir(place)
    crash = os.dup(crash)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ |= {
        "HOME": str(place),
        "NAS_HOME": str(place / "home"),
        "NAS_CACHE": str(place / "cache"),
        "NAS_CONFIG": str(place / "home/config"),
    }
    for name, value in case.env.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    code = 70
    try:
        if case.new:
            _alter(case.alteration)
            os.execv(sys.executable, [sys.executable, "-c", "from nas.cli.main import main; main()", *case.words])
        sys.stdin, sys.stdout = (
            os.fdopen(number, "rw"[number], encoding="utf-8", closefd=False) for number in range(2)
        )
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        tempfile.tempdir = None
        _alter(case.alteration)
        sys.argv = ["nas", *case.words]
        main()
        code = 0
        sys.stdout.flush()
    except SystemExit as end:
        with contextlib.suppress(AttributeError, OSError):
            sys.stdout.flush()
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        os.write(crash, traceback.format_exc().encode(errors="backslashreplace"))
    os._exit(code)


def summary(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of runs by group."""
    groups = list(dict.fromkeys(outcome["group"] for outcome in outcomes))
    rows: list[list[object]] = []
    for group in groups:
        of_group = [outcome for outcome in outcomes if outcome["group"] == group]
        codes = Counter(outcome["code"] for outcome in of_group)
        rows.append(
            [
                group,
                len(of_group),
                *(codes[code] for code in CODES[:5]),
                sum(bool(outcome["fault"]) for outcome in of_group),
            ]
        )
    total = [sum(int(str(row[column])) for row in rows) for column in range(1, 8)]
    heads = ("", "runs", *(f"exit code {code}" for code in CODES[:5]), "faults")
    return table(heads, [*rows, ["all", *total]])


APART = ("testing", "__main__", "migrations", "ray_reaper", "hf_code", "lm_eval_tasks", "template_process", "harness")
"""Parts of the names of modules that something else runs."""


def _warm() -> None:
    """Imports all of hilnas, so that forks need not."""
    codecs.lookup("ascii")  # which another user could not read from this one's Python
    for module in pkgutil.walk_packages(nas.__path__, "nas."):
        if not any(part in module.name for part in APART):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def main_of_fuzz() -> None:
    """Runs the benchmark, or writes its table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="run only each N-th case")
    parser.add_argument("--only", help="run only this group")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the table of RESULT into this page")
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        lines = arguments.result.read_text(encoding="utf-8").splitlines()
        fill(arguments.page, "measured: command_fuzz", summary([json.loads(line) for line in lines]))
        return
    _warm()
    chosen = [case for case in cases(arguments.seed) if arguments.only in (None, case.group)][:: arguments.every]
    if os.geteuid():
        chosen = [case for case in chosen if case.alteration not in ("unknown user", "read-only home")]
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hilnas-fuzz-", ignore_cleanup_errors=True) as folder:
        world = Path(folder)
        world.chmod(0o755)
        make_world(world)
        with get_context("fork").Pool(arguments.workers) as pool:
            for several in pool.imap_unordered(partial(run, world=world), chosen):
                for outcome in several:
                    outcomes.append(asdict(outcome))
                    print(json.dumps(outcomes[-1]), flush=True)
                    if outcome.fault:
                        line = f"{outcome.fault}: nas {shlex.join(outcome.words)!a} ({outcome.alteration!a})"
                        print(line, file=sys.stderr, flush=True)
    print(summary(outcomes), file=sys.stderr)
    sys.exit(any(outcome["fault"] for outcome in outcomes))


if __name__ == "__main__":
    main_of_fuzz()
