"""Figures of model files on devices: runtimes, devices, agents, the queue of jobs, and the measurement protocol."""
