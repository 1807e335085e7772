"""The coordinator's side of agents: job API, queue, leases, enrolment, and the key that signs runners."""
