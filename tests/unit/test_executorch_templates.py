"""The cache of lowered programs: made once, used again, removed when it is too large."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.measure.runtimes.executorch import lowering, templates
from nas.measure.runtimes.executorch.chain import build_chain
from nas.measure.runtimes.executorch.programs import Program
from nas.measure.runtimes.executorch.templates import Template, template, template_key, templates_folder, trim_templates

PROGRAMS = build_chain(Layout.parse("d64 v64 ffn=swiglu:64 [C3 A2/1]")).programs
TEMPLATE = Template(b"PROGRAM" * 100, {"norm_weight": ("key",)})


@pytest.fixture(autouse=True)
def lowerings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were lowered, by a stand-in that takes a moment."""
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    lowered: list[Program] = []

    def make(program: Program) -> Template:
        lowered.append(program)
        time.sleep(0.05)
        return TEMPLATE

    monkeypatch.setattr(templates, "_make", make)
    return lowered


def use(program: Program, age_s: float = 0.0) -> Path:
    """Uses a template as if that had been `age_s` ago."""
    assert template(program) == TEMPLATE
    path = templates_folder() / template_key(program)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_program_is_lowered_once_by_all_who_want_it_at_the_same_time(lowerings: list[Program]) -> None:
    wanting = [threading.Thread(target=template, args=(program,)) for program in (*PROGRAMS, *PROGRAMS, *PROGRAMS)]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join()
    assert sorted(program.kind for program in lowerings) == sorted(program.kind for program in PROGRAMS)


def test_the_least_recently_used_go_first(lowerings: list[Program]) -> None:
    old, older, new = (use(program, age) for program, age in zip(PROGRAMS, (100, 200, 0), strict=False))
    size = new.stat().st_size
    template(PROGRAMS[1])  # used again, so no longer the oldest
    assert trim_templates(4 * size) == 0
    assert trim_templates(2 * size) == size
    assert not old.exists() and older.exists() and new.exists()
    assert trim_templates(0) == 2 * size
    assert trim_templates(0) == 0
    use(PROGRAMS[0])
    assert [program.kind for program in lowerings].count(PROGRAMS[0].kind) == 2


def test_what_a_killed_process_left_is_swept(lowerings: list[Program]) -> None:
    survivor = use(PROGRAMS[0])
    dead, busy = (survivor.with_name(f".making-{name}") for name in ("dead", "busy"))
    for path in (dead, busy):
        path.write_bytes(b"half")
    os.utime(dead, (time.time() - 7200,) * 2)
    assert trim_templates(1 << 30) == len(b"half")
    assert survivor.exists() and busy.exists() and not dead.exists()


def test_whatever_goes_wrong_while_lowering_is_the_candidate_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unheard(Exception):
        """An error of a class that nobody lists."""

    def fail(*args: object, **more: object) -> None:
        raise Unheard("no such operator")

    monkeypatch.setattr(lowering.torch.export, "export", fail)
    program = PROGRAMS[-1]
    assert program.kind == "head"
    with pytest.raises(CandidateFailed, match="cannot lower a head program: Unheard: no such operator") as failed:
        lowering.lower(program, lowering.quantised(lowering.module_of(program)))
    assert failed.value.reason == "export"
    with (
        pytest.raises(InfrastructureFailed, match="cannot lower the whole graph: MemoryError"),
        lowering.lowering("the whole graph"),
    ):
        raise MemoryError
