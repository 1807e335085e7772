"""`python -m nas.cli` runs `nas`."""

from nas.cli.main import main

main()
