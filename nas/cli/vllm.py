"""`nas vllm`: measure a vLLM server with single requests and batches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from nas.cli.lazy import command_app
from nas.cli.options import RepsOption, numbers_of, path_of, read_layout
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.units import show_figure, show_share
from nas.core.workload import MAX_CONTEXT, MAX_GEN
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.measure.protocol.vllm import (
    BUSY_CLIENT,
    Endpoint,
    Load,
    gpu_of_this_machine,
    measure_server,
    started_server,
)

app = command_app()

_MOST = 1024
"""Requests together."""
_VOCABULARY = 1000
"""Token ids of prompts for a server whose vocabulary is not known."""
_START_S = 600.0
"""Seconds for a server that is started here to load."""
_REPLY_S = 30.0
"""Seconds for one that runs to answer."""
_CONFIG_BYTES = 1 << 20
_LOCK_S = 3600.0
"""Seconds for others' measurements on this machine to end."""


@app.command("vllm")
def command(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT|FOLDER|URL",
            help="Layout, folder of transformers, or the address of a server that runs.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        int, typer.Option("--prompt", "-p", min=1, max=MAX_CONTEXT, help="Prompt length in tokens.")
    ] = 512,
    gen: Annotated[
        int, typer.Option("--gen", "-n", min=2, max=MAX_GEN, help="Tokens that each request generates.")
    ] = 128,
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,...", help="Numbers of requests that are sent together.")
    ] = "1,8,32",
    reps: RepsOption = 5,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model of the server at URL. Default: the only one.", show_default=False),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(
            "--vocab",
            min=2,
            max=1 << 24,
            help="Vocabulary size: token ids of prompts are below it.",
            show_default=f"the model's own; {_VOCABULARY} at a URL",
        ),
    ] = None,
    program: Annotated[str, typer.Option("--program", help="vLLM's program.")] = "vllm",
    ready: Annotated[
        float | None,
        typer.Option(
            "--ready",
            min=1,
            max=7200,
            help="Seconds for the server to become ready.",
            show_default=f"{_START_S:g}; {_REPLY_S:g} at a URL",
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1, max=7200, help="Seconds for the requests of one repetition.")
    ] = 120,
    json: JsonFlag = False,
) -> None:
    """Measure a vLLM server with single requests and batches.

    A check beside the measurements of studies: TTFT, time per token and throughput, as a client of its HTTP API sees
    them. A layout (with random weights) or a folder is served by `vllm serve` on this machine meanwhile; of layouts,
    those that a stock class of transformers holds. See docs/how-to/vllm.md.
    """
    batches = tuple(numbers_of(batch, "--batch"))
    if not all(1 <= size <= _MOST for size in batches):
        raise InvalidInput(f"numbers from 1 to {_MOST}", where="--batch")
    is_url = subject.startswith(("http://", "https://"))
    if model is not None and not is_url:
        raise InvalidInput("applies only if the argument is the URL of a running server", where="--model")
    usual_s = _REPLY_S if is_url else _START_S
    load = Load(prompt, gen, batches, reps, vocab or _VOCABULARY, deadline, usual_s if ready is None else ready)
    with activity("waiting for the server") as log, _endpoint(subject, load, program, vocab) as (endpoint, load):
        report = measure_server(endpoint, load, model, log)
    gpu, reason = (None, "the server does not tell it") if is_url else gpu_of_this_machine()
    report = {"subject": subject, "gpu": gpu, "gpu_reason": reason, "vocab": load.vocab, **report}
    if json:
        print_json(report)
    else:
        _print(report)
    if failure := report["failure"]:
        raise InfrastructureFailed(f"{failure['batch']} request(s) together: {failure['message']}")


