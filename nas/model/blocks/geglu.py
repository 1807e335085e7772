"""GEGLU feed-forward (Shazeer 2020, "GLU Variants Improve Transformer"), as in Gemma."""

from __future__ import annotations

from nas.model.blocks.swiglu import FeedForwardKind


class GeGLU(FeedForwardKind):
    """`geglu:9216`: W_down (gelu(W_gate x) * W_up x), with GELU's approximation by tanh."""

    name = "geglu"
    letter = "geglu"
    hue = 11
    doc = "GEGLU feed-forward"
    matrices = 3


GEGLU = GeGLU()
