"""Recipe of a pre-training: the settings of a YAML file, the recipe completed from them, learning rates.

Defaults are those of the LFM2 report (section 3): a 4,096-token stage, then a 32,768-token stage with its own data and
an accelerated decay, which gets one token in eleven; K = 32 teacher tokens; half of the code examples cut for
fill-in-the-middle. Optimiser settings are those of the report's post-training (section 4.2.2) and of PLM's table 23 for
pre-training, which agree. Learning rate and batch are not published for these models and are computed from
the compute budget, as are the sequence lengths of a training that is too small for the report's; see `complete`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from nas.core.errors import InvalidInput
from nas.core.family import BuildDecision
from nas.core.layout import Layout
from nas.core.strict import StrictKeys
from nas.model.text.documents import HELD_OUT
from nas.search.spaces.problems import read_model

REPORT_LENGTHS = (4096, 32768)
"""Tokens of a sequence in the report's two stages."""
REPORT_LONG_SHARE = 1 / 11
"""Share of the second stage: 1T of 11T tokens."""
_LEAST_SEQUENCES = 8
"""Of a step, below which default lengths are shortened."""
_SHORTEST = 128
"""Tokens of the shortest default sequence."""
_BY_COMPUTE = "by compute (DeepSeek LLM 2024, equation 1); the report publishes none"

Part = Literal["pretrain", "long"]
Share = Annotated[float, Field(ge=0, le=1)]
Shape = Literal["linear", "cosine", "exponential", "sqrt"]


Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class Schedule(StrictKeys):
    """Learning rate over a stage: a linear warm-up, a stable part, a decay, and a constant end.

    Without the end it is WSD (Hu et al. 2024, MiniCPM, section 4), with it PLM's WSDC (section 4.2 and table 23). PLM's
    page contradicts itself on the last part: its text calls the rate constant and, further down, a cosine decay from
    that same rate; its name says constant, and so does this schedule.
    """

    peak: float = Field(1.0, gt=0, description="highest rate, as a factor on `lr`")
    warmup: Share = Field(0.0, description="share of the stage's steps; the last of them has the peak")
    decay: Share = Field(0.0, description="share of the stage's steps; the last of them has `final`")
    constant: Share = Field(0.0, description="share of the stage's steps, at its end")
    final: float = Field(0.1, ge=0, le=1, description="rate after the decay, as a share of the peak")
    shape: Shape = Field(
        "linear",
        description="of the decay; sqrt: 1 - sqrt (Haegele et al. 2024, equation 1), exponential: MiniCPM's",
    )

    @model_validator(mode="after")
    def _fits(self) -> Schedule:
        if self.warmup + self.decay + self.constant > 1 + 1e-9:
            raise InvalidInput("warmup, decay and constant together exceed the stage")
        return self

    def factor(self, step: int, steps: int) -> float:
        """Returns the rate of a step of the stage, from 0, as a factor on `lr`."""
        assert 0 <= step < steps, "a step of the training"
        rising = round(self.warmup * steps)
        resting = round(self.constant * steps)
        falling = min(round(self.decay * steps), steps - resting)
        fallen = step + 1 - (steps - resting - falling)
        if fallen > falling:
            return self.peak * self.final
        if fallen > 0:
            return self.peak * (self.final + (1 - self.final) * self._remaining(fallen / falling))
        return self.peak * ((step + 1) / rising if step < rising else 1.0)

    def _remaining(self, done: float) -> float:
        """Returns the remaining share of the fall after the share `done` of the decay: 1 at 0, 0 at 1."""
        match self.shape:
            case "linear":
                return 1 - done
            case "cosine":
                return (1 + math.cos(math.pi * done)) / 2
            case "sqrt":
                return 1 - math.sqrt(done)
            case "exponential":
                # From 1 to `final`; no exponential reaches 0, so 0 is replaced by a thousandth.
                end = max(self.final, 1e-3)
                return (end**done - end) / (1 - end) if end < 1 else 0.0


class StageConfig(StrictKeys):
    """A stage of the pre-training: sequences of one length."""

    name: str = Field(min_length=1)
    length: int = Field(ge=2, description="tokens of a sequence")
    share: float = Field(gt=0, le=1, description="of all tokens")
    schedule: Schedule = Schedule()
    corpus: tuple[str, ...] = Field(
        (), description="files and folders, relative ones from the file's folder; none: those of --corpus"
    )


class Fim(StrictKeys):
    """Fill-in-the-middle on documents whose file name ends in one of `suffixes`."""

    share: Share = Field(0.5, description="of those documents")
    suffixes: tuple[str, ...] = (".c", ".cc", ".cpp", ".go", ".h", ".java", ".js", ".py", ".rs", ".sh", ".sql", ".ts")


class Distillation(StrictKeys):
    """Teacher's term of the loss. The report gives `k`, but neither weight nor temperature."""

    weight: float = Field(0.5, gt=0, le=1, description="of L_DTK; 1 - weight is that of cross-entropy")
    temperature: float = Field(2.0, ge=1)
    k: int = Field(32, ge=1)


class _Common(StrictKeys):
    weight_decay: float = Field(0.1, ge=0, description="on matrices")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    balance_rate: float = Field(1e-3, ge=0, description="step of the experts' bias: DeepSeek-V3's")
    distillation: Distillation = Distillation()
    fim: Fim | None = Field(None, description="{} for the report's; null: none")
    held_out: float = Field(HELD_OUT, gt=0, lt=0.5, description="share of each source's bytes that is never trained on")
    eval_bytes: int = Field(1 << 20, ge=1024, description="most held-out bytes scored per source")
    seed: int = Field(0, ge=0)


