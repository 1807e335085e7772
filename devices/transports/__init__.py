"""Ways to reach a device, by the name in `Device.transport`."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.devices.transports.base import Connect

TRANSPORTS: Registry[Connect] = Registry(
    "transport",
    "nas.transports",
    {
        "adb": "nas.devices.transports.adb:connect",
        "local": "nas.devices.transports.local:connect",
        "ssh": "nas.devices.transports.ssh:connect",
    },
)
