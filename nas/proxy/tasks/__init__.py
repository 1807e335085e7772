"""The quality tasks that come with hilnas, one file each; `nas.core.task.TASKS` names them."""

SUITE_VERSION = 1
"""Enters result keys: raise it whenever a task gives other batches for the same settings."""
