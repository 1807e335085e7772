"""Block kinds: one file per kind with its letter, arguments and arithmetic. No torch here."""
