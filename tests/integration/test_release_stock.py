"""A member's files in the programs of their users, none of which knows hilnas."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nas.core.family import MemberFiles
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, RandomWeights
from nas.measure.runtimes.executorch import stock
from nas.measure.runtimes.executorch.gate import STEPS, Oracle, judge
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.runner import Feed
from nas.model.nn.model import Model
from nas.testing.planted_faults import checkpoint
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.release.files import write_files
from nas.train.release.huggingface import LazyTensors, open_weights
from nas.train.release.options import FileOptions

VOCAB, TOKENS = 640, 24
pytestmark = pytest.mark.usefixtures("one_thread", "fast_binding")

PROMPT = [1, 300, 41, 77, 512, 90, 300, 41]
LAYOUTS = {
    "Lfm2ForCausalLM": f"d256 v{VOCAB} ffn=swiglu:512 [C3*2 A4/2 C3]",
    "Lfm2MoeForCausalLM": f"d256 v{VOCAB} untied ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3]",
    "Qwen3ForCausalLM": f"d128 v{VOCAB} ffn=swiglu:352 [A4/2*3]",
    "LlamaForCausalLM": f"d64 v{VOCAB} ffn=swiglu:160 [A4/2(qk_norm=0)*3]",
    "HilnasForCausalLM": f"d128 v{VOCAB} ffn=swiglu:160 [C3 M16(groups=2) W4/2@8(sink=1) A4/2+moe:8x2:64]",
    "HilnasForCausalLM, the other kinds": f"d128 v{VOCAB} ffn=relu2:192 [D4/2:32 L4/32(query=64) X4&W4/2@8(sink=1) G4"
    " A4/2(canon=4)+moe:8x2:64(shared=1) C4&A4/2(rope_theta=0) A4/2(kv=4)+none M16+none ^0 -]",
}

QUANTISATIONS = ("F16", "Q4_0", "Q8_0", "Q4_K_M")

LETTERS = (
    "aeiouxyzAST  '\"\n\r\t0123456789.,;:!?-_<>|()[]{}éüßñ日本語ひらカ한글العἀ😀\u200d\u0301\u00a0\u3000\u0085½²Ⅷ٣"
)
WRITTEN = (
    "",
    " ",
    "  don't I'LL he'S  \n\n\n x\t\ty 1234567 日本語テキスト العربية 한국어 déjà-vu 😀👩‍👩‍👧 \r\n a\u00a0b",
    "<|im_start|>user\nhi<|im_end|>\n<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
    "<|fim_pre|>a<|fim_suf|>b<|fim_mid|> <|reserved_600|> a'\u017f",
)


def tricky_texts() -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(LETTERS, k=rng.randrange(1, 60))) for _ in range(300)]
    blocks = ["".join(chr(rng.randrange(32, 0x3000)) for _ in range(40)) for _ in range(200)]
    return [*WRITTEN, *mixed, *blocks]


@dataclass(frozen=True)
class Member:
    """A member, the weights that all its files hold, and what transformers makes of it."""

    folder: Path
    layout: Layout
    record: MemberFiles
    model: Model
    logits: NDArray[np.float32]
    answer: dict[str, Any]

    def gguf(self, quantisation: str) -> Path:
        return self.folder / "gguf" / f"{self.folder.name}-{quantisation}.gguf"


def ask_transformers(folders: list[Path], scratch: Path) -> tuple[list[NDArray[np.float32]], list[dict[str, Any]]]:
    chat = {
        "conversation": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Sum?"},
            {"role": "tool", "content": "3"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "add_generation_prompt": True,
    }
    question = {"ids": [PROMPT, PROMPT[::-1]], "texts": tricky_texts(), "tokens": TOKENS, "chat": chat}
    alone = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    alone |= {"HF_HOME": str(scratch), "HF_HUB_OFFLINE": "1", "HOME": str(scratch)}
    script, out = Path(__file__).with_name("stock_transformers.py"), scratch / "logits.npz"
    argv = [sys.executable, "-P", str(script), str(out), *(str(folder / "transformers") for folder in folders)]
    done = subprocess.run(argv, input=json.dumps(question), capture_output=True, text=True, env=alone, cwd=scratch)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as logits:
        return [logits[name] for name in logits.files], json.loads(done.stdout)


def released(layout: Layout, trained: Checkpoint) -> dict[str, torch.Tensor]:
    """The checkpoint's numbers as files have them: matrices in float16."""
    with open_weights(layout, trained, torch.float16) as state:
        tensors = dict(LazyTensors(state))
    small = ("conv.weight", "canon.weight", "router.weight")
    return {n: t if t.dim() == 1 or n.endswith(small) else t.half().float() for n, t in tensors.items()}


