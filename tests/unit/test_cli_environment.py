"""Commands in odd environments: outputs that are no files, missing packages, closed streams."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from cli_runner import nas

from nas.cli.lazy import missing_package
from nas.core import paths
from nas.core.durable import output_file, write_output
from nas.core.errors import InvalidInput
from nas.core.trust import open_http
from nas.core.units import parse_size
from nas.infra.store import studies
from nas.infra.store.store import Store
from nas.search.spaces import load_space, space_text


def test_an_output_replaces_the_file_that_a_link_names_with_the_mode_of_a_new_file(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_output(link, b"new")
    (tmp_path / "fresh").touch()
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert target.stat().st_mode == (tmp_path / "fresh").stat().st_mode
    assert not list(tmp_path.glob(".hilnas*"))


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    write_output(pipe, b"content")
    assert reader.communicate(timeout=20)[0] == b"content"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_that_is_appended_to_keeps_what_it_has(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    script = (
        "from pathlib import Path; from nas.core.durable import write_output as w; w(Path('/dev/stdout'), b'after')"
    )
    with log.open("ab") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert log.read_text() == "before\nafter"


def test_a_failed_output_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), output_file(path) as scratch:
        scratch.write_bytes(b"half")
        raise ZeroDivisionError
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["nowhere/x.csv", "folder", "model.safetensors", "hard", "x" * 300])
def test_an_output_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "hard").hardlink_to(tmp_path / "model.safetensors")
    with (
        pytest.raises(InvalidInput, match=r"^--output: "),
        output_file(tmp_path / name, reads=[tmp_path / "model.safetensors"]),
    ):
        pass
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_a_file_of_a_folder_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = nas("import", str(tmp_path), "-o", str(tmp_path / "config.json"))
    assert done.code == 3 and "is a file that this command reads" in done.err


@pytest.mark.parametrize(("module", "line"), [("torch", "'.[search]'"), ("pyarrow.fs", "'.[corpora]'")])
def test_a_missing_package_names_its_extra(module: str, line: str) -> None:
    error = missing_package(ModuleNotFoundError(name=module))
    assert error is not None and line in str(error)
    assert missing_package(ModuleNotFoundError(name="nas.gone")) is None


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(closed: str) -> None:
    script = f'"{sys.executable}" -m nas.cli --version {closed}'
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 0


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = nas("study", "show", "caf\udce9")
    assert done.code == 3 and "is not text" in done.err


@pytest.mark.parametrize("name", ["NAS_HOME", "NAS_CACHE"])
def test_a_home_folder_that_does_not_exist_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "~nobody-of-that-name/x")
    with pytest.raises(InvalidInput, match=name):
        paths.home() if name == "NAS_HOME" else paths.cache()


def test_a_long_folder_of_temporary_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * 52)
    with pytest.raises(InvalidInput, match="too long for Ray's sockets; set RAY_TMPDIR"):
        paths.require_short_sockets()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    paths.require_short_sockets()


def test_a_size_that_is_none_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    done = nas("gc", "--keep", "5GiB")
    assert done.code == 3 and "--keep: '5GiB' is not a size" in done.err


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("0GB", 0), ("1.5GB", 1_500_000_000), ("2kB", 2000)])
def test_sizes_of_files(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_folder_of_benchmarks_that_is_none_is_refused_at_once() -> None:
    done = nas("family", "evaluate", "x", "--size", "3M", "--benchmarks", "nowhere")
    assert done.code == 3 and "--benchmarks: there is no folder nowhere" in done.err


def test_a_dry_run_checks_the_name() -> None:
    assert nas("launch", "--space", "lfm2-demo", "--study", "a/b", "--dry-run").code == 3


def test_a_dry_run_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'studies.db'}"
    with closing(Store.open(database)) as store:
        studies.create(store, "mine", {}, seed=0, version="x")
    done = nas("launch", "--space", "lfm2-demo", "--study", "mine", "--dry-run", "--db", database)
    assert done.code == 3 and "exists; choose another name, or continue it with 'nas launch --study mine" in done.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quality:\n", "quality:\n  corpus: [nowhere/*.txt]\n", "the pattern matches no file"),
        ("quality:\n", "quality:\n  corpus: {files: [texts]}\n", "no such file or folder"),
        ("gen: 100,", "gen: 100, affinity: [9999],", "has no core 9999"),
        ("gen: 100,", "gen: 100, affinity: [-1],", "has no core -1"),
    ],
)
def test_what_a_launch_refuses_is_a_line_of_the_space(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = space_text("lfm2-demo")
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for command in (("space", "validate"), ("launch", "--dry-run", "--space")):
        done = nas(*command, str(path))
        assert done.code == 3 and message in done.err and "mine.yaml:" in done.err, done.err


def test_a_space_is_read_from_a_pipe() -> None:
    script = f'cat "$1" | "{sys.executable}" -m nas.cli space validate /dev/stdin'
    file = Path(str(load_space.__code__.co_filename)).with_name("lfm2-demo.yaml")
    done = subprocess.run(["sh", "-c", script, "sh", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, "lfm2-demo: valid")


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("- a\n", "is no mapping"), ("x", "is no mapping")])
def test_a_file_that_is_no_space_is_called_so(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text(text)
    done = nas("space", "validate", str(tmp_path / "none.yaml"))
    assert done.code == 3 and f"none.yaml:1: {message}: a space is a YAML file of keys" in done.err


@pytest.mark.parametrize("name", ["NAS_HOME", "NAS_CACHE"])
def test_a_link_to_itself_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv(name, str(tmp_path / "loop"))
    done = nas("runtime", "list") if name == "NAS_CACHE" else nas("db", "upgrade")
    assert done.code == 3 and done.err.startswith("nas: Symlink loop") and done.err.count("\n") == 1


@pytest.mark.parametrize("url", ["https://[::1", "http://x", "https://h:99999", "https://", "x" * 100])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    done = nas("study", "list", "--server", url)
    assert done.code == 3 and "--server: " in done.err


def test_an_error_that_cannot_be_written_is_still_an_exit_code() -> None:
    script = f'"{sys.executable}" -m nas.cli space show none.yaml 2>/dev/full'
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 3


def test_what_the_locale_cannot_encode_is_escaped() -> None:
    script = (
        "from nas.cli.main import _open_streams; _open_streams()\n"
        "from nas.cli.output import print_json, print_table\n"
        "print_json({'a': '↓💥'}); print_table(('x',), [['↓']])"
    )
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
    *lines, _, cell = done.stdout.decode().splitlines()
    assert json.loads("".join(lines)) == {"a": "↓💥"} and cell == r"\u2193"


def test_what_the_locale_cannot_decode_is_left_to_its_reader() -> None:
    script = (
        "from nas.cli.main import _open_streams; _open_streams()\n"
        "from nas.cli.output import asked_lines\n"
        "print([ascii(line) for line in asked_lines()])"
    )
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, input=b"caf\xe9\ntea\n", capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == str([ascii("caf\udce9\n"), ascii("tea\n")])


def test_messages_that_nobody_can_read_end_no_study() -> None:
    script = "from nas.cli.output import say; say('trial 1'); print('done')"
    command = f'"{sys.executable}" -c "{script}" 2>/dev/full'
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False).stdout == "done\n"


@pytest.mark.parametrize(
    ("host", "reached"), [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("h.example", False)]
)
def test_no_proxy_is_asked_for_this_machine(host: str, reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    with open_http(f"https://{host}:7711") as http:
        assert http.trust_env is not reached


@pytest.mark.parametrize("proxy", ["ftp://x", "http://[::1"])
def test_a_proxy_that_is_none_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    done = nas("server", "add", "https://h.example:1", "--token", "x")
    assert done.code == 3 and "HTTPS_PROXY" in done.err


@pytest.mark.parametrize(
    ("variable", "value"), [("NO_PROXY", "localhost,fd07:b51a::/64"), ("SSL_CERT_FILE", "/nowhere.pem")]
)
def test_variables_of_the_network_that_cannot_be_used_are_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput, match=rf"\${variable}"):
        open_http("https://h.example")
