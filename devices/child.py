"""An agent for this machine as a child process: it ends when its parent does, in whatever way the parent ends.

The parent keeps the write end of the child's standard input. Nothing is ever written; its end is the message.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from nas.core.errors import NasError
from nas.devices.agent import Agent, Attached
from nas.devices.client import JobClient
from nas.devices.content import ContentFolder
from nas.devices.describe import boot_id, describe
from nas.devices.download import Downloads
from nas.devices.hostlock import HostLock
from nas.devices.manifest import PinnedManifest
from nas.devices.transports.local import LocalTransport

_STOP_WITHIN_S = 10.0


@contextlib.contextmanager
def child_agent(server: str, *, cache: Path, lock: Path, state: Path, key: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent of this machine that serves `server` while the context is open.

    Args:
        server: URL of the coordinator, such as `http+unix:///path/of.sock`.
        cache: folder for files and runners.
        lock: folder of the host lock.
        state: folder for what the agent must not forget.
        key: public key of the coordinator, whose signature every runner manifest must carry.
    """
    options = {"--server": server, "--cache": cache, "--lock": lock, "--state": state, "--key": key}
    arguments = [str(part) for option in options.items() for part in option]
    with subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent until standard input ends or a signal comes. The exit code."""
    parser = argparse.ArgumentParser(prog="nas-agent")
    parser.add_argument("--server", required=True)
    parser.add_argument("--key", required=True)
    for folder in ("--cache", "--lock", "--state"):
        parser.add_argument(folder, type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    client = JobClient.open(options.server)
    try:
        agent = local_agent(client, cache=options.cache, lock=options.lock, state=options.state, key=options.key)
        _end_with_parent(agent)
        _end_on_signals(agent)
        agent.run()
    except NasError as error:
        logging.error("%s", error)
        return error.exit_code
    finally:
        client.close()
    return 0


def local_agent(client: JobClient, *, cache: Path, lock: Path, state: Path, key: str) -> Agent:
    """An agent that serves this machine; the arguments are those of `child_agent`."""
    transport = LocalTransport(cache)
    device = describe(transport, platform.machine())
    return Agent(
        f"local-{device.id}"[:64],
        client,
        [Attached(device, transport, HostLock(lock))],
        Downloads(client, ContentFolder(cache)),
        PinnedManifest(client.manifest, key, state),
        boot_id=boot_id(transport),
    )


def _end_with_parent(agent: Agent) -> None:
    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        agent.abort()
        # A thread may still wait for an answer of the coordinator, which died with the parent.
        time.sleep(_STOP_WITHIN_S / 2)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


def _end_on_signals(agent: Agent) -> None:
    """The first signal lets the running job finish, the second does not."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: agent.abort())
        agent.stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handle)


if __name__ == "__main__":
    sys.exit(main())