@pytest.fixture(scope="module")
def members(llama_build: Build, patched_build: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    """A member of every layout; one process of transformers loads them all."""
    written, tokenizer = [], tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([], VOCAB, tokenizer, print)
    options = FileOptions(tokenizer=tokenizer, gguf=tuple(map(str.lower, QUANTISATIONS)))
    for text in LAYOUTS.values():
        layout, folder = Layout.parse(text), tmp_path_factory.mktemp("member")
        trained = checkpoint(layout, folder / "weights")
        record = write_files(folder / "tiny", layout, trained, options, print)
        model = Model(layout, seed=None).eval()
        model.load_state_dict(released(layout, trained))
        written.append((folder / "tiny", layout, record, model))
    answers = ask_transformers([folder for folder, *_ in written], tmp_path_factory.mktemp("transformers"))
    return {name: Member(*parts, *outputs) for name, parts, *outputs in zip(LAYOUTS, written, *answers, strict=True)}


@pytest.fixture(scope="module", params=LAYOUTS)
def member(request: pytest.FixtureRequest, members: dict[str, Member]) -> Member:
    result = members[request.param]
    assert result.answer["class"] == request.param.partition(",")[0]
    return result


def test_transformers_computes_what_the_layout_means(member: Member) -> None:
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        logits = member.model(ids)
        for _ in range(TOKENS):
            ids = torch.cat([ids, member.model(ids)[:, -1:].argmax(-1)], 1)
    np.testing.assert_allclose(member.logits, logits.numpy(), rtol=0, atol=2e-5)
    assert member.logits.std() > 0.1, "too flat to tell models apart"
    assert member.answer["followed"] == member.answer["uncached"] == ids[:, len(PROMPT) :].tolist()
    assert member.answer["beams_agree"]
    assert member.answer["batches_agree"]
    assert member.answer["dtype"] == "torch.float16"
    assert member.answer["vocab"] == VOCAB


def test_chats_are_written_in_chatml(member: Member) -> None:
    assert member.answer["chat"] == (
        "<|startoftext|><|im_start|>system\nBe brief.\n"
        'List of tools: <|tool_list_start|>[{"type": "function", "function": {"name": "add"}}]<|tool_list_end|>'
        "<|im_end|>\n<|im_start|>user\nSum?<|im_end|>\n"
        "<|im_start|>tool\n<|tool_response_start|>3<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def read_by_llama(member: Member, llama_build: Build, patched_build: Build) -> dict[str, dict[str, Any]]:
    """What one process of llama.cpp answers for each of the member's files, by quantisation."""
    build = patched_build if "patched" in member.record.loads["llama.cpp"] else llama_build
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(build.folder)}
    files = [str(member.gguf(quantisation)) for quantisation in QUANTISATIONS]
    argv = [sys.executable, str(Path(__file__).with_name("llama_cpp_text.py")), *files]
    question = json.dumps({"texts": tricky_texts(), "prompt": PROMPT, "tokens": TOKENS})
    done = subprocess.run(argv, input=question, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(QUANTISATIONS, json.loads(done.stdout), strict=True))


def require_same_text(member: Member, followed: list[int]) -> None:
    """Compares greedy tokens; they may part where the best two are closer than llama.cpp's rounding to float16."""
    expected = member.answer["followed"][0]
    parted = next((i for i, (a, b) in enumerate(zip(followed, expected, strict=True)) if a != b), None)
    if parted is None:
        return
    with torch.no_grad():
        logits = member.model(torch.tensor([PROMPT + expected[:parted]]))[0, -1]
    assert logits[expected[parted]] - logits[followed[parted]] < 0.05 * logits.std(), f"token {parted}"
    assert parted >= TOKENS // 3


def test_llama_cpp_reads_text_and_goes_on_as_transformers_does(
    member: Member, read_by_llama: dict[str, dict[str, Any]]
) -> None:
    texts, answer = tricky_texts(), read_by_llama["F16"]
    require_same_text(member, answer["followed"])
    for text, ids, expected in zip(texts, answer["ids"], member.answer["ids"], strict=True):
        assert ids == expected, text
    assert answer["back"] == texts
    assert (answer["bos"], answer["eos"]) == (1, 7) and {2, 7} <= set(answer["end"])
    template = (member.folder / "transformers" / "chat_template.jinja").read_text()
    assert answer["template"] == template


@pytest.mark.parametrize("quantisation", QUANTISATIONS[1:])
def test_quantised_files_load(member: Member, read_by_llama: dict[str, dict[str, Any]], quantisation: str) -> None:
    followed = read_by_llama[quantisation]["followed"]
    assert len(followed) == TOKENS
    if quantisation == "Q8_0":
        assert followed[0] == member.answer["followed"][0][0]


def test_a_float16_file_of_other_weights_is_not_quantised(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(LAYOUTS["Lfm2ForCausalLM"])
    write_files(tmp_path / "a" / "m", layout, RandomWeights(1), FileOptions(transformers=False, gguf=("f16",)), print)
    options = FileOptions(transformers=False, gguf=("q8_0",))
    records = [write_files(tmp_path / name / "m", layout, RandomWeights(2), options, print) for name in ("a", "b")]
    assert records[0] == records[1]
    assert [path.name for path in (tmp_path / "a" / "m" / "gguf").iterdir()] == ["m-Q8_0.gguf"]


@pytest.mark.exhaustive  # minutes; by default test_executorch_whole.py runs such a file
def test_the_pte_runs_in_stock_executorch(tmp_path: Path) -> None:
    layout = Layout.parse("d64 v320 ffn=swiglu:64 [C3 A2/1+none A2/1(kv=1)+none]")
    feed = Feed(prompt=40, gen=STEPS, batch=17)
    trained = checkpoint(layout, tmp_path / "weights")
    options = FileOptions(gguf=(), transformers=False, pte_context=128)
    record = write_files(tmp_path / "tiny", layout, trained, options, print)
    (pte,) = (file for file in record.files if file.kind == "pte")
    np.save(tmp_path / "ids.npy", feed.ids(layout.vocab))
    script, model = Path(__file__).with_name("stock_runtime.py"), tmp_path / "tiny" / pte.path
    sizes = [str(feed.prompt), str(feed.batch)]
    argv = [sys.executable, str(script), str(model), str(tmp_path / "ids.npy"), *sizes, str(tmp_path / "l.npy")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    logits, ids = np.load(tmp_path / "l.npy"), feed.ids(layout.vocab)
    report = judge(logits, Oracle(layout, trained), layout, ids)
    assert report.passed, (report.error, report.limit)
    with stock.dialogue(model, 128) as dialogue:
        for step in (2, 0):
            (likeliest,) = dialogue.answer(ids[: feed.prompt + step].tolist(), 1, ())
            assert likeliest == logits[step].argmax()
