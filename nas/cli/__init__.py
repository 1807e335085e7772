"""The `nas` command line: one module per command, imported when the command runs."""
