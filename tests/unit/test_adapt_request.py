"""What `nas adapt` reads from its settings file and from its options."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cli_runner import nas
from typer.main import get_command

from nas.cli.adapt import _change, app
from nas.core.errors import InvalidInput
from nas.train.adapt.request import AdaptRequest, AdaptSettings, read_request

OPTIONS = {"model": "lfm2", "budget": ["decode_p50<=20ms"], "corpus": ["texts"], "output": "out"}


def test_options_override_keys_of_the_file_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "adapt.yaml"
    path.write_text("model: lfm2\ndevice: phone\nreps: 7\npairs: 200\nlibrary: {tokens: 1024}\nhealing: {lr: 1e-4}\n")
    options = {"budget": ["ttft<=1s"], "corpus": ["texts"], "output": "out", "device": "tablet", "pairs": 3}
    request = read_request(path, options)
    assert (request.device, request.reps, request.pairs) == ("tablet", 7, 3)
    assert (request.library.tokens, request.healing.lr) == (1024, 1e-4)
    assert request.prompt == AdaptRequest.model_fields["prompt"].default


def test_paths_of_the_file_start_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "adapt.json"
    path.write_text('{"model": "lfm2", "corpus": ["a", "/b", "~/c"], "output": "out", "budget": ["ttft<=1s"]}')
    request = read_request(path, {"output": "elsewhere"})
    assert request.model == tmp_path / "lfm2"
    assert request.corpus == (tmp_path / "a", Path("/b"), Path("/home/me/c"))
    assert request.output == Path("elsewhere"), "of the command line: from the working folder"


@pytest.mark.parametrize("key", list(OPTIONS))
def test_what_is_required_may_be_in_neither(key: str) -> None:
    with pytest.raises(InvalidInput, match=f"is missing; name it, or '{key}' in the file of --config"):
        read_request(None, {name: value for name, value in OPTIONS.items() if name != key})


def test_mistakes_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "adapt.yaml"
    path.write_text("pairs: -1\nlibary: {}\nlibrary:\n  tokens: many\n")
    with pytest.raises(InvalidInput) as caught:
        read_request(path, OPTIONS)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "2", "4"]
    assert "unknown key 'libary'; did you mean 'library'?" in lines[1].replace(", did", "; did")


def test_hours_are_finite() -> None:
    with pytest.raises(InvalidInput, match="hours: input should be a finite number"):
        read_request(None, OPTIONS | {"hours": math.inf})


def test_equal_keys_in_the_file_and_on_the_command_line_give_equal_requests(tmp_path: Path) -> None:
    path = tmp_path / "adapt.yaml"
    path.write_text("reps: 3\nhours: 2\npte: true\n")
    request = read_request(path, OPTIONS)
    assert request == read_request(None, OPTIONS | {"reps": 3, "hours": 2, "pte": True})
    assert request.record().keys() > AdaptSettings.model_fields.keys()


def test_options_have_the_defaults_of_their_keys() -> None:
    options = {option.name: option.default for option in get_command(app).params}
    fields = AdaptRequest.model_fields
    for name in (
        "device",
        "runtime",
        "workers",
        "prompt",
        "gen",
        "threads",
        "reps",
        "pte",
        "mixes",
        "quantisation",
        "own_text",
    ):
        assert options[name] == fields[name].default, name
    assert tuple(options["gguf"]) == fields["gguf"].default
    assert (
        options.keys() - {"config", "dry_run", "json", "price_per_hour", "own_text"}
        == fields.keys() - AdaptSettings.model_fields.keys()
    )


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    done = nas("adapt", "model", "-c", str(tmp_path), "-o", str(tmp_path / "out"))
    assert done.code == 3
    assert done.err.startswith("nas: --budget: is missing")


def test_a_space_does_not_replace_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "adapt.yaml"
    path.write_text(f"model: {tmp_path}\nbudget: [ttft<=1s]\ncorpus: [texts]\noutput: out\nwrite_space: adapt.yaml\n")
    done = nas("adapt", "--config", str(path))
    assert done.code == 3 and "--write-space" in done.err and "is a file that this command reads" in done.err


def test_defaults_of_options_do_not_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapt.yaml"
    path.write_text("workers: 2\nray_address: auto\n")
    command = ("adapt", "model", "-b", "ttft<=1s", "-c", str(tmp_path), "-o", str(tmp_path), "--config", str(path))
    assert "--ray-address" in nas(*command).err
    assert "--ray-address" not in nas(*command, "--workers", "1", "--ray-address", "").err


def test_a_change_of_next_to_nothing_is_no_minus_zero() -> None:
    assert _change(-1e-5, -4e-4, 2e-4) == "+0.0% (+0.0% to +0.0%)"
