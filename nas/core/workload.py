"""Workloads: the requests that are measured on a device."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from nas.core.strict import Strict
from nas.core.tower import Media, Tower

MAX_CONTEXT = 1 << 20
"""Tokens of a prompt."""
MAX_GEN = 1 << 14
"""Decoded tokens: a runner prints four numbers for each, which may have 15 digits within `nas.core.plan.MAX_OUTPUT`."""
MAX_MEDIA = 16
"""Images or sounds."""
MAX_SIDE = 4096
"""Pixels of a side of an image."""


class Workload(Strict):
    """One batch-1 request: a prompt of `prompt` tokens, then `gen` decoded tokens.

    With `gen` 0 the prompt is a text of which each token gets a vector and no logits, as in retrieval.
    Images or sounds come first, which a layout's tower turns into tokens, an image as one frame; `prompt` is the text.
    Field names follow llama.cpp's own. `context` is the allocated window; `affinity` the cores to pin to
    (empty: not pinned).
    """

    prompt: int = Field(512, ge=16, le=MAX_CONTEXT, description="prompt tokens")
    gen: int = Field(64, ge=0, le=MAX_GEN, description="decoded tokens per repetition; 0: the prompt is encoded")
    context: int = Field(
        0, ge=0, le=2 * MAX_CONTEXT, description="allocated context in tokens; 0: prompt + gen, rounded up to 256"
    )
    n_batch: int = Field(2048, ge=1, le=MAX_CONTEXT, description="most tokens handed to the runtime at once")
    n_ubatch: int = Field(512, ge=1, le=MAX_CONTEXT, description="most tokens computed at once")
    kv_type: Literal["f16", "q8_0"] = Field("f16", description="number format of the key-value cache")
    flash_attn: bool = Field(True, description="fused attention")
    mmap: bool = Field(False, description="map the model file instead of reading it; its pages then count as memory")
    repack: bool = Field(True, description="rearrange weights for the processor while loading")
    threads: int = Field(1, ge=1, le=1024, description="compute threads")
    affinity: tuple[int, ...] = Field((), description="cores to pin to; none: not pinned")
    images: int = Field(0, ge=0, le=MAX_MEDIA, description="images in front of the prompt, under `task: vision`")
    image_height: int = Field(512, ge=1, le=MAX_SIDE, description="of each image, in pixels")
    image_width: int = Field(512, ge=1, le=MAX_SIDE, description="of each image, in pixels")
    sounds: int = Field(0, ge=0, le=MAX_MEDIA, description="sounds in front of the prompt, under `task: audio`")
    seconds: float = Field(8.0, ge=0.1, le=120, description="of each sound")

    @model_validator(mode="after")
    def _window_holds_request(self) -> Workload:
        if self.context and self.context < self.prompt + self.gen:
            raise ValueError(f"context {self.context} is shorter than prompt + gen = {self.prompt + self.gen}")
        if self.images and self.sounds:
            raise ValueError("a request has images or sounds, not both")
        if self.media and not self.gen:
            raise ValueError(f"a request with {self.media} decodes: give gen of 1 or more")
        return self

    @property
    def window(self) -> int:
        """Tokens of context to allocate for text; a runner adds those of images or sounds."""
        return self.context or -(-(self.prompt + self.gen) // 256) * 256

    @property
    def encodes(self) -> bool:
        """Whether it encodes a text."""
        return self.gen == 0

    def key(self) -> dict[str, Any]:
        """Returns all fields, for result keys."""
        unused = {name for media, names in MEDIA_FIELDS.items() if media != self.media for name in names}
        return self.model_dump(mode="json", exclude=unused) | {"context": self.window}

    @property
    def media(self) -> Media | None:
        """What comes in front of the prompt."""
        return "images" if self.images else "sounds" if self.sounds else None

    @property
    def count(self) -> int:
        """Images or sounds."""
        return self.images + self.sounds

    @property
    def size(self) -> tuple[float, ...]:
        """Of each: height and width of an image in pixels, seconds of a sound."""
        return (self.image_height, self.image_width) if self.images else (self.seconds,)

    def described_media(self) -> str:
        """Returns what comes in front of the prompt, in words."""
        if self.images:
            return f"{self.images} image{'s' * (self.images > 1)} of {self.image_width} x {self.image_height} pixels"
        return f"{self.sounds} sound{'s' * (self.sounds > 1)} of {self.seconds:g} s"

    def tower_tokens(self, tower: Tower) -> int:
        """Returns the tokens of all images or sounds behind a tower."""
        return self.count * tower.tokens_of(*self.size) if self.media == tower.media else 0

    def tower_flops(self, tower: Tower, d_model: int) -> float:
        """Returns the tower's multiply-adds x 2 for all images or sounds."""
        return self.count * tower.flops(d_model, *self.size) if self.media == tower.media else 0.0


MEDIA_FIELDS: dict[Media, tuple[str, ...]] = {
    "images": ("images", "image_height", "image_width"),
    "sounds": ("sounds", "seconds"),
}
"""Fields of a workload with these."""
