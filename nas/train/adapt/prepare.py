"""Prepares an adaptation: checks its request, imports its model once, and tokenises its text."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput, StudyBusy
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.replacement import Alternative, Slot, slots_of
from nas.measure.protocol.file_choice import require_measured
from nas.measure.runtimes.llama_cpp.gguf_file import is_gguf
from nas.model.nn.fit import Precision, Worker, native_precision
from nas.model.nn.weights import checkpoint_layout
from nas.model.text.documents import read_sources
from nas.train.adapt.adapt import CHILD, REQUEST, Adaptation, child_bytes
from nas.train.adapt.alternatives import default_alternatives, further_mixers, of_kinds
from nas.train.adapt.checkpoints import import_once, is_imported, read_model
from nas.train.adapt.costs import stored
from nas.train.adapt.device import BenchOf
from nas.train.adapt.healing import batches_of
from nas.train.adapt.library import LIBRARY_VERSION, TrainedTeacher
from nas.train.adapt.own_text import Turn, written_by
from nas.train.adapt.parallel import Workers
from nas.train.adapt.request import AdaptRequest, AdaptSettings
from nas.train.pretrain.data import Vocabulary, tokenise
from nas.train.release.found_tokenizer import beside, found_tokenizer, keep
from nas.train.release.model_tokenizer import ModelTokenizer, read_model_tokenizer
from nas.train.release.options import FileOptions

_TEACHER = "teacher.safetensors"
_LOCK = ".lock"
_LOCK_S = 5.0
"""Longest wait for another process that adapts into the same folder."""


def prepare(request: AdaptRequest, bench_of: BenchOf, worker: Worker, workers: Workers | None = None) -> Adaptation:
    """Returns an adaptation that can run.

    What follows from the model's configuration, the request and the disk is checked before the weights are read. The
    record of the request is not written before `Adaptation.claim`; a refusal may leave the imported model, the
    tokenizer of a GGUF file, empty folders, and ids of the text in the cache.

    Args:
        request: what is adapted to what.
        bench_of: returns what measures layouts on the device.
        worker: this process.
        workers: processes that train the library; None: this one, depth after depth.

    Raises:
        InvalidInput: the folder holds another adaptation, or text, tokenizer and model do not fit.
        Unsupported: no layout describes the model, or its layers cannot be replaced one by one.
        InfrastructureFailed: the disk has no room for the imported model, the library or the child.
    """
    if request.hours is not None and workers is not None:
        raise InvalidInput(
            "the training of one process is timed: leave it out where workers train the library, and set"
            " library.tokens and healing.tokens in --config",
            where="--hours",
        )
    limits = [Limit.parse(text, relative=True) for text in request.budget]
    if len({limit.metric for limit in limits}) < len(limits):
        raise InvalidInput("several budgets of one metric: give one", where="--budget")
    for limit in limits:
        require_measured(limit.metric, request.workload, "--budget")
    FileOptions(name="child", gguf=request.gguf).checked_name(request.output)
    model, output = request.model, request.output
    if not model.exists():
        raise InvalidInput("no such file or folder", where=str(model))
    is_checkpoint = model.is_file() and not is_gguf(model)
    layout = checkpoint_layout(model) if is_checkpoint else read_model(model).layout
    slots = slots_of(layout)
    tokenizer_file = _tokenizer_file(request)
    tokenizer = read_model_tokenizer(tokenizer_file)
    if tokenizer.size > layout.vocab:  # embeddings may have rows without a token
        raise InvalidInput(
            f"{tokenizer_file} has {tokenizer.size:,} tokens, but the model's embedding {layout.vocab:,} rows;"
            " name the tokenizer.json that the model was trained with",
            where="--tokenizer",
        )
    turn = Turn.of(tokenizer, str(tokenizer_file)) if request.own_text else None
    marks = tokenizer.marks if isinstance(tokenizer, ModelTokenizer) else None
    vocabulary = Vocabulary(tokenizer_file, layout.vocab, marks=marks)
    if request.healing.k >= layout.vocab:
        raise InvalidInput(f"healing.k is {request.healing.k}, of a vocabulary of {layout.vocab:,}")
    precision = _precision_of(output, worker)
    request = request.completed(precision)
    further = further_mixers(request.mixers, layout.d_model)
    alternatives: dict[Slot, tuple[Alternative, ...]] = {}
    for slot in slots:
        blocks = of_kinds(default_alternatives(layout, slot, request.window, further), request.alternatives)
        alternatives[slot] = stored(layout, slot, blocks, request.bits) if request.bits else blocks
    if request.alternatives and not any(alternatives.values()):
        kinds = " or ".join(request.alternatives)
        raise InvalidInput(f"no block of this model can become {kinds}", where="alternatives")
    record = request.record() | {
        "version": LIBRARY_VERSION,
        "precision": precision,
        "layout": layout.format(),
        "tokenizer": vocabulary.sha256,
        "budgets": {limit.metric: f"{limit.value!r}x" if limit.relative else limit.value for limit in limits},
    }
    earlier = _earlier_record(output, record)
    if tokens := earlier.get("tokens"):
        request = request.with_tokens(**tokens)
        record["tokens"] = tokens

    require_writable(output, "--output")
    require_writable(request.library_folder, "--library")
    # Partly written files of killed runs may take gigabytes.
    for partial in chain(output.glob(f"{_TEACHER}.*.partial"), output.glob(f".{CHILD}.*"), output.glob("curve/.*")):
        partial.unlink()
    teacher = TrainedTeacher.load(model if is_checkpoint else _imported(request, layout, worker), worker.device)
    sources = [
        tokenise(source, vocabulary, None, request.library.seed, 1 << 20)
        for source in (read_sources(request.corpus, request.held_out) if request.corpus or turn is None else ())
    ]
    if turn is not None:
        sources.append(
            written_by(
                teacher, turn, vocabulary, request.own_text, request.held_out, worker, precision, request.library.seed
            )
        )
    record |= {"teacher": teacher.sha256, "text": [source.key for source in sources]}
    _earlier_record(output, record)
    adaptation = Adaptation(
        request=request,
        record=record,
        bench_of=bench_of,
        worker=worker,
        workers=workers,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        teacher=teacher,
        sources=sources,
        healing_text=batches_of(sources, request.healing),
        alternatives=alternatives,
    )
    library_bytes = adaptation.library.missing_bytes(adaptation.required_blocks())
    _check_room({request.library_folder: library_bytes, output: child_bytes(output, layout, request.front)})
    return adaptation


@contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Reserves a folder of results for this process; the kernel releases it when the process dies.

    Raises:
        InvalidInput: files cannot be written there.
        StudyBusy: another process is at work there.
    """
    require_writable(output, "--output")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(output / _LOCK, _LOCK_S))
        except InfrastructureFailed as error:
            raise StudyBusy(f"another process adapts into {output}: wait for it, or name another --output") from error
        yield


