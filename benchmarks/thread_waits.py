"""Wall time of matrix products on two threads of torch, by how long threads spin for work, beside endless loops.

    python -m benchmarks.thread_waits [--neighbours 0,2,4] [--rounds 5]

`small` are products of a proxy of width 128, `large` those of feed-forwards of a model of width 576. A cell is the
median of fresh processes, one of each setting in turn. `default` is GNU's OpenMP as it is, which spins for some
milliseconds; 1000 is what `nas` sets; 0 never spins. Other builds of torch do not read the variable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

from benchmarks.page import markdown

LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10_000_000): pass
"""
"""An endless loop that ends with the process that started it, however that ended."""
SPINS = {"default": None, "1000": "1000", "0": "0"}
_CHILD = "--child"


def products() -> dict[str, float]:
    """Returns the milliseconds of a pass of each size, the median of nine, in this process."""
    import torch
    from torch.nn.functional import linear, silu

    torch.set_num_threads(2)
    sizes = {"small": (256, 128, 256, 100), "large": (2048, 576, 1536, 8)}
    result = {}
    with torch.no_grad():
        for name, (rows, width, inner, layers) in sizes.items():
            x, up, down = torch.randn(rows, width), torch.randn(inner, width), torch.randn(width, inner)
            times = []
            for _ in range(10):
                began = time.perf_counter()
                for _ in range(layers):
                    x = 0.1 * linear(silu(linear(x, up)), down)
                times.append(1000 * (time.perf_counter() - began))
            result[name] = median(times[1:])
    return result


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Runs so many endless loops beside the context."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOOP]))
            stack.callback(loop.kill)
        yield


def measured(spins: str | None) -> dict[str, float]:
    """Returns the result of `products` in a fresh process."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment |= {} if spins is None else {"GOMP_SPINCOUNT": spins}
    argv = [sys.executable, "-m", "benchmarks.thread_waits", _CHILD]
    result: dict[str, float] = json.loads(subprocess.check_output(argv, env=environment))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", default="0,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(_CHILD, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(products()))
        return
    rows = []
    for count in map(int, options.neighbours.split(",")):
        with neighbours(count):
            rounds = [{name: measured(spins) for name, spins in SPINS.items()} for _ in range(options.rounds)]
        for size in rounds[0]["default"]:
            times = {name: median(times[name][size] for times in rounds) for name in SPINS}
            row = {name: f"{value:.0f} ms" for name, value in times.items()}
            rows.append(
                {
                    "products": size,
                    "endless loops": str(count),
                    **row,
                    "gain": f"{times['default'] / times['1000']:.1f}",
                }
            )
    print(markdown(rows))


if __name__ == "__main__":
    main()
