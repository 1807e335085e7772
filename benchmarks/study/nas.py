"""`python -m benchmarks.study.nas` runs `nas` with Optuna's samplers as proposers, to compare with."""

import benchmarks.search  # noqa: F401 - registers them
from nas.cli.main import main

main()
