"""`nas vllm` against a stand-in of vLLM's HTTP API: figures of known times, and how it goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Outcome, nas
from vllm_stand_in import Behaviour, program, stand_in

from nas.core.errors import InfrastructureFailed
from nas.measure.protocol.vllm import _COUNTER, Load, _answer, _events, _message, _Stream

LAYOUT = "d256 v512 ffn=swiglu:512 [C3 A4/2]"
SHORT = ("-p", "16", "-n", "8", "--reps", "2")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks more often than usual whether the server is ready, has ended or has counted."""
    monkeypatch.setattr("nas.measure.protocol.vllm._POLL_S", 0.02)


def ask(behaviour: Behaviour, *args: str) -> Outcome:
    with stand_in(behaviour) as (url, _):
        return nas("vllm", url, *SHORT, *args)


def report_of(done: Outcome) -> dict[str, Any]:
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def test_times_are_those_of_the_server() -> None:
    with stand_in(Behaviour(first_s=0.06, token_s=0.02)) as (url, state):
        report = report_of(nas("vllm", f"{url}/v1/", *SHORT, "--batch", "1,3", "--json"))
    one, three = report["batches"]
    for row in (one, three):  # sleeps are never shorter than asked for; how much longer depends on the machine
        assert row["ttft_ms"]["value"] >= 60
        assert row["decode_p50_ms"]["value"] > 0
        assert 0 < row["throughput_tps"]["value"] <= row["batch"] * 8 / 0.2
        assert row["foreign_tokens"] == 0
        assert row["tokens_per_read"] >= 1
        assert len(row["repetitions"]) == 2
    assert state.most == 3
    assert len(state.bodies) == 3 * (1 + 3)  # the first of each batch is left out
    prompts = [body["prompt"] for body in state.bodies]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert all(len(prompt) == 16 and max(prompt) < 1000 for prompt in prompts)
    assert {body["ignore_eos"] for body in state.bodies} == {True}
    assert report["server"]["vllm"] == "0.0.0+stand.in"
    assert report["gpu"] is None
    assert report["gpu_reason"]


def test_a_table_is_printed_with_what_others_did() -> None:
    done = ask(Behaviour(foreign=3), "--batch", "1,2")
    assert done.code == 0, done.err
    assert "batch\tTTFT, ms" in done.out
    assert "for others" in done.err
    assert "in the server's cache" in done.err


def test_tokens_of_one_event_share_its_time() -> None:
    (row,) = report_of(ask(Behaviour(per_event=4, token_s=0.01), "--batch", "1", "--json"))["batches"]
    assert row["tokens_per_read"] >= 8 / 3
    assert row["decode_p50_ms"]["value"] > 0


def test_events_without_counts() -> None:
    (row,) = report_of(ask(Behaviour(counts=False, metrics=False), "--batch", "1", "--json"))["batches"]
    assert row["decode_p50_ms"]["value"]
    assert row["foreign_tokens"] is None
    (row,) = report_of(ask(Behaviour(counts=False, per_event=4), "--batch", "1", "--json"))["batches"]
    assert row["decode_p50_ms"]["value"] is None
    assert "how many tokens" in row["decode_p50_ms"]["reason"]
    assert row["throughput_tps"]["value"]


def test_counters_that_cannot_be_read_lose_no_batch() -> None:
    (row,) = report_of(ask(Behaviour(breaks=True), "--batch", "1", "--json"))["batches"]
    assert row["decode_p50_ms"]["value"]
    assert row["foreign_tokens"] is None
    assert "/metrics: " in row["foreign_reason"]


def test_what_is_no_number_and_no_message_is_left_out() -> None:
    counters = b'vllm:generation_tokens_total{engine="0"} %b\n'
    for number in (b"8.0", b"1.234567e+07", b"1e+010"):
        assert _COUNTER.findall(counters % number) == [(b"generation_tokens", number)]
    for number in (b"1.2.3", b".", b"1e+999"):
        assert not _COUNTER.findall(counters % number)
    assert _message(b"[" * 100_000) == "[" * 400


