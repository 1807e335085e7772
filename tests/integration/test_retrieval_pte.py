"""A late-interaction model as a .pte file: ExecuTorch's vectors are torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runner import nas
from retrieval_lab import write_model

from nas.core.layout import Layout
from nas.train.retrieval.retriever import TorchEncoder

TEXTS = ["the cat", "", "größer " * 40, "日本語"]
LAYOUT = Layout.parse("d64 v320 ffn=swiglu:64 [C3 A4/2]")
RUN = """
import json, sys
import numpy as np
import torch
from executorch.runtime import Runtime

program = Runtime.get().load_program(sys.argv[1])
encode, rows = program.load_method("forward"), {}
for number, ids in enumerate(json.load(sys.stdin)):
    rows[f"row{number}"] = encode.execute([torch.tensor([ids])])[0][0].numpy()
facts = {name: program.load_method(name).execute([])[0] for name in ("get_vector_width", "get_query_length")}
np.savez(sys.argv[2], facts=np.array(list(facts.values())), **rows)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("bidirectional", [False, True])
def test_vectors_are_those_of_torch(bidirectional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokens = write_model(tmp_path / "model", LAYOUT, lengths=(32, 64), bidirectional=bidirectional)
    done = nas("family", "pte", "model", "-o", "m.pte")
    assert done.code == 0, done.err
    batch = tokens.documents(TEXTS)
    ids = [row[mask].tolist() for row, mask in zip(*batch, strict=True)]
    subprocess.run(
        [sys.executable, "-c", RUN, "m.pte", "rows.npz"], input=json.dumps(ids), text=True, check=True, timeout=300
    )
    results = np.load("rows.npz")
    assert results["facts"].ravel().tolist() == [16, 32]
    for number, rows in enumerate(TorchEncoder(model, tokens).documents(TEXTS)):
        np.testing.assert_allclose(results[f"row{number}"], rows, atol=1e-3)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    done = nas("family", "pte", str(tmp_path), "-o", str(tmp_path / "m.pte"))
    assert done.code == 3 and "no late-interaction model" in done.err
