"""Runs one process for an agent and makes sure that it ends. Executed as a script; imports nothing of ours.

A small separate process, because:

- code between fork and exec is only safe in a process with one thread;
- something must outlive the agent: when the agent dies, even by SIGKILL, standard input reaches its end, and this
  process kills the child and all its descendants. Should this process be killed, the child dies by PDEATHSIG.

Standard input: one line of JSON {argv, env, affinity, deadline_s}, then nothing; its end means "kill".
Descriptor argv[1]: one line of JSON {exit_code, wall_s, cpu_s, timed_out} or {errno, what}.
Standard output and error are the child's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_MS = 2**31 - 1
"""What poll(2) waits for at most: 24 days."""


def main() -> None:
    """Runs the process that standard input describes, once."""
    report_to = int(sys.argv[1])
    os.set_inheritable(report_to, False)
    spec = json.loads(_read_line(0))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        report = _supervise(**spec)
    except OSError as error:
        report = {"errno": error.errno, "what": error.filename or ""}
    finally:
        _kill_descendants()
    os.write(report_to, json.dumps(report).encode() + b"\n")


def _supervise(argv: list[str], env: dict[str, str], affinity: list[int], deadline_s: float) -> dict[str, object]:
    start = time.monotonic()
    child = _spawn(argv, env, affinity)
    watch = select.poll()
    watch.register(os.pidfd_open(child), select.POLLIN)
    watch.register(0, select.POLLIN | select.POLLHUP)
    timed_out = not watch.poll(min(deadline_s * 1000, MOST_MS))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_s": time.monotonic() - start,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "timed_out": timed_out,
    }


def _spawn(argv: list[str], env: dict[str, str], affinity: list[int]) -> int:
    """Returns the child's pid once it executes `argv`. Raises the child's OSError if it could not."""
    parent = os.getpid()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        what = f"{argv[0]} on cores {affinity}: it has, or a cpuset allows, cores {sorted(os.sched_getaffinity(0))}"
        try:
            _become_runner(parent, affinity)
            what = argv[0]
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(write_end, json.dumps([error.errno, what]).encode())
        os._exit(127)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        trouble = pipe.read()
    if trouble:
        number, what = json.loads(trouble)
        raise OSError(number, os.strerror(number), what)
    return child


def _become_runner(parent: int, affinity: list[int]) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Out of memory, the kernel should take the runner and not the agent.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("1000")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if affinity:
        _pin(affinity)


def _pin(cores: list[int]) -> None:
    """Restricts this process to exactly these cores; of those that a cpuset forbids, the kernel says nothing."""
    try:
        os.sched_setaffinity(0, cores)
        if os.sched_getaffinity(0) == set(cores):
            return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    raise OSError(errno.EBUSY if any(map(_is_offline, cores)) else errno.EINVAL, "sched_setaffinity")


def _is_offline(core: int) -> bool:
    with contextlib.suppress(OSError), open(f"/sys/devices/system/cpu/cpu{core}/online", encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip() == "0"
    return False


def _kill_descendants() -> None:
    """Kills children until there are none: as subreaper this process inherits orphans, so this gets all descendants."""
    me = os.getpid()
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{me}/children", encoding="ascii") as file:  # noqa: PTH123
                children = [int(pid) for pid in file.read().split()]
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(descriptor, 1 << 16)
        if not more:
            sys.exit(0)
        data += more
    return data


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
