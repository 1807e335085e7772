"""`nas vllm`: times of a server of language models, by single requests and by batches of them.

Such a server is no `nas.measure.runtimes.base.Runtime`. A plan is one fresh process of a signed runner that measures
one request; a server is gigabytes of packages that nobody signs, takes a minute to start, and is measured by requests
that share it. So its figures are those of a client with a clock, not of the protocol of studies, and are not stored.

The API is that of vLLM (read at vllm-project/vllm 030ea52, `vllm/entrypoints/openai/completion`): `GET /health`,
`/v1/models`, `/version` and `/metrics`, and `POST /v1/completions` with token ids, `ignore_eos`, a stream of events,
and the number of tokens so far in each (`continuous_usage_stats`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.measurement import Figure
from nas.core.progress import Log
from nas.core.stats import quantile, repetition_figure
from nas.core.trust import open_async_http
from nas.measure.devices.transports.base import STDERR_TAIL, CommandResult
from nas.measure.devices.transports.process import run_supervised

Json = dict[str, Any]
M = TypeVar("M", bound=BaseModel)

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of a server that wants one; vLLM's own name for it."""
NAME = "nas"
"""Name of the model of a server that is started here."""
BUSY_CLIENT = 0.8
"""Share of a core beyond which this client, not the server, may be what is measured."""

_ANSWER_BYTES = 4 << 20
_TOKEN_BYTES = 4096
"""Of an answer: the most bytes for each token, and besides."""
_MESSAGE = 400
"""Characters of a server's message that are shown."""
_SHORT_S = 10.0
_POLL_S = 0.25
_LOADING = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""What a server answers, or a proxy in front of it, until it is ready."""
_SETTLE_S = 2.0
"""Seconds in which counters of the server reach what was counted here."""
_LOG_BYTES = 64 << 20
_COUNTER = re.compile(
    rb"^vllm:(generation_tokens|prefix_cache_hits)_total(?:\{[^\n]*\})? "
    rb"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e\+0{0,2}[0-9]{1,2})?)\s*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Endpoint:
    """A server that can be asked.

    Args:
        url: its address; of one on a socket, only for messages.
        socket: path of its Unix socket; None: it is reached by `url`.
        end_reason: returns why it ended; None while it runs, or if it was not started here.
    """

    url: str
    socket: str | None = None
    end_reason: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Load:
    """The requests of one measurement.

    Args:
        prompt: tokens of each prompt.
        gen: tokens that each request generates.
        batches: numbers of requests that are sent together, each measured by itself.
        repetitions: times that each is sent, after one that does not count.
        vocab: token ids are below it.
        deadline_s: seconds for the requests of one repetition.
        ready_s: seconds for the server to become ready.
    """

    prompt: int
    gen: int
    batches: tuple[int, ...]
    repetitions: int
    vocab: int
    deadline_s: float
    ready_s: float

    @property
    def longest_s(self) -> float:
        """Seconds after which all of it has ended."""
        waves = len(self.batches) * (self.repetitions + 1)
        return self.ready_s + waves * (self.deadline_s + _SETTLE_S + _SHORT_S) + 6 * _SHORT_S


Count = Annotated[int, Field(ge=0, lt=1 << 40)]


class _Usage(BaseModel):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = None


class _Event(BaseModel):
    choices: list[Any] = Field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


class _Model(BaseModel):
    id: str = Field(max_length=1024)
    max_model_len: Count | None = None


class _Models(BaseModel):
    data: list[_Model] = Field(min_length=1, max_length=1000)


class _Version(BaseModel):
    version: str = Field(max_length=200)


@dataclass
class _Stream:
    """The answer to one request, as it came: read first, understood after the clock has stopped."""

    sent_ns: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer.

    Args:
        ttft_ms: from sending the request to its first token.
        gaps_ms: between tokens [gen - 1]; those of one read share its time. None: the server counts only at the end.
        reads: reads with tokens.
        end_ns: clock at the last token.
    """

    ttft_ms: float
    gaps_ms: tuple[float, ...] | None
    reads: int
    end_ns: int


@dataclass(frozen=True)
class Wave:
    """One repetition: requests that were sent together.

    Args:
        answers: of each.
        seconds: from sending the first to the last token of all.
        client_cpu: processor time of this client meanwhile, in cores.
    """

    answers: tuple[Answer, ...]
    seconds: float
    client_cpu: float

    @property
    def gaps_ms(self) -> list[float] | None:
        """Times between tokens, of all requests; None: not known of one."""
        gaps = [answer.gaps_ms for answer in self.answers]
        return None if None in gaps else [gap for times in gaps if times for gap in times]


