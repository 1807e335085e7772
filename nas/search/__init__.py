"""One study: proposals, short training of proxies, the orchestrator, and the analysis of its results."""
