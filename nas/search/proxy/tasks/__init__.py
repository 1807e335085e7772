"""The quality tasks that come with hilnas, one file each; `nas.core.task.TASKS` names them."""

SUITE_VERSION = 1
"""Part of result keys: increase it when a task gives other batches for the same settings."""
