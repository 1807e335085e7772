from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.layout import Layout
from nas.model.nn.distillation import decoupled_top_k, top_k
from nas.model.nn.model import Model
from nas.train.pretrain.loss import Distilled, pretraining_loss

LAYOUT = Layout.parse("d32 v48 ffn=swiglu:32 [C3 A2/1]")


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(5, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_decoupled_top_k(student: Tensor, teacher: Tensor, k: int, tau: float) -> Tensor:
    """Returns L_DTK of one position from two whole distributions [V], written like the report's equations.

    Args:
        student: probabilities.
        teacher: probabilities.
        k: size of the teacher's Top-K set.
        tau: temperature.
    """
    chosen = teacher.argsort(descending=True)[:k].tolist()
    p_teacher = sum((teacher[x] for x in chosen), torch.zeros((), dtype=teacher.dtype))
    p_student = sum((student[x] for x in chosen), torch.zeros((), dtype=student.dtype))
    bernoulli = p_teacher * (p_teacher / p_student).log()
    if p_teacher < 1:
        bernoulli = bernoulli + (1 - p_teacher) * ((1 - p_teacher) / (1 - p_student)).log()
    teacher_top = torch.stack([(teacher[x] / p_teacher) ** (1 / tau) for x in chosen])
    student_top = torch.stack([(student[x] / p_student) ** (1 / tau) for x in chosen])
    teacher_top, student_top = teacher_top / teacher_top.sum(), student_top / student_top.sum()
    conditional = sum((p * (p / q).log() for p, q in zip(teacher_top, student_top, strict=True)), torch.zeros(()))
    return bernoulli + p_teacher * tau**2 * conditional


@pytest.mark.parametrize("tau", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("k", [1, 8, 47])
def test_the_objective_is_the_reports(k: int, tau: float) -> None:
    student, teacher = logits(0), logits(1)
    loss = decoupled_top_k(student, top_k(teacher, k), tau)
    expected = [
        reference_decoupled_top_k(s, t, k, tau) for s, t in zip(student.softmax(-1), teacher.softmax(-1), strict=True)
    ]
    assert torch.allclose(loss, torch.stack(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tau", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 8, 47, 48])
def test_the_reverse_objective_is_the_reports(k: int, tau: float) -> None:
    """Equation 17: both divergences are of the student from the teacher; the weight is the teacher's mass."""
    student, teacher = logits(0).requires_grad_(), logits(1)
    loss = decoupled_top_k(student, top_k(teacher, k), tau, "reverse")
    expected = []
    for s, t in zip(student.softmax(-1), teacher.softmax(-1), strict=True):
        chosen = t.argsort(descending=True)[:k]
        inside, mass = s[chosen].sum(), t[chosen].sum()
        member = inside * (inside / mass).log()
        if k < 48:
            member = member + (1 - inside) * ((1 - inside) / (1 - mass)).log()
        student_top, teacher_top = ((p[chosen] ** (1 / tau)) / (p[chosen] ** (1 / tau)).sum() for p in (s, t))
        expected.append(member + mass * tau**2 * (student_top * (student_top / teacher_top).log()).sum())
    assert torch.allclose(loss, torch.stack(expected), rtol=1e-9, atol=1e-10)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None and student.grad.isfinite().all()


def test_the_reverse_objective_of_the_teacher_itself_is_zero_and_that_of_a_sure_one_finite() -> None:
    teacher = logits(1)
    assert decoupled_top_k(teacher, top_k(teacher, 8), 2.0, "reverse").abs().max() < 1e-12
    sure = torch.zeros(1, 48).index_fill(1, torch.tensor([3]), 80.0)
    assert decoupled_top_k(logits(0)[:1].float(), top_k(sure, 8), 1.0, "reverse").isfinite().all()


def test_it_is_a_lower_bound_of_the_whole_divergence_and_reaches_it_where_one_token_is_left() -> None:
    student, teacher = logits(0), logits(1)
    whole = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    bounds = [decoupled_top_k(student, top_k(teacher, k), 1.0) for k in (1, 4, 16, 47)]
    for smaller, larger in zip(bounds, [*bounds[1:], whole], strict=True):
        assert (smaller <= larger + 1e-12).all()
    assert torch.allclose(bounds[-1], whole)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_with_the_whole_vocabulary_it_is_ordinary_distillation(tau: float) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    loss = decoupled_top_k(student, top_k(teacher, 48), tau)
    student_logs, teacher_logs = ((output / tau).log_softmax(-1) for output in (student, teacher))
    assert torch.allclose(
        loss, tau**2 * F.kl_div(student_logs, teacher_logs, log_target=True, reduction="none").sum(-1)
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None and student.grad.isfinite().all()


def test_it_is_zero_for_the_teacher_itself_and_finite_for_a_sure_one() -> None:
    teacher = logits(1)
    assert decoupled_top_k(teacher, top_k(teacher, 8), 2.0).abs().max() < 1e-12
    sure = torch.zeros(1, 48).index_fill(1, torch.tensor([3]), 80.0)
    unsure = torch.zeros(1, 48, requires_grad=True)
    loss = decoupled_top_k(unsure, top_k(sure, 8), 2.0).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite() and unsure.grad is not None and unsure.grad.isfinite().all()


def test_the_loss_mixes_both_terms_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = Model(LAYOUT, 0), Model(LAYOUT, 1)
    tokens = torch.randint(48, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    distilled = Distilled(teacher, weight=0.3, tau=2.0, k=4)
    student_logits = student(inputs)
    term = decoupled_top_k(student_logits, top_k(teacher(inputs), 4), 2.0).sum()
    expected = 0.7 * F.cross_entropy(student_logits.flatten(0, 1), labels.flatten(), reduction="sum") + 0.3 * term
    gradients = torch.autograd.grad(expected, list(student.parameters()))
    monkeypatch.setattr("nas.train.pretrain.loss._CPU_LOGITS_AT_ONCE", 5 * 48)
    loss = pretraining_loss(student, inputs, labels, distilled)
    assert torch.allclose(loss, expected, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, list(student.parameters())), gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
