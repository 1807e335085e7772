"""A search space with ten mistakes, and what is said of each: unknown keys, names of this host, impossible choices."""

from __future__ import annotations

TEXT = """\
v: 1
name: mine
model:
  d_model: 250
  depth: 4
  vocab: 1024
mixers:
  conv: {kernal: 3}
  convv: {kernel: 3}
ffn:
  swiglu: {width: 256}
devices: [local, tag:phone]
runtimes:
  - {name: llamacpp, quantisation: q4_0}
  - {name: llama.cpp, quantisation: q4}
workloads:
  chat: {prompt: 64, gen: -1}
budgets:
  - {metric: ttft, max: 800ms}
objectives:
  - {name: quality, metric: quality}
  - {name: latency, metric: latency, workload: chta}
references:
  published: d256 v1024 ffn=swiglu:512 [C3*2 A8/4]
  attention: d256 v1024 ffn=swiglu:512 [A8/4*3]
search: {proposer: bohb}
"""
LINES = (
    "4: model.d_model: must be a multiple of 32",
    "8: mixers.conv.kernal: unknown knob of conv 'kernal'; did you mean 'kernel'?",
    "9: mixers.convv: unknown mixer block 'convv'; did you mean 'conv'?",
    "12: devices.1: unknown tag of a device 'phone'",
    "14: runtimes.0.name: unknown runtime 'llamacpp'; did you mean 'llama.cpp'?",
    "15: runtimes.1.quantisation: unknown quantisation of llama.cpp 'q4'; did you mean",
    "17: workloads.chat.gen: ",
    "19: budgets.0: ttft needs a workload; valid: chat",
    "22: objectives.1.workload: unknown workload 'chta'; did you mean 'chat'?",
    "26: search.proposer: unknown proposer 'bohb'",
)


def are_found(lines: list[str], file: str) -> None:
    """Checks that `lines` are the ten, in order, and nothing else."""
    assert len(lines) == len(LINES), "\n".join(lines)
    for line, expected in zip(lines, LINES, strict=True):
        assert line.startswith(f"{file}{expected}"), line
