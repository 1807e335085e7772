"""Small models that speak."""

from __future__ import annotations

from audio_lab import SHAPE

from nas.core.layout import Layout
from nas.train.towers.detokenizer import DetokenizerShape
from nas.train.towers.model import TowerModel
from nas.train.towers.speech import SpeechHead, SpeechShape, SpeechTokens

DETOKENIZER = DetokenizerShape(codebooks=3, entries=16, line="d32 ffn=swiglu:48 [C3 W2/1@4]")
SPEECH = SpeechShape(codebooks=3, entries=16, rq="d32 ffn=swiglu:32 [A2/1*2]")
TOKENS = SpeechTokens(13, 14, 15)


def speaking_model() -> TowerModel:
    """A random model of few tokens that speaks."""
    layout = Layout.parse("d64 v32 ffn=swiglu:96 [C3 A4/2*2]")
    head = SpeechHead(SPEECH, layout.d_model, TOKENS)
    model = TowerModel(layout, SHAPE.tower(layout.d_model), 12, 1, head)
    head.draw(5, model.backbone.embed.weight)
    return model.eval().requires_grad_(False)
