"""How many trainings a cluster runs at once, and what each of them asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nas.core.errors import InvalidInput


@dataclass(frozen=True)
class Node:
    """What a node of a cluster has.

    Args:
        cpus: CPU slots.
        gpus: GPUs.
    """

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Request:
    """What a training asks for: one CPU slot and a share of a GPU, or several whole ones.

    Args:
        gpus: 0: it trains on the CPU.
    """

    gpus: float

    @staticmethod
    def of(nodes: Sequence[Node], gpus: float | None) -> Request:
        """What was asked for, or else: where nodes have GPUs, all CPU slots of these share them evenly.

        Raises:
            InvalidInput: neither a share of one GPU nor a number of them.
        """
        if gpus is not None:
            if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
                raise InvalidInput(f"{gpus:g} GPUs: give 0, a share of one, or a whole number", where="--train-gpus")
            return Request(gpus)
        with_gpu = [node for node in nodes if node.gpus > 0]
        slots = sum(node.cpus for node in with_gpu)
        return Request(min(1.0, sum(node.gpus for node in with_gpu) / slots) if slots else 0.0)

    def fits(self, node: Node) -> int:
        """How many trainings the node runs at once."""
        if self.gpus == 0:
            return int(node.cpus)
        return int(min(node.cpus, node.gpus / self.gpus + 1e-9))

    def slots(self, nodes: Sequence[Node]) -> int:
        """How many all nodes run at once."""
        return sum(self.fits(node) for node in nodes)
