"""Workloads: the requests that are measured on a device."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from nas.core.strict import Strict
from nas.core.tower import Tower

MAX_CONTEXT = 1 << 20
"""Tokens of a prompt."""
MAX_GEN = 1 << 14
"""Decoded tokens: a runner prints four numbers for each, which may have 15 digits within `nas.core.plan.MAX_OUTPUT`."""
MAX_IMAGES = 16
MAX_SIDE = 4096
"""Pixels of a side of an image."""


class Workload(Strict):
    """One batch-1 request: a prompt of `prompt` tokens, then `gen` decoded tokens.

    Without the latter, the prompt is a text whose tokens get a vector each, as retrieval needs, and no logits.
    With images, these come first, each as one frame, which a layout's tower turns into tokens; `prompt` is the text.
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
    images: int = Field(0, ge=0, le=MAX_IMAGES, description="images in front of the prompt, under `task: vision`")
    image_height: int = Field(512, ge=1, le=MAX_SIDE, description="of each image, in pixels")
    image_width: int = Field(512, ge=1, le=MAX_SIDE, description="of each image, in pixels")

    @model_validator(mode="after")
    def _window_holds_request(self) -> Workload:
        if self.context and self.context < self.prompt + self.gen:
            raise ValueError(f"context {self.context} is shorter than prompt + gen = {self.prompt + self.gen}")
        if self.images and not self.gen:
            raise ValueError("a request with images decodes: give gen of 1 or more")
        return self

    @property
    def window(self) -> int:
        """Tokens of context to allocate for text; a runner adds those of images."""
        return self.context or -(-(self.prompt + self.gen) // 256) * 256

    @property
    def encodes(self) -> bool:
        """Whether it encodes a text."""
        return self.gen == 0

    def key(self) -> dict[str, Any]:
        """Returns all fields, for result keys."""
        images = {"images", "image_height", "image_width"}
        return self.model_dump(mode="json", exclude=set() if self.images else images) | {"context": self.window}

    def image_tokens(self, tower: Tower) -> int:
        """Returns the tokens of all images behind a tower."""
        return self.images * math.prod(tower.grid(self.image_height, self.image_width))
