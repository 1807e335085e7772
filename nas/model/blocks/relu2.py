"""Squared-ReLU feed-forward (So et al. 2021, "Primer"), as in PLM and Nemotron."""

from __future__ import annotations

from nas.model.blocks.swiglu import FeedForwardKind


class SquaredReLU(FeedForwardKind):
    """`relu2:8192`: W_down relu(W_up x)^2."""

    name = "relu2"
    letter = "relu2"
    hue = 10
    doc = "squared-ReLU feed-forward"
    matrices = 2


RELU2 = SquaredReLU()
