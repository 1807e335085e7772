"""Creates `.venv` in the checkout with what the demo and the tests need. Standard library only, Python 3.11 or newer.

uv does the work because it resolves and links in seconds; it is installed with the user's own pip into the user's
cache folder. uv does not read pip's configuration, so the user's settings of indexes are passed to it.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
UV_VERSION = "0.9.30"
TORCH = "torch==2.13.0"
# Only llama-cpp-python's bindings are installed: `nas runtime build` compiles the library once, patched, for all uses.
BINDINGS_ONLY = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}

UV_VARIABLES = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""pip's option -> uv's variable for it, and the separator of several values."""


def main() -> None:
    """Creates or updates the environment; safe to repeat and to interrupt."""
    uv = ensure_uv()
    env = uv_environment(pip_settings()) | os.environ | BINDINGS_ONLY
    if not usable(VENV):
        say("creating .venv")
        run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(VENV)], env)
    say("installing Python packages: about 1 GB to download the first time, 1-2 minutes")
    install = [uv, "pip", "install", "--quiet", "--python", str(VENV / "bin" / "python")]
    run([*install, "-r", str(ROOT / "requirements.lock"), TORCH], env)
    run([*install, "--no-deps", "-e", str(ROOT)], env)


def ensure_uv() -> str:
    """Returns the path of uv at the pinned version; installs it with pip where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "hilnas" / "tools" / f"uv-{UV_VERSION}"
    uv = target / "bin" / "uv"
    if not uv.exists():
        say(f"installing uv {UV_VERSION} with pip into {target} (20 MB)")
        run(
            [
                *pip_command(),
                "install",
                "--quiet",
                "--root-user-action=ignore",
                "--target",
                str(target),
                f"uv=={UV_VERSION}",
            ]
        )
    return str(uv)


def pip_command() -> list[str]:
    """The user's pip; one message where this Python has none."""
    command = [sys.executable, "-m", "pip"]
    if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode:
        fail(f"{sys.executable} has no pip: install it (Debian, Ubuntu: apt install python3-pip), then run make again")
    return command


def pip_settings() -> dict[str, str]:
    """What the user has configured for `pip install`, by option; later sources win, in pip's own order."""
    listed = subprocess.run([*pip_command(), "config", "list"], capture_output=True, text=True, check=True).stdout
    settings: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        settings[section, name] = ast.literal_eval(value)
    return {
        name: value
        for section in ("global", "install", ":env:")
        for (at, name), value in settings.items()
        if at == section
    }


def uv_environment(pip: Mapping[str, str]) -> dict[str, str]:
    """Returns pip's settings as environment variables of uv, so that no password in a URL is visible in `ps`."""
    env = {"UV_PYTHON_DOWNLOADS": "never"}
    for option, (variable, separator) in UV_VARIABLES.items():
        if option in pip:
            env[variable] = separator.join(pip[option].split())
    if "extra-index-url" in pip:
        env["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's rule: the best version over all indexes
    return env


def usable(venv: Path) -> bool:
    """Returns whether the environment's Python runs and is new enough."""
    python = venv / "bin" / "python"
    probe = [str(python), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0


def run(command: list[str], env: Mapping[str, str] | None = None) -> None:
    """Runs a command; ends the set-up if it fails."""
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        fail(f"{shlex.join(command)} ended with {code}; see its message above")


def say(message: str) -> None:
    """Prints a line of progress."""
    print(f"setup: {message}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """Ends the set-up."""
    say(message)
    sys.exit(1)


if __name__ == "__main__":
    main()
