"""Chat about images with a model in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nas.train.posttrain.model_source import TorchTalker
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.towers.images import IMAGE, FrameSettings, checked, read_picture, with_images
from nas.train.towers.release import VisionFolder
from nas.train.towers.vision import stacked


class VisionTalker(TorchTalker):
    """A model that answers questions about images.

    Args:
        folder: of the model, see `nas.train.towers.release`.
        images: that the first message is about.
        context: most tokens of a question with its answer.
        tokens: most tokens of a frame; None: as the model was trained.

    Attributes:
        opening: text that stands for the images in front of the first message.
        tokenizer: the model's own.

    Raises:
        InvalidInput: the folder holds no such model, or an image cannot be read.
        Unsupported: no layout says the language model, or the tower is another one.
    """

    def __init__(self, folder: Path, images: Sequence[Path], context: int, tokens: int | None = None) -> None:
        vision = VisionFolder.read(folder).open()
        super().__init__(vision.model.backbone.eval().requires_grad_(False), min(context, vision.context))
        self.tokenizer = FoundTokenizer(vision.tokenizer, folder)
        settings = vision.frames
        if tokens is not None:
            fewest = min(settings.min_image_tokens, tokens)
            changes = {"min_image_tokens": fewest, "max_image_tokens": tokens}
            settings = checked(FrameSettings, settings.model_dump() | changes, "--image-tokens")
        pictures = [read_picture(image) for image in images]
        self.opening = with_images(IMAGE * len(pictures), [picture.cut(settings) for picture in pictures])
        self._vision = vision.model.eval().requires_grad_(False)
        frames = [frame for picture in pictures for frame in picture.frames(settings)]
        self._inputs = stacked(frames, settings.encoder_patch_size)

    def inputs(self, question: Sequence[int]) -> Tensor:
        tokens = super().inputs(question)
        # The images leave the context with the first message.
        seen = self._vision.placeholder in question
        return self._vision.embeddings(tokens, *self._inputs) if seen else tokens
