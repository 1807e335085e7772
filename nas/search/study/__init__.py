"""Running one study: orchestrator, stages of a trial, proposals, promotion, stopping, and the event log."""
