"""`python -m nas.cli`: the command, without its script."""

from nas.cli.main import main

main()