def measure_server(endpoint: Endpoint, load: Load, model: str | None, log: Log) -> Json:
    """Returns what was measured of a server: `batches`, and `failure` of the first one that did not work.

    Args:
        endpoint: the server.
        load: what it is asked.
        model: name of the model among those that it serves; None: the only one.
        log: takes progress.

    Raises:
        InvalidInput: no such model, or the requests are longer than it can read.
        InfrastructureFailed: the server does not become ready, or answers nothing that can be understood.
    """
    return asyncio.run(_measure(endpoint, load, model, log))


async def _measure(endpoint: Endpoint, load: Load, model: str | None, log: Log) -> Json:
    seed = secrets.randbits(32)  # the same prompts again would be in the cache of a server that still runs
    random = np.random.default_rng(seed)
    start = time.monotonic()
    async with _client(endpoint) as http:
        await _wait_until_ready(http, endpoint, load.ready_s)
        ready_s = time.monotonic() - start
        name, longest = await _served(http, endpoint, model)
        if longest is not None and load.prompt + load.gen > longest:
            message = f"{load.prompt} + {load.gen} tokens, and the server reads at most {longest}"
            raise InvalidInput(message, where="--prompt, --gen")
        status, body = await _get(http, endpoint, "/version")
        report: Json = {
            "server": {
                "url": endpoint.url,
                "model": name,
                "vllm": _parsed(_Version, body, endpoint, "/version").version if status == httpx.codes.OK else None,
                "max_model_len": longest,
                "ready_s": ready_s,
            },
            "prompt": load.prompt,
            "gen": load.gen,
            "seed": seed,
            "batches": [],
            "failure": None,
        }
        for batch in load.batches:
            log(f"measuring {load.repetitions} repetitions of {batch} request(s) together")
            try:
                report["batches"].append(await _batch(http, endpoint, load, name, batch, random))
            except InfrastructureFailed as error:
                report["failure"] = {"batch": batch, "message": str(error)}
                break
    return report


def _client(endpoint: Endpoint) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Accept-Encoding": "identity"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    settings: Json = {"headers": headers, "limits": limits, "timeout": httpx.Timeout(None, connect=_SHORT_S)}
    if endpoint.socket is not None:
        transport = httpx.AsyncHTTPTransport(uds=endpoint.socket, limits=limits)
        return httpx.AsyncClient(base_url="http://vllm", transport=transport, **settings)
    return open_async_http(endpoint.url, base_url=endpoint.url, **settings)


async def _wait_until_ready(http: httpx.AsyncClient, endpoint: Endpoint, timeout_s: float) -> None:
    """Waits for `/health`; a server without it is ready as soon as it answers."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            status, _ = await _get(http, endpoint, "/health")
            why = f"/health answers {status}"
            if status in (httpx.codes.OK, httpx.codes.NOT_FOUND):
                return
            if status not in _LOADING:
                raise InvalidInput(f"{endpoint.url}: {why}")
        except InfrastructureFailed as error:
            why = str(error)
        if (reason := endpoint.end_reason()) is not None:
            raise InfrastructureFailed(reason)
        if time.monotonic() > end:
            raise InfrastructureFailed(f"{endpoint.url} is not ready after {timeout_s:g} s: {why}")
        await asyncio.sleep(_POLL_S)


async def _served(http: httpx.AsyncClient, endpoint: Endpoint, model: str | None) -> tuple[str, int | None]:
    """Returns the name of the model to ask for, and the most tokens that it reads if the server says so."""
    status, body = await _get(http, endpoint, "/v1/models")
    if status != httpx.codes.OK:
        hint = f"; its key is read from ${KEY_VARIABLE}" if status == httpx.codes.UNAUTHORIZED else ""
        raise InvalidInput(f"{endpoint.url}: /v1/models answers {status}: {_message(body)}{hint}")
    models = {row.id: row.max_model_len for row in _parsed(_Models, body, endpoint, "/v1/models").data}
    if model is None and len(models) > 1:
        raise InvalidInput(f"the server has several models: {', '.join(models)[:_MESSAGE]}", where="--model")
    name = next(iter(models)) if model is None else model
    if name not in models:
        raise UnknownName("model", name, models, where="--model")
    return name, models[name]


async def _get(http: httpx.AsyncClient, endpoint: Endpoint, path: str) -> tuple[int, bytes]:
    """Returns status and body of an answer."""
    body = bytearray()
    try:
        async with asyncio.timeout(_SHORT_S), http.stream("GET", path) as answer:
            async for data in answer.aiter_raw():
                body += data
                if len(body) > _ANSWER_BYTES:
                    raise InfrastructureFailed(f"{endpoint.url}{path}: more than {_ANSWER_BYTES >> 20} MiB")
            return answer.status_code, bytes(body)
    except TimeoutError:
        raise InfrastructureFailed(f"{endpoint.url}{path}: no answer within {_SHORT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InfrastructureFailed(f"{endpoint.url}{path}: {_why(error)}") from error


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parsed(form: type[M], body: bytes, endpoint: Endpoint, what: str) -> M:
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise InfrastructureFailed(f"{endpoint.url}: {what} cannot be read: {place} {problem['msg']}") from error


def _message(body: bytes) -> str:
    """Returns the message of an error as the server words it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body[:_MESSAGE].decode(errors="replace").strip() or "no message"
    if isinstance(value, dict):
        value = value.get("error", value)
    if isinstance(value, dict):
        value = value.get("message", value)
    return str(value)[:_MESSAGE]


