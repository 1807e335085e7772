"""Devices: how to reach one (`transports`), its sensors (`probes`, `describe`), and the agent that runs jobs (`agent`).

As in labgrid, data (`nas.core.device`) is separate from behaviour (here), and behaviour needs one protocol of a
machine: `transports.base.Transport`.
"""
