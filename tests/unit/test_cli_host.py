"""Commands about this machine: doctor, db, export."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runner import nas

from nas.cli import doctor, preflight
from nas.cli.doctor import Finding, worst
from nas.cli.lazy import extras
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.core.space import RuntimeSpace
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import Calibrator
from nas.testing.fake_reader import FakeReader

pytestmark = pytest.mark.usefixtures("home")

SMALL = "d256 v512 ffn=swiglu:512 [C3 A4/2]"


def _doctor(*args: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = nas("doctor", "--json", *args)
    return done.code, {check["name"]: check for check in json.loads(done.out)["checks"]}


def test_doctor_finds_the_missing_build_and_names_its_remedy() -> None:
    code, checks = _doctor()
    assert code == 1
    assert checks["llama.cpp"]["status"] == "failure"
    assert "nas runtime build llama.cpp" in checks["llama.cpp"]["fix"]
    assert checks["home"]["status"] == checks["cache"]["status"] == "ok"


def test_doctor_looks_at_executorch_and_does_not_insist_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, checks = _doctor()
    assert checks["executorch"]["status"] == "ok" and "torchao" in checks["executorch"]["detail"]
    assert checks["et-runner"]["status"] == "warning"
    assert checks["et-runner"]["fix"] == "run `nas runtime build executorch`"
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "torchao" else version(name))
    _, checks = _doctor()
    assert checks["executorch"]["status"] == "warning"
    assert "torchao 0.1 instead of 0." in checks["executorch"]["detail"]

    def missing(name: str) -> str:
        if name == "executorch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    _, checks = _doctor()
    assert (checks["executorch"]["status"], checks["executorch"]["detail"]) == ("warning", "not installed: executorch")
    assert ".[executorch]" in checks["executorch"]["fix"]
    assert "et-runner" not in checks


def test_everything_that_is_not_ok_has_a_remedy() -> None:
    _, checks = _doctor()
    for check in checks.values():
        assert (check["fix"] is None) == (check["status"] == "ok"), check


def test_names_of_processes_do_not_reach_the_terminal_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    load = preflight.Load(cores=1.0, of=2, processes=(("evil\x1b[2J", 1.0),))
    monkeypatch.setattr(preflight, "load", lambda: load)
    done = nas("doctor")
    assert "evil" in done.out and "\x1b" not in done.out


def test_text_has_a_line_for_every_check() -> None:
    done = nas("doctor")
    _, checks = _doctor()
    assert [line.split()[1] for line in done.out.splitlines() if "fix:" not in line] == list(checks)


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"/sys/devices/platform/soc/soc:firmware/get_throttled": "0x50005"}, "warning", "undervoltage, throttling"),
        ({"/sys/devices/platform/soc/soc:firmware/get_throttled": "0x50000"}, "ok", "none now"),
        ({"/sys/class/thermal/cooling_device0/type": "Processor", "/sys/class/thermal/cooling_device0/cur_state": "5"},
         "warning", "cooling level 5"),
        ({"/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "7"}, "ok", "7 events since boot"),
    ],
)  # fmt: skip
def test_doctor_warns_of_a_processor_that_is_slowed_down(changes: dict[str, str], status: str, text: str) -> None:
    finding = doctor._throttling(FakeReader(changes))
    assert finding.status == status and text in finding.detail


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, {}),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, {"CPU quota": "of 1.5 cores"}),
        ({"/proc/self/cgroup": "0::/user.slice/a\n", "/sys/fs/cgroup/user.slice/a/memory.max": "1000000000\n",
          "/sys/fs/cgroup/memory.max": "max\n"}, {"memory limit": "1,000 MB"}),
        ({"/proc/self/cgroup": "nonsense", "/sys/fs/cgroup/cpu.max": "0 0 x"}, {}),
    ],
)  # fmt: skip
def test_doctor_sees_the_limits_of_a_container(files: dict[str, str], expected: dict[str, str]) -> None:
    findings = {finding.name: finding for finding in doctor._container(FakeReader(files))}
    assert findings.keys() == expected.keys()
    for name, text in expected.items():
        assert findings[name].status == "warning" and text in findings[name].detail and findings[name].fix


def test_doctor_sees_a_folder_that_cannot_be_written(home: Path) -> None:
    home.write_text("a file where a folder should be")
    _, checks = _doctor()
    assert checks["home"]["status"] == "failure"
    assert "NAS_HOME" in checks["home"]["fix"]


def test_doctor_sees_a_file_that_is_no_database(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    other.write_text("not a database at all, but long enough to be read as one " * 10)
    _, checks = _doctor("--db", f"sqlite:///{other}")
    assert checks["database"]["status"] == "failure"


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FREE_DISK_GB", 1e9)
    _, checks = _doctor()
    assert checks["disk"]["status"] == "warning"


@pytest.mark.parametrize(("limit", "check"), [("FREE_SHARED_MB", "shm"), ("FEW_FILES", "files")])
def test_a_low_limit_is_a_warning(limit: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, limit, 1e12)
    _, checks = _doctor()
    assert checks[check]["status"] == "warning"


def test_a_database_on_a_network_file_system_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open().close()
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(home), fstype="nfs4")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    _, checks = _doctor()
    assert checks["database"]["status"] == "warning" and "nfs4" in checks["database"]["detail"]


def test_a_long_folder_of_temporary_files_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * 60)
    _, checks = _doctor()
    assert checks["tmpdir"]["status"] == "failure" and "set RAY_TMPDIR" in checks["tmpdir"]["fix"]


def test_without_a_home_folder_the_other_checks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", "~nobody-of-that-name/x")
    code, checks = _doctor()
    assert code == 1 and {"packages", "cache", "clock", "memory"} <= set(checks)
    assert checks["home"]["status"] == checks["database"]["status"] == "failure"


def test_a_check_that_fails_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no such clock")

    monkeypatch.setattr(doctor, "_clock", broken)
    _, checks = _doctor()
    assert checks["clock"]["detail"] == "RuntimeError: no such clock" and "cores" in checks


def test_packages_of_an_extra_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    missing_packages = {"pyarrow", "gguf"}

    def lacking(name: str) -> str:
        if name in missing_packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", lacking)
    _, checks = _doctor()
    assert (
        checks["corpora"]["status"] == "ok"
        and "pyarrow: pip install '.[corpora]' in a checkout" in checks["corpora"]["detail"]
    )
    assert (checks["packages"]["status"], checks["packages"]["fix"]) == (
        "failure",
        "pip install '.[search]' in a checkout",
    )


def test_every_extra_is_checked() -> None:
    assert set(doctor.EXTRAS) | {"search", "executorch", "build", "test"} == set(extras())


def test_the_doctor_needs_no_streams(tmp_path: Path) -> None:
    script = f'"{sys.executable}" -m nas.cli doctor <&- >&- 2>"{tmp_path / "errors"}"'
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 1
    assert (tmp_path / "errors").read_text() == "hilnas cannot work here: see the fixes above\n"


def test_worst_status_counts() -> None:
    assert worst([]) == "ok"
    assert worst([Finding("a", "warning", ""), Finding("b", "failure", ""), Finding("c", "ok", "")]) == "failure"


def test_db_upgrade_needs_a_database_and_leaves_a_current_one_alone(home: Path) -> None:
    assert nas("db", "upgrade").code == 3
    Store.open().close()
    before = (home / "hilnas.db").read_bytes()
    done = nas("db", "upgrade", "--json")
    assert done.code == 0
    assert json.loads(done.out)["backup"] is None
    assert (home / "hilnas.db").read_bytes() == before


def test_export_writes_the_file_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    refused = nas("export", SMALL, "-o", str(path.parent / "nosuch" / "x.gguf"))
    assert refused.code == 3 and "--output: there is no folder" in refused.err
    written = json.loads(nas("export", SMALL, "-o", str(path), "--json").out)
    assert path.stat().st_size == written["size"]
    assert path.read_bytes()[:4] == b"GGUF"
    assert written["layout"] == SMALL
    assert written["quantisation"] == "q4_0"


def test_export_reads_a_layout_from_stdin_and_refuses_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    assert nas("export", "-", "-o", str(path), "-q", "f16", stdin=SMALL + "\n").code == 0
    for args in (["d256 what", "-o", str(path)], [SMALL, "-o", str(path), "-r", "lama.cpp"]):
        assert nas("export", *args).code == 3


def test_export_refuses_a_whole_graph_where_there_is_none_and_weights_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "small"
    whole = nas("export", SMALL, "-o", str(path), "--whole", "512")
    assert whole.code == 3 and "files of llama.cpp can be used in apps without it" in whole.err
    sinks = nas(
        "export", "d64 v128 ffn=swiglu:64 [W2/1@8(sink=1)]", "-o", str(path), "-r", "executorch", "--whole", "64"
    )
    assert sinks.code == 3 and "neither attention sinks nor bounded scores" in sinks.err
    both = nas("export", SMALL, "-o", str(path), "-r", "executorch", "--whole", "64", "--recipe")
    assert both.code == 3 and "--recipe: cannot be combined with --whole" in both.err
    missing = nas("export", SMALL, "-o", str(path), "--checkpoint", str(tmp_path / "none"))
    assert missing.code == 3 and "none" in missing.err
    assert not path.exists()


def test_export_of_trained_weights_names_them(tmp_path: Path) -> None:
    from nas.testing.planted_faults import checkpoint

    layout = Layout.parse(SMALL)
    trained = checkpoint(layout, tmp_path / "weights")
    options = ("-o", str(tmp_path / "file"), "-q", "f16", "--checkpoint", str(trained.path), "--json")
    written = json.loads(nas("export", SMALL, *options).out)
    assert written["weights"] == trained.describe()


@pytest.mark.parametrize(
    "options", [(), ("-r", "executorch"), ("-r", "executorch", "--whole", "64"), ("--checkpoint", "", "--recipe")]
)
def test_export_refuses_a_tokenizer_for_what_holds_none(options: tuple[str, ...], tmp_path: Path) -> None:
    weights, path = tmp_path / "weights", tmp_path / "file"
    weights.write_bytes(b"weights")
    named = [str(weights) if option == "" else option for option in options]
    if "-r" in options:
        named += ["--checkpoint", str(weights)]
    done = nas("export", SMALL, "-o", str(path), "--tokenizer", str(tmp_path / "tokenizer.json"), *named)
    assert done.code == 3 and "--tokenizer: only GGUF files" in done.err and not path.exists()


def test_export_counts_the_weights_exactly(tmp_path: Path) -> None:
    path, mixture = tmp_path / "tiny.gguf", "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2]"
    written = json.loads(nas("export", mixture, "-o", str(path), "--json").out)
    counted = Layout.parse(mixture).params
    assert (written["parameters"], written["active_parameters"]) == (counted.total, counted.active)
    assert f"{counted.total:,} (" in nas("export", mixture, "-o", str(path)).out


def test_published_names_are_layouts() -> None:
    from nas.cli.options import read_layout

    assert read_layout("LFM2-350M").format() == LFM2["LFM2-350M"]
    assert read_layout("Zebra-Llama-1B-8MLA").params.total == pytest.approx(1.27e9, rel=0.01)


def test_a_mistyped_published_name_is_told_the_nearest(tmp_path: Path) -> None:
    mistyped = nas("export", "LFM2-350", "-o", str(tmp_path / "m.gguf"))
    assert mistyped.code == 3
    assert "unknown published layout 'LFM2-350'; did you mean 'LFM2-350M'?" in mistyped.err
    assert "valid: Falcon-H1-0.5B, LFM2-1.2B, " in nas("export", "gpt2", "-o", str(tmp_path / "m.gguf")).err
    assert "unknown published layout, file or folder 'none.gguf'" in nas("bench", "none.gguf").err


@pytest.mark.parametrize(
    ("layout", "build"), [("d256 v512 ffn=swiglu:512 [C3 A4/2]", "stock"), ("d256 v512 ffn=swiglu:512 [C3 M16]", "any")]
)
def test_bench_of_a_file_takes_the_build_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, build: str
) -> None:
    """The same as of the layout that it was made from."""
    path = tmp_path / "m.gguf"
    assert nas("export", layout, "-o", str(path)).code == 0
    specs: list[RuntimeSpace] = []

    async def target(self: Calibrator, device: str, spec: RuntimeSpace, saved: object) -> None:
        specs.append(spec)
        raise InfrastructureFailed("no device here")

    monkeypatch.setattr(Calibrator, "target", target)
    monkeypatch.setattr("nas.measure.protocol.bench.open_farm", lambda store: nullcontext(_NoFarm()))
    for subject in (str(path), layout):
        assert "no device here" in nas("bench", subject).err
    assert [spec.build for spec in specs] == [build, build]


class _NoFarm:
    def jobs(self, study: None) -> None:
        return None


def test_bench_of_what_is_no_model_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("hello, this is no model")
    refused = nas("bench", str(tmp_path / "m.gguf"))
    assert refused.code == 3 and "not a GGUF file" in refused.err