async def _batch(
    http: httpx.AsyncClient, endpoint: Endpoint, load: Load, model: str, batch: int, random: np.random.Generator
) -> Json:
    """Returns the figures of batches of one size; the first one, which may compile and allocate, is left out."""
    before = await _counters(http, endpoint)
    waves = [await _wave(http, endpoint, load, model, batch, random) for _ in range(load.repetitions + 1)][1:]
    tokens = batch * load.gen
    return {
        **_figures(waves, load, batch),
        **await _others(http, endpoint, before, tokens * (load.repetitions + 1)),
        "repetitions": [
            {
                "ttft_ms": [answer.ttft_ms for answer in wave.answers],
                "seconds": wave.seconds,
                "client_cpu": wave.client_cpu,
            }
            for wave in waves
        ],
    }


def _figures(waves: Sequence[Wave], load: Load, batch: int) -> Json:
    gaps = [wave.gaps_ms for wave in waves]
    times = [wave for wave in gaps if wave]
    few = "too few tokens" if None not in gaps else "the server does not say how many tokens an event has"
    p95 = [value for wave in times if (value := quantile(wave, 0.95)) is not None]
    ttfts = [answer.ttft_ms for wave in waves for answer in wave.answers]
    ttft_p95 = quantile(ttfts, 0.95)
    reads = statistics.fmean(answer.reads for wave in waves for answer in wave.answers)
    medians = [statistics.median(answer.ttft_ms for answer in wave.answers) for wave in waves]
    figures = {
        "ttft_ms": repetition_figure(medians, "ms"),
        "ttft_p95_ms": Figure(
            value=ttft_p95, unit="ms", n=len(ttfts), reason="fewer than 20 requests" if ttft_p95 is None else None
        ),
        "decode_p50_ms": repetition_figure([statistics.median(wave) for wave in times], "ms", few),
        "decode_p95_ms": repetition_figure(p95 if len(p95) == len(waves) else [], "ms", few),
        "throughput_tps": repetition_figure([batch * load.gen / wave.seconds for wave in waves], "tokens/s"),
    }
    return {
        "batch": batch,
        **{name: figure.report("n", "unit", "reason") for name, figure in figures.items()},
        "tokens_per_read": load.gen / reads,
        "client_cpu": max(wave.client_cpu for wave in waves),
    }


async def _wave(
    http: httpx.AsyncClient, endpoint: Endpoint, load: Load, model: str, batch: int, random: np.random.Generator
) -> Wave:
    bodies = [_body(load, model, random) for _ in range(batch)]
    streams = [_Stream() for _ in bodies]
    limit = _ANSWER_BYTES + load.gen * _TOKEN_BYTES
    cpu = time.process_time()
    try:
        async with asyncio.timeout(load.deadline_s), asyncio.TaskGroup() as group:
            for body, stream in zip(bodies, streams, strict=True):
                group.create_task(_ask(http, endpoint, body, stream, limit))
    except TimeoutError:
        came = sum(bool(stream.reads) for stream in streams)
        last = max((stream.reads[-1][0] for stream in streams if stream.reads), default=0)
        when = f", the last data {(time.perf_counter_ns() - last) / 1e9:.1f} s ago" if last else ""
        message = f"{batch} request(s) did not end within {load.deadline_s:g} s: {came} had begun to answer{when}"
        raise InfrastructureFailed(endpoint.end_reason() or message) from None
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        if isinstance(first, NasError):
            raise first from None
        raise
    cpu = time.process_time() - cpu
    answers = tuple(_answer(stream, load) for stream in streams)
    seconds = (max(answer.end_ns for answer in answers) - min(stream.sent_ns for stream in streams)) / 1e9
    return Wave(answers, seconds, cpu / seconds)


