"""Units and containers say what the programs understand; that they run is not tested: it needs systemd and Docker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml
from cli_runner import nas

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HARDENED = {
    "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
    "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes", "CapabilityBoundingSet": "",
    "SystemCallFilter": "@system-service", "UMask": "0077",
}  # fmt: skip


def section(unit: Path, name: str) -> dict[str, str]:
    parser = RawConfigParser(strict=False)  # a list has a line for each entry
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return dict(parser[name])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where a `nas` command line stands, and its words."""
    for unit in UNITS:
        yield unit.name, shlex.split(section(unit, "Service")["ExecStart"])[1:]
    for image in IMAGES:
        command = re.search(r"^CMD (\[.*\])$", image.read_text(), re.MULTILINE)
        assert command
        yield image.name, yaml.safe_load(command[1])
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    yield "compose.yaml", compose["services"]["coordinator"]["command"]


COMMANDS = list(commands())


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_commands_and_their_options_exist(where: str, words: list[str]) -> None:
    command = [word for word in words[:2] if not word.startswith("-")]
    done = nas(*command, "--help")
    assert done.code == 0, done.err
    for option in (word for word in words if word.startswith("--")):
        assert option in done.out


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_hardened_and_come_back(unit: Path) -> None:
    service = section(unit, "Service")
    assert {name: service.get(name) for name in HARDENED} == HARDENED
    assert service["Restart"] == "always"
    assert service["User"] != "root"


def test_units_of_one_machine_share_the_host_lock() -> None:
    for unit in UNITS:
        service = section(unit, "Service")
        assert "NAS_LOCK=/run/hilnas/lock" in unit.read_text()
        assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("hilnas", "yes")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_see_gpus(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert {"DevicePolicy=closed", "DeviceAllow=char-drm rw", "DeviceAllow=char-nvidia* rw"} <= set(lines)
    assert not [line for line in lines if line.startswith("PrivateDevices")]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_images_do_not_run_as_root_and_install_extras_that_exist(image: Path) -> None:
    text = image.read_text()
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
    (extras,) = re.findall(r"/src\[([\w,]+)\]", text)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


def test_the_composition_refers_to_what_is_there() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    for service in compose["services"].values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in compose["volumes"]
        assert set(service["networks"]) <= set(compose["networks"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert not service.get("privileged")


def test_the_context_of_images_holds_what_the_links_of_the_package_lead_to() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    context = [ROOT / pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    links = [path for path in (ROOT / "nas").rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        assert any(link.resolve().is_relative_to(folder) for folder in context), link


def test_the_recipe_for_android_copies_what_its_runner_includes() -> None:
    recipe = (ROOT / "docker" / "android" / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (runtimes/\S+) (\S+)$", recipe, re.MULTILINE)
    sources = [(source, Path(target)) for name, target in copies for source in (ROOT / name, *(ROOT / name).glob("*"))]
    files = {target / source.name: source for source, target in sources if source.suffix in (".cpp", ".h")}
    includes = [
        (path, name)
        for path, source in files.items()
        for name in re.findall(r'^#include "(.+)"$', source.read_text(), re.MULTILINE)
    ]
    assert includes
    for path, name in includes:
        assert (path.parent / name).resolve() in files, (path, name)
