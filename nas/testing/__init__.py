"""Fakes, and contract tests for blocks, runtimes, transports, tasks and proposers; the product imports none of it."""
