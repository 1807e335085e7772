"""Losses of TRL and merges of mergekit on random tensors, for tests/unit/test_posttrain_references.py.

    python -m benchmarks.posttrain_references trl       # in an environment with trl 1.16.0 (Apache 2.0)
    python -m benchmarks.posttrain_references mergekit  # in one with mergekit 0.1.5 (LGPL 3.0 only)

Each runs the package's own functions and writes their results, with the inputs, to tests/data/posttrain_references/.
No code of the packages is copied. Random masks of mergekit are drawn from numbers of `generator_of`, as ours are.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from nas.model.nn.primitives import generator_of

FOLDER = Path(__file__).parents[1] / "tests/data/posttrain_references"
IGNORE = -100
VOCAB, LENGTH, PAIRS = 7, 6, 3


def drawn(name: str, *shape: int) -> Any:
    """Returns normal numbers that depend on `name` alone, float64."""
    return torch.randn(shape, generator=generator_of(0, name), dtype=torch.float64)


class Head(torch.nn.Module):
    """A causal model of TRL whose backbone returns given logits and whose head is the identity."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = logits
        self.lm_head = torch.nn.Linear(VOCAB, VOCAB, bias=False, dtype=logits.dtype)
        self.lm_head.weight.data = torch.eye(VOCAB, dtype=logits.dtype)
        self.config = SimpleNamespace(
            model_type="head", get_text_config=lambda: SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
        )

    @property
    def base_model(self) -> Any:
        """Its backbone."""
        return lambda **_: SimpleNamespace(last_hidden_state=self.logits, past_key_values=None)

    def get_output_embeddings(self) -> Any:
        """Its head."""
        return self.lm_head

    def forward(self, **_: Any) -> Any:
        """Returns the logits."""
        return SimpleNamespace(logits=self.logits)


