"""What tests of families share: one with two members, files, a training and a comparison."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nas.core.family import (
    FAMILY,
    FILES,
    TRAINING,
    BuildDecision,
    ComparedModel,
    Comparison,
    ConsideredLayout,
    Family,
    MeasuredModel,
    Member,
    MemberFile,
    MemberFiles,
    MemberTraining,
    Ratio,
    RecordedFigure,
    Source,
    write_record,
)

SMALL = "d64 v256 ffn=swiglu:128 [C3 A4/2]"
LARGE = "d128 v256 ffn=swiglu:256 [C3 C3 A4/2]"
CONTENT = b"GGUF of random weights"


def write_family(home: Path, name: str = "demo", text: str = "because it is faster") -> Family:
    """A family below `home`, whose 4M member has everything and whose 12M member nothing; the larger one comes first.

    Args:
        home: `$NAS_HOME`.
        name: of the family.
        text: stands wherever a record has words.
    """
    folder = home / "families" / name
    choice = BuildDecision(what=text, value=text, reason=text)
    candidate = ConsideredLayout(layout=SMALL, parameters=4_000_000, active=4_000_000, chosen=True, verdict=text)
    members = (
        Member(size="12M", layout=LARGE, parameters=12_000_000, active=12_000_000, non_embedding=11_000_000,
               decisions=(), tried=()),
        Member(size="4M", layout=SMALL, parameters=4_000_000, active=4_000_000, non_embedding=3_000_000,
               decisions=(choice,), tried=(candidate,), measured=(measured("laptop", 90.0, text),)),
    )  # fmt: skip
    family = Family(
        name=name, study="study", made="2026-01-02T03:04:05Z", seed=0, pattern=text, members=members,
        sources=(Source(layout=SMALL, trial=0, objectives={"quality": 1.5}),), decisions=(choice,),
        provenance={"hilnas": "0", "space": text},
    )  # fmt: skip
    write_record(folder / FAMILY, family)
    write_record(folder / "4M" / FILES, files(folder / "4M", text))
    training = MemberTraining(
        checkpoint="c" * 64, config={}, start=text, tokens=2_000_000, steps=20, seconds=7200.0, device=text,
        curve=((0, 5.5), (10, 4.0), (20, 3.5)), held_out={text: 1.25},
    )  # fmt: skip
    write_record(folder / "4M" / TRAINING, training)
    write_record(folder / "comparison-laptop.json", comparison(name, text))
    return family


def files(folder: Path, text: str = "") -> MemberFiles:
    """A member's files, which are there, and the record of them."""
    path = folder / "gguf" / "model q4_0.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    (folder / "secret.txt").write_text("no file of the member")
    listed = MemberFile(
        path="gguf/model q4_0.gguf", kind="gguf", quantisation="q4_0", sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )  # fmt: skip
    return MemberFiles(layout=SMALL, weights="random:0", loads={"llama.cpp": text or "lfm2"}, files=(listed,))


def measured(device: str, decode: float, text: str) -> MeasuredModel:
    """Figures of one model; the last one could not be read."""
    speeds = [("decode_tps", 0, decode), ("prefill_tps", 1024, 12 * decode)]
    figures = [RecordedFigure(metric=m, prompt=p, value=v, ci95=(0.9 * v, 1.1 * v)) for m, p, v in speeds]
    figures.append(RecordedFigure(metric="peak_rss", prompt=4096, reason=text))
    return MeasuredModel(device=device, runtime="llama.cpp", quantisation="q4_0", threads=2, figures=tuple(figures))


def comparison(family: str, text: str) -> Comparison:
    """Both members and two others."""
    models = (
        ("demo 12M", True, 12_000_000, 40.0), ("other 10M", False, 10_000_000, 30.0),
        ("demo 4M", True, 4_000_000, 90.0), ("other 5M", False, 5_000_000, 60.0),
    )  # fmt: skip
    compared = [
        ComparedModel(name=name, member=member, parameters=size, architecture=text, source=text,
                      measured=measured("laptop", speed, text))
        for name, member, size, speed in models
    ]  # fmt: skip
    ratio = Ratio(
        model="demo 4M", other="other 5M", metric="decode_tps", prompt=0, here=1.5, report={"phone": 2.25}
    )  # fmt: skip
    return Comparison(
        family=family, device="laptop", conditions={"threads": "2", "cpu": text}, made="2026-01-03T00:00:00Z",
        models=tuple(compared), ratios=(ratio,), notes=(text,),
    )  # fmt: skip