@contextmanager
def _endpoint(subject: str, load: Load, program: str, vocab: int | None) -> Iterator[tuple[Endpoint, Load]]:
    """Yields the server of a subject, and the load with token ids of its vocabulary."""
    if subject.startswith(("http://", "https://")):
        yield Endpoint(_address(subject)), load
        return
    with tempfile.TemporaryDirectory(prefix="nas-vllm-") as scratch:
        path = path_of(subject)
        if path is not None and path.is_dir():
            folder, dummy = path, False
        else:
            folder, dummy = Path(scratch), True
            config = _config(read_layout(subject, "published layout, folder or URL"), load)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        size = _vocabulary(folder)
        if vocab is not None and vocab > size:
            raise InvalidInput(f"the model has {size} tokens", where="--vocab")
        load = replace(load, vocab=vocab or size)
        # Loading would disturb others' measurements, too.
        with (
            HostLock(host_lock_folder()).exclusive(_LOCK_S),
            started_server(folder.resolve(), load, program, dummy=dummy) as endpoint,
        ):
            yield endpoint, load


def _address(url: str) -> str:
    """Returns the address of a server without the path of its API."""
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or parts.username is not None:
        raise InvalidInput(f"{url!r} is no address of a server, such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


def _config(layout: Layout, load: Load) -> dict[str, Any]:
    """Returns config.json of a layout."""
    from nas.model.nn.transformers import transformers_config

    try:
        config = transformers_config(layout)
    except Unsupported as error:
        raise Unsupported(f"vLLM is given stock classes of transformers only, and {error.message}") from error
    return {**config, "dtype": "bfloat16", "max_position_embeddings": load.prompt + load.gen}


def _vocabulary(folder: Path) -> int:
    """Returns the number of tokens by a folder's config.json."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_CONFIG_BYTES))
        size = (config.get("text_config") or config)["vocab_size"]
        if type(size) is int and 2 <= size <= 1 << 24:
            return size
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InvalidInput("no config.json of transformers with a `vocab_size`", where=str(folder))


def _print(report: dict[str, Any]) -> None:
    server, batches = report["server"], report["batches"]
    fields: list[tuple[str, object]] = [
        ("subject", report["subject"]),
        ("server", f"{server['url']}, model {server['model']}"),
        ("vLLM", server["vllm"]),
        ("GPU", report["gpu"] or f"unknown: {report['gpu_reason']}"),
        ("request", f"{report['prompt']} tokens in, {report['gen']} out"),
        ("ready after", f"{server['ready_s']:.1f} s"),
    ]
    print_fields(fields)
    if not batches:
        return
    typer.echo()
    first = batches[0]["throughput_tps"]["value"]
    rows = [
        [
            row["batch"],
            *(_cell(row[name]) for name in ("ttft_ms", "ttft_p95_ms", "decode_p50_ms", "decode_p95_ms")),
            _cell(row["throughput_tps"]),
            f"{row['throughput_tps']['value'] / first:.2f}",
        ]
        for row in batches
    ]
    print_table(_COLUMNS, rows)
    for row in batches:
        for remark in _remarks(row):
            say(f"{row['batch']} request(s) together: {remark}")


_COLUMNS = ("batch", "TTFT, ms", "TTFT p95, ms", "p50, ms/token", "p95, ms/token", "tokens/s", "x first row")


def _cell(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return "unknown"
    return show_figure(figure["value"], *figure["ci95"])


def _remarks(row: dict[str, Any]) -> Iterator[str]:
    """Yields what makes the figures of a batch worth less."""
    if row["client_cpu"] > BUSY_CLIENT:
        yield f"this client used {show_share(row['client_cpu'])} of a core: the server may be faster than it can read"
    if row["foreign_tokens"]:
        yield f"the server also generated {row['foreign_tokens']} tokens for others"
    if row["cached_prompt_tokens"]:
        yield f"{row['cached_prompt_tokens']:,.0f} tokens of prompts were in the server's cache"
    for name in ("decode_p50_ms", "ttft_p95_ms"):
        if row[name]["value"] is None and row["batch"] > 1:
            yield f"{name} unknown: {row[name]['reason']}"
