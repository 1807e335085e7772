"""Bundles what `HilnasForCausalLM` needs as files that import torch, transformers and each other only.

transformers loads the .py files that a folder's code imports by `from .name import ...`, and those from that folder
alone. So each module of hilnas or of a plug-in becomes one file, whose imports of other modules become imports of files
beside it. Blocks are read from config.json, by `hf_code/block_hilnas.py`; the table of modules has the member's kinds
only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from nas.core.errors import Unsupported
from nas.model.nn.kinds import MODULES

_CODE = "nas.train.release.hf_code"
_KINDS = "nas.model.nn.kinds"
_STAND_INS = {"nas.core.block": f"{_CODE}.block_hilnas", "nas.core.layout": f"{_CODE}.block_hilnas"}
"""Module -> the module that released folders have instead."""
_STAND_IN_NAMES = {"Block", "Layer", "Norms"}
_INSTALLED = {*sys.stdlib_module_names, "torch", "transformers"}
"""Packages that users of a released folder have."""


def bundle(kinds: Iterable[str], model: str = "modeling_hilnas") -> dict[str, bytes]:
    """Returns the code of members with blocks of these kinds: name of the file -> content.

    model: file of `hf_code` with the model's class.

    Raises:
        Unsupported: a module of a plug-in imports what released folders do not have.
    """
    classes = {kind: _class_of(kind) for kind in sorted(kinds)}
    aliases = {kind: "_" + re.sub(r"\W", "_", kind) for kind in classes}
    lines = [f"from .{_file(module)} import {name} as {aliases[kind]}" for kind, (module, name) in classes.items()]
    table = [f'    "{kind}": {alias},' for kind, alias in aliases.items()]
    files = {_KINDS: "\n".join([_header(_KINDS), *lines, "", "MODULES = {", *table, "}", ""])}
    queue = [f"{_CODE}.{model}", *(module for module, _ in classes.values())]
    while queue:
        module = queue.pop()
        if module not in files:
            files[module], imported = _flattened(module)
            queue += imported
    # transformers keeps one model class in a process for each class of configurations, which it tells apart by their
    # file: so the files of two folders with other code have to differ.
    code = hashlib.sha256("".join(files[module] for module in sorted(files)).encode()).hexdigest()
    files[f"{_CODE}.configuration_hilnas"] += f'\nCODE = "{code}"  # SHA-256 of the code in this folder\n'
    return {f"{_file(module)}.py": files[module].encode() for module in sorted(files)}


def _class_of(kind: str) -> tuple[str, str]:
    """Returns module and name of the class that computes a kind's blocks in released folders."""
    module = MODULES[kind]
    if module.release_code:
        place, _, name = module.release_code.partition(":")
        return place, name
    return module.__module__, module.__name__


def _file(module: str) -> str:
    """Returns the name of a module's file without ".py", such as `nn_conv` of `nas.model.nn.conv`."""
    return module.removeprefix(f"{_CODE}.").removeprefix("nas.model.").replace(".", "_")


def _header(module: str) -> str:
    licence = "Apache License 2.0" if module.startswith("nas.") else f"under the licence of {module.partition('.')[0]}"
    return f"# {module} as bundled by hilnas {version('hilnas')}; {licence}."


def _flattened(module: str) -> tuple[str, list[str]]:
    """Returns the text of a module's file, and the modules that it imports from beside it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    text = Path(spec.origin).read_text("utf-8")
    lines, imported = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in _INSTALLED:
                    raise _unsupported(module, alias.name)
        elif isinstance(node, ast.ImportFrom):
            target = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
            if target.partition(".")[0] in _INSTALLED:
                continue
            target = _target(module, target, {alias.name for alias in node.names})
            imported.append(target)
            names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names)
            line = f"{' ' * node.col_offset}from .{_file(target)} import {names}"
            lines[node.lineno - 1 : node.end_lineno] = [line, *[""] * ((node.end_lineno or 0) - node.lineno)]
    return "\n".join([_header(module), *lines, ""]), imported


def _target(module: str, target: str, names: set[str]) -> str:
    """Returns the module that released folders have for `target`, from which `module` imports `names`."""
    if target in _STAND_INS and names <= _STAND_IN_NAMES:
        return _STAND_INS[target]
    package = module.partition(".")[0]
    if target.startswith(("nas.model.nn.", f"{_CODE}.")) or (package != "nas" and target.startswith(f"{package}.")):
        return target
    raise _unsupported(module, target)


def _unsupported(module: str, target: str) -> Unsupported:
    return Unsupported(
        f"a release for transformers cannot contain {module}: it imports {target}; see `release_code` in"
        " docs/how-to/adding-a-block.md, or leave the transformers folder out"
    )
