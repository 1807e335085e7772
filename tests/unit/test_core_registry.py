"""Plug-ins beside what hilnas has itself: nothing takes the place of something else in silence."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from cli_runner import nas

from nas.core.block import BLOCKS, Block
from nas.core.errors import PluginConflict
from nas.core.registry import Registry
from nas.model.blocks.conv import GatedShortConv


class Convolution(GatedShortConv):
    """A block kind of a plug-in, under its own name and the letter of hilnas' convolution."""

    name: ClassVar[str] = "convolution"


CONVOLUTION = Convolution()


def install(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str, str]) -> None:
    """Installs plug-ins: (distribution, name, target) of each entry point, in every group."""
    entries = [
        SimpleNamespace(name=name, value=target, dist=SimpleNamespace(name=owner, version="2.0"))
        for owner, name, target in points
    ]
    monkeypatch.setattr("nas.core.registry.entry_points", lambda group: entries if group == "nas.blocks" else [])
    for name, value in {"_plugins_read": False, "_targets": dict(BLOCKS._targets), "_distributions": {}}.items():
        monkeypatch.setattr(BLOCKS, name, value)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([("more", "conv", "more:CONV")], "the plug-in more 2.0 adds the block kind 'conv', which hilnas has already"),
        (
            [("more", "convolution", f"{__name__}:CONVOLUTION")],
            "the plug-in more 2.0 adds the block kind 'convolution' with the mixer letter 'C' of the block kind 'conv' "
            "of hilnas",
        ),
        (
            [("more", "own", "more:OWN"), ("other", "own", "other:OWN")],
            "the plug-in other 2.0 adds the block kind 'own', which the plug-in more 2.0 has already",
        ),
    ],
    ids=["name", "letter", "two plug-ins"],
)
def test_what_is_there_already_is_refused_in_one_line(
    points: list[tuple[str, str, str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *points)
    for command in (["space", "validate", "lfm2-demo"], ["launch", "--space", "lfm2-demo", "--dry-run"]):
        refused = nas(*command)
        assert (refused.code, refused.err) == (3, f"nas: {message}: update or uninstall one of them\n"), command
    with pytest.raises(PluginConflict):
        Block.parse("C31", "mixer")  # which no test parsed before: parsed blocks are kept


def test_a_class_in_place_of_a_kind_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("more", "convolution", f"{__name__}:Convolution"))
    refused = nas("space", "validate", "lfm2-demo")
    target = f'convolution = "{__name__}:Convolution"'
    message = f"nas: entry point nas.blocks: {target} is the class Convolution; name an instance of BlockKind\n"
    assert (refused.code, refused.err) == (3, message)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere.to_be_found:KIND", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"{__name__}:ABSENT", f"AttributeError: module '{__name__}' has no attribute 'ABSENT'"),
        ("older:KIND", "TypeError: an argument is gone"),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_one_line(
    target: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "older.py").write_text("raise TypeError('an argument is gone')")
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, ("more", "convolution", target))
    refused = nas("space", "validate", "lfm2-demo")
    message = f'nas: entry point nas.blocks: convolution = "{target}" cannot be loaded: {reason}\n'
    assert (refused.code, refused.err) == (3, message)


def test_a_kind_of_its_own_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convolution, "letter", "Z")
    install(monkeypatch, ("more", "convolution", f"{__name__}:CONVOLUTION"))
    assert BLOCKS[Block.parse("Z3", "mixer").kind] is CONVOLUTION
    assert (BLOCKS.version("convolution"), BLOCKS.version("conv")) == ("2.0", None)


def test_what_a_process_adds_itself_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[Any] = Registry("thing", "nas.no.plugins", {"one": "first"})
    registry.add("one", 1)
    registry.add("two", 2)
    assert ([*registry], registry["one"]) == (["one", "two"], 1)


def test_a_thread_sees_no_registry_without_the_plug_ins_that_another_is_adding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the first thread adds the plug-in, a second one looks it up."""
    registry: Registry[Any] = Registry("thing", "nas.things", {})
    answers: list[bool] = []

    class Point:
        name, dist = "own", None

        @property
        def value(self) -> str:
            if not answers:
                answers.append(False)
                thread = Thread(target=lambda: answers.append("own" in registry))
                thread.start()
                thread.join()
            return "pathlib:Path"

    monkeypatch.setattr("nas.core.registry.entry_points", lambda group: [Point()])
    assert "own" in registry
    assert answers == [False, True]
