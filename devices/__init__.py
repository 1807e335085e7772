"""Devices: how to reach one (`transports`), what it is like (`probes`, `describe`) and who runs plans on it (`agent`).

After labgrid's split: data is `nas.core.device`, behaviour is here, and what behaviour needs of a machine is one
protocol, `transports.base.Transport`.
"""