def _body(load: Load, model: str, random: np.random.Generator) -> bytes:
    body = {
        "model": model,
        "prompt": random.integers(load.vocab, size=load.prompt).tolist(),
        "max_tokens": load.gen,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return json.dumps(body).encode()


async def _ask(http: httpx.AsyncClient, endpoint: Endpoint, body: bytes, stream: _Stream, limit: int) -> None:
    """Sends a request and keeps each piece of the answer with the time when it came."""
    size, path = 0, "/v1/completions"
    stream.sent_ns = time.perf_counter_ns()
    try:
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", path, content=body, headers=headers) as answer:
            async for data in answer.aiter_raw():
                stream.reads.append((time.perf_counter_ns(), data))
                size += len(data)
                if size > limit:
                    raise InfrastructureFailed(f"{endpoint.url}{path}: more than {limit} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InfrastructureFailed(await _end(endpoint) or f"{endpoint.url}{path}: {_why(error)}") from error
    if answer.status_code != httpx.codes.OK:
        text = _message(b"".join(data for _, data in stream.reads))
        raise InfrastructureFailed(f"{endpoint.url}{path} answers {answer.status_code}: {text}")


async def _end(endpoint: Endpoint) -> str | None:
    """Returns why a server ended that was started here; its connections break some moments before it is gone."""
    end = time.monotonic() + (_SETTLE_S if endpoint.socket else 0.0)
    while (reason := endpoint.end_reason()) is None and time.monotonic() < end:
        await asyncio.sleep(_POLL_S)
    return reason


def _answer(stream: _Stream, load: Load) -> Answer:
    """Reads the events of an answer.

    Raises:
        InfrastructureFailed: an error, other numbers of tokens than asked for, or no event stream.
    """
    chunks: list[tuple[int, _Usage | None]] = []  # clock of each event with text
    usage: _Usage | None = None
    for at, data in _events(stream.reads):
        event = _event(data)
        if event.error is not None:
            raise InfrastructureFailed(f"the server ended a request: {_message(data)}")
        usage = event.usage or usage
        if event.choices:
            chunks.append((at, event.usage))
    if usage is None or usage.completion_tokens is None:
        raise InfrastructureFailed("the server does not count tokens (`usage`), or its answer was cut off")
    if usage.completion_tokens != load.gen:
        raise InfrastructureFailed(
            f"the server generated {usage.completion_tokens} of {load.gen} tokens: start it with `--generation-config "
            "vllm`, so that no token of the model's own settings ends a text"
        )
    if usage.prompt_tokens != load.prompt:
        raise InfrastructureFailed(f"the server read {usage.prompt_tokens} of {load.prompt} tokens of a prompt")
    marks = _marks(chunks)
    if not marks:
        raise InfrastructureFailed("the server sent no tokens")
    first, last = marks[0][0], marks[-1][0]
    gaps: tuple[float, ...] | None = None
    if marks[-1][1] == load.gen:
        gaps = tuple(
            (at - before) / (tokens - fewer) / 1e6
            for (before, fewer), (at, tokens) in itertools.pairwise(marks)
            for _ in range(tokens - fewer)
        )
    return Answer((first - stream.sent_ns) / 1e6, gaps, len(marks), last)


def _marks(chunks: Sequence[tuple[int, _Usage | None]]) -> list[tuple[int, int]]:
    """Returns the clock of each read with new tokens, and the tokens by then; an event without a count is one token."""
    counts = [
        usage.completion_tokens for _, usage in chunks if usage is not None and usage.completion_tokens is not None
    ]
    if len(counts) != len(chunks):
        counts = list(range(1, len(chunks) + 1))
    marks: dict[int, int] = {}
    most = 0
    for (at, _), count in zip(chunks, counts, strict=True):
        if count > most:
            marks[at] = most = count
    return list(marks.items())


def _event(data: bytes) -> _Event:
    try:
        return _Event.model_validate_json(data)
    except ValidationError as error:
        raise InfrastructureFailed(f"the server sent no event that can be read: {data[:80]!r}") from error


def _events(reads: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yields the data of each server-sent event and the time of the read that ended it."""
    rest = b""
    for at, data in [*reads, (reads[-1][0] if reads else 0, b"\n\n")]:
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines and lines != [b"[DONE]"]:
                yield at, b"\n".join(lines)


@dataclass(frozen=True)
class _Counters:
    """vLLM's counters of generated tokens and of prompt tokens found in its cache, and why one is missing."""

    sums: dict[str, float]
    reason: str = "the server has no such counter"


async def _counters(http: httpx.AsyncClient, endpoint: Endpoint) -> _Counters:
    try:
        status, body = await _get(http, endpoint, "/metrics")
    except InfrastructureFailed as error:  # what is measured does not depend on them
        return _Counters({}, str(error))
    sums: dict[str, float] = {}
    for name, value in _COUNTER.findall(body) if status == httpx.codes.OK else ():
        sums[name.decode()] = sums.get(name.decode(), 0.0) + float(value)
    return _Counters(sums)


async def _others(http: httpx.AsyncClient, endpoint: Endpoint, first: _Counters, tokens: int) -> Json:
    """Returns what the server did besides: tokens of others' requests, and prompt tokens that it had in its cache."""
    end, before = time.monotonic() + _SETTLE_S, first.sums
    while True:
        last = await _counters(http, endpoint)
        after = last.sums
        more = {name: after[name] - before[name] for name in before.keys() & after.keys()}
        generated = more.get("generation_tokens")
        if generated is None or generated >= tokens or time.monotonic() > end:
            break
        await asyncio.sleep(_POLL_S)
    if generated is None or generated < tokens:
        reason = "the server counted fewer tokens than came"
        if generated is None:
            reason = last.reason if before else first.reason
        return {"foreign_tokens": None, "foreign_reason": reason, "cached_prompt_tokens": more.get("prefix_cache_hits")}
    return {
        "foreign_tokens": round(generated - tokens),
        "foreign_reason": None,
        "cached_prompt_tokens": more.get("prefix_cache_hits"),
    }


# A server of one's own.


@contextmanager
def started_server(folder: Path, load: Load, program: str, *, dummy: bool) -> Iterator[Endpoint]:
    """Starts `vllm serve` on a folder of transformers, at a socket that only this user can open, and ends it.

    It and all its descendants are killed when the context ends, at the deadline of the whole load, and when this
    process dies.

    Args:
        folder: config.json, and weights unless `dummy`.
        load: bounds its context and batches.
        program: `vllm`, or its path.
        dummy: whether it fills the model with numbers of its own; no tokenizer is needed then.

    Raises:
        InvalidInput: there is no such program.
    """
    path = shutil.which(program)
    if path is None:
        raise InvalidInput(
            f"no {program} on this machine: install vLLM, or name a server by its URL", where="--program"
        )
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nas-vllm-") as scratch, ThreadPoolExecutor(1) as threads:
        socket = str(Path(scratch) / "socket")
        argv = [path, "serve", str(folder), "--uds", socket, "--served-model-name", NAME]
        argv += ["--max-model-len", str(load.prompt + load.gen), "--max-num-seqs", str(max(load.batches))]
        argv += ["--generation-config", "vllm", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        argv += ["--load-format", "dummy", "--skip-tokenizer-init"] if dummy else []
        quiet = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        process = threads.submit(
            run_supervised,
            argv,
            env={**os.environ, **quiet},
            affinity=(),
            deadline_s=load.longest_s,
            output_limit=_LOG_BYTES,
            cancelled=stop.is_set,
        )
        try:
            yield Endpoint("vllm", socket, lambda: _end_reason(process))
        finally:
            stop.set()


def _end_reason(process: Future[CommandResult]) -> str | None:
    if not process.done():
        return None
    try:
        result = process.result()
    except NasError as error:
        return str(error)
    text = result.stderr_tail or result.stdout[-STDERR_TAIL:]
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return f"vLLM ended with exit code {result.exit_code}: {lines[-1][-_MESSAGE:] if lines else 'no message'}"


def gpu_of_this_machine() -> tuple[str | None, str | None]:
    """Returns the GPUs of this machine as `nvidia-smi` names them, or None and the reason."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no nvidia-smi on this machine"
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        result = run_supervised(
            query, env=os.environ, affinity=(), deadline_s=_SHORT_S, output_limit=1 << 16, cancelled=lambda: False
        )
    except NasError as error:
        return None, str(error)
    text = "; ".join(result.stdout.decode(errors="replace").split("\n")).strip("; ")[:_MESSAGE]
    return (text, None) if result.exit_code == 0 and text else (None, f"nvidia-smi: exit code {result.exit_code}")