class Settings(_Common):
    """Content of a settings file. Missing values are completed from layout and tokens."""

    tokens: int | None = Field(None, ge=1)
    lr: float | None = Field(None, gt=0)
    batch_tokens: int | None = Field(None, ge=1, description="tokens per step")
    stages: tuple[StageConfig, ...] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Settings:
        if self.stages is None:
            return self
        if abs(sum(stage.share for stage in self.stages) - 1) > 1e-3:
            raise InvalidInput(f"shares add up to {sum(stage.share for stage in self.stages):g}, not 1", where="stages")
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise InvalidInput("two stages have one name", where="stages")
        return self


class Recipe(_Common):
    """A recipe in which every value is set."""

    tokens: int
    lr: float
    batch_tokens: int
    stages: tuple[StageConfig, ...]

    def sequences(self, stage: StageConfig) -> int:
        """Returns the sequences of a step."""
        return max(1, round(self.batch_tokens / stage.length))

    def steps(self, stage: StageConfig) -> int:
        """Returns the steps of a stage."""
        return max(1, round(stage.share * self.tokens / (self.sequences(stage) * stage.length)))


def read_settings(path: Path) -> Settings:
    """Reads settings from a YAML file; its relative paths are resolved from its folder.

    Raises:
        InvalidInput: one line for each problem, as `file:line: message`.
    """
    settings = read_model(path, Settings)
    if settings.stages is None:
        return settings
    stages = [
        stage.model_copy(update={"corpus": tuple(str(path.parent / entry) for entry in stage.corpus)})
        for stage in settings.stages
    ]
    return settings.model_copy(update={"stages": tuple(stages)})


def complete(
    settings: Settings, layout: Layout, *, only: Part | None = None, prior_tokens: int = 0
) -> tuple[Recipe, tuple[BuildDecision, ...]]:
    """Returns the complete recipe for `layout`, and a decision for each value that the settings leave out.

    Args:
        settings: of the training.
        layout: of the model.
        only: which of the default stages are wanted, where the settings name none; None: both.
        prior_tokens: of the trainings before the stage `long`; 0: unknown, taken to be as many as of a whole training.
    """
    reasons, tokens = [], settings.tokens
    before = (prior_tokens or _tokens_of(layout)) if only == "long" else 0
    if tokens is None and before:
        tokens = max(1, round(before * REPORT_LONG_SHARE / (1 - REPORT_LONG_SHARE)))
        reasons.append(
            BuildDecision(what="tokens", value=f"{tokens:,}", reason=f"the report's share, after {before:,}")
        )
    if tokens is None:
        tokens = _tokens_of(layout)
        reasons.append(
            BuildDecision(
                what="tokens",
                value=f"{tokens:,}",
                reason="20 per active weight (Hoffmann et al. 2022); the report's 11T take many machines",
            )
        )
    # 6 FLOPs per weight and token; the output head works on every token, the lookup of a row on none.
    compute = 6.0 * (layout.params.active - (0 if layout.tied else layout.d_model * layout.vocab)) * (before + tokens)
    lr, batch = settings.lr, settings.batch_tokens
    if lr is None:
        lr = float(f"{0.3118 * compute**-0.125:.3g}")
        reasons.append(BuildDecision(what="lr", value=f"{lr:g}", reason=_BY_COMPUTE))
    if batch is None:
        batch = max(1, min(round(0.2920 * compute**0.3271), tokens))
        reasons.append(BuildDecision(what="batch_tokens", value=f"{batch:,}", reason=_BY_COMPUTE))
    stages = settings.stages
    if stages is None:
        stages, reason = _stages(batch)
        if only is not None:
            # A stage of its own begins without the optimiser's averages.
            schedule = Schedule(warmup=0.01, decay=0.99 if only == "long" else 0.0)
            stages = (stages[only == "long"].model_copy(update={"share": 1.0, "schedule": schedule}),)
        lengths = " and ".join(f"{stage.length:,}" for stage in stages)
        reasons.append(BuildDecision(what="stages", value=f"{lengths} tokens a sequence", reason=reason))
    common = settings.model_dump(include=set(_Common.model_fields))
    return Recipe(**common, tokens=tokens, lr=lr, batch_tokens=batch, stages=stages), tuple(reasons)


def _tokens_of(layout: Layout) -> int:
    return 20 * layout.params.active


def _stages(batch_tokens: int) -> tuple[tuple[StageConfig, ...], str]:
    """Returns the report's two stages, shortened until a batch holds enough sequences."""
    short, long = REPORT_LENGTHS
    reason = "the report's"
    if batch_tokens < _LEAST_SEQUENCES * short:
        fitting = 1 << (max(_SHORTEST, batch_tokens // _LEAST_SEQUENCES).bit_length() - 1)
        short, long = fitting, long // short * fitting
        reason = (
            f"the report's 4,096 and 32,768 would leave fewer than {_LEAST_SEQUENCES} sequences in a batch of"
            f" {batch_tokens:,} tokens; their ratio is kept"
        )
    return (
        StageConfig(name="pretrain", length=short, share=1 - REPORT_LONG_SHARE, schedule=Schedule(warmup=0.01)),
        StageConfig(name="long", length=long, share=REPORT_LONG_SHARE, schedule=Schedule(decay=1.0)),
    ), reason
