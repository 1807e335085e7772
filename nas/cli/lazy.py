"""Command group that imports the module of a command only when that command runs.

`nas --help` and shell completion stay fast, whatever the commands import.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from importlib.metadata import requires
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from nas.core.errors import InvalidInput

COMMANDS = {
    "launch": "Search an architecture space and report its Pareto front.",
    "space": "List, show, validate and sample search spaces.",
    "study": "List, show, control, export and import studies.",
    "family": "Build, train, compare and show model families.",
    "device": "Attach, list, show and manage devices.",
    "bench": "Measure layouts and model files on a device.",
    "vllm": "Measure a vLLM server with single requests and batches.",
    "compare": "Show which of several model files, with which settings, is best on a device under budgets.",
    "quantise": "Write a GGUF file whose tensors have the types that keep budgets on a device and lose least.",
    "export": "Export a layout to a model file.",
    "adapt": "Search inside a trained model for a child that keeps budgets on a device.",
    "import": "Import a trained model: a GGUF file, or a folder of Hugging Face's transformers.",
    "chat": "Chat with a model: a GGUF file, or a folder of Hugging Face's transformers.",
    "evaluate": "Count right answers of models to questions of your own or of public benchmarks.",
    "generate": "Continue a text with a model: a GGUF file, or a folder of Hugging Face's transformers.",
    "agent": "Run and manage device agents.",
    "runtime": "List and build runtimes.",
    "serve": "Run the coordinator: dashboard, API and remote device agents.",
    "doctor": "Diagnose problems on this machine and suggest fixes.",
    "gc": "Remove unused model files, checkpoints, compiled programs, blocks of `nas adapt` and quantised files.",
    "backup": "Save the database, keys, studies and families of $NAS_HOME as one archive.",
    "restore": "Restore what `nas backup` saved, as a new $NAS_HOME.",
    "demo-data": "Import the recorded studies of hilnas, to look at.",
    "db": "Manage the database.",
    "token": "Create, list and revoke API tokens.",
    "server": "Manage the coordinators known to --server.",
}
"""Command -> summary in `nas --help`. Each is a module of this package with a Typer application `app`."""

MODULES = {"import": "import_model", "demo-data": "demo_data"}
"""Command -> module, where the command's name is none of a module."""

_DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python", "multipart": "python-multipart", "PIL": "pillow", "usb1": "libusb1"}
"""Module -> distribution, where their names differ."""


def extras() -> dict[str, list[str]]:
    """Returns extra -> names of its distributions, as this installation of hilnas states them.

    Raises:
        PackageNotFoundError: hilnas is not installed.
    """
    packages: dict[str, list[str]] = {}
    for line in requires("hilnas") or ():
        if match := re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line):
            packages.setdefault(match[2], []).append(match[1].replace("_", "-").lower())
    return packages


def pip_line(extra: str) -> str:
    """Returns how to install the packages of an extra; no index has hilnas, and somebody could take its name there."""
    return f"pip install '.[{extra}]' in a checkout"


def missing_package(error: ImportError) -> InvalidInput | None:
    """Returns what to tell of a package that is not installed, with its extra; None: it is hilnas itself."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "nas"):
        return None
    if not isinstance(error, ModuleNotFoundError):
        return InvalidInput(f"the package {module} cannot be loaded: {error}")
    name = _DISTRIBUTIONS.get(module, module).replace("_", "-")
    extra = next((extra for extra, names in extras().items() if name in names), None)
    line = f"pip install {name}" if extra is None else pip_line(extra)
    return InvalidInput(f"this needs the package {name}, which is not installed: {line}")


class LazyGroup(TyperGroup):
    """Root group, whose commands are the modules in `COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name) for name in COMMANDS}  # for "did you mean"

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        # Typer's own implementation imports every command.
        from typer._click.shell_completion import CompletionItem

        return [CompletionItem(name, help=COMMANDS[name]) for name in COMMANDS if name.startswith(incomplete)]


@cache
def _command(name: str) -> Any:
    """Returns a command of `COMMANDS`; Typer takes up to 30 ms to make one of its functions."""
    command = get_command(importlib.import_module(f"nas.cli.{MODULES.get(name, name)}").app)
    command.name = name
    return command


def command_app(**settings: Any) -> typer.Typer:
    """Returns a Typer application with the settings shared by all commands."""
    return typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )
