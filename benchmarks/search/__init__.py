"""Compares proposers on synthetic problems and on recorded studies: `python -m benchmarks.search`."""

from nas.search.proposers import PROPOSERS

for _name in ("nsga2", "tpe", "gp"):
    PROPOSERS.add(f"optuna-{_name}", f"benchmarks.search.optuna_sampler:{_name}")