def of_trl() -> dict[str, Any]:
    """Returns TRL's losses of pairs and of answers."""
    import trl.trainer.dpo_trainer as dpo
    import trl.trainer.sft_trainer as sft
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    dpo.is_peft_model = lambda model: False
    dpo.disable_gradient_checkpointing = lambda *_: nullcontext()
    ids = torch.randint(VOCAB, (2 * PAIRS, LENGTH), generator=generator_of(0, "ids"))
    starts, ends = (torch.tensor(values) for values in ([1, 2, 4, 1, 3, 2], [6, 4, 5, 2, 6, 6]))
    places = torch.arange(LENGTH)
    answers = ((places >= starts[:, None]) & (places < ends[:, None])).long()
    policy, reference = drawn("policy", 2 * PAIRS, LENGTH, VOCAB), drawn("reference", 2 * PAIRS, LENGTH, VOCAB)
    one = (places == starts[:, None]).long()

    def loss_of(loss: str, beta: float, mask: Any) -> float:
        model, start = Head(policy), Head(reference)
        for network in (model, start):
            add_fused_lm_head(network, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        accelerator = SimpleNamespace(device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value)
        trainer = SimpleNamespace(
            model=model,
            ref_model=start,
            accelerator=accelerator,
            aux_loss_enabled=False,
            ld_alpha=None,
            beta=beta,
            precompute_ref_logps=False,
            f_divergence_type="reverse_kl",
            loss_types=[loss],
            loss_weights=[1.0],
            label_smoothing=0.0,
            use_weighting=False,
            _total_train_tokens=0,
            _tp_size=1,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
        with torch.no_grad():
            return float(dpo.DPOTrainer._compute_loss(trainer, model, inputs, False))

    losses = [
        {
            "loss": loss,
            "beta": beta,
            "one_token": one_token,
            "value": loss_of(loss, beta, one if one_token else answers),
        }
        for loss, one_token in (("sigmoid_norm", False), ("sigmoid", True), ("apo_zero", True), ("sigmoid_norm", True))
        for beta in (5.0, 0.1, 1e-4)
    ]
    labels = ids.masked_fill(answers == 0, IGNORE)
    means = CPOTrainer.get_batch_logps(policy, labels, average_log_prob=True)
    for beta, gamma in ((2.0, 0.5), (10.0, 0.1)):
        trainer = SimpleNamespace(
            alpha=0.0,
            loss_type="simpo",
            simpo_gamma=gamma,
            beta=beta,
            label_smoothing=0.0,
            accelerator=SimpleNamespace(device="cpu"),
        )
        value = CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()
        losses.append({"loss": "simpo", "beta": beta, "margin": gamma, "one_token": False, "value": float(value)})

    examples = [
        {"input_ids": row[:end].tolist(), "labels": row_labels[:end].tolist()}
        for row, row_labels, end in zip(ids, labels, ends, strict=True)
    ]
    batch = sft.DataCollatorForLanguageModeling(pad_token_id=0)(examples)
    model = Head(policy)
    add_fused_lm_head(model)
    outputs = model(**batch, fused_lm_head=True)
    answer_loss = float(-outputs.log_probs.sum() / outputs.label_mask.sum())  # as SFTTrainer.compute_loss, "nll"
    return {
        "package": f"trl {version('trl')}, Apache-2.0",
        "ids": ids.tolist(),
        "answers": answers.tolist(),
        "one_token": one.tolist(),
        "policy": policy.tolist(),
        "reference": reference.tolist(),
        "losses": losses,
        "sft": {"labels": batch["labels"].tolist(), "value": answer_loss},
    }


def of_mergekit() -> dict[str, Any]:
    """Returns mergekit's merges of one tensor of several models."""
    from mergekit import sparsify
    from mergekit.merge_methods.base import TensorBatch, TensorGroup
    from mergekit.merge_methods.registry import get

    base, models = drawn("base", 1, 20), [drawn(f"model {number}", 1, 20) for number in range(3)]
    drawn_for: list[Any] = []

    def bernoulli(chances: Any) -> Any:
        uniform = torch.rand(chances.shape, generator=generator_of(0, f"{len(drawn_for)}:w"))
        drawn_for.append(chances)
        return (uniform >= 1 - chances).to(chances.dtype)

    def merged(method: str, weights: list[float], density: float, **more: Any) -> list[list[float]]:
        del drawn_for[:]
        group = TensorGroup.from_tensors([base, *models], base_index=0)
        weight_of = dict(enumerate(weights, 1))
        fields = {parameter.name: parameter.default for parameter in get(method).spec.parameters}
        fields |= {"weight": weight_of, "density": dict.fromkeys(weight_of, density), **more}
        for name in ("epsilon", "gamma"):
            if name in fields:
                fields[name] = dict.fromkeys(weight_of, fields[name])
        merged: list[list[float]] = get(method).merge_group(group, **fields).tolist()
        return merged

    equal, unequal = [1 / 3] * 3, [0.5, 0.2, 0.9]
    with mock.patch.object(torch, "bernoulli", bernoulli):
        cases = [
            {"method": method, "weights": weights, "density": density, "value": merged(method, weights, density)}
            for method, weights, density in (
                ("task_arithmetic", unequal, 1.0),
                ("ties", equal, 1.0),
                ("ties", equal, 0.5),
                ("ties", equal, 0.2),
                ("ties", unequal, 0.5),
            )
        ] + [
            # Without its own rescaling to the L1 norm; the mean of those that agree, as for ties.
            {
                "method": method,
                "weights": equal,
                "density": density,
                "value": merged(method, equal, density, rescale=False, normalize=method == "dare_ties"),
            }
            for method in ("dare_linear", "dare_ties")
            for density in (1.0, 0.6)
        ]
        sparse = []
        for density, epsilon in ((0.6, 0.2), (0.5, 0.4)):
            del drawn_for[:]
            masks = [sparsify.della_magprune(model - base, density, epsilon).tolist() for model in models]
            sparse.append({"density": density, "epsilon": epsilon, "value": masks})
    batch = TensorBatch([tensor[None] for tensor in models])
    soup = get("linear").merge_batch(batch, weight=torch.tensor([[1.0, 3.0, 4.0]]), normalize=True)[0]
    return {
        "package": f"mergekit {version('mergekit')}, LGPL-3.0-only",
        "base": base.tolist(),
        "models": [tensor.tolist() for tensor in models],
        "cases": cases,
        "della": sparse,
        "soup": {"weights": [1.0, 3.0, 4.0], "value": soup.tolist()},
    }


def main() -> None:
    """Writes the results of one package."""
    recorders = {"trl": of_trl, "mergekit": of_mergekit}
    for name in sys.argv[1:]:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(recorders[name]()) + "\n")


if __name__ == "__main__":
    main()