def require_writable(folder: Path, where: str) -> None:
    """Creates a folder if it is missing, and checks that files can be written there.

    Raises:
        InvalidInput: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write to {folder}: {error.strerror}; name another folder", where=where) from error


def _earlier_record(output: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record in a folder, empty if there is none, after checking that it is of the same adaptation.

    Raises:
        InvalidInput: it is of another one.
    """
    path = output / REQUEST
    if not path.is_file():
        return {}
    earlier: dict[str, Any] = json.loads(path.read_bytes())
    # Settings that did not exist then have their defaults, which change nothing.
    named = {key: earlier[key] for key in AdaptSettings.model_fields.keys() & earlier.keys()}
    earlier |= AdaptSettings.model_validate(named).model_dump(mode="json")
    if different := ", ".join(sorted(key for key in record if earlier.get(key) != record[key])):
        raise InvalidInput(
            f"{output} holds an adaptation with other settings ({different}); name another folder", where="--output"
        )
    return earlier


def _precision_of(output: Path, worker: Worker) -> Precision:
    """Returns the precision of trainings that a request does not name: as recorded, or what the device is fast in."""
    path = output / REQUEST
    earlier: Precision | None = json.loads(path.read_bytes()).get("precision") if path.is_file() else None
    return earlier or native_precision(worker.device)


def _tokenizer_file(request: AdaptRequest) -> Path:
    """Returns the model's tokenizer.json; files of transformers beside it name special tokens and chat template.

    That of a GGUF file is written into the folder of results; that of a checkpoint is where `nas import` put it.

    Raises:
        InvalidInput: there is none.
        Unsupported: the GGUF file has one of a kind that is not read.
    """
    model = request.tokenizer or request.model
    if is_gguf(model):
        require_writable(request.output, "--output")
        return keep(found_tokenizer(model), request.output / _TEACHER) / "tokenizer.json"
    path = model
    if request.tokenizer is None:
        path = (model if model.is_dir() else beside(model)) / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file; name the model's tokenizer.json", where="--tokenizer")
    return path


def _imported(request: AdaptRequest, layout: Layout, worker: Worker) -> Path:
    """Returns the checkpoint of a folder of transformers or a GGUF file, imported once."""
    model, output = request.model, request.output
    checkpoint = output / _TEACHER
    if not is_imported(model, checkpoint):
        size = 4 * layout.params.total
        before = checkpoint.stat().st_size if checkpoint.is_file() else 0
        _check_room({output: size - before + child_bytes(output, layout, request.front)})
        worker.log(f"importing {model}: {size / 1e6:,.1f} MB")
        import_once(model, checkpoint)
    return checkpoint


def _check_room(sizes: Mapping[Path, int]) -> None:
    """Checks that disks have room for folder -> bytes; raises InfrastructureFailed where one has not."""
    disks: dict[int, int] = {}
    for folder, size in sizes.items():
        disk = folder.stat().st_dev
        disks[disk] = disks.get(disk, 0) + size
        if (free := shutil.disk_usage(folder).free) < disks[disk]:
            raise InfrastructureFailed(
                f"{folder}: {disks[disk] / 1e6:,.1f} MB are needed, but the disk has {free / 1e6:,.1f} MB free;"
                " free some with `nas gc`, or name folders on another disk with --library and --output"
            )
