"""The code of released folders: which files it is, and what it may import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from nas.core.errors import Unsupported
from nas.model.nn.kinds import MODULES
from nas.model.nn.swiglu import SwiGLU
from nas.train.release.bundle import bundle


def test_a_folder_has_the_modules_of_its_kinds_alone() -> None:
    assert set(bundle(["conv", "relu2"])) == {
        *(f"{name}_hilnas.py" for name in ("block", "configuration", "modeling")),
        *(f"nn_{name}.py" for name in ("base", "conv", "growth", "kinds", "layer", "primitives", "relu2", "swiglu")),
    }


def test_folders_with_other_code_have_other_configurations() -> None:
    """Two members are loaded in one process: transformers keeps a model class for each configuration's class."""
    name = "configuration_hilnas.py"
    assert bundle(["conv"])[name] == bundle(["conv"])[name] != bundle(["gqa"])[name]


def test_files_import_each_other_torch_and_transformers(tmp_path: Path) -> None:
    files = bundle(MODULES)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                packages = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                packages = {str(node.module).partition(".")[0]}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 and f"{node.module}.py" in files, name
                continue
            else:
                continue
            assert packages <= {*sys.stdlib_module_names, "torch", "transformers"}, name
    copied = get_relative_import_files(tmp_path / "modeling_hilnas.py")  # what transformers takes from the folder
    assert {Path(path).name for path in copied} == files.keys() - {"modeling_hilnas.py"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an importable package."""
    folder = tmp_path / "thirdparty"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "thirdparty", raising=False)  # of another test
    return folder


class Replaced(SwiGLU):
    """Of this file, which released folders cannot have."""

    release_code = "thirdparty.released:Plain"


def test_release_code_replaces_a_module(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES._targets, "swiglu", Replaced)
    (package / "released.py").write_text("from .sizes import SIZE as N\nfrom nas.core.block import Block\n")
    (package / "sizes.py").write_text("SIZE = 1\n")
    files = {name: content.decode() for name, content in bundle(["swiglu"]).items()}
    assert "from .thirdparty_released import Plain as _swiglu\n" in files["nn_kinds.py"]
    assert files["thirdparty_released.py"].endswith(
        "from .thirdparty_sizes import SIZE as N\nfrom .block_hilnas import Block\n"
    )
    assert "thirdparty_sizes.py" in files and "nn_swiglu.py" not in files


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("import numpy as np", "numpy"),
        ("from numpy import array", "numpy"),
        ("from nas.core.block import BLOCKS", "nas.core.block"),
        ("from nas.core.registry import Registry", "nas.core.registry"),
        ("import nas.model.nn.base", "nas.model.nn.base"),
    ],
)
def test_what_a_folder_cannot_have_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, line: str, target: str
) -> None:
    monkeypatch.setitem(MODULES._targets, "swiglu", Replaced)
    (package / "released.py").write_text(f"{line}\n")
    with pytest.raises(Unsupported, match=rf"cannot contain thirdparty\.released: it imports {target};.*release_code"):
        bundle(["swiglu"])
