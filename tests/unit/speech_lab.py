"""Small models that speak."""

from __future__ import annotations

from nas.train.towers.detokenizer import DetokenizerShape

DETOKENIZER = DetokenizerShape(codebooks=3, entries=16, line="d32 ffn=swiglu:48 [C3 W2/1@4]")
