"""A command group that imports a command's module when that command is used.

`nas --help` and shell completion stay fast and need neither torch nor the database, whatever the commands import.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

COMMANDS = {
    "launch": "Search a space and report its Pareto front.",
    "space": "List, show, validate and sample search spaces.",
    "study": "List, show, steer and exchange studies.",
    "family": "Build, train, compare and show families of models.",
    "device": "Attach, list, show, check and steer devices.",
    "bench": "Measure one layout or model file on a device.",
    "export": "Write a layout as a model file of a runtime.",
    "generate": "Write text with a trained proxy.",
    "agent": "Serve devices of this host to a coordinator.",
    "runtime": "List runtimes and build them.",
    "serve": "Serve device agents of other hosts.",
    "doctor": "Check this machine and say how to fix what is wrong.",
    "gc": "Remove model files, checkpoints and lowered programs that nothing needs.",
    "db": "Maintain the database.",
    "token": "Create, list and revoke the API tokens of people.",
    "server": "Make coordinators known, for --server.",
}
"""Command -> its line in `nas --help`; each is a module of this package with an `app`."""


class LazyGroup(TyperGroup):
    """The root group; its commands are the modules in `COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name) for name in COMMANDS}  # what "did you mean" looks at

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"nas.cli.{cmd_name}")
        command = get_command(module.app)
        command.name = cmd_name
        return command

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        # Typer's own would import every command for its help.
        from typer._click.shell_completion import CompletionItem

        return [CompletionItem(name, help=COMMANDS[name]) for name in COMMANDS if name.startswith(incomplete)]


def command_app(**settings: Any) -> typer.Typer:
    """A Typer application with the settings that all commands share."""
    return typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )
