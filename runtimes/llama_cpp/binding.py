"""llama-cpp-python in a process of its own: logits, vectors, text, its bits, dialogues, the quantiser and its losses.

The library that the binding loads is chosen by the environment before its first import, and a crash of a model must
stay a result. So each function here runs this module again, as `python -m nas.measure.runtimes.llama_cpp.binding
COMMAND MODEL ...`; requests and results are JSON, and what is large is in files that requests name.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import psutil
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError, Unsupported
from nas.core.plan import PlanFile
from nas.measure.runtimes.build_cache import plan_file
from nas.measure.runtimes.dialogue import Dialogue, draw, serve, serve_vectors
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile, read_header
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import stream
from nas.measure.runtimes.writing import replacing

Watch = Callable[[int, bool, int | None], bool]
"""(tensor's address, whether it is only asked for, unused) -> wanted; see ggml/include/ggml-backend.h."""

_DEADLINE_S = 600.0
_ENV_VARS = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR")
_LIBRARIES = "LLAMA_CPP_LIB_PATH"
_SEARCHED = "LD_LIBRARY_PATH"
"""Folders where some machines have Python's and the compiler's libraries; the build's own comes before them."""
_RESULT = "result.json"
_FAULTS = (signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals of a process that fails by itself; SIGBUS is what a mapped file gets of a full disk."""
_FULL = re.compile(
    "No space left on device|Disk quota exceeded|iostream|std::bad_alloc|MemoryError|Cannot allocate memory"
    "|failed to allocate|unable to allocate"
)
"""What is said of a full disk, the third by llama.cpp's quantiser, and of full memory, the last two by llama.cpp."""


_UNLOADED = re.compile("ImportError|ModuleNotFoundError|[Ss]hared librar")
"""What is said by Python, the binding and the loader of libraries where one is missing or does not load."""


def run_command(build: Build, command: str, model: Path, *, deadline_s: float = _DEADLINE_S, **request: object) -> Any:
    """Returns what one of `_COMMANDS` returns of MODEL, in a process that loads the libraries of `build`.

    Raises:
        CandidateFailed: the process died on this model (crash).
        InfrastructureFailed: it was killed or took longer than the deadline, memory or a disk is full, or a library
            does not load.
    """
    environment = _environment(build)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "request.json")
            path.write_text(json.dumps(request), encoding="utf-8")
            argv = [sys.executable, "-m", __name__, command, str(model), str(path)]
            code, tail = stream(argv, deadline_s=deadline_s, env=environment)
            if code != 0:
                raise _failure("llama.cpp", model, code, tail)
            return json.loads(path.with_name(_RESULT).read_text(encoding="utf-8"))
    except OSError as error:
        raise InfrastructureFailed(f"llama.cpp cannot be run with {model.name}: {error}") from error


def _failure(program: str, model: Path, code: int, tail: str) -> NasError:
    """Returns what a process died of: of the model or of this machine."""
    if (code < 0 and -code not in _FAULTS) or _FULL.search(tail):
        why = "memory or a disk is full, it took too long, or it was killed"
        return InfrastructureFailed(f"{program} did not finish with {model.name} (exit code {code}): {why}\n{tail}")
    if _UNLOADED.search(tail):
        return InfrastructureFailed(f"{program} did not start for {model.name} (exit code {code}):\n{tail}")
    return CandidateFailed("crash", f"{program} died on {model.name} (exit code {code}):\n{tail}")


def _environment(build: Build) -> dict[str, str]:
    variables = {name: os.environ[name] for name in _ENV_VARS if name in os.environ} | {_LIBRARIES: str(build.folder)}
    if searched := os.environ.get(_SEARCHED):
        variables[_SEARCHED] = f"{build.folder}:{searched}"
    return variables


_ERROR = 4
"""`GGML_LOG_LEVEL_ERROR` of ggml.h."""
_ERRORS = 5
"""Messages that are kept: the first of a failure is its cause, and others repeat it from further out."""


class Session:
    """One sequence in a context of its own.

    Args:
        model: the GGUF file.
        length: tokens that the sequence will have at most.
        chunk: most tokens fed at once.
        watch: sees every node of the graph, as `ggml_backend_sched_eval_callback` does.
        threads: compute threads.
        vectors: whether it computes vectors of tokens, not logits: of up to `TEXTS_AT_ONCE` sequences together.
        last: whether it computes the logits of the last of the fed tokens alone.

    Raises:
        SystemExit: llama.cpp refuses; the message goes to the process's stderr.
    """

    def __init__(
        self,
        model: str,
        length: int,
        chunk: int,
        watch: Watch | None = None,
        threads: int = 1,
        vectors: bool = False,
        last: bool = False,
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        # What C calls must outlive this function.
        self._watch = llama_cpp.ggml_backend_sched_eval_callback(watch) if watch else None
        self._errors: deque[bytes] = deque(maxlen=_ERRORS)

        def on_log(level: int, text: bytes, data: object) -> None:
            if level == _ERROR:
                self._errors.append(text)

        self._log = llama_cpp.llama_log_callback(on_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise self._refusal(f"the model file was refused: {model}")
        self._words: Any = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab: int = llama_cpp.llama_vocab_n_tokens(self._words)
        params = self._parameters(length, chunk, threads)
        if vectors:
            params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
            params.n_seq_max, params.kv_unified = TEXTS_AT_ONCE, True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise self._refusal("no context for this model")
        self._batch: Any = llama_cpp.llama_batch_init(chunk, 0, 1)
        self._last, self._fed = last, list[int]()

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits [T, V] of the next T tokens of the sequence, or [1, V] of the last one."""
        self._decode([(token, len(self._fed) + place, 0) for place, token in enumerate(ids)])
        self._fed += ids
        places = range(len(ids) - 1 if self._last else 0, len(ids))
        rows = [self._lib.llama_get_logits_ith(self._context, i) for i in places]
        return np.stack([np.ctypeslib.as_array(row, shape=(self.vocab,)) for row in rows])

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Returns the vectors of the tokens of texts, [all tokens, W], each text a sequence of its own.

        W is the model's width, or that of the file's projection.
        """
        self.reset()
        self._decode([(token, place, number) for number, text in enumerate(texts) for place, token in enumerate(text)])
        shape = sum(map(len, texts)), self._lib.llama_model_n_embd_out(self._model)
        return np.ctypeslib.as_array(self._lib.llama_get_embeddings(self._context), shape=shape).copy()

    def tokens(self, text: bytes) -> list[int]:
        """Returns the ids of a text, with the one that the file puts in front; special tokens in it are text.

        The one that some files put behind a text is left out: what follows it would be another text.
        """
        ids = (self._lib.llama_token * (len(text) + 3))()  # one each in front and behind, and one for a blank
        count = self._lib.llama_tokenize(self._words, text, len(text), ids, len(ids), True, False)
        if count < 0:
            raise SystemExit("the text cannot be tokenised")
        tokens = list(ids[:count])
        if self._lib.llama_vocab_get_add_eos(self._words) and tokens[-1:] == [self._lib.llama_vocab_eos(self._words)]:
            tokens.pop()
        return tokens

    def text_of(self, token: int, size: int = 1 << 10) -> bytes:
        """Returns the text that a token stands for; none for a special one. Longer ones take a second call."""
        piece = ctypes.create_string_buffer(size)
        count = int(self._lib.llama_token_to_piece(self._words, token, piece, size, 0, False))
        return self.text_of(token, -count) if count < -size else piece.raw[: max(0, count)]

    def ends(self, token: int) -> bool:
        """Returns whether a token ends a text or an answer."""
        return bool(self._lib.llama_vocab_is_eog(self._words, token))

    def reset(self) -> None:
        """Begins another sequence."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._fed = []

    def begin(self, ids: Sequence[int]) -> int:
        """Begins the sequence `ids`; returns how many of its first tokens remain of the one before.

        What lies behind them can be taken out of a cache of all tokens, not out of a state, nor out of windows, which
        have forgotten what was before.
        """
        pairs = zip(self._fed, ids[:-1], strict=False)
        most = min(len(self._fed), len(ids) - 1)
        alike = next((place for place, (fed, token) in enumerate(pairs) if fed != token), most)
        if alike < len(self._fed):
            memory = self._lib.llama_get_memory(self._context)
            whole = self._lib.llama_memory_seq_pos_min(memory, 0) == 0
            if not (alike and whole and self._lib.llama_memory_seq_rm(memory, 0, alike, -1)):
                self.reset()
                return 0
        self._fed = self._fed[:alike]
        return alike

    def _parameters(self, length: int, chunk: int, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-length // 256) * 256
        params.n_ubatch = chunk
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = False  # as the runner has it
        if self._watch:
            params.cb_eval = self._watch
        return params

    def _decode(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Computes tokens, (id, position, sequence) each."""
        self._batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            self._batch.token[i] = int(token)
            self._batch.pos[i] = position
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = sequence
            self._batch.logits[i] = not self._last or i == len(tokens) - 1
        if status := self._lib.llama_decode(self._context, self._batch):
            raise self._refusal(f"llama_decode returned {status}")

    def _refusal(self, what: str) -> SystemExit:
        """Returns the end of the process, with what llama.cpp logged last."""
        reason = b"".join(self._errors).decode(errors="replace").strip()
        return SystemExit(f"{what}: {reason}" if reason else what)


_PREFIX = b"ffn_moe_topk-"
"""`build_moe_ffn` in src/llama-graph.cpp names the chosen experts of layer N so."""

Choices = dict[int, NDArray[np.int64]]
"""Depth -> experts of each token, [T, top_k]."""


class ExpertWatch:
    """A `ggml_backend_sched_eval_callback` that keeps the choices of every mixture of experts.

    The graph is computed up to each choice and then on: other nodes and their order stay as they are.

    Args:
        library_folder: holds the build's libggml-base.so and libggml-cpu.so.
    """

    def __init__(self, library_folder: Path) -> None:
        base = ctypes.CDLL(str(library_folder / "libggml-base.so"))
        self._name, self._rows, self._count = base.ggml_get_name, base.ggml_nrows, base.ggml_nelements
        self._element = ctypes.CDLL(str(library_folder / "libggml-cpu.so")).ggml_get_i32_nd
        for function, result in (
            (self._name, ctypes.c_char_p),
            (self._rows, ctypes.c_int64),
            (self._count, ctypes.c_int64),
        ):
            function.argtypes, function.restype = [ctypes.c_void_p], result
        self._element.argtypes, self._element.restype = [ctypes.c_void_p, *[ctypes.c_int] * 4], ctypes.c_int32
        self._chunks: dict[int, list[list[list[int]]]] = {}

    def __call__(self, tensor: int, ask: bool, data: int | None) -> bool:
        """Returns whether a node is wanted (`ask`), or reads a computed one and lets the graph continue."""
        name: bytes = self._name(tensor)
        is_choice = name.startswith(_PREFIX)
        if is_choice and not ask:
            rows: int = self._rows(tensor)
            top_k: int = self._count(tensor) // rows
            chosen = [[self._element(tensor, k, row, 0, 0) for k in range(top_k)] for row in range(rows)]
            self._chunks.setdefault(int(name.removeprefix(_PREFIX)), []).append(chosen)
        return is_choice if ask else True

    def choices(self) -> Choices:
        """Returns all choices so far."""
        return {layer: np.concatenate(chunks).astype(np.int64) for layer, chunks in self._chunks.items()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Logits from llama.cpp.

    Args:
        logits: [T, V].
        experts: which ones it chose, by depth; empty where none were watched.
    """

    logits: NDArray[np.float32]
    experts: Choices


def evaluate(
    build: Build, model: Path, tokens: Sequence[int], chunks: Sequence[int], scratch: Path, *, watch: bool = False
) -> Evaluation:
    """Returns the logits of every position, fed chunk by chunk with memory kept between them.

    `chunks` are lengths that add up to that of `tokens`; `watch` keeps the choices of experts.

    Raises:
        CandidateFailed: the process died on this model (crash).
        InfrastructureFailed: it was stopped by this machine; see `run_command`.
    """
    assert sum(chunks) == len(tokens)
    out = scratch / "logits.npz"
    run_command(build, "logits", model, ids=list(map(int, tokens)), lengths=list(chunks), watch=watch, out=str(out))
    with np.load(out, allow_pickle=False) as arrays:
        choices = {name: arrays[name] for name in arrays.files}
    return Evaluation(choices.pop("logits"), {int(depth): chosen for depth, chosen in choices.items()})


def _logits(model: str, ids: list[int], lengths: list[int], watch: bool, out: str) -> None:
    experts = ExpertWatch(Path(os.environ[_LIBRARIES]))
    session = Session(model, len(ids), max(lengths), experts if watch else None)
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    logits = np.concatenate([session.feed(ids[begin:end]) for begin, end in edges])
    choices = {str(depth): chosen for depth, chosen in experts.choices().items()}
    np.savez(out, allow_pickle=False, logits=logits, **choices)


TEXTS_AT_ONCE, TOKENS_AT_ONCE = 16, 1024
"""Most texts whose vectors are computed together, and most tokens of them, unless a single text has more."""


def vectors_of(build: Build, model: Path, longest: int, threads: int) -> Dialogue:
    """Returns a process whose `Dialogue.vectors` are those of llama.cpp's embedding mode without pooling.

    Args:
        build: its library computes them.
        model: a GGUF file.
        longest: tokens of a text at most.
        threads: compute threads.
    """
    tokens = max(longest, TOKENS_AT_ONCE)
    argv = [sys.executable, "-m", __name__, "vectors", str(model), str(tokens), str(threads)]
    return Dialogue("llama.cpp", model, argv, tokens, _environment(build))


def _vectors(model: str, tokens: int, threads: int) -> None:
    serve_vectors(Session(model, tokens, tokens, threads=threads, vectors=True).vectors)


def decoded_tokens(
    build: Build, model: Path, prompt: Sequence[int], tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """Decodes `tokens` ids after a prompt of at least one, at temperature 0 the likeliest; raises `CandidateFailed`."""
    fed = list(map(int, prompt))
    ids: list[int] = run_command(build, "decode", model, fed=fed, tokens=tokens, temperature=temperature, seed=seed)
    return ids


def _decode(model: str, fed: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
    session = Session(model, len(fed) + tokens, min(len(fed), _CHUNK))
    return list(itertools.islice(_continuation(session, fed, temperature, seed), tokens))


def _continuation(session: Session, ids: list[int], temperature: float, seed: int) -> Iterator[int]:
    """Yields the tokens that a model draws behind a sequence, without end."""
    rng = np.random.default_rng(seed)
    while True:
        for start in range(0, len(ids), _CHUNK):
            logits = session.feed(ids[start : start + _CHUNK])
        ids = [draw(logits[-1].astype(np.float64), temperature, rng)]
        yield ids[0]


_BYTES = 256
_CHUNK = 512
_MOST_THREADS = 8


def generate(model: Path, prompt: bytes, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Generates at most `tokens` tokens of text after `prompt`, on this machine's build, until the model ends it.

    Text becomes tokens, and tokens text, as llama.cpp does it; in a file without tokenizer, tokens are bytes.

    Raises:
        InvalidInput: no GGUF file, or one without tokenizer whose tokens are no bytes.
        InfrastructureFailed: no available build runs it.
        CandidateFailed: llama.cpp died on the file (crash).
    """
    header = read_header(model)
    if header.tokenizer == "none" and header.vocab != _BYTES:
        raise InvalidInput(
            f"holds no tokenizer, and its tokens are no bytes ({header.vocab}): export it again with --tokenizer",
            where=str(model),
        )
    build = LLAMA_CPP.find_build(patched=header.arch == PATCHED)
    if header.tokenizer == "none":
        return bytes(decoded_tokens(build, model, list(prompt), tokens, temperature, seed))
    text = prompt.decode("latin-1")  # bytes as JSON
    written: str = run_command(build, "complete", model, prompt=text, tokens=tokens, temperature=temperature, seed=seed)
    return written.encode("latin-1")


def _complete(model: str, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    session = Session(model, len(prompt) + 2 + tokens, _CHUNK, threads=_threads(), last=True)
    ids, written = session.tokens(prompt.encode("latin-1")), b""
    if not ids:
        raise SystemExit("the prompt has no tokens")
    for token in itertools.islice(_continuation(session, ids, temperature, seed), tokens):
        if session.ends(token):
            break
        written += session.text_of(token)
    return written.decode("latin-1")


def dialogue(model: Path, context: int) -> Dialogue:
    """Returns a dialogue of at most `context` tokens with a GGUF file that an available build runs."""
    build = LLAMA_CPP.find_build(patched=read_header(model).arch == PATCHED)
    argv = [sys.executable, "-m", __name__, "dialogue", str(model), str(context)]
    return Dialogue("llama.cpp", model, argv, context, _environment(build))


def _dialogue(model: str, context: int) -> None:
    serve(Session(model, context, _CHUNK, threads=_threads(), last=True), _CHUNK)


def _threads() -> int:
    """Returns how many threads answer: one for each core that was idle in the last minute, at most `_MOST_THREADS`.

    llama.cpp's threads wait for each other many times a token, so on a busy machine several are slower than one.
    """
    cores = min(_MOST_THREADS, psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return max(1, cores - round(os.getloadavg()[0]))


_BITS_S = 3600.0


def bits_per_byte(build: Build, model: Path, texts: Sequence[str], threads: int) -> float:
    """Returns bits per byte of `texts`, in independent windows of `_CHUNK` tokens.

    Each token but the first of a text is predicted once. Where the first one is no special token, its bytes do not
    count.

    Raises:
        Unsupported: the file holds no tokenizer, or the texts have no tokens but first ones.
        InvalidInput: it is no GGUF file.
        CandidateFailed: the process died on this model (crash), or gives no finite figure (not_finite).
        InfrastructureFailed: it was stopped by this machine; see `run_command`.
    """
    if read_header(model).tokenizer == "none":
        raise Unsupported("the file holds no tokenizer", where=str(model))
    bits: float | None = run_command(build, "bits", model, texts=list(texts), threads=threads, deadline_s=_BITS_S)
    if bits is None:
        raise Unsupported("the text is too short: none of its tokens is predicted", where=str(model))
    if not math.isfinite(bits):
        raise CandidateFailed("not_finite", f"{model.name}: its logits of the text hold NaN or infinity")
    return bits


def _bits(model: str, texts: list[str], threads: int) -> float | None:
    session = Session(model, _CHUNK, _CHUNK, threads=threads)
    nats = size = 0.0
    for text in texts:
        content = text.encode()
        ids = session.tokens(content)
        parts = [session.text_of(token) for token in ids]
        # SentencePiece puts a blank in front of the text.
        blank = sum(map(len, parts)) > len(content) and parts[0].startswith(b" ")
        size += len(content) - len(parts[0]) + blank
        for start in range(0, len(ids) - 1, _CHUNK):
            window = ids[start : start + _CHUNK + 1]
            session.reset()
            for logits, token in zip(session.feed(window[:-1]), window[1:], strict=True):
                nats -= float(_log_softmax(logits.astype(np.float64))[token])
    return nats / math.log(2) / size if size > 0 else None


FILE_TYPES = {"q4_k_m": 15}
"""`llama_ftype` of include/llama.h: the released type that our writer has not."""
MIXTURES = FILE_TYPES | {
    **{"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q3_k_m": 12, "q4_k_s": 14},
    **{"q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30},
}
"""What llama.cpp's quantiser can choose the types of tensors by."""

_LEAST_S = 60.0
_BYTES_A_SECOND = 5e5
"""A tenth of what one slow core does to the slowest types, IQ4_NL and IQ4_XS."""


def quantise_file(
    build: Build,
    source: Path,
    quantisation: str,
    destination: Path,
    threads: int,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    importance: Path | None = None,
) -> PlanFile:
    """Writes `source` with other types at `destination`, atomically. Tensors of quantised types are read as stored.

    Args:
        build: its library does it.
        source: a GGUF file.
        quantisation: one of `MIXTURES`.
        destination: of the new file.
        threads: compute threads.
        types: name of a tensor -> its type; all others have the plain type of `quantisation`. None: its mixture.
        importance: matrix of `llama-imatrix`, a GGUF file.

    Raises:
        CandidateFailed: llama.cpp refuses the file or dies on it (crash).
        InfrastructureFailed: the file cannot be written, or this machine stopped it; see `run_command`.
    """
    with replacing(destination) as partial:
        run_command(
            build,
            "quantise",
            source,
            deadline_s=_LEAST_S + source.stat().st_size / _BYTES_A_SECOND,
            destination=str(partial),
            ftype=MIXTURES[quantisation],
            threads=threads,
            types=None if types is None else {name: int(kind) for name, kind in types.items()},
            importance=None if importance is None else str(importance),
        )
        return plan_file(partial)


def _quantise(
    source: str, destination: str, ftype: int, threads: int, types: dict[str, int] | None, importance: str | None
) -> None:
    import llama_cpp

    messages: list[bytes] = []
    keep = llama_cpp.llama_log_callback(lambda level, text, data: messages.append(text))
    llama_cpp.llama_log_set(keep, ctypes.c_void_p())
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = ftype, threads, types is not None
    params.allow_requantize = True
    if types:
        # The last one, without a name, ends them.
        overrides = (llama_cpp.llama_model_tensor_override * (len(types) + 1))()
        for override, (name, kind) in zip(overrides, types.items(), strict=False):
            override.pattern, override.type = f"^{re.escape(name)}$".encode(), kind
        params.tt_overrides = overrides
    if importance is not None:
        squares = list(_mean_squares(GgufFile.read(Path(importance))))
        matrix = (llama_cpp.llama_model_imatrix_data * (len(squares) + 1))()
        for row, (name, values) in zip(matrix, squares, strict=False):
            data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            row.name, row.data, row.size = name.encode(), data, values.size
        params.imatrix = matrix
    if llama_cpp.llama_model_quantize(source.encode(), destination.encode(), params):
        raise SystemExit(b"".join(messages[-5:]).decode(errors="replace"))


_SUMS, _COUNTS = ".in_sum2", ".counts"


def _mean_squares(matrix: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the mean squares of the inputs of each tensor, and 1 for experts that no token chose."""
    for name in matrix.tensors:
        if name.endswith(_SUMS):
            weight = name.removesuffix(_SUMS)
            sums, counts = matrix.values(name), matrix.values(weight + _COUNTS).reshape(-1, 1)
            squares = np.where(counts > 0, sums / np.maximum(counts, 1), 1)
            yield weight, np.ascontiguousarray(squares, np.float32).reshape(-1)


_IMPORTANCE_S = 3600.0


def write_importance(build: Build, model: Path, text: str, destination: Path, threads: int) -> None:
    """Writes the importance matrix of a model on a text: mean squares of the inputs of each tensor.

    Args:
        build: with llama.cpp's own programs.
        model: a GGUF file with tokenizer.
        text: at least two windows of `_CHUNK` tokens.
        destination: a GGUF file.
        threads: compute threads.

    Raises:
        InvalidInput: the text is shorter.
        CandidateFailed: llama-imatrix refuses the model, or dies (crash).
        InfrastructureFailed: it was stopped by this machine; see `run_command`.
    """
    with replacing(destination) as partial, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_text(text, encoding="utf-8")
        argv = [str(build.folder / "llama-imatrix"), "-m", str(model), "-f", str(path), "-o", str(partial)]
        argv += ["--output-format", "gguf", "-c", str(_CHUNK), "-t", str(threads), "-ngl", "0"]
        argv += ["--override-kv", "tokenizer.ggml.add_eos_token=bool:false"]  # it aborts where texts are ended
        code, tail = stream(argv, deadline_s=_IMPORTANCE_S, env=_environment(build))
        # Its last lines may be lost when it exits: what it logs is written by another thread.
        if code != 0 and (tokens := run_command(build, "count", model, text=text)) < 2 * _CHUNK:
            raise InvalidInput(
                f"the text of the importance matrix has {tokens:,} tokens, and {2 * _CHUNK:,} are needed: give more"
                " text, or --no-importance",
                where="--corpus",
            )
        if code != 0 or not partial.is_file():
            raise _failure("llama-imatrix", model, code, tail)


def _count(model: str, text: str) -> int:
    return len(Session(model, _CHUNK, _CHUNK).tokens(text.encode()))


WINDOW = 256
"""Tokens of a window in which predictions are compared; each starts from an empty memory."""
_PREDICTIONS_S = 3600.0


def write_predictions(build: Build, model: Path, text: str, windows: int, folder: Path, threads: int) -> None:
    """Writes a model's predictions of a text for `divergence`.

    Args:
        build: its library computes them.
        model: a GGUF file with tokenizer.
        text: what is predicted.
        windows: of `WINDOW` tokens, spread evenly over the text.
        folder: holds nothing else.
        threads: compute threads.

    Raises:
        InvalidInput: the text is shorter.
        CandidateFailed: the process died on this model (crash).
        InfrastructureFailed: it was stopped by this machine; see `run_command`.
    """
    request = {"text": text, "windows": windows, "threads": threads, "folder": str(folder)}
    tokens = run_command(build, "predict", model, deadline_s=_PREDICTIONS_S, **request)
    if tokens <= windows * WINDOW:
        raise InvalidInput(
            f"a part of the text has {tokens:,} tokens, and {windows * WINDOW:,} are compared: give more text, or"
            " lower --windows",
            where="--corpus",
        )


_LEAST = np.finfo(np.float16).min
"""Of logarithms of probabilities; models that never write some tokens have less."""


def _predict(model: str, text: str, windows: int, threads: int, folder: str) -> int:
    """Returns the tokens of the text; writes nothing where they are too few."""
    session = Session(model, WINDOW, WINDOW, threads=threads)
    ids = session.tokens(text.encode())
    if len(ids) <= windows * WINDOW:
        return len(ids)
    starts = [(len(ids) - 1) * number // windows for number in range(windows)]
    rows = np.array([ids[start : start + WINDOW + 1] for start in starts], np.int32)
    shape = (len(rows), WINDOW, session.vocab)
    predictions = np.lib.format.open_memmap(str(Path(folder) / "likely.npy"), "w+", np.float16, shape)
    top = []
    for row, rounded in zip(rows, predictions, strict=True):
        session.reset()
        likely = _log_softmax(session.feed(row[:-1].tolist()))
        rounded[:] = np.maximum(likely, _LEAST)
        top.append(likely.argmax(-1))  # rounding makes tokens equal
    predictions.flush()
    np.save(Path(folder) / "top.npy", np.array(top))
    sizes = [[len(session.text_of(int(token))) for token in row[1:]] for row in rows]
    np.save(Path(folder) / "sizes.npy", np.array(sizes).sum(1))
    np.save(Path(folder) / "ids.npy", rows)
    return len(ids)


class Divergence(NamedTuple):
    """How a file's predictions of a text differ from those that `write_predictions` wrote, by window.

    Args:
        kl: nats a token of the divergence of the file's distribution from the other one.
        nats: of the text's own tokens under the file.
        sizes: bytes of these tokens.
        same_top: share of positions with the same likeliest token.
    """

    kl: list[float]
    nats: list[float]
    sizes: list[int]
    same_top: list[float]

    @property
    def mean_kl(self) -> float:
        """Nats a token over all windows."""
        return fmean(self.kl)

    @property
    def bits_per_byte(self) -> float:
        """Of the text under the file."""
        return sum(self.nats) / math.log(2) / max(1, sum(self.sizes))


def divergence(build: Build, model: Path, folder: Path, threads: int) -> Divergence:
    """Returns how a file differs from the model whose predictions are in `folder`.

    Raises:
        CandidateFailed: the process died on this model (crash), or its figures are not finite (not_finite).
        InfrastructureFailed: it was stopped by this machine; see `run_command`.
    """
    request = {"folder": str(folder), "threads": threads}
    result = Divergence(**run_command(build, "diverge", model, deadline_s=_PREDICTIONS_S, **request))
    if not all(map(math.isfinite, (*result.kl, *result.nats))):
        raise CandidateFailed("not_finite", f"{model.name}: its logits of the text hold NaN or infinity")
    return result


def _diverge(model: str, folder: str, threads: int) -> dict[str, list[float]]:
    rows, sizes, top = (np.load(Path(folder) / f"{name}.npy", allow_pickle=False) for name in ("ids", "sizes", "top"))
    predictions = np.load(Path(folder) / "likely.npy", mmap_mode="r", allow_pickle=False)
    session = Session(model, WINDOW, WINDOW, threads=threads)
    kl, nats, same = [], [], []
    for row, stored, best in zip(rows, predictions, top, strict=True):
        session.reset()
        likely, reference = _log_softmax(session.feed(row[:-1].tolist())), stored.astype(np.float32)
        kl.append(float((np.exp(reference) * (reference - likely)).sum(-1).mean()))
        nats.append(-float(np.take_along_axis(likely, row[1:, None].astype(np.int64), -1).sum()))
        same.append(float((likely.argmax(-1) == best).mean()))
    return Divergence(kl, nats, sizes.tolist(), same)._asdict()


def _log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Returns [..., V] log probabilities of logits, as float32 or float64 as they are."""
    shifted: NDArray[Any] = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


_COMMANDS: dict[str, Callable[..., object]] = {
    "logits": _logits,
    "bits": _bits,
    "decode": _decode,
    "complete": _complete,
    "quantise": _quantise,
    "count": _count,
    "predict": _predict,
    "diverge": _diverge,
}
_SERVERS: dict[str, Callable[..., None]] = {"vectors": _vectors, "dialogue": _dialogue}

if __name__ == "__main__":
    name, model_path, *words = sys.argv[1:]
    if name in _SERVERS:
        _SERVERS[name](model_path, *map(int, words))
    else:
        request_path = Path(words[0])
        result = _COMMANDS[name](model_path, **json.loads(request_path.read_text(encoding="utf-8")))
        request_path.with_name(_RESULT).write_text(json.dumps(result), encoding="utf-8")
