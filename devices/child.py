"""An agent for this machine as a child process: it ends when its parent does, in whatever way the parent ends.

The parent keeps the write end of the child's standard input. Nothing is ever written; its end is the message.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nas.core.errors import NasError
from nas.core.logs import configure_logs
from nas.devices.agent import Agent
from nas.devices.attachments import THIS_MACHINE, Attachments
from nas.devices.client import JobClient
from nas.devices.describe import describe
from nas.devices.host import end_on_signals, make_agent, served
from nas.devices.transports.local import LocalTransport

_STOP_WITHIN_S = 10.0


@contextlib.contextmanager
def child_agent(
    server: str, *, cache: Path, lock: Path, state: Path, key: str, devices: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """An agent of this machine that serves `server` while the context is open.

    Args:
        server: URL of the coordinator, such as `http+unix:///path/of.sock`.
        cache: folder for files and runners.
        lock: folder of the host lock.
        state: folder for what the agent must not forget.
        key: public key of the coordinator, whose signature every runner manifest must carry.
        devices: list of the devices that are served beside this machine (`nas.devices.attachments`).
    """
    arguments = child_arguments(server, cache=cache, lock=lock, state=state, key=key, devices=devices)
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def child_arguments(
    server: str, *, cache: Path, lock: Path, state: Path, key: str, devices: Path | None = None
) -> list[str]:
    """What Python is called with for such an agent; see `child_agent`."""
    options = {"--server": server, "--cache": cache, "--lock": lock, "--state": state, "--key": key}
    options |= {"--devices": devices} if devices else {}
    return ["-m", __name__, *(str(part) for option in options.items() for part in option)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent until standard input ends or a signal comes. The exit code."""
    parser = argparse.ArgumentParser(prog="nas-agent")
    parser.add_argument("--server", required=True)
    parser.add_argument("--key", required=True)
    for folder in ("--cache", "--lock", "--state"):
        parser.add_argument(folder, type=Path, required=True)
    parser.add_argument("--devices", type=Path, help="list of the devices that are served beside this machine")
    options = parser.parse_args(arguments)
    configure_logs()
    client = JobClient.open(options.server)
    try:
        agent = _local_agent(client, options)
        _end_with_parent(agent)
        end_on_signals(agent)
        agent.run()
    except NasError as error:
        logging.error("%s", error)
        return error.exit_code
    finally:
        client.close()
    return 0


def _local_agent(client: JobClient, options: argparse.Namespace) -> Agent:
    here = describe(LocalTransport(options.cache), platform.machine()).id
    folders = {"cache": options.cache, "lock": options.lock, "state": options.state}
    attached = served(Attachments(options.devices), this_machine=True) if options.devices else lambda: (THIS_MACHINE,)
    return make_agent(f"local-{here}"[:64], client, attached, key=options.key, **folders)


def _end_with_parent(agent: Agent) -> None:
    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        agent.abort()
        # A thread may still wait for an answer of the coordinator, which died with the parent.
        time.sleep(_STOP_WITHIN_S / 2)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
