"""Learning rates as pure functions of the step.

One shape covers what was published: a linear warm-up, a stable part, a decay, and a constant rest. Without the rest it
is WSD (Hu et al. 2024, MiniCPM, section 4), with it PLM's WSDC (section 4.2 and table 23: warm-up over the first 1 % of
all steps, stable, decay to a tenth of the peak, constant to the end). PLM's page contradicts itself on the last part:
its text calls the rate constant and, further down, a cosine decay from that same rate; its name says constant, and so
does this module.
"""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["linear", "cosine", "exponential", "sqrt"]


def wsd(step: int, steps: int, *, warmup: float, decay: float, final: float, shape: Shape = "linear") -> float:
    """The learning rate of step number `step` of `steps`, as a factor on its peak; see `wsdc`."""
    return wsdc(step, steps, warmup=warmup, decay=decay, constant=0.0, final=final, shape=shape)


def wsdc(
    step: int, steps: int, *, warmup: float, decay: float, constant: float, final: float, shape: Shape = "linear"
) -> float:
    """The learning rate of step number `step` of `steps`, as a factor on its peak.

    Args:
        step: counted from 0.
        steps: all of them.
        warmup: share of the steps in which the rate rises linearly to the peak, which the last of them has.
        decay: share in which it falls, down to `final` at the last of them.
        constant: share at the end that stays at `final`.
        final: rate after the decay, as a share of the peak.
        shape: of the decay. Linear; half a cosine; exponential, as MiniCPM's; or 1 - sqrt (Haegele et al. 2024,
            "Scaling laws and compute-optimal training beyond fixed training durations", equation 1).
    """
    assert 0 <= step < steps, "a step of the training"
    rising = round(warmup * steps)
    resting = round(constant * steps)
    falling = min(round(decay * steps), steps - resting)
    fallen = step + 1 - (steps - resting - falling)
    if fallen > falling:
        return final
    if fallen > 0:
        return final + (1 - final) * _left(fallen / falling, final, shape)
    return (step + 1) / rising if step < rising else 1.0


def _left(done: float, final: float, shape: Shape) -> float:
    """What is left of the fall after the share `done` of the decay: 1 at 0, 0 at 1."""
    match shape:
        case "linear":
            return 1 - done
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "sqrt":
            return 1 - math.sqrt(done)
        case "exponential":
            # From 1 to `final`; no exponential reaches 0, so one that ends at a thousandth stands for that.
            end = max(final, 1e-3)
            return (end**done - end) / (1 - end) if end < 1 else 0.0
