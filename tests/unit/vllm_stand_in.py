"""A stand-in for vLLM's HTTP API: the addresses that `nas vllm` asks, with times and faults that a test chooses.

As a program it takes the arguments of `vllm serve` and its behaviour from $VLLM_STAND_IN; it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Behaviour:
    """What the stand-in does.

    Args:
        first_s: until the first token.
        token_s: until each other one.
        per_event: tokens of each event after the first.
        fewer: tokens that it generates less than it is asked for.
        loads: answers of /health that it is not ready.
        loading: status of these answers.
        counts: whether each event says how many tokens there are.
        usage: whether the last event does.
        models: that it serves.
        fault: "stall", "error", "reset", "exit", "garbage", "endless", "busy", "bomb": after `at` tokens of a request.
        at: see there.
        foreign: tokens that it generates for others with each of ours; it then finds prompts in its cache, too.
        metrics: whether it has counters.
        breaks: whether it breaks the connection instead of telling them.
    """

    first_s: float = 0.002
    token_s: float = 0.001
    per_event: int = 1
    fewer: int = 0
    loads: int = 0
    loading: int = 503
    counts: bool = True
    usage: bool = True
    models: list[str] = field(default_factory=lambda: ["nas"])
    fault: str = ""
    at: int = 2
    foreign: int = 0
    metrics: bool = True
    breaks: bool = False


@dataclass
class State:
    behaviour: Behaviour
    checks: int = 0
    generated: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    together: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        state, does = self.state, self.state.behaviour
        if self.path == "/health":
            state.checks += 1
            self.answer(does.loading if state.checks <= does.loads else 200, {})
        elif self.path == "/version":
            self.answer(200, {"version": "0.0.0+stand.in"})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": name, "max_model_len": 4096} for name in does.models]})
        elif self.path == "/metrics" and does.breaks:
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.path == "/metrics" and does.metrics:
            hits = state.generated if does.foreign else 0
            text = (
                "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
                f'vllm:generation_tokens_total{{engine="0",model_name="nas"}} {float(state.generated)}\n'
                f'vllm:prefix_cache_hits_total{{engine="0",model_name="nas"}} {float(hits)}\n'
            )
            self.answer(200, text)
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state, does = self.state, self.state.behaviour
        if body["model"] not in does.models:
            self.answer(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
            return
        if does.fault == "busy":
            self.answer(500, {"error": {"message": "EngineCore encountered an issue.", "code": 500}})
            return
        with state.lock:
            state.bodies.append(body)
            state.together += 1
            state.most = max(state.most, state.together)
        try:
            self.stream(body)
        except OSError:
            pass
        finally:
            with state.lock:
                state.together -= 1

    def stream(self, body: dict[str, Any]) -> None:
        state, does = self.state, self.state.behaviour
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count, prompt = body["max_tokens"] - does.fewer, len(body["prompt"])
        done, due = 0, time.monotonic() + does.first_s
        while done < count:
            time.sleep(max(0.0, due - time.monotonic()))
            step = 1 if done == 0 else min(does.per_event, count - done)
            done, due = done + step, due + does.token_s * does.per_event
            if does.fault and done > does.at:
                self.fail(done)
                return
            event: dict[str, Any] = {"choices": [{"index": 0, "text": " a" * step}]}
            if does.counts:
                event["usage"] = {"prompt_tokens": prompt, "completion_tokens": done}
            with state.lock:
                state.generated += step + does.foreign
            self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if does.usage:
            usage = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
            self.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def fail(self, done: int) -> None:
        fault = self.state.behaviour.fault
        if fault == "stall":
            while not self.state.released.wait(0.05):
                self.chunk(b": ping\n\n")
        elif fault == "error":
            self.chunk(b'data: {"error": {"message": "CUDA out of memory", "type": "InternalServerError"}}\n\n')
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "exit":
            print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
            os._exit(1)
        elif fault == "garbage":
            self.chunk(b"data: \xff\x00 not JSON\n\n")
            self.chunk(b"")
        elif fault == "endless":
            while True:
                self.chunk(b": " + b"x" * (1 << 20))
        elif fault == "bomb":
            usage = {"prompt_tokens": 16, "completion_tokens": 1 << 39}
            self.chunk(b"data: " + json.dumps({"choices": [{}], "usage": usage}).encode() + b"\n\n")
            self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def answer(self, status: int, content: dict[str, Any] | str) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class TcpServer(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors of the handler; connections that a test or its client resets are none."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def stand_in(behaviour: Behaviour) -> Iterator[tuple[str, State]]:
    """Serves on a port of this machine; yields its address and what it saw."""
    state = State(behaviour)
    server = TcpServer(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def program(folder: Path, behaviour: Behaviour) -> Path:
    """Writes an executable that is `vllm` to those who start it; it leaves its arguments beside itself."""
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable} -S\nimport sys\nsys.argv[0] = {str(path)!r}\n"
                    f"sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport vllm_stand_in\n"
                    f"vllm_stand_in.main({asdict(behaviour)!r})\n")  # fmt: skip
    path.chmod(0o755)
    return path


def main(behaviour: dict[str, Any]) -> None:
    """Serves on the socket that the arguments name, with a child of its own as vLLM's engine is one."""
    engine = os.fork()
    if engine == 0:
        os.setsid()
        while True:
            time.sleep(60)
    record = Path(sys.argv[0]).with_name("seen.json")
    folder = Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())
    record.write_text(json.dumps({"argv": sys.argv[1:], "config": config, "pids": [os.getpid(), engine]}))
    if "--broken" in config.get("architectures", []):
        print("ValueError: no such architecture", file=sys.stderr)
        sys.exit(1)
    state = State(Behaviour(**behaviour))
    address = sys.argv[sys.argv.index("--uds") + 1]
    UnixServer(address, type("Bound", (Handler,), {"state": state})).serve_forever()
