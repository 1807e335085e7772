"""Blocks as config.json has them, with every argument: they stand for `nas.core.block.Block` in released folders."""

from typing import Literal, NamedTuple

Norms = Literal["before", "behind", "both"]


class Block:
    def __init__(self, kind, arguments):
        self.kind, self.arguments = kind, arguments

    @staticmethod
    def of(kind, **arguments):
        return Block(kind, arguments)

    def resolve(self, d_model):
        return self

    def get(self, name):
        return self.arguments.get(name)

    def int(self, name):
        return int(self.arguments[name])


class Layer(NamedTuple):
    mixers: tuple[Block, ...]
    ffn: Block | None