@pytest.mark.parametrize("status", [502, 504])
def test_waits_behind_a_proxy_while_the_server_loads(status: int) -> None:
    assert ask(Behaviour(loads=1, loading=status), "--batch", "1").code == 0


def test_waits_while_the_server_loads() -> None:
    with stand_in(Behaviour(loads=2)) as (url, state):
        assert nas("vllm", url, *SHORT, "--batch", "1").code == 0
    assert state.checks == 3
    done = ask(Behaviour(loads=1000), "--batch", "1", "--ready", "1")
    assert done.code == 4
    assert "not ready after 1 s: /health answers 503" in done.err


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(fault="error"), "the server ended a request: CUDA out of memory"),
        (Behaviour(fault="reset"), "peer closed connection"),
        (Behaviour(fault="garbage"), "no event that can be read"),
        (Behaviour(fault="endless"), "more than"),
        (Behaviour(fault="busy"), "/v1/completions answers 500: EngineCore encountered an issue."),
        (Behaviour(fault="bomb"), f"generated {1 << 39} of 8 tokens"),
        (Behaviour(fewer=3), "generated 5 of 8 tokens: start it with `--generation-config vllm`"),
        (Behaviour(usage=False, counts=False), "does not count tokens"),
    ],
)
def test_a_fault_is_one_line(behaviour: Behaviour, message: str) -> None:
    done = ask(behaviour, "--batch", "2")
    assert done.code == 4
    *_, last = done.err.splitlines()
    assert last.startswith("nas: 2 request(s) together: ") and message in last
    assert "Traceback" not in done.err


def test_a_stream_that_stalls_ends_at_the_deadline() -> None:
    done = ask(Behaviour(fault="stall"), "--batch", "2", "--deadline", "1")
    assert done.code == 4
    assert "2 request(s) did not end within 1 s: 2 had begun to answer, the last data " in done.err


def test_sizes_that_worked_are_shown_before_the_failure() -> None:
    done = ask(Behaviour(fault="error", at=8), "--batch", "1", "-n", "8", "--json")
    assert done.code == 0
    done = ask(Behaviour(fewer=1), "--batch", "1,2", "--json")
    assert done.code == 4
    assert json.loads(done.out)["failure"]["batch"] == 1


def test_names_of_models() -> None:
    two = Behaviour(models=["a", "b"])
    assert "several models: a, b" in ask(two).err
    done = ask(two, "--model", "aa")
    assert done.code == 3
    assert "unknown model 'aa'; did you mean" in done.err or "unknown model 'aa'; valid: a, b" in done.err
    assert ask(two, "--model", "b", "--batch", "1").code == 0


def test_requests_longer_than_the_server_reads() -> None:
    done = ask(Behaviour(), "-p", "4090")
    assert done.code == 3
    assert "4090 + 8 tokens, and the server reads at most 4096" in done.err


@pytest.mark.parametrize("url", ["http://", "http://a:b@host", "http://host:99999", "http://host?x=1"])
def test_addresses_that_are_none(url: str) -> None:
    done = nas("vllm", url)
    assert done.code == 3
    assert "no address of a server" in done.err


def test_nobody_answers() -> None:
    done = nas("vllm", "http://127.0.0.1:9", "--ready", "1")
    assert done.code == 4
    assert "not ready after 1 s" in done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["Lfm2ForCausalLM"], "vocab_size": 64}))
    return place


