"""Merging against plain loops over values, its limits, and files that cannot be merged."""

from __future__ import annotations

import json
import math
import mmap
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.model.nn.primitives import generator_of
from nas.train.posttrain.merging import MergeSettings, Method, della_rates, merge, merge_tensors, trim
from nas.train.release.shards import Shards

BASED: tuple[Method, ...] = ("task-arithmetic", "ties", "dare-linear", "dare-ties", "della")


def tensors(count: int, shape: tuple[int, ...] = (6, 5)) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def ties_by_loops(models: list[Tensor], base: Tensor, weights: list[float], density: float) -> list[float]:
    tasks = [[a - b for a, b in zip(m.flatten().tolist(), base.flatten().tolist(), strict=True)] for m in models]
    for task in tasks:
        least = sorted(map(abs, task), reverse=True)[round(density * len(task)) - 1]
        task[:] = [value if abs(value) >= least else 0.0 for value in task]
    merged = []
    for place, start in enumerate(base.flatten().tolist()):
        values = [task[place] for task in tasks]
        positive = sum(values) > 0
        agreeing = [(w, v) for w, v in zip(weights, values, strict=True) if v and (v > 0) == positive]
        merged.append(start + (sum(w * v for w, v in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0))
    return merged


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties(density: float) -> None:
    base, *models = tensors(4)
    weights = [0.5, 0.2, 0.9]
    settings = MergeSettings(method="ties", weights=tuple(weights), density=density)
    result = merge_tensors("w", models, base, settings)
    expected = torch.tensor(ties_by_loops(models, base, weights, density)).view_as(base)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["soup", *BASED])
def test_one_model_at_full_density_stays_as_it_is(method: Method) -> None:
    base, model = tensors(2)
    result = merge_tensors("w", [model], base, MergeSettings(method=method, weights=(1.0,)))
    torch.testing.assert_close(result, model)


def test_full_density_makes_dare_and_della_what_they_extend() -> None:
    base, a, b = tensors(3)
    by = {method: merge_tensors("w", [a, b], base, MergeSettings(method=method)) for method in BASED}
    torch.testing.assert_close(by["dare-linear"], by["task-arithmetic"])
    torch.testing.assert_close(by["dare-ties"], by["ties"])
    torch.testing.assert_close(by["della"], by["ties"])
    plain = MergeSettings(method="dare-ties", density=0.4, seed=5)
    torch.testing.assert_close(
        merge_tensors("w", [a, b], base, plain.model_copy(update={"method": "della"})),
        merge_tensors("w", [a, b], base, plain),
    )


def test_della_drops_small_values_more_often() -> None:
    task = torch.tensor([[0.1, -4.0], [2.0, -1.0]])
    rates = della_rates(task, 0.5, 0.4)
    torch.testing.assert_close(rates, torch.tensor([[0.6, 0.3], [0.4, 0.5]]))  # 0.3 + 0.4 / 4 * rank
    assert (della_rates(task, 0.5, 0.0) == 0.5).all()


def test_random_choices_depend_on_seed_model_and_name() -> None:
    base, a, b = tensors(3)
    settings = MergeSettings(method="dare-linear", density=0.5, seed=1)
    first = merge_tensors("w", [a, b], base, settings)
    assert torch.equal(first, merge_tensors("w", [a, b], base, settings))
    assert not torch.equal(first, merge_tensors("v", [a, b], base, settings))
    assert not torch.equal(first, merge_tensors("w", [a, b], base, settings.model_copy(update={"seed": 2})))
    same = merge_tensors("w", [a, a], base, settings)
    assert len((same - base).div(a - base).unique().round(decimals=3).unique()) == 3  # 0, 1 or 2 of both are kept


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("method", ["dare-linear", "dare-ties", "della"])
def test_random_drops_are_those_of_the_equations(method: Method, epsilon: float) -> None:
    """Equations 20 to 23 by loops, from the same uniform numbers."""
    base, *models = tensors(4)
    weights, density = [0.5, 0.2, 0.9], 0.6
    sparse = []
    for number, model in enumerate(models):
        task = [a - b for a, b in zip(model.flatten().tolist(), base.flatten().tolist(), strict=True)]
        uniform = torch.rand(base.shape, generator=generator_of(7, f"{number}:w")).flatten().tolist()
        values = []
        for value, chance in zip(task, uniform, strict=True):
            rank = sum(abs(other) > abs(value) for other in task)
            drop = 1 - density
            if method == "della":
                drop += epsilon * (rank / len(task) - 1 / 2)
            values.append(0.0 if chance < drop else value / (1 - drop))
        sparse.append(torch.tensor(values).view_as(base))
    if method == "dare-linear":
        expected = base + 0.5 * sparse[0] + 0.2 * sparse[1] + 0.9 * sparse[2]
    else:
        expected = torch.tensor(ties_by_loops([base + delta for delta in sparse], base, weights, 1.0)).view_as(base)
    settings = MergeSettings(method=method, weights=tuple(weights), density=density, epsilon=epsilon, seed=7)
    torch.testing.assert_close(merge_tensors("w", models, base, settings), expected, rtol=1e-4, atol=1e-5)


