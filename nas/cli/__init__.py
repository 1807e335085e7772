"""The `nas` command: one file a command, each imported when it is used."""