def read_record(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    return record


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_folder_is_served_and_the_server_ended(tmp_path: Path, folder: Path, home: Path) -> None:
    path = program(tmp_path, Behaviour(loads=1))
    report = report_of(nas("vllm", str(folder), *SHORT, "--batch", "1,2", "--program", str(path), "--json"))
    assert [row["batch"] for row in report["batches"]] == [1, 2]
    assert report["vocab"] == 64
    argv = read_record(tmp_path)["argv"]
    assert argv[:2] == ["serve", str(folder)]
    for option, value in (("--max-model-len", "24"), ("--max-num-seqs", "2"), ("--generation-config", "vllm")):
        assert argv[argv.index(option) + 1] == value
    assert "--load-format" not in argv
    assert not any(map(is_alive, read_record(tmp_path)["pids"]))
    assert not Path(argv[argv.index("--uds") + 1]).exists()


def test_a_layout_is_served_with_numbers_of_the_server(tmp_path: Path, home: Path) -> None:
    path = program(tmp_path, Behaviour())
    report = report_of(nas("vllm", LAYOUT, *SHORT, "--batch", "1", "--program", str(path), "--json"))
    assert report["vocab"] == 512
    assert {"dummy", "--skip-tokenizer-init"} < set(read_record(tmp_path)["argv"])
    assert read_record(tmp_path)["config"]["architectures"] == ["Lfm2ForCausalLM"]
    done = nas("vllm", "d256 v512 ffn=swiglu:512 [M4 A4/2]", *SHORT, "--program", str(path))
    assert done.code == 3
    assert "stock classes" in done.err


def test_a_layout_may_be_longer_than_a_name_of_a_file(tmp_path: Path, home: Path) -> None:
    layout = f"d256 v512 ffn=swiglu:512 [{'C3 ' * 100}A4/2]"
    done = nas("vllm", layout, *SHORT, "--program", str(tmp_path / "none"))
    assert done.code == 3
    assert "install vLLM" in done.err


def test_a_server_that_dies(tmp_path: Path, folder: Path, home: Path) -> None:
    path = program(tmp_path, Behaviour(fault="exit"))
    done = nas("vllm", str(folder), *SHORT, "--batch", "1", "--program", str(path))
    assert done.code == 4
    assert "vLLM ended with exit code 1: CUDA error: an illegal memory access" in done.err
    assert not any(map(is_alive, read_record(tmp_path)["pids"]))
    (folder / "config.json").write_text(json.dumps({"architectures": ["--broken"], "vocab_size": 64}))
    done = nas("vllm", str(folder), *SHORT, "--batch", "1", "--program", str(path))
    assert done.code == 4
    assert "ValueError: no such architecture" in done.err


def test_no_such_program_and_no_such_folder(tmp_path: Path, folder: Path, home: Path) -> None:
    done = nas("vllm", str(folder), "--program", str(tmp_path / "none"))
    assert done.code == 3
    assert "install vLLM, or name a server by its URL" in done.err
    done = nas("vllm", str(tmp_path))
    assert done.code == 3
    assert "vocab_size" in done.err


LOAD = Load(16, 3, (1,), 2, 100, 1, 1)


def event(tokens: int | None, *, choices: bool = True) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 16, "completion_tokens": tokens}}
    return b"data: " + json.dumps({"choices": [{}] if choices else [], **usage}).encode() + b"\r\n\r\n"


def test_events_are_cut_anywhere() -> None:
    data = event(1) + b": ping\n\n" + event(2) + event(3) + event(3, choices=False) + b"data: [DONE]\n\n"
    whole = [text for _, text in _events([(0, data)])]
    assert len(whole) == 4
    for cut in range(1, len(data)):
        assert [text for _, text in _events([(0, data[:cut]), (1, data[cut:])])] == whole


def test_tokens_that_came_late_together() -> None:
    stream = _Stream(
        1_000_000, [(5_000_000, event(0) + event(1)), (9_000_000, event(2) + event(3) + event(3, choices=False))]
    )
    answer = _answer(stream, LOAD)
    assert answer.ttft_ms == 4
    assert answer.gaps_ms == (2, 2)
    assert answer.reads == 2


def test_an_answer_that_was_cut_off() -> None:
    with pytest.raises(InfrastructureFailed, match="generated 2 of 3"):
        _answer(_Stream(0, [(1, event(1) + event(2))]), LOAD)
    with pytest.raises(InfrastructureFailed, match="does not count"):
        _answer(_Stream(0, []), LOAD)
