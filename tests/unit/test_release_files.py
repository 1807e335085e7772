"""A member's files: writing, keeping, repairing and removing them, and their content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from release_lab import write_family
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.family import MeasuredModel, MemberFiles, RecordedFigure, read_record
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.source import COMMIT
from nas.model.nn.model import Model
from nas.model.nn.transformers import tensor_names
from nas.testing.planted_faults import checkpoint
from nas.train.release.files import files_of, rewrite_card, tokenizer_of, write_files
from nas.train.release.huggingface import DrawnWeights, LazyTensors, Planned, open_weights, shards, write_safetensors
from nas.train.release.model_card import card
from nas.train.release.options import FileOptions, kept_options

STOCK = Layout.parse("d64 v300 ffn=swiglu:96 [C3 A4/2]")
CUSTOM = Layout.parse("d64 v300 untied ffn=moe:4x2:32 [C3&A2/1 M16+none W4/2@8(sink=1)+swiglu:64 ^0 A4/2 A4/2(kv=4)]")
LIGHT = FileOptions(gguf=("f16",))
FIRST = RandomWeights(3)


def quiet(_: str) -> None:
    pass


def write(folder: Path, layout: Layout = STOCK, options: FileOptions = LIGHT) -> tuple[MemberFiles, list[str]]:
    """Returns the record afterwards, and the log."""
    log: list[str] = []
    return write_files(folder, layout, FIRST, options, log.append), log


@pytest.mark.parametrize("layout", [STOCK, CUSTOM])
def test_random_weights_are_the_models_own(layout: Layout) -> None:
    drawn = LazyTensors(DrawnWeights(layout, 3, torch.float32))
    model = Model(layout, seed=3).state_dict()
    assert drawn.keys() == model.keys()
    assert {name: tuple(tensor.shape) for name, tensor in model.items()} == dict(drawn.shapes())
    for name, tensor in model.items():
        assert torch.equal(drawn[name], tensor), name


def test_random_weights_are_rounded_as_released() -> None:
    drawn = LazyTensors(DrawnWeights(CUSTOM, 3, torch.bfloat16))
    model = Model(CUSTOM, seed=3).state_dict()
    assert torch.equal(drawn["embed.weight"], model["embed.weight"].bfloat16().float())
    for name in ("layers.1.mixers.0.A_log", "layers.0.mixers.0.conv.weight", "layers.0.ffn.router.weight"):
        assert torch.equal(drawn[name], model[name]), name


def test_weights_that_are_too_large_for_their_type_are_refused(tmp_path: Path) -> None:
    values = [torch.tensor([1.0, 7e4])]
    with pytest.raises(InvalidInput, match="a holds values that F16 does not"):
        write_safetensors(tmp_path / "half", [Planned("a", (2,), torch.float16)], values, {})
    assert not list(tmp_path.iterdir())
    write_safetensors(tmp_path / "whole", [Planned("a", (2,), torch.float32)], values, {})


def test_files_of_a_stock_member(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "350M")
    assert {file.path for file in record.files} == {
        *(f"transformers/{name}" for name in ("config.json", "generation_config.json", "model.safetensors")),
        *(f"transformers/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")),
        "transformers/chat_template.jinja",
        "gguf/350M-F16.gguf",
        "README.md",
    }
    loads = {"transformers": "Lfm2ForCausalLM", "llama.cpp": "lfm2", "executorch": "none: not asked for"}
    assert {name: record.loads[name] for name in loads} == loads  # other runtimes may be registered
    assert read_record(tmp_path / "350M" / "files.json", MemberFiles) == record
    on_disk = {
        path.relative_to(tmp_path / "350M").as_posix() for path in (tmp_path / "350M").rglob("*") if path.is_file()
    }
    assert on_disk == {file.path for file in record.files} | {"files.json", ".files.lock"}


def test_all_files_hold_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path / "m")
    file_tensors = load_file(tmp_path / "m" / "transformers" / "model.safetensors")
    model_tensors = {key: tensor for name in tensor_names(STOCK) for key, tensor in name.split(file_tensors).items()}
    with open_weights(STOCK, FIRST, torch.float16) as state:
        for name, tensor in model_tensors.items():
            assert torch.equal(tensor.float(), LazyTensors(state)[name]), name
    gguf = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m" / "gguf" / "m-F16.gguf").tensors}
    assert (gguf["blk.1.attn_q.weight"].data == model_tensors["layers.1.mixers.0.q.weight"].numpy()).all()
    assert (gguf["blk.0.shortconv.conv.weight"].data == model_tensors["layers.0.mixers.0.conv.weight"].numpy()).all()


def test_layouts_of_no_stock_class_come_with_code(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "m", CUSTOM)
    assert record.loads["transformers"].startswith("HilnasForCausalLM with trust_remote_code: ")
    assert record.loads["llama.cpp"].startswith("hilnas (patched build): layer 0 has parallel mixers")
    config = json.loads((tmp_path / "m" / "transformers" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_hilnas.HilnasForCausalLM"
    assert config["layers"][3] == {"share": 0}
    assert config["layers"][5]["mixers"][0]["reads"] == [4, 0]
    code = (tmp_path / "m" / "transformers" / "modeling_hilnas.py").read_text()
    assert "import nas" not in code and "from nas" not in code
    assert any(file.kind == "gguf" for file in record.files)


def test_a_layout_that_a_runtime_cannot_carry_has_no_file_for_it(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "m", Layout.parse("d64 v300 ffn=swiglu:96 [A2/1&W2/1@8 A2/1]"))
    assert record.loads["llama.cpp"].startswith("none: ")
    assert not any(file.kind == "gguf" for file in record.files)


def test_a_block_without_code_for_transformers_is_refused_unless_the_folder_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kinds: object) -> None:
        raise Unsupported("it imports numpy")

    monkeypatch.setattr("nas.train.release.huggingface.bundle", refuse)
    with pytest.raises(Unsupported, match="it imports numpy"):
        write(tmp_path / "m", CUSTOM)
    record, _ = write(tmp_path / "m", CUSTOM, FileOptions(transformers=False, gguf=()))
    assert record.loads["transformers"] == "none: it imports numpy"
    assert [file.kind for file in record.files] == ["card"]


def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    first, log = write(tmp_path / "m")
    assert log == ["m: writing transformers", "m: writing F16"]
    before = (tmp_path / "m" / "gguf" / "m-F16.gguf").stat().st_mtime_ns
    assert write(tmp_path / "m") == (first, [])
    assert (tmp_path / "m" / "gguf" / "m-F16.gguf").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(bytes(path.stat().st_size))]
)
def test_damaged_files_are_written_again(tmp_path: Path, damage: object) -> None:
    first, _ = write(tmp_path / "m")
    assert callable(damage)
    damage(tmp_path / "m" / "transformers" / "tokenizer.json")
    assert write(tmp_path / "m") == (first, ["m: writing transformers"])


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(_KilledError):
        write_files(tmp_path / "m", STOCK, FIRST, LIGHT, kill_at("F16"))
    assert not (tmp_path / "m" / "files.json").exists()
    half = tmp_path / "m" / "gguf" / "m-F16.gguf.0123.partial"
    half.parent.mkdir()
    half.write_bytes(b"half")
    record, log = write(tmp_path / "m")
    assert log == ["m: writing F16"], "what was there is kept"
    assert write(tmp_path / "n")[0].files[:3] == record.files[:3]
    assert not list((tmp_path / "m").rglob("*.partial*"))


class _KilledError(BaseException):
    pass


def kill_at(word: str) -> Callable[[str], None]:
    """A log that kills the run when it says `word`."""

    def log(line: str) -> None:
        if word in line:
            raise _KilledError

    return log


def test_a_folder_with_files_json_is_complete_whenever_a_rewrite_is_killed(tmp_path: Path) -> None:
    folder, other = tmp_path / "m", RandomWeights(4)
    write(folder, options=FileOptions(gguf=("f16", "q4_0")))
    for word in ("transformers", "F16", "Q4_0"):
        with pytest.raises(_KilledError):
            write_files(folder, STOCK, other, FileOptions(gguf=("f16", "q4_0")), kill_at(f"writing {word}"))
        assert not (folder / "files.json").exists()
        listing = files_of(folder)
        assert listing is not None and "gguf/m-Q4_0.gguf" in {file.path for file in listing.files}
        assert tokenizer_of(folder) == (folder / "transformers" / "tokenizer.json").resolve()
    log: list[str] = []
    record = write_files(folder, STOCK, other, LIGHT, log.append)
    assert log == [], "what the killed runs had done is kept"
    assert not (folder / "gguf" / "m-Q4_0.gguf").exists(), "what was there before them is known, and gone"
    assert record == read_record(folder / "files.json", MemberFiles)
    assert record == write_files(tmp_path / "new" / "m", STOCK, other, LIGHT, quiet)


def test_a_rewrite_that_fails_leaves_no_files_json(tmp_path: Path) -> None:
    first, _ = write(tmp_path / "m")
    (tmp_path / "m" / "gguf" / "m-F16.gguf").unlink()
    (tmp_path / "m" / "gguf").rmdir()
    (tmp_path / "m" / "gguf").write_text("in the way")
    with pytest.raises(OSError, match="gguf"):
        write(tmp_path / "m")
    assert not (tmp_path / "m" / "files.json").exists()
    (tmp_path / "m" / "gguf").unlink()
    assert write(tmp_path / "m") == (first, ["m: writing F16"])


def test_some_of_the_files_that_were_made_together_are_not_taken_for_all(tmp_path: Path) -> None:
    sharded = FileOptions(gguf=("f16",), shard_bytes=40_000)
    first, _ = write(tmp_path / "m", options=sharded)
    with pytest.raises(_KilledError):
        write_files(tmp_path / "m", STOCK, RandomWeights(4), LIGHT, kill_at("writing F16"))
    assert list((tmp_path / "m" / "transformers").glob("model-*.safetensors")), "shards of the first run"
    assert write(tmp_path / "m", options=sharded) == (first, ["m: writing transformers"])


def test_a_card_that_changes_is_not_there_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m")

    def killed(folder: Path, text: str) -> None:
        raise _KilledError

    monkeypatch.setattr("nas.train.release.files.write_card", killed)
    with pytest.raises(_KilledError):
        write(tmp_path / "m", options=replace(LIGHT, provenance={"study": "demo"}))
    assert not (tmp_path / "m" / "files.json").exists()


@pytest.mark.parametrize("step", ["write_card", "write_record"])
def test_a_killed_rewrite_of_the_card_leaves_the_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    family, folder = write_family(tmp_path), tmp_path / "m"
    member = family.members[0].model_copy(update={"layout": STOCK.format()})
    before, _ = write(folder)

    def killed(*_: object) -> None:
        raise _KilledError

    def is_intact(record: MemberFiles) -> bool:
        return all(sha256_of(folder / file.path) == file.sha256 for file in record.files)

    with monkeypatch.context() as patched, pytest.raises(_KilledError):
        patched.setattr(f"nas.train.release.files.{step}", killed)
        rewrite_card(folder, family, member, quiet)
    assert read_record(folder / "files.json", MemberFiles) == files_of(folder) == before
    assert write(folder)[0] == before and is_intact(before)
    rewrite_card(folder, family, member, quiet)
    after = read_record(folder / "files.json", MemberFiles)
    assert after is not None and is_intact(after)
    assert after.files[:-1] == before.files[:-1] and after.files[-1] != before.files[-1]


def test_weights_that_do_not_fit_leave_the_record_alone(tmp_path: Path) -> None:
    first, _ = write(tmp_path / "m")
    other = checkpoint(Layout.parse("d64 v300 ffn=swiglu:128 [C3 A4/2]"), tmp_path / "w")
    with pytest.raises(InvalidInput, match="has shape"):
        write_files(tmp_path / "m", STOCK, other, LIGHT, quiet)
    assert files_of(tmp_path / "m") == read_record(tmp_path / "m" / "files.json", MemberFiles) == first


def test_options_are_recorded(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "m", options=FileOptions(gguf=(), context=4096))
    assert (record.context, record.pte_context) == (4096, None)
    options = kept_options(record.model_copy(update={"pte_context": 128}), None, None, None)
    assert (options.context, options.pte_context) == (4096, 128)
    assert kept_options(None, None, None, None) == FileOptions()


def test_other_options_change_what_depends_on_them(tmp_path: Path) -> None:
    write(tmp_path / "m", options=FileOptions(gguf=("f16",), shard_bytes=40_000))
    shards_before = sorted((tmp_path / "m" / "transformers").glob("model-*.safetensors"))
    assert len(shards_before) > 1
    record, log = write(tmp_path / "m")
    assert log == ["m: writing transformers"]
    assert not any(path.exists() for path in shards_before), "what is no longer listed is gone"
    figure = RecordedFigure(metric="decode_tps", prompt=1024, value=70.0, ci95=(69.0, 71.0))
    measured = MeasuredModel(device="here", runtime="llama.cpp", quantisation="q4_0", threads=2, figures=(figure,))
    again, log = write(tmp_path / "m", options=FileOptions(gguf=("f16",), measured=(measured,)))
    assert log == []
    assert [a.path for a, b in zip(record.files, again.files, strict=True) if a != b] == ["README.md"]
    only, _ = write(tmp_path / "m", options=FileOptions(gguf=(), transformers=False))
    assert [file.path for file in only.files] == ["README.md"]
    assert not (tmp_path / "m" / "gguf" / "m-F16.gguf").exists()


def test_shards_are_indexed(tmp_path: Path) -> None:
    write(tmp_path / "m", options=FileOptions(gguf=(), shard_bytes=40_000))
    write(tmp_path / "one", options=FileOptions(gguf=()))
    place = tmp_path / "m" / "transformers"
    index = json.loads((place / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "transformers" / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        with safe_open(place / file, framework="pt") as part:
            assert torch.equal(part.get_tensor(name), whole[name])


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), limit=st.integers(1, 400))
def test_shards_hold_everything_in_order(sizes: list[int], limit: int) -> None:
    planned = [Planned(str(i), (size,), torch.float32) for i, size in enumerate(sizes)]
    files = shards(planned, limit)
    assert [one for part in files for one in part] == planned
    assert all(part and (len(part) == 1 or sum(one.size for one in part) <= limit) for part in files)


def test_the_card_states_measured_figures_only(tmp_path: Path) -> None:
    record, _ = write(tmp_path / "m")
    text = (tmp_path / "m" / "README.md").read_text()
    assert "Nothing was measured yet." in text and "tok/s" not in text
    assert "license: # yours to choose" in text
    assert "license: apache-2.0" in card("m", STOCK, record, FileOptions(license="apache-2.0"))
    assert all(file.sha256 in text for file in record.files if file.kind != "card")
    figures = (
        RecordedFigure(metric="prefill_tps", prompt=4096, value=412.34, ci95=(400.0, 425.0)),
        RecordedFigure(metric="peak_rss", prompt=32768, reason="out of memory"),
        RecordedFigure(metric="ttft", prompt=4096, value=40123.4, ci95=(39000.0, 41000.0)),
    )
    measured = MeasuredModel(
        device="phone", runtime="llama.cpp", quantisation="q4_0", threads=4, figures=figures, searched=False
    )
    options = FileOptions(measured=(measured,), budgets={"peak RSS at 4K": "700 MB"}, provenance={"study": "demo | 1"})
    text = card("m", STOCK, record, options)
    assert "| device | figure | tokens of context | value [95 % interval] |" in text
    assert "| phone, llama.cpp q4_0, 4 threads | prefill, tok/s | 4,096 | 412.3 [400, 425] |" in text
    assert "| 32,768 | none: out of memory |" in text
    assert "| 4,096 | 40,123 [39,000, 41,000] |" in text
    assert "phone: not used by the search." in text
    assert "| peak RSS at 4K | 700 MB |" in text and "demo &#124; 1" in text


@pytest.mark.parametrize(
    ("layout", "transformers", "llama_cpp"),
    [
        (STOCK, "transformers 4.57 or newer", "llama.cpp b6000 or newer"),
        (
            Layout.parse("d64 v300 ffn=moe:4x2:32 [C3+swiglu:96 A4/2]"),
            "transformers 5.0 or newer",
            "llama.cpp b6709 or newer",
        ),
        (
            Layout.parse("d64 v300 ffn=swiglu:96 [C3 W4/2@8]"),
            "transformers 4.57 or newer",
            f"llama.cpp of commit {COMMIT} or newer",
        ),
        (
            Layout.parse("d64 v300 ffn=swiglu:96 [C3 M16 A4/2]"),
            "transformers 4.57 or newer",
            "llama.cpp with the patches of hilnas (`nas runtime build llama.cpp --patched`)",
        ),
    ],
)
def test_the_card_names_the_least_versions(tmp_path: Path, layout: Layout, transformers: str, llama_cpp: str) -> None:
    write(tmp_path / "m", layout, FileOptions(gguf=("f16", "q4_0")))
    text = (tmp_path / "m" / "README.md").read_text()
    assert f"\n{transformers}:\n" in text
    assert f"\n{llama_cpp}:\n\n```sh\nllama-cli -m gguf/m-Q4_0.gguf\n" in text
    opens = "patches" not in llama_cpp
    assert ("adb push gguf/m-Q4_0.gguf" in text, "do not open it" in text) == (opens, not opens)


def gguf_values(path: Path, *keys: str) -> list[object]:
    fields = GGUFReader(path).fields
    return [fields[f"general.{key}"].contents() if f"general.{key}" in fields else None for key in keys]


def test_gguf_files_tell_members_apart(tmp_path: Path) -> None:
    """In a list of files a program shows these, not the path."""
    keys = ("name", "size_label", "license")
    write(tmp_path / "m")
    assert gguf_values(tmp_path / "m" / "gguf" / "m-F16.gguf", *keys) == ["m", "85K", None]
    mixture = Layout.parse("d64 v300 ffn=moe:8x2:128 [C3+swiglu:96 A4/2]")
    named = replace(LIGHT, name="fam-0.3M", license="apache-2.0")
    write(tmp_path / "n", mixture, named)
    assert gguf_values(tmp_path / "n" / "gguf" / "fam-0.3M-F16.gguf", *keys) == ["fam-0.3M", "264K-A117K", "apache-2.0"]
    record, log = write(tmp_path / "n", mixture, replace(named, license="mit"))
    assert log == ["fam-0.3M: writing F16"] and record.license == "mit"
    assert kept_options(record, None, None, None).license == "mit"
    with pytest.raises(InvalidInput, match="no identifier of a licence"):
        write(tmp_path / "n", mixture, replace(named, license="all rights reserved"))


def test_bytes_without_merges_are_an_empty_list(tmp_path: Path) -> None:
    """A list of merges of tokens that the vocabulary lacks is refused by transformers, no list by llama.cpp."""
    write(tmp_path / "m")
    reader = GGUFReader(tmp_path / "m" / "gguf" / "m-F16.gguf")
    assert reader.fields["tokenizer.ggml.merges"].contents() == []
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == STOCK.vocab, "what follows is read in its place"


def test_transformers_reads_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    write(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "transformers")
    gguf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "gguf", gguf_file="m-F16.gguf")
    for text in ("hello world", " naïve\n\t日本 😀", "<|im_start|>user\nhi<|im_end|>"):
        assert gguf_tokenizer(text).input_ids == tokenizer(text).input_ids, text
        assert gguf_tokenizer.decode(gguf_tokenizer(text, add_special_tokens=False).input_ids) == text


def test_a_tokenizer_that_does_not_match_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other", Layout.parse("d64 v512 ffn=swiglu:96 [C3 A4/2]"))
    wrong = tmp_path / "other" / "transformers" / "tokenizer.json"
    with pytest.raises(InvalidInput, match="512 tokens, but the layout's vocabulary is v300"):
        write(tmp_path / "m", options=FileOptions(tokenizer=wrong))
    assert not (tmp_path / "m").exists()


def test_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    other = checkpoint(Layout.parse("d64 v300 ffn=swiglu:128 [C3 A4/2]"), tmp_path / "w")
    with pytest.raises(InvalidInput, match=r"ffn.gate.weight has shape \(128, 64\), the layout needs \(96, 64\)"):
        write_files(tmp_path / "m", STOCK, other, LIGHT, quiet)
    with pytest.raises(InvalidInput, match=r"checkpoint lacks layers\.1\.mixers\.0\.conv\.weight"):
        write_files(tmp_path / "m", Layout.parse("d64 v300 ffn=swiglu:128 [C3 C3]"), other, LIGHT, quiet)
    assert not (tmp_path / "m" / "files.json").exists()


def test_options_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown quantisation of llama.cpp 'q4_x'.*did you mean"):
        write(tmp_path / "m", options=FileOptions(gguf=("q4_x",)))
    with pytest.raises(InvalidInput, match="cannot name files"):
        write(tmp_path / "m", options=FileOptions(name="../m"))
    with pytest.raises(InvalidInput, match="no token for every byte"):
        write(tmp_path / "m", Layout.parse("d64 v200 ffn=swiglu:96 [C3 A4/2]"))


def test_a_pte_that_executorch_does_not_carry_is_reported(tmp_path: Path) -> None:
    layout = Layout.parse("d64 v300 ffn=swiglu:40 [C3 A4/2]")
    record, _ = write(tmp_path / "m", layout, FileOptions(gguf=(), pte_context=64))
    assert record.loads["executorch"].startswith("none: ")
    assert "groups of 32" in record.loads["executorch"]
