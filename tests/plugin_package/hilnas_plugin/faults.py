"""Mistakes of a graph that the gates of both runtimes must find."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nas.testing.planted_faults import Edit, Fault, State


def altered(ending: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edited(state: State) -> None:
        for name, weight in state.items():
            if name.endswith(ending):
                weight.copy_(edit(weight))

    return edited


S4D_FAULTS = (
    Fault("decays of other states", altered("A_log", lambda weight: weight.roll(1, 1))),
    Fault("step sizes of other channels", altered("dt_bias", lambda weight: weight.roll(1, 0))),
    Fault("states read by other channels", altered("mixers.0.C", lambda weight: weight.roll(1, 0))),
    Fault("input not added", altered("mixers.0.D", torch.zeros_like)),
    Fault("gate missing", altered("mixers.0.gate.weight", torch.zeros_like)),
    Fault("stale state", earlier=40),
)
