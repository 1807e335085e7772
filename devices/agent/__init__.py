"""The agent: runs measurement jobs of a coordinator on the devices attached to this host.

- `agent` follows the list of attached devices and runs as a process; `session` serves one device
- `connection` connects to a device and identifies it; `registry` keeps all of them registered
- `job` runs one job and renews its lease meanwhile; `run_plan` executes its plans
- `client` speaks HTTP to the coordinator; `trust` holds enrolment and the pinned runner manifest

Deadlines, pauses and intervals are measured on a monotonic clock. Wall-clock time appears only in what people read
(logs, `started_at` of a run), in the age of cached files and in TLS certificate dates.
"""