def resident_bytes(path: Path) -> int:
    """Resident memory of this process's mappings of a file."""
    maps = Path("/proc/self/smaps").read_text().splitlines()
    total, inside = 0, False
    for line in maps:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({str(i): torch.ones(1 << 18) for i in range(16)}, path)
    shards = Shards(path)
    for name in shards.names:
        assert shards.tensor(name).sum() == 1 << 18
    assert resident_bytes(path) < path.stat().st_size / 4
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapping.read()
        assert resident_bytes(path) > path.stat().st_size / 2


@pytest.mark.parametrize("count", [3, 30])
def test_one_tensor_of_each_model_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for model in range(3):
        save_file({f"layer.{i}": torch.full((64, 64), float(model + i)) for i in range(count)}, tmp_path / str(model))
    read = Shards.tensor
    references: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(self: Shards, name: str) -> Tensor:
        tensor = read(self, name)
        references.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in references))
        return tensor

    monkeypatch.setattr(Shards, "tensor", watched)
    merge(
        [tmp_path / "1", tmp_path / "2"], tmp_path / "0", MergeSettings(method="della", density=0.5), tmp_path / "out"
    )
    assert len(references) == 3 * count and max(alive) == 3


def test_trim_keeps_the_greatest_magnitudes() -> None:
    assert trim(torch.tensor([1.0, -3.0, 2.0, 0.5]), 0.5).tolist() == [0.0, -3.0, 2.0, 0.0]
    assert trim(torch.tensor([1.0, -3.0]), 0.01).tolist() == [0.0, -3.0]


def test_shards_are_merged_one_tensor_at_a_time(tmp_path: Path) -> None:
    names = [f"layer.{i}" for i in range(12)]
    for model in range(3):
        folder = tmp_path / str(model)
        folder.mkdir()
        index = {}
        for shard in range(3):
            part = {name: torch.full((256, 256), float(model + i)) for i, name in enumerate(names) if i % 3 == shard}
            part = {name: tensor.half() for name, tensor in part.items()}
            save_file(part, folder / f"{shard}.safetensors", metadata={"format": "pt"})
            index |= dict.fromkeys(part, f"{shard}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    out = tmp_path / "out.safetensors"
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "0", MergeSettings(method="ties"), out)
    result = load_file(out)
    assert sorted(result) == sorted(names) and all(tensor.dtype == torch.float16 for tensor in result.values())
    assert all((result[name] == i + 1.5).all() for i, name in enumerate(names))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "one")
    save_file({"a": torch.zeros(2)}, tmp_path / "lacks")
    save_file({"a": torch.zeros(2), "b": torch.zeros(4)}, tmp_path / "wider")
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "whole")
    save_file({"a": torch.zeros(2)}, tmp_path / "nan-free")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../one"}}')

    def refused(*models: str, base: str | None = None, settings: MergeSettings | None = None) -> str:
        start = None if base is None else tmp_path / base
        with pytest.raises(InvalidInput) as raised:
            merge([tmp_path / name for name in models], start, settings or MergeSettings(), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(raised.value)

    ties = MergeSettings(method="ties")
    assert "at least one model" in refused()
    assert "lacks: lacks b" in refused("one", "lacks")
    assert "b has shape [4], not [3]" in refused("one", base="wider", settings=ties)
    assert "type I64" in refused("whole")
    assert "not a safetensors file" in refused("text")
    index = tmp_path / "folder" / "model.safetensors.index.json"
    assert "'../one' is no safetensors file of this folder" in refused("folder")
    for mapping in ("{}", "[]", "null", '{"a": 1}'):
        index.write_text(f'{{"weight_map": {mapping}}}')
        assert "model.safetensors.index.json" in refused("folder")
    assert "ties needs the model" in refused("one", settings=ties)
    assert "2 weights for 1 models" in refused("one", settings=MergeSettings(weights=(1.0, 2.0)))
    for weights in ((1.0, -1.0), (1e308, 1e308)):
        assert "do not add up to" in refused("one", "one", settings=MergeSettings(weights=weights))
    with pytest.raises(ValueError, match="finite number"):
        MergeSettings(weights=(math.nan, 1.0))
    save_file({"a": torch.tensor([1.0, math.nan])}, tmp_path / "nan")
    save_file({"a": torch.tensor([1.0, 2.0]).half()}, tmp_path / "half")
    assert "a of the merged model holds NaN or infinity" in refused("nan")
    arithmetic = MergeSettings(method="task-arithmetic", weights=(60000.0,))
    assert "too great for float16" in refused("half", base="nan-free", settings=arithmetic)


def test_drop_rates_stay_probabilities() -> None:
    with pytest.raises(ValueError, match=r"drop rates from -0\.1 to 0\.5"):
        MergeSettings(method="della", density=0.8, epsilon=0.6)
